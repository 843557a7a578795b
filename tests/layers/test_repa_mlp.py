import copy
import math
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from timm.utils import reparameterize_model

from tests.helpers import relative, wild_
from tests.reference import ffn
from timm_rep.layers import ChannelIdle, GatedUnit, RePaMlp, RePaMlpDeploy, active_channels, idle_ratios

ACTS = {nn.GELU: F.gelu, nn.SiLU: F.silu, nn.ReLU: F.relu}


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('act_layer', ACTS)
@pytest.mark.parametrize('dim,hidden,ratio,bias,init_values', [
    (8, 32, 0.75, True, None),
    (7, 30, 0.5, True, 0.1),
    (5, 13, 0.3, False, None),
    (12, 12, 0.9, True, 1e-5),
    (6, 24, 1.0, True, 0.5),
    (6, 24, 0.0, True, 0.5),
    (1, 3, 0.5, False, None),
])
def test_equation_3(dim, hidden, ratio, bias, init_values, act_layer, training):
    mlp = RePaMlp(dim, hidden, ratio, act_layer, bias=bias, init_values=init_values, dtype=torch.float64)
    wild_(mlp).train(training)
    weights = {k: v.clone() for k, v in mlp.state_dict().items()}
    x = torch.randn(3, 5, dim, dtype=torch.float64) * 4
    expected = ffn(x.flatten(0, 1), weights, ACTS[act_layer], math.ceil(hidden * (1 - ratio)), training)
    assert relative(mlp(x).flatten(0, 1), expected) < 1e-11


