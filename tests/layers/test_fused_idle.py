"""The FFN trained with its idle channels as one matrix: what the layers compute one after the other."""
import copy
import io
import math
import runpy
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import FrozenBatchNorm2d

from tests.helpers import relative
from timm_rep.layers import RePaMlp, fused_idle, repa_mlp, set_fused_idle, use_fused_idle
from timm_rep.layers.fused_idle import fused_idle_is_faster

FUSED, SEQUENTIAL = True, False


@pytest.fixture(autouse=True)
def switch():
    """The switch is restored after the test."""
    before = use_fused_idle()
    yield
    set_fused_idle(before)


@pytest.fixture
def always(monkeypatch):
    """The matrix, whether it pays or not."""
    monkeypatch.setattr(repa_mlp, 'fused_idle_is_faster', lambda tokens, channels, idle: True)


class Bn:
    """norm_layer whose first norm has another eps than its second one."""

    def __init__(self, eps):
        self.eps = eps

    def __call__(self, channels, **dd):
        return nn.BatchNorm1d(channels, eps=self.eps[channels > 24], **dd)

    def __repr__(self):
        return f'eps {self.eps}'


def ffn(channels=24, dtype=torch.float64, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = RePaMlp(channels, 4 * channels, dtype=dtype, **kwargs)
    with torch.no_grad():
        for norm in (model.norm1, model.norm2):
            if norm.affine:
                norm.weight.normal_()  # negative ones, too
                norm.bias.normal_()
    return model.train()


def images(shape=(6, 24, 5, 7), dtype=torch.float64, seed=0, scale=1.):
    g = torch.Generator().manual_seed(seed)
    return scale * (torch.randn(shape, generator=g, dtype=torch.float64) * 2 + 1).to(dtype)


def tokens(dtype=torch.float64, **kwargs):
    return images(**kwargs).flatten(2).transpose(1, 2).contiguous().to(dtype)


def uneven(shape, dtype):
    """Numbers from -1 to 1, not by torch.cos: gradients that began with the first one of a process were 1e-9 off."""
    numbers = torch.arange(math.prod(shape), dtype=dtype).tolist()
    return torch.tensor([math.cos(n) for n in numbers], dtype=dtype).view(shape)


def step(model, x, fast, steps=1, call=None):
    """Outputs, gradients of input and parameters, and buffers of a copy after some steps."""
    set_fused_idle(fast)
    model = copy.deepcopy(model)
    for _ in range(steps):
        torch.manual_seed(1)  # of drop path
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        model.zero_grad()
        y = (call or (lambda m, x: m(x)))(model, x)
        weights = uneven(y.shape, y.dtype).to(y.device)
        (y * weights).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=1e-3)
    found = {'y': y.detach(), 'x': x.grad}
    found.update({f'{name}.grad': p.grad for name, p in model.named_parameters()})
    found.update(dict(model.named_buffers()))
    return found


def check_same(model, x, tolerance=1e-10, steps=2, **kwargs):
    fast, plain = step(model, x, FUSED, steps, **kwargs), step(model, x, SEQUENTIAL, steps, **kwargs)
    assert fast.keys() == plain.keys()
    largest = max(p.abs().max() for name, p in plain.items() if name.endswith('.grad') and p is not None)
    for name, expected in plain.items():
        if expected is None or not expected.is_floating_point():
            assert fast[name] is None if expected is None else torch.equal(fast[name], expected), name
            continue
        assert fast[name].dtype == expected.dtype
        # the gradient of a bias before a BatchNorm is nothing but rounding
        floor = 1e-2 * tolerance * largest if name.endswith('.grad') else 0.
        assert (fast[name] - expected).norm() <= tolerance * expected.norm() + floor, name


