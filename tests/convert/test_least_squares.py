import pytest
import torch

from timm_rep.convert.budget import allocate
from timm_rep.convert.least_squares import LeastSquares, Moments, eliminate
from timm_rep.layers import Affine

F64 = torch.float64


def features(tokens=400, hidden=12, inputs=5, out=7, seed=0, mean=0.):
    """Nonlinear hidden features g of u, with a collinear pair and a constant channel in each; second layer."""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(tokens, inputs, generator=g, dtype=F64) @ torch.randn(inputs, inputs, generator=g, dtype=F64)
    h = (u @ torch.randn(inputs, hidden, generator=g, dtype=F64)).relu()
    h = h + .3 * torch.randn(tokens, hidden, generator=g, dtype=F64)
    u[:, 1], h[:, 3] = 2 * u[:, 0], h[:, 2] - h[:, 1]
    u[:, 2], h[:, 4] = 1., -2.
    second = Affine(torch.randn(out, hidden, generator=g, dtype=F64), torch.randn(out, generator=g, dtype=F64))
    return h + mean, u + mean, second


def problem(h, u, second, d=None, metric=None):
    columns = torch.cat([h, u] if d is None else [h, u, d], 1)
    moments = Moments(columns[0])
    moments.add(columns)
    return LeastSquares(second, moments, u.shape[1], metric)


def predict(fit, h, u):
    u = u if fit.linear_path else u[:, :0]
    return h[:, fit.active] @ fit.weight.T + u @ fit.linear.weight.T + fit.linear.bias


def refit(design, y):
    """Prediction and error of the least-squares fit with an intercept, by lstsq."""
    design, mean = design - design.mean(0), y.mean(0)
    prediction = design @ torch.linalg.lstsq(design, y - mean, driver='gelsd', rcond=1e-9).solution + mean
    return prediction, (y - prediction).square().mean(0).sum().item()


