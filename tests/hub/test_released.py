import argparse
import copy
import os

import pytest
import timm
import torch
from safetensors.torch import save_file

import timm_rep
from tests.helpers import relative

NAMES = ['repa_vit_theta50', 'repa_vit_theta75', 'repa_vit_theta100', 'repa_vit_linear_schedule']
TINY = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


def released(model):
    """A model's state dict under the released names."""
    return {
        key.replace('.norm1.', '.attn.norm.') if key.split('.')[2:3] == ['norm1'] else key: value.clone()
        for key, value in model.state_dict().items()
    }


def tiny(**kwargs):
    return timm.create_model('repa_deit_tiny', **{**TINY, **kwargs}).eval()


@pytest.mark.parametrize('name', NAMES)
@torch.no_grad()
def test_recorded_outputs(recorded, name):
    tensors, config = recorded(name)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    args = {k: v for k, v in config.items() if not k.startswith('parameters')}
    model = timm.create_model('repa_deit_tiny', **args)
    assert timm_rep.load_released(model, weights) is model
    model.eval()
    assert relative(model(tensors['input']), tensors['output']) < 1e-5
    if 'parameters' in config:
        assert sum(p.numel() for p in model.parameters()) == config['parameters']
    model.reparameterize()
    assert relative(model(tensors['input']), tensors['output_reparameterized']) < 1e-5
    parameters = sum(p.numel() for p in model.parameters())
    if config.get('idle_schedule') == 'linear':
        # where all channels are active the released code keeps the identity as a matrix
        parameters += config['embed_dim'] ** 2
    assert parameters == config['parameters_reparameterized']


@pytest.mark.parametrize('form', ['safetensors', 'pth', 'training run', 'path object', 'wrapped dict', 'ddp'])
def test_sources(tmp_path, form):
    source = tiny()
    weights = released(source)
    path = tmp_path / ('model.safetensors' if form == 'safetensors' else 'model.pth')
    given = str(path)
    if form == 'safetensors':
        save_file(weights, path)
    elif form == 'training run':  # as the released main.py saves it; the average is not what its authors evaluate
        average = {k: torch.zeros_like(v) for k, v in weights.items()}
        torch.save({'model': weights, 'model_ema': average, 'epoch': 3, 'args': argparse.Namespace(lr=.1)}, path)
    elif form == 'wrapped dict':
        given = {'model': weights, 'epoch': 3}
    elif form == 'ddp':
        given = {f'module.{k}': v for k, v in weights.items()}
    else:
        torch.save(weights, path)
        given = path
    model = timm_rep.load_released(tiny(), given)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), source(x))


def test_misfits_are_all_named_and_nothing_is_loaded():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    weights = released(tiny(num_classes=7))
    del weights['blocks.1.attn.norm.weight'], weights['cls_token']
    weights['blocks.9.mlp.fc1.weight'] = torch.zeros(2, 3)
    with pytest.raises(RuntimeError) as e:
        timm_rep.load_released(model, weights)
    message = str(e.value)
    for line in (
            'missing: blocks.1.attn.norm.weight (24,)',
            'missing: cls_token (1, 1, 24)',
            'unexpected: blocks.9.mlp.fc1.weight (2, 3)',
            'misshapen: head.weight is (7, 24), the model has (5, 24)',
            'misshapen: head.bias is (7,), the model has (5,)',
            'nothing was loaded',
    ):
        assert line in message
    assert message.count('\n') == 5
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_layouts_of_this_package_are_not_the_released_one():
    with pytest.raises(RuntimeError, match=r"own key layout: use the model's load_state_dict"):
        timm_rep.load_released(tiny(), tiny().state_dict())
    for ratio in (0., .5, 1.):
        with pytest.raises(RuntimeError, match=r'deploy structure.*reparameterized=True'):
            timm_rep.load_released(tiny(), tiny(idle_ratio=ratio, reparameterized=True).state_dict())


def test_damaged_files(tmp_path):
    for name in ('model.pth', 'model.safetensors'):
        path = tmp_path / name
        path.write_bytes(b'neither')
        with pytest.raises(RuntimeError, match=rf'Cannot read .*{name}'):
            timm_rep.load_released(tiny(), path)


def test_model_on_meta():
    source = tiny()
    model = timm_rep.load_released(tiny(device='meta'), released(source)).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), source(x))


def test_refusals(tmp_path):
    with pytest.raises(RuntimeError, match=r'deploy structure.*reparameterize'):
        timm_rep.load_released(tiny(reparameterized=True), released(tiny()))
    with pytest.raises(TypeError, match=r'ResNet has no released layout.*RePaVisionTransformer'):
        timm_rep.load_released(timm.create_model('resnet18'), {})
    with pytest.raises(FileNotFoundError, match='nowhere'):
        timm_rep.load_released(tiny(), tmp_path / 'nowhere.pth')
    for name, content in ('nested.pth', {'inner': {'x': torch.zeros(1)}}), ('other.pth', {'x': torch.zeros(1)}):
        torch.save(content, tmp_path / name)
        with pytest.raises((TypeError, RuntimeError), match=name):
            timm_rep.load_released(tiny(), tmp_path / name)
    with pytest.raises(TypeError, match='empty'):
        timm_rep.load_released(tiny(), {})
    with pytest.raises(TypeError, match="'epoch'"):
        timm_rep.load_released(tiny(), {**released(tiny()), 'epoch': 3})


class _Payload:
    def __reduce__(self):
        return os.mkdir, ('executed',)


def test_pickled_code_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'model': released(tiny()), 'args': _Payload()}, 'evil.pth')
    with pytest.raises(Exception, match='weights_only'):
        timm_rep.load_released(tiny(), 'evil.pth')
    assert not (tmp_path / 'executed').exists()
