"""Least squares for an FFN ``y = W2 g(u) + b2``: which hidden channels become idle, and what replaces them.

The active channels A keep the activation, and ``W2' g_A + M u + c`` replaces the FFN. It is fitted to ``y + d``, where
the correction d is what the residual stream still lacks compared with the original model's. All quantities follow from
the mean and the covariance of (g, u), hidden features before inputs, and of d, in float64.
"""
import contextlib
import dataclasses
import math
from functools import cached_property
from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch

from timm_rep.layers import Affine
from timm_rep.layers.fold import to_float64

_STRIPS = 4  # strips in which the upper half of a symmetric product is computed


class Moments:
    """Mean and covariance of the columns of a stream of matrices, accumulated in float64.

    Products within one call of :meth:`add` are summed in the dtype of the rows.
    """

    def __init__(self, shift: torch.Tensor):
        """
        Args:
            shift: Row near the mean, so that squares do not cancel, of shape (columns,).
        """
        self.shift = to_float64(shift)
        self.count = self.shift.new_zeros(())
        self.total = torch.zeros_like(self.shift)
        self.square = self.shift.new_zeros(len(shift), len(shift))

    def add(self, rows: torch.Tensor) -> None:
        """Add rows, of shape (rows, columns)."""
        rows = rows - self.shift.to(rows)
        self.count += len(rows)
        self.total += to_float64(rows.sum(0))
        # the upper triangle, in strips
        for strip in torch.arange(rows.shape[1]).tensor_split(_STRIPS):
            if len(strip):
                start, stop = int(strip[0]), int(strip[-1]) + 1
                self.square[start:stop, start:] += to_float64(rows[:, start:stop].T @ rows[:, start:])

    def sums(self) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The accumulated sums; sums over other rows with the same shift may be added in place."""
        return self.count, self.total, self.square

    def __add__(self, other: 'Moments') -> 'Moments':
        result = Moments(self.shift)
        for total, a, b in zip(result.sums(), self.sums(), other.sums()):
            total.copy_(a + b)
        return result

    def mean(self) -> torch.Tensor:
        """Mean of the columns."""
        return self.shift + self.total / self.count

    def covariance(self) -> torch.Tensor:
        """Covariance matrix of the columns, normalized by the number of rows."""
        mean = self.total / self.count
        upper = self.square.triu()
        return (upper + upper.triu(1).T) / self.count - mean[:, None] * mean


def _damped(covariance: torch.Tensor, ridge: float) -> torch.Tensor:
    """A covariance with its diagonal raised, so that it can be factorized whatever the variables."""
    variance = covariance.diagonal()
    floor = variance.mean().clamp(min=torch.finfo(variance.dtype).tiny ** .5) * 1e-6
    return covariance + torch.diag(ridge * (variance.clamp(min=0) + floor))


class Elimination(NamedTuple):
    """The order in which hidden channels become idle.

    Attributes:
        order: Hidden channels, cheapest to replace first.
        loss: Squared error of the output, as variance summed over its channels, with the first k channels of the order
            idle; entry k, of hidden_features + 1.
    """
    order: torch.Tensor
    loss: torch.Tensor


def eliminate(residual: torch.Tensor, weight: torch.Tensor, fraction: float = 1 / 8) -> Elimination:
    """Choose idle channels by backward elimination with refitted weights.

    With ``K`` the inverse of the residual covariance of the remaining channels and ``W`` their refitted second layer,
    channel i costs ``|W_i|^2 / K_ii``; removing the set R changes W by ``-W_R K_RR^-1 K_R`` and K by
    ``-K_R^T K_RR^-1 K_R`` (the optimal brain surgeon of the second layer).

    Args:
        residual: Covariance of the hidden features, or of what their input does not predict of them, (hidden, hidden)
            and positive definite.
        weight: Second layer, (out, hidden).
        fraction: Share of the remaining channels that one step removes, at least one channel.

    Returns:
        Order and loss.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(residual))
    weight, left = weight.clone(), torch.arange(len(residual), device=residual.device)
    order, loss = [], [residual.new_zeros(1)]
    while len(left):
        cost = weight.square().sum(0) / inverse.diagonal()
        size = max(1, int(fraction * len(left)))
        rank = cost.argsort()
        removed, kept = rank[:size], rank[size:].sort().values
        factor = torch.linalg.cholesky(inverse[removed][:, removed])
        change = torch.linalg.solve_triangular(factor, weight[:, removed].T, upper=False)
        # the cost of the step, shared among its channels in proportion to their own
        share = cost[removed].cumsum(0)
        total = change.square().sum()
        share = share / share[-1] if share[-1] > 0 else torch.linspace(0, 1, size + 1, dtype=share.dtype)[1:].to(share)
        loss.append(loss[-1][-1] + total * share)
        rows = torch.linalg.solve_triangular(factor, inverse[removed][:, kept], upper=False)
        weight = weight[:, kept] - change.T @ rows
        inverse = inverse[kept][:, kept] - rows.T @ rows
        order.append(left[removed])
        left = left[kept]
    return Elimination(torch.cat(order), torch.cat(loss))


