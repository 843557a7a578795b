import pytest
import torch
import torch.nn as nn

from timm_rep.layers import Affine, batch_norm_scale_shift


def random_affine(out_features, in_features):
    return Affine(
        torch.randn(out_features, in_features, dtype=torch.float64), torch.randn(out_features, dtype=torch.float64))


def apply(affine, x):
    return torch.stack([affine.weight @ row + affine.bias for row in x])


def test_composition():
    x = torch.randn(4, 5, dtype=torch.float64)
    inner, outer = random_affine(7, 5), random_affine(5, 7)
    y = apply(outer, apply(inner, x))
    torch.testing.assert_close(apply(outer.after(inner), x), y)
    gamma = torch.randn(5)
    torch.testing.assert_close(apply(outer.after(inner).scale_outputs(gamma), x), y * gamma)


def test_slices_add_up():
    x = torch.randn(4, 5, dtype=torch.float64)
    affine = random_affine(7, 5)
    torch.testing.assert_close(apply(affine.outputs(2, 4), x), apply(affine, x)[:, 2:4])
    parts = apply(affine.inputs(0, 2), x[:, :2]) + apply(affine.inputs(2), x[:, 2:]) - affine.bias
    torch.testing.assert_close(parts, apply(affine, x))


@pytest.mark.parametrize('eps', [1e-5, 1e-2])
@pytest.mark.parametrize('var', [0., 1e-12, 1., 1e12])
def test_batch_norm(var, eps):
    norm = nn.BatchNorm1d(6, eps=eps).eval()
    with torch.no_grad():
        norm.running_var.fill_(var)
        norm.running_mean.normal_()
        norm.weight.normal_()
        norm.bias.normal_()
    x = torch.randn(3, 6, dtype=torch.float64)
    scale, shift = batch_norm_scale_shift(norm)
    expected = (x - norm.running_mean.double()) / (norm.running_var.double() + norm.eps).sqrt() * norm.weight.double()
    torch.testing.assert_close(x * scale + shift, expected + norm.bias.double())
    affine = random_affine(4, 6)
    torch.testing.assert_close(apply(affine.after_norm(norm), x), apply(affine, x * scale + shift))
    before = random_affine(6, 4)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(apply(before.before_norm(norm), x), apply(before, x) * scale + shift)


@pytest.mark.parametrize('spoil', [
    lambda norm: norm.running_var[1].fill_(-1e-3), lambda norm: norm.running_var[1].fill_(float('nan')),
    lambda norm: norm.running_mean[1].fill_(float('inf'))])
def test_broken_statistics_are_refused(spoil):
    norm = nn.BatchNorm1d(6)
    spoil(norm)
    with pytest.raises(ValueError, match=r'running statistics .* must be finite'):
        batch_norm_scale_shift(norm)


def test_overflow_of_one_entry_is_refused():
    """Values that are not finite before the cast pass: they are not an overflow."""
    affine = random_affine(3, 4)
    affine.weight[1, 2] = 1e5
    like = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    with pytest.raises(OverflowError, match=r'weight of shape \(3, 4\) .*got 1e\+05'):
        affine.write_to(nn.Linear(4, 3), like)
    affine.weight[1, 2] = float('inf')
    affine.write_to(nn.Linear(4, 3), like)


def test_write_to_casts_once_and_takes_the_parameters_nature():
    affine = random_affine(3, 4)
    like = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    linear = nn.Linear(4, 3, bias=False)
    affine.write_to(linear, like)
    assert torch.equal(linear.weight, affine.weight.bfloat16())
    assert linear.bias is None
    assert not linear.weight.requires_grad


def test_write_to_takes_the_memory_format_of_a_kernel():
    kernel, conv = torch.randn(3, 4, 3, 3, dtype=torch.float64), nn.Conv2d(4, 3, 3)
    like = nn.Parameter(torch.zeros(3, 4, 3, 3).to(memory_format=torch.channels_last))
    Affine.from_kernel(kernel).write_to(conv, like)
    assert torch.equal(conv.weight, kernel.float())
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not conv.bias.any()
