"""Training the RePaFormer FFN with its idle channels as one matrix.

Idle channels are linear in train mode too. BatchNorm makes of an idle channel ``h = w x + b``
``s (h - mean(h)) + beta`` with ``s = gamma / sqrt(var(h) + eps)``, and ``var(h) = w cov(x) w^T``: the covariance of the
input, C x C, says what the statistics of all of them are. What the second linear layer makes of them is then one C x C
matrix, ``fc2 diag(s) fc1``, however many they are; they are never computed, nor kept for the backward pass. Outputs,
gradients and running statistics are those of the layers one after the other, up to rounding; where the inputs are so
correlated that rounding would matter, a CPU goes layer by layer.
"""
import contextlib
import os
from typing import Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ['fused_idle_ffn', 'fused_idle_is_faster', 'set_fused_idle', 'sync_group', 'use_fused_idle']

# whether torch multiplies half precision into float32 on a GPU, an AMD one not in all versions that do
_MM_OUT_DTYPE = hasattr(torch.ops.aten.mm, 'dtype') and torch.version.hip is None

# multiplications in the time that making the matrix takes beside its products, measured on a CPU of two cores from 192
# to 768 channels (scripts/bench.py ffn-train)
_OVERHEAD = 2e8

_FAST = os.environ.get('TIMM_REP_FUSED_IDLE', '1') != '0'


def use_fused_idle() -> bool:
    """Whether RePaMlp trains with its idle channels as one matrix, where that pays."""
    return _FAST


def set_fused_idle(enable: bool = True) -> None:
    """Train RePaMlp with its idle channels as one matrix, where that pays, or always layer after layer.

    The environment variable TIMM_REP_FUSED_IDLE=0 starts with the latter.
    """
    global _FAST
    _FAST = enable


def fused_idle_is_faster(tokens: int, channels: int, idle: int) -> bool:
    """Whether the matrix saves time in a training step.

    Layer after layer takes 6 products of ``tokens * channels * idle``, 2 forward and 4 backward. The matrix takes 5 of
    ``tokens * channels * channels``, the covariance, its application, and their gradients, and to be made 2 of
    ``channels * channels * idle`` forward and 4 backward, and the time of some more (``_OVERHEAD``).
    """
    return tokens * channels * (6 * idle - 5 * channels) > 6 * channels ** 2 * idle + _OVERHEAD


def _full_precision(device: torch.device):
    """Autocast off, where there is such a thing."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


@torch.compiler.assume_constant_result
def _sums_up_in_float16() -> bool:
    """Whether a GPU is told to, which then refuses to multiply float16 into float32."""
    return getattr(torch.backends.cuda.matmul, 'allow_fp16_accumulation', False)


def _multiplies_into_float32(x: torch.Tensor) -> bool:
    """Whether torch multiplies what is in half precision into float32."""
    return x.is_cuda and _MM_OUT_DTYPE and not (x.dtype == torch.float16 and _sums_up_in_float16())


@torch.compiler.assume_constant_result
def _multiplies_in_tf32() -> bool:
    """Whether a GPU is told to, by torch's old setting or its new one, which does not bear to be asked for the old."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, 'fp32_precision', None)
    return matmul.allow_tf32 if precision is None else precision == 'tf32'


def _split_tf32(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Of float32, the leading 11 bits of each number, which is what a GPU keeps of it for TF32, and the rest."""
    rest = (x - x.detach().view(torch.int32).bitwise_and(-1 << 13).view(torch.float32)).detach()
    return x - rest, rest


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` to (nearly) float32's precision also where a GPU is told to multiply in TF32; not so its gradient."""
    if not (a.is_cuda and a.dtype == torch.float32 and _multiplies_in_tf32()):
        return a @ b
    (a, a_rest), (b, b_rest) = _split_tf32(a), _split_tf32(b)
    with torch.no_grad():
        rest = a_rest @ b + a @ b_rest
    return a @ b + rest


class _Gram(torch.autograd.Function):
    """``x^T x`` of (tokens, channels), summed up in float32 at least; its gradient takes one product, not two."""
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        with _full_precision(x.device):
            if x.dtype in (torch.float16, torch.bfloat16):
                if _multiplies_into_float32(x):
                    return torch.mm(x.t(), x, out_dtype=torch.float32)
                x = x.float()
            return x.t() @ x

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        x, = ctx.saved_tensors
        with _full_precision(x.device):
            return x @ (grad + grad.t()).to(x.dtype)


class _GramWithTangents(_Gram):
    """For forward-mode differentiation; a compiler leaves its graph for it."""

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _Gram.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, tangent: torch.Tensor) -> torch.Tensor:
        x, = ctx.saved_tensors
        with _full_precision(x.device):
            product = x.float().t() @ tangent.float() if x.dtype.itemsize < 4 else x.t() @ tangent
        return product + product.t()


def _gram(x: torch.Tensor) -> torch.Tensor:
    return (_Gram if torch.compiler.is_compiling() else _GramWithTangents).apply(x)


