from functools import partial
from types import MappingProxyType

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import DropPath
from timm.optim import create_optimizer_v2

import timm_rep
from tests import helpers
from tests.helpers import images, randomize_, relative
from tests.models import contract
from tests.models.contract import RePaContract
from tests.reference import ffn, pooling
from timm_rep.utils.profiling import count_macs

VARIANTS = [f'repa_poolformer_{size}' for size in ('m36', 'm48', 's12', 's24', 's36')]
tiny = partial(helpers.tiny, 'repa_poolformer_s12')


def blocks(model):
    return [block for stage in model.stages for block in stage.blocks]


@torch.no_grad()
def trained(**kwargs):
    model = randomize_(tiny(**kwargs))
    for block in blocks(model):
        for parameter in (*block.norm1.parameters(), *block.layer_scale1.parameters()):
            parameter.normal_()
    return model


def test_registered():
    assert timm.list_models(module='repa_poolformer') == VARIANTS


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name == 'repa_poolformer_s12' else pytest.mark.slow) for name in VARIANTS])
def test_everything_but_the_ffns_is_timms(name):
    model = timm.create_model(name, device='meta')
    vanilla = timm.create_model(name.removeprefix('repa_'), device='meta')

    def rest(m):
        return {
            k: v.shape for k, v in m.state_dict().items()
            if not any(part in k for part in ('.mlp.', '.norm2.', '.layer_scale2.'))}

    assert rest(model) == rest(vanilla)
    assert [b.mlp.fc1.weight.shape for b in blocks(model)] == [b.mlp.fc1.weight.shape for b in blocks(vanilla)]
    assert model.default_cfg['crop_pct'] == vanilla.default_cfg['crop_pct']
    for ours, theirs in zip(blocks(timm.create_model(name)), blocks(timm.create_model(name.removeprefix('repa_')))):
        assert torch.equal(ours.layer_scale1.scale, theirs.layer_scale1.scale)
        assert torch.equal(ours.mlp.ls.gamma, theirs.layer_scale2.scale)
        assert ours.token_mixer.pool.kernel_size == theirs.token_mixer.pool.kernel_size == 3
        break


@pytest.mark.parametrize('pool_size', [3, 7])
@torch.no_grad()
def test_block_is_pooling_and_ffn(pool_size):
    """x + ls (pool(norm(x)) - norm(x)), then the FFN by its definition; the norm is over all of an image."""
    block = blocks(trained(pool_size=pool_size))[1].double()
    x = torch.randn(2, 24, 8, 6, dtype=torch.float64)
    y = F.layer_norm(x, x.shape[1:]) * block.norm1.weight.view(-1, 1, 1) + block.norm1.bias.view(-1, 1, 1)
    neutral = {
        'norm.running_mean': torch.zeros(24), 'norm.running_var': torch.ones(24), 'norm.weight': torch.ones(24),
        'norm.bias': torch.zeros(24), 'ls.gamma': block.layer_scale1.scale}
    y = x + pooling(y, neutral, pool_size, eps=0.)
    weights = {k: v.flatten(1) if v.dim() == 4 else v for k, v in block.mlp.state_dict().items()}
    y = y.permute(0, 2, 3, 1).reshape(-1, 24)
    expected = y + ffn(y, weights, F.gelu, active=24)
    assert relative(block(x).permute(0, 2, 3, 1).reshape(-1, 24), expected) < 1e-10


def test_initialization_and_drop_path_are_timms():
    model = tiny(dims=(96, 96, 96), drop_path_rate=.3, proj_drop_rate=.1)
    rates = torch.linspace(0, .3, 4).tolist()
    for block, rate in zip(blocks(model), rates):
        for fc in (block.mlp.fc1, block.mlp.fc2):
            assert abs(fc.weight.std().item() - .02) < .001
            assert fc.bias.abs().max() == 0
        for drop in (block.drop_path1, block.drop_path2):
            assert isinstance(drop, DropPath) == (rate > 0)
            assert rate == 0 or drop.drop_prob == pytest.approx(rate)
        assert block.mlp.drop1.p == .1


