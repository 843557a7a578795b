import copy
import importlib
import inspect
import pickle
import sys
import types
import warnings

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.optim import create_optimizer_v2, list_optimizers

import timm_rep
import timm_rep.optim._chunks as chunks
from tests.helpers import relative
from tests.reference import sgd
from timm_rep.layers import ConvBranch, Csla, CslaConv2d, IdentityBranch
from timm_rep.optim import GradMult, RepAdamW, RepSGD, get_grad_mult, rep_optim, set_grad_mult

PAIRS = [(RepSGD, torch.optim.SGD), (RepAdamW, torch.optim.AdamW)]
SGD_ARGS = [
    dict(),
    dict(momentum=.9, nesterov=True, weight_decay=.1),
    dict(momentum=.5, dampening=.2, maximize=True),
    dict(momentum=.9, foreach=True),
    dict(momentum=.9, foreach=False),
    dict(momentum=.9, fused=True),
]
ADAMW_ARGS = [dict(), dict(weight_decay=.3, amsgrad=True), dict(maximize=True), dict(foreach=True), dict(fused=True)]


def csla(channels=8):
    return Csla(channels, channels, (ConvBranch(3), ConvBranch(1), IdentityBranch()))


def scales(channels=8):
    return {name: torch.randn(channels) for name in csla(channels).scaled_branches}


