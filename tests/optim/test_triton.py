"""The Triton kernels of the optimizers: their results in Triton's interpreter, and their compilation for a GPU."""
import copy
import re
import sys
import warnings

import pytest
import torch
from torch.torch_version import TorchVersion

import timm_rep.optim
import timm_rep.optim._triton as triton_launch
from tests.helpers import relative
from tests.reference.rep_optim import sgd
from timm_rep.optim import BranchScale, GradMult, RepAdamW, RepSGD, get_grad_mult, rep_adamw, rep_sgd, set_grad_mult

pytest.importorskip('triton', minversion='3.2', reason='the kernels need Triton 3.2 or newer')

FULL, POINT, DIAGONAL = ((3, 3), False), ((1, 1), False), ((1, 1), True)
# shape of a kernel, its branches, index of the first row of a shard
KERNELS = {
    'RepOpt-VGG': ((8, 8, 3, 3), (FULL, POINT, DIAGONAL), 0),
    'several tiles': ((9, 57, 3, 3), (FULL, DIAGONAL), 0),
    'several columns': ((2, 230, 3, 3), (FULL, POINT), 0),
    'depthwise': ((13, 1, 5, 5), (((5, 5), False), FULL, DIAGONAL), 0),
    'grouped': ((12, 4, 3, 3), (FULL, DIAGONAL), 0),
    'only a part': ((8, 8, 3, 3), (((1, 3), False), DIAGONAL), 0),
    'point': ((9, 5, 1, 1), (POINT, DIAGONAL), 0),
    'shard': ((5, 16, 3, 3), (FULL, DIAGONAL), 11),
}
ALL, SMALL = tuple(KERNELS), ('grouped',)
REPS = [RepSGD, RepAdamW]


@pytest.fixture
def kernels(monkeypatch):
    """Triton decides on the interpreter at import: the kernels are imported anew after the environment has changed."""

    def forget():
        sys.modules.pop('timm_rep.optim._triton_kernels', None)
        vars(timm_rep.optim).pop('_triton_kernels', None)

    forget()
    yield monkeypatch
    forget()


@pytest.fixture
def interpreted(kernels):
    kernels.setenv('TRITON_INTERPRET', '1')


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that were launched."""
    names, launch = [], triton_launch.launch

    def record(name, *args, **kwargs):
        names.append(name)
        launch(name, *args, **kwargs)

    for module in (rep_sgd, rep_adamw):
        monkeypatch.setattr(module, 'launch', record)
    return names


def make(names=SMALL, dtype=torch.float32, channels_last=False, device='cpu'):
    """Kernels with GradMults, zero, negative and huge scales among them."""
    torch.manual_seed(0)
    params = []
    for name in names:
        shape, branches, row_offset = KERNELS[name]
        scales = torch.randn(len(branches), shape[0])
        scales[:, 0], scales[:, 1], scales[0, -1] = 0., -2., 50.
        terms = [BranchScale(size, scale, diagonal) for (size, diagonal), scale in zip(branches, scales)]
        param = torch.nn.Parameter(torch.randn(shape).to(device, dtype, memory_format=(
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


@pytest.mark.parametrize('names,channels_last,kwargs', [
    (ALL, False, dict(momentum=.9, nesterov=True, weight_decay=.1)),
    (ALL, True, dict(momentum=.5, dampening=.2, maximize=True)),
    (SMALL, False, dict()),
], ids=str)
def test_sgd(interpreted, launches, names, channels_last, kwargs):
    params = make(names, channels_last=channels_last)
    mults = [get_grad_mult(p).dense('squared', torch.float64) for p in params]
    expected, buffers = [double(p) for p in params], [None] * len(params)
    optimizer = RepSGD(params, lr=.01, fused=True, **kwargs)
    for step in range(2):
        fill(params, step)
        grads = [p.grad.clone() for p in params]
        sgd(expected, [double(g) for g in grads], buffers, mults, lr=.01, **kwargs)
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads))
    for name, param, reference, buffer in zip(names, params, expected, buffers):
        assert relative(double(param), reference) < 1e-6, name
        if kwargs:
            assert relative(double(optimizer.state[param]['momentum_buffer']), buffer) < 1e-6, name
    assert launches == ['sgd_kernel'] * 2 * len(params)


@pytest.mark.parametrize('names,channels_last,kwargs', [
    (ALL, False, dict(weight_decay=.3, amsgrad=True)),
    (ALL, True, dict(maximize=True)),
], ids=str)
def test_adamw(interpreted, launches, names, channels_last, kwargs):
    """The update is that of torch's AdamW without weight decay, times the multiplier."""
    params = make(names, channels_last=channels_last)
    mults = [get_grad_mult(p).dense('absolute', torch.float64) for p in params]
    lr, decay = .01, kwargs.get('weight_decay', .01)
    bare = [torch.nn.Parameter(torch.zeros(p.shape, dtype=torch.float64)) for p in params]
    reference = torch.optim.AdamW(bare, lr=lr, **{**kwargs, 'weight_decay': 0.})
    optimizer = RepAdamW(params, lr=lr, fused=True, **kwargs)
    expected = [double(p) for p in params]
    for step in range(2):
        fill(params, step)
        for b, p in zip(bare, params):
            b.data.zero_()
            b.grad = double(p.grad)
        reference.step()
        optimizer.step()
        expected = [e * (1 - lr * decay) + m * b.detach() for e, b, m in zip(expected, bare, mults)]
    for param, e, b in zip(params, expected, bare):
        assert relative(double(param), e) < 1e-5
        found = optimizer.state[param]
        assert found.keys() == reference.state[b].keys()
        for name, x in reference.state[b].items():
            assert relative(double(found[name]), x.double()) < 1e-6
    assert launches == ['adamw_kernel'] * 2 * len(params)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('rep', REPS)