@pytest.mark.parametrize('act_layer', ACTS)
@pytest.mark.parametrize('ratio', [0.0, 0.1, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize('init_values', [None, 0.3])
@pytest.mark.parametrize('bias', [True, False])
def test_fuse_is_exact(act_layer, ratio, init_values, bias):
    sizes = [(8, 32), (1, 4), *torch.randint(1, 40, (4, 2)).tolist()]
    for seed, (dim, hidden) in enumerate(sizes):
        mlp = RePaMlp(dim, hidden, ratio, act_layer, bias=bias, init_values=init_values, dtype=torch.float64)
        wild_(mlp, seed).eval()
        x = torch.randn(2, 9, dim, dtype=torch.float64)
        expected = ffn(x.flatten(0, 1), mlp.state_dict(), ACTS[act_layer], math.ceil(hidden * (1 - ratio)))
        assert relative(mlp.fuse()(x).flatten(0, 1), expected) < 1e-11


@pytest.mark.parametrize('dtype,tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_fuse_rounds_once(dtype, tolerance):
    """The folded weights are the float64 ones, cast: not a product of rounded factors."""
    mlp = wild_(RePaMlp(16, 64, init_values=0.3), log_var=(-2, 2)).to(dtype).eval()
    folded = mlp.fuse()
    exact = copy.deepcopy(mlp).double().fuse()
    for (name, p), q in zip(folded.named_parameters(), exact.parameters()):
        assert p.dtype == dtype
        assert torch.equal(p, q.to(dtype)), name
    x = torch.randn(4, 9, 16)
    expected = ffn(
        x.to(dtype).double().flatten(0, 1), {k: v.double() for k, v in mlp.state_dict().items()}, F.gelu, 16)
    assert relative(folded(x.to(dtype)).double().flatten(0, 1), expected) < tolerance


def test_fuse_ends():
    """Ratio 1 leaves one matrix, ratio 0 two, anything between three (section 4.3)."""
    def shapes(ratio):
        return {k: tuple(v.shape) for k, v in RePaMlp(8, 32, ratio).fuse().state_dict().items()}

    assert shapes(1.) == {'fc_idle.weight': (8, 8), 'fc_idle.bias': (8,)}
    assert shapes(0.) == {
        'fc_in.weight': (32, 8), 'fc_in.bias': (32,), 'fc_out.weight': (8, 32), 'fc_out.bias': (8,)}
    assert shapes(.75) == {
        'fc_in.weight': (8, 8), 'fc_in.bias': (8,), 'fc_out.weight': (8, 8),
        'fc_idle.weight': (8, 8), 'fc_idle.bias': (8,)}


@pytest.mark.parametrize('training', [True, False])
def test_fuse_leaves_everything_else_alone(training):
    mlp = wild_(RePaMlp(8, 32, act_layer=nn.SiLU)).train(training).requires_grad_(False)
    before = {k: v.clone() for k, v in mlp.state_dict().items()}
    rng = torch.get_rng_state()
    deploy = mlp.fuse()
    assert all(torch.equal(before[k], v) for k, v in mlp.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert mlp.training == deploy.training == training
    assert not any(p.requires_grad for p in deploy.parameters())
    assert isinstance(deploy.act, nn.SiLU)
    # running statistics whatever the mode
    x = torch.randn(2, 3, 8)
    assert relative(deploy(x), mlp.eval()(x)) < 1e-5


def test_fuse_as_sync_batchnorm_and_without_affine():
    mlp = wild_(RePaMlp(8, 32), log_var=(-1, 1)).eval()
    sync = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(mlp))
    for p, q in zip(mlp.fuse().parameters(), sync.fuse().parameters()):
        assert torch.equal(p, q)
    plain = RePaMlp(8, 32, norm_layer=lambda n, **dd: nn.BatchNorm1d(n, affine=False, **dd)).eval()
    x = torch.randn(2, 3, 8)
    assert relative(plain.fuse()(x), plain(x)) < 1e-5


class _Adapter(nn.Module):
    """A low-rank adapter that shows the weight and bias of its base layer, as peft's adapters do."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def test_fuse_refuses_what_its_parameters_do_not_say():
    def adapt(mlp):
        mlp.fc2 = _Adapter(mlp.fc2)

    def normalize(mlp):
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(mlp.fc1)  # a hook computes the weight

    def replace_forward(mlp):
        mlp.act.forward = mlp.act.act.forward

    def replace_norm(mlp):
        mlp.norm1 = nn.LayerNorm(8)

    hook = 'the RePaMlp has hooks'
    for change, message in (
            (adapt, 'got _Adapter: merge'), (normalize, hook),
            (lambda mlp: mlp.norm2.register_forward_hook(lambda module, args, y: 2 * y), hook),
            (replace_forward, r'a forward\(\) that was replaced'), (replace_norm, 'LayerNorm.* running statistics')):
        mlp = RePaMlp(8, 32)
        change(mlp)
        with pytest.raises(ValueError, match=message):
            mlp.fuse()


def test_fuse_with_parametrizations():
    mlp = wild_(RePaMlp(8, 32), log_var=(-1, 1)).eval()
    mlp.fc1.register_full_backward_hook(lambda module, grad_in, grad_out: None)  # it does not change the function
    nn.utils.parametrizations.weight_norm(mlp.fc1)
    with torch.no_grad():
        mlp.fc1.parametrizations.weight.original0.mul_(3.)
    x = torch.randn(2, 3, 8)
    assert relative(mlp.fuse()(x), mlp(x)) < 1e-5


def test_spectral_norm_folds_as_in_eval_mode():
    """In train mode each access to the weight would change it."""
    mlp = wild_(RePaMlp(8, 32), log_var=(-1, 1))
    nn.utils.parametrizations.spectral_norm(mlp.fc1)
    before, x = copy.deepcopy(mlp.state_dict()), torch.randn(2, 3, 8)
    mlp.train()
    folded = mlp.fuse()
    assert all(torch.equal(value, before[name]) for name, value in mlp.state_dict().items())
    assert all(module.training for module in mlp.modules())
    assert relative(folded.eval()(x), mlp.eval()(x)) < 1e-5


@pytest.mark.parametrize('dim', [-1, 1])
def test_gates_of_an_activation_in_place(dim):
    """The gates may be overwritten in training; gradients are as of the activation that is not in place."""
    torch.manual_seed(0)
    grads = []
    weight = torch.randn(2, 12, 12, dtype=torch.float64)
    for inplace in False, True:
        x = weight.clone().requires_grad_()
        y = GatedUnit(nn.SiLU(inplace=inplace), dim)(x * 1)
        torch.testing.assert_close(y, F.silu(weight.chunk(2, dim)[0]) * weight.chunk(2, dim)[1])
        y.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_deploy_from_scratch_takes_folded_weights():
    for ratio in (0., .3, .75, 1.):
        folded = wild_(RePaMlp(8, 32, ratio), log_var=(-1, 1)).eval().fuse()
        built = RePaMlpDeploy(8, 32, ratio)
        built.load_state_dict(folded.state_dict())
        x = torch.randn(2, 3, 8)
        assert torch.equal(built(x), folded(x))
        assert repr(built) == repr(folded)


def test_works_with_timm_utility():
    net = nn.Sequential(RePaMlp(8, 32), RePaMlp(8, 16, 0.5))
    folded = reparameterize_model(net)
    assert all(isinstance(m, RePaMlpDeploy) for m in folded)
    assert all(isinstance(m, RePaMlp) for m in net)


def test_gradients():
    mlp = wild_(RePaMlp(4, 8, 0.5, dtype=torch.float64), log_var=(-1, 1)).train()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mlp, (x,))
    assert torch.autograd.gradcheck(mlp.eval().fuse(), (x,))


def test_dropout_only_in_training():
    x = torch.randn(64, 3, 8)
    mlp = wild_(RePaMlp(8, 32, drop=.5), log_var=(-1, 1))
    y = mlp.train()(x)
    assert .4 < (y == 0).float().mean() < .6  # dropout after the second linear layer
    assert (mlp.drop1.p, mlp.drop2.p) == (.5, .5)
    mlp.drop2.p = 0.
    assert not torch.equal(mlp(x), mlp(x))  # dropout after the activation
    x = torch.randn(4, 3, 8)
    assert relative(mlp.eval().fuse()(x), mlp(x)) < 1e-5


def test_channel_idle():
    act = ChannelIdle(5, 0.5, nn.ReLU)
    x = torch.tensor([[-1., -2., -3., -4., -5.], [1., 2., 3., 4., 5.]])
    assert torch.equal(act(x), torch.tensor([[0., 0., 0., -4., -5.], [1., 2., 3., 4., 5.]]))
    assert 'active=3, idle=2' in repr(act)


def test_active_channels():
    assert [active_channels(10, r) for r in (0, 0.25, 0.5, 0.74, 0.75, 0.76, 1)] == [10, 8, 5, 3, 3, 3, 0]
    assert active_channels(192, 0.5 + 1 / 6 * 2) == 33  # 32 on paper: the released checkpoints need it as they have it
    for bad in (True, -0.1, 1.1, float('nan')):
        with pytest.raises(ValueError, match=r'idle.ratio'):
            active_channels(10, bad)


def test_idle_ratios():
    assert idle_ratios(3, 0.6) == [0.6] * 3
    assert idle_ratios(4, 0.75, 'linear') == pytest.approx([0.5 + 1 / 6, 0.5 + 2 / 6, 1.0, 0.0])
    assert idle_ratios(1, 0.75, 'linear') == [0.0]
    assert idle_ratios(12, 1.0, 'linear') == [1.0] * 11 + [0.0]
    with pytest.raises(ValueError, match='block 0 of 12'):
        idle_ratios(12, 0.25, 'linear')
    with pytest.raises(ValueError, match="'constant' or 'linear'"):
        idle_ratios(12, 0.25, 'cosine')


def test_refusals():
    with pytest.raises(TypeError, match='LayerNorm'):
        RePaMlp(8, norm_layer=nn.LayerNorm)
    with pytest.raises(TypeError, match='BatchNormAct2d'):
        RePaMlp(8, norm_layer=BatchNormAct2d, use_conv=True)
    RePaMlp(8, norm_layer=partial(BatchNormAct2d, apply_act=False), use_conv=True).fuse()
    with pytest.raises(ValueError, match='hidden channel'):
        RePaMlpDeploy(8, 0)
    with pytest.raises(ValueError, match='track_running_stats'):
        RePaMlp(8, norm_layer=lambda n, **dd: nn.BatchNorm1d(n, track_running_stats=False, **dd)).fuse()
    mlp = RePaMlp(8, 32).half()
    mlp.norm1.running_var.fill_(0)
    mlp.norm1.weight.data.fill_(6e4)
    with pytest.raises(OverflowError, match=r'folded weight.*float16'):
        mlp.fuse()
    mlp = RePaMlp(8, 32, init_values=1.).half()
    mlp.fc2.bias.data.fill_(6e4)
    mlp.ls.gamma.data.fill_(2)
    with pytest.raises(OverflowError, match=r'folded bias.*float16'):
        mlp.fuse()
    with pytest.raises(ValueError, match='more than 1 value per channel'):
        RePaMlp(8).train()(torch.zeros(1, 1, 8))


def nlc(x):
    """(N, C, H, W) -> (N, tokens, C)."""
    return x.flatten(2).transpose(1, 2)


@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('dim,hidden,ratio,init_values', [
    (8, 32, 0.75, 0.3),
    (5, 13, 0.3, None),
    (6, 24, 1.0, 0.5),
    (6, 24, 0.0, 1e-5),
    (1, 3, 0.5, None),
])
def test_channels_second(dim, hidden, ratio, init_values, training, channels_last):
    """The same function of every token, in training and folded; the weights have the shape of 1 x 1 convolutions."""
    mlp = RePaMlp(dim, hidden, ratio, use_conv=True, init_values=init_values, dtype=torch.float64)
    wild_(mlp).train(training)
    tokens = RePaMlp(dim, hidden, ratio, init_values=init_values, dtype=torch.float64)
    state = {k: v.clone() for k, v in mlp.state_dict().items()}
    assert state['fc1.weight'].shape == (hidden, dim, 1, 1)
    weights = {k: v.flatten(1) if v.dim() == 4 else v for k, v in state.items()}
    tokens.load_state_dict(weights)
    x = torch.randn(2, dim, 5, 3, dtype=torch.float64)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    active = math.ceil(hidden * (1 - ratio))
    flat = nlc(x).flatten(0, 1)
    expected = ffn(flat, weights, F.gelu, active, training)
    assert relative(nlc(mlp(x)).flatten(0, 1), expected) < 1e-11
    assert relative(tokens.train(training)(flat), expected) < 1e-11
    if not training:
        folded = mlp.fuse()
        assert relative(nlc(folded(x)).flatten(0, 1), expected) < 1e-11
        assert relative(tokens.fuse()(flat), expected) < 1e-11
        built = RePaMlpDeploy(dim, hidden, ratio, use_conv=True, dtype=torch.float64)
        built.load_state_dict(folded.state_dict())
        assert torch.equal(built(x), folded(x))
        assert {k: v.dim() for k, v in folded.state_dict().items() if 'weight' in k} == {
            k: 4 for k in folded.state_dict() if 'weight' in k}


def test_channel_idle_on_another_axis():
    x = torch.randn(2, 5, 3, 4)
    assert torch.equal(ChannelIdle(5, 0.5, dim=1)(x), ChannelIdle(5, 0.5)(x.movedim(1, -1)).movedim(-1, 1))


@pytest.mark.parametrize('use_conv', [False, True])
@pytest.mark.parametrize('ratio', [0., .6, 1.])
def test_deploy_structure_scripts(ratio, use_conv):
    folded = wild_(RePaMlp(6, 24, ratio, use_conv=use_conv, dtype=torch.float64)).eval().fuse()
    x = torch.randn(2, 6, 5, 6, dtype=torch.float64)
    assert torch.equal(torch.jit.script(folded)(x), folded(x))
