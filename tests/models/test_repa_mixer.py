from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import DropPath
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model

import timm_rep
from tests.helpers import relative, wild_
from tests.models import contract
from tests.models.contract import Contract
from tests.reference import ffn

VARIANTS = [f'repa_mixer_{size}' for size in ('b16', 'b32', 'l16', 'l32', 's16', 's32')]
TINY = dict(img_size=64, num_blocks=3, embed_dim=24, num_classes=5)


def tiny(**kwargs):
    torch.manual_seed(0)
    return timm.create_model('repa_mixer_b16', **{**TINY, **kwargs})


@torch.no_grad()
def trained(**kwargs):
    model = tiny(**kwargs)
    for i, block in enumerate(model.blocks):
        wild_(block.mlp_channels, i, log_var=(-1, 1))
        for parameter in block.norm1.parameters():
            parameter.normal_()
    model.head.weight.normal_()  # timm's Mixer has it start at 0
    return model.eval()


images = contract.images


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


def test_batch_norms():
    contract.check_batch_norms(tiny)


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
    with pytest.raises(RuntimeError, match='deploy structure'):
        tiny().load_state_dict(tiny(reparameterized=True).state_dict(), strict=False)
    with pytest.raises(ValueError, match=r'blocks\.0\.mlp_channels is a Identity'):
        tiny(mlp_layer=nn.Identity)
    with pytest.raises(TypeError, match='block_layer'):
        tiny(block_layer=nn.Identity)


def test_training_lowers_the_loss():
    model = tiny(drop_path_rate=.1).train()
    optimizer = create_optimizer_v2(model, opt='adamw', lr=3e-3, weight_decay=.05)
    x, target = images(10), torch.arange(10) % 5
    losses = contract.train(model, optimizer, x, target, steps=25)
    assert losses[-1] < .5 * losses[0]


@pytest.mark.parametrize('kind', ['training', 'deploy'])
class TestContract(Contract):
    """What timm's Mixer can do, in both structures."""
    block = 'blocks.1'
    layers = 1 + 3 + 1  # stem, blocks, head
    scriptable = ('training', 'deploy')

    @staticmethod
    def build(kind, **kwargs):
        return tiny(reparameterized=kind == 'deploy', **kwargs)

    @staticmethod
    def trained(kind):
        return trained().reparameterize() if kind == 'deploy' else trained()

    @torch.no_grad()
    def test_forward_intermediates(self, model):
        final, taps = model.forward_intermediates(images())
        assert torch.equal(final, model.forward_features(images()))
        assert [tuple(t.shape) for t in taps] == [(2, 24, 4, 4)] * 3

    @torch.no_grad()
    def test_features_only(self, kind):
        net = timm.create_model(
            'repa_mixer_b16', features_only=True, reparameterized=kind == 'deploy', **TINY).eval()
        features = net(images())
        assert [tuple(f.shape) for f in features] == [(2, 24, 4, 4)] * 3
        for a, b in zip(reparameterize_model(net)(images()), features):
            assert relative(a, b) < 1e-5

    @pytest.mark.parametrize('kwargs,shape', [
        (dict(num_classes=0), (2, 24)),
        (dict(num_classes=0, global_pool=''), (2, 16, 24)),
        (dict(in_chans=1), (2, 5)),
        (dict(mlp_ratio=2.), (2, 5)),
        (dict(drop_rate=.1, proj_drop_rate=.1, drop_path_rate=.2), (2, 5)),
    ], ids=str)
    def test_arguments(self, kind, kwargs, shape):
        contract.check_arguments(self.build(kind, **kwargs), images()[:, :kwargs.get('in_chans', 3)], shape)


def test_names_of_the_config():
    contract.check_cfg_names(list(VARIANTS))
