"""Training path of the RePaFormer FFN with its idle channels fused into one matrix.

Idle channels are linear in training mode too. BatchNorm maps an idle channel ``h = w u + b`` to
``s (h - mean(h)) + beta`` with ``s = gamma / sqrt(var(h) + eps)``, where ``mean(h) = w mean(u) + b`` and
``var(h) = w cov(u) w^T``: the mean and the C x C covariance of the input determine the batch statistics of all idle
channels. Their contribution to the output of the second linear layer is one C x C matrix, ``fc2 diag(s) fc1``, whatever
their number; they are neither computed nor kept for the backward pass. Outputs, gradients and running statistics are
the same as with the layers in sequence, up to rounding. Where the inputs are so correlated that rounding would matter,
the layers run in sequence, as they do on other devices than the CPU: on an H100 in eager mode with bfloat16 autocast
(scripts/bench.py ffn-train), the matrix took longer than the layers except for 49,152 or more tokens of 768 channels.
"""
import contextlib
import os
from typing import Any, ContextManager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

# fixed cost of building the matrix, in multiplications, measured on a CPU of two cores from 192 to 768 channels
# (scripts/bench.py ffn-train)
_OVERHEAD = 2e8

_USE_FUSED_IDLE = os.environ.get('TIMM_REP_FUSED_IDLE', '1') != '0'


def use_fused_idle() -> bool:
    """Whether RePaMlp may train with its idle channels fused into one matrix on the CPU."""
    return _USE_FUSED_IDLE


def set_fused_idle(enable: bool = True) -> None:
    """Set whether RePaMlp trains with its idle channels fused into one matrix on the CPU, where that is faster.

    Args:
        enable: Fuse where it is faster, or run the layers in sequence. The environment variable TIMM_REP_FUSED_IDLE=0
            sets False at import.

    Examples:
        >>> before = use_fused_idle()
        >>> set_fused_idle(False)   # to compare with the layers in sequence
        >>> use_fused_idle()
        False
        >>> set_fused_idle(before)
    """
    global _USE_FUSED_IDLE
    _USE_FUSED_IDLE = enable


def fused_idle_is_faster(tokens: int, channels: int, idle: int) -> bool:
    """Whether the matrix is expected to save time in a training step on a CPU.

    The layers in sequence take 6 products of ``tokens * channels * idle`` multiplications, 2 forward and 4 backward.
    The matrix takes 5 of ``tokens * channels * channels`` (covariance, application, and their gradients), 6 of
    ``channels * channels * idle`` to be made (2 forward and 4 backward), and a constant (``_OVERHEAD``).
    """
    return tokens * channels * (6 * idle - 5 * channels) > 6 * channels ** 2 * idle + _OVERHEAD


@torch.compiler.assume_constant_result  # Dynamo of torch 2.11 cannot trace it
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def _full_precision(device: torch.device) -> ContextManager[Any]:
    """Context that disables autocast, on devices that have it."""
    if _has_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


class _Gram(torch.autograd.Function):
    """``x^T x`` of x (tokens, channels), in at least float32, in a compiled graph float64: see :func:`_is_precise`.

    A function of its own, since its gradient ``x (g + g^T)`` takes one product where autograd would take two.
    """

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        with _full_precision(x.device):
            if torch.compiler.is_compiling():
                x = x.double()
            elif x.dtype in (torch.float16, torch.bfloat16):
                x = x.float()
            return x.t() @ x

    # separate from forward(), as torch.func.grad requires
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, = ctx.saved_tensors
        with _full_precision(x.device):
            return x @ (grad + grad.t()).to(x.dtype)


def _next_momentum(norm: _BatchNorm) -> float:
    """Weight of this batch in the running statistics; counts the batch as the forward pass of a BatchNorm does."""
    norm.num_batches_tracked.add_(1)
    return 1. / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def _update(norm: _BatchNorm, part: slice, mean: torch.Tensor, var: torch.Tensor, count: int, momentum: float) -> None:
    """Update the running statistics of some channels with the (biased) statistics of a batch."""
    with torch.no_grad():
        for running, new in ((norm.running_mean, mean), (norm.running_var, var * (count / (count - 1)))):
            running[part].lerp_(new.to(running.dtype), momentum)