@pytest.mark.parametrize('kwargs', [
    dict(), dict(idle_ratio=0.), dict(idle_ratio=1.), dict(idle_ratio=.4), dict(pool_size=7),
    dict(idle_schedule='linear'), dict(layer_scale_init_values=None),
    dict(pool_size=7, layer_scale_init_values=None),
], ids=str)
@torch.no_grad()
def test_reparameterize_is_exact(kwargs):
    """At every position, in either memory format."""
    model = trained(**kwargs) if kwargs.get('layer_scale_init_values', 1) else tiny(**kwargs).eval()
    x = images()
    features = model.forward_features(x)
    contract.check_reparameterize(model, partial(tiny, **kwargs), x)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    for memory_format in (torch.contiguous_format, torch.channels_last):
        assert relative(model.to(memory_format=memory_format).forward_features(x), features) < 1e-5


@torch.no_grad()
def test_recorded_outputs(recorded):
    """The released folding loses the layer scale; ours has the output of the unfolded model."""
    tensors, config = recorded('repa_poolformer')
    args = dict(
        depths=config['layers'], dims=config['embed_dims'], pool_size=config['pool_size'],
        num_classes=config['num_classes'], idle_ratio=config['idle_ratio'])
    model = timm.create_model('repa_poolformer_s12', **args)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    assert timm_rep.load_released(model, weights) is model
    model.eval()
    assert relative(model(tensors['input']), tensors['output']) < 1e-5
    assert relative(model.reparameterize()(tensors['input']), tensors['output']) < 1e-5
    assert sum(p.numel() for p in model.parameters()) == config['parameters_reparameterized']


def test_refusals():
    for kwargs in (dict(), dict(reparameterized=True)):
        with pytest.raises(ValueError, match='odd'):
            tiny(pool_size=4, **kwargs)


@pytest.mark.parametrize('pool_size', [3, 7])
def test_multiply_accumulates(pool_size):
    """Pooling has none, as in timm's PoolFormer, also where it runs as a convolution."""
    counts = [count_macs(tiny(pool_size=pool_size, **kwargs)) for kwargs in ({}, dict(device='meta'))]
    assert counts[0] == counts[1]
    model = tiny(pool_size=pool_size).eval()
    assert count_macs(model) == counts[0]
    with torch.no_grad():
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, 'avg_pool2d', lambda *args, **kwargs: calls.append(1))
            model(images(1, 32))
        assert not calls  # afterwards it is a convolution again


class TestContract(RePaContract):
    """The interface of timm's PoolFormer, in both structures."""
    variants = VARIANTS
    tiny, trained_form = map(staticmethod, (tiny, trained))
    training = MappingProxyType(dict(layer_scale_init_values=.1))
    block = 'stages.1.blocks.1'
    taps = ((2, 16, 16, 16), (2, 24, 8, 8), (2, 32, 4, 4))
    features = ((16, 4, (2, 16, 16, 16)), (24, 8, (2, 24, 8, 8)), (32, 16, (2, 32, 4, 4)))
    arguments = (
        (dict(num_classes=0), (2, 32)),
        (dict(num_classes=0, global_pool=''), (2, 32, 4, 4)),
        (dict(in_chans=1), (2, 5)),
        (dict(drop_rate=.1, proj_drop_rate=.1, drop_path_rate=.2), (2, 5)),
    )

    def test_parameter_groups(self, model):
        """timm's MetaFormer has no groups of parameters to set rates for by layer."""
        optimizer = create_optimizer_v2(model, opt='sgd', lr=.1, weight_decay=.1)
        assert sum(len(g['params']) for g in optimizer.param_groups) == len(list(model.parameters()))

    @torch.no_grad()
    def test_image_sizes(self, model):
        assert model(torch.randn(1, 3, 50, 84)).shape == (1, 5)