def net(dtype=torch.float32, channels=8, attach=True):
    """Two convolutions with a GradMult, and parameters without one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, 2, 1), CslaConv2d(csla(channels)), nn.BatchNorm2d(channels), nn.ReLU(),
        CslaConv2d(csla(channels)), nn.Flatten(), nn.LazyLinear(5),
    )
    model(torch.randn(2, 3, 16, 16))
    if attach:
        for i in (1, 4):
            set_grad_mult(model[i].weight, GradMult(csla(channels), scales(channels)))
    return model.to(dtype)


def batch(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 16, 16, generator=g).to(dtype), torch.arange(4)


def backward(model, dtype=torch.float32, seed=0):
    x, y = batch(dtype, seed)
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


@pytest.fixture(params=['in chunks', 'as a list'])
def form(request, monkeypatch):
    """The form of the update: several chunks a parameter, the last one smaller; or lists, as on a GPU."""
    monkeypatch.setattr(chunks, '_CHUNK_BYTES', 2000)
    monkeypatch.setattr(rep_optim, 'in_chunks', lambda param: request.param == 'in chunks')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('kwargs', SGD_ARGS, ids=str)
def test_sgd_against_reference(kwargs, channels_last, dtype, form):
    model = net(dtype)
    model = model.to(memory_format=torch.channels_last) if channels_last else model
    params = list(model.parameters())
    mults = [m.dense('squared', torch.float64).to(dtype) if (m := get_grad_mult(p)) else torch.ones(()) for p in params]
    expected, buffers = [p.detach().clone() for p in params], [None] * len(params)
    optimizer = RepSGD(params, lr=.05, **kwargs)
    for step in range(4):
        backward(model, dtype, step)
        grads = [p.grad.clone() for p in params]
        sgd(expected, grads, buffers, mults, lr=.05, **kwargs)
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads))  # left as the backward pass wrote it
        for p, e in zip(params, expected):
            assert relative(p.detach(), e) < (1e-5 if dtype == torch.float32 else 1e-12)
            e.copy_(p.detach())
        buffers = [optimizer.state[p].get('momentum_buffer') for p in params]
        buffers = [None if b is None else b.clone() for b in buffers]


@pytest.mark.parametrize('kwargs', ADAMW_ARGS, ids=str)
def test_adamw_against_torch(kwargs, form):
    """The update is torch's AdamW update without weight decay, times the multiplier."""
    model = net(torch.float64)
    params = list(model.parameters())
    mults = [m.dense('absolute', torch.float64) if (m := get_grad_mult(p)) else torch.ones(()) for p in params]
    bare = [nn.Parameter(torch.zeros_like(p)) for p in params]
    lr, decay = .01, kwargs.get('weight_decay', .01)
    optimizer = RepAdamW(params, lr=lr, **kwargs)
    reference = torch.optim.AdamW(bare, lr=lr, **{**kwargs, 'weight_decay': 0.})
    for step in range(4):
        backward(model, torch.float64, step)
        before = [p.detach().clone() for p in params]
        for b, p in zip(bare, params):
            b.data.zero_()
            b.grad = p.grad.clone()
        reference.step()
        optimizer.step()
        for p, old, b, m in zip(params, before, bare, mults):
            torch.testing.assert_close(p.detach(), old * (1 - lr * decay) + m * b.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('rep,plain', PAIRS)
@pytest.mark.parametrize('flags', [dict(), dict(foreach=True), dict(foreach=False), dict(fused=True)], ids=str)
def test_without_grad_mults_it_is_torch(rep, plain, flags):
    models = net(attach=False), net(attach=False)
    ours = rep(models[0].parameters(), lr=.1, strict=False, **flags)
    optimizers = ours, plain(models[1].parameters(), lr=.1, **flags)
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            backward(model, seed=step)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize('rep,name', [(RepSGD, 'sgd'), (RepAdamW, 'adamw')])
@pytest.mark.parametrize('flags,fused', [
    (dict(), True), (dict(fused=True), True), (dict(fused=False), False), (dict(foreach=True), False),
    (dict(foreach=False), False)], ids=str)
def test_the_kernel_of_marked_parameters_is_torchs(rep, name, flags, fused, monkeypatch):
    """On a CPU, its fused one by default."""
    function, seen = getattr(rep_optim, name), []

    def watched(*args, **kwargs):
        seen.append(bool(kwargs['fused']))
        return function(*args, **kwargs)

    monkeypatch.setattr(rep_optim, name, watched)
    model = net()
    optimizer = rep([model[1].weight, model[4].weight], lr=.1, **flags)
    backward(model)
    optimizer.step()
    assert seen == [fused] * 2


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_state_dicts_go_both_ways(rep, plain):
    kwargs = dict(lr=.1, momentum=.9) if rep is RepSGD else dict(lr=.1)
    model = net()
    optimizer = rep(model.parameters(), **kwargs)
    backward(model)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = plain(net(attach=False).parameters(), **kwargs)
    other.load_state_dict(saved)
    again = rep(model.parameters(), **kwargs)
    again.load_state_dict(other.state_dict())
    back = again.state_dict()
    assert saved['param_groups'] == back['param_groups']
    assert saved['state'].keys() == back['state'].keys()
    for i, state in saved['state'].items():
        assert state.keys() == back['state'][i].keys()
        assert all(torch.equal(v, back['state'][i][k]) for k, v in state.items())


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_resumed_is_uninterrupted(rep, plain):
    kwargs = dict(lr=.05, momentum=.9) if rep is RepSGD else dict(lr=.05)
    straight, resumed = net(), net()
    optimizer = rep(straight.parameters(), **kwargs)
    for step in range(4):
        backward(straight, seed=step)
        optimizer.step()
    optimizer = rep(resumed.parameters(), **kwargs)
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = rep(resumed.parameters(), **kwargs)
            optimizer.load_state_dict(state)
        backward(resumed, seed=step)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), resumed.parameters()))


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_closure_and_hooks_run_once(rep, plain):
    model = net()
    optimizer = rep(model.parameters(), lr=.1)
    plain(net(attach=False).parameters(), lr=.1)  # patches torch's own step with its hooks
    calls = []
    optimizer.register_step_pre_hook(lambda *a: calls.append('pre'))
    optimizer.register_step_post_hook(lambda *a: calls.append('post'))
    loss = optimizer.step(lambda: backward(model))
    assert loss.item() > 0
    assert calls == ['pre', 'post']


