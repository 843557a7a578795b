"""Least squares for an FFN ``y = W2 g(u) + b2``: which hidden channels become idle, and what replaces them.

The active channels A keep the activation, and ``W2' g_A + M u + c`` replaces the FFN. All quantities follow from mean
and covariance of (g, u), hidden features before inputs, in float64.
"""
import dataclasses
from typing import NamedTuple, Tuple

import torch

from timm_rep.layers import Affine

__all__ = ['Elimination', 'LeastSquares', 'Moments', 'eliminate']


class Moments:
    """Mean and covariance of the columns of a stream of matrices, in float64."""

    def __init__(self):
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        """Add rows, of shape (tokens, channels)."""
        if not self.count:
            self.shift = x.mean(0)  # near the mean, so that the squares do not cancel
            self.total, self.square = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1], x.shape[1])
        x = x - self.shift
        self.count += len(x)
        self.total += x.sum(0)
        self.square.addmm_(x.T, x)

    def mean(self) -> torch.Tensor:
        """Mean of the columns."""
        return self.shift + self.total / self.count

    def covariance(self) -> torch.Tensor:
        """Covariance matrix of the columns, normalized by the number of rows."""
        mean = self.total / self.count
        return self.square / self.count - mean[:, None] * mean


def _damped(covariance: torch.Tensor, ridge: float) -> torch.Tensor:
    """A covariance with its diagonal raised, so that it can be factorized whatever the variables."""
    variance = covariance.diagonal()
    floor = variance.mean().clamp(min=torch.finfo(variance.dtype).tiny ** .5) * 1e-6
    return covariance + torch.diag(ridge * (variance.clamp(min=0) + floor))


class Elimination(NamedTuple):
    """The order in which hidden channels become idle.

    Attributes:
        order: Hidden channels, those first whose replacement costs least.
        loss: Squared error of the output, as variance summed over its channels, with the first k channels of the order
            idle; entry k, of hidden_features + 1.
    """
    order: torch.Tensor
    loss: torch.Tensor


def eliminate(residual: torch.Tensor, weight: torch.Tensor, steps: int = 128) -> Elimination:
    """Choose idle channels by backward elimination with refitted weights.

    With ``K`` the inverse of the residual covariance of the remaining channels and ``W`` their refitted second layer,
    channel i costs ``|W_i|^2 / K_ii``; removing the set R changes W by ``-W_R K_RR^-1 K_R`` and K by
    ``-K_R^T K_RR^-1 K_R`` (the optimal brain surgeon of the second layer).

    Args:
        residual: Covariance of the hidden features, or of what their input does not predict of them, (hidden, hidden)
            and positive definite.
        weight: Second layer, (out, hidden).
        steps: Number of steps; the channels of one step are chosen together.

    Returns:
        Order and loss.
    """
    hidden = len(residual)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(residual))
    weight, left = weight.clone(), torch.arange(hidden, device=residual.device)
    order, loss = [], [residual.new_zeros(1)]
    for size in (len(part) for part in torch.arange(hidden).tensor_split(min(steps, hidden))):
        cost = weight.square().sum(0) / inverse.diagonal()
        rank = cost.argsort()
        gone, kept = rank[:size], rank[size:].sort().values
        factor = torch.linalg.cholesky(inverse[gone][:, gone])
        change = torch.linalg.solve_triangular(factor, weight[:, gone].T, upper=False)
        # the cost of the step, shared among its channels in proportion to their own
        share = cost[gone].cumsum(0)
        total = change.square().sum()
        share = share / share[-1] if share[-1] > 0 else torch.linspace(0, 1, size + 1, dtype=share.dtype)[1:].to(share)
        loss.append(loss[-1][-1] + total * share)
        rows = torch.linalg.solve_triangular(factor, inverse[gone][:, kept], upper=False)
        weight = weight[:, kept] - change.T @ rows
        inverse = inverse[kept][:, kept] - rows.T @ rows
        order.append(left[gone])
        left = left[kept]
    return Elimination(torch.cat(order), torch.cat(loss))


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """The least-squares problem of an FFN.

    Attributes:
        second: The second layer, W2 of shape (out, hidden) and b2.
        mean: Mean of (g, u), of shape (hidden + in,).
        covariance: Covariance of (g, u).
        ridge: Damping, relative to the variance of every variable.
    """
    second: Affine
    mean: torch.Tensor
    covariance: torch.Tensor
    ridge: float = 1e-4

    def output_variance(self) -> float:
        """Variance of y, summed over its channels."""
        weight, h = self.second.weight, self.second.weight.shape[1]
        return (weight @ self.covariance[:h, :h] * weight).sum().item()

    def elimination(self, linear_path: bool = True) -> Elimination:
        """Choose the idle channels, see :func:`eliminate`.

        Args:
            linear_path: Whether M is fitted, or zero.
        """
        cov, h = self.covariance, self.second.weight.shape[1]
        if not linear_path:
            return eliminate(_damped(cov[:h, :h], self.ridge), self.second.weight)
        factor = torch.linalg.cholesky(_damped(cov[h:, h:], self.ridge))
        predicted = torch.linalg.solve_triangular(factor, cov[h:, :h], upper=False)
        return eliminate(_damped(cov[:h, :h] - predicted.T @ predicted, self.ridge), self.second.weight)

    def solve(self, active: torch.Tensor, linear_path: bool = True) -> Tuple[Affine, torch.Tensor, float]:
        """Fit ``W2' g_A + M u + c`` to y.

        Args:
            active: Indices of the active channels A.
            linear_path: Whether M is fitted, or zero.

        Returns:
            M and c, M without columns if it is zero; W2' of shape (out, active); and the squared error, as variance
            summed over the output channels.
        """
        weight, h, a = self.second.weight, self.second.weight.shape[1], len(active)
        is_idle = torch.ones(h, dtype=torch.bool, device=active.device)
        is_idle[active] = False
        idle = is_idle.nonzero().squeeze(1)
        inputs = torch.arange(h, len(self.mean) if linear_path else h, device=active.device)
        known = torch.cat([active, inputs])
        # W2_A is exact already; what is fitted is the part of the idle channels
        covariance = self.covariance[known][:, known]
        target = weight[:, idle] @ self.covariance[idle][:, known]
        fitted = torch.cholesky_solve(target.T, torch.linalg.cholesky(_damped(covariance, self.ridge))).T
        variance = (weight[:, idle] @ self.covariance[idle][:, idle] * weight[:, idle]).sum()
        error = variance - 2 * (fitted * target).sum() + (fitted @ covariance * fitted).sum()
        shift = self.second.bias + weight[:, idle] @ self.mean[idle] - fitted @ self.mean[known]
        return Affine(fitted[:, a:], shift), weight[:, active] + fitted[:, :a], max(error.item(), 0.)
