"""Calibrators of torchao: what ranges int8 covers. Imported only with torchao installed."""
from typing import Tuple

import torch
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver

__all__ = ['ACTIVATION_OBSERVERS', 'EntropyObserver', 'PerTensorWeightObserver', 'PercentileObserver', 'entropy_range']

_LEVELS = 256  # values of eight bits
_CANDIDATES = 128  # ranges that the search of the smallest divergence tries


class PercentileObserver(HistogramObserver):
    """The range that holds a share of the values, as much cut off below as above."""

    def __init__(self, percentile: float = 99.99, **kwargs):
        """
        Args:
            percentile: Share of the values in percent.
            kwargs: As for torchao's HistogramObserver.
        """
        super().__init__(**kwargs)
        self.percentile = percentile

    def _non_linear_param_search(self) -> Tuple[torch.Tensor, torch.Tensor]:  # torchao's hook for the choice of a range
        share = self.histogram.double().cumsum(0)
        share /= share[-1].clone()
        cut = (1 - self.percentile / 100) / 2
        first, last = torch.searchsorted(share, torch.tensor([cut, 1 - cut], dtype=torch.float64)).tolist()
        return _edges(self, first, min(last, self.bins - 1) + 1)


class EntropyObserver(HistogramObserver):
    """The range that changes the distribution least, by the Kullback-Leibler divergence (:func:`entropy_range`)."""

    def __init__(self, percentile: float = 100., **kwargs):
        """
        Args:
            percentile: Unused, an argument of all calibrators.
            kwargs: As for torchao's HistogramObserver.
        """
        super().__init__(**kwargs)

    def _non_linear_param_search(self) -> Tuple[torch.Tensor, torch.Tensor]:
        width = (self.max_val - self.min_val).item() / self.bins
        zero = round(-self.min_val.item() / width) if width else 0
        return _edges(self, *entropy_range(self.histogram.double(), min(max(zero, 0), self.bins)))


class _MinMaxObserver(MinMaxObserver):
    """All values that were seen."""

    def __init__(self, percentile: float = 100., **kwargs):
        super().__init__(**kwargs)


class PerTensorWeightObserver(PerChannelMinMaxObserver):
    """The range of the whole weight, for every channel: inductor's kernels take one scale for each channel."""

    def calculate_qparams(self) -> Tuple[torch.Tensor, torch.Tensor]:
        low, high = (x.expand_as(self.min_val) for x in (self.min_val.min(), self.max_val.max()))
        return self._calculate_qparams(low, high)


ACTIVATION_OBSERVERS = {
    'minmax': _MinMaxObserver,
    'entropy': EntropyObserver,
    'percentile': PercentileObserver,
}


def _edges(observer: HistogramObserver, first: int, end: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest value of the bins from ``first`` to before ``end``."""
    width = (observer.max_val - observer.min_val) / observer.bins
    return observer.min_val + width * first, observer.min_val + width * end


def entropy_range(histogram: torch.Tensor, zero: int) -> Tuple[int, int]:
    """The bins whose values, in 256 levels, have the distribution closest to that of all values.

    The candidates keep the ratio of the range below zero to that above, and cover at least 256 bins. ``P`` is the
    histogram with the values outside added to the outermost bins, ``Q`` that of the values inside after rounding: each
    level's count spread evenly over its bins that are not empty. Sought is the smallest ``KL(P || Q)``. Zeros, of which
    a ReLU makes many, are rounded without an error: the bin that holds them counts no more than those beside it.

    Args:
        histogram: Counts (bins,), float64.
        zero: Index of the first bin of positive values, from 0 to the number of bins.

    Returns:
        The first bin, and the one behind the last.
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
        # where only values from outside fell into a level, Q is empty and P is not: as one value
        q = torch.where((p > 0) & (q == 0), 1, q)
        p, q = p / p.sum(), q / q.sum()
        divergence = torch.special.xlogy(p, p / q.clamp(min=torch.finfo(q.dtype).tiny)).sum().item()
        if divergence < smallest:
            best, smallest = (first, end), divergence
    return best
