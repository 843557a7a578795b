"""Range equalization: what it computes, and what it leaves as it is."""
import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import timm_rep
from tests.helpers import images, relative, same_weights
from timm_rep.deploy.equalize import equalize_ranges


def uneven_(model, seed=0):
    """Float64 weights whose channels differ by orders of magnitude, and biases of both signs."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.double().eval().parameters():
            size = 10 ** torch.empty(len(p), dtype=torch.float64).uniform_(-2, 2, generator=g)
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * size.view(-1, *[1] * (p.ndim - 1)))
    return model


def ranges(first, second):
    """Largest absolute weights of the output channels of a layer, and of the input channels of the next."""
    r1 = torch.stack([w.abs().max() for w in first.weight])
    groups, r2 = getattr(second, 'groups', 1), []
    per_group = second.weight.shape[1]
    for i in range(groups * per_group):
        rows = second.weight.chunk(groups)[i // per_group]
        r2.append(rows[:, i % per_group].abs().max())
    return r1, torch.stack(r2)


@torch.no_grad()
def check(model, pairs, size=(13, 11)):
    """Equalize, compare the function, and return the equalized copy."""
    x = torch.randn(3, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    equalized = copy.deepcopy(model)
    assert equalize_ranges(equalized, x) == pairs
    assert relative(equalized(x), model(x)) < 1e-12
    assert same_weights(equalized, model) == (pairs == 0)
    return equalized


def test_two_convolutions_against_the_equation():
    model = uneven_(nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.ReLU(), nn.Conv2d(6, 4, (1, 3), stride=2, bias=False)))
    equalized = check(model, 1)
    r1, r2 = ranges(model[0], model[2])
    s = (r1 / r2).sqrt()
    torch.testing.assert_close(equalized[0].weight, model[0].weight / s.view(-1, 1, 1, 1))
    torch.testing.assert_close(equalized[2].weight, model[2].weight * s.view(1, -1, 1, 1))


class Pad(nn.Module):
    def forward(self, x):
        return F.pad(x, (0, 1, 2, 0))


@torch.no_grad()
def test_a_chain_against_repeated_pairs():
    """Depthwise, with a multiplier, and grouped layers, strides, dilation, activations, pooling, and a classifier."""
    model = uneven_(nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, padding='same', groups=6, bias=False), nn.LeakyReLU(.2),
        nn.Conv2d(6, 12, 3, padding=1, groups=6, bias=False), nn.Identity(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(12, 8, 3, groups=2, padding=2, dilation=2, bias=False), Pad(), nn.AvgPool2d(2, 1),
        nn.Conv2d(8, 8, 1, bias=False), nn.ReLU(), nn.Dropout(.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 5)))
    equalized, expected = check(model, 6, (23, 21)), copy.deepcopy(model)
    layers = [[m for m in net if hasattr(m, 'weight')] for net in (equalized, expected)]
    for _ in range(100):
        for first, second in zip(layers[1], layers[1][1:]):
            r1, r2 = ranges(first, second)
            s = (r1 / r2).sqrt()
            first.weight /= s.view(-1, *[1] * (first.weight.ndim - 1))
            groups, per_group = getattr(second, 'groups', 1), second.weight.shape[1]
            for o, row in enumerate(second.weight):
                start = o * groups // len(second.weight) * per_group
                row *= s[start:start + per_group].view(-1, *[1] * (row.ndim - 1))
    for layer, reference in zip(*layers):
        torch.testing.assert_close(layer.weight, reference.weight, rtol=.01, atol=0)
    for first, second in zip(layers[0], layers[0][1:]):
        r1, r2 = ranges(first, second)
        torch.testing.assert_close(r1, r2, rtol=.01, atol=0)


@pytest.mark.parametrize('activation', [nn.ReLU(), nn.LeakyReLU(.1), nn.Identity()], ids=str)
@torch.no_grad()
def test_biases_do_not_exceed_the_largest(activation):
    """Ranges of activations are per tensor; a negative bias before a ReLU does not widen them."""
    model = uneven_(nn.Sequential(nn.Conv2d(3, 5, 1), activation, nn.Conv2d(5, 2, 1)))
    model[0].weight[:4], model[2].weight[:, :4] = .01, 1.
    model[0].weight[4], model[2].weight[:, 4] = 4., .04
    model[0].bias[:] = torch.tensor([1., .05, -1., .5, .8])
    negative = -10. if isinstance(activation, nn.ReLU) else -1.
    expected = torch.tensor([1., .5, negative, 1., .08]).double()
    torch.testing.assert_close(check(model, 1)[0].bias, expected)


@pytest.mark.parametrize('activation', [nn.ReLU(), nn.LeakyReLU(.1)], ids=str)
@torch.no_grad()
def test_dead_channels(activation):
    model = uneven_(nn.Sequential(nn.Conv2d(3, 6, 3), activation, nn.Conv2d(6, 5, 3, padding=1)))
    first, second = model[0], model[2]
    first.weight[:3] = 0
    first.bias[:4] = torch.tensor([-1., 0., 2., 3.])
    second.weight[:, :3] = 1e4  # outliers
    second.weight[:, 5] = 0
    equalized = check(model, 1)
    is_relu = isinstance(activation, nn.ReLU)
    zero = [0, 1] if is_relu else [1]
    kept = [2] if is_relu else [0, 2]
    assert not equalized[2].weight[:, zero].any()
    assert torch.equal(equalized[2].weight[:, kept], second.weight[:, kept])
    assert torch.equal(equalized[0].bias[kept], first.bias[kept])
    assert not equalized[0].weight[5].any()
    assert not equalized[0].bias[5]


@torch.no_grad()
def test_a_net_without_any_live_channel():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    for p in model.parameters():
        nn.init.zeros_(p)
    assert equalize_ranges(model, torch.randn(1, 3, 9, 9).double()) == 2
    assert all(p.isfinite().all() and not p.any() for p in model.parameters())


class Twice(nn.Module):
    """The output of the first convolution goes to two places, in a way to choose."""

    def __init__(self, combine):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(6, 3, 1)
        self.combine = combine

    def forward(self, x):
        return self.combine(self, self.a(x))


@pytest.mark.parametrize('combine', [
    lambda m, a: a.relu() + m.b(a.relu()),
    lambda m, a: m.b(a) + m.b(a + 1),
    lambda m, a: m.b(a.relu() + 1),
    lambda m, a: (m.b(a.relu()), a),
    lambda m, a: m.c(torch.cat([a, a], 1)),
    lambda m, a: m.b(m.b.weight.sum() * a),
    lambda m, a: m.b(F.pad(a, (1, 1, 1, 1), value=1.)),
    lambda m, a: m.b(F.pad(a, (1, 1, 1, 1), 'reflect')),
    lambda m, a: m.b(a.transpose(2, 3)),
    lambda m, a: m.b(a.flip(1)),
    lambda m, a: F.linear(a, m.b.weight[0, 0].new_ones(2, a.shape[-1])),
    lambda m, a: F.conv2d(torch.ones_like(a), a[:1]),
    lambda m, a: m.a(a),
], ids=range(13))
def test_other_uses_are_left_alone(combine):
    model, x = uneven_(Twice(combine)), torch.randn(2, 3, 8, 8).double()
    before = copy.deepcopy(model)
    assert equalize_ranges(model, x) == 0
    assert same_weights(model, before)


@pytest.mark.parametrize('between', [nn.GELU(), nn.ReLU6(), nn.SiLU(), nn.Hardswish(), nn.PReLU(), nn.BatchNorm2d(4)])
def test_functions_that_do_not_commute_with_factors(between):
    check(uneven_(nn.Sequential(nn.Conv2d(3, 4, 3), between, nn.Conv2d(4, 4, 3))), 0)


def test_layers_over_the_last_dimension():
    """Linear layers on maps: a convolution scales dimension 1, and a linear layer the last one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc1, self.fc2 = nn.Conv2d(3, 11, 1), nn.Linear(11, 11), nn.Linear(11, 11)
            self.last, self.flat = nn.Conv2d(11, 11, 1), nn.Linear(11, 2)

        def forward(self, x):
            x = self.fc2(self.fc1(self.conv(x).relu()).relu()).relu()
            return self.flat(self.last(x).relu().mean(3).flatten(1).narrow(1, 0, 11))  # slices: not in torch 2.5

    model, x = uneven_(Net()), torch.randn(2, 3, 11, 11).double()
    before = copy.deepcopy(model)
    assert equalize_ranges(model, x) == 1
    with torch.no_grad():
        assert relative(model(x), before(x)) < 1e-12
    assert torch.equal(model.conv.weight, before.conv.weight)
    assert torch.equal(model.last.weight, before.last.weight)
    assert not torch.equal(model.fc2.weight, before.fc2.weight)


