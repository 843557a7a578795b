"""Annealed activations and norms against their formulas."""
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import GroupNorm1, LayerNorm, LayerNorm2d
from timm.models.metaformer import StarReLU

from tests.helpers import in_processes, relative
from timm_rep.layers import Affine, AnnealedActivation, AnnealedNorm, add_annealing_hooks, advance_annealing


def batch(seed, shape=(64, 7, 12), **kwargs):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64) * torch.linspace(.1, 3, shape[-1]) + torch.linspace(
        -2, 2, shape[-1])
    return x.to(**kwargs)


def lines(h, y):
    """Least-squares slope and intercept of every column, and the mean squared error."""
    result = []
    for a, b in zip(h.T, y.T):
        design = torch.stack([a, torch.ones_like(a)], 1)
        line = torch.linalg.lstsq(design, b).solution
        result.append((*line, (design @ line - b).square().mean()))
    return (torch.stack(v) for v in zip(*result))


@pytest.mark.parametrize('schedule,shares', [
    ('linear', [0, .25, .5, .75, 1, 1]),
    ('cosine', [(1 - math.cos(math.pi * t)) / 2 for t in (0, .25, .5, .75, 1, 1)]),
])
@pytest.mark.parametrize('act', [
    nn.GELU(), nn.Hardswish(inplace=True), nn.ReLU(), nn.Sequential(nn.Identity(), nn.SiLU(inplace=True))])
def test_activation(act, schedule, shares):
    layer = AnnealedActivation(act, 12, 5, 5, schedule).double().train()
    layer.importance.copy_(torch.linspace(2, .5, 12))
    x, function = batch(0), nn.SiLU() if isinstance(act, nn.Sequential) else type(act)()
    layer.eval()
    assert torch.equal(layer(x), function(x))  # before the first step
    layer.train()
    h, y = x.flatten(0, 1), function(x.flatten(0, 1))
    slope, intercept, error = lines(h, y)
    cost = layer.importance * error
    for step, share in enumerate(shares, 1):
        advance_annealing(layer)
        out = layer(x)
        assert layer.step == min(step, 5)
        assert layer.progress(torch.float64).item() == pytest.approx(share, abs=1e-7)
        line = slope * x + intercept
        idle = layer.idle
        assert idle.sum() == 7
        assert step == 1 or set(cost.argsort()[:7].tolist()) == set(idle.nonzero().flatten().tolist())
        expected = torch.where(idle, function(x) + share * (line - function(x)), function(x))
        assert (out - expected).abs().max() < 1e-6  # shares are computed in float32
        assert torch.equal(out[..., ~idle], function(x)[..., ~idle])
    assert torch.equal(layer(x)[..., idle], layer.eval()(x)[..., idle])


def test_statistics_average_batches_and_end():
    layer = AnnealedActivation(nn.GELU(), 12, 6, 4).double().train()
    batches = [batch(i) * (i + 1) for i in range(5)]
    means = []
    for x in batches:
        advance_annealing(layer)
        layer(x)
        means.append(layer.moments[0].clone())
    flat = [x.flatten(0, 1).mean(0) for x in batches]
    for step in (1, 2, 3):
        assert (means[step] - sum(flat[:step]) / step).abs().max() < 1e-6
    # the end, in which lines no longer change
    assert torch.equal(means[4], means[3])
    layer.anneal_steps, expected = 1000, means[3]
    layer.train().step.fill_(4)
    for step in range(4, 64):  # averages over all batches at first, over about the last 20 later
        advance_annealing(layer)
        layer(batches[0])
        expected = expected.lerp(flat[0], max(1 / step, .05)) if step > 4 else expected
    assert (layer.moments[0] - expected).abs().max() < 1e-6


@pytest.mark.parametrize('resumed', [False, True])
def test_nothing_is_measured_after_the_end(monkeypatch, resumed):
    """Neither moments nor collectives, also in a model that was loaded or compiled after its end; lines stay."""
    layer = AnnealedActivation(nn.GELU(), 12, 6, 3).train()
    measured = []
    measure = AnnealedActivation._measure
    monkeypatch.setattr(AnnealedActivation, '_measure', lambda self, *args: measured.append(1) or measure(self, *args))
    for _ in range(6):
        advance_annealing(layer)
        layer(batch(0, dtype=torch.float32))
    assert len(measured) == 2
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    if resumed:
        layer = AnnealedActivation(nn.GELU(), 12, 6, 3).train()
        layer.load_state_dict(state)
    layer.train()(batch(1, dtype=torch.float32))
    advance_annealing(layer)
    layer(batch(2, dtype=torch.float32))
    assert len(measured) == 2
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    layer.load_state_dict({**state, 'step': torch.tensor(1)})
    layer(batch(2, dtype=torch.float32))
    assert len(measured) == 3