def test_low_precision(interpreted, launches, rep, dtype):
    """Each entry is rounded once from float32; in bfloat16 the interpreter truncates where a GPU rounds."""
    param, = params = make(dtype=dtype)
    fill(params, 0)
    g = double(param.grad)
    if rep is RepSGD:
        update = get_grad_mult(param).dense('squared', torch.float64) * g + .1 * double(param)
    else:
        update = get_grad_mult(param).dense('absolute', torch.float64) * g / (g.abs() + 1e-8) + .1 * double(param)
    expected = double(param) - .01 * update
    rep(params, lr=.01, weight_decay=.1, fused=True, **(dict(momentum=.9) if rep is RepSGD else {})).step()
    rounding = torch.finfo(dtype).eps * expected.abs() / (1 if dtype == torch.bfloat16 else 2)
    assert ((double(param) - expected).abs() <= 1.01 * rounding + 1e-7).all()
    assert len(launches) == 1


@pytest.mark.parametrize('rep', REPS)
def test_backward_after_a_step(interpreted, launches, rep):
    """A backward pass through a parameter that a kernel has updated is refused, as after a step of torch's."""
    param, = params = make()
    optimizer = rep(params, lr=.01, fused=True)
    loss = param.square().sum()
    fill(params, 0)
    optimizer.step()
    assert launches
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


@pytest.mark.parametrize('devices', [1., 2.])
@pytest.mark.parametrize('interpret', ['1', '0'])
@pytest.mark.parametrize('rep', REPS)
def test_grad_scaler(kernels, launches, rep, interpret, devices):
    """Scaled gradients, and a step that is skipped, the first one included."""
    kernels.setenv('TRITON_INTERPRET', interpret)
    kwargs = dict(lr=.01, fused=True, **(dict(momentum=.9, nesterov=True) if rep is RepSGD else dict(amsgrad=True)))
    expected, params = [*make(), torch.nn.Parameter(torch.ones(4))], [*make(), torch.nn.Parameter(torch.ones(4))]
    alone, scaled = rep(expected, **kwargs), rep(params, **kwargs)
    before = [p.detach().clone() for p in params]
    # where gradients overflowed; summed over devices
    scaled.grad_scale, scaled.found_inf = torch.tensor(8.), torch.tensor(devices)
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
    assert bool(launches) == (interpret == '1')


@pytest.mark.parametrize('interpret', ['0', '1'])
def test_first_momentum_is_not_dampened(kernels, interpret):
    """With GradScaler as without, as by torch."""
    kernels.setenv('TRITON_INTERPRET', interpret)
    params = [*make(), torch.nn.Parameter(torch.ones(4))]
    optimizer = RepSGD(params, lr=.01, momentum=.9, dampening=.5, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.), torch.tensor(0.)
    fill(params, 0, scale=2.)
    grads = [p.grad / 2 for p in params]
    optimizer.step()
    for param, grad in zip(params, grads):
        mult = get_grad_mult(param).dense('squared') if get_grad_mult(param) else 1.
        assert relative(optimizer.state[param]['momentum_buffer'], grad * mult) < 1e-6


