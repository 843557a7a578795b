"""Channel idling: how many channels are active, and the activation of those (RePaFormer, equation 3)."""
import math
from numbers import Real
from typing import Callable, List

import torch
import torch.nn as nn
from torch.jit import Final


def active_channels(channels: int, idle_ratio: float) -> int:
    """Number of activated channels: ``ceil(channels * (1 - idle_ratio))``. They come first.

    The product is computed in floating point, as in the released implementation, whose checkpoints depend on it: where
    ``1 - idle_ratio`` rounds up, the result can exceed the exact one by 1 (33 of 192 channels for the ratio 5 / 6).

    Args:
        channels: Number of channels.
        idle_ratio: Share of the channels that skip the activation, from 0 to 1.

    Returns:
        Number of channels that are activated, 0 to ``channels``.

    Raises:
        ValueError: The ratio is not a number in [0, 1].
    """
    if isinstance(idle_ratio, bool) or not isinstance(idle_ratio, Real) or not 0. <= idle_ratio <= 1.:
        raise ValueError(f'idle_ratio must be in [0, 1], got {idle_ratio!r}.')
    return math.ceil(channels * (1 - float(idle_ratio)))


def idle_ratios(depth: int, idle_ratio: float = 0.75, idle_schedule: str = 'constant') -> List[float]:
    """Idle ratio of every block.

    Args:
        depth: Number of blocks D.
        idle_ratio: Ratio r.
        idle_schedule: 'constant', r in every block; or 'linear', ``(2r - 1) + (2 - 2r) / (D - 1) * (i + 1)`` in block
            i < D - 1 and 0 in the last block, as in the released implementation.

    Returns:
        One ratio per block.

    Raises:
        ValueError: The schedule is unknown, or the ratio of a block is not in [0, 1].

    Examples:
        >>> idle_ratios(4, 0.5, 'linear')
        [0.3333333333333333, 0.6666666666666666, 1.0, 0.0]
    """
    active_channels(1, idle_ratio)
    if idle_schedule == 'constant':
        ratios = [idle_ratio] * depth
    elif idle_schedule == 'linear':
        ratios = [(2 * idle_ratio - 1) + (2 - 2 * idle_ratio) / (depth - 1) * (i + 1) for i in range(depth - 1)] + [0.]
    else:
        raise ValueError(f"idle_schedule must be 'constant' or 'linear', got {idle_schedule!r}.")
    for i, ratio in enumerate(ratios):
        if not 0. <= ratio <= 1.:
            raise ValueError(
                f'The idle ratio of each block must be in [0, 1], got {ratio:.3g} for block {i} of {depth} with '
                f'idle_ratio={idle_ratio} and idle_schedule={idle_schedule!r}. A linear schedule needs a ratio of '
                'about 0.5 to 1.')
    return ratios


class ChannelIdle(nn.Module):
    """Activation applied to the first channels; the remaining ones are idle and pass through (eq. 3).

    Input and output: (..., channels), or with the channels at ``dim``; any dtype the activation supports.

    Examples:
        >>> ChannelIdle(4, idle_ratio=0.5, act_layer=nn.ReLU)(torch.tensor([-1., 2., -3., 4.]))
        tensor([ 0.,  2., -3.,  4.])
    """
    dim: Final[int]

    def __init__(
            self,
            channels: int,
            idle_ratio: float = 0.75,
            act_layer: Callable[[], nn.Module] = nn.GELU,
            dim: int = -1,
    ):
        """
        Args:
            channels: Number of channels.
            idle_ratio: Share of the channels that skip the activation, from 0 to 1.
            act_layer: Element-wise activation.
            dim: Channel dimension.

        Raises:
            ValueError: The ratio is not in [0, 1].
        """
        super().__init__()
        self.dim = dim
        self.channels = channels
        self.active_channels = active_channels(channels, idle_ratio)
        self.act = act_layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.active_channels == self.channels:
            return self.act(x)
        if self.active_channels == 0:
            return x
        active = x.narrow(self.dim, 0, self.active_channels)
        idle = x.narrow(self.dim, self.active_channels, self.channels - self.active_channels)
        return torch.cat((self.act(active), idle), dim=self.dim)

    def extra_repr(self) -> str:
        return f'active={self.active_channels}, idle={self.channels - self.active_channels}'