def _batch_norm(x: torch.Tensor, norm: _BatchNorm, part: slice, affine: bool, momentum: float) -> torch.Tensor:
    """BatchNorm of the channels ``part`` of x (tokens, channels) in training mode, which updates their statistics.

    ``momentum`` is the weight of this batch.
    """
    weight, bias = (norm.weight[part], norm.bias[part]) if affine else (None, None)
    # copies, since autograd saves the running statistics, which are updated in place for idle channels
    running = [buffer[part].clone() for buffer in (norm.running_mean, norm.running_var)]
    y = F.batch_norm(x, *running, weight, bias, True, momentum, norm.eps)
    with torch.no_grad():
        for buffer, new in zip((norm.running_mean, norm.running_var), running):
            buffer[part].copy_(new)
    return y


def fused_idle_ffn(
        x: torch.Tensor,
        norm1: _BatchNorm,
        fc1: nn.Module,
        act: nn.Module,
        norm2: _BatchNorm,
        fc2: nn.Module,
) -> torch.Tensor:
    """``fc2(norm2(act(fc1(norm1(x)))))`` of x (tokens, channels) in training mode, idle channels fused into one matrix.

    ``act`` is a ChannelIdle with active and idle channels.
    """
    active, count, dtype = act.active_channels, len(x), torch.promote_types(x.dtype, torch.float32)
    u = _batch_norm(x, norm1, slice(None), False, _next_momentum(norm1))
    # autocast leaves float64 as it is
    if u.dtype != torch.float64 and _has_autocast(x.device.type) and torch.is_autocast_enabled(x.device.type):
        u = u.to(torch.get_autocast_dtype(x.device.type))  # cast once, not in each linear layer
    gram = _Gram.apply(u)
    # 0 up to rounding, which is not small for inputs with a mean much larger than their standard deviation
    mean = u.sum(0, dtype=gram.dtype) / count
    w1, w2 = fc1.weight.flatten(1), fc2.weight.flatten(1)
    with _full_precision(x.device):
        covariance = gram / count - torch.outer(mean, mean)
        mean = mean.to(dtype)
        b1 = torch.mv(w1.to(dtype), norm1.bias.to(dtype))
        b1 = b1 if fc1.bias is None else b1 + fc1.bias
        w1 = w1.to(dtype) * norm1.weight
        idle = w1[active:]
        var = ((idle.to(covariance.dtype) @ covariance) * idle).sum(1).clamp(min=0.).to(dtype)
        precise = _is_precise(var + norm2.eps, idle, covariance)
        if precise:
            scaled = w2[:, active:] * (norm2.weight[active:] * (var + norm2.eps).rsqrt())
            matrix = scaled @ idle
            bias = torch.mv(w2[:, active:].to(dtype), norm2.bias[active:].to(dtype))
            bias = bias - torch.mv(matrix, mean)
            bias = (bias if fc2.bias is None else bias + fc2.bias).to(w2.dtype)
            matrix = matrix.to(w2.dtype)
            idle_mean = b1[active:] + torch.mv(idle, mean)
    momentum = _next_momentum(norm2)
    w1, b1 = w1.to(w2.dtype), b1.to(w2.dtype)
    if not precise:
        h = _batch_norm(act(F.linear(u, w1, b1)), norm2, slice(None), True, momentum)
        return F.linear(h, w2, fc2.bias)
    _update(norm2, slice(active, None), idle_mean, var, count, momentum)
    h = act.act(F.linear(u, w1[:active], b1[:active]))
    h = _batch_norm(h, norm2, slice(0, active), True, momentum)
    return F.linear(h, w2[:, :active], bias) + F.linear(u, matrix)


def _is_precise(var: torch.Tensor, idle: torch.Tensor, covariance: torch.Tensor) -> bool:
    """Whether the variances keep at least three digits after rounding; small differences of large sums lose them.

    Always True when compiled, since a graph cannot depend on the result: the sums are in float64 there. And on the
    'meta' device.
    """
    if torch.compiler.is_compiling() or var.is_meta:
        return True
    with torch.no_grad():
        error = torch.finfo(var.dtype).eps * idle.square().sum(1) * torch.linalg.matrix_norm(covariance)
        return bool((error < 1e-3 * var).all())