def test_parameters_without_gradient_are_left_alone():
    model = net()
    optimizer = RepSGD(model.parameters(), lr=.1, momentum=.9, weight_decay=.1)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_parameter_groups_and_schedules():
    model = net()
    others = [p for p in model.parameters() if p is not model[1].weight]
    optimizer = RepSGD([{'params': [model[1].weight], 'lr': 0.}, {'params': others}], lr=.1)
    before = model[1].weight.detach().clone(), model[4].weight.detach().clone()
    backward(model)
    optimizer.step()
    assert torch.equal(model[1].weight, before[0])
    assert not torch.equal(model[4].weight, before[1])


def test_registered_with_timm():
    described = dict(list_optimizers(with_description=True))
    for name in ('repsgd', 'repadamw'):
        assert name in list_optimizers()
        assert 'GradMult' in described[name]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        optimizer = create_optimizer_v2(net(), opt='repsgd', lr=.1, weight_decay=4e-5)
    assert type(optimizer) is RepSGD
    assert [g['weight_decay'] for g in optimizer.param_groups] == [0., 4e-5]
    assert optimizer.defaults['nesterov']
    assert optimizer.defaults['momentum'] == .9
    adamw = create_optimizer_v2(net(), opt='repadamw', lr=.1, betas=(.8, .9), eps=1e-6)
    assert type(adamw) is RepAdamW
    assert adamw.defaults['betas'] == (.8, .9)
    model = net()
    lookahead = create_optimizer_v2(model, opt='lookahead_repsgd', lr=.1)
    for step in range(7):
        backward(model, seed=step)
        lookahead.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_layers_do_not_import_optimizers():
    """Importing the layers alone, without the package's __init__, registers no optimizer."""
    package = types.ModuleType('timm_rep')
    package.__path__ = list(timm_rep.__path__)
    imported = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition('.')[0] == 'timm_rep'}
    try:
        sys.modules['timm_rep'] = package
        importlib.import_module('timm_rep.layers')
        names = {name for name in sys.modules if name.partition('.')[0] == 'timm_rep'}
    finally:
        sys.modules.update(imported)
    assert 'timm_rep.layers.grad_mult' in names
    assert {name.split('.')[1] for name in names if '.' in name} <= {'layers', 'utils'}


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_signature_is_torchs(rep, plain):
    ours, torchs = (inspect.signature(cls).parameters for cls in (rep, plain))
    assert {n: p.default for n, p in ours.items() if n != 'strict'} == {
        n: p.default for n, p in torchs.items() if n not in ('differentiable', 'decoupled_weight_decay')}


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_refusals(rep, plain):
    name = rep.__name__
    with pytest.raises(ValueError, match=rf'{name}.*attach_grad_mults.*strict=False'):
        rep(timm.create_model('test_resnet').parameters(), lr=.1)
    param = nn.Parameter(torch.zeros(8, 8, 3, 3))
    set_grad_mult(param, GradMult(csla(), scales()))
    optimizer = rep([param], lr=.1)
    param.grad = torch.zeros(8, 8, 3, 3).to_sparse()
    with pytest.raises(RuntimeError, match='sparse'):
        optimizer.step()
    param = nn.Parameter(torch.zeros(8, 8, 3, 3, dtype=torch.complex64))
    set_grad_mult(param, GradMult(csla(), scales()))
    optimizer = rep([param], lr=.1)
    param.grad = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match='complex'):
        optimizer.step()


@pytest.mark.parametrize('rep,plain', PAIRS)
@pytest.mark.parametrize('change, message', [
    (lambda x: x.flatten()[:100], r'\(8, 8, 3, 3\).*\(100,\).*fully_shard'),
    (lambda x: x[2:6], r'\(8, 8, 3, 3\).*\(4, 8, 3, 3\)'), (lambda x: x[:, 2:6], r'\(8, 8, 3, 3\).*\(8, 4, 3, 3\)'),
], ids=['flattened', 'rows', 'columns'])
def test_a_parameter_of_another_shape_is_refused(rep, plain, change, message):
    """FSDP1 flattens a kernel and keeps its attributes; pruning in place removes rows or columns."""
    params = [nn.Parameter(torch.ones(8, 8, 3, 3)) for _ in range(2)]
    for param in params:
        set_grad_mult(param, GradMult(csla(), scales()))
    optimizer = rep(params, lr=.1)
    params[1].data = change(params[1].data)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(8, 8, 3, 3))
    assert not optimizer.state


