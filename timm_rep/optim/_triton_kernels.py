"""The steps of RepSGD and RepAdamW in Triton: one pass over parameter, gradient and state, all tensors in one launch.

A kernel finds its tensors through a table of :class:`timm_rep.optim._tables.Row`, as torch's fused optimizers do, and
makes the multiplier of every entry of numbers of its output channel. Only who launches a kernel imports this file: not
every machine has Triton.
"""
import triton
import triton.language as tl

from ._tables import BLOCK, Row

__all__ = ['adamw_kernel', 'sgd_kernel']

(
    _PARAM, _GRAD, _STATE, _STATE2, _STATE3, _FIRST, _MULTIPLIERS, _CHANNELS_LAST, _NUMEL, _WINDOW,
    _ROW, _ROW_MAGIC, _ROW_SHIFT, _INNER, _INNER_MAGIC, _INNER_SHIFT,
) = map(tl.constexpr, range(len(Row._fields)))
_COLUMNS = tl.constexpr(len(Row._fields))
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _quotient(x, magic, shift):
    """x // divisor for x below 2 ** 31, see :func:`timm_rep.optim._tables.reciprocal`."""
    # by way of 32 bits, so that the product is one instruction
    product = x.to(tl.uint32).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)
    return (product >> shift.to(tl.uint64)).to(tl.int32)


@triton.jit
def _pointers(address, entries, dtype: tl.constexpr, aligned: tl.constexpr):
    pointers = address.to(tl.pointer_type(dtype)) + entries
    if aligned:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), _BLOCK)
    return pointers


@triton.jit
def _block(tensors, blocks, found_inf, aligned: tl.constexpr):
    """What this program is for: which tensor, its row of the table, entries of it, and how many there are to update."""
    program = tl.program_id(0)
    index = tl.load(blocks + 2 * program)
    tensor = tensors + index * _COLUMNS
    entries = tl.load(blocks + 2 * program + 1) * _BLOCK + tl.arange(0, _BLOCK)
    numel = tl.load(tensor + _NUMEL).to(tl.int32)
    if found_inf is not None:
        numel = tl.where(tl.load(found_inf) == 0., numel, 0)
    if aligned:
        numel = tl.multiple_of(numel, 16)
    return index, tensor, entries, numel


@triton.jit
def _multiplier(tensor, entries, mask):
    """Of these entries of the kernel; a row of the multipliers is of one output channel, see multipliers() there."""
    window = tl.load(tensor + _WINDOW).to(tl.int32)
    row, inner = tl.load(tensor + _ROW).to(tl.int32), tl.load(tensor + _INNER).to(tl.int32)
    channel = _quotient(entries, tl.load(tensor + _ROW_MAGIC), tl.load(tensor + _ROW_SHIFT))
    in_row = entries - channel * row
    outer = _quotient(in_row, tl.load(tensor + _INNER_MAGIC), tl.load(tensor + _INNER_SHIFT))
    position = tl.where(tl.load(tensor + _CHANNELS_LAST) != 0, outer, in_row - outer * inner)
    of_channel = tl.load(tensor + _MULTIPLIERS).to(tl.pointer_type(tl.float32)) + channel * (window + 2)
    diagonal = tl.load(of_channel + window, mask, other=0.)
    on_diagonal = in_row == tl.load(of_channel + window + 1, mask, other=-1.).to(tl.int32)
    return tl.load(of_channel + position, mask, other=0.) + tl.where(on_diagonal, diagonal, 0.)


@triton.jit
def sgd_kernel(
        tensors, blocks, lr, momentum, new_weight, weight_decay, grad_scale, found_inf,
        dtype: tl.constexpr, aligned: tl.constexpr, lr_is_tensor: tl.constexpr, has_momentum: tl.constexpr,
        nesterov: tl.constexpr, maximize: tl.constexpr,
):
    """``torch.optim.SGD`` with the gradient multiplied, of one block of one tensor.

    ``new_weight``: 1 - dampening.
    """
    _, tensor, entries, numel = _block(tensors, blocks, found_inf, aligned)
    mask = entries < numel
    if lr_is_tensor:
        lr = tl.load(lr)
    params = _pointers(tl.load(tensor + _PARAM), entries, dtype, aligned)
    grads = _pointers(tl.load(tensor + _GRAD), entries, dtype, aligned)
    param = tl.load(params, mask, other=0.).to(tl.float32)
    update = tl.load(grads, mask, other=0.).to(tl.float32)
    if grad_scale is not None:
        update = update / tl.load(grad_scale)
    if maximize:
        update = -update
    update = update * _multiplier(tensor, entries, mask) + weight_decay * param
    if has_momentum:
        buffers = _pointers(tl.load(tensor + _STATE), entries, dtype, aligned)
        # the first momentum is the first update, which no dampening makes smaller
        known = tl.where(tl.load(tensor + _FIRST) == 0, numel, 0)
        buffer = tl.load(buffers, entries < known, other=0.).to(tl.float32)
        buffer = tl.where(entries < known, momentum * buffer + new_weight * update, update)
        tl.store(buffers, buffer.to(dtype), mask)
        update = update + momentum * buffer if nesterov else buffer
    tl.store(params, (param - lr * update).to(dtype), mask)


@triton.jit
def adamw_kernel(
        tensors, blocks, corrections, lr, new_weight1, beta2, new_weight2, eps, weight_decay, grad_scale, found_inf,
        dtype: tl.constexpr, aligned: tl.constexpr, lr_is_tensor: tl.constexpr, amsgrad: tl.constexpr,
        maximize: tl.constexpr,
):
    """``torch.optim.AdamW`` with the update multiplied, of one block of one tensor.

    ``corrections``: of each tensor, 1 - beta1 ** step and the root of 1 - beta2 ** step. ``new_weight1`` and
    ``new_weight2``: 1 - beta1 and 1 - beta2, of which a GPU would lose digits.
    """
    index, tensor, entries, numel = _block(tensors, blocks, found_inf, aligned)
    mask = entries < numel
    if lr_is_tensor:
        lr = tl.load(lr)
    params = _pointers(tl.load(tensor + _PARAM), entries, dtype, aligned)
    grads = _pointers(tl.load(tensor + _GRAD), entries, dtype, aligned)
    averages = _pointers(tl.load(tensor + _STATE), entries, dtype, aligned)
    squares = _pointers(tl.load(tensor + _STATE2), entries, dtype, aligned)
    param = tl.load(params, mask, other=0.).to(tl.float32)
    grad = tl.load(grads, mask, other=0.).to(tl.float32)
    if grad_scale is not None:
        grad = grad / tl.load(grad_scale)
    if maximize:
        grad = -grad
    average = tl.load(averages, mask, other=0.).to(tl.float32)
    average = average + new_weight1 * (grad - average)
    square = beta2 * tl.load(squares, mask, other=0.).to(tl.float32) + new_weight2 * grad * grad
    tl.store(averages, average.to(dtype), mask)
    tl.store(squares, square.to(dtype), mask)
    if amsgrad:
        largest = _pointers(tl.load(tensor + _STATE3), entries, dtype, aligned)
        square = tl.maximum(square, tl.load(largest, mask, other=0.).to(tl.float32))
        tl.store(largest, square.to(dtype), mask)
    size = lr / tl.load(corrections + 2 * index)
    update = size * average / (tl.sqrt(square) / tl.load(corrections + 2 * index + 1) + eps)
    param = param * (1 - lr * weight_decay) - _multiplier(tensor, entries, mask) * update
    tl.store(params, param.to(dtype), mask)
