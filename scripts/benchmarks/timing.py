"""How every benchmark measures time and memory: alternating rounds, medians, peak allocation."""
import itertools
import statistics
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ['Times', 'memory_use', 'milliseconds', 'speedup', 'timing_columns']

Times = Dict[str, List[float]]


def milliseconds(times: Times) -> Dict[str, float]:
    """Median of each side in milliseconds, to four significant digits."""
    return {side: float(f'{1e3 * statistics.median(seconds):.4g}') for side, seconds in times.items()}


def speedup(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the rounds of baseline / seconds.

    The quotient is taken within a round, in which both ran one after the other: a machine that slows down over the
    rounds does not change it.
    """
    return round(statistics.median(slow / fast for fast, slow in zip(seconds, baseline)), 2)


def _spread(seconds: Sequence[float]) -> Optional[float]:
    if len(seconds) < 2:
        return None
    low, middle, high = statistics.quantiles(seconds, n=4, method='inclusive')
    return round(100 * (high - low) / 2 / middle, 1)


def timing_columns(times: Times) -> Dict[str, Dict[str, Any]]:
    """Two columns of a row, both by side: 'ms', the median; 'spread (%)', half of the interquartile range in percent
    of the median, None for a single round.
    """
    return {
        'ms': milliseconds(times),
        'spread (%)': {side: _spread(seconds) for side, seconds in times.items()},
    }


def memory_use(call: Callable[[], object], device: torch.device) -> Tuple[float, float]:
    """Memory that a call allocates on a device, in MB: what is still held after it, and the peak during it."""
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        held, peak = torch.cuda.memory_allocated(device) - before, torch.cuda.max_memory_allocated(device) - before
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        # allocations, and negative ones for what is freed, in the order of time
        changes = sorted(
            (event.start_ns(), event.nbytes()) for event in profiler.profiler.kineto_results.events()
            if event.name() == '[memory]')
        totals = list(itertools.accumulate((size for _, size in changes), initial=0))
        held, peak = totals[-1], max(totals)
    return held / 1e6, peak / 1e6
