"""The Triton kernels of the optimizers: their arithmetic in Triton's interpreter, and that a GPU can have them."""
import copy
import re
import sys
import warnings

import pytest
import torch

import timm_rep.optim
import timm_rep.optim._base as rep_optimizer
import timm_rep.optim._tables as tables
import timm_rep.optim._triton as fused
from tests.optim.test_rep_optim import PAIRS, reference_sgd
from tests.reference.ffn import relative
from timm_rep.optim import BranchScale, GradMult, RepAdamW, RepSGD, get_grad_mult, set_grad_mult

pytest.importorskip('triton', minversion='3.2', reason='no Triton here that the kernels are for')

FULL, POINT, DIAGONAL = ((3, 3), False), ((1, 1), False), ((1, 1), True)
# shape of a kernel, its branches, the first row of a shard
KERNELS = {
    'RepOpt-VGG': ((16, 16, 3, 3), (FULL, POINT, DIAGONAL), 0),
    'other width': ((24, 7, 3, 3), (FULL, POINT), 0),
    'several blocks': ((40, 33, 3, 3), (FULL, DIAGONAL), 0),
    'depthwise': ((13, 1, 5, 5), (((5, 5), False), FULL, DIAGONAL), 0),
    'grouped': ((12, 4, 3, 3), (FULL, DIAGONAL), 0),
    'only a part': ((8, 8, 3, 3), (((1, 3), False), DIAGONAL), 0),
    'point': ((9, 5, 1, 1), (POINT, DIAGONAL), 0),
    'shard': ((5, 16, 3, 3), (FULL, DIAGONAL), 11),
}
SGD_ARGS = [
    dict(),
    dict(momentum=.9, nesterov=True, weight_decay=.1),
    dict(momentum=.5, dampening=.2, maximize=True),
    dict(momentum=.9, fused=True),
]
ADAMW_ARGS = [dict(), dict(weight_decay=.3, amsgrad=True), dict(maximize=True), dict(fused=True)]


@pytest.fixture
def kernels(monkeypatch):
    """The kernels, imported anew as the environment says."""

    def forget():
        sys.modules.pop('timm_rep.optim._triton_kernels', None)
        vars(timm_rep.optim).pop('_triton_kernels', None)

    forget()
    yield monkeypatch
    forget()


@pytest.fixture
def interpreted(kernels):
    kernels.setenv('TRITON_INTERPRET', '1')


def make(dtype=torch.float32, channels_last=False, names=tuple(KERNELS)):
    """Kernels with GradMults, zero, negative and huge scales among them."""
    torch.manual_seed(0)
    params = []
    for name in names:
        shape, branches, row_offset = KERNELS[name]
        scales = torch.randn(len(branches), shape[0])
        scales[:, 0], scales[:, 1], scales[0, 2] = 0., -2., 50.
        terms = [BranchScale(size, scale, diagonal) for (size, diagonal), scale in zip(branches, scales)]
        param = torch.nn.Parameter(torch.randn(shape).to(dtype, memory_format=(
            torch.channels_last if channels_last else torch.contiguous_format)))
        set_grad_mult(param, GradMult(shape, terms, row_offset))
        params.append(param)
    return params


def fill(params, step, scale=1.):
    for i, param in enumerate(params):
        gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + i))
        param.grad = (scale * gradient).to(param.device, param.dtype)


def double(x):
    return x.detach().double().contiguous()


@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('kwargs', SGD_ARGS, ids=str)
def test_sgd(interpreted, kwargs, channels_last):
    params = make(channels_last=channels_last)
    mults = [get_grad_mult(p).dense('squared', torch.float64) for p in params]
    expected, buffers = [double(p) for p in params], [None] * len(params)
    optimizer = RepSGD(params, lr=.01, **kwargs)
    for step in range(3):
        fill(params, step)
        grads = [p.grad.clone() for p in params]
        reference_sgd(expected, [double(g) for g in grads], buffers, mults, lr=.01, **kwargs)
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads))
    for param, reference in zip(params, expected):
        assert relative(double(param), reference) < 1e-6
    if kwargs.get('momentum'):
        for param, buffer in zip(params, buffers):
            assert relative(double(optimizer.state[param]['momentum_buffer']), buffer) < 1e-6
    assert optimizer._launches.tables  # it was a kernel