@pytest.mark.parametrize('rep,name,value', [
    *((rep, name, torch.tensor(.1)) for rep in REPS for name in ('lr', 'weight_decay')),
    pytest.param(RepAdamW, 'betas', (torch.tensor(.5), torch.tensor(.7)), marks=pytest.mark.skipif(
        TorchVersion(torch.__version__) < (2, 7), reason='torch takes no tensors as betas')),
], ids=str)
@pytest.mark.parametrize('fused', [True, None])
def test_hyper_parameters_in_tensors(interpreted, launches, rep, name, value, fused):
    """They have the same result as numbers, also where a schedule makes them tensors later; the kernels take none."""
    sides = make(), make()
    optimizers = [rep(params, fused=fused, **{'lr': .03, 'weight_decay': .2}) for params in sides]
    for step in range(3):
        for params, optimizer in zip(sides, optimizers):
            fill(params, step)
            optimizer.step()
        numbers = tuple(x.item() for x in value) if name == 'betas' else value.item()
        for optimizer, new in zip(optimizers, (value, numbers)):
            optimizer.param_groups[0][name] = new
    assert relative(double(sides[0][0]), double(sides[1][0])) < 1e-5
    assert len(launches) == (4 if fused else 0)


@pytest.mark.parametrize('rep', REPS)
def test_default_device(interpreted, launches, rep):
    """The step does not depend on torch's default device, and makes nothing for a GPU twice: a graph cannot copy it."""
    sides = make(), make()
    for params, device in zip(sides, ('cpu', 'meta')):
        optimizer = rep(params, lr=.03, fused=True)
        fill(params, 0)
        with torch.device(device):
            optimizer.step()
    assert len(launches) == 2
    assert torch.equal(sides[0][0], sides[1][0])
    cached = set(get_grad_mult(params[0])._cache)
    optimizer.step()
    assert set(get_grad_mult(params[0])._cache) == cached


def _other_grad_mult(optimizer, params):
    param = params[0]
    set_grad_mult(param, GradMult(param.shape, [BranchScale(tuple(param.shape[2:]), torch.full(param.shape[:1], 3.))]))


def _set(**kwargs):
    return lambda optimizer, params: optimizer.param_groups[0].update(kwargs)


def _convert_state(convert):
    return lambda optimizer, params: [
        setattr(x, 'data', convert(x.data))
        for state in optimizer.state.values() for x in state.values() if x.ndim == 4]


def _channels_last(x):
    return x.to(memory_format=torch.channels_last)


CHANGES = {
    'nothing': lambda optimizer, params: None,
    'no state': lambda optimizer, params: optimizer.state.clear(),
    'GradMult': _other_grad_mult,
    'strides of a gradient': lambda optimizer, params: setattr(params[0], 'grad', _channels_last(params[0].grad)),
    'strides of the state': _convert_state(_channels_last),
    'strides of a parameter': lambda optimizer, params: setattr(params[0], 'data', _channels_last(params[0].data)),
    'no momentum': _set(momentum=0., betas=(0., .9)),
    'new momentum': _set(momentum=.5, betas=(.5, .9)),
    'no gradient': lambda optimizer, params: setattr(params[1], 'grad', None),
    'a checkpoint': lambda optimizer, params: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    'address of a parameter': lambda optimizer, params: setattr(params[0], 'data', 2 * params[0].data),
    'addresses of the state': _convert_state(lambda x: 2 * x),
    'foreach': _set(fused=False, foreach=True),
    'fused again': lambda optimizer, params: optimizer.param_groups[0].update(
        fused=optimizer.defaults['fused'], foreach=None),
    'a group': lambda optimizer, params: optimizer.add_param_group(dict(params=make())),
    'no GradMult': lambda optimizer, params: delattr(params[1], 'grad_mult'),
}


@pytest.mark.parametrize('rep', REPS)
def test_what_changes_between_steps(interpreted, launches, rep):
    """A step of the kernels agrees with one of torch's own parts, whatever has changed since the step before."""
    names = 'grouped', 'RepOpt-VGG'
    sides = [*make(names), torch.nn.Parameter(torch.ones(4))], [*make(names), torch.nn.Parameter(torch.ones(4))]
    optimizers = [
        rep(params, lr=.01, fused=fused, **(dict(momentum=.9) if rep is RepSGD else {}))
        for params, fused in zip(sides, (True, None))]
    for step, (name, change) in enumerate(CHANGES.items()):
        before = len(launches)
        for params, optimizer in zip(sides, optimizers):
            fill(params, step)
            change(optimizer, params)
            for group in optimizer.param_groups[1:]:
                fill(group['params'], step)
            optimizer.step()
        assert len(launches) - before == {'no gradient': 1, 'foreach': 0, 'a group': 3}.get(name, 2), name
        for groups in zip(*(optimizer.param_groups for optimizer in optimizers)):
            for a, b in zip(*(group['params'] for group in groups)):
                assert relative(double(a), double(b)) < 1e-5, name


