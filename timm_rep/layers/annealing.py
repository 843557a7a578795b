"""Activations that become linear and norms that become BatchNorms over the first steps of training.

Norm: `SLAB: Efficient Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch
Normalization`, equations 2 and 3 - https://arxiv.org/abs/2405.11582
"""
import math
import warnings
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
import torch.nn as nn

from .fold import Affine, batch_norm_scale_shift

__all__ = ['AnnealedActivation', 'AnnealedNorm', 'add_annealing_hooks', 'advance_annealing', 'check_annealing']

_SCHEDULES = ('linear', 'cosine')


def check_annealing(anneal_steps: int, anneal_schedule: str) -> None:
    """Check the arguments of an annealing.

    Raises:
        ValueError: anneal_steps is not an integer >= 2, or the schedule is unknown.
    """
    if isinstance(anneal_steps, bool) or not isinstance(anneal_steps, int) or anneal_steps < 2:
        raise ValueError(f'anneal_steps must be an integer >= 2, got {anneal_steps!r}.')
    if anneal_schedule not in _SCHEDULES:
        raise ValueError(f"anneal_schedule must be 'linear' or 'cosine', got {anneal_schedule!r}.")


class _Annealed(nn.Module):
    """A layer that changes from one function into another: ``torch.lerp(start(x), end(x), a)``.

    At training step k of N = anneal_steps, t = (k - 1) / (N - 1); a is t, or (1 - cos(pi t)) / 2 with the schedule
    'cosine'. k is the buffer ``step``.
    """

    def __init__(self, anneal_steps: int, anneal_schedule: str = 'linear', device: Any = None):
        super().__init__()
        check_annealing(anneal_steps, anneal_schedule)
        self.anneal_steps, self.anneal_schedule = anneal_steps, anneal_schedule
        self.register_buffer('step', torch.zeros((), dtype=torch.long, device=device))
        self.is_counted = False  # whether a step was counted by this object
        self.has_ended = False  # a copy of what the buffer says, which graphs and GPUs need not wait for

    def train(self, mode: bool = True) -> '_Annealed':
        self.update_end()
        return super().train(mode)

    def update_end(self) -> None:
        """Set ``has_ended`` from the buffer."""
        self.has_ended = not self.step.is_meta and bool(self.step >= self.anneal_steps)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.update_end()

    def progress(self, dtype: torch.dtype) -> torch.Tensor:
        """Weight a of the final function, a scalar from 0 to 1."""
        progress = (self.step.clamp(1, self.anneal_steps) - 1) / (self.anneal_steps - 1)
        if self.anneal_schedule == 'cosine':
            progress = (1 - torch.cos(math.pi * progress)) / 2
        return progress.to(dtype)

    def check_end(self) -> None:
        """Raise ValueError if annealing is not finished."""
        if not self.step.is_meta and self.step < self.anneal_steps:
            raise ValueError(
                f'Annealing is not finished (step {self.step.item()} of {self.anneal_steps}). Keep training, or create '
                'the model with fewer anneal_steps. Steps are counted when the model itself is called, not by '
                'forward_features(). A moving average of the weights must copy the buffers, not average them.')

    def extra_repr(self) -> str:
        return f'anneal_steps={self.anneal_steps}, anneal_schedule={self.anneal_schedule}'


def add_annealing_hooks(model: nn.Module) -> None:
    """Let a model count the steps of its annealed layers, and collect their statistics, whenever it is called."""
    model.register_forward_pre_hook(advance_annealing)
    model.register_forward_hook(_collect_moments)


def advance_annealing(model: nn.Module, *args: Any) -> None:
    """Count a step of all annealed layers of a model in training mode.

    Annealing advances only when the model itself is called. With other methods, such as ``forward_features()``, call
    this function first. Layers do not count by themselves, since gradient checkpointing repeats their forward passes.
    """
    layers = [m for m in model.modules() if isinstance(m, _Annealed) and m.training and not m.has_ended]
    if not layers:
        return
    _collect_moments(model)
    for layer in layers:
        if isinstance(layer, AnnealedActivation):
            layer.update_moments()
    torch._foreach_add_([layer.step for layer in layers], 1)
    if torch.compiler.is_compiling():  # an attribute that changes would have the model compiled again
        return
    for layer in layers:
        layer.is_counted = True
    if not layers[0].step.is_meta:
        steps = torch.stack([layer.step for layer in layers]).tolist()
        for layer, step in zip(layers, steps):
            layer.has_ended = step >= layer.anneal_steps


@torch.no_grad()
def _collect_moments(model: nn.Module, *args: Any) -> None:
    """Average the moments of the last batch of all layers over the processes, by two collectives.

    They take effect at the next step: gradient checkpointing repeats this one with the same lines.
    """
    layers = [m for m in model.modules() if isinstance(m, AnnealedActivation) and m.batch is not None]
    batches: List[torch.Tensor] = [layer.batch for layer in layers]
    means = _over_processes([batch[:2] for batch in batches])
    # central moments about the common means
    deviations = [batch[:2] - mean for batch, mean in zip(batches, means)]
    seconds = _over_processes([
        batch[2:] + torch.stack([d[0] * d[0], d[1] * d[1], d[0] * d[1]]) for batch, d in zip(batches, deviations)])
    for layer, mean, second in zip(layers, means, seconds):
        layer.pending.copy_(torch.cat([mean, second, torch.ones_like(mean[:1])]))
        layer.batch = None


