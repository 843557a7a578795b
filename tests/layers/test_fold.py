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
    torch.testing.assert_close(apply(outer.after(inner).scaled(gamma), x), y * gamma)


def test_slices_add_up():
    x = torch.randn(4, 5, dtype=torch.float64)
    affine = random_affine(7, 5)
    torch.testing.assert_close(apply(affine.outputs(2, 4), x), apply(affine, x)[:, 2:4])
    parts = apply(affine.inputs(0, 2), x[:, :2]) + apply(affine.inputs(2), x[:, 2:]) - affine.bias
    torch.testing.assert_close(parts, apply(affine, x))


@pytest.mark.parametrize('var', [0., 1e-12, 1., 1e12])
def test_batch_norm(var):
    norm = nn.BatchNorm1d(6).eval()
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


def test_write_to_casts_once_and_takes_the_parameters_nature():
    affine = random_affine(3, 4)
    like = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    linear = nn.Linear(4, 3, bias=False)
    affine.write_to(linear, like)
    assert torch.equal(linear.weight, affine.weight.bfloat16())
    assert linear.bias is None
    assert not linear.weight.requires_grad