@pytest.mark.parametrize('kwargs', [
    dict(), dict(idle_ratio=.5), dict(idle_ratio=.9), dict(idle_ratio=.02), dict(bias=False),
    dict(init_values=.1), dict(norm_layer=Bn(eps=(1e-1, 1e-5))), dict(norm_layer=Bn(eps=(1e-5, 1e-1))),
    dict(act_layer=nn.ReLU), dict(norm_layer=partial(nn.BatchNorm1d, momentum=None, eps=1e-3)),
    dict(norm_layer=partial(nn.BatchNorm1d, momentum=.7)),
], ids=str)
def test_same_as_layer_by_layer(always, kwargs):
    model = ffn(**kwargs)
    assert model._can_fuse_idle(tokens())
    check_same(model, tokens())


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('kwargs', [dict(), dict(init_values=.1)], ids=str)
def test_channels_second(always, kwargs, memory_format):
    model = ffn(use_conv=True, **kwargs)
    x = images().contiguous(memory_format=memory_format)
    assert model._can_fuse_idle(x)
    check_same(model, x)
    # the next layer finds the same memory layout as without the fused path
    set_fused_idle(True)
    assert model(x).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize('scale', [1e-3, 1., 1e4])
@pytest.mark.parametrize('offset', [0., 1e3])
def test_values_of_all_sizes(always, scale, offset):
    check_same(ffn(), tokens(scale=scale) + offset * scale, 1e-9)


def test_float32_is_as_exact(always):
    """To float64, by no more than twice the error of layer by layer."""
    x = tokens(shape=(8, 64, 9, 9))
    exact = step(ffn(64), x, SEQUENTIAL)
    errors = []
    for fast in (FUSED, SEQUENTIAL):
        found = step(ffn(64).float(), x.float(), fast)
        errors.append({k: relative(v.double(), exact[k]) for k, v in found.items() if v.is_floating_point()})
    fast, plain = errors
    for name, error in plain.items():
        if name != 'fc1.bias.grad':  # zero on paper, for the idle ones
            assert fast[name] < max(2 * error, 1e-6), name


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('pure', [False, True])
def test_half_precision(always, pure, dtype):
    """Under autocast, and of a model cast: no further from the truth than layer by layer, statistics in float32."""
    x = tokens(shape=(8, 64, 9, 9)).to(dtype).double()
    exact = step(ffn(64, idle_ratio=.75), x, SEQUENTIAL)
    errors = []
    for fast in (FUSED, SEQUENTIAL):
        if pure:
            found = step(ffn(64).to(dtype), x.to(dtype), fast)
        else:
            def call(model, x):
                with torch.autocast('cpu', dtype):
                    return model(x)
            found = step(ffn(64).float(), x.float(), fast, call=call)
            assert found['norm2.running_var'].dtype == torch.float32
        errors.append({k: relative(v.double(), exact[k]) for k, v in found.items() if v.is_floating_point()})
    fast, plain = errors
    for name, error in plain.items():
        if name != 'fc1.bias.grad':
            assert fast[name] < max(1.5 * error, 5e-3), name


def test_several_passes_before_one_backward(always):
    """As with views of several sizes; among them one that goes layer by layer."""
    x = tokens()

    def call(model, x):
        first, second = model(x), model(2 * x[:3])
        use = use_fused_idle()
        set_fused_idle(False)
        third = model(x[:, :9])
        set_fused_idle(use)
        return torch.cat([y.flatten() for y in (first, second, third)])

    check_same(ffn(), x, call=call)
    correlated = torch.randn(500, 1) + 1e-4 * torch.randn(500, 24)  # the matrix would be wrong
    model = ffn(dtype=torch.float32)
    (model(correlated).sum() + model(x.float()).sum() + model(correlated).sum()).backward()


def test_checkpointing(always):
    check_same(ffn(), tokens(), call=lambda m, x: checkpoint(m, x, use_reentrant=False))


# Dynamo of torch 2.5 leaves the graph in several places; of those after it 2.11, 2.14 and 2.15 were tried
FULLGRAPH = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)


def compiled_call(model, x):
    return torch.compile(model, backend='aot_eager', fullgraph=FULLGRAPH)(x)


@pytest.mark.slow
def test_compiled(always):
    model, x = ffn(), tokens()
    eager = step(model, x, FUSED)
    compiled = step(model, x, FUSED, call=compiled_call)
    for name, expected in eager.items():
        torch.testing.assert_close(compiled[name], expected, rtol=1e-10, atol=1e-10)