def test_tied_weights():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3))
    model[4].weight = model[2].weight
    check(uneven_(model), 0)


@pytest.fixture
def outlier():
    """A net to quantize whose dying channel meets a large entry of the next kernel."""
    pytest.importorskip('torchao')
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5)).eval()
    with torch.no_grad():
        model[0].weight[2] *= 1e-4
        model[0].bias[2] = -1e-6
        model[2].weight[1, 2] = 300.
    return model


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['inductor', 'onnxruntime'])
def test_error_with_one_scale_for_each_weight(outlier, backend):
    before = copy.deepcopy(outlier)
    if backend == 'onnxruntime':
        pytest.importorskip(backend)
    reports = [
        timm_rep.quantize_ptq(outlier, [images(8, 16)], backend, per_channel=False, equalize=equalize).report
        for equalize in (False, True)]
    assert reports[1].relative_rms < reports[0].relative_rms / 3
    assert [report.equalized for report in reports] == [None, 2]
    assert len(str(reports[1]).splitlines()) == len(str(reports[0]).splitlines()) + 1
    assert same_weights(outlier, before)


def test_comes_before_the_diagnosis(outlier, unmeasured):
    settings = dict(per_channel=False, diagnose=True)
    errors = [
        timm_rep.quantize_ptq(outlier, [images(8, 16)], equalize=equalize, **settings).report.layers
        for equalize in (False, True)]
    assert errors[1]['2'] < errors[0]['2'] / 3
