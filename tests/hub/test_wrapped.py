"""Models in a wrapper that writes and reads config.json as transformers' TimmWrapper does, without that package."""
import json
import sys
import types

import pytest
import timm
import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file

import timm_rep
from tests.helpers import needs_recorded_args, relative
from tests.hub.published import REPA, REPOPT, publish, trained
from timm_rep.layers import csla_layers
from timm_rep.optim import RepSGD
from timm_rep.scales import Scales


@pytest.fixture
def wrapper(monkeypatch):
    """A class like transformers' wrapper, under the name of its module."""
    class Base(nn.Module):
        def __init__(self, folder, repository=None, commit=None):
            super().__init__()
            config = json.loads((folder / 'config.json').read_text())
            self.config = types.SimpleNamespace(
                _name_or_path=repository or str(folder), _commit_hash=commit, **config)
            # a TypeError if num_classes is in model_args too
            self.timm_model = timm.create_model(
                config['architecture'], pretrained=False, num_classes=config['num_classes'], **config['model_args'])
            self.post_init()

        def post_init(self):
            pass

        def _adjust_missing_and_unexpected_keys(self, loading_info):
            pass

        def save_pretrained(self, folder):
            folder.mkdir()
            config = {k: v for k, v in vars(self.config).items() if not k.startswith('_')}
            (folder / 'config.json').write_text(json.dumps({**config, 'transformers_version': '5.0'}))
            save_file(self.timm_model.state_dict(), folder / 'model.safetensors')

    class TimmWrapperPreTrainedModel(Base):
        @classmethod
        def from_pretrained(cls, folder, **kwargs):
            """Load as transformers does, which neither calls load_state_dict() nor refuses other keys."""
            model = cls(folder, **kwargs)
            own, found = model.timm_model.state_dict(), load_file(folder / 'model.safetensors')
            with torch.no_grad():
                for name in own.keys() & found.keys():
                    own[name].copy_(found[name])
            missing, unexpected = (
                {f'timm_model.{name}' for name in names} for names in (own.keys() - found, found.keys() - own))
            model._adjust_missing_and_unexpected_keys(
                types.SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected))
            return model.eval()

    name = 'transformers.models.timm_wrapper.modeling_timm_wrapper'
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(TimmWrapperPreTrainedModel=TimmWrapperPreTrainedModel))
    return TimmWrapperPreTrainedModel


def convert(model):
    timm_rep.convert_to_repa(model, calibration=[torch.randn(8, 3, 32, 32)])


@needs_recorded_args
@pytest.mark.parametrize('change', [lambda model: None, lambda model: model.reparameterize()])
@pytest.mark.parametrize('kind', [REPA, REPOPT])
@torch.no_grad()
def test_saved_as_it_is(wrapper, tmp_path, kind, change):
    """Loaded by the wrapper and by timm, folded or not."""
    publish(tmp_path / f'{kind[0]}.mine', kind)
    model = wrapper.from_pretrained(tmp_path / f'{kind[0]}.mine')
    change(model.timm_model)
    model.save_pretrained(tmp_path / 'saved')
    again = wrapper.from_pretrained(tmp_path / 'saved').timm_model
    x = torch.randn(2, 3, 32, 32)
    for found in again, timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=True).eval():
        assert relative(found(x), model.timm_model(x)) < 1e-6
        assert found.reparameterized == model.timm_model.reparameterized


@needs_recorded_args
@pytest.mark.parametrize('folded', [True, False])
@pytest.mark.parametrize('kind', [REPA, REPOPT])
def test_a_config_of_another_structure(wrapper, tmp_path, kind, folded):
    """Folded weights whose config.json does not say so, and the reverse, are refused; another classifier is not."""
    publish(tmp_path / f'{kind[0]}.mine', kind)
    model = wrapper.from_pretrained(tmp_path / f'{kind[0]}.mine')
    if folded:
        model.timm_model.reparameterize()
    model.save_pretrained(tmp_path / 'saved')
    path = tmp_path / 'saved' / 'model.safetensors'
    save_file({k: v for k, v in load_file(path).items() if not k.startswith('head.')}, path)
    wrapper.from_pretrained(tmp_path / 'saved')
    path = tmp_path / 'saved' / 'config.json'
    config = json.loads(path.read_text())
    config['model_args']['reparameterized'] = not folded
    path.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match='reparameterized=True'):
        wrapper.from_pretrained(tmp_path / 'saved')