def test_where_kernels_run(interpreted, monkeypatch):
    param = make()[0].detach()
    group = dict(fused=True, foreach=None, lr=.1)

    def runs(x, *others, **changes):
        return triton_launch.use_triton(x, [torch.zeros_like(x), *others], {**group, **changes})

    assert runs(param)
    assert runs(param, param, param)
    assert runs(param.to(memory_format=torch.channels_last))
    assert not runs(param, fused=None)
    assert not runs(param, fused=False)
    assert not runs(param, lr=torch.tensor(.1))
    assert not runs(param, betas=(.9, torch.tensor(.9)))
    assert not runs(param.double())
    assert not runs(param.permute(1, 2, 0, 3))  # neither contiguous nor channels-last
    assert not runs(torch.empty(4, 8, 3, 3)[:, ::2])  # with gaps
    assert not runs(torch.empty(0, 8, 3, 3))
    for other in (param.bfloat16(), param[:4], param.to('meta')):
        assert not runs(param, param, other)
    assert not runs(param.to('meta'))
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, 'is_compiling', lambda: True)
        assert not runs(param)
    monkeypatch.delenv('TRITON_INTERPRET')
    assert not runs(param)


def test_state_of_another_dtype(interpreted, launches):
    """It is refused as torch's fused kernel refuses it, and not read as if it had the parameter's dtype."""
    param, = params = make()
    optimizer = RepSGD(params, lr=.01, momentum=.9, fused=True)
    fill(params, 0)
    optimizer.step()
    param.data = param.data.bfloat16()
    fill(params, 0)
    with pytest.raises(RuntimeError, match='expected scalar type'):
        optimizer.step()
    assert len(launches) == 1


@pytest.mark.slow
@pytest.mark.parametrize('rep', REPS)
def test_a_compiled_step(interpreted, launches, rep):
    """It uses torch's own parts, which the compiler sees through."""
    torch.compiler.reset()
    sides = make(), make()
    for params, compiled in zip(sides, (False, True)):
        optimizer = rep(params, lr=.01, fused=True)
        step = torch.compile(optimizer.step, backend='eager') if compiled else optimizer.step
        for i in range(2):
            fill(params, i)
            step()
        assert len(launches) == 2
    assert relative(double(sides[0][0]), double(sides[1][0])) < 1e-6


