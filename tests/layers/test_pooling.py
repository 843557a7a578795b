import copy

import pytest
import torch
import torch.nn as nn
from timm.utils import reparameterize_model

from tests.helpers import relative
from tests.reference.pooling import pooling
from timm_rep.layers import RePaPooling, RePaPoolingDeploy, WindowAvgPool2d


def wild_(mixer, seed=0):
    """Negative gammas, tiny and huge variances."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
        mixer.norm.running_mean.copy_(torch.randn(len(mixer.norm.running_mean), generator=g) * 3)
        mixer.norm.running_var.copy_(10 ** torch.empty(len(mixer.norm.running_var)).uniform_(-3, 3, generator=g))
    return mixer


@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('pool_size', [1, 3, 5, 7])
@pytest.mark.parametrize('size', [(8, 8), (7, 5), (2, 9), (1, 1), (3, 1), (14, 14)])
def test_mean_of_neighbors(size, pool_size, channels_last):
    """As torch's pooling, gradients too; also where others record what it does."""
    pool = WindowAvgPool2d(pool_size)
    torchs = nn.AvgPool2d(pool_size, stride=1, padding=pool_size // 2, count_include_pad=False)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format).requires_grad_()
    y = pool(x)
    assert relative(y, torchs(x)) < 1e-14
    assert y.stride() == torchs(x).stride() or 1 in (*size, *y.shape)
    weight = torch.randn_like(y)
    gradients = [torch.autograd.grad((layer(x) * weight).sum(), x)[0] for layer in (pool, torchs)]
    assert relative(*gradients) < 1e-13
    for form in (torch.jit.script(pool), torch.jit.trace(pool, x), torch.fx.symbolic_trace(pool)):
        assert relative(form(x), y) < 1e-14
    recorded = torch.export.export(pool, (x.detach(),)).graph
    assert not any('conv' in str(node.target) for node in recorded.nodes)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_mean_of_neighbors_in_half(dtype):
    """As torch's, bit by bit, and under autocast in the dtype of the input."""
    for size in (3, 7):
        x = (1 + torch.rand(2, 3, 9, 9)).to(dtype)
        torchs = nn.AvgPool2d(size, stride=1, padding=size // 2, count_include_pad=False)
        assert torch.equal(WindowAvgPool2d(size)(x), torchs(x))
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(WindowAvgPool2d(size)(x.float()), torchs(x.float()))


@torch.no_grad()
def test_hooks_see_what_the_convolution_returns():
    deploy = wild_(RePaPooling(4)).eval().fuse()
    x = torch.randn(2, 4, 5, 5)
    expected, seen = deploy(x), []
    handle = deploy.conv.register_forward_hook(lambda module, args, output: seen.append((output, output.clone())))
    assert relative(deploy(x), expected) < 1e-6
    assert torch.equal(*seen[0])
    handle.remove()
    deploy.conv.register_full_backward_hook(lambda *args: None)
    with torch.enable_grad():
        deploy(x.requires_grad_()).sum().backward()


@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('init_values', [None, 1e-5])
@pytest.mark.parametrize('pool_size', [1, 3, 5, 7])
@pytest.mark.parametrize('size', [(8, 8), (7, 5), (2, 9), (1, 1), (3, 1), (14, 14)])
def test_at_every_position(size, pool_size, init_values, channels_last):
    """Also where the map is smaller than the window."""
    mixer = wild_(RePaPooling(4, pool_size, init_values=init_values, dtype=torch.float64))
    weights = {k: v.clone() for k, v in mixer.state_dict().items()}
    x = torch.randn(3, 4, *size, dtype=torch.float64)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    # with the shortcut: a window of one token leaves nothing beside it
    expected = x + pooling(x, weights, pool_size)
    assert relative(x + mixer.eval()(x), expected) < 1e-11
    assert relative(x + mixer.fuse()(x), expected) < 1e-11
    assert relative(x + mixer.train()(x), x + pooling(x, weights, pool_size, training=True)) < 1e-10


@pytest.mark.parametrize('dtype,tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_dtypes(dtype, tolerance):
    mixer = wild_(RePaPooling(8, init_values=.3)).to(dtype).eval()
    mixer.norm.running_var.clamp_(min=.1)
    x = torch.randn(2, 8, 9, 9).to(dtype)
    expected = pooling(x.double(), {k: v.double() for k, v in mixer.state_dict().items()}, 3)
    assert mixer.fuse()(x).dtype == dtype
    assert relative(mixer.fuse()(x).double(), expected) < tolerance


@pytest.mark.parametrize('training', [True, False])
def test_fuse_leaves_everything_else_alone(training):
    mixer = wild_(RePaPooling(8, 5, init_values=1.)).train(training).requires_grad_(False)
    before = copy.deepcopy(mixer.state_dict())
    rng = torch.get_rng_state()
    folded = mixer.fuse()
    assert all(torch.equal(before[k], v) for k, v in mixer.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert mixer.training == folded.training == training
    assert not any(p.requires_grad for p in folded.parameters())
    assert {k: tuple(v.shape) for k, v in folded.state_dict().items()} == {'conv.weight': (8, 1, 5, 5)}
    built = RePaPoolingDeploy(8, 5)
    built.load_state_dict(folded.state_dict())
    x = torch.randn(2, 8, 6, 6)
    assert torch.equal(built(x), folded(x))
    utility = reparameterize_model(nn.Sequential(mixer))
    assert torch.equal(utility(x), folded(x))


def test_gradients():
    mixer = wild_(RePaPooling(3, init_values=1., dtype=torch.float64))
    mixer.norm.running_var.fill_(2.)
    x = torch.randn(2, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mixer.train(), (x,))
    assert torch.autograd.gradcheck(mixer.eval().fuse(), (x,))


@torch.no_grad()
def test_autocast():
    mixer = wild_(RePaPooling(8, init_values=.1)).eval()
    mixer.norm.running_var.fill_(2.)
    folded = mixer.fuse()
    x = torch.randn(2, 8, 6, 6)
    with torch.autocast('cpu', torch.bfloat16):
        assert relative(folded(x).float(), mixer(x).float()) < 2e-2
        assert relative(folded(x.bfloat16()).float(), mixer(x.bfloat16()).float()) < 2e-2


def test_refusals():
    for size in (0, 2, -3):
        with pytest.raises(ValueError, match=f'odd number, got {size}'):
            RePaPooling(4, size)
        with pytest.raises(ValueError, match=f'odd number, got {size}'):
            RePaPoolingDeploy(4, size)
    with pytest.raises(ValueError, match='track_running_stats'):
        RePaPooling(4, norm_layer=lambda n, **dd: nn.BatchNorm2d(n, track_running_stats=False, **dd)).fuse()
    mixer = RePaPooling(4).half()
    mixer.norm.running_var.fill_(0)
    mixer.norm.weight.data.fill_(6e4)
    with pytest.raises(OverflowError, match=r'folded weight.*float16'):
        mixer.fuse()
