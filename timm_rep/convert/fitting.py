"""Fit the replacement of one FFN: collect moments, choose among candidates on held-out rows, build the matrices."""
import dataclasses
import math
from typing import Callable, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn

from timm_rep.layers import Affine, RePaMlpDeploy
from timm_rep.utils.distributed import world_size_and_rank

from .ffn import Ffn
from .least_squares import LeastSquares, Moments
from .report import ConvertedFfn

# damping of the correction of the residual stream; infinite for none
CORRECTION_RIDGES = (0.01, 0.03, 0.1, 0.3, 1., 3., 10., math.inf)
_BLOCK = 4096  # rows whose features are computed at once
_FLOAT32_RIDGE = 1e-4  # least damping that rounding errors of moments of float32 rows do not reach


class CalibrationRows(NamedTuple):
    """Calibration rows of an FFN in this process.

    Attributes:
        inputs: Input u, (rows, in).
        held_out: Whether a row is of a held-out image, (rows,).
        missing: Original residual stream, minus the stream that the FFN's output, times ``metric``, is added to,
            (rows, out). None: fit the outputs of the original FFN.
        metric: Layer scale, (out,), with ``missing``; see :class:`LeastSquares`. Where it is 0, the outputs of the
            original FFN are fitted.
    """
    inputs: torch.Tensor
    held_out: torch.Tensor
    missing: Optional[torch.Tensor] = None
    metric: Optional[torch.Tensor] = None


