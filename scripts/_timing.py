"""Numbers out of the seconds that the sides of a comparison took, round by round."""
import statistics
from typing import Dict, List, Optional, Sequence

__all__ = ['milliseconds', 'speedup', 'spreads']

Times = Dict[str, List[float]]


def milliseconds(times: Times) -> Dict[str, float]:
    """Of each side, its median, with the four digits that mean anything."""
    return {side: float(f'{1e3 * statistics.median(seconds):.4g}') for side, seconds in times.items()}


def speedup(of: Sequence[float], over: Sequence[float]) -> float:
    """How many times as fast the one side is as the other: the median of the rounds.

    Of each round by itself, where both ran one after the other, so that a machine which grows slower does not count.
    """
    return round(statistics.median(slow / fast for fast, slow in zip(of, over)), 2)


def _spread(seconds: Sequence[float]) -> Optional[float]:
    if len(seconds) < 2:
        return None
    low, middle, high = statistics.quantiles(seconds, n=4, method='inclusive')
    return round(100 * (high - low) / 2 / middle, 1)


def spreads(times: Times) -> Dict[str, Optional[float]]:
    """How far the rounds of each side lie apart.

    Half of what lies between the first and the third quartile, in percent of the median; None of a single round.
    """
    return {side: _spread(seconds) for side, seconds in times.items()}
