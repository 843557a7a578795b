"""Activations that become linear and norms that become BatchNorms over the first steps of a training.

Norm: `SLAB: Efficient Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch
Normalization`, equations 2 and 3 - https://arxiv.org/abs/2405.11582
"""
import math
import warnings
from typing import Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
from timm.utils import reduce_tensor

from .fold import Affine, batch_norm_scale_shift

__all__ = ['AnnealedActivation', 'AnnealedNorm', 'advance_annealing', 'check_annealing']

_SCHEDULES = ('linear', 'cosine')


def check_annealing(anneal_steps: int, anneal_schedule: str) -> None:
    """Check the arguments of an annealing.

    Raises:
        ValueError: anneal_steps is not an integer above 1, or the schedule is unknown.
    """
    if isinstance(anneal_steps, bool) or not isinstance(anneal_steps, int) or anneal_steps < 2:
        raise ValueError(f'anneal_steps is a number of training steps, at least 2, got {anneal_steps!r}.')
    if anneal_schedule not in _SCHEDULES:
        raise ValueError(f"anneal_schedule is 'linear' or 'cosine', got {anneal_schedule!r}.")


class _Annealed(nn.Module):
    """A layer that changes from one function into another: ``torch.lerp(start(x), end(x), a)``.

    With the number k of forward passes of the model in training mode, of N = anneal_steps, t = (k - 1) / (N - 1) goes
    from 0 to 1; a is t, or (1 - cos(pi t)) / 2 with the schedule 'cosine'. k is the buffer ``step``.
    """

    def __init__(self, anneal_steps: int, anneal_schedule: str = 'linear', device=None):
        super().__init__()
        check_annealing(anneal_steps, anneal_schedule)
        self.anneal_steps, self.anneal_schedule = anneal_steps, anneal_schedule
        self.register_buffer('step', torch.zeros((), dtype=torch.long, device=device))
        self.is_counted = False  # whether a step was counted by this object

    def share(self, dtype: torch.dtype) -> torch.Tensor:
        """The share a of the final function, a scalar from 0 to 1."""
        share = (self.step.clamp(1, self.anneal_steps) - 1) / (self.anneal_steps - 1)
        if self.anneal_schedule == 'cosine':
            share = (1 - torch.cos(math.pi * share)) / 2
        return share.to(dtype)

    def check_end(self) -> None:
        """Refuse to fold before the end.

        Raises:
            ValueError: The annealing has not ended; the message has the step.
        """
        if not self.step.is_meta and self.step < self.anneal_steps:
            raise ValueError(
                f'The annealing is at step {self.step.item()} of {self.anneal_steps}: the model cannot be folded '
                'before its end. Train it on, in training mode, or create it with fewer anneal_steps. A moving average '
                'of weights has to copy the buffers, not average them; passes are counted by model(x), not by its '
                'forward_features().')

    def extra_repr(self) -> str:
        return f'anneal_steps={self.anneal_steps}, anneal_schedule={self.anneal_schedule}'


def advance_annealing(model: nn.Module, *args) -> None:
    """Count a step of all annealed layers of a model in training mode; a forward pre-hook of the model.

    Layers do not count by themselves, since a forward pass that gradient checkpointing repeats is no step. A training
    that calls other methods than the model itself, such as ``forward_features``, calls this function before each step.
    """
    layers = [m for m in model.modules() if isinstance(m, _Annealed) and m.training]
    if not layers:
        return
    torch._foreach_add_([layer.step for layer in layers], 1)
    if not torch.compiler.is_compiling():  # an attribute that changes would have the model compiled again
        for layer in layers:
            layer.is_counted = True


