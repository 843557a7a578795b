import pytest
import torch
import torch.nn as nn

from tests.helpers import relative
from timm_rep.layers import WindowAvgPool2d


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
    for form in (torch.jit.trace(pool, x), torch.fx.symbolic_trace(pool)):
        assert relative(form(x), y) < 1e-14


@pytest.mark.parametrize('channels_last', [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize('pool_size', [1, 3, pytest.param(5, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize('size', [
    (7, 5), *(pytest.param(size, marks=pytest.mark.slow) for size in ((8, 8), (2, 9), (1, 1), (3, 1), (14, 14)))])
def test_scripted_and_exported(size, pool_size, channels_last):
    pool, x = WindowAvgPool2d(pool_size), torch.randn(2, 3, *size, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    y = pool(x)
    assert relative(torch.jit.script(pool)(x), y) < 1e-14
    exported = torch.export.export(pool, (x,))
    assert relative(exported.module()(x), y) < 1e-14
    assert not any('conv' in str(node.target) for node in exported.graph.nodes)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_mean_of_neighbors_in_half(dtype):
    """As torch's, bit by bit, and under autocast in the dtype of the input."""
    for size in (3, 7):
        x = (1 + torch.rand(2, 3, 9, 9)).to(dtype)
        torchs = nn.AvgPool2d(size, stride=1, padding=size // 2, count_include_pad=False)
        assert torch.equal(WindowAvgPool2d(size)(x), torchs(x))
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(WindowAvgPool2d(size)(x.float()), torchs(x.float()))


@pytest.mark.parametrize('size', [0, 2, -3, 3.])
def test_a_window_needs_a_centre(size):
    with pytest.raises(ValueError, match='odd'):
        WindowAvgPool2d(size)
