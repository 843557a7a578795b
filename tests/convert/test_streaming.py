"""The forward pass during which FFNs are converted, and how the residual stream around an FFN is found."""
import os
import signal
import threading
import warnings

import pytest
import torch
import torch.nn as nn
from timm.layers import Mlp
from torch.multiprocessing import ProcessRaisedException

from tests.convert.families import build
from tests.convert.test_linearize import Unchanged, all_hooks, vit
from tests.distributed_worker import convert
from tests.helpers import images, in_processes, relative
from timm_rep import convert_to_repa
from timm_rep.convert import linearize_ffns
from timm_rep.convert.calibration import Share, TokenSampler
from timm_rep.convert.ffn import find_ffns
from timm_rep.convert.fitting import CalibrationRows, fit_ffn
from timm_rep.convert.least_squares import LeastSquares
from timm_rep.convert.residual import _FEW, _Activation, _Pending, _possible_streams, _scale_of, probe
from timm_rep.convert.streaming import ConvertingPass


def calibration_threads():
    return [thread for thread in threading.enumerate() if 'calibration' in thread.name]


def randomized(**kwargs):
    """A ViT with random norms and layer scales."""
    model = vit(init_values=.5, **kwargs)
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'norm' in name or 'ls' in name:
                p.add_(.3 * torch.randn(p.shape, generator=g))
    return model


def sampler_of(model, ffns, batches, count=5):
    probes = probe(model, ffns, batches[0][:4])
    return TokenSampler(probes, {ffn.name: count for ffn in ffns})