@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_backward_after_a_step(interpreted, rep):
    """Of a forward pass before it: refused, as after a step of torch's."""
    param, = params = make(names=list(KERNELS)[:1])
    optimizer = rep(params, lr=.01)
    loss = param.square().sum()
    fill(params, 0)
    optimizer.step()
    assert optimizer._launches.tables
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('kwargs', ADAMW_ARGS, ids=str)
def test_adamw(interpreted, kwargs, channels_last):
    """What torch's AdamW moves a parameter by, less its decay, times the multiplier."""
    params = make(channels_last=channels_last)
    mults = [get_grad_mult(p).dense('absolute', torch.float64) for p in params]
    lr, decay = .01, kwargs.get('weight_decay', .01)
    bare = [torch.nn.Parameter(torch.zeros(p.shape, dtype=torch.float64)) for p in params]
    reference = torch.optim.AdamW(bare, lr=lr, **{**kwargs, 'weight_decay': 0.})
    optimizer = RepAdamW(params, lr=lr, **kwargs)
    expected = [double(p) for p in params]
    for step in range(3):
        fill(params, step)
        for b, p in zip(bare, params):
            b.data.zero_()
            b.grad = double(p.grad)
        reference.step()
        optimizer.step()
        expected = [e * (1 - lr * decay) + m * b.detach() for e, b, m in zip(expected, bare, mults)]
    for param, e, b in zip(params, expected, bare):
        assert relative(double(param), e) < 1e-5
        state, of_torch = optimizer.state[param], reference.state[b]
        assert state.keys() == of_torch.keys()
        for name, x in of_torch.items():
            assert relative(double(state[name]), x.double()) < 1e-6
    assert optimizer._launches.tables


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_low_precision(interpreted, rep, dtype):
    """One rounding of each entry, of what float64 says; in bfloat16 the interpreter cuts where a GPU rounds."""
    params = make(dtype, names=('RepOpt-VGG', 'several blocks'))
    fill(params, 0)
    rule, power = ('squared', 1.) if rep is RepSGD else ('absolute', 0.)
    kwargs = dict(lr=.01, weight_decay=.1, **({} if rep is RepAdamW else dict(momentum=.9)))
    expected = []
    for p in params:
        mult, g = get_grad_mult(p).dense(rule, torch.float64), double(p.grad)
        if power:
            expected.append(double(p) - .01 * (mult * g + .1 * double(p)))
        else:
            expected.append(double(p) * (1 - .001) - .01 * mult * g / (g.abs() + 1e-8))
    rep(params, **kwargs).step()
    for p, e in zip(params, expected):
        rounding = torch.finfo(dtype).eps * e.abs() / (1 if dtype == torch.bfloat16 else 2)
        assert ((double(p) - e).abs() <= 1.01 * rounding + 1e-7).all()


@pytest.mark.parametrize('rep,plain', PAIRS)
def test_as_without_kernels(interpreted, monkeypatch, rep, plain):
    """A step of the one continues a step of the other, on parameters with and without a multiplier."""
    kwargs = dict(lr=.05, momentum=.9, nesterov=True) if rep is RepSGD else dict(lr=.05)
    sides = []
    for where in ('kernels', 'both'):
        params = [*make(), torch.nn.Parameter(torch.ones(4))]
        optimizer = rep(params, **kwargs)
        for step in range(4):
            monkeypatch.setenv('TRITON_INTERPRET', '1' if where == 'kernels' or step % 2 else '0')
            fill(params, step)
            optimizer.step()
        sides.append([double(p) for p in params])
    for a, b in zip(*sides):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize('devices', [1., 2.])