def sync_group(norm: _BatchNorm) -> Optional[dist.ProcessGroup]:
    """The processes that a SyncBatchNorm takes its statistics over, None if it is this one only."""
    if not isinstance(norm, nn.SyncBatchNorm) or not dist.is_available() or not dist.is_initialized():
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


class _AllReduce(torch.autograd.Function):
    """The sum over the processes of a group; its gradient is the sum of theirs.

    torch's own with a gradient is deprecated, and is not compiled any more.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _AllReduce.apply(grad, ctx.group), None


def _all_reduce(x: torch.Tensor, group: Optional[dist.ProcessGroup]) -> torch.Tensor:
    return x if group is None else _AllReduce.apply(x, group)


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
        # copies, since autograd keeps them, and the statistics of the idle channels beside them change in each pass
        running = [buffer[part].clone() for buffer in (norm.running_mean, norm.running_var)]
        y = F.batch_norm(x, *running, weight, bias, True, momentum, norm.eps)
        with torch.no_grad():
            for buffer, new in zip((norm.running_mean, norm.running_var), running):
                buffer[part].copy_(new)
        return y
    y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = _all_reduce(y.sum(0), group) / count
    y = y - mean
    var = _all_reduce(y.square().sum(0), group) / count
    _update(norm, part, mean, var, count, momentum)
    y = y * (var + norm.eps).rsqrt()
    return (y * weight + bias if affine else y).to(x.dtype)


def fused_idle_ffn(
        x: torch.Tensor,
        norm1: _BatchNorm,
        fc1: nn.Module,
        act: nn.Module,
        norm2: _BatchNorm,
        fc2: nn.Module,
) -> torch.Tensor:
    """``fc2(norm2(act(fc1(norm1(x)))))`` in train mode, the idle channels as one matrix.

    Args:
        x: (tokens, channels).
        norm1: BatchNorm of the channels.
        fc1: Linear layer or 1 x 1 convolution.
        act: ChannelIdle, with channels of both kinds.
        norm2: BatchNorm of the hidden channels; of the same processes as norm1.
        fc2: Linear layer or 1 x 1 convolution.

    Returns:
        (tokens, channels).

    Raises:
        ValueError: There is only one token, which has no variance.
    """
    group, active = sync_group(norm1), act.active_channels
    count = _all_reduce(x.new_full((), len(x), dtype=torch.promote_types(x.dtype, torch.float32)), group)
    # without its affine part the norm has mean 0, and the covariance of what it gives needs no centering
    u = _normalized(x, norm1, slice(None), False, _momentum(norm1), count, group)
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        u = u.to(torch.get_autocast_dtype(x.device.type))  # the linear layers would, each by itself
    covariance = _all_reduce(_gram(u), group) / count
    w1, w2 = fc1.weight.flatten(1), fc2.weight.flatten(1)
    with _full_precision(x.device):
        b1 = torch.mv(w1.to(covariance.dtype), norm1.bias.to(covariance.dtype))
        b1 = b1 if fc1.bias is None else b1 + fc1.bias
        w1 = w1.to(covariance.dtype) * norm1.weight
        idle = w1[active:]
        var = (_product(idle, covariance) * idle).sum(1).clamp(min=0.)
        precise = _is_precise(var + norm2.eps, idle, covariance)
        if precise:
            scaled = w2[:, active:] * (norm2.weight[active:] * (var + norm2.eps).rsqrt())
            matrix = (scaled @ idle).to(w2.dtype)
            bias = torch.mv(w2[:, active:].to(covariance.dtype), norm2.bias[active:].to(covariance.dtype))
            bias = (bias if fc2.bias is None else bias + fc2.bias).to(w2.dtype)
    momentum = _momentum(norm2)
    w1, b1 = w1.to(w2.dtype), b1.to(w2.dtype)
    if not precise:
        h = _normalized(act(F.linear(u, w1, b1)), norm2, slice(None), True, momentum, count, group)
        return F.linear(h, w2, fc2.bias)
    _update(norm2, slice(active, None), b1[active:], var, count, momentum)
    h = act.act(F.linear(u, w1[:active], b1[:active]))
    h = _normalized(h, norm2, slice(0, active), True, momentum, count, group)
    return F.linear(h, w2[:, :active], bias) + F.linear(u, matrix)


def _is_precise(var: torch.Tensor, idle: torch.Tensor, covariance: torch.Tensor) -> bool:
    """Whether rounding leaves the variances their first digits, which it does not where they are small differences.

    Always, as far as a GPU or a compiler is concerned, which would have to wait for the answer.
    """
    if var.device.type != 'cpu' or torch.compiler.is_compiling():
        return True
    with torch.no_grad():
        error = torch.finfo(var.dtype).eps * idle.square().sum(1) * torch.linalg.matrix_norm(covariance)
        return bool((error < 1e-3 * var).all())