def test_double_backward(always):
    """A penalty on the gradients, as WGAN-GP and influence functions have, is differentiated as layer by layer."""
    found = []
    for fast in (FUSED, SEQUENTIAL):
        set_fused_idle(fast)
        model, x = ffn(), tokens().requires_grad_()
        grads = torch.autograd.grad(model(x).pow(3).sum(), [x, *model.parameters()], create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found):
        assert relative(ours, theirs) < 1e-10


def test_scripted():
    model, x = ffn(), tokens()
    set_fused_idle(True)
    expected = copy.deepcopy(model)(x)
    assert relative(torch.jit.script(model)(x), expected) < 1e-10


def test_one_token_is_refused(always):
    for fast in (FUSED, SEQUENTIAL):
        set_fused_idle(fast)
        with pytest.raises(ValueError, match='more than 1 value per channel'):
            ffn()(torch.randn(1, 1, 24, dtype=torch.float64))


def test_where_it_pays():
    """The count of the docstring, against torch's own; small maps and few tokens go layer by layer."""
    for t, c, idle in ((400, 32, 96), (300, 48, 24), (64, 64, 192)):
        hidden = idle + c
        counts = []
        for fast in (FUSED, SEQUENTIAL):
            set_fused_idle(fast)
            model = RePaMlp(c, hidden, idle / hidden + 1e-9).train()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(repa_mlp, 'fused_idle_is_faster', lambda *sizes: True)
                with FlopCounterMode(display=False) as counter:
                    model(torch.randn(t, c, requires_grad=True)).sum().backward()
            counts.append(counter.get_total_flops() / 2)
        active = 6 * t * c * c
        assert counts[1] == active + 6 * t * c * idle
        small = 3 * c * hidden + 3 * c * idle  # of biases
        assert abs(counts[0] - active - 5 * t * c * c - 6 * c * c * idle) <= small
    assert not fused_idle_is_faster(768, 768, 2304)
    assert fused_idle_is_faster(3152, 768, 2304)
    assert not fused_idle_is_faster(10 ** 9, 768, 640)
    assert not fused_idle_is_faster(2 * 192, 192, 576)  # the work that does not depend on the size of the matrix
    assert fused_idle_is_faster(4 * 192, 192, 576)
    set_fused_idle(True)
    model = RePaMlp(192, 768).train()
    assert not model._can_fuse_idle(torch.empty(2, 197, 192))
    assert model._can_fuse_idle(torch.empty(4, 197, 192))


@pytest.mark.parametrize('kind', [
    'switched off', 'eval', 'frozen norm', 'no norm', 'hook', 'backward hook', 'backward pre-hook', 'adapter',
    'own forward', 'dropout', 'no statistics', 'all active', 'all idle'])
def test_what_goes_layer_by_layer(always, kind):
    set_fused_idle(kind != 'switched off')
    kwargs = {
        'dropout': dict(drop=.1), 'all active': dict(idle_ratio=0.), 'all idle': dict(idle_ratio=1.),
        'no statistics': dict(norm_layer=partial(nn.BatchNorm1d, track_running_stats=False)),
    }.get(kind, {})
    model = ffn(**kwargs)
    seen = []
    if kind == 'eval':
        model.eval()
    elif kind == 'frozen norm':
        model.norm2.eval()
    elif kind == 'no norm':
        model.norm1 = nn.Identity()
    elif kind == 'hook':
        model.act.register_forward_hook(lambda *args: seen.append('act'))
        model.fc1.register_forward_hook(lambda *args: seen.append('fc1'))
    elif kind == 'backward hook':
        model.fc2.register_full_backward_hook(lambda *args: None)
    elif kind == 'backward pre-hook':
        model.fc2.register_full_backward_pre_hook(lambda *args: None)
    elif kind == 'adapter':
        class Adapted(nn.Linear):
            def forward(self, x):
                seen.append('fc2')
                return super().forward(x)
        model.fc2.__class__ = Adapted
    elif kind == 'own forward':
        forward = model.fc1.forward
        model.fc1.forward = lambda x: seen.append('fc1') or forward(x)
    assert not model._can_fuse_idle(tokens())
    before = model.norm2.num_batches_tracked.item() if kind != 'no statistics' else 0
    model(tokens())
    if kind in ('hook', 'adapter', 'own forward'):
        assert seen
    if kind == 'frozen norm':
        assert model.norm2.num_batches_tracked.item() == before


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""
    device = torch.device('cuda')