@pytest.mark.parametrize('where', ['kernels', 'parts'])
@pytest.mark.parametrize('rep,plain', PAIRS)
def test_of_grad_scaler(interpreted, monkeypatch, rep, plain, where, devices):
    """Gradients that are still multiplied, and a step that is to be skipped, the first one too."""
    monkeypatch.setenv('TRITON_INTERPRET', '1' if where == 'kernels' else '0')
    kwargs = dict(lr=.01, fused=True, **(dict(momentum=.9, nesterov=True) if rep is RepSGD else dict(amsgrad=True)))
    expected, params = [*make(), torch.nn.Parameter(torch.ones(4))], [*make(), torch.nn.Parameter(torch.ones(4))]
    alone, scaled = rep(expected, **kwargs), rep(params, **kwargs)
    before = [p.detach().clone() for p in params]
    scaled.grad_scale, scaled.found_inf = torch.tensor(8.), torch.tensor(devices)  # where gradients overflowed
    fill(params, 0, scale=float('inf'))
    scaled.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before))
    assert all(x.isfinite().all() for state in scaled.state.values() for x in state.values())
    scaled.found_inf = torch.tensor(0.)
    for step in (1, 2):
        fill(expected, step)
        alone.step()
        fill(params, step, scale=8.)
        scaled.step()
    for a, b in zip(params, expected):
        assert relative(double(a), double(b)) < 1e-6


@pytest.mark.parametrize('interpret', ['0', '1'])
def test_first_momentum_is_not_dampened(interpreted, monkeypatch, interpret):
    """GradScaler or not, as torch has it."""
    monkeypatch.setenv('TRITON_INTERPRET', interpret)
    params = [*make(), torch.nn.Parameter(torch.ones(4))]
    optimizer = RepSGD(params, lr=.01, momentum=.9, dampening=.5, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.), torch.tensor(0.)
    fill(params, 0, scale=2.)
    grads = [p.grad / 2 for p in params]
    optimizer.step()
    for param, grad in zip(params, grads):
        mult = get_grad_mult(param).dense('squared') if get_grad_mult(param) else 1.
        assert relative(optimizer.state[param]['momentum_buffer'], grad * mult) < 1e-6


@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_learning_rate_in_a_tensor(interpreted, rep):
    sides = make(), make()
    for params, lr in zip(sides, (.03, torch.tensor(.03))):
        fill(params, 0)
        rep(params, lr=lr, fused=True).step()
    assert all(torch.equal(a, b) for a, b in zip(*sides))


@pytest.mark.parametrize('rep,kwargs', [
    (RepSGD, dict(momentum=.9, nesterov=True, weight_decay=torch.tensor(.1))),
    (RepAdamW, dict(weight_decay=torch.tensor(.1))),
], ids=['RepSGD', 'RepAdamW'])
def test_other_numbers_in_tensors(interpreted, rep, kwargs):
    """They get no kernel, which would take them for addresses; nor where a schedule makes them tensors later."""
    sides, plain = (make(), make(), make()), {**kwargs, 'weight_decay': .1}
    optimizers = rep(sides[0], lr=.03, **plain), rep(sides[1], lr=.03, **kwargs), rep(sides[2], lr=.03, **plain)
    for step in range(3):
        for params, optimizer in zip(sides, optimizers):
            fill(params, step)
            optimizer.step()
        optimizers[2].param_groups[0]['weight_decay'] = torch.tensor(.1)
    assert not optimizers[1]._launches.tables
    for expected, *others in zip(*sides):
        assert all(relative(double(other), double(expected)) < 1e-5 for other in others)


@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_default_device(interpreted, rep):
    """What is made on the way to a GPU is made on the CPU, whatever the default is."""
    sides = make(), make()
    for params, device in zip(sides, ('cpu', 'meta')):
        optimizer = rep(params, lr=.03)
        fill(params, 0)
        with torch.device(device):
            optimizer.step()
        assert optimizer._launches.tables
    assert all(torch.equal(a, b) for a, b in zip(*sides))


@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_ready_for_a_graph(interpreted, rep):
    """A graph is captured of torch's parts, which then need what nothing can be copied to the GPU for any more."""
    params = make(torch.bfloat16)
    optimizer = rep(params, lr=.03)
    fill(params, 0)
    optimizer.step()
    assert optimizer._launches.tables
    for param in params:
        grad_mult = get_grad_mult(param)
        known = dict(grad_mult._vectors)
        grad_mult.vectors(rep._rule, param.device, param.dtype)
        assert grad_mult._vectors == known


