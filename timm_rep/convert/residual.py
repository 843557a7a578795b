"""Find numerically, for blocks of any architecture, where and how FFN outputs enter the residual stream."""
import contextlib
from collections import deque
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Set

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

from timm_rep.layers.fold import to_float64

from .ffn import Ffn

# rows of an activation that are compared, those of them that are compared first, and activations before and after an
# FFN that are looked at
_ROWS, _FEW, _BEFORE, _AFTER = 128, 8, 128, 64
# error of a sum as a part of what is added to the stream
_TOLERANCE = 1e-4


def tokens_of(x: torch.Tensor, channels_first: bool) -> torch.Tensor:
    """An activation as a matrix, (tokens, channels)."""
    x = x.movedim(1, -1) if channels_first else x
    return x.reshape(-1, x.shape[-1])


def image_count(images: Any) -> int:
    """Number of images in the argument of a model, a tensor or a dict of tensors."""
    return len(next(iter(images.values())) if isinstance(images, dict) else images)


def first_tensor(value: Any) -> Optional[torch.Tensor]:
    """The first tensor of the arguments or the output of a module."""
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return value if isinstance(value, torch.Tensor) else None


class Residual(NamedTuple):
    """Place where the residual stream s can be observed to which the output y of an FFN is added as ``s + scale * y``.

    Attributes:
        module: Module whose input or output is s.
        is_input: Whether it is the input.
        channels_first: Whether its channels are at dimension 1.
        scale: Factor of every channel, (out,), float64; 0 where it adds no more than rounding to the stream.
    """
    module: nn.Module
    is_input: bool
    channels_first: bool
    scale: torch.Tensor


class Probe(NamedTuple):
    """Properties of an FFN in its model, found by a forward pass of a few images.

    Attributes:
        tokens: Number of tokens of each image that it receives, in all calls.
        calls: Number of calls in a forward pass.
        prefix_tokens: Number of class and register tokens, the first ones of each image.
        residual: Residual stream that its output is added to; None if it is not, or not as a scaled addition.
    """
    tokens: int
    calls: int
    prefix_tokens: int
    residual: Optional[Residual]


def _spread(n: int) -> torch.Tensor:
    """Up to _ROWS evenly spaced indices of n rows, whatever the default dtype."""
    return torch.linspace(0, n - 1, min(n, _ROWS), dtype=torch.float32).long()


class _Activation(NamedTuple):
    module: nn.Module
    is_input: bool
    channels_first: bool
    tokens: int
    rows: torch.Tensor


class _Pending:
    """The output of an FFN whose addition is yet to come; the activations before it, the latest first."""

    def __init__(self, name: str, tokens: int, y: torch.Tensor, before: List[_Activation], until: int) -> None:
        self.name = name
        self.tokens = tokens
        self.y = y
        self.before = before
        self.few = torch.stack([_few(a.rows) for a in before])
        self.sizes = torch.stack([a.rows.square().mean().sqrt() for a in before])
        self.until = until


def _replaced_parts(ffn: Ffn) -> Set[nn.Module]:
    """Modules of an FFN that its replacement no longer has, so that their activations vanish with the conversion."""
    return {*ffn.module.modules()} - {ffn.module, *ffn.around(nn.Identity()).modules()}


def _scale_of(total: torch.Tensor, stream: torch.Tensor, y: torch.Tensor, eps: float) -> Optional[torch.Tensor]:
    """The scale if ``total = stream + scale * y`` up to rounding, and y is well above rounding."""
    added = total - stream
    scale = (added * y).sum(0) / y.square().sum(0).clamp(min=torch.finfo(y.dtype).tiny)
    roundings = 2 * eps * (total.square().mean(0) + stream.square().mean(0)).sqrt()
    known = (scale * y).square().mean(0).sqrt() > 8 * roundings
    # elsewhere the quotient is rounding, which a target must not be divided by
    if ((scale - 1).abs() < 1e-3)[known].all():
        scale = torch.ones_like(scale)
    else:
        scale = torch.where(known, scale, 0.)
    rounding = roundings.square().mean().sqrt()
    size = (scale * y).square().mean().sqrt()
    error = (added - scale * y).square().mean().sqrt()
    return scale if error <= rounding + _TOLERANCE * size and size > 8 * rounding else None


