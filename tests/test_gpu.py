"""What could differ on an accelerator: each test runs on the CPU by default, and with -m gpu on a GPU."""
import copy
import math
import time
import warnings

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.fasternet import FasterNet

import timm_rep
from tests.deploy.models import build
from tests.helpers import images, normal_scales, randomize_, relative, tiny
from tests.models.test_repopt_vgg import csla_and_target
from tests.reference import adamw, sgd
from tests.search.test_hyper_search import TINY, Killed, KilledLoader, loader
from timm_rep.convert import folded_copy
from timm_rep.latency import PARTS, profile_latency
from timm_rep.layers import ConvBranch, Csla, IdentityBranch, csla_layers
from timm_rep.optim import GradMult, RepAdamW, RepSGD, get_grad_mult, set_grad_mult
from timm_rep.scales import Scales

CUDA = pytest.param('cuda', marks=pytest.mark.gpu)
on_gpu = pytest.mark.parametrize('device', [CUDA], indirect=True)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
FLAGS = [dict(), dict(foreach=True), dict(foreach=False), dict(fused=True)]
VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


@pytest.fixture(params=['cpu', CUDA])
def device(request):
    if request.param == 'cuda' and not torch.cuda.is_available():
        pytest.skip('there is no GPU')
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def no_tf32():
    """float32 is not rounded to TF32."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = False
    yield
    for place, allowed in zip(places, before):
        place.allow_tf32 = allowed


def on(device, *models):
    """All parameters and buffers are on a device."""
    return all(x.device.type == device.type for m in models for x in (*m.parameters(), *m.buffers()))


# three regions; a grouped kernel, whose diagonal starts again in each group; no branch as large as the kernel
CSLAS = [
    Csla(8, 8, (ConvBranch(3), ConvBranch(1), IdentityBranch())),
    Csla(8, 8, (ConvBranch(3), IdentityBranch()), groups=2),
    Csla(4, 6, (ConvBranch((3, 1)), ConvBranch((1, 3)))),
]


def kernels(device, dtype):
    """Kernels with negative, zero and large multipliers, the first one channels-last, and a plain parameter."""
    g = torch.Generator().manual_seed(0)
    params = []
    for i, csla in enumerate(CSLAS):
        param = torch.randn(csla.kernel_shape, generator=g, dtype=torch.float64).to(device, dtype)
        params.append(nn.Parameter(param if i else param.to(memory_format=torch.channels_last)))
        scales = {name: torch.randn(csla.out_channels, generator=g) for name in csla.scaled_branches}
        for scale in scales.values():
            scale[0], scale[1] = 0., 30.
        set_grad_mult(params[-1], GradMult(csla, scales))
    params.append(nn.Parameter(torch.randn(5, generator=g, dtype=torch.float64).to(device, dtype)))
    return params


def gradients(params, seed):
    """Random gradients in float64 on the CPU."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g, dtype=torch.float64) for p in params]


def set_gradients(params, seed):
    """Set them in place, where there are some."""
    for p, grad in zip(params, gradients(params, seed)):
        p.grad = torch.empty_like(p, memory_format=torch.contiguous_format) if p.grad is None else p.grad
        p.grad.copy_(grad)


def references(rep, params, steps, **kwargs):
    """The parameters in float64 on the CPU after some steps."""
    rule = 'squared' if rep is RepSGD else 'absolute'
    mults = [mult.dense(rule, torch.float64) if (mult := get_grad_mult(p)) else torch.ones(()) for p in params]
    expected, state = [p.detach().double().cpu().contiguous() for p in params], [None] * len(params)
    for i in range(steps):
        grads = gradients(params, i)
        if rep is RepSGD:
            sgd(expected, grads, state, mults, **kwargs)
        else:
            adamw(expected, grads, state, mults, step=i + 1, **kwargs)
    return expected


def check(params, expected, tolerance):
    for p, e in zip(params, expected):
        assert relative(p.detach().double().cpu(), e.detach().double().cpu()) < tolerance


def plain_args(rep):
    return dict(lr=.05, momentum=.9, weight_decay=.1) if rep is RepSGD else dict(lr=.05, weight_decay=.1)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('flags', FLAGS, ids=str)