@pytest.mark.parametrize('rep,plain', PAIRS)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_low_precision_parameters(rep, plain, dtype):
    """The update is torch's update in the same dtype, times the multiplier."""
    model = net(dtype)
    backward(model, dtype)
    param = model[1].weight
    before = param.detach().clone()
    bare = nn.Parameter(torch.zeros_like(param))
    bare.grad = param.grad.clone()
    # the default eps of AdamW is zero in float16
    kwargs = dict(lr=.1, **({} if rep is RepSGD else dict(eps=1e-4)))
    plain([bare], **kwargs).step()
    rep(model.parameters(), **kwargs, weight_decay=0.).step()
    dense = get_grad_mult(param).dense('squared' if rep is RepSGD else 'absolute')
    assert param.dtype == dtype
    expected = before.float() + bare.detach().float() * dense
    torch.testing.assert_close(param.detach().float(), expected, rtol=2e-2, atol=2e-3)
    assert (expected - before.float()).abs().max() > .03


def ones(param):
    """Attach a multiplier of ones, with which the optimizer agrees with torch's."""
    rows, columns = param.shape[:2]
    if rows:
        set_grad_mult(param, GradMult(Csla(columns, rows, (ConvBranch(3),)), {'conv3x3': torch.ones(rows)}))
    return param


