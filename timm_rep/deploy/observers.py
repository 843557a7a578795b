"""Calibrators: observers that choose the range of an int8 tensor. Imported only with torchao installed."""
from typing import Any, Dict, Tuple

import torch
import torch.nn as nn
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

_LEVELS = 256  # 8 bits
_CANDIDATES = 128  # ranges tried by entropy_range


class PercentileObserver(HistogramObserver):
    """Covers a percentage of the values, and cuts off equal shares below and above."""

    def __init__(self, percentile: float = 99.99, **kwargs: Any):
        super().__init__(**kwargs)
        self.percentile = percentile

    def _non_linear_param_search(self) -> Tuple[torch.Tensor, torch.Tensor]:  # torchao's hook
        share = self.histogram.double().cumsum(0)
        share /= share[-1].clone()
        cut = (1 - self.percentile / 100) / 2
        first, last = torch.searchsorted(share, torch.tensor([cut, 1 - cut], dtype=torch.float64)).tolist()
        return _edges(self, first, min(last, self.bins - 1) + 1)


class EntropyObserver(HistogramObserver):
    """Covers the range with the smallest Kullback-Leibler divergence after rounding (:func:`entropy_range`)."""

    def __init__(self, percentile: float = 100., **kwargs: Any):  # unused, an argument of all calibrators
        super().__init__(**kwargs)

    def _non_linear_param_search(self) -> Tuple[torch.Tensor, torch.Tensor]:
        width = (self.max_val - self.min_val).item() / self.bins
        zero = round(-self.min_val.item() / width) if width else 0
        return _edges(self, *entropy_range(self.histogram.double(), min(max(zero, 0), self.bins)))


class _MinMaxObserver(MinMaxObserver):
    """Covers all values."""

    def __init__(self, percentile: float = 100., **kwargs: Any):
        super().__init__(**kwargs)


class PerTensorWeightObserver(PerChannelMinMaxObserver):
    """One range for the whole weight, repeated for each channel as inductor's kernels require."""

    def calculate_qparams(self) -> Tuple[torch.Tensor, torch.Tensor]:
        low, high = (x.expand_as(self.min_val) for x in (self.min_val.min(), self.max_val.max()))
        return self._calculate_qparams(low, high)


ACTIVATION_OBSERVERS: Dict[str, Any] = {
    'minmax': _MinMaxObserver,
    'entropy': EntropyObserver,
    'percentile': PercentileObserver,
}


def create_observer(calibrator: str, percentile: float) -> nn.Module:
    """Observer of activations of 8 bits without sign, with one range for the tensor."""
    return ACTIVATION_OBSERVERS[calibrator](
        percentile=percentile, dtype=torch.uint8, qscheme=torch.per_tensor_affine, quant_min=0, quant_max=255)


def _edges(observer: HistogramObserver, first: int, end: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest value of the bins ``first`` to ``end - 1``."""
    width = (observer.max_val - observer.min_val) / observer.bins
    return observer.min_val + width * first, observer.min_val + width * end


def entropy_range(histogram: torch.Tensor, zero: int) -> Tuple[int, int]:
    """Range of histogram bins that minimizes KL(P || Q) under quantization to 256 levels.

    Candidate ranges keep the ratio between the parts below and above zero, and cover at least 256 bins. P is the
    histogram with the values outside the range added to its outermost bins. Q is the histogram of the values inside
    after rounding, each level's count spread evenly over its nonempty bins. Zeros, which a ReLU produces in large
    numbers, are exact after rounding: the count of their bin is limited to the median of its neighbourhood.

    Args:
        histogram: Counts (bins,), float64.
        zero: Index of the first bin of positive values, from 0 to the number of bins.

    Returns:
        First bin, and last bin plus one.
    """
    bins = len(histogram)
    around = slice(max(zero - 1, 0), zero + 2)
    histogram = histogram.clone()
    histogram[around] = histogram[around].clamp(max=histogram[around].median())
    best, smallest = (0, bins), float('inf')
    for share in torch.linspace(1, min(1, _LEVELS / bins), _CANDIDATES, dtype=torch.float64).tolist():
        first, end = zero - round(zero * share), zero + round((bins - zero) * share)
        inside = histogram[first:end]
        p = inside.clone()
        p[0] += histogram[:first].sum()
        p[-1] += histogram[end:].sum()
        level = torch.arange(len(p)) * _LEVELS // len(p)
        counts = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, level, inside)
        filled = torch.zeros(_LEVELS, dtype=torch.float64).index_add_(0, level, (p > 0).double())
        q = torch.where(p > 0, (counts / filled.clamp(min=1))[level], 0)
        # a level with values from outside only has nonempty P but empty Q: count one value
        q = torch.where((p > 0) & (q == 0), 1, q)
        p, q = p / p.sum(), q / q.sum()
        divergence = torch.special.xlogy(p, p / q.clamp(min=torch.finfo(q.dtype).tiny)).sum().item()
        if divergence < smallest:
            best, smallest = (first, end), divergence
    return best
