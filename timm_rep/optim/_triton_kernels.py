"""The update rules of RepSGD and RepAdamW as Triton kernels. Imported lazily, requires Triton.

Each program updates one tile of a convolution kernel, seen as a matrix (out_channels, in_channels * window) in the
order of its memory. Parameter, gradient and state share that order; the arithmetic is in float32.
"""
import triton
import triton.language as tl

__all__ = ['adamw_kernel', 'sgd_kernel']


@triton.jit
def _tile(
        table, out_channels, in_channels, row_offset, found_inf,
        WINDOW: tl.constexpr, CENTRE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The tile of this program: offsets, mask and multipliers, each (ROWS, COLUMNS). See GradMult.table()."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row_size = in_channels * WINDOW
    if found_inf is not None:  # GradScaler skips the step
        out_channels = tl.where(tl.load(found_inf) == 0., out_channels, 0)
    in_rows = row < out_channels
    mask = in_rows & (column < row_size)
    channel = (row + row_offset) % in_channels
    if CHANNELS_LAST:
        position, diagonal = column // in_channels, CENTRE * in_channels + channel
    else:
        position, diagonal = column % WINDOW, channel * WINDOW + CENTRE
    table += row * (WINDOW + 1)
    multiplier = tl.load(table + position, mask, other=0.)
    multiplier += tl.where(column == diagonal, tl.load(table + WINDOW, in_rows, other=0.), 0.)
    return row * row_size + column, mask, multiplier


@triton.jit
def sgd_kernel(
        param, grad, buffer, table, out_channels, in_channels, row_offset, grad_scale, found_inf,
        lr, weight_decay, momentum, new_weight,
        NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, WINDOW: tl.constexpr, CENTRE: tl.constexpr,
        CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """``torch.optim.SGD`` with the gradient multiplied.

    ``buffer`` is None without momentum. ``new_weight`` is 1 - dampening, 1 in the first step.
    """
    offsets, mask, multiplier = _tile(
        table, out_channels, in_channels, row_offset, found_inf, WINDOW, CENTRE, CHANNELS_LAST, ROWS, COLUMNS)
    weight = tl.load(param + offsets, mask, other=0.).to(tl.float32)
    update = tl.load(grad + offsets, mask, other=0.).to(tl.float32)
    if grad_scale is not None:
        update = update / tl.load(grad_scale)
    if MAXIMIZE:
        update = -update
    update = update * multiplier + weight_decay * weight
    if buffer is not None:
        average = momentum * tl.load(buffer + offsets, mask, other=0.).to(tl.float32) + new_weight * update
        tl.store(buffer + offsets, average, mask)
        update = update + momentum * average if NESTEROV else average
    tl.store(param + offsets, weight - lr * update, mask)


@triton.jit
def adamw_kernel(
        param, grad, step, exp_avg, exp_avg_sq, max_exp_avg_sq, table, out_channels, in_channels, row_offset,
        grad_scale, found_inf, lr, weight_decay, new_weight1, new_weight2, eps,
        MAXIMIZE: tl.constexpr, WINDOW: tl.constexpr, CENTRE: tl.constexpr,
        CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """``torch.optim.AdamW`` with the update multiplied.

    ``max_exp_avg_sq`` is None without amsgrad, ``step`` counts this step. ``new_weight1`` and ``new_weight2`` are
    1 - beta1 and 1 - beta2, of which float32 keeps more digits than of the betas.
    """
    offsets, mask, multiplier = _tile(
        table, out_channels, in_channels, row_offset, found_inf, WINDOW, CENTRE, CHANNELS_LAST, ROWS, COLUMNS)
    weight = tl.load(param + offsets, mask, other=0.).to(tl.float32)
    update = tl.load(grad + offsets, mask, other=0.).to(tl.float32)
    if grad_scale is not None:
        update = update / tl.load(grad_scale)
    if MAXIMIZE:
        update = -update
    average = tl.load(exp_avg + offsets, mask, other=0.).to(tl.float32)
    average = average + new_weight1 * (update - average)
    square = tl.load(exp_avg_sq + offsets, mask, other=0.).to(tl.float32)
    square = (1 - new_weight2) * square + new_weight2 * update * update
    tl.store(exp_avg + offsets, average, mask)
    tl.store(exp_avg_sq + offsets, square, mask)
    if max_exp_avg_sq is not None:
        square = tl.maximum(square, tl.load(max_exp_avg_sq + offsets, mask, other=0.).to(tl.float32))
        tl.store(max_exp_avg_sq + offsets, square, mask)
    # in float64, as float32 loses digits of 1 - beta ** step; step is 0 only where nothing is stored
    one, steps = tl.full((), 1., tl.float64), tl.maximum(tl.load(step), 1.)
    correction1 = (one - tl.exp(steps * tl.log(one - new_weight1))).to(tl.float32)
    correction2 = (one - tl.exp(steps * tl.log(one - new_weight2))).to(tl.float32)
    update = lr / correction1 * average / (tl.sqrt(square) / tl.sqrt(correction2) + eps)
    tl.store(param + offsets, weight * (1 - lr * weight_decay) - multiplier * update, mask)