def test_a_compiled_model_after_the_end():
    """A graph measures on; steps, lines and the last batch stay as in eager mode."""
    eager, other = (nn.Sequential(AnnealedActivation(nn.GELU(), 12, 6, 3)).train() for _ in range(2))
    for model in (eager, other):
        add_annealing_hooks(model)
    compiled = torch.compile(other, backend='eager', fullgraph=True)
    for seed in range(6):
        x = batch(seed, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), eager(x))
    assert other[0].step == 3
    torch.testing.assert_close(other.state_dict(), eager.state_dict())


def test_a_checkpoint_between_two_steps():
    """The contribution of the last batch is in the state."""
    model = nn.Sequential(AnnealedActivation(nn.GELU(), 12, 6, 5)).train()
    add_annealing_hooks(model)
    other = nn.Sequential(AnnealedActivation(nn.GELU(), 12, 6, 5)).train()
    add_annealing_hooks(other)
    for seed in range(4):
        other.load_state_dict(model.state_dict())
        x = batch(seed, dtype=torch.float32)
        assert torch.equal(model(x), other(x))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert model[0].step == 4


def test_repeated_passes_count_once():
    layer = AnnealedActivation(nn.GELU(), 12, 6, 10).train()
    for i in range(3):
        advance_annealing(layer)
        x = batch(i, dtype=torch.float32)
        first = layer(x)
        state = {k: v.clone() for k, v in layer.state_dict().items()}
        assert torch.equal(layer(x), first)
        assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    assert layer.step == 3
    once = AnnealedActivation(nn.GELU(), 12, 6, 10).train()
    for i in range(3):
        advance_annealing(once)
        once(batch(i, dtype=torch.float32))
    assert all(torch.equal(v, layer.state_dict()[k]) for k, v in once.state_dict().items())
    advance_annealing(layer.eval())
    assert layer.step == 3


def test_two_passes_before_backward():
    """As with two views of an image: the second pass may choose other channels than the first one was computed with."""
    for steps in (10, 2):
        layer = AnnealedActivation(nn.GELU(), 12, 6, steps).train()
        views = [batch(i, dtype=torch.float32).requires_grad_() for i in range(2)]
        alone = []
        for view in views:
            advance_annealing(layer)
            alone += torch.autograd.grad(layer(view).square().sum(), view)
        layer = AnnealedActivation(nn.GELU(), 12, 6, steps).train()
        total = 0.
        for view in views:
            advance_annealing(layer)
            total = total + layer(view).square().sum()
        total.backward()
        assert all(torch.equal(view.grad, grad) for view, grad in zip(views, alone))


def test_overflow_does_not_count():
    layer = AnnealedActivation(nn.GELU(), 12, 6, 10).train()
    advance_annealing(layer)
    layer(batch(0, dtype=torch.float32))
    advance_annealing(layer)
    moments = layer.moments.clone()
    x = batch(1, dtype=torch.float32)
    x[0, 0, 3] = float('inf')
    layer(x)
    advance_annealing(layer)
    assert torch.equal(layer.moments[:, 3], moments[:, 3])
    assert not torch.equal(layer.moments[:, 4], moments[:, 4])
    assert layer.moments.isfinite().all()
    assert layer(x[:0]).shape == (0, 7, 12)


def test_channels_second_and_gates():
    x = batch(0, dtype=torch.float32)
    last = AnnealedActivation(nn.SiLU(), 12, 6, 3).train()
    second = AnnealedActivation(nn.SiLU(), 12, 6, 3, dim=1).train()
    gates = AnnealedActivation(nn.SiLU(), 12, 6, 3, gates=True).train()
    for _ in range(3):
        for layer in (last, second, gates):
            advance_annealing(layer)
        a, b = last(x), second(x.movedim(-1, 1).unsqueeze(-1)).squeeze(-1).movedim(1, -1)
        assert (a - b).abs().max() < 1e-6
        y = gates(x)
    mean = F.silu(x).mean((0, 1))
    assert (y[..., gates.idle] - mean[gates.idle]).abs().max() < 1e-6
    spread = F.silu(x).flatten(0, 1).var(0)
    assert set(spread.argsort()[:6].tolist()) == set(gates.idle.nonzero().flatten().tolist())


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    layer = AnnealedActivation(nn.GELU(), 12, 6, 3).train()
    x = batch(0, dtype=dtype)
    for _ in range(3):
        advance_annealing(layer)
        y = layer(x)
    assert y.dtype == dtype
    assert layer.moments.dtype == torch.float32
    reference = AnnealedActivation(nn.GELU(), 12, 6, 3).double().train()
    for _ in range(3):
        advance_annealing(reference)
        expected = reference(x.double())
    assert (y.double() - expected).abs().max() < 20 * torch.finfo(dtype).eps


def test_activation_with_another_dtype():
    """The scale of StarReLU makes float32 of what autocast gives it."""
    layer = AnnealedActivation(StarReLU(), 12, 6, 3).train()
    x = batch(0, dtype=torch.float32)
    for _ in range(3):
        advance_annealing(layer)
        y = layer(x.bfloat16())
    line = layer.linear_fit()[0] * x + layer.linear_fit()[1]
    expected = torch.where(layer.idle, line, layer.act(x))
    assert y.dtype == torch.float32
    assert relative(y, expected) < 4 * torch.finfo(torch.bfloat16).eps