def test_parameters_in_another_dtype_than_their_momentum(form):
    """As in torch, the buffers of earlier steps stay in their dtype."""
    params = []
    for cls in RepSGD, torch.optim.SGD:
        model = net(attach=False)
        ones(model[1].weight)
        optimizer = cls(model.parameters(), lr=.1, momentum=.9)
        for step, dtype in enumerate((torch.float32, torch.float64, torch.float64)):
            backward(model.to(dtype), dtype, step)
            optimizer.step()
        params.append([*model.parameters()])
    for ours, torchs in zip(*params):
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('flags', [dict(), dict(fused=True)], ids=str)
@pytest.mark.parametrize('marked', [False, True])
@pytest.mark.parametrize('dampening', [0., .3])
def test_the_first_step_after_a_skipped_one_is_not_dampened(flags, marked, dampening):
    """GradScaler skips its first steps, as its scale begins too large; torch's SGD without a skipped step decides."""
    results = []
    for cls, gradients, kwargs in (
            (RepSGD, (float('inf'), 1., 2., float('inf'), 3.), flags), (torch.optim.SGD, (1., 2., 3.), {})):
        param = nn.Parameter(torch.ones(4, 4, 3, 3))
        optimizer = cls(
            [ones(param) if cls is RepSGD and marked else param], lr=.1, momentum=.9, dampening=dampening, **kwargs,
            **(dict(strict=False) if cls is RepSGD else {}))
        scaler = torch.amp.GradScaler('cpu', init_scale=8., enabled=cls is RepSGD)
        for gradient in gradients:
            optimizer.zero_grad()
            scaler.scale((param * gradient).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(param.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize('flags', [dict(), dict(fused=True), dict(foreach=False), dict(foreach=True)], ids=str)
@pytest.mark.parametrize('rep,plain', PAIRS)
@pytest.mark.parametrize('change', [
    'gradient', 'parameter', 'state', 'not dense', 'not dense, and the state', 'rows innermost'])
@pytest.mark.parametrize('chunk_bytes', [150, 300])  # of one row, which is dense even if a parameter is not, and two
def test_layouts_may_differ(rep, plain, flags, change, chunk_bytes, monkeypatch):
    """Parameter, gradient and state may differ in memory format, also from step to step, as after resuming."""
    monkeypatch.setattr(chunks, '_CHUNK_BYTES', chunk_bytes)
    results = []
    for cls, kwargs in ((rep, flags), (plain, {})):
        g = torch.Generator().manual_seed(0)
        data = torch.randn(4, 16, 3, 3, generator=g)[:, :4]
        data = data if 'not dense' in change else data.contiguous()
        param = nn.Parameter(data.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) if 'rows' in change else data)
        kwargs = dict(kwargs, momentum=.9) if plain is torch.optim.SGD else kwargs
        optimizer = cls([ones(param) if cls is rep else param], lr=.1, **kwargs)
        for step in range(4):
            param.grad = torch.randn(4, 4, 3, 3, generator=g)
            if change == 'gradient' and step % 2:
                param.grad = param.grad.to(memory_format=torch.channels_last)
            if change == 'parameter' and step == 2:
                param.data = param.data.to(memory_format=torch.channels_last)
            if 'state' in change and step == 2:
                for name, value in optimizer.state[param].items():
                    if value.ndim == 4:
                        optimizer.state[param][name] = value.to(memory_format=torch.channels_last)
            optimizer.step()
        results.append(param.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_copies_of_the_optimizer_keep_the_multipliers(rep, plain):
    model = net()
    optimizer = rep(model.parameters(), lr=.1)
    expected = [mult and mult.dense('squared') for mult in map(get_grad_mult, model.parameters())]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        params = [p for group in other.param_groups for p in group['params']]
        for param, dense in zip(params, expected):
            found = get_grad_mult(param)
            assert (found is None) == (dense is None)
            assert found is None or torch.equal(found.dense('squared'), dense)
        assert not any('mult' in key for key in vars(other))


def test_copies_step_where_graphs_may_be_captured(monkeypatch):
    """torch's check before a graph capture reads an option that SGD does not have."""
    if hasattr(torch, 'accelerator'):  # not in torch 2.5
        monkeypatch.setattr(torch.accelerator, 'is_available', lambda: True, raising=False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    model = net()
    optimizer = copy.deepcopy(RepSGD(model.parameters(), lr=.1))
    backward(model)
    optimizer.step()


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_an_empty_shard(rep, plain):
    """A process has one of a kernel with fewer rows than there are processes; its state counts the same steps."""
    params = [ones(nn.Parameter(torch.ones(rows, 4, 3, 3))) for rows in (2, 0)]
    set_grad_mult(params[1], get_grad_mult(params[0]).rows(2, 2))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = rep(params, lr=.1, **(dict(momentum=.9) if rep is RepSGD else {}))
    for _ in range(2):
        optimizer.step()
    assert not torch.equal(params[0], torch.ones_like(params[0]))
    states = [optimizer.state[p] for p in params]
    assert states[0].keys() == states[1].keys()
    assert [s.get('step') for s in states] == ([None] * 2 if rep is RepSGD else [2, 2])


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_kernels_of_growing_size(rep, plain):
    """The memory of a step is reused from kernel to kernel."""
    together, apart = ([ones(nn.Parameter(torch.ones(n, 4, 3, 3))) for n in (2, 8, 4)] for _ in range(2))
    for param in [*together, *apart]:
        param.grad = torch.linspace(-1, 1, param.numel()).view_as(param)
    rep(together, lr=.1).step()
    for param in apart:
        rep([param], lr=.1).step()
    assert all(torch.equal(a, b) for a, b in zip(together, apart))


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_a_multiplier_out_of_range_changes_nothing(rep, plain):
    """The multiplier is found before any kernel is updated, also in the dtype of a parameter that was converted."""
    params = [ones(nn.Parameter(torch.ones(4, 4, 3, 3))) for _ in range(2)]
    optimizer = rep([dict(params=[p]) for p in params], lr=.1)
    for scale, dtype, match in ((1e30, torch.float32, 'float32'), (1e5, torch.float16, 'float16')):
        # the sum of absolute values has a larger range than the sum of squares
        scale = scale if rep is RepSGD else scale ** 2
        conv3x3 = torch.full((4,), scale, dtype=torch.float64)
        set_grad_mult(params[1], GradMult(Csla(4, 4, (ConvBranch(3),)), {'conv3x3': conv3x3}))
        for param in params:
            param.data = torch.ones_like(param, dtype=dtype)
            param.grad = torch.ones_like(param)
        with pytest.raises(OverflowError, match=rf'range of torch\.{match}, got 1e.*smaller scales'):
            optimizer.step()
        assert all(torch.equal(p, torch.ones_like(p)) for p in params)
        assert not optimizer.state


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_a_refused_gradient_changes_nothing(rep, plain):
    params = [ones(nn.Parameter(torch.ones(4, 4, 3, 3))), ones(nn.Parameter(torch.ones(4, 4, 3, 3))),
              nn.Parameter(torch.ones(3))]
    optimizer = rep(params, lr=.1)
    for param in params:
        param.grad = torch.ones_like(param)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(RuntimeError, match='sparse'):
        optimizer.step()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)
    assert not optimizer.state
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = rep(embedding.parameters(), lr=.1, strict=False)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    if rep is RepSGD:  # as torch.optim.SGD
        optimizer.step()
        assert not torch.equal(embedding.weight, before)
        params[1].grad = params[1].grad.to_dense()
        optimizer = rep([*params, embedding.weight], lr=.1, fused=True)
        with pytest.raises(RuntimeError, match=r'fused=True.*sparse'):
            optimizer.step()
        assert all(torch.equal(p, torch.ones_like(p)) for p in params)
    else:
        with pytest.raises(RuntimeError, match='sparse'):
            optimizer.step()


def test_options_that_are_not_for_them():
    param = ones(nn.Parameter(torch.ones(4, 4, 3, 3)))
    for rep in (RepSGD, RepAdamW):
        with pytest.raises(TypeError, match='differentiable'):
            rep([param], lr=.1, differentiable=True)
        optimizer = rep([param], lr=.1)
        with pytest.raises(ValueError, match='differentiable'):
            optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(1))], differentiable=True))
    with pytest.raises(ValueError, match='decoupled_weight_decay'):
        RepAdamW([dict(params=[param], decoupled_weight_decay=False)], lr=.1)