@torch.no_grad()
def test_tokens_belong_to_the_images():
    model, x = vit(), images(7, 32)
    ffns, _ = find_ffns(model)
    sampler = sampler_of(model, ffns, [x[:4], x[4:]])
    name = ffns[0].name
    held_out = torch.tensor([False, True, False])
    whole = sampler(name, Share(1, 3, slice(0, None, 1), x[4:], held_out), 51).view(3, 5)
    assert (whole // 17 == torch.arange(3)[:, None]).all()
    assert (whole[:, 0] % 17 == 0).all()  # the class token
    assert all(len(row.unique()) == 5 for row in whole)
    assert len({tuple((row % 17).tolist()) for row in whole}) > 1
    # a process that runs a part of a batch takes the same tokens of its images
    share = Share(1, 3, slice(1, None, 2), x[5:6], held_out[1:2])
    sampler = sampler_of(model, ffns, [x[:4], x[4:]])
    assert torch.equal(sampler(name, share, 17), whole[1] - 17)
    assert sampler.held_out(name, share, 17).tolist() == [True] * 5


@pytest.mark.parametrize('family', [
    'Mlp: vision_transformer', 'Mlp with convolutions: convnext', 'ConvMlp: fastvit', 'vision_transformer, dinov2',
    'GluMlp: mlp_mixer', 'ConvEncoder: swiftformer', 'swin', 'LevitMlp: levit',
    'SwiGLU with LayerNorm: eva', 'cait', 'xcit', 'poolformer'])
@torch.no_grad()
def test_residual_streams_are_found(family):
    model, x = build(family)
    x = x[:4]
    ffns, _ = find_ffns(model)
    probes = probe(model, ffns, x)
    assert not all_hooks(model)
    for ffn in ffns:
        residual = probes[ffn.name].residual
        if probes[ffn.name].calls > 1 or probes[ffn.name].tokens == 1:
            continue
        assert residual.scale.shape == (ffn.out_features,)
        assert residual.scale.abs().max() > .01


@pytest.mark.parametrize('rows', [5, 40, 128])
@pytest.mark.parametrize('size', [1e-8, 1., 1e8])
def test_few_rows_leave_out_no_stream(rows, size):
    """The errors of the sums are in the rows that are looked at first, and as large as a sum may have."""
    g = torch.Generator().manual_seed(0)
    y, noise = torch.randn(2, rows, 6, generator=g, dtype=torch.float64)
    noise[torch.arange(rows) % -(-rows // _FEW) != 0] = 0
    streams = torch.randn(4, rows, 6, generator=g, dtype=torch.float64)
    streams[0] *= 1e-3
    streams[3] *= 30
    scale = size * torch.tensor([1., -.5, 1., 2., 1e-3, 1.])
    before = [_Activation(None, False, False, rows, size * stream) for stream in streams]
    p = _Pending('', rows, y, before, 0)
    for eps in torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps:
        for i in 0, 1, 3:
            total = size * streams[i] + scale * y
            accepted = [
                a for a in torch.logspace(-6, 0, 40) if _scale_of(
                    total + a * size * noise, before[i].rows, y, eps) is not None]
            assert 1e-6 < max(accepted) < 1
            assert _possible_streams(total + max(accepted) * size * noise, p, eps) == [i]


@torch.no_grad()
def test_scales_belong_to_the_blocks():
    model = randomized()
    found = probe(model, find_ffns(model)[0], images(4, 32))
    for i, block in enumerate(model.blocks):
        residual = found[f'blocks.{i}.mlp'].residual
        assert residual.module is block.norm2
        assert residual.is_input
        torch.testing.assert_close(residual.scale.float(), block.ls2.gamma, rtol=1e-3, atol=1e-4)
        assert found[f'blocks.{i}.mlp'].prefix_tokens == 1
        assert found[f'blocks.{i}.mlp'].tokens == 17


class PostNorm(nn.Module):
    """norm(x + mlp(x)), with the FFN's own input as the stream."""

    def __init__(self, block):
        super().__init__()
        self.mlp, self.norm = block.mlp, block.norm2

    def forward(self, x, **kwargs):
        return self.norm(x + .5 * self.mlp(x))


class Scaled(PostNorm):
    """x + norm(mlp(x)), which is not a scaled addition."""

    def forward(self, x, **kwargs):
        return x + self.norm(self.mlp(x))


@torch.no_grad()
def test_post_norm():
    model, x = randomized(), images(40, 32)
    model.blocks = nn.Sequential(*(PostNorm(block) for block in model.blocks))
    found = probe(model, find_ffns(model)[0], x[:4])
    for name, seen in found.items():
        assert seen.residual.module is model.get_submodule(name)
        assert seen.residual.is_input
        torch.testing.assert_close(seen.residual.scale, torch.full((24,), .5, dtype=torch.float64), rtol=1e-3, atol=0)
    report = linearize_ffns(model, [x])
    assert report.ffns[1].correction_ridge is not None
    model = randomized()
    model.blocks = nn.Sequential(*(Scaled(block) for block in model.blocks))
    assert all(seen.residual is None for seen in probe(model, find_ffns(model)[0], x[:4]).values())
    report = linearize_ffns(model, [x])
    assert all(ffn.correction_ridge is None for ffn in report.ffns)


@torch.no_grad()
def test_damping_without_held_out_images():
    """The fit to the images themselves would choose the least damping."""
    with pytest.warns(UserWarning, match='hold some out'):
        report = linearize_ffns(randomized(), [images(16, 32)])
    assert [ffn.correction_ridge for ffn in report.ffns] == [1.] * len(report.ffns)


@torch.no_grad()
def test_the_stream_comes_closer_to_the_original_one():
    model, x = randomized(depth=4), images(96, 32)
    kwargs = dict(idle_ratio=.9)
    errors = []
    for compensate in (True, False):
        converted = randomized(depth=4)
        linearize_ffns(converted, [x[:64]], compensate=compensate, **kwargs)
        errors.append(relative(converted.forward_features(x[64:]), model.forward_features(x[64:])))
    assert errors[0] < errors[1]


@torch.no_grad()
def test_batches_go_on_with_the_converted_ffns():
    """The recorded tensors are as in a forward pass of the converted model, whatever the batches."""
    model, x = randomized(depth=3), images(20, 32)
    ffns, _ = find_ffns(model)
    batches = [x[:3], x[3:9], x[9:]]
    shares = [
        Share(i, len(batch), slice(None), batch, torch.arange(len(batch)) == 1) for i, batch in enumerate(batches)]
    sampler = sampler_of(model, ffns, batches)
    recorded, maps = {}, {}
    with ConvertingPass(model, ffns, shares, sampler) as converting:
        for ffn in ffns:
            recorded[ffn.name] = converting.run_until(ffn)
            maps[ffn.name] = ffn.exact()
            with torch.no_grad():
                maps[ffn.name].fc_out.weight.mul_(1.5)
            converting.convert(ffn, maps[ffn.name])
    assert not calibration_threads()
    assert not all_hooks(model)
    for i, block in enumerate(model.blocks):
        assert block.mlp is maps[f'blocks.{i}.mlp']
    inputs = {}
    hooks = [block.norm2.register_forward_hook(
        lambda _, args, y, i=i: inputs.setdefault(f'blocks.{i}.mlp', []).append((y, args[0])))
        for i, block in enumerate(model.blocks)]
    for batch in batches:
        model(batch)
    for hook in hooks:
        hook.remove()
    for name, ((u, held_out, *_), stream) in recorded.items():
        expected = [
            [sampler.take(name, share, t.reshape(-1, 24)) for t in pair] for pair, share in zip(inputs[name], shares)]
        torch.testing.assert_close(u, torch.cat([pair[0] for pair in expected]))
        assert held_out.tolist() == [i in (1, 4, 10) for i in range(20) for _ in range(5)]
        torch.testing.assert_close(stream, torch.cat([pair[1] for pair in expected]))


def test_an_interrupt_leaves_the_model_and_no_thread(monkeypatch):
    model, x = randomized(depth=3), images(20, 32)
    solve, calls = LeastSquares.solve, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            assert calibration_threads()
            raise KeyboardInterrupt
        return solve(*args, **kwargs)

    monkeypatch.setattr(LeastSquares, 'solve', interrupted)
    with Unchanged(model), pytest.raises(KeyboardInterrupt):
        linearize_ffns(model, list(x.split(6)))
    assert not calibration_threads()


class Interrupting(nn.Module):
    """Ctrl-C in the thread of a batch; the main thread gets it while it waits."""

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
        return x


@pytest.mark.skipif(os.name == 'nt', reason='needs signals')
def test_an_interrupt_while_a_batch_runs():
    model = randomized(depth=3)
    model.blocks[1].drop_path1 = Interrupting()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Unchanged(model), pytest.raises(KeyboardInterrupt):
            linearize_ffns(model, list(images(20, 32).split(6)))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not calibration_threads()


def test_many_small_batches_take_few_threads():
    counts = []
    model, expected, x = randomized(), randomized(), images(130, 32)
    model.blocks[1].register_forward_pre_hook(lambda *args: counts.append(len(calibration_threads())))
    linearize_ffns(model, x.split(1), .5)
    assert max(counts) == 44  # of three images
    linearize_ffns(expected, x.split(3), .5)
    assert relative(model(x), expected(x)) < 1e-5


class Failing(nn.Module):
    """Raises from the second pass of a batch on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += threading.current_thread() is not threading.main_thread()
        if self.calls > 1:
            raise ArithmeticError('of a layer')
        return x


def test_errors_of_a_layer_come_with_their_traceback():
    model = randomized(depth=3)
    model.blocks[1].drop_path1 = Failing()
    with Unchanged(model), pytest.raises(ArithmeticError, match='of a layer') as error:
        linearize_ffns(model, list(images(20, 32).split(5)))
    assert any('test_streaming' in str(entry.path) and entry.name == 'forward' for entry in error.traceback)
    assert not calibration_threads()


def test_autocast_holds_in_the_pass():
    model, x = randomized(), images(20, 32)
    seen = []
    model.blocks[1].attn.qkv.register_forward_hook(lambda m, args, y: seen.append((len(y), y.dtype)))
    with torch.autocast('cpu', torch.bfloat16):
        linearize_ffns(model, [x])
    # the few images that show the structure of the model are in float32
    assert {dtype for count, dtype in seen if count == 20} == {torch.bfloat16}
    assert {dtype for count, dtype in seen if count == 4} == {torch.float32}


@torch.no_grad()
def test_hooks_of_the_user_stay_and_see_the_batches():
    model, x, seen = randomized(), images(20, 32), []
    handle = model.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    linearize_ffns(model, list(x.split(5)))
    assert seen.count(5) == 8  # of the original and, replacing its FFNs, of the conversion
    assert len(model._forward_pre_hooks) == 1
    handle.remove()


@torch.no_grad()
def test_tokens_of_all_calls():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp(4, 8)

        def forward(self, x):
            return self.mlp(x[:, :3]).sum(1) + self.mlp(x).sum(1)

    model = Net().eval()
    seen = probe(model, find_ffns(model)[0], torch.randn(2, 5, 4))['mlp']
    assert (seen.tokens, seen.calls) == (3 + 5, 2)


@torch.no_grad()
def test_ffns_that_are_called_several_times():
    model, x = build('Mlp called several times: coat')
    ffns, _ = find_ffns(model)
    probes = probe(model, ffns, x[:4])
    assert {seen.calls for seen in probes.values()} == {1, 3} or max(seen.calls for seen in probes.values()) > 1
    report = linearize_ffns(model, [x], .25)
    assert {ffn.name for ffn in report.ffns} == {*probes}


@pytest.mark.parametrize('kwargs', [
    dict(idle_ratio=.7), pytest.param(dict(macs=.75), marks=pytest.mark.slow)])
def test_two_processes_share_the_images(kwargs, tmp_path):
    in_processes(1, convert, tmp_path / 'one', kwargs)
    in_processes(2, convert, tmp_path / 'two', kwargs)
    expected, report = torch.load(tmp_path / 'one.0')
    found = [torch.load(tmp_path / f'two.{rank}') for rank in range(2)]
    assert report['ffns'][1]['held_out'] > 0
    for weights, other_report in found:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(value, found[0][0][name]) for name, value in weights.items())
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-8)
        for ffn, other in zip(report['ffns'], other_report['ffns']):
            assert other['lost_variance'] == pytest.approx(ffn['lost_variance'], rel=1e-6)


@pytest.mark.slow
def test_more_processes_than_images():
    with pytest.raises(ProcessRaisedException, match='an image for each of 2 processes'):
        in_processes(2, linearize_one, None)


def linearize_one(_):
    linearize_ffns(vit(), [images(1, 32)])


@pytest.mark.parametrize('x, message', [
    (images(16, 32), 'too few to hold some out'),
    (images(16, 32).bfloat16(), 'too few to hold some out'),
    (images(12, 32).repeat(3, 1, 1, 1), 'too few to hold some out'),
    (images(24, 32).repeat(3, 1, 1, 1), 'Only 24 of the 72'),
    (images(1, 32) + 1e-3 * images(24, 32), 'same class'),
])
@pytest.mark.parametrize('convert', [linearize_ffns, convert_to_repa])
def test_images_that_say_little_about_others(x, message, convert):
    with pytest.warns(UserWarning, match=message) as found:
        report = convert(vit(), calibration=[x]) if convert is convert_to_repa else convert(vit(), [x])
    assert found[0].filename == __file__
    assert (report.ffns[0].held_out is None) == (len(x.unique(dim=0)) < 20)


@pytest.mark.slow
def test_a_class_for_each_process():
    in_processes(2, linearize_two_classes, None)


def linearize_two_classes(_):
    """The images of either process, every second one, are of one class; together, they are of two."""
    model, x = vit(), images(48, 32)
    x[1::2] += 4
    with torch.no_grad():
        features = model.forward_head(model.forward_features(x), pre_logits=True)
        model.head.weight.zero_()
        model.head.weight[0] = features[1::2].mean(0) - features[::2].mean(0)
        model.head.bias[1] = model.head.weight[0] @ features.mean(0)
        assert model(x).argmax(1).tolist() == [1, 0] * 24
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*same class')
        linearize_ffns(model, [x])


def test_a_fit_that_does_not_hold_for_others():
    with pytest.warns(UserWarning, match=r'held-out images .* about 120'):
        report = linearize_ffns(randomized(depth=2), [images(24, 32)], .9, tokens_per_image=2, ridge=1e-6)
    assert any(ffn.held_out > 1.5 * ffn.lost_variance for ffn in report.ffns)
    assert report.recommended_images == 120
    assert '120 are recommended' in str(report)


def test_an_image_is_held_out_with_its_duplicates():
    """Else a fit to half of them would seem to hold for others."""
    x = images(20, 32)
    reports = [linearize_ffns(randomized(), [batch], tokens_per_image=17) for batch in (x, torch.cat([x, x]))]
    for one, two in zip(*(report.ffns for report in reports)):
        assert two.held_out == pytest.approx(one.held_out, rel=1e-3)


def test_the_last_fit_is_to_all_rows():
    torch.manual_seed(0)
    ffn = find_ffns(randomized().double())[0][0]
    u, held_out = torch.randn(300, 24, dtype=torch.float64), torch.arange(300) % 5 == 4
    y = ffn.module(u).detach()
    for rows in (CalibrationRows(u, held_out), CalibrationRows(u, torch.zeros_like(held_out))):
        fitted, _ = fit_ffn(ffn, rows, 48, ridge=1e-12)
        with torch.no_grad():
            parts = [fitted.act(fitted.fc_in(u)), torch.ones(300, 1), *([u] if fitted.has_idle else [])]
            design = torch.cat(parts, 1).double()
            expected = design @ torch.linalg.lstsq(design, y).solution
            assert relative(fitted(u), expected) < 1e-6


def test_the_form_that_is_better_on_held_out_images():
    report = linearize_ffns(randomized(depth=4), [images(48, 32)], .8)
    for ffn in report.ffns:
        assert ffn.held_out <= ffn.other_held_out
        assert ffn.compensated
        assert 0 < ffn.linear_share < 1
    assert all(ffn.name in str(report) for ffn in report.ffns)
    report = linearize_ffns(randomized(), [images(48, 32)], .8, compensate=False)
    assert not any(ffn.compensated for ffn in report.ffns)
    assert 'without compensation' in str(report)