@pytest.mark.parametrize('mean', [0., 1e3])
def test_moments_of_a_stream(mean):
    h, u, _ = features(mean=mean)
    x, moments = torch.cat([h, u], 1), Moments(h.new_full((17,), mean))
    for part in x.split([1, 7, 200, 192]):
        moments.add(part)
    torch.testing.assert_close(moments.mean(), x.mean(0))
    torch.testing.assert_close(moments.covariance(), torch.cov(x.T, correction=0), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize('linear_path', [True, False])
@pytest.mark.parametrize('mean', [0., 1e3])
@pytest.mark.parametrize('active', [[], [0], [1, 2, 3], [4, 7, 11], [*range(12)]])
def test_fit_equals_lstsq(active, mean, linear_path):
    h, u, second = features(mean=mean)
    y, active = h @ second.weight.T + second.bias, torch.tensor(active, dtype=torch.long)
    p = problem(h, u, second)
    fit, = p.solve(active, 1e-12, linear_path)
    error, = p.losses([fit])
    fitted = predict(fit, h, u)
    measured = (y - fitted).square().mean(0).sum().item()
    reference, best = refit(torch.cat([h[:, active], u] if linear_path else [h[:, active]], 1), y)
    scale = y.var(0).sum().item()
    assert (fitted - reference).square().mean(0).sum() < 1e-9 * scale
    assert measured == pytest.approx(best, abs=1e-9 * scale)
    assert error == pytest.approx(measured, abs=1e-9 * scale)


def test_shares_of_the_variance_and_ridge():
    h, u, second = features()
    y, active = h @ second.weight.T + second.bias, torch.tensor([0, 5])
    p = problem(h, u, second)
    assert p.share(2.) == pytest.approx(2 / y.var(0, correction=0).sum().item())
    errors = []
    for ridge in (1e-9, 1e-2, 1., 100.):
        fit, = p.solve(active, ridge)
        fitted = predict(fit, h, u)
        errors += p.losses([fit])
        # the error is measured for the damped weights, which are not the best fit
        assert errors[-1] == pytest.approx((y - fitted).square().mean(0).sum().item(), rel=1e-9)
        assert (y - fitted).mean(0).abs().max() < 1e-9
    assert errors == sorted(errors)
    assert errors[-1] > errors[0]


def ridge_regression(x, y, ridge):
    """Weights (out, in), with a damping relative to the variance of every variable."""
    x, y = x - x.mean(0), y - y.mean(0)
    penalty = (ridge * x.square().mean(0)).sqrt().diag() * len(x) ** .5
    zeros = y.new_zeros(x.shape[1], y.shape[1])
    return torch.linalg.lstsq(torch.cat([x, penalty]), torch.cat([y, zeros]), driver='gelsd').solution.T


@pytest.mark.parametrize('linear_path', [True, False])
@pytest.mark.parametrize('metric', ['none', 'diagonal', 'matrix'])
def test_correction_against_two_regressions(linear_path, metric):
    """The part that the active channels do not give, with one damping; then what is left, with another."""
    h, u, second = features(hidden=9, inputs=4)
    h, u = h + .2 * torch.randn(400, 9, dtype=F64), u + .2 * torch.randn(400, 4, dtype=F64)
    g = torch.Generator().manual_seed(3)
    d = torch.randn(400, 7, generator=g, dtype=F64) + 3 * u[:, :1] + h[:, 4:5] - 2
    metric = {
        'none': None, 'diagonal': torch.rand(7, generator=g, dtype=F64),
        'matrix': torch.randn(5, 7, generator=g, dtype=F64)}[metric]
    other_h, other_u, other_d = h[:90] * 1.5 + .3, u[:90] - .7, d[:90].flip(0)  # the fit is measured on other rows, too
    p, q = problem(h, u, second, d, metric), problem(other_h, other_u, second, other_d, metric)
    y, active, idle = h @ second.weight.T + second.bias, torch.tensor([1, 4, 6]), torch.tensor([0, 2, 3, 5, 7, 8])
    x = torch.cat([h[:, active], u] if linear_path else [h[:, active]], 1)
    matrix = torch.eye(7, dtype=F64) if metric is None else metric.diag() if metric.ndim == 1 else metric
    ridges = (.3, 5., float('inf'))
    fits = p.solve(active, 1e-2, linear_path, ridges)
    for ridge, fit, loss, other_loss in zip(ridges, fits, p.losses(fits), q.losses(fits)):
        weight = ridge_regression(x, h[:, idle] @ second.weight[:, idle].T, 1e-2)
        weight[:, :3] += second.weight[:, active]
        if ridge < float('inf'):
            weight = weight + ridge_regression(x, y + d - x @ weight.T, ridge)
        expected = x @ weight.T + (y + d - x @ weight.T).mean(0)
        torch.testing.assert_close(predict(fit, h, u), expected, rtol=1e-4, atol=1e-4)
        error = (y + d - predict(fit, h, u)) @ matrix.T
        assert loss == pytest.approx(error.square().mean(0).sum().item(), rel=1e-8)
        target = other_h @ second.weight.T + second.bias + other_d
        error = (target - predict(fit, other_h, other_u)) @ matrix.T
        assert other_loss == pytest.approx(error.square().mean(0).sum().item(), rel=1e-8)
    assert p.share(2.) == pytest.approx(2 / ((y + d) @ matrix.T).var(0, correction=0).sum().item())


def test_moments_add_up():
    h, _, _ = features()
    parts = [Moments(h[0]) for _ in range(2)]
    for moments, rows in zip(parts, (h[:150], h[150:])):
        moments.add(rows)
    total = parts[0] + parts[1]
    torch.testing.assert_close(total.covariance(), torch.cov(h.T, correction=0))
    assert parts[0].count == 150


def test_damping_is_relative_to_the_variance_of_every_variable():
    """Other units of the features change nothing."""
    h, u, second = features()
    units = 2. ** torch.arange(-2, 4, dtype=F64).repeat(2)
    other = Affine(second.weight / units, second.bias)
    active = torch.tensor([0, 5, 9])
    for ridge in (1e-2, 1.):
        p, q = problem(h, u, second), problem(h * units, u, other)
        fit, scaled = p.solve(active, ridge)[0], q.solve(active, ridge)[0]
        # up to a millionth of the mean variance, which damps constant variables
        torch.testing.assert_close(scaled.linear.weight, fit.linear.weight, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(scaled.weight * units[active], fit.weight, rtol=1e-3, atol=1e-4)
        assert q.losses([scaled])[0] == pytest.approx(p.losses([fit])[0], rel=1e-4)


def test_features_that_are_all_constant():
    h, u, second = features()
    constant = problem(h[:1].repeat(50, 1), u[:1].repeat(50, 1), second)
    assert constant.share(0.) == 0
    assert constant.elimination(1e-4).loss.isfinite().all()
    fit, = constant.solve(torch.tensor([1]), 1e-4)
    assert constant.losses([fit])[0] == pytest.approx(0, abs=1e-20)
    torch.testing.assert_close(predict(fit, h[:1], u[:1])[0], h[0] @ second.weight.T + second.bias)


@pytest.mark.parametrize('linear_path', [True, False])
@pytest.mark.parametrize('seed', range(3))
def test_elimination_equals_trying_every_channel(seed, linear_path):
    h, u, second = features(hidden=8, seed=seed)
    h[:, 3:5] += torch.randn(400, 2, generator=torch.Generator().manual_seed(1), dtype=F64)  # all channels differ
    y = h @ second.weight.T
    found = problem(h, u, second).elimination(1e-12, linear_path)
    u = u if linear_path else u[:, :0]
    left, order, losses = list(range(8)), [], [0.]
    while left:
        errors = [refit(torch.cat([h[:, [j for j in left if j != i]], u], 1), y)[1] for i in left]
        best = min(range(len(left)), key=errors.__getitem__)
        order.append(left.pop(best))
        losses.append(errors[best])
    assert found.order.tolist() == order
    torch.testing.assert_close(found.loss, torch.tensor(losses, dtype=F64), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('seed', range(3))
def test_elimination_of_channels_that_their_input_predicts(seed):
    """The covariance left after the prediction is rounding of the float32 sums, which is not positive definite."""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(2048, 64, generator=g) * torch.logspace(-6, 0, 64)
    second = Affine(torch.randn(3, 128, generator=g, dtype=F64), torch.zeros(3, dtype=F64))
    linear = problem(u @ torch.randn(64, 128, generator=g), u, second)
    found = linear.elimination(1e-2)
    assert sorted(found.order.tolist()) == list(range(128))
    assert found.loss.isfinite().all()
    assert linear.share(found.loss[-1].item()) < .01


def test_elimination_of_several_channels_at_once():
    h, _, second = features(hidden=40, out=9)
    residual = torch.cov(h.T) + torch.eye(40, dtype=F64)
    one, groups = eliminate(residual, second.weight, 0), eliminate(residual, second.weight, .2)
    assert sorted(groups.order.tolist()) == list(range(40))
    assert (groups.loss.diff() >= 0).all()
    # the loss is what the refitted second layer loses, whatever the steps
    for k in (8, 14, 19, 40):
        gone, kept = groups.order[:k], groups.order[k:]
        schur = residual[gone][:, gone] - residual[gone][:, kept] @ torch.linalg.solve(
            residual[kept][:, kept], residual[kept][:, gone])
        expected = (second.weight[:, gone] @ schur * second.weight[:, gone]).sum()
        torch.testing.assert_close(groups.loss[k], expected)
        assert one.loss[k] <= groups.loss[k] * (1 + 1e-9)


def test_channels_of_one_step_share_its_cost_in_proportion():
    """Of uncorrelated channels each costs what it does alone, whatever the steps."""
    variance, weight = torch.tensor([1., 4., 9., 16.], dtype=F64), torch.ones(2, 4, dtype=F64)
    for fraction in (1, .5, 0):
        found = eliminate(variance.diag(), weight, fraction)
        assert found.order.tolist() == [0, 1, 2, 3]
        torch.testing.assert_close(found.loss, torch.tensor([0., 2., 10., 28., 60.], dtype=F64))


def test_allocation_against_every_combination():
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        # convex losses that start with a step, as the additional matrix makes the costs start with one
        losses = [torch.rand(7, generator=g, dtype=F64).sort().values.cumsum(0) for _ in range(3)]
        for loss in losses:
            loss[0] = 0
        macs = [10. * c * torch.arange(6, -1, -1, dtype=F64) + 15 * (torch.arange(7) > 0) for c in (1, 2, 3)]
        budget = 200.
        idle = allocate(losses, macs, budget)
        total = sum(m[k] for m, k in zip(macs, idle))
        assert total <= budget
        best = min(
            (losses[0][i] + losses[1][j] + losses[2][k]).item()
            for i in range(7) for j in range(7) for k in range(7)
            if macs[0][i] + macs[1][j] + macs[2][k] <= budget)
        found = sum(loss[k].item() for loss, k in zip(losses, idle))
        # at worst one channel of one FFN from the best combination
        assert found <= best + max(loss.diff().max().item() for loss in losses)


def test_allocation_limits():
    loss, macs = torch.tensor([0., 1., 3.], dtype=F64), torch.tensor([10., 8., 4.], dtype=F64)
    assert allocate([loss, loss], [macs, macs], 20) == [0, 0]
    assert allocate([loss, loss], [macs, macs], 8) == [2, 2]
    assert allocate([loss, 100 * loss], [macs, macs], 14) == [2, 0]
    with pytest.raises(ValueError, match='least'):
        allocate([loss, loss], [macs, macs], 7.9)
    # the rest of the budget is used where no multiplier would use it: the middle is above the line through both ends
    concave = torch.tensor([0., 1., 1.2], dtype=F64)
    assert allocate([concave, concave], [macs, macs], 18) == [0, 1]
    # channels that cost nothing idle before others
    assert allocate([0 * loss, loss], [macs, macs], 14) == [2, 0]


def test_allocation_of_losses_that_are_not_finite():
    macs = torch.tensor([10., 8., 4.], dtype=F64)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match='finite'):
            allocate([torch.tensor([0., 1., bad], dtype=F64)], [macs], 6)
    # whatever their unit
    for unit in (1e-200, 1e200):
        assert allocate([unit * torch.tensor([0., 1., 3.], dtype=F64)] * 2, [macs] * 2, 8) == [2, 2]
    # even where a multiplier in that unit is infinite
    assert allocate([torch.tensor([0., 1.7e308], dtype=F64)], [torch.tensor([10., 9.], dtype=F64)], 9) == [1]
