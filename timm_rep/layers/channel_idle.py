"""The FFN of RePaFormer: channel idling in training, three small matrices at deployment.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`, equations 3-7.
"""
import math
from typing import Any, List, Mapping, Optional, Type

import torch
import torch.nn as nn
from timm.layers import DropPath, LayerScale
from torch.jit import Final

from .fold import Affine

__all__ = ['ChannelIdle', 'RePaMlp', 'RePaMlpDeploy', 'active_channels', 'idle_ratios']


def active_channels(channels: int, idle_ratio: float) -> int:
    """How many of ``channels`` are activated: ``ceil(channels * (1 - idle_ratio))``, the first ones.

    In floating point, as the released implementation has it and its checkpoints need it: where ``1 - idle_ratio`` is
    rounded up the result can be one more than on paper, 33 of 192 channels for the ratio 5 / 6.

    Raises:
        ValueError: The ratio is not in [0, 1].
    """
    if not 0. <= idle_ratio <= 1.:
        raise ValueError(
            f'idle_ratio is the share of hidden channels that skip the activation, from 0 to 1, got {idle_ratio}.')
    return math.ceil(channels * (1 - idle_ratio))


def idle_ratios(depth: int, idle_ratio: float = 0.75, idle_schedule: str = 'constant') -> List[float]:
    """The idle ratio of every block.

    Args:
        depth: Number of blocks D.
        idle_ratio: The ratio r.
        idle_schedule: 'constant', r in every block; or 'linear', ``(2r - 1) + (2 - 2r) / (D - 1) * (i + 1)`` in block
            i < D - 1 and 0 in the last, as in the released implementation.

    Raises:
        ValueError: The schedule is unknown, or a block's ratio would not be in [0, 1].
    """
    if idle_schedule == 'constant':
        ratios = [idle_ratio] * depth
    elif idle_schedule == 'linear':
        ratios = [(2 * idle_ratio - 1) + (2 - 2 * idle_ratio) / (depth - 1) * (i + 1) for i in range(depth - 1)] + [0.]
    else:
        raise ValueError(f"idle_schedule is 'constant' or 'linear', got {idle_schedule!r}.")
    for i, ratio in enumerate(ratios):
        if not 0. <= ratio <= 1.:
            raise ValueError(
                f'idle_ratio={idle_ratio} with idle_schedule={idle_schedule!r} gives block {i} of {depth} the idle '
                f'ratio {ratio:.3g}, which is not from 0 to 1. A linear schedule needs idle_ratio of about 0.5 to 1.')
    return ratios


class ChannelIdle(nn.Module):
    """An activation on the first channels only, the rest idle (eq. 3).

    Input and output: (..., channels), any dtype the activation takes.
    """

    def __init__(self, channels: int, idle_ratio: float = 0.75, act_layer: Type[nn.Module] = nn.GELU):
        """
        Args:
            channels: Number of channels.
            idle_ratio: Share of the channels that pass through, from 0 to 1.
            act_layer: Element-wise activation.
        """
        super().__init__()
        self.channels = channels
        self.active_channels = active_channels(channels, idle_ratio)
        self.act = act_layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.active_channels == self.channels:
            return self.act(x)
        if self.active_channels == 0:
            return x
        return torch.cat((self.act(x[..., :self.active_channels]), x[..., self.active_channels:]), dim=-1)

    def extra_repr(self) -> str:
        return f'active={self.active_channels}, idle={self.channels - self.active_channels}'


def _structure_in(state_dict: Mapping[str, Any], prefix: str) -> Optional[str]:
    """Which form of the FFN a state dict holds under ``prefix``: 'training', 'deploy', or None if neither."""
    if f'{prefix}norm1.running_mean' in state_dict:
        return 'training'
    if f'{prefix}fc_in.weight' in state_dict or f'{prefix}shortcut.weight' in state_dict:
        return 'deploy'
    return None