def test_a_failed_launch(interpreted):
    """The momentum that was not written stays zero."""
    param, = params = make()
    optimizer = RepSGD(params, lr=.01, momentum=.9, fused=True)
    fill(params, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rep_sgd, 'launch', lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    optimizer.step()
    mult = get_grad_mult(param).dense('squared')
    assert relative(optimizer.state[param]['momentum_buffer'], param.grad * mult) < 1e-6


def test_where_triton_does_not_work(interpreted, monkeypatch):
    """There is one warning, and torch's own parts take the step."""
    def fail(*args, **kwargs):
        raise RuntimeError('Failed to find C compiler')

    sides = make(), make()
    for params in sides:
        fill(params, 0)
    RepSGD(sides[0], lr=.1).step()
    monkeypatch.setattr(triton_launch, 'launch', fail)
    triton_launch._triton_works.cache_clear()
    optimizer = RepSGD(sides[1], lr=.1, fused=True)
    with pytest.warns(UserWarning, match=r'cannot run a kernel on cpu.*Failed to find C compiler'):
        optimizer.step()
    assert torch.equal(sides[0][0], sides[1][0])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        optimizer.step()
    triton_launch._triton_works.cache_clear()


def compiled(kernel, dtype='fp32', none=(), unaligned=(), **switches):
    """PTX of a kernel for a GPU that need not be present.

    none: arguments that are None. unaligned: arguments that are not multiples of 16. switches: compile-time constants.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import timm_rep.optim._triton_kernels as module

    function = getattr(module, kernel)
    constants = dict(
        MAXIMIZE=False, WINDOW=9, CENTRE=4, CHANNELS_LAST=False, ROWS=1, COLUMNS=2048,
        **(dict(NESTEROV=False) if kernel == 'sgd_kernel' else {}), **dict.fromkeys(none))
    constants.update(switches)
    types = {
        **dict.fromkeys(('param', 'grad', 'buffer', 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'), f'*{dtype}'),
        **dict.fromkeys(('step', 'table', 'grad_scale', 'found_inf'), '*fp32'),
        **dict.fromkeys(('out_channels', 'in_channels', 'row_offset'), 'i32'),
        **dict.fromkeys(constants, 'constexpr'),
    }
    signature = {name: types.get(name, 'fp32') for name in function.arg_names}
    attributes = {
        (i,): [['tt.divisibility', 16]] for i, (name, kind) in enumerate(signature.items())
        if name not in unaligned and (kind.startswith('*') or kind == 'i32')}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return triton.compile(source, target=GPUTarget('cuda', 90, 32)).asm['ptx']


@pytest.fixture
def compiler(kernels, tmp_path):
    pytest.importorskip('triton', minversion='3.4', reason='its interpreter leaves the language changed')
    kernels.setenv('TRITON_CACHE_DIR', str(tmp_path))


SCALERS = 'grad_scale', 'found_inf'


@pytest.mark.parametrize('kernel,read,written,kwargs', [
    ('sgd_kernel', 3, 2, dict(NESTEROV=True, none=SCALERS)),
    ('adamw_kernel', 5, 4, dict(dtype='bf16', MAXIMIZE=True, CHANNELS_LAST=True)),
    pytest.param('sgd_kernel', 2, 1, dict(dtype='fp16', none=('buffer',), MAXIMIZE=True), marks=pytest.mark.slow),
    pytest.param('adamw_kernel', 4, 3, dict(none=('max_exp_avg_sq', *SCALERS)), marks=pytest.mark.slow),
], ids=str)
def test_one_pass_on_a_gpu(compiler, kernel, read, written, kwargs):
    """Parameter, gradient and state are read once and written once, 16 bytes at a time."""
    instructions = compiled(kernel, **kwargs)
    count = 2048 * (4 if kwargs.get('dtype', 'fp32') == 'fp32' else 2) // 16 // 128  # a tensor, for each of 128 threads
    assert len(re.findall(r'ld\.global\S*\.v4\.b32', instructions)) == read * count
    assert len(re.findall(r'st\.global\S*\.v4\.b32', instructions)) == written * count


@pytest.mark.slow
@pytest.mark.parametrize('kernel', ['sgd_kernel', 'adamw_kernel'])
def test_compiles_for_odd_sizes(compiler, kernel):
    assert '.entry' in compiled(kernel, unaligned=('in_channels', 'out_channels', 'row_offset'), ROWS=64, COLUMNS=32)


@pytest.mark.gpu
@pytest.mark.parametrize('fused', [True, None])
@pytest.mark.parametrize('rep', REPS)
def test_captured_in_a_graph(rep, fused, launches):
    """After warm-up steps, as torch requires."""
    kwargs = dict(lr=.01, momentum=.9, nesterov=True) if rep is RepSGD else dict(lr=.01, capturable=True)
    sides = make(ALL, device='cuda'), make(ALL, device='cuda')
    optimizers = [rep(params, fused=fused, **kwargs) for params in sides]
    for params in sides:
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
    assert len(launches) == (4 * len(ALL) if fused else 0)
    for _ in range(2):
        graph.replay()
    for _ in range(5):  # capturing takes no step
        optimizers[1].step()
    torch.cuda.synchronize()
    for a, b in zip(*sides):
        assert relative(double(a), double(b)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize('fused', [True, None])
@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('rep', REPS)
def test_on_a_gpu(rep, dtype, channels_last, fused, launches):
    """The same result as on a CPU in float64; kernels only where they are asked for."""
    kwargs = dict(lr=.01, momentum=.9, nesterov=True, weight_decay=.1) if rep is RepSGD else dict(lr=.01)
    params, expected = make(ALL, dtype, channels_last, device='cuda'), make(ALL, dtype, channels_last)
    for param in expected:
        param.data = double(param)
    sides = rep(params, fused=fused, **kwargs), rep(expected, **kwargs)
    for step in range(3):
        fill(params, step)
        for p, e in zip(params, expected):
            e.grad = double(p.grad.cpu())
        for optimizer in sides:
            optimizer.step()
    for p, e in zip(params, expected):
        assert relative(double(p.cpu()), e.detach()) < (1e-5 if dtype == torch.float32 else 3e-2)
    assert len(launches) == (3 * len(ALL) if fused else 0)