@pytest.mark.parametrize('rep,kwargs', [
    (RepSGD, dict(lr=.05)),
    (RepSGD, dict(lr=.05, momentum=.9, nesterov=True, weight_decay=.1)),
    (RepSGD, dict(lr=.05, momentum=.5, dampening=.2, maximize=True)),
    (RepAdamW, dict(lr=.05, weight_decay=.3, betas=(.8, .9), eps=1e-6)),
], ids=['sgd', 'nesterov', 'dampening', 'adamw'])
def test_steps(rep, kwargs, flags, dtype, device):
    params = kernels(device, dtype)
    expected = references(rep, params, 4, **kwargs)
    optimizer = rep(params, **kwargs, **flags)
    for i in range(4):
        set_gradients(params, i)
        optimizer.step()
    check(params, expected, TOLERANCE[dtype])


@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_state_goes_to_the_cpu(rep, device):
    """A state dict of the device continues on the CPU as on the device."""
    kwargs = plain_args(rep)
    params = kernels(device, torch.float64)
    expected = references(rep, params, 4, **kwargs)
    optimizer = rep(params, **kwargs)
    others = kernels('cpu', torch.float64)
    other = rep(others, **kwargs)
    for i in range(4):
        if i == 2:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for p, q in zip(others, params):
                p.data.copy_(q.detach())
        for these, it in ((params, optimizer), (others, other))[:2 if i > 1 else 1]:
            set_gradients(these, i)
            it.step()
    check(params, expected, 1e-10)
    check(others, expected, 1e-10)


@pytest.mark.parametrize('channels_last', [False, True])
@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_multipliers_before_and_after_the_move(rep, channels_last, device):
    """To the device, also channels-last: the steps are those on the CPU."""
    scales = normal_scales(tiny('repopt_vgg_a0'))
    results = []
    for place, attach_first in (('cpu', True), (device, True), (device, False)):
        model = randomize_(tiny('repopt_vgg_a0', scales=False)).double().train()
        if attach_first:
            timm_rep.attach_grad_mults(model, scales)
        model.to(place)
        if channels_last and place != 'cpu':
            model.to(memory_format=torch.channels_last)
        if not attach_first:
            timm_rep.attach_grad_mults(model, scales)
        optimizer = rep(model.parameters(), **dict(plain_args(rep), lr=1e-3))
        for i in range(2):
            x = images(4, dtype=torch.float64, seed=i).to(place)
            if channels_last and place != 'cpu':
                x = x.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.arange(4, device=place)).backward()
            if rep is RepAdamW:  # of a gradient that is nothing but rounding, AdamW makes a whole step
                for p in model.parameters():
                    p.grad.add_(p.detach())
            optimizer.step()
        results.append(list(model.parameters()))
    for moved in results[1:]:
        check(moved, results[0], 1e-8)