class RePaMlp(nn.Module):
    """The training form of the RePaFormer FFN, normalization and shortcut included (eq. 3).

    ``x + drop_path(layer_scale(fc2(BN(channel_idle(fc1(BN(x)))))))``. Both BatchNorms take their statistics over all
    tokens of all images. Input and output: (..., in_features), channels last.
    """
    structure = 'training'
    structure_in = staticmethod(_structure_in)

    def __init__(
            self,
            in_features: int,
            hidden_features: Optional[int] = None,
            idle_ratio: float = 0.75,
            act_layer: Type[nn.Module] = nn.GELU,
            norm_layer: Type[nn.Module] = nn.BatchNorm1d,
            bias: bool = True,
            drop: float = 0.,
            init_values: Optional[float] = None,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
        """
        Args:
            in_features: Channels C of input and output.
            hidden_features: Hidden channels, in_features if None.
            idle_ratio: Share of the hidden channels that skip the activation, from 0 to 1.
            act_layer: Element-wise activation.
            norm_layer: BatchNorm over the channels of a (tokens, channels) tensor.
            bias: Biases of both linear layers.
            drop: Dropout rate after the activation and after the second linear layer.
            init_values: Initial layer scale; no layer scale if None or 0.
            drop_path: Stochastic depth rate.

        Raises:
            ValueError: The ratio is not in [0, 1].
            TypeError: The norm layer is no BatchNorm, so it could not be folded.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        hidden_features = hidden_features or in_features
        self.idle_ratio = idle_ratio
        self.norm1 = norm_layer(in_features, **dd)
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias, **dd)
        self.act = ChannelIdle(hidden_features, idle_ratio, act_layer)
        self.drop1 = nn.Dropout(drop)
        self.norm2 = norm_layer(hidden_features, **dd)
        self.fc2 = nn.Linear(hidden_features, in_features, bias=bias, **dd)
        self.drop2 = nn.Dropout(drop)
        self.ls = LayerScale(in_features, init_values=init_values, **dd) if init_values else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path > 0. else nn.Identity()
        if not isinstance(self.norm1, nn.modules.batchnorm._BatchNorm):
            raise TypeError(
                f'RePaMlp folds its norms into its linear layers, which only a BatchNorm allows: norm_layer builds '
                f'{type(self.norm1).__name__}, pass nn.BatchNorm1d or a partial of it.')

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # BatchNorm wants its channels second: with all tokens in one axis they are, without a copy
        y = self.norm1(x.reshape(-1, x.shape[-1]))
        y = self.fc1(y)
        y = self.act(y)
        y = self.drop1(y)
        y = self.norm2(y)
        y = self.fc2(y)
        y = self.drop2(y)
        return x + self.drop_path(self.ls(y.view(x.shape)))

    @torch.jit.ignore
    @torch.no_grad()
    def fuse(self) -> 'RePaMlpDeploy':
        """The same function in eval mode as a new module of deploy form (eq. 4-7), whatever mode this one is in.

        Raises:
            ValueError: A BatchNorm has no running statistics.
            OverflowError: A folded weight does not fit the dtype of the model.
        """
        active = self.act.active_channels
        fc_in = Affine.from_linear(self.fc1).after_norm(self.norm1)
        fc_out = Affine.from_linear(self.fc2).after_norm(self.norm2)
        if isinstance(self.ls, LayerScale):
            fc_out = fc_out.scaled(self.ls.gamma)

        deploy = RePaMlpDeploy(
            self.fc1.in_features,
            self.fc1.out_features,
            idle_ratio=self.idle_ratio,
            device='meta',  # nothing to initialize, and no random numbers drawn
        )
        if active < self.fc1.out_features:
            idle = fc_out.inputs(active).after(fc_in.outputs(active))
            idle.plus_identity().write_to(deploy.shortcut, like=self.fc2.weight)
        if active > 0:
            fc_in.outputs(0, active).write_to(deploy.fc_in, like=self.fc1.weight)
            fc_out.inputs(0, active).write_to(deploy.fc_out, like=self.fc2.weight)
            deploy.act = self.act.act
        return deploy.train(self.training)


class RePaMlpDeploy(nn.Module):
    """The deploy form of the RePaFormer FFN: at most three small matrices (eq. 7).

    ``fc_out(act(fc_in(x))) + shortcut(x)``. Without idle channels the shortcut is the identity, without active ones
    there is only the shortcut. Input and output: (..., in_features), channels last. Three plain linear layers, which
    measure no slower than one wide matrix with an activation on its slice (``scripts/bench.py deploy-ffn``).
    """
    structure = 'deploy'
    structure_in = staticmethod(_structure_in)
    has_active: Final[bool]

    def __init__(
            self,
            in_features: int,
            hidden_features: Optional[int] = None,
            idle_ratio: float = 0.75,
            act_layer: Type[nn.Module] = nn.GELU,
            device=None,
            dtype=None,
    ):
        """
        Args:
            in_features: Channels C of input and output.
            hidden_features: Hidden channels of the training form, in_features if None.
            idle_ratio: Share of them that skips the activation, from 0 to 1.
            act_layer: Element-wise activation.

        Raises:
            ValueError: The ratio is not in [0, 1].
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        hidden_features = hidden_features or in_features
        active_features = active_channels(hidden_features, idle_ratio)
        has_idle = active_features < hidden_features
        self.has_active = active_features > 0
        if self.has_active:
            self.fc_in = nn.Linear(in_features, active_features, **dd)
            self.act = act_layer()
            self.fc_out = nn.Linear(active_features, in_features, bias=not has_idle, **dd)
        self.shortcut = nn.Linear(in_features, in_features, **dd) if has_idle else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.has_active:
            return self.fc_out(self.act(self.fc_in(x))) + self.shortcut(x)
        return self.shortcut(x)