def test_layouts_may_differ(interpreted):
    """A gradient, a parameter or a state in another layout than the others."""
    expected, params = make(), make()
    sides = RepSGD(expected, lr=.01, momentum=.9), RepSGD(params, lr=.01, momentum=.9)
    for step, change in enumerate(('gradient', 'state', 'parameter', '')):
        fill(expected, step)
        fill(params, step)
        for p in params:
            if change == 'gradient':
                p.grad = p.grad.to(memory_format=torch.channels_last)
            elif change == 'parameter':
                p.data = p.data.to(memory_format=torch.channels_last)
            elif change == 'state':
                buffer = sides[1].state[p]['momentum_buffer']
                sides[1].state[p]['momentum_buffer'] = buffer.to(memory_format=torch.channels_last)
        for optimizer in sides:
            optimizer.step()
        for a, b in zip(params, expected):
            assert relative(double(a), double(b)) < 1e-6


def _other_grad_mult(optimizer, params):
    param = params[0]
    set_grad_mult(param, GradMult(param.shape, [BranchScale(tuple(param.shape[2:]), torch.full(param.shape[:1], 3.))]))


CHANGES = {
    'none yet': lambda optimizer, params: None,
    'no state': lambda optimizer, params: optimizer.state.clear(),
    'first momentum known': lambda optimizer, params: None,
    'none': lambda optimizer, params: None,
    'another GradMult': _other_grad_mult,
    'no momentum': lambda optimizer, params: optimizer.param_groups[0].update(momentum=0., betas=(0., .9)),
    'new momentum': lambda optimizer, params: (
        optimizer.state.clear(), optimizer.param_groups[0].update(momentum=.5, betas=(.5, .9))),
    'no gradient': lambda optimizer, params: setattr(params[1], 'grad', None),
    'a checkpoint': lambda optimizer, params: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    'state in another layout': lambda optimizer, params: [
        setattr(x, 'data', x.data.to(memory_format=torch.channels_last))
        for state in optimizer.state.values() for x in state.values() if x.ndim],
    'weights elsewhere': lambda optimizer, params: setattr(params[0], 'data', 2 * params[0].data),
    'state elsewhere': lambda optimizer, params: [
        setattr(x, 'data', 2 * x.data) for state in optimizer.state.values() for x in state.values() if x.ndim],
    'not fused': lambda optimizer, params: optimizer.param_groups[0].update(fused=False),
    'fused': lambda optimizer, params: optimizer.param_groups[0].update(fused=None),
    'another group': lambda optimizer, params: optimizer.add_param_group(dict(params=make(names=('RepOpt-VGG',)))),
    'no GradMult': lambda optimizer, params: delattr(params[0], 'grad_mult'),
}


@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_what_changes_between_steps(interpreted, monkeypatch, rep):
    """With a plan of the step before as without kernels at all; who gets one is asked again if something changes."""
    asked = []
    runs_kernels = rep_optimizer.runs_kernels
    monkeypatch.setattr(rep_optimizer, 'runs_kernels', lambda *args: asked.append(args) or runs_kernels(*args))
    sides = make(), make()
    optimizers = [rep(params, lr=.01, **(dict(momentum=.9) if rep is RepSGD else {})) for params in sides]
    for step, (name, change) in enumerate(CHANGES.items()):
        before = len(asked)
        for params, optimizer, interpret in zip(sides, optimizers, '10'):
            fill(params, step)
            change(optimizer, params)
            for group in optimizer.param_groups[1:]:
                fill(group['params'], step)
            monkeypatch.setenv('TRITON_INTERPRET', interpret)
            optimizer.step()
        for groups in zip(*(optimizer.param_groups for optimizer in optimizers)):
            for a, b in zip(*(group['params'] for group in groups)):
                assert relative(double(a), double(b)) < 1e-5, name
        stays = {'none', 'weights elsewhere', 'state elsewhere'}
        if rep is RepAdamW:  # has no kernel of its own for a first step, nor for one without momentum
            stays |= {'first momentum known', 'no momentum'}
        assert (len(asked) == before) == (name in stays), name