def see_one_batch(path):
    """Save the state of two annealed activations after the batch of a process, and the number of collectives."""
    model = nn.Sequential(*(AnnealedActivation(nn.GELU(), 12, 6, 2) for _ in range(2))).double().train()
    add_annealing_hooks(model)
    reductions = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: reductions.append(1) or all_reduce(*args, **kwargs)
    for step in range(4):
        model(process_batch(step, dist.get_rank()))
    torch.save((model.state_dict(), len(reductions)), f'{path}.{dist.get_rank()}')


def process_batch(step, rank):
    return batch(2 * step + rank, (64 - 24 * rank, 7, 12)) * (1 + 3 * rank) + rank  # of different numbers of tokens


def test_processes_share_their_batches(tmp_path):
    """Two processes have the channels and lines of one that sees both batches, by two collectives a step."""
    in_processes(2, see_one_batch, tmp_path / 'state')
    model = nn.Sequential(*(AnnealedActivation(nn.GELU(), 12, 6, 2) for _ in range(2))).double().train()
    add_annealing_hooks(model)
    for step in range(4):
        model(torch.cat([process_batch(step, rank) for rank in range(2)]))
    for rank in range(2):
        state, reductions = torch.load(f'{tmp_path / "state"}.{rank}', weights_only=True)
        assert reductions == 2
        for name, value in model.state_dict().items():
            assert (state[name].double() - value.double()).abs().max() < 1e-12 * (1 + value.double().abs().max())


def see_many_tokens(path):
    """Save the lines of an activation in float16 after a batch of more tokens than float16 can count."""
    layer = AnnealedActivation(nn.GELU(), 4, 2, 3).half().train()
    add_annealing_hooks(layer)
    for _ in range(3):
        layer(500 * batch(dist.get_rank(), (40000, 4), dtype=torch.float16))
    torch.save(layer.linear_fit(), f'{path}.{dist.get_rank()}')


def test_processes_in_float16(tmp_path):
    in_processes(2, see_many_tokens, tmp_path / 'lines')
    x = 500 * torch.cat([batch(rank, (40000, 4), dtype=torch.float16) for rank in range(2)])
    layer = AnnealedActivation(nn.GELU(), 4, 2, 3).double().train()
    for _ in range(3):
        advance_annealing(layer)
        layer(x.double())
    advance_annealing(layer)
    for rank in range(2):
        for found, expected in zip(torch.load(f'{tmp_path / "lines"}.{rank}', weights_only=True), layer.linear_fit()):
            torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('norm,use_conv', [
    (LayerNorm(12), False), (LayerNorm(12, affine=False), False), (LayerNorm2d(12), True),
    (GroupNorm1(12), True),
])
def test_norm(norm, use_conv):
    torch.manual_seed(0)
    x = batch(0)
    x = x.movedim(-1, 1).unsqueeze(-1) if use_conv else x
    bn = (nn.BatchNorm2d if use_conv else nn.BatchNorm1d)(12)
    for p in [*norm.parameters(), *bn.parameters()]:
        nn.init.normal_(p)
    layer = AnnealedNorm(norm, bn, 5, use_conv=use_conv).double().train()
    nn.init.constant_(layer.alpha, -.3)
    shape = (1, -1, 1, 1) if use_conv else (-1,)
    dims = (0, 2, 3) if use_conv else (0, 1)
    for step, share in enumerate((0, .25, .5, .75, 1, 1), 1):
        advance_annealing(layer)
        mean, var = x.mean(dims), x.var(dims, correction=0)
        z = (x - mean.view(shape)) / (var.view(shape) + bn.eps).sqrt() * bn.weight.view(shape) + bn.bias.view(shape)
        expected = norm(x) + share * (z - .3 * x - norm(x))
        assert (layer(x) - expected).abs().max() < 1e-6
        assert step > 1 or torch.equal(layer(x), norm(x))
    # in front of a linear layer
    layer.eval()
    linear = nn.Linear(12, 3).double()
    folded = layer.affine_before(Affine.from_linear(linear))
    tokens = x.squeeze(-1).movedim(1, -1) if use_conv else x
    y = layer(x).squeeze(-1).movedim(1, -1) if use_conv else layer(x)
    assert (tokens @ folded.weight.T + folded.bias - linear(y)).abs().max() < 1e-9


@pytest.mark.parametrize('trainable', [False, True])
def test_alpha_of_a_frozen_norm_is_frozen(trainable):
    bn = nn.BatchNorm1d(4).requires_grad_(trainable)
    assert AnnealedNorm(nn.LayerNorm(4), bn, 5).alpha.requires_grad == trainable


@pytest.mark.parametrize('args,message', [
    ((1, 'linear'), 'anneal_steps'), ((2.5, 'linear'), 'anneal_steps'), ((True, 'linear'), 'anneal_steps'),
    ((9, 'step'), 'anneal_schedule'),
])
def test_refusals(args, message):
    with pytest.raises(ValueError, match=message):
        AnnealedActivation(nn.GELU(), 4, 2, *args)