@on_gpu
@pytest.mark.parametrize('flags', FLAGS, ids=str)
@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_captured_steps(rep, flags, device):
    """Replays of a CUDA graph of a step are steps."""
    kwargs = plain_args(rep) if rep is RepSGD else dict(lr=.05, weight_decay=.3, betas=(.8, .9), eps=1e-6)
    params = kernels(device, torch.float64)
    expected = references(rep, params, 6, **kwargs)
    optimizer = rep(params, **kwargs, **flags, **({} if rep is RepSGD else dict(capturable=True)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            set_gradients(params, i)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for i in range(3, 6):
        set_gradients(params, i)
        graph.replay()
    torch.cuda.synchronize()
    check(params, expected, 1e-10 if rep is RepSGD else 1e-5)  # torch counts captured steps of AdamW in float32


def test_repsgd_is_sgd_on_csla_blocks(device):
    args = dict(lr=.02, momentum=.9, weight_decay=1e-3, nesterov=True)
    csla, target = (model.to(device) for model in csla_and_target())
    start = copy.deepcopy(target)
    optimizers = torch.optim.SGD([p for p in csla.parameters() if p.requires_grad], **args), RepSGD(
        target.parameters(), **args)
    for i in range(3):
        x, y = images(8, dtype=torch.float64, seed=i).to(device), torch.arange(8, device=device) % 5
        for model, optimizer in zip((csla, target), optimizers):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    ours, before = csla_layers(target), csla_layers(start)
    for name, block in csla_layers(csla).items():
        assert relative(ours[name].weight, block.equivalent_kernel()) < 1e-9
        assert relative(ours[name].weight, before[name].weight) > 1e-5


FAMILIES = {
    **dict.fromkeys((
        'repa_vit', 'repa_swin', 'repa_mixer', 'repa_poolformer', 'repa_lvvit', 'repopt_vgg', 'repopt_vgg, search',
        'repopt_ghostnet', 'repa_any, batch')),
    'repopt_vgg, csla': lambda: (tiny('repopt_vgg_a0', structure='csla', scales='init'), 64),
}


def family(kind):
    """A model with the weights of no initialization, and images."""
    if FAMILIES[kind] is None:
        model, (_, size, _) = build(kind)
    else:
        torch.manual_seed(0)
        model, size = FAMILIES[kind]()
        randomize_(model)
    return model.eval(), images(2, size, dtype=torch.float64)


@pytest.mark.parametrize('kind', FAMILIES)
@torch.no_grad()
def test_folding(kind, device):
    model, x = family(kind)
    model.double()
    expected = model(x)
    model.to(device)
    x = x.to(device)
    # the unfolded RepOpt-GhostNet on an H100 differs by 1.1e-9 from itself on the CPU
    bound = 1e-8 if (kind, device.type) == ('repopt_ghostnet', 'cuda') else 1e-9
    assert relative(model(x).cpu(), expected) < bound
    before = sum(1 for _ in model.parameters())
    model.reparameterize()
    assert sum(1 for _ in model.parameters()) < before
    assert on(device, model)
    assert relative(model(x).cpu(), expected) < bound


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kind', FAMILIES)
@torch.no_grad()
def test_folding_in_half_precision(kind, dtype, device):
    """The folded model is about as near to float64 as the unfolded one."""
    model, x = family(kind)
    exact = copy.deepcopy(model).double()(x.to(dtype).double())
    model.to(device, dtype)
    errors = []
    for net in (model, folded_copy(model)):
        assert on(device, net)
        y = net(x.to(device, dtype))
        assert y.dtype == dtype
        errors.append(((y.cpu().double() - exact).norm() / exact.norm()).item())
    assert errors[0] < .2
    assert errors[1] < max(3 * errors[0], 4e-2 if dtype == torch.bfloat16 else 5e-3)


def vit(seed=0, **kwargs):
    """A small ViT in float64 in which no parameter is as initialized."""
    torch.manual_seed(seed)
    model = timm.create_model('vit_tiny_patch16_224', **{**VIT, **kwargs}).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * (.3 if p.dim() < 2 else .1))
    return model


def fasternet():
    torch.manual_seed(0)
    model = randomize_(FasterNet(
        embed_dim=16, depths=(1, 1), feature_dim=24, layer_scale_init_value=.5, num_classes=5)).double()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=p[0].numel() ** -.5)
    return model


@pytest.mark.parametrize('build,kwargs', [
    (vit, dict(idle_ratio=.6)), (vit, dict(macs=.8)), (fasternet, dict(idle_ratio=.6))],
    ids=['vit', 'vit, macs', 'fasternet'])
def test_conversion_from_images(build, kwargs, device):
    """As on the CPU, from images on the device or on the CPU."""
    calibration = [images(20, 32, seed=i, dtype=torch.float64) for i in range(3)]
    x = images(4, 32, seed=5, dtype=torch.float64)
    original = build()
    outputs, reports = [original(x)], []
    for place, images_on in (('cpu', 'cpu'), (device, device), (device, 'cpu')):
        model = copy.deepcopy(original).to(place)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', UserWarning)
            reports.append(timm_rep.convert_to_repa(
                model, calibration=[batch.to(images_on) for batch in calibration], **kwargs))
        assert on(torch.device(place), model)
        outputs.append(model(x.to(place)).cpu())
    assert relative(outputs[1], outputs[0]) > 1e-4
    for report, y in zip(reports[1:], outputs[2:]):
        assert report.macs == reports[0].macs
        assert [ffn.active_features for ffn in report.ffns] == [ffn.active_features for ffn in reports[0].ffns]
        assert relative(y, outputs[1]) < 1e-6


def test_annealing(device):
    """FFNs annealed on the device fold at the end, as on the CPU."""
    x = images(8, 32, dtype=torch.float64)
    outputs = []
    for place in ('cpu', device):
        model = vit().to(place)
        timm_rep.convert_to_repa(model, idle_ratio=.5, anneal_steps=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model.train()
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(place)), torch.arange(8, device=place) % 5).backward()
            optimizer.step()
        model.eval()
        outputs.append(model(x.to(place)).detach().cpu())
        model.reparameterize()
        assert on(torch.device(place), model)
        assert relative(model(x.to(place)).cpu(), outputs[-1]) < 1e-9
    assert relative(outputs[1], outputs[0]) < 1e-4  # some statistics are in float32