def test_who_gets_a_kernel(interpreted, monkeypatch):
    param = make(names=('RepOpt-VGG',))[0]
    group = dict(fused=None, foreach=None)

    def of(x, *states, grad=None, **flags):
        grad = torch.zeros_like(x) if grad is None else grad
        return fused.runs_kernels(x.detach(), grad, states, {**group, **flags})

    assert of(param)
    assert not of(param.double())
    assert not of(param.permute(1, 2, 0, 3))  # neither contiguous nor channels-last
    assert not of(torch.empty(4, 8, 3, 3)[:, ::2])  # with gaps
    assert not of(torch.empty(0, 8, 3, 3))
    assert not of(param, fused=False)
    assert not of(param, foreach=True)
    assert not of(param, grad=param.bfloat16())
    assert of(param, param.detach(), param.detach())
    for other in (param.bfloat16(), param[:4], param.detach().to('meta')):
        assert not of(param, param.detach(), other)
    assert fused.kernels_run_on() == 'cpu'
    monkeypatch.delenv('TRITON_INTERPRET')
    assert fused.kernels_run_on() == ('cuda' if torch.cuda.is_available() else '')


def test_state_of_another_dtype(interpreted):
    """As without kernels, which a table of addresses would not be."""
    sides = []
    for interpret in ('1', '0'):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv('TRITON_INTERPRET', interpret)
            params = make(names=('RepOpt-VGG',))
            optimizer = RepSGD(params, lr=.01, momentum=.9)
            for dtype in (torch.float32, torch.bfloat16):
                params[0].data = params[0].data.to(dtype)
                fill(params, 0)
                optimizer.step()
            sides.append(double(params[0]))
    assert torch.equal(*sides)


@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_a_compiled_step(interpreted, rep):
    """Without kernels: who compiles a step sees nothing of what one writes."""
    sides = make(names=('RepOpt-VGG',)), make(names=('RepOpt-VGG',))
    for params, compiled in zip(sides, (False, True)):
        optimizer = rep(params, lr=.01)
        step = torch.compile(optimizer.step, backend='eager') if compiled else optimizer.step
        for i in range(2):
            fill(params, i)
            step()
        assert bool(optimizer._launches.tables) != compiled
    assert relative(double(sides[0][0]), double(sides[1][0])) < 1e-6