def _over_processes(mean: torch.Tensor) -> torch.Tensor:
    """The mean over the processes of the default group, if there is one."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return mean
    return reduce_tensor(mean, dist.get_world_size())


class AnnealedActivation(_Annealed):
    """An activation whose idle channels change into their least-squares lines: ``(1 - a) act(h) + a (s h + t)``.

    ``s = Cov(h, act(h)) / Var(h)`` and ``t = E act(h) - s E h`` of every channel come from the training batches, as
    averages over all batches at first and over about the last 20 later; they are fixed at the end. In the first step
    those channels become idle whose lines cost least, ``weight * E (act(h) - s h - t)^2``. The activation of gates has
    s = 0, since the gates are multiplied by values. In a process group the batches of all processes count, as many
    tokens each, so that all have the same channels and lines.

    Input and output: (..., channels), or with the channels at dimension 1.
    """

    def __init__(
            self,
            act: nn.Module,
            channels: int,
            active_channels: int,
            anneal_steps: int,
            anneal_schedule: str = 'linear',
            gates: bool = False,
            dim: int = -1,
            device=None,
    ):
        """
        Args:
            act: Element-wise activation.
            channels: Number of channels.
            active_channels: Number of channels that keep the activation.
            anneal_steps: Number of training steps.
            anneal_schedule: 'linear' or 'cosine'.
            gates: Whether the lines are constants.
            dim: Channel dimension, -1 or 1.
            device: Device of the buffers.

        Raises:
            ValueError: anneal_steps or anneal_schedule is invalid.
        """
        super().__init__(anneal_steps, anneal_schedule, device)
        self.act = act
        self.channels, self.active_channels = channels, active_channels
        self.gates, self.dim = gates, dim
        self.register_buffer('idle', torch.arange(channels, device=device) >= active_channels)
        # running averages of h, act(h), both variances, the covariance, and of 1, by which the others are divided
        self.register_buffer('moments', torch.zeros(6, channels, device=device))
        self.register_buffer('seen', torch.zeros((), dtype=torch.long, device=device))  # step of the last batch
        self.register_buffer('weight', torch.ones(channels, device=device), persistent=False)

    def line(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Slope s and intercept t of every channel, each of shape (channels,)."""
        mean_in, mean_out, var_in, _, cov, weight = self.moments
        tiny = torch.finfo(cov.dtype).tiny
        slope = torch.zeros_like(cov) if self.gates else cov / var_in.clamp(min=tiny)
        return slope, (mean_out - slope * mean_in) / weight.clamp(min=tiny)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x.clone() if getattr(self.act, 'inplace', False) else x)
        if self.training and x.numel():
            if not self.is_counted and not torch.compiler.is_compiling():
                self.is_counted = True  # the warning comes once
                warnings.warn(
                    'A forward pass in training mode does not count as a step of the annealing: it is not model(x), '
                    'but perhaps model.forward_features(x). Call timm_rep.layers.advance_annealing(model) before each '
                    'such pass.', stacklevel=2)
            self._see(x.detach(), y.detach())
        shape = [1] * x.ndim
        shape[self.dim] = -1
        slope, intercept = (v.to(x.dtype).view(shape) for v in self.line())
        line = (slope * x + intercept).to(y.dtype)  # another one under autocast, if the activation has a parameter
        idle = self.idle.clone().view(shape)  # another pass before backward() writes to the buffer
        return torch.where(idle, torch.lerp(y, line, self.share(y.dtype)), y)

    @torch.no_grad()
    def _see(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = (v.movedim(self.dim, -1).reshape(-1, self.channels).to(self.moments.dtype) for v in (x, y))
        means = _over_processes(torch.stack([x.mean(0), y.mean(0)]))
        x, y = x - means[0], y - means[1]
        second = torch.stack([x.square().mean(0), y.square().mean(0), (x * y).mean(0)])
        new = torch.cat([means, _over_processes(second), torch.ones_like(means[:1])])
        momentum = (1 / self.step.clamp(min=1)).clamp(min=0.05)
        # a batch that gradient checkpointing repeats counts once; an overflow of mixed precision does not count
        counts = (self.seen < self.step) & (self.step < self.anneal_steps) & new.isfinite().all(0)
        self.moments.copy_(torch.where(counts, torch.lerp(self.moments, new, momentum.to(new.dtype)), self.moments))
        self.seen.copy_(self.step)
        slope, _ = self.line()
        cost = self.weight * (self.moments[3] - slope * self.moments[4])
        chosen = torch.zeros_like(self.idle).scatter(0, cost.argsort()[:self.channels - self.active_channels], True)
        self.idle.copy_(torch.where(self.step > 1, self.idle, chosen))

    def extra_repr(self) -> str:
        idle = self.channels - self.active_channels
        return f'active={self.active_channels}, idle={idle}, {super().extra_repr()}'


class AnnealedNorm(_Annealed):
    """A norm that changes into a re-parameterized BatchNorm: ``(1 - a) norm(x) + a (BN(x) + alpha x)`` (SLAB, eq. 3).

    The BatchNorm takes its statistics over all tokens of all images, from the first step on. Input and output:
    (..., channels), or with the channels at dimension 1.
    """

    def __init__(
            self,
            norm: nn.Module,
            bn: nn.modules.batchnorm._BatchNorm,
            anneal_steps: int,
            anneal_schedule: str = 'linear',
            use_conv: bool = False,
    ):
        """
        Args:
            norm: Norm of the pretrained model.
            bn: BatchNorm, of images with use_conv, of (tokens, channels) without.
            anneal_steps: Number of training steps.
            anneal_schedule: 'linear' or 'cosine'.
            use_conv: Whether the channels are at dimension 1.

        Raises:
            ValueError: anneal_steps or anneal_schedule is invalid.
        """
        super().__init__(anneal_steps, anneal_schedule, bn.weight.device)
        self.norm, self.bn, self.use_conv = norm, bn, use_conv
        # SLAB trains from scratch with 1 at first; 0 makes the BatchNorm resemble a pretrained LayerNorm
        self.alpha = nn.Parameter(
            torch.zeros(1, dtype=bn.weight.dtype, device=bn.weight.device), requires_grad=bn.weight.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.bn(x) if self.use_conv else self.bn(x.reshape(-1, x.shape[-1])).view(x.shape)
        z = (z + self.alpha * x).to(y.dtype)
        return torch.lerp(y, z, self.share(y.dtype))

    def affine_before(self, linear: Affine) -> Affine:
        """``x -> linear(BN(x) + alpha x)``, the final function before a linear layer."""
        scale, shift = batch_norm_scale_shift(self.bn)
        scale = scale + self.alpha.detach().to(scale)
        return Affine(linear.weight * scale, linear.bias + linear.weight @ shift)