def _few(rows: torch.Tensor) -> torch.Tensor:
    return rows[::-(-len(rows) // _FEW)]


def _possible_streams(total: torch.Tensor, p: _Pending, eps: float) -> List[int]:
    """Activations before an FFN for which _scale_of may find a scale, by their errors in a few rows.

    Necessary, since least squares leave no more of these rows than any scale does, and these are a part of all squared
    errors. What is added is at most total and stream together.
    """
    few, y = _few(total), _few(p.y)
    added = few - p.few
    scale = (added * y).sum(1, keepdim=True) / y.square().sum(0).clamp(min=torch.finfo(y.dtype).tiny)
    error = (added - scale * y).square().mean((1, 2)).sqrt()
    size = total.square().mean().sqrt() + p.sizes
    largest = (len(total) / len(few)) ** .5 * (2 * eps + _TOLERANCE) * size
    return (error <= 1.1 * largest).nonzero().flatten().tolist()


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() and torch.finfo(x.dtype).bits < 32 else x.detach()


@torch.no_grad()
def probe(model: nn.Module, ffns: Sequence[Ffn], images: Any) -> Dict[str, Probe]:
    """Run a few images through a model, and look at its FFNs.

    The residual stream of an FFN is the latest activation s before it such that an activation after it is
    ``s + scale * y``, where all activations are inputs and outputs of modules. The pass is in float32 at least, without
    autocast: in half precision, small outputs of FFNs are lost in the rounding of the stream.

    Returns:
        By name, in the order of the last calls; FFNs that are not called are missing.
    """
    widths = {ffn.out_features for ffn in ffns}
    count = image_count(images)
    like = next(model.parameters())
    tensors = {name: _at_least_float32(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    images = tree_map(_at_least_float32, images)
    eps = torch.finfo(_at_least_float32(like).dtype).eps
    tokens: Dict[str, int] = {}
    calls: Dict[str, int] = {}
    prefix: Dict[str, int] = {}
    found: Dict[str, Residual] = {}
    recent: Deque[_Activation] = deque(maxlen=_BEFORE)
    pending: List[_Pending] = []
    time = 0
    inner = {m for ffn in ffns for m in _replaced_parts(ffn)}

    def record(module: nn.Module, is_input: bool, value: Any) -> None:
        nonlocal time
        x = first_tensor(value)
        if x is None or not x.is_floating_point() or x.ndim < 2:
            return
        time += 1
        pending[:] = [p for p in pending if p.until > time]
        for channels_first in (False, True):
            if x.shape[1 if channels_first else -1] not in widths or (channels_first and x.ndim < 3):
                continue
            rows = tokens_of(x, channels_first)
            n = len(rows)
            rows = to_float64(rows[_spread(n)])
            activation = _Activation(module, is_input, channels_first, n, rows)
            for p in list(pending):
                if n != p.tokens or rows.shape != p.y.shape:
                    continue
                for s in (p.before[i] for i in _possible_streams(rows, p, eps)):
                    scale = _scale_of(rows, s.rows, p.y, eps)
                    if scale is not None:
                        found[p.name] = Residual(s.module, s.is_input, s.channels_first, scale)
                        pending.remove(p)
                        break
            if module not in inner:
                recent.append(activation)

    def record_input(ffn: Ffn, x: torch.Tensor) -> None:
        n = len(tokens_of(x, ffn.use_conv)) // count
        tokens[ffn.name] = tokens.get(ffn.name, 0) + n
        calls[ffn.name] = calls.pop(ffn.name, 0) + 1  # in the order of the last calls
        first = getattr(model, 'num_prefix_tokens', 0)
        prefix[ffn.name] = first if x.ndim == 3 and len(x) == count and first < n else 0

    def record_features(ffn: Ffn, x: torch.Tensor) -> None:
        g = tokens_of(x, ffn.use_conv)
        n = len(g)
        g = to_float64(g[_spread(n)])
        second = ffn.fc_out()
        y = g @ second.weight.T + second.bias
        before = [a for a in reversed(recent) if a.tokens == n and a.rows.shape == y.shape]
        if before:
            pending.append(_Pending(ffn.name, n, y, before, time + _AFTER))

    with contextlib.ExitStack() as hooks:
        for ffn in ffns:
            hooks.enter_context(
                ffn.first.register_forward_pre_hook(lambda _, args, ffn=ffn: record_input(ffn, args[0])))
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda m, args: record(m, True, args)))
            hooks.enter_context(module.register_forward_hook(lambda m, args, out: record(m, False, out)))
        for ffn in ffns:  # after the hooks that record its inputs
            hooks.enter_context(
                ffn.last.register_forward_pre_hook(lambda _, args, ffn=ffn: record_features(ffn, args[0])))
        with torch.autocast(like.device.type, enabled=False):
            torch.func.functional_call(model, tensors, (images,))
    return {
        name: Probe(tokens[name], n, prefix[name], found.get(name) if n == 1 else None) for name, n in calls.items()}