def test_other_devices_go_layer_by_layer(always):
    """On an H100 the matrix was slower for most sizes."""
    set_fused_idle(True)
    model, x = ffn().float(), tokens().float()
    assert model._can_fuse_idle(x)
    assert not model._can_fuse_idle(x.as_subclass(OnGpu))


@pytest.mark.parametrize('by', ['timm', 'torchvision'])
def test_frozen_norms(always, by):
    """As in eval mode, folded too."""
    set_fused_idle(True)
    model, x = ffn(use_conv=True), images()
    model(x)
    expected = model.eval()(x)
    model.train()
    if by == 'timm':
        timm.utils.freeze(model)
    else:
        for name in ('norm1', 'norm2'):
            norm = getattr(model, name)
            frozen = FrozenBatchNorm2d(norm.num_features).double()
            frozen.load_state_dict(norm.state_dict())
            setattr(model, name, frozen)
    assert isinstance(model.norm2, FrozenBatchNorm2d)
    assert not model._can_fuse_idle(x)
    for frozen in (model, model.fuse()):
        assert relative(frozen(x), expected) < 1e-10


def test_dropout_that_was_taken_out(always):
    set_fused_idle(True)
    model = ffn()
    model.drop1 = nn.Identity()
    assert model._can_fuse_idle(tokens())
    check_same(model, tokens())


def test_a_hook_on_the_activation(always):
    set_fused_idle(True)
    model, seen = ffn(), []
    model.act.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
    model(tokens())
    assert seen == [96]


@pytest.mark.parametrize('value,expected', [('0', False), ('1', True), (None, True)])
def test_environment_variable(monkeypatch, value, expected):
    monkeypatch.delenv('TIMM_REP_FUSED_IDLE', raising=False)
    if value is not None:
        monkeypatch.setenv('TIMM_REP_FUSED_IDLE', value)
    assert runpy.run_path(fused_idle.__file__)['use_fused_idle']() == expected


def test_hidden_activations_are_not_kept(always):
    x = tokens(shape=(8, 48, 9, 9))
    count = x.shape[0] * x.shape[1]
    kept = []
    for fast in (FUSED, SEQUENTIAL):
        set_fused_idle(fast)
        storages = {}

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() / 8 / count
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = ffn(48)(x)
        kept.append(sum(storages.values()))
        del y
    # numbers a token: of 48 channels, 192 hidden ones
    parameters = 48 * 192 * 10 / count
    assert kept[1] > 3.5 * 192
    assert kept[0] < 48 * 8 + parameters


FAMILIES = [
    ('repa_deit_tiny', dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)),
    ('repa_swin_tiny', dict(img_size=32, patch_size=2, window_size=4, embed_dim=12, depths=(1, 2), num_heads=(2, 2))),
    ('repa_poolformer_s12', dict(depths=(1, 1, 1, 1), embed_dims=None)),
    ('repa_mixer_s32', dict(img_size=32, patch_size=8, embed_dim=24, num_blocks=2)),
    ('repa_lvvit_s', dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3)),
]


@pytest.mark.parametrize('name,kwargs', FAMILIES, ids=[name for name, _ in FAMILIES])
def test_families(always, name, kwargs):
    torch.manual_seed(0)
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    model = timm.create_model(name, num_classes=3, **kwargs).double().train()
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    used = [m._can_fuse_idle(x) for m in model.modules() if isinstance(m, RePaMlp)]
    assert all(used)
    assert used

    def call(model, x):
        y = model(x)
        return y if isinstance(y, torch.Tensor) else torch.cat([part.flatten() for part in y])

    check_same(model, x, 1e-8, steps=1, call=call)


