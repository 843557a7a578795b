"""The ranges of the calibrators, against definitions written out in full."""
import math

import pytest
import torch

pytest.importorskip('torchao')

from timm_rep.deploy.observers import EntropyObserver, PercentileObserver, PerTensorWeightObserver, entropy_range

SPEC = dict(dtype=torch.uint8, qscheme=torch.per_tensor_affine, quant_min=0, quant_max=255)


def covered(observer, *batches):
    """Lowest and highest value that the scale and the zero point of an observer represent."""
    for x in batches:
        observer(x)
    scale, zero = (x.item() for x in observer.calculate_qparams())
    return -zero * scale, (255 - zero) * scale


@pytest.mark.parametrize('percentile', [90, 99, 99.9])
def test_percentile(percentile):
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0)) * 3 + 1
    cut = (1 - percentile / 100) / 2
    expected = torch.quantile(x, torch.tensor([cut, 1 - cut])).tolist()
    # the second half widens the range of the first
    low, high = covered(PercentileObserver(percentile=percentile, **SPEC), x[x.abs() < 2], x[x.abs() >= 2])
    step = (x.max() - x.min()).item() / 2048 + (high - low) / 255  # a bin, and the rounding of the zero point
    assert low == pytest.approx(expected[0], abs=2 * step)
    assert high == pytest.approx(expected[1], abs=2 * step)


def reference_range(histogram, zero, levels=256, candidates=128):
    """entropy_range() with loops over lists."""
    counts = list(histogram)
    near = sorted(counts[max(zero - 1, 0):zero + 2])
    limit = near[(len(near) - 1) // 2]
    for i in range(max(zero - 1, 0), min(zero + 2, len(counts))):
        counts[i] = min(counts[i], limit)
    best, smallest = None, math.inf
    for k in range(candidates):
        share = 1 + k * (min(1, levels / len(counts)) - 1) / (candidates - 1)
        first, end = zero - round(zero * share), zero + round((len(counts) - zero) * share)
        inside = counts[first:end]
        p = inside.copy()
        p[0] += sum(counts[:first])
        p[-1] += sum(counts[end:])
        bins = [[] for _ in range(levels)]
        for j in range(len(p)):
            bins[j * levels // len(p)].append(j)
        q = [0.] * len(p)
        for level in bins:
            filled = [j for j in level if p[j] > 0]
            for j in filled:
                q[j] = sum(inside[j] for j in level) / len(filled) or 1
        divergence = sum(
            a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q) if a)
        if divergence < smallest - 1e-12:
            best, smallest = (first, end), divergence
    return best


@pytest.mark.parametrize('zero', [0, 100])
def test_entropy_against_loops(zero):
    g = torch.Generator().manual_seed(zero)
    tail = torch.exp(-(torch.arange(320) - zero).abs() / 20)  # sparse, with empty bins and outliers
    histogram = torch.poisson(1000 * tail, generator=g).double()
    histogram[-1] = 3
    assert entropy_range(histogram, zero) == reference_range(histogram.tolist(), zero)


def test_entropy_clips_outliers_and_ignores_the_zeros_of_a_relu():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=g).relu()
    low, high = covered(EntropyObserver(**SPEC), x)
    assert low == 0
    assert 3 < high < 5  # nearly everything
    x[7] = 60.
    assert 3 < covered(EntropyObserver(**SPEC), x)[1] < 10


def test_per_tensor_weight():
    w = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7).view(-1, 1, 1, 1)
    observer = PerTensorWeightObserver(
        dtype=torch.int8, qscheme=torch.per_channel_symmetric, quant_min=-128, quant_max=127)
    observer(w)
    scale, zero = observer.calculate_qparams()
    torch.testing.assert_close(scale, (w.abs().max() / 127.5).expand(6))
    assert not zero.any()
