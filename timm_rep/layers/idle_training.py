"""Training the RePaFormer FFN with its idle channels as one matrix.

Idle channels are linear in train mode too. BatchNorm makes of an idle channel ``h = w x + b``
``s (h - mean(h)) + beta`` with ``s = gamma / sqrt(var(h) + eps)``, and ``var(h) = w cov(x) w^T``: the covariance of the
input, C x C, says what the statistics of all of them are. What the second linear layer makes of them is then one C x C
matrix, ``fc2 diag(s) fc1``, however many they are; they are never computed, nor kept for the backward pass. Outputs,
gradients and running statistics are those of the layers one after the other, up to rounding.
"""
import os
from typing import Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ['idle_matrix_pays', 'set_fast_train', 'train_ffn', 'use_fast_train']

# whether torch multiplies half precision into float32 on a GPU
_WIDENS = hasattr(torch.ops.aten.mm, 'dtype')

_FAST = os.environ.get('TIMM_REP_FAST_TRAIN', '1') != '0'


def use_fast_train() -> bool:
    """Whether RePaMlp trains with its idle channels as one matrix, where that pays."""
    return _FAST


def set_fast_train(enable: bool = True) -> None:
    """Train RePaMlp with its idle channels as one matrix, where that pays, or always layer after layer.

    The environment variable TIMM_REP_FAST_TRAIN=0 starts with the latter.
    """
    global _FAST
    _FAST = enable


def idle_matrix_pays(tokens: int, channels: int, idle: int) -> bool:
    """Whether the matrix saves time in a training step.

    Layer after layer takes 6 products of ``tokens * channels * idle``, 2 forward and 4 backward. The matrix takes 5 of
    ``tokens * channels * channels``, the covariance, its application, and their gradients, and to be made 2 of
    ``channels * channels * idle`` forward and 4 backward. Measured, what it saves has to exceed what it costs by a
    quarter (``scripts/bench.py ffn-train``).
    """
    return tokens * (6 * idle - 5 * channels) > 1.25 * 6 * channels * idle


class _Gram(torch.autograd.Function):
    """``x^T x`` of (tokens, channels), summed up in float32 at least, which autocast would not."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch.autocast(x.device.type, enabled=False):
            if x.dtype in (torch.float16, torch.bfloat16):
                if x.is_cuda and _WIDENS:
                    return torch.mm(x.t(), x, out_dtype=torch.float32)
                x = x.float()
            return x.t() @ x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        x, = ctx.saved_tensors
        return x @ (grad + grad.t()).to(x.dtype)


def _group(norm: _BatchNorm) -> Optional[dist.ProcessGroup]:
    """The processes that a SyncBatchNorm takes its statistics over, None if it is this one only."""
    if not isinstance(norm, nn.SyncBatchNorm) or not dist.is_available() or not dist.is_initialized():
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _summed(x: torch.Tensor, group: Optional[dist.ProcessGroup]) -> torch.Tensor:
    if group is None:
        return x
    from torch.distributed.nn.functional import all_reduce  # with gradients; not in every build of torch

    return all_reduce(x, group=group)


def _momentum(norm: _BatchNorm) -> float:
    """The weight of this batch in the running statistics, counted as a BatchNorm does in its forward pass."""
    norm.num_batches_tracked.add_(1)
    return 1. / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def _update(norm: _BatchNorm, part: slice, mean: torch.Tensor, var: torch.Tensor, count, momentum: float) -> None:
    with torch.no_grad():
        for running, new in ((norm.running_mean, mean), (norm.running_var, var * (count / (count - 1)))):
            running[part].lerp_(new.to(running.dtype), momentum)


def _normalized(
        x: torch.Tensor,
        norm: _BatchNorm,
        part: slice,
        affine: bool,
        momentum: float,
        count: torch.Tensor,
        group: Optional[dist.ProcessGroup],
) -> torch.Tensor:
    """BatchNorm of (tokens, channels) with its statistics of these channels, which it brings up to date."""
    weight, bias = (norm.weight[part], norm.bias[part]) if affine else (None, None)
    if group is None:
        return F.batch_norm(
            x, norm.running_mean[part], norm.running_var[part], weight, bias, True, momentum, norm.eps)
    y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = _summed(y.sum(0), group) / count
    y = y - mean
    var = _summed(y.square().sum(0), group) / count
    _update(norm, part, mean, var, count, momentum)
    y = y * (var + norm.eps).rsqrt()
    return (y * weight + bias if affine else y).to(x.dtype)


def train_ffn(
        x: torch.Tensor,
        norm1: _BatchNorm,
        fc1: nn.Module,
        act: nn.Module,
        norm2: _BatchNorm,
        fc2: nn.Module,
        active: int,
) -> torch.Tensor:
    """``fc2(norm2(channel_idle(fc1(norm1(x)))))`` in train mode, the idle channels as one matrix.

    Args:
        x: (tokens, channels).
        norm1: BatchNorm of the channels; of several processes with SyncBatchNorm, as norm2.
        fc1: Linear layer or 1 x 1 convolution.
        act: Activation of the first channels.
        norm2: BatchNorm of the hidden channels.
        fc2: Linear layer or 1 x 1 convolution.
        active: How many channels are activated, at least 1 and not all.

    Returns:
        (tokens, channels).

    Raises:
        ValueError: There is only one token, which has no variance.
    """
    group = _group(norm1)
    count = _summed(x.new_full((), len(x), dtype=torch.promote_types(x.dtype, torch.float32)), group)
    # without its affine part the norm has mean 0, and the covariance of what it gives needs no centering
    u = _normalized(x, norm1, slice(None), False, _momentum(norm1), count, group)
    covariance = _summed(_Gram.apply(u), group) / count
    with torch.autocast(x.device.type, enabled=False):
        w1, b1, w2 = fc1.weight.flatten(1), fc1.bias, fc2.weight.flatten(1)
        bias = torch.mv(w1.to(covariance.dtype), norm1.bias.to(covariance.dtype))
        b1 = bias if b1 is None else bias + b1
        w1 = w1.to(covariance.dtype) * norm1.weight
        idle = w1[active:]
        var = ((idle @ covariance) * idle).sum(1)
        scale = norm2.weight[active:] * (var + norm2.eps).rsqrt()
        matrix = (w2[:, active:] * scale) @ idle
        bias = torch.mv(w2[:, active:].to(covariance.dtype), norm2.bias[active:].to(covariance.dtype))
        bias = bias if fc2.bias is None else bias + fc2.bias
    momentum = _momentum(norm2)
    _update(norm2, slice(active, None), b1[active:], var, count, momentum)
    h = act(F.linear(u, w1[:active].to(fc1.weight.dtype), b1[:active].to(fc1.weight.dtype)))
    h = _normalized(h, norm2, slice(0, active), True, momentum, count, group)
    y = F.linear(h, w2[:, :active], bias.to(w2.dtype))
    return y + F.linear(u, matrix.to(w2.dtype))