@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('norm', [1., 30., 1000.])
def test_variances_that_are_small_differences(always, monkeypatch, norm, compiled):
    """Channels that are almost the same, and weights that see what is left of them; also where no graph can check."""
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: compiled)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 1, generator=g) + 1e-4 * torch.randn(2000, 24, generator=g)
    model = ffn(dtype=torch.float32)
    with torch.no_grad():
        model.norm1.weight.fill_(1.)
        model.fc1.weight.sub_(model.fc1.weight.mean(1, keepdim=True)).mul_(norm)
    fast, plain = step(model, x, FUSED), step(model, x, SEQUENTIAL)
    exact = step(model.double(), x.double(), SEQUENTIAL)
    for name in ('y', 'norm2.running_var', 'norm2.running_mean'):
        error = relative(plain[name].double(), exact[name])
        assert relative(fast[name].double(), exact[name]) < max(10 * error, 1e-5), name


def test_one_imprecise_variance_is_enough(always):
    """A single channel that is a small difference of large ones: the layers run in sequence."""
    covariance = torch.ones(2, 2) + 1e-6 * torch.eye(2)
    idle = torch.tensor([[1., 1.], [1., -1.]])
    var = (idle @ covariance * idle).sum(1)
    assert fused_idle._is_precise(var[:1], idle[:1], covariance)
    assert not fused_idle._is_precise(var, idle, covariance)


def test_inputs_are_cast_once_under_autocast(always):
    """The matrix and the linear layers take the same half-precision input."""
    seen = []

    class Linears(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.linear:
                seen.append(args[0].dtype)
            return func(*args, **kwargs or {})

    model = ffn().float()
    with torch.autocast('cpu', torch.bfloat16), Linears():
        model(tokens().float())
    assert len(seen) == 3
    assert seen.count(torch.bfloat16) >= 2


def test_autocast_leaves_float64_as_it_is(always):
    model = ffn()
    x = tokens()
    outputs = copy.deepcopy(model)(x)
    assert outputs.dtype == torch.float64
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(model(x), outputs)


def test_on_meta(always):
    model = ffn().to('meta')
    assert model(tokens().to('meta')).shape == tokens().shape


def test_transforms(always):
    """torch.func.grad, and a trace that is saved."""
    x = tokens()
    model = ffn()
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return torch.func.functional_call(model, {**parameters, **buffers}, (x,)).square().sum()

    found = []
    for fused in (FUSED, SEQUENTIAL):
        set_fused_idle(fused)
        grads = torch.func.grad(loss)(parameters, x)
        found.append([grads['fc1.weight'], grads['norm1.weight']])
    for ours, theirs in zip(*found):
        assert relative(ours, theirs) < 1e-10
    set_fused_idle(True)
    expected = copy.deepcopy(model)(x)
    traced = torch.jit.trace(model, x, check_trace=False)
    torch.jit.save(traced, io.BytesIO())
    assert relative(traced(x), expected) < 1e-10


@pytest.mark.parametrize('ratio', [
    1., *(pytest.param(ratio, marks=pytest.mark.slow) for ratio in (1e2, 1e3, 1e4)), 1e5, 'constant'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_inputs_with_a_large_mean(always, dtype, ratio):
    """At any ratio of mean and deviation, the error against float64 is at most twice as large as layer by layer."""
    x = torch.randn(20000, 64, generator=torch.Generator().manual_seed(0))
    if ratio == 'constant':
        x[:, :32] = 100.
    else:
        x = x + ratio
    model = RePaMlp(64, 256).train()
    set_fused_idle(SEQUENTIAL)
    exact = copy.deepcopy(model).double()(x.double())
    errors = []
    for fused in (FUSED, SEQUENTIAL):
        set_fused_idle(fused)
        assert model._can_fuse_idle(x) == fused
        with torch.no_grad(), torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
            errors.append(relative(copy.deepcopy(model)(x).double(), exact))
    assert errors[0] < 2 * errors[1]
