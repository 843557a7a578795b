from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import DropPath

import timm_rep
from tests import helpers
from tests.helpers import images, randomize_, relative
from tests.models import contract
from tests.models.contract import RePaContract
from tests.reference import ffn

VARIANTS = [f'repa_mixer_{size}' for size in ('b16', 'b32', 'l16', 'l32', 's16', 's32')]
tiny = partial(helpers.tiny, 'repa_mixer_b16')


@torch.no_grad()
def trained(**kwargs):
    model = randomize_(tiny(**kwargs))
    for block in model.blocks:
        for parameter in block.norm1.parameters():
            parameter.normal_()
    model.head.weight.normal_()  # timm's Mixer has it start at 0
    return model


def test_registered():
    assert timm.list_models(module='repa_mixer') == VARIANTS


@pytest.mark.parametrize('name', VARIANTS)
def test_everything_but_the_norms_and_channel_mlps_is_timms(name):
    model = timm.create_model(name, device='meta')
    vanilla = timm.create_model(f'{name.removeprefix("repa_")}_224', device='meta')

    def rest(m):
        return {
            k: v.shape for k, v in m.state_dict().items()
            if not any(part in k for part in ('.mlp_channels.', '.norm2.', '.norm1.'))}

    assert rest(model) == rest(vanilla)
    assert all(block.norm1.weight.shape == (model.stem.num_patches,) for block in model.blocks)
    assert [b.mlp_channels.fc1.weight.shape for b in model.blocks] == [
        b.mlp_channels.fc1.weight.shape for b in vanilla.blocks]


@torch.no_grad()
def test_block_is_token_mlp_and_ffn():
    """Only the FFN idles: every hidden channel of the token MLP is activated."""
    block = trained().blocks[1].double()
    x = torch.randn(2, 16, 24, dtype=torch.float64)
    y = F.layer_norm(x.transpose(1, 2), (16,), block.norm1.weight, block.norm1.bias)
    mlp = block.mlp_tokens
    y = F.gelu(y @ mlp.fc1.weight.T + mlp.fc1.bias) @ mlp.fc2.weight.T + mlp.fc2.bias
    y = (x + y.transpose(1, 2)).flatten(0, 1)
    expected = y + ffn(y, block.mlp_channels.state_dict(), F.gelu, active=24)
    assert relative(block(x).flatten(0, 1), expected) < 1e-11


def test_initialization_and_drop_path_are_timms():
    torch.manual_seed(0)
    model = timm.create_model('repa_mixer_s16', drop_path_rate=.3, proj_drop_rate=.1)
    torch.manual_seed(0)
    vanilla = timm.create_model('mixer_s16_224', drop_path_rate=.3)
    for ours, theirs in zip(model.blocks, vanilla.blocks):
        assert abs(ours.mlp_channels.fc1.weight.std() / theirs.mlp_channels.fc1.weight.std() - 1) < .02
        assert ours.mlp_channels.fc1.bias.abs().max() < 1e-4
        assert isinstance(ours.drop_path, DropPath)
        assert ours.drop_path.drop_prob == theirs.drop_path.drop_prob == .3
        assert ours.mlp_channels.drop1.p == ours.mlp_tokens.drop1.p == .1


@pytest.mark.parametrize('kwargs', [
    dict(), dict(idle_ratio=0.), dict(idle_ratio=1.), dict(idle_ratio=.4, mlp_ratio=(.3, 2.5)),
    dict(idle_schedule='linear'), dict(act_layer=nn.SiLU), dict(patch_size=8, stem_norm=True),
], ids=str)
def test_reparameterize_is_exact(kwargs):
    contract.check_reparameterize(trained(**kwargs), partial(tiny, **kwargs), images())


@torch.no_grad()
def test_recorded_outputs(recorded):
    tensors, config = recorded('repa_mixer')
    parameters = config.pop('parameters_reparameterized')
    model = timm.create_model('repa_mixer_b16', **config)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    assert timm_rep.load_released(model, weights) is model
    model.eval()
    assert relative(model(tensors['input']), tensors['output']) < 1e-5
    assert relative(model.reparameterize()(tensors['input']), tensors['output_reparameterized']) < 1e-5
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_refusals():
    with pytest.raises(ValueError, match=r'blocks\.0\.mlp_channels is a Identity'):
        tiny(mlp_layer=nn.Identity)
    with pytest.raises(TypeError, match='block_layer'):
        tiny(block_layer=nn.Identity)


class TestContract(RePaContract):
    """The interface of timm's Mixer, in both structures."""
    variants = VARIANTS
    tiny, trained_form = map(staticmethod, (tiny, trained))
    block = 'blocks.1'
    layers = 1 + 3 + 1  # stem, blocks, head
    taps = ((2, 24, 4, 4),) * 3
    features = ((24, 16, (2, 24, 4, 4)),) * 3
    arguments = (
        (dict(num_classes=0), (2, 24)),
        (dict(num_classes=0, global_pool=''), (2, 16, 24)),
        (dict(in_chans=1), (2, 5)),
        (dict(mlp_ratio=2.), (2, 5)),
        (dict(drop_rate=.1, proj_drop_rate=.1, drop_path_rate=.2), (2, 5)),
    )


def test_initialization_without_memory():
    """to_empty() and init_weights() give a model what its creation does, up to the random numbers."""
    model = tiny(device='meta').to_empty(device='cpu')
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7)
    model.init_weights()
    expected = tiny().state_dict()
    for name, value in model.state_dict().items():
        if 'norm' in name:
            assert torch.equal(value, expected[name]), name
        assert not (value == 7).all(), name