def test_calibrated_statistics(device):
    batches = [images(4 + i, 32, seed=i) for i in range(3)]
    models = []
    for place in ('cpu', device):
        model = randomize_(tiny('repa_deit_tiny')).double().to(place)
        timm_rep.calibrate_batchnorm(model, batches, identity_norms=['*.mlp.norm2'])
        assert on(torch.device(place), model)
        models.append(model.cpu().state_dict())
    start = randomize_(tiny('repa_deit_tiny')).state_dict()
    name = 'blocks.1.mlp.norm1.running_mean'
    assert relative(models[0][name], start[name]) > 1e-2
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize('element_selection', ['uniform', 'random', 'l1', 'uniform_heads'])
def test_selected_weights(element_selection, device):
    """From a teacher on the device or on the CPU to a student on either."""
    states = []
    for student_on, teacher_on in (('cpu', 'cpu'), (device, 'cpu'), ('cpu', device), (device, device)):
        student = vit().to(student_on)
        teacher = vit(1, embed_dim=48, depth=4, num_heads=6).to(teacher_on)
        timm_rep.weight_select_init(student, teacher, element_selection=element_selection)
        assert on(torch.device(student_on), student)
        states.append(student.cpu().state_dict())
    assert not torch.equal(states[0]['blocks.1.attn.qkv.weight'], vit().blocks[1].attn.qkv.weight)
    for state in states[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, states[0][name], rtol=1e-12, atol=1e-12, msg=name)


def test_mimetic_initialization(device):
    states = []
    for place in ('cpu', device):
        model = vit().to(place)
        timm_rep.mimetic_init_(model, generator=torch.Generator().manual_seed(3))
        assert on(torch.device(place), model)
        states.append(model.cpu().state_dict())
    assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())
    assert not torch.equal(states[0]['blocks.0.attn.qkv.weight'], vit().blocks[0].attn.qkv.weight)


def test_hyper_search(device, tmp_path, monkeypatch):
    """In bfloat16 and channels-last, resumed after an interrupt."""
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', True)
    args = dict(TINY, device=device, epochs=2, warmup_epochs=0, lr=.05, progress=False, amp_dtype=torch.bfloat16,
                channels_last=True)
    straight = timm_rep.hyper_search('repopt_vgg_a0', loader(), **args)
    args.update(checkpoint=tmp_path / 'search.pth', resume=True)
    with pytest.raises(Killed):
        timm_rep.hyper_search('repopt_vgg_a0', KilledLoader(4), **args)
    found = timm_rep.hyper_search('repopt_vgg_a0', loader(), val_loader=loader(shuffle=False), **args)
    assert 0 <= float(found.metadata['accuracy']) <= 100
    initial = Scales.initial(timm.create_model('repopt_vgg_a0', **TINY))
    for name, branches in initial.items():
        for branch, start in branches.items():
            scale, expected = found[name][branch], straight[name][branch].to(start)
            assert scale.isfinite().all()
            assert not torch.equal(scale, start)
            assert (scale - expected).norm() < .1 * (expected - start).norm()
    timm_rep.attach_grad_mults(timm.create_model('repopt_vgg_a0', **TINY).to(device), found)


@pytest.mark.parametrize('kind', ['repa_vit', 'repa_poolformer'])
def test_latency_by_part(kind, device):
    model, x = family(kind)
    model.to(device)
    begun = time.perf_counter()
    found = profile_latency(
        {'unfolded': model, 'folded': folded_copy(model)}, x.to(device, torch.float32), rounds=3, warmup=1)
    elapsed = 1e3 * (time.perf_counter() - begun)
    assert list(found) == ['unfolded', 'folded']
    for parts in found.values():
        assert set(parts) == set(PARTS)
        assert all(ms > 0 for ms in parts.values())
    # of three rounds, two take the median or longer
    assert 2 * sum(ms for parts in found.values() for ms in parts.values()) < elapsed


@pytest.mark.parametrize('kind', ['repa_vit', 'repopt_vgg'])
def test_verify(kind, device):
    """A model stays on its device; TF32 is named where it is used."""
    model, x = family(kind)
    model.to(device)
    result = timm_rep.verify(model, x.to(device, torch.float32))
    assert result.passed
    assert result.folded > 0
    assert 'TF32' not in result.causes
    assert on(device, model)
    torch.backends.cudnn.allow_tf32 = True
    found = timm_rep.verify(model, x[:1].to(device, torch.float32))
    assert ('TF32' in found.causes) == (device.type == 'cuda' and torch.cuda.get_device_capability() >= (8, 0))