def sum_over_processes(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Add the tensors of all processes of a group, in place; returns them."""
    if world_size_and_rank()[0] > 1:
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
    return tensors


def macs_per_token(module: nn.Module) -> int:
    """Multiply-accumulates of an FFN for one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def _features(ffn: Ffn, matrices: RePaMlpDeploy) -> Callable[[torch.Tensor], torch.Tensor]:
    """The map of inputs, (rows, in), to hidden features, (rows, active)."""
    def features(u: torch.Tensor) -> torch.Tensor:
        if not matrices.has_active:
            return u[:, :0]
        u = u.to(matrices.fc_in.weight)
        if not ffn.use_conv:
            return matrices.act(matrices.fc_in(u))
        return matrices.act(matrices.fc_in(u.T[None, :, :, None]))[0, :, :, 0].T

    return features


def _moments(rows: CalibrationRows, columns: Callable[[slice], torch.Tensor]) -> Tuple[Moments, Moments]:
    """Moments of the columns of the rows that are fitted and of those held out, over all processes."""
    count = len(rows.inputs)
    first = columns(slice(0, min(count, 256)))
    total, n = sum_over_processes(first.sum(0, dtype=torch.float64), first.new_tensor(len(first), dtype=torch.float64))
    fitted, held_out = Moments(total / n), Moments(total / n)
    for start in range(0, count, _BLOCK):
        part = slice(start, start + _BLOCK)
        block, held = columns(part), rows.held_out[part]
        fitted.add(block[~held])
        if held.any():
            held_out.add(block[held])
    for moments in (fitted, held_out):
        sum_over_processes(*moments.sums())
    return fitted, held_out


def least_squares(
        ffn: Ffn,
        rows: CalibrationRows,
        ridge: float,
        channels: Optional[torch.Tensor] = None,
) -> Tuple[LeastSquares, LeastSquares]:
    """Least-squares problems of the fitted and of the held-out rows.

    ``channels`` is for FFNs with a LayerNorm, which will normalize these channels only: the hidden features are then
    those of the reduced LayerNorm, followed by the part of y that the kept columns of W2 do not explain, as extra
    channels.
    """
    second, exact = ffn.fc_out(), ffn.exact()
    dtype = torch.promote_types(rows.inputs.dtype, torch.float32 if ridge >= _FLOAT32_RIDGE else torch.float64)
    weight, bias = (x.to(exact.fc_out.weight.device, dtype) for x in second)
    all_features = _features(ffn, exact)
    own: Optional[Callable[[torch.Tensor], torch.Tensor]] = None
    if channels is not None:
        own = _features(ffn, ffn.with_weights(channels)) if len(channels) else lambda u: u[:, :0]

    def columns(part: slice) -> torch.Tensor:
        u = rows.inputs[part]
        g = all_features(u).to(dtype)
        y = None if own is None and rows.missing is None else g @ weight.T + bias
        if own is not None:
            g = own(u).to(dtype)
            g = torch.cat([g, y - g @ weight[:, channels].T], 1)
        parts = [g, u.to(dtype)]
        if rows.missing is not None and rows.metric is not None:
            target = rows.missing[part].to(dtype) / rows.metric.to(dtype)
            parts.append((target - y).where(rows.metric != 0, 0.))
        return torch.cat(parts, 1)

    moments = _moments(rows, columns)
    if not all(x.isfinite().all() for x in (*second, *moments[0].sums(), *moments[1].sums())):
        raise ValueError(
            f'The features of {ffn.name} must be finite on the calibration images: check the images, and the weights '
            'up to it, for NaN and infinite values. Nothing was changed.')
    if channels is not None:
        rest = torch.eye(ffn.out_features).to(second.weight)
        second = Affine(torch.cat([second.weight[:, channels], rest], 1), torch.zeros_like(second.bias))
    fitted, held_out = (LeastSquares(second, m, ffn.in_features, rows.metric) for m in moments)
    return fitted, held_out


def fit_ffn(
        ffn: Ffn,
        rows: CalibrationRows,
        active_features: int,
        ridge: float,
        tokens: int = 0,
) -> Tuple[RePaMlpDeploy, ConvertedFfn]:
    """Fit three matrices, or two with the same multiply-accumulates if those are better.

    The number of matrices and the damping of the correction minimize the loss on the held-out rows; the final fit is to
    all rows.

    Args:
        ffn: The FFN.
        rows: Its calibration rows in this process.
        active_features: Number of hidden channels that keep the activation in three matrices.
        ridge: Damping of the fit to the FFN's own output, relative to the variance of every variable.
        tokens: Number of tokens of one image, to report multiply-accumulates.

    Returns:
        The map of u to y, and the report.
    """
    fitted, held_out = least_squares(ffn, rows, ridge)
    h, has_held_out = ffn.hidden_features, bool(held_out.moments.count > 0)
    forms = [(False, h)] if active_features == h else [
        (False, ffn.pruned_features(active_features)), (True, active_features)]
    kept = None
    if ffn.hidden_norm is not None:
        forms = forms[-1:]
        kept = fitted.best_channels(active_features, ridge)
        fitted, held_out = least_squares(ffn, rows, ridge, kept)
    ridges = (math.inf,) if rows.missing is None else CORRECTION_RIDGES if has_held_out else (1.,)
    compared = held_out if has_held_out else fitted
    losses, fits = [], []
    for linear_path, count in forms:
        active = fitted.best_channels(count, ridge, linear_path) if kept is None else torch.arange(count).to(kept)
        fits += fitted.solve(active, ridge, linear_path, ridges)
        losses += compared.losses(fits[-len(ridges):])
    best = min(range(len(fits)), key=losses.__getitem__)  # the first of equal ones, two matrices
    fit, held_out_loss, other_loss = fits[best], None, None
    if has_held_out:
        others = [loss for loss, other in zip(losses, fits) if other.linear_path != fit.linear_path]
        held_out_loss = held_out.share(losses[best])
        other_loss = held_out.share(min(others)) if others else None
        fitted = dataclasses.replace(fitted, moments=fitted.moments + held_out.moments)
        fit, = fitted.solve(fit.active, ridge, fit.linear_path, (fit.correction_ridge,))
    loss, = fitted.losses([fit])
    linear_only, = fitted.losses(fitted.solve(fit.active[:0], ridge))
    channels = fit.active if kept is None else kept
    matrices = ffn.with_weights(
        channels, Affine(fit.weight, fit.linear.bias), fit.linear if fit.linear_path else None)
    return matrices, ConvertedFfn(
        ffn.name, h, len(channels), fit.linear_path, fitted.share(loss),
        macs=(tokens * macs_per_token(ffn.module), tokens * macs_per_token(ffn.around(matrices))),
        held_out=held_out_loss,
        other_held_out=other_loss,
        linear_share=1 - fitted.share(linear_only),
        compensated=rows.missing is not None,
        correction_ridge=fit.correction_ridge if fit.correction_ridge < math.inf else None,
    )
