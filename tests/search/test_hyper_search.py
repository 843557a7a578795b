import pytest
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

import timm_rep
from timm_rep.layers import csla_layers
from timm_rep.scales import Scales
from timm_rep.search import parameter_groups

TINY = dict(depths=(1, 2, 1, 1), widths=(8, 8, 16, 16), stem_width=8, num_classes=4, strides=(1, 2, 2, 2, 1))


def dataset(n=48):
    g = torch.Generator().manual_seed(0)
    targets = torch.arange(n) % 4
    return TensorDataset(torch.randn(n, 3, 16, 16, generator=g) + targets[:, None, None, None], targets)


def loader(shuffle=True):
    return DataLoader(dataset(), batch_size=16, shuffle=shuffle)


def search(**kwargs):
    return timm_rep.hyper_search(
        'repopt_vgg_a0', loader(), **{**TINY, **dict(epochs=4, warmup_epochs=1, progress=False), **kwargs})


class Killed(Exception):
    pass


class KilledLoader:
    """A loader that is interrupted in its nth batch."""

    def __init__(self, batches):
        self.left = batches
        self.loader = loader()

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            if self.left == 0:
                raise Killed
            self.left -= 1
            yield batch


def test_finds_scales_that_a_model_takes():
    scales = search(metadata={'dataset': 'noise'}, val_loader=loader(shuffle=False))
    model = timm.create_model('repopt_vgg_a0', **TINY)
    initial = Scales.initial(model)
    assert scales.keys() == initial.keys()
    for name, branches in initial.items():
        for branch, scale in branches.items():
            found = scales[name][branch]
            assert not torch.equal(found, scale)
            assert found.std() > 0
    assert 'identity' in scales['stages.1.1.conv']
    assert (scales.metadata['model'], scales.metadata['epochs'], scales.metadata['dataset']) == (
        'repopt_vgg_a0', '4', 'noise')
    assert float(scales.metadata['accuracy']) > 25
    timm_rep.attach_grad_mults(model, scales)


@pytest.mark.parametrize('batches,every', [(0, 1), (2, 1), (3, 1), (7, 1), (11, 1), (5, 2), (8, 2), (11, 3)])
def test_resumed_after_a_kill_is_the_uninterrupted_search(tmp_path, batches, every):
    straight = search()
    path = tmp_path / 'new folder' / 'search.pth'
    args = dict(
        TINY, epochs=4, warmup_epochs=1, progress=False, checkpoint=path, checkpoint_epochs=every, resume=True)
    with pytest.raises(Killed):
        timm_rep.hyper_search('repopt_vgg_a0', KilledLoader(batches), **args)
    resumed = timm_rep.hyper_search('repopt_vgg_a0', loader(), **args)
    assert resumed == straight
    assert resumed.history == straight.history
    assert [p.name for p in path.parent.iterdir()] == ['search.pth']
    # and once more, from the end
    assert timm_rep.hyper_search('repopt_vgg_a0', KilledLoader(0), **args) == straight


def test_seed_matters():
    assert search(seed=1) != search(seed=2)


def test_a_model_of_your_own_is_trained_in_place():
    model = timm.create_model('repopt_vgg_a0', structure='search', scales='ones', **TINY)
    scales = timm_rep.hyper_search(model, loader(), epochs=1, warmup_epochs=0, progress=False)
    assert scales == Scales.from_model(model)


def test_weight_decay_is_for_kernels_and_identity_scales():
    model = timm.create_model('repopt_vgg_a0', structure='search', **TINY)
    decayed, others = parameter_groups(model, .1)
    assert (decayed['weight_decay'], others['weight_decay']) == (.1, 0.)
    names = {id(p): n for n, p in model.named_parameters()}
    expected = {n for n in names.values() if '.weights.' in n} | {'head.fc.weight'}
    assert {names[id(p)] for p in decayed['params']} == expected
    assert {names[id(p)] for p in others['params']} == set(names.values()) - expected
    assert any('.weights.identity' in n for n in expected)
    assert not any('.scales.' in n for n in expected)


def test_refused_before_anything_is_trained(tmp_path):
    target = timm.create_model('repopt_vgg_a0', **TINY)
    for model in (target, timm.create_model('repopt_vgg_a0', structure='csla', **TINY)):
        with pytest.raises(ValueError, match="structure='search'"):
            timm_rep.hyper_search(model, KilledLoader(0), epochs=2, warmup_epochs=0)
    for kwargs in (dict(epochs=0, warmup_epochs=0), dict(epochs=3, warmup_epochs=3)):
        with pytest.raises(ValueError, match='warmup_epochs is less than epochs'):
            search(**kwargs)
    with pytest.raises(ValueError, match='checkpoint_epochs is at least 1, got 0'):
        search(checkpoint_epochs=0)
    (tmp_path / 'file').write_text('old')
    with pytest.raises(OSError, match='cannot write to the output folder'):
        search(checkpoint=tmp_path / 'file' / 'search.pth')
    search(checkpoint=tmp_path / 'search.pth', epochs=1, warmup_epochs=0)
    with pytest.raises(ValueError, match=r'checkpoint of another search: epochs is 1 there and 4 here'):
        search(checkpoint=tmp_path / 'search.pth', resume=True)
    same = dict(checkpoint=tmp_path / 'search.pth', epochs=1, warmup_epochs=0, resume=True)
    search(**same)
    for change, what in [
        (dict(amp_dtype=torch.bfloat16), 'amp_dtype is None there'), (dict(channels_last=True), 'channels_last'),
        (dict(act_layer='silu'), 'model_args'), (dict(metadata={'dataset': 'other'}), 'metadata'),
    ]:
        with pytest.raises(ValueError, match=f'checkpoint of another search: {what}'):
            search(**same, **change)
    (tmp_path / 'search.pth').write_bytes(b'PK damaged')
    with pytest.raises(ValueError, match=r"search\.pth' cannot be read as the checkpoint of a search"):
        search(**same)
    for loaders, what in ((([],), 'train_loader'), ((loader(), []), 'val_loader')):
        with pytest.raises(ValueError, match=f'{what} has no batches'):
            timm_rep.hyper_search('repopt_vgg_a0', *loaders, **TINY)
    with pytest.raises(ValueError, match=r"cannot be built with structure='search', which RepOpt models can"):
        timm_rep.hyper_search('repopt_ghostnet_050', loader(), strides=(1, 1))


def test_layers_of_the_result_are_those_of_the_target():
    assert search(epochs=1, warmup_epochs=0).keys() == csla_layers(timm.create_model('repopt_vgg_a0', **TINY)).keys()