@on_gpu
@pytest.mark.parametrize('format,packages', [
    ('safetensors', ()), ('pt2', ()), ('onnx', ('onnx', 'onnxscript', 'onnxruntime'))])
def test_export(format, packages, device, tmp_path):
    """The written model agrees with a model on the device, which stays there."""
    for package in packages:
        pytest.importorskip(package)
    model = randomize_(tiny('repa_deit_tiny')).to(device)
    path = tmp_path / {'safetensors': 'folder', 'pt2': 'm.pt2', 'onnx': 'm.onnx'}[format]
    result = timm_rep.export(model, path, format=format, images=images(2, 32).to(device))
    assert all(difference.relative_rms < 1e-4 for difference in result.differences.values())
    assert set(result.differences) == {'random', 'real'}
    assert on(device, model)
    if format == 'safetensors':
        loaded = timm.create_model(f'local-dir:{path}', pretrained=True).to(device).eval()
        with torch.no_grad():
            assert relative(loaded(images(2, 32).to(device)), model(images(2, 32).to(device))) < 1e-4


@on_gpu
@pytest.mark.parametrize('backend,packages', [
    ('inductor', ('torchao',)), ('onnxruntime', ('torchao', 'onnx', 'onnxscript', 'onnxruntime'))])
def test_quantization_is_for_the_cpu(backend, packages, device):
    for name in packages:
        pytest.importorskip(name)
    model = randomize_(tiny('repa_deit_tiny')).to(device)
    with pytest.raises(ValueError, match='CPU'):
        timm_rep.quantize_ptq(model, [images(4, 32)], backend=backend)
    assert on(device, model)


@on_gpu
def test_compiled(device):
    """Outputs of a folded model, and gradients of a training step."""
    torch._dynamo.reset()
    model, x = family('repa_vit')
    folded, x = folded_copy(model).to(device), x.to(device, torch.float32)
    with torch.no_grad():
        assert relative(torch.compile(folded)(x), folded(x)) < 1e-3
    nets = [randomize_(tiny('repopt_vgg_a0')).to(device).train() for _ in range(2)]
    target, x = torch.arange(4, device=device), images(4).to(device)
    for net, call in zip(nets, (nets[0], torch.compile(nets[1]))):
        timm_rep.attach_grad_mults(net, normal_scales(net))
        optimizer = RepSGD(net.parameters(), lr=1e-3, momentum=.9)
        F.cross_entropy(call(x), target).backward()
        optimizer.step()
    start = randomize_(tiny('repopt_vgg_a0')).to(device).parameters()
    for ours, compiled, before in zip(*(net.parameters() for net in nets), start):
        assert not torch.equal(ours, before)
        assert (compiled - ours).norm() < 1e-2 * (ours - before).norm()
    torch._dynamo.reset()


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('rep', [RepSGD, RepAdamW])
def test_gradients_are_unscaled(rep, fused, device):
    params = kernels(device, torch.float32)
    expected = references(rep, params, 3, **plain_args(rep))
    optimizer = rep(params, fused=fused, **plain_args(rep))
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.)
    for i in range(3):
        set_gradients(params, i)
        for p in params:
            p.grad.mul_(1024.)
        scaler.scale(torch.zeros((), device=device))
        scaler.step(optimizer)
        scaler.update()
    check(params, expected, 1e-4)


@on_gpu
@pytest.mark.parametrize('fused', [False, True])
def test_grad_scaler(fused, device):
    """A step with infinite gradients leaves the weights as they were; later ones change them."""
    model = randomize_(tiny('repopt_vgg_a0')).to(device).train()
    timm_rep.attach_grad_mults(model, normal_scales(model))
    optimizer = RepSGD(model.parameters(), lr=1e-5, momentum=.9, weight_decay=1e-2, fused=fused)
    scaler = timm.utils.NativeScaler(device='cuda')
    kernel = next(iter(csla_layers(model).values())).weight
    params = list(model.parameters())

    def train(factor):
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        with torch.autocast('cuda', torch.float16):
            loss = F.cross_entropy(model(images(4).to(device)), torch.arange(4, device=device))
        scaler(loss * factor, optimizer, parameters=model.parameters())
        return [not torch.equal(p, b) for p, b in zip(params, before)]

    for _ in range(2):  # the first step, and one with momentum buffers
        scale = scaler.state_dict()['scale']
        assert not any(train(math.inf))
        assert scaler.state_dict()['scale'] < scale
        assert any(any(train(1.)) for _ in range(20))  # the scale may still be too large
        assert kernel.isfinite().all()
    assert all(p.isfinite().all() for p in params)