def test_a_failed_launch(interpreted, monkeypatch):
    """Momentum that was never written is not taken for known, nor a table that was never made."""
    params = make()
    optimizer = RepSGD(params, lr=.01, momentum=.9)
    fill(params, 0)
    monkeypatch.setattr(tables, '_to_device', lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    monkeypatch.undo()
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    held = [p.data for p in params]
    for param in params:
        param.data = param.data.clone()
    optimizer.step()
    for param in params:
        mult = get_grad_mult(param).dense('squared')
        assert relative(optimizer.state[param]['momentum_buffer'], param.grad * mult) < 1e-6
    for _ in range(tables._KEPT):
        optimizer.step()
    assert len(optimizer._launches.tables) == 2 < len(held)


def test_where_triton_does_not_work(monkeypatch):
    """One warning, and the step is taken without it."""
    def fail(*args, **kwargs):
        raise RuntimeError('Failed to find C compiler')

    monkeypatch.setattr(fused.Launches, '__call__', fail)
    fused._works_on.cache_clear()
    with pytest.warns(UserWarning, match=r'cannot run a kernel on cpu.*Failed to find C compiler'):
        assert not fused._works_on(torch.device('cpu'))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not fused._works_on(torch.device('cpu'))
    fused._works_on.cache_clear()


def test_tables_are_kept_while_addresses_stay(interpreted, monkeypatch):
    made = []
    to_device = tables._to_device
    monkeypatch.setattr(tables, '_to_device', lambda *args: made.append(args) or to_device(*args))
    params = make()
    optimizer = RepSGD(params, lr=.01, momentum=.9)
    fill(params, 0)
    for expected in (2, 4, 4, 4):  # sizes of two kinds; with new states, then with known ones
        optimizer.step()
        assert len(made) == expected
    other = RepSGD([dict(params=[p]) for p in make(names=('RepOpt-VGG', 'RepOpt-VGG'))], lr=.01)
    group = [p for g in other.param_groups for p in g['params']]
    fill(group, 0)
    for expected in (6, 6):  # groups with parameters of the same size
        other.step()
        assert len(made) == expected
    held = [p.grad for p in params]  # so that no memory is used again
    fill(params, 1)
    optimizer.step()
    assert len(made) == 8
    assert len(held) == len(params)


def test_tables_that_are_not_needed_are_forgotten(interpreted):
    """Parameters that move about, or change places in having a gradient, do not fill the memory."""
    params = make(names=('RepOpt-VGG', 'several blocks'))
    optimizer = RepSGD(params, lr=.01)
    held = []
    for step in range(30):
        fill(params, step)
        for p in params:
            held.append(p.data)
            p.data = p.data.clone()
        optimizer.step()
    assert len(optimizer._launches.tables) <= 2 * 9  # two launches a step
    tables_of_one = []
    for step in range(30):
        fill(params, step)
        params[step % 2].grad = None
        optimizer.step()
        tables_of_one.append(len(optimizer._launches.tables))
    assert tables_of_one[-1] == 2


@pytest.mark.parametrize('divisor', [1, 2, 3, 7, 9, 25, 64, 576, 4608, 18432, 2 ** 20 - 1, 2 ** 24 - 1, 2 ** 30 + 1])
def test_reciprocal(divisor):
    magic, shift = tables.reciprocal(divisor)
    assert 0 < magic < 2 ** 32
    generator = torch.Generator().manual_seed(divisor)
    numbers = torch.randint(0, 2 ** 31, (5000,), generator=generator).tolist()
    multiples = [k * divisor + d for k in numbers[:2000] for d in (-1, 0, 1)]
    for x in [0, 1, 2 ** 31 - 1, *numbers, *multiples]:
        if 0 <= x < 2 ** 31:
            assert x * magic >> shift == x // divisor


@pytest.mark.parametrize('name', list(KERNELS))
@pytest.mark.parametrize('rule', ['squared', 'absolute'])
def test_multipliers(name, rule):
    """Entry by entry against the dense multiplier, in either memory order."""
    param = make(names=(name,))[0]
    grad_mult, (out_channels, in_channels, *window) = get_grad_mult(param), param.shape
    dense = grad_mult.dense(rule)
    positions = window[0] * window[1]
    for channels_last in (False, True):
        table = tables.multipliers(grad_mult, rule, channels_last)
        rows = dense.permute(0, 2, 3, 1) if channels_last else dense
        for c, row in enumerate(rows.reshape(out_channels, -1)):
            for i, expected in enumerate(row.tolist()):
                value = table[c, i // in_channels if channels_last else i % positions]
                value = value + (table[c, -2] if table[c, -1] == i else 0)
                assert abs(value.item() - expected) <= 1e-6 * max(1., abs(expected))


def compiled(kernel, **changes):
    """The instructions of a kernel for a GPU that need not be here; of other arguments than these with changes."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import timm_rep.optim._triton_kernels as module

    numbers = {
        'sgd_kernel': ('lr', 'momentum', 'new_weight', 'weight_decay'),
        'adamw_kernel': ('lr', 'new_weight1', 'beta2', 'new_weight2', 'eps', 'weight_decay'),
    }[kernel]
    constants = dict(
        grad_scale=None, found_inf=None, dtype='float32', aligned=True, lr_is_tensor=False, maximize=False,
        **(dict(has_momentum=True, nesterov=True) if kernel == 'sgd_kernel' else dict(amsgrad=False)))
    pointers = dict(tensors='*i64', blocks='*i32', **({} if kernel == 'sgd_kernel' else dict(corrections='*fp32')))
    for name, value in changes.items():
        if value == '*fp32':
            constants.pop(name, None)
            pointers[name] = value
        else:
            constants[name] = value
    constants['dtype'] = getattr(tl, constants['dtype'])
    signature = {**dict.fromkeys(numbers, 'fp32'), **pointers, **dict.fromkeys(constants, 'constexpr')}
    source = ASTSource(fn=getattr(module, kernel), signature=signature, constexprs=constants)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return triton.compile(source, target=GPUTarget('cuda', 90, 32)).asm['ptx']


@pytest.fixture
def compiler(kernels, tmp_path):
    pytest.importorskip('triton', minversion='3.4', reason='its interpreter leaves the language changed')
    kernels.setenv('TRITON_CACHE_DIR', str(tmp_path))


@pytest.mark.parametrize('dtype,words', [('float32', 4), ('bfloat16', 2)])
@pytest.mark.parametrize('kernel,read,written', [('sgd_kernel', 3, 2), ('adamw_kernel', 4, 3)])
def test_one_pass_on_a_gpu(compiler, kernel, read, written, dtype, words):
    """Parameter, gradient and state are read once and written once, 16 bytes at a time."""
    instructions = compiled(kernel, dtype=dtype)
    assert len(re.findall(r'ld\.global\S*\.v4\.b32', instructions)) == read * words * tables.BLOCK // 2048
    assert len(re.findall(r'st\.global\S*\.v4\.b32', instructions)) == written * words * tables.BLOCK // 2048


@pytest.mark.parametrize('kernel,changes', [
    ('sgd_kernel', dict(aligned=False, maximize=True)),
    ('sgd_kernel', dict(has_momentum=False, nesterov=False, dtype='float16')),
    ('sgd_kernel', dict(grad_scale='*fp32', found_inf='*fp32', lr='*fp32', lr_is_tensor=True)),
    ('adamw_kernel', dict(aligned=False, maximize=True, amsgrad=True)),
    ('adamw_kernel', dict(grad_scale='*fp32', found_inf='*fp32', lr='*fp32', lr_is_tensor=True, dtype='float16')),
], ids=str)
def test_compiles_for_a_gpu(compiler, kernel, changes):
    assert '.entry' in compiled(kernel, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_captured_in_a_graph(rep):
    """After steps with a kernel, as torch says to warm up."""
    kwargs = dict(lr=.01, momentum=.9, nesterov=True) if rep is RepSGD else dict(lr=.01, capturable=True)
    sides, optimizers = [], []
    for _ in range(2):
        cpu = make()
        params = [torch.nn.Parameter(p.detach().cuda()) for p in cpu]
        for param, of in zip(params, cpu):
            set_grad_mult(param, get_grad_mult(of))
        sides.append(params)
        optimizers.append(rep(params, **kwargs))
        fill(params, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizers[0].step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for _ in range(2):
        graph.replay()
    for _ in range(5):  # capturing is no step
        optimizers[1].step()
    torch.cuda.synchronize()
    for a, b in zip(*sides):
        assert relative(double(a), double(b)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_on_a_gpu(rep, dtype, channels_last):
    """As on a CPU in float64."""
    kwargs = dict(lr=.01, momentum=.9, nesterov=True, weight_decay=.1) if rep is RepSGD else dict(lr=.01)
    params, expected = make(dtype, channels_last), make(dtype, channels_last)
    mults = [get_grad_mult(p) for p in params]
    params = [torch.nn.Parameter(p.detach().cuda()) for p in params]
    expected = [torch.nn.Parameter(double(p)) for p in expected]
    for group in (params, expected):
        for p, mult in zip(group, mults):
            set_grad_mult(p, mult)
    sides = rep(params, **kwargs), rep(expected, **kwargs)
    for step in range(3):
        fill(params, step)
        for p, e in zip(params, expected):
            e.grad = double(p.grad.cpu())
        for optimizer in sides:
            optimizer.step()
    for p, e in zip(params, expected):
        assert relative(double(p.cpu()), e.detach()) < (1e-5 if dtype == torch.float32 else 3e-2)
    assert sides[0]._launches.tables