@needs_recorded_args
@torch.no_grad()
def test_converted_in_the_wrapper(wrapper, tmp_path):
    args = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    timm_rep.export(timm.create_model('vit_tiny_patch16_224', **args), tmp_path / 'vit')
    model = wrapper.from_pretrained(tmp_path / 'vit')
    convert(model.timm_model)
    model.save_pretrained(tmp_path / 'saved')
    x = torch.randn(2, 3, 32, 32)
    assert relative(wrapper.from_pretrained(tmp_path / 'saved').timm_model(x), model.timm_model(x)) < 1e-6


@needs_recorded_args
def test_every_export_loads(wrapper, tmp_path):
    """num_classes is given once."""
    for i, name in enumerate(('repa_deit_tiny', 'vit_tiny_patch16_224')):
        model = timm.create_model(name, num_classes=5, **REPA[1])
        for j, change in enumerate((lambda model: None, convert)[:i + 1]):
            change(model)
            timm_rep.export(model, tmp_path / f'{i}{j}')
            assert 'num_classes' not in json.loads((tmp_path / f'{i}{j}' / 'config.json').read_text())['model_args']
            assert wrapper.from_pretrained(tmp_path / f'{i}{j}').timm_model.num_classes == 5


@needs_recorded_args
def test_scales_of_the_folder(wrapper, tmp_path):
    """The scales are attached; without the file RepSGD refuses the model instead of training with other scales."""
    folder = tmp_path / 'repopt_vgg_a0.mine'
    publish(folder, REPOPT)
    expected = timm.create_model(REPOPT[0], **REPOPT[1], scales=Scales.load(folder / 'scales.safetensors'))
    model = wrapper.from_pretrained(folder)
    for name, layer in csla_layers(expected).items():
        found = csla_layers(model.timm_model)[name].grad_mult
        assert torch.equal(found.dense('squared'), layer.grad_mult.dense('squared'))
    (folder / 'scales.safetensors').unlink()
    with pytest.raises(ValueError, match='GradMult'):
        RepSGD(wrapper.from_pretrained(folder).parameters(), lr=.1)
    model.save_pretrained(tmp_path / 'saved')
    saved = timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=True)
    with pytest.raises(ValueError, match='GradMult'):
        RepSGD(saved.parameters(), lr=.1)


def test_scales_of_a_repository(wrapper, hub, tmp_path):
    """The scales are from the same commit as the model."""
    folder, repository = tmp_path / 'repopt_vgg_a0.mine', 'we/repopt_vgg_a0.mine'
    _, files = publish(folder, REPOPT)
    commit = hub.add(repository, files)
    expected = Scales.load(folder / 'scales.safetensors')
    Scales.ones(trained(*REPOPT)).save(tmp_path / 'ones.safetensors')
    hub.add(repository, {'scales.safetensors': (tmp_path / 'ones.safetensors').read_bytes()})
    (folder / 'scales.safetensors').unlink()
    model = wrapper.from_pretrained(folder, repository=repository, commit=commit)
    expected = timm.create_model(REPOPT[0], **REPOPT[1], scales=expected)
    for name, layer in csla_layers(expected).items():
        found = csla_layers(model.timm_model)[name].grad_mult
        assert torch.equal(found.dense('squared'), layer.grad_mult.dense('squared'))


def test_given_scales_override_the_scales_of_the_folder(tmp_path, monkeypatch):
    publish(tmp_path / 'repopt_vgg_a0.mine', REPOPT)
    monkeypatch.setenv('TIMM_REP_HUB', str(tmp_path))
    given = Scales.ones(trained(*REPOPT))
    for name in 'repopt_vgg_a0.mine', f'local-dir:{tmp_path / "repopt_vgg_a0.mine"}':
        model = timm.create_model(name, pretrained=True, scales=given)
        expected = timm.create_model(REPOPT[0], **REPOPT[1], scales=given)
        for layer, other in zip(csla_layers(model).values(), csla_layers(expected).values()):
            assert torch.equal(layer.grad_mult.dense('squared'), other.grad_mult.dense('squared'))
        assert all(layer.grad_mult is None for layer in csla_layers(
            timm.create_model(name, pretrained=True, scales=False)).values())