class Fit(NamedTuple):
    """The map ``W2' g_A + M u + c``.

    Attributes:
        active: Indices of the active channels A.
        weight: W2' of shape (out, active).
        linear: M and c; M has no columns if it is zero.
        correction_ridge: Damping of the fit to the correction d.
    """
    active: torch.Tensor
    weight: torch.Tensor
    linear: Affine
    correction_ridge: float

    @property
    def linear_path(self) -> bool:
        """Whether M is fitted."""
        return self.linear.weight.shape[1] > 0


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """The least-squares problem of an FFN.

    Attributes:
        second: The second layer, W2 of shape (out, hidden) and b2.
        moments: Moments of (g, u, d), of shape (hidden + in + out,), or of (g, u) without a correction d.
        in_features: Number of columns of u.
        metric: Matrix (rows, out), or diagonal (out,), that multiplies an error of the output before it is squared and
            summed; None for the identity. The losses and the choice of channels depend on it, the fit does not.
    """
    second: Affine
    moments: Moments
    in_features: int
    metric: Optional[torch.Tensor] = None

    @property
    def hidden(self) -> int:
        """Number of hidden channels."""
        return self.second.weight.shape[1]

    @property
    def corrects(self) -> bool:
        """Whether there is a correction d."""
        return len(self.moments.total) > self.hidden + self.in_features

    @cached_property
    def mean(self) -> torch.Tensor:
        """Mean of (g, u, d)."""
        return self.moments.mean()

    @cached_property
    def covariance(self) -> torch.Tensor:
        """Covariance of (g, u, d)."""
        return self.moments.covariance()

    def _weighted(self, output: torch.Tensor) -> torch.Tensor:
        if self.metric is None:
            return output
        if self.metric.ndim == 2:
            return self.metric @ output
        return self.metric * output if output.ndim == 1 else self.metric[:, None] * output

    @cached_property
    def _cross(self) -> torch.Tensor:
        """Covariance of y with (g, u, d)."""
        return self.second.weight @ self.covariance[:self.hidden]

    @cached_property
    def _target(self) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of y + d: mean, weighted covariance with (g, u, d), and weighted variance."""
        h, d = self.hidden, self.hidden + self.in_features
        mean, cross = self.second.bias + self.second.weight @ self.mean[:h], self._cross
        if self.corrects:
            mean, cross = mean + self.mean[d:], cross + self.covariance[d:]
        cross = self._weighted(cross)
        variance = (cross[:, :h] * self._weighted(self.second.weight)).sum()
        if self.corrects:
            variance = variance + (cross[:, d:] * self._weighted(torch.eye(len(mean)).to(cross))).sum()
        return mean, cross, variance

    def share(self, loss: float) -> float:
        """A loss as a share of the weighted variance of y + d."""
        variance = self._target[2].item()
        return loss / variance if variance > 0 else 0.

    def elimination(self, ridge: float, linear_path: bool = True) -> Elimination:
        """Choose the idle channels, see :func:`eliminate`."""
        # weaker damping than in the fits, because here the damped moments also give the losses
        h, weight, ridge = self.hidden, self._weighted(self.second.weight), ridge / 10
        hidden, inputs = slice(h), slice(h, h + self.in_features)
        covariance = self.covariance[hidden, hidden]
        if not linear_path:
            return eliminate(_damped(covariance, ridge), weight)
        factor = torch.linalg.cholesky(_damped(self.covariance[inputs, inputs], ridge))
        predicted = torch.linalg.solve_triangular(factor, self.covariance[inputs, hidden], upper=False)
        residual = covariance - predicted.T @ predicted
        # channels that u predicts exactly leave rounding errors, mostly of the float32 sums, of either sign
        rounding = ridge * covariance.diagonal().diag()
        for share in 1e-3, 1e-2, 1e-1:
            with contextlib.suppress(torch.linalg.LinAlgError):
                return eliminate(_damped(residual + share * rounding, ridge), weight)
        return eliminate(_damped(residual + rounding, ridge), weight)

    def best_channels(self, count: int, ridge: float, linear_path: bool = True) -> torch.Tensor:
        """The active channels, ascending, with which the idle ones cost least."""
        if not 0 < count < self.hidden:
            return torch.arange(count, device=self.mean.device)
        return self.elimination(ridge, linear_path).order[self.hidden - count:].sort().values

    def _known(self, active: torch.Tensor, linear_path: bool) -> torch.Tensor:
        inputs = torch.arange(self.hidden, self.hidden + self.in_features * linear_path, device=active.device)
        return torch.cat([active, inputs])

    def solve(
            self,
            active: torch.Tensor,
            ridge: float,
            linear_path: bool = True,
            correction_ridges: Sequence[float] = (math.inf,),
    ) -> List[Fit]:
        """Fit ``W2' g_A + M u + c`` to y, then what is left of y + d with a damping of its own.

        Args:
            active: Indices of the active channels A.
            ridge: Damping of the fit to y, relative to the variance of every variable.
            linear_path: Whether M is fitted, or zero.
            correction_ridges: Dampings of the fit to what is left of y + d; an infinite one fits its mean alone.

        Returns:
            One fit for each of correction_ridges.
        """
        a, known = len(active), self._known(active, linear_path)
        covariance = self.covariance[known][:, known]
        # W2_A is exact already; what is fitted is the part of the idle channels
        exact = self.second.weight[:, active]
        left = self._cross[:, known] - exact @ covariance[:a]
        plain = torch.cholesky_solve(left.T, torch.linalg.cholesky(_damped(covariance, ridge))).T
        if self.corrects:
            left = left - plain @ covariance + self.covariance[self.hidden + self.in_features:][:, known]
        fits = []
        for correction_ridge in correction_ridges:
            weight = plain.clone()
            if self.corrects and correction_ridge < math.inf:
                factor = torch.linalg.cholesky(_damped(covariance, correction_ridge))
                weight += torch.cholesky_solve(left.T, factor).T
            weight[:, :a] += exact
            shift = self._target[0] - weight @ self.mean[known]
            fits.append(Fit(active, weight[:, :a], Affine(weight[:, a:], shift), correction_ridge))
        return fits

    def losses(self, fits: Sequence[Fit]) -> List[float]:
        """Weighted mean squared errors of fits of the same channels, which may come from the moments of other rows."""
        mean, cross, variance = self._target
        known = self._known(fits[0].active, fits[0].linear_path)
        covariance, cross, losses = self.covariance[known][:, known], cross[:, known], []
        for fit in fits:
            weight = torch.cat([fit.weight, fit.linear.weight], 1)
            offset = self._weighted(mean - weight @ self.mean[known] - fit.linear.bias)
            weight = self._weighted(weight)
            explained = (weight * (2 * cross - weight @ covariance)).sum()
            losses.append(max((variance - explained + offset.square().sum()).item(), 0.))
        return losses