def test_memory_of_a_step(monkeypatch):
    """Besides the state of torch's optimizer: one chunk of at most 8 MB and O(channels) multipliers."""
    wide = Csla(512, 512, (ConvBranch(3), ConvBranch(1), IdentityBranch()))
    conv = CslaConv2d(wide)
    conv.set_scales({name: torch.ones(512) for name in wide.scaled_branches})
    sizes = []
    like = chunks.Scratch.like
    monkeypatch.setattr(
        chunks.Scratch, 'like', lambda self, x: sizes.append(x.numel() * x.element_size()) or like(self, x))
    for rep, plain in PAIRS:
        kwargs = dict(lr=.1, momentum=.9) if rep is RepSGD else dict(lr=.1)
        optimizer, reference = rep([conv.weight], **kwargs), plain([nn.Parameter(torch.ones(512, 512, 3, 3))], **kwargs)
        for o in (optimizer, reference):
            param = o.param_groups[0]['params'][0]
            param.grad = torch.ones_like(param)
            o.step()
        state, = optimizer.state.values()
        expected, = reference.state.values()
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in expected.items()}
        assert len(pickle.dumps(conv.grad_mult)) < 16 * 512  # the cache is not pickled
    assert 0 < max(sizes) <= 8e6


class TestMultiplierStaysAttached:
    def test_through_conversions(self):
        model = net()
        mult = get_grad_mult(model[1].weight)
        for convert in (
                nn.Module.half, nn.Module.float, nn.Module.double,
                lambda m: m.to(memory_format=torch.channels_last), lambda m: m.requires_grad_(True),
                lambda m: m.load_state_dict(net(attach=False).state_dict()) and m,
        ):
            convert(model)
            assert get_grad_mult(model[1].weight) is mult

    def test_vectors_are_compact(self):
        """O(channels), made once for each device and dtype."""
        mult = GradMult(csla(64), scales(64))
        vectors = mult.vectors('squared', torch.device('cpu'), torch.float32)
        assert sum(v.numel() for _, v, _ in vectors) == 3 * 64
        assert mult.vectors('squared', torch.device('cpu'), torch.float32) is vectors
