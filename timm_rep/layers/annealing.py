"""Activations that become linear and norms that become BatchNorms over the first steps of training.

Norm: `SLAB: Efficient Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch
Normalization`, equations 2 and 3 - https://arxiv.org/abs/2405.11582
"""
import math
import numbers
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
import torch.nn as nn

from .fold import Affine, batch_norm_scale_shift

_SCHEDULES = ('linear', 'cosine')


def check_annealing(anneal_steps: int, anneal_schedule: str) -> None:
    """Raise ValueError unless anneal_steps is an integer >= 2 and the schedule is known."""
    if isinstance(anneal_steps, bool) or not isinstance(anneal_steps, numbers.Integral) or anneal_steps < 2:
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
        self.anneal_steps, self.anneal_schedule = int(anneal_steps), anneal_schedule
        self.register_buffer('step', torch.zeros((), dtype=torch.long, device=device))
        self.is_counted = False  # whether a step was counted by this object
        self.is_collected = False  # whether this step was measured: later passes repeat it, for gradient checkpointing
        self.has_ended = False  # the end of annealing in Python, without a GPU sync or graph break
        self.valid: Optional[torch.Tensor] = None  # patches (N, patches) of this step that are not padding

    def train(self, mode: bool = True) -> '_Annealed':
        self.update_end()
        return super().train(mode)

    def initial_state(self, device: Any = None) -> Dict[str, torch.Tensor]:
        """The parts of the state dict before the first step that a plain model does not have."""
        return {'step': torch.zeros((), dtype=torch.long, device=device)}

    def update_end(self) -> None:
        """Set ``has_ended`` from the buffer."""
        self.has_ended = not self.step.is_meta and bool(self.step >= self.anneal_steps)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.update_end()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> '_Annealed':
        was_meta = self.step.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.step.is_meta:  # by to_empty(): no initialization of timm knows these
            own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            for name, value in self.initial_state(self.step.device).items():
                own[name].data.copy_(value)
            self.update_end()
        return self

    def valid_tokens(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Mask (N, tokens) of the tokens of x (N, tokens, channels) that are not padding, None if none are padding."""
        if self.valid is None:
            return None
        images, prefix = len(self.valid), x.shape[1] - self.valid.shape[1]
        if x.ndim != 3 or len(x) != images or prefix < 0:
            raise ValueError(
                f'Expected tokens of {images} images of {self.valid.shape[1]} patches, some of which are padding, but '
                f'got the shape {tuple(x.shape)}: train this model on images without padding.')
        return torch.cat([self.valid.new_ones(images, prefix), self.valid], 1)

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
                f'Annealing must be finished, got step {self.step.item()} of {self.anneal_steps}: keep training, or '
                'create the model with fewer anneal_steps. Steps are counted when the model itself is called, not by '
                'forward_features(). A moving average of the weights must copy the buffers, not average them.')

    def extra_repr(self) -> str:
        return f'anneal_steps={self.anneal_steps}, anneal_schedule={self.anneal_schedule}'


def add_annealing_hooks(model: nn.Module) -> None:
    """Count the steps of a model's annealed layers, and collect their statistics, on every call of the model."""
    model.register_forward_pre_hook(advance_annealing, with_kwargs=True)
    model.register_forward_hook(_collect_moments)


def remove_annealing_hooks(model: nn.Module) -> None:
    """Remove the hooks of :func:`add_annealing_hooks` from a model and its parts: TorchScript refuses them."""
    for module in model.modules():
        for hooks, own in (
                (module._forward_pre_hooks, advance_annealing), (module._forward_hooks, _collect_moments)):
            for key in [key for key, hook in hooks.items() if hook is own]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks other than those of :func:`add_annealing_hooks`."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(hook is not advance_annealing and hook is not _collect_moments for hook in hooks)


def advance_annealing(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> None:
    """Count a step of all annealed layers of a model in training mode.

    Annealing advances only when the model itself is called. With other methods, such as ``forward_features()``, call
    this function first. Layers do not count by themselves, since gradient checkpointing repeats their forward passes.

    Args:
        model: The model.
        args: Arguments of its call. If some patches of a NaFlexViT are padding (``patch_valid``), they do not count.
        kwargs: Keyword arguments of its call.

    Raises:
        ValueError: Patches are padding, and the model drops patches at random.

    Examples:
        >>> from timm_rep import convert_to_repa
        >>> model = timm.create_model('test_vit').train()
        >>> report = convert_to_repa(model, anneal_steps=100)
        >>> advance_annealing(model)
        >>> features = model.forward_features(torch.randn(2, 3, 160, 160))
    """
    annealed = [m for m in model.modules() if isinstance(m, _Annealed) and m.training]
    valid = _valid_patches(args, kwargs) if annealed else None
    if valid is not None and getattr(model, 'patch_drop', None) is not None:
        raise ValueError(
            f'{type(model).__name__} must not drop patches at random, since its annealed FFNs could not tell which are '
            'padding: create it with patch_drop_rate=0, or train on images without padding.')
    for layer in annealed:
        layer.valid = valid
    layers = [m for m in annealed if not m.has_ended]
    if not layers:
        return
    _collect_moments(model)
    for layer in layers:
        if isinstance(layer, AnnealedActivation):
            layer.update_moments()
    for layer in layers:
        layer.step.add_(layer.step < layer.anneal_steps)
    if torch.compiler.is_compiling():  # an attribute that changes would have the model compiled again
        return
    for layer in layers:
        layer.is_counted = True
        layer.is_collected = False
    if not layers[0].step.is_meta:
        steps = torch.stack([layer.step for layer in layers]).tolist()
        for layer, step in zip(layers, steps):
            layer.has_ended = step >= layer.anneal_steps


def _valid_patches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Optional[torch.Tensor]:
    """``patch_valid`` in the arguments of a NaFlexViT; None if no patch is padding."""
    given = {**dict(zip(('x', 'patch_coord', 'patch_valid'), args)), **kwargs}
    images = given['x'] if isinstance(given.get('x'), dict) else given
    valid = images.get('patch_valid')
    # of other models, the third argument is another one
    return None if not isinstance(valid, torch.Tensor) or bool(valid.all()) else valid.bool()


@torch.no_grad()
def _collect_moments(model: nn.Module, *args: Any) -> None:
    """Average the moments of the last batch of all layers over the processes, by two collectives.

    They take effect at the next step: gradient checkpointing repeats this one with the same lines.
    """
    layers = [m for m in model.modules() if isinstance(m, AnnealedActivation) and m.training and m.batch is not None]
    batches: List[torch.Tensor] = [layer.batch for layer in layers]
    counts = [batch[5:] for batch in batches]
    means = _over_processes([batch[:2] for batch in batches], counts)
    # central moments about the common means
    deviations = [batch[:2] - mean for batch, mean in zip(batches, means)]
    seconds = _over_processes([
        batch[2:5] + _products(d)
        for batch, d in zip(batches, deviations)], counts)
    for layer, mean, second in zip(layers, means, seconds):
        last = torch.cat([mean, second, torch.ones_like(mean[:1])])
        # a compiled model also measures after the end
        layer.pending.copy_(torch.where(layer.step < layer.anneal_steps, last, 0.))
        layer.batch = None
        if not torch.compiler.is_compiling():  # repetitions of a compiled model do not come back here
            layer.is_collected = True


def _merged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Moments of two sets of tokens together: rows are both means, both variances, the covariance, the count."""
    share, d = b[5:] / (a[5:] + b[5:]), b[:2] - a[:2]
    between = share * (1 - share) * _products(d)
    return torch.cat([a[:2] + share * d, torch.lerp(a[2:5], b[2:5], share) + between, a[5:] + b[5:]])


def _products(d: torch.Tensor) -> torch.Tensor:
    """What differences d (2, channels) of both means add to both variances and the covariance."""
    return torch.stack([d[0] * d[0], d[1] * d[1], d[0] * d[1]])


def _over_processes(tensors: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """The means over the tokens of the processes of the default group, if there is one.

    Args:
        tensors: Means of this process, each of shape (rows, channels).
        counts: The number of its tokens, each of shape (1, channels).
    """
    if not tensors or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(tensors)
    sums = [torch.cat([x * count, count]) for x, count in zip(tensors, counts)]
    flat = torch.cat([x.flatten() for x in sums])
    dist.all_reduce(flat)
    sums = [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in sums]), sums)]
    return [x[:-1] / x[-1:] for x in sums]


class AnnealedActivation(_Annealed):
    """An activation whose idle channels change into their least-squares lines: ``(1 - a) act(h) + a (s h + t)``.

    ``s = Cov(h, act(h)) / Var(h)`` and ``t = E act(h) - s E h`` of every channel are estimated from the preceding
    training batches: a plain average at first, later a moving average over about 20 batches. They are fixed at the end.
    After the first step, the channels whose lines cost least, ``importance * E (act(h) - s h - t)^2``, become idle. The
    activation of gates has s = 0, since the gates are multiplied by values. In a process group the batches of all
    processes count, so that all have the same channels and lines.

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
            anneal_steps: Training steps until the layer is foldable, an integer >= 2.
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
        state = self.initial_state(device)
        self.register_buffer('idle', state['idle'])
        # averages of h, act(h), both variances, the covariance, and of 1, by which the others are divided
        self.register_buffer('moments', state['moments'])
        self.register_buffer('pending', state['pending'])  # the last batch of all processes
        self.register_buffer('importance', state['importance'])
        # moments of the last batch of this process, in the last row its number of tokens
        self.batch: Optional[torch.Tensor] = None

    def initial_state(self, device: Any = None) -> Dict[str, torch.Tensor]:
        channels = self.channels
        return {
            **super().initial_state(device),
            'idle': torch.arange(channels, device=device) >= self.active_channels,
            'moments': torch.zeros(6, channels, device=device),
            'pending': torch.zeros(6, channels, device=device),
            'importance': torch.ones(channels, device=device),
        }

    def _load_from_state_dict(
            self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, missing: List[str],
            unexpected: List[str], errors: List[str]) -> None:
        idle, own = state_dict.get(f'{prefix}idle'), self.channels - self.active_channels
        if idle is not None and idle.shape == self.idle.shape and not idle.is_meta and int(idle.sum()) != own:
            errors.append(
                f'{prefix}idle must have {own} idle channels of {self.channels}, got {int(idle.sum())}: create the '
                'model with the idle_ratio of the checkpoint.')
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> '_Annealed':
        before = {name: self._buffers[name] for name in ('moments', 'pending', 'importance')}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self._buffers[name]
            if now.dtype in (torch.float16, torch.bfloat16):  # numbers of tokens and their sums exceed float16
                self._buffers[name] = buffer.to(now.device)
        return self

    def linear_fit(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Slope s and intercept t of every channel, each of shape (channels,)."""
        mean_in, mean_out, var_in, _, cov, weight = self.moments
        tiny = torch.finfo(cov.dtype).tiny
        slope = torch.zeros_like(cov) if self.gates else cov / var_in.clamp(min=tiny)
        return slope, (mean_out - slope * mean_in) / weight.clamp(min=tiny)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_place = any(getattr(module, 'inplace', False) for module in self.act.modules())
        y = self.act(x.clone() if in_place else x)
        if self.training and x.numel() and not self.has_ended and not self.is_collected:
            if not self.is_counted and not torch.compiler.is_compiling():
                self.is_counted = True  # the warning comes once
                warnings.warn(
                    'Annealing advances only when the model itself is called. With forward_features(), call '
                    'timm_rep.layers.advance_annealing(model) first.', stacklevel=2)
            self._measure(x.detach(), y.detach())
        shape = [1] * x.ndim
        shape[self.dim] = -1
        slope, intercept = (v.to(x.dtype).view(shape) for v in self.linear_fit())
        line = (slope * x + intercept).to(y.dtype)  # dtypes differ under autocast for an activation with a parameter
        idle = self.idle.clone().view(shape)  # the next forward pass may write to the buffer before backward()
        return torch.where(idle, torch.lerp(y, line, self.progress(y.dtype)), y)

    @torch.no_grad()
    def _measure(self, x: torch.Tensor, y: torch.Tensor) -> None:
        valid = self.valid_tokens(x)
        if valid is not None:
            x, y = x[valid], y[valid]
        x, y = (v.movedim(self.dim, -1).reshape(-1, self.channels).to(self.moments.dtype) for v in (x, y))
        means = torch.stack([x.mean(0), y.mean(0)])
        x, y = x - means[0], y - means[1]
        batch = torch.cat([means, torch.stack([
            x.square().mean(0), y.square().mean(0), (x * y).mean(0), torch.full_like(x[0], len(x))])])
        self.batch = batch if self.batch is None else _merged(self.batch, batch)  # called several times in a step

    @torch.no_grad()
    def update_moments(self) -> None:
        """Add the moments of the last step to the averages, and choose the idle channels after the first one."""
        # ignore channels whose moments overflowed in mixed precision
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

    From the first step on, the BatchNorm computes its statistics over all tokens of all images, excluding padding.

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
            bn: BatchNorm2d with use_conv, otherwise BatchNorm1d.
            anneal_steps: Training steps until the layer is foldable, an integer >= 2.
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

    def initial_state(self, device: Any = None) -> Dict[str, torch.Tensor]:
        count = torch.zeros((), dtype=torch.long, device=device)
        mean, var = (torch.full((self.bn.num_features,), value, device=device) for value in (0., 1.))
        return {
            **super().initial_state(device), 'alpha': mean[:1].clone(),
            'bn.running_mean': mean, 'bn.running_var': var, 'bn.num_batches_tracked': count}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self._batch_norm(x)
        z = (z + self.alpha * x).to(y.dtype)
        return torch.lerp(y, z, self.progress(y.dtype))

    def _batch_norm(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_conv:
            return self.bn(x)
        valid = self.valid_tokens(x) if self.training else None
        if valid is None:
            return self.bn(x.reshape(-1, x.shape[-1])).view(x.shape)
        z = self.bn(x[valid])
        return x.new_zeros(x.shape, dtype=z.dtype).masked_scatter(valid[..., None], z)

    def affine_before(self, linear: Affine) -> Affine:
        """``x -> linear(BN(x) + alpha x)``: the final function, followed by a linear layer."""
        scale, shift = batch_norm_scale_shift(self.bn)
        scale = scale + self.alpha.detach().to(scale)
        return Affine(linear.weight * scale, linear.bias + linear.weight @ shift)
