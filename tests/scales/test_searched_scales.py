"""The searched scales that come with the package."""
import logging
import re
from pathlib import Path

import pytest
import timm
import torch

import timm_rep
import timm_rep.scales.packaged as packaged
from timm_rep.layers import csla_layers
from timm_rep.scales import Scales, packaged_scales

CARD = Path(packaged.__file__).with_name('README.md')


def multipliers(model):
    """What the GradMults are made of, by layer."""
    return {
        name: (layer.csla.branches, {branch: scale.tolist() for branch, scale in layer.grad_mult.scales.items()})
        for name, layer in csla_layers(model).items()
    }


def create(name, **kwargs):
    """GradMults are on the CPU even where the weights have no data."""
    return timm.create_model(name, **{'reinit': False, 'device': 'meta', **kwargs})


@pytest.mark.parametrize('name', packaged_scales())
class TestEach:
    def test_was_searched(self, name):
        """The channels, which start alike, have come apart, and the file says where it is from.

        They need not in the last stage of RepOpt-GhostNet: on images of 32 x 32 its maps are 1 x 1, a depthwise
        convolution is a number for each channel there, and the BatchNorm behind it undoes any.
        """
        scales = Scales.load(name)
        start = Scales.from_model(timm.create_model(name, structure='search', scales='init'))
        assert list(scales) == list(start)
        for layer, branches in scales.items():
            assert list(branches) == list(start[layer])
            one_number = 'ghost' in name and (layer.startswith('blocks.8.') or 'blocks.7.0.ghost2' in layer)
            assert one_number or all(scale.std() > 1e-3 for scale in branches.values())
        assert scales.metadata.keys() >= {'model', 'dataset', 'epochs', 'batch_size', 'date', 'timm_rep', 'accuracy'}
        assert scales.metadata['model'] == name
        assert float(scales.metadata['accuracy']) > 50

    def test_is_the_default(self, name):
        default = create(name)
        assert multipliers(default) == multipliers(create(name, scales=Scales.load(name)))
        assert multipliers(default) == multipliers(create(name, scales=name, num_classes=7))
        assert multipliers(default) != multipliers(create(name, scales='init'))
        csla = Scales.from_model(create(name, structure='csla', device='cpu'))
        assert all(torch.equal(csla[n][b], Scales.load(name)[n][b]) for n in csla for b in csla[n] if b != 'identity')

    def test_is_not_where_a_search_starts(self, name):
        model = timm.create_model(name, structure='search')
        assert Scales.from_model(model) == Scales.from_model(timm.create_model(name, structure='search', scales='init'))

    def test_survives_the_config(self, name, tmp_path):
        pytest.importorskip('timm.models._input', reason='timm records the arguments of a model since 1.0.31')
        from timm.models import save_for_hf

        save_for_hf(create(name, num_classes=3, device='cpu'), tmp_path)
        again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
        assert multipliers(again) == multipliers(create(name))

    def test_is_on_the_card(self, name):
        metadata = Scales.load(name).metadata
        row = next(line for line in CARD.read_text().splitlines() if line.startswith(f'| `{name}` |'))
        for key in ('dataset', 'epochs', 'batch_size', 'accuracy', 'date'):
            assert f' {metadata[key]}' in row


def test_the_card_names_all_of_them_and_no_other():
    names = re.findall(r'^\| `(\w+)` \|', CARD.read_text(), re.MULTILINE)
    assert names == packaged_scales() != []


@pytest.mark.parametrize('kwargs', [
    dict(depths=(1, 2, 1, 1)), dict(widths=(8, 8, 8, 8)), dict(stem_width=8), dict(strides=(2, 2, 1, 2, 1)),
    dict(act_layer='silu'), dict(attn_layer='se'),
], ids=str)
def test_scales_are_specific_to_the_architecture(kwargs):
    """What changes it has no searched scales (table 6), even where they would fit."""
    args = dict(depths=(1, 2, 1, 1)) if 'widths' in kwargs else {}
    changed = create('repopt_vgg_a0', **args, **kwargs)
    assert multipliers(changed) == multipliers(create('repopt_vgg_a0', scales='init', **args, **kwargs))


def test_the_architecture_said_again_is_the_same():
    default = create('repopt_vgg_a0', strides=[2, 2, 2, 2, 2], depths=[2, 4, 14, 1])
    assert multipliers(default) == multipliers(create('repopt_vgg_a0', scales='repopt_vgg_a0'))
    dense = create('repopt_vgg_a0', output_stride=16)  # the same weights, dilated
    assert multipliers(dense) == multipliers(default)


def test_models_without_searched_scales_say_so(caplog):
    name = next(m for m in timm.list_models('repopt_[vg]*') if m not in packaged_scales())
    with caplog.at_level(logging.INFO, 'timm_rep'):
        model = create(name)
    assert [message for message in caplog.messages if name in message and 'init' in message]
    assert multipliers(model) == multipliers(create(name, scales='init'))
    message = f"No scales at '{name}'.*packaged scales .{', '.join(packaged_scales())}"
    for load in (Scales.load, lambda scales: create(name, scales=scales)):
        with pytest.raises(FileNotFoundError, match=message):
            load(name)


def test_in_the_public_api():
    assert isinstance(timm_rep.Scales.load(packaged_scales()[0]), Scales)
