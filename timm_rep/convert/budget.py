"""How many channels of every FFN become idle, for a given number of multiply-accumulates of the model."""
from typing import List, Sequence

import torch

__all__ = ['allocate']


def allocate(losses: Sequence[torch.Tensor], macs: Sequence[torch.Tensor], budget: float) -> List[int]:
    """Choose one point of the curve of every FFN: the least total loss within a budget.

    Minimizes ``sum_f loss_f[k_f] + lambda * macs_f[k_f]`` for the smallest multiplier lambda that meets the budget,
    found by bisection. What is left of the budget goes to the FFN whose loss it lowers most.

    Args:
        losses: Loss of every FFN with k idle channels, entry k of hidden_features + 1; float64.
        macs: Multiply-accumulates of every FFN with k idle channels.
        budget: Multiply-accumulates of all FFNs together.

    Returns:
        Number of idle channels of every FFN.

    Raises:
        ValueError: A loss is not finite, or the budget is less than the sum of the least multiply-accumulates.
    """
    def choose(multiplier: float) -> List[int]:
        return [(loss + multiplier * m).argmin().item() for loss, m in zip(losses, macs)]

    def total(idle: Sequence[int]) -> float:
        return sum(m[k].item() for m, k in zip(macs, idle))

    if not all(loss.isfinite().all() for loss in losses):
        raise ValueError('losses must be finite.')
    if budget < sum(m.min().item() for m in macs):
        raise ValueError('The budget is less than the least multiply-accumulates of the FFNs.')
    low, high = 0., torch.finfo(torch.float64).tiny ** .5
    if total(choose(low)) <= budget:
        return choose(low)
    # far above this the losses do not matter
    while total(choose(high)) > budget and high < 1e300:
        low, high = high, 10 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if total(choose(middle)) <= budget else (middle, high)
    idle = choose(high)
    while True:
        left = budget - total(idle)
        # the fewest idle channels of each FFN that the rest of the budget pays for
        options = [(m <= m[k] + left).nonzero()[0].item() for m, k in zip(macs, idle)]
        gains = [(loss[k] - loss[o]).item() if o < k else 0. for loss, k, o in zip(losses, idle, options)]
        best = max(range(len(idle)), key=gains.__getitem__)
        if gains[best] <= 0:
            return idle
        idle[best] = options[best]