def _over_processes(tensors: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """The means over the processes of the default group, if there is one."""
    if not tensors or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(tensors)
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors)]


class AnnealedActivation(_Annealed):
    """An activation whose idle channels change into their least-squares lines: ``(1 - a) act(h) + a (s h + t)``.

    ``s = Cov(h, act(h)) / Var(h)`` and ``t = E act(h) - s E h`` of every channel come from the training batches of the
    steps before, as averages over all batches at first and over about the last 20 later; they are fixed at the end.
    After the first step, the channels whose lines cost least, ``importance * E (act(h) - s h - t)^2``, become idle. The
    activation of gates has s = 0, since the gates are multiplied by values. In a process group the batches of all
    processes count, with the same number of tokens each, so that all have the same channels and lines.

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
            device: Optional[Union[str, torch.device]] = None,
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
        # averages of h, act(h), both variances, the covariance, and of 1, by which the others are divided
        self.register_buffer('moments', torch.zeros(6, channels, device=device))
        self.register_buffer('pending', torch.zeros(6, channels, device=device))  # of the last batch of all processes
        self.register_buffer('importance', torch.ones(channels, device=device))
        self.batch: Optional[torch.Tensor] = None  # moments of the last batch of this process, without the last row

    def linear_fit(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Slope s and intercept t of every channel, each of shape (channels,)."""
        mean_in, mean_out, var_in, _, cov, weight = self.moments
        tiny = torch.finfo(cov.dtype).tiny
        slope = torch.zeros_like(cov) if self.gates else cov / var_in.clamp(min=tiny)
        return slope, (mean_out - slope * mean_in) / weight.clamp(min=tiny)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x.clone() if getattr(self.act, 'inplace', False) else x)
        if self.training and x.numel() and not self.has_ended:
            if not self.is_counted and not torch.compiler.is_compiling():
                self.is_counted = True  # the warning comes once
                warnings.warn(
                    'Annealing advances only when the model itself is called. With forward_features(), call '
                    'timm_rep.layers.advance_annealing(model) first.', stacklevel=2)
            self._measure(x.detach(), y.detach())
        shape = [1] * x.ndim
        shape[self.dim] = -1
        slope, intercept = (v.to(x.dtype).view(shape) for v in self.linear_fit())
        line = (slope * x + intercept).to(y.dtype)  # under autocast, an activation with a parameter has another dtype
        idle = self.idle.clone().view(shape)  # another pass before backward() writes to the buffer
        return torch.where(idle, torch.lerp(y, line, self.progress(y.dtype)), y)

    @torch.no_grad()
    def _measure(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = (v.movedim(self.dim, -1).reshape(-1, self.channels).to(self.moments.dtype) for v in (x, y))
        means = torch.stack([x.mean(0), y.mean(0)])
        x, y = x - means[0], y - means[1]
        self.batch = torch.cat([means, torch.stack([x.square().mean(0), y.square().mean(0), (x * y).mean(0)])])

    @torch.no_grad()
    def update_moments(self) -> None:
        """Add the moments of the last step to the averages, and choose the idle channels after the first one."""
        # an overflow of mixed precision does not count
        counts = (self.pending[5] > 0) & self.pending.isfinite().all(0)
        momentum = (1 / self.step.clamp(min=1)).clamp(min=0.05).to(self.moments.dtype)
        is_first = (self.moments[5] == 0).all() & counts.any()
        self.moments.copy_(torch.where(counts, torch.lerp(self.moments, self.pending, momentum), self.moments))
        self.pending.zero_()
        slope, _ = self.linear_fit()
        cost = self.importance * (self.moments[3] - slope * self.moments[4])
        chosen = torch.zeros_like(self.idle).scatter(0, cost.argsort()[:self.channels - self.active_channels], True)
        self.idle.copy_(torch.where(is_first, chosen, self.idle))

    def extra_repr(self) -> str:
        idle = self.channels - self.active_channels
        return f'active={self.active_channels}, idle={idle}, {super().extra_repr()}'


class AnnealedNorm(_Annealed):
    """A norm that changes into a re-parameterized BatchNorm: ``(1 - a) norm(x) + a (BN(x) + alpha x)`` (SLAB, eq. 3).

    The BatchNorm takes its statistics over all tokens of all images, from the first step on.

    Input and output: (..., channels), or with the channels at dimension 1.
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
        return torch.lerp(y, z, self.progress(y.dtype))

    def affine_before(self, linear: Affine) -> Affine:
        """``x -> linear(BN(x) + alpha x)``: the final function, followed by a linear layer."""
        scale, shift = batch_norm_scale_shift(self.bn)
        scale = scale + self.alpha.detach().to(scale)
        return Affine(linear.weight * scale, linear.bias + linear.weight @ shift)
