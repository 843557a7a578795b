"""quantize_ptq and quantize_qat: what they compute, what they report, what they refuse."""
import copy
import gc
import importlib.metadata
import json
import os
import sys
import warnings
import zipfile
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn

import timm_rep
from tests.helpers import images, randomize_, relative, run, same_weights, tiny
from timm_rep.deploy import (
    BACKENDS,
    REPORT_NAME,
    VERIFICATION_NAME,
    Exported,
    Quantized,
    check_target,
    load_quantized,
    quantize_qat,
    quantized_files,
    read_report,
)
from timm_rep.deploy.formats import package_versions
from timm_rep.deploy.program import QuantizationSettings, output_structure, restore_structure
from timm_rep.utils.data import Images

pytest.importorskip('torchao')


@pytest.fixture(scope='module')
def calibration():
    return [images(4, seed=1), images(4, seed=2)]


@pytest.fixture(scope='module')
def model():
    return randomize_(tiny('repopt_vgg_a0'))


@pytest.fixture(scope='module')
def quantized(model, calibration):
    return timm_rep.quantize_ptq(model, calibration, validation_loader=[(x, torch.zeros(len(x))) for x in calibration])


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}


@torch.no_grad()
def simulated(model, calibration, x, per_channel=True):
    """Outputs with inputs and weights of all layers rounded to eight bits, ranges of 'minmax'.

    Multiplied by the inverse of a step, as torch does: the largest weight of a channel is a tie. Inputs have seven bits
    on CPUs without VNNI.
    """
    levels = 255 if torch.cpu._is_vnni_supported() else 127
    model = copy.deepcopy(model)
    ranges = {}

    def observe(layer, args):
        seen = (*ranges.get(layer, ()), args[0].min(), args[0].max(), torch.tensor(0.))
        ranges[layer] = min(seen), max(seen)

    hooks = [layer.register_forward_pre_hook(observe) for layer in layers(model).values()]
    for batch in calibration:
        model(batch)
    for hook in hooks:
        hook.remove()
    for layer in layers(model).values():
        w = layer.weight.flatten(1)
        largest = torch.maximum(w.amax(1) / 127.5, -w.amin(1) / 127.5)  # torchao's symmetric scale, of 255 steps
        scale = (largest if per_channel else largest.max().expand_as(largest)).unflatten(0, (-1, *[1] * (w.ndim - 1)))
        layer.weight.copy_(((w * (1 / scale)).round().clamp(-128, 127) * scale).view_as(layer.weight))
        low, high = ranges[layer]
        step = (high - low) / levels
        zero = (-low / step).round()

        def round_input(layer, args, step=step, zero=zero):
            return (((args[0] * (1 / step)).round() + zero).clamp(0, levels) - zero) * step

        layer.register_forward_pre_hook(round_input)
    return model(x)


def test_computes_what_rounding_computes(model, quantized, calibration):
    before = copy.deepcopy(model)
    folded = timm.utils.reparameterize_model(model)
    x = images(4, seed=3)
    expected = simulated(folded, calibration, x)
    assert relative(model(x), expected) > 1e-3
    assert relative(quantized(x), expected) < 1e-4
    assert same_weights(model, before)
    assert not model.training


def test_per_tensor_weights(model, calibration):
    from timm_rep.deploy.inductor import InductorProgram

    folded = timm.utils.reparameterize_model(model)
    x = images(4, seed=3)
    graph = InductorProgram.quantize(folded, calibration, QuantizationSettings(False, 'minmax', 100.)).graph
    assert relative(graph(x), simulated(folded, calibration, x, per_channel=False)) < 1e-5


class Clamped(nn.Module):
    def __init__(self, bounds):
        super().__init__()
        self.a, self.b, self.bounds = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3), bounds

    def forward(self, x):
        return self.b(self.a(x).clamp(*self.bounds))


@pytest.mark.parametrize('bounds', [
    (.1, 1.),
    *(pytest.param(bounds, marks=pytest.mark.slow) for bounds in ((-.5, .7), (.5,), (None, -.3), (-2., -.1), (0., 6.))),
], ids=str)
def test_clamps_whose_bounds_exclude_zero(bounds):
    """The range of an int8 tensor has 0 in it, so it cannot stand for these bounds."""
    torch.manual_seed(0)
    report = timm_rep.quantize_ptq(Clamped(bounds).eval(), [images(8, 16)], 'onnxruntime').report
    assert report.int8_layers == ['a', 'b']
    assert 1e-4 < report.relative_rms < .03


class Shared(nn.Module):
    """A layer that is called twice, each call followed by a BatchNorm of its own, as in heads of detectors."""

    def __init__(self):
        super().__init__()
        self.conv, self.norms = nn.Conv2d(3, 8, 3), nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x):
        return [norm(self.conv(y)) for norm, y in zip(self.norms, (x, x[:, :, ::2, ::2]))]


@torch.no_grad()
def test_layer_that_is_called_twice():
    from timm_rep.deploy.inductor import InductorProgram

    torch.manual_seed(0)
    model, x = randomize_(Shared()), images(4)
    outputs = InductorProgram.quantize(model, [x], QuantizationSettings(True, 'minmax', 100.)).graph(x)
    for y, expected in zip(outputs, model(x), strict=True):
        assert 1e-4 < relative(y, expected) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize('backend', BACKENDS)
def test_layer_that_is_called_twice_runs_in_int8(backend):
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    torch.manual_seed(0)
    quantized = timm_rep.quantize_ptq(randomize_(Shared()), [images(4)], backend)
    assert (quantized.report.int8_layers, quantized.report.float_layers) == (['conv'], {})
    assert 1e-4 < quantized.report.relative_rms < 0.03


@pytest.mark.slow
def test_calibration_in_small_batches(monkeypatch):
    """Large batches of the loader are split: ONNX Runtime holds all activations of a batch at once."""
    ort = pytest.importorskip('onnxruntime')
    torch.manual_seed(0)
    model, batches, seen = randomize_(Shared()), [images(13, seed=1), images(4, seed=2)], []
    real = ort.InferenceSession.run

    def run(session, names, feeds):
        seen.append((len(names or ()), len(*feeds.values())))
        return real(session, names, feeds)

    monkeypatch.setattr(ort.InferenceSession, 'run', run)
    whole = timm_rep.quantize_ptq(model, batches, 'onnxruntime')
    sizes = [size for names, size in seen if names > 2]
    assert max(sizes) <= 8
    assert sum(sizes) == 17
    single = timm_rep.quantize_ptq(model, [x for batch in batches for x in batch.split(1)], 'onnxruntime')
    for y, expected in zip(whole(batches[0]), single(batches[0]), strict=True):
        assert torch.equal(y, expected)


@pytest.mark.slow
def test_any_batch_size_in_any_mode(quantized):
    x = images(5, seed=3)
    y = quantized(x)
    for n in (1, 2, 3):
        torch.testing.assert_close(quantized(x[:n]), y[:n])
    with torch.inference_mode():
        torch.testing.assert_close(quantized(images(5, seed=3)), y)


class Gray(nn.Module):
    """Convolutions of one channel: of images, with an attention over the channels (ECA), and one over the pixels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, stride=2)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.channels = nn.Conv1d(1, 1, 3, padding=1)
        self.mask = nn.Conv2d(32, 1, 1)
        self.pixels = nn.Conv2d(1, 1, 3, padding=1, bias=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.depthwise(self.norm(self.stem(x)).relu())
        x = x * self.channels(x.mean((2, 3)).unsqueeze(1)).sigmoid().transpose(1, 2).unsqueeze(3)
        return self.head((x * self.pixels(self.mask(x)).sigmoid()).mean((2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize('keep_float', [(), ('stem', 'pixels')])
def test_inputs_with_one_channel(keep_float, tmp_path):
    """inductor's kernels refuse them when the batch size varies, in int8 and in float; those of conv1d are wrong."""
    torch.manual_seed(0)
    model, x = randomize_(Gray()), images(4, 31)[:, :1]
    quantized = timm_rep.quantize_ptq(model, [x], calibrator='percentile', keep_float=keep_float)
    layers = 'stem', 'depthwise', 'mask', 'pixels', 'head'
    assert quantized.report.int8_layers == [name for name in layers if name not in keep_float]
    assert quantized.report.float_layers == {**dict.fromkeys(keep_float, 'conv2d'), 'channels': 'conv1d'}
    quantized.save(tmp_path)
    for program in quantized, load_quantized(tmp_path):
        for n in (1, 2, 4):
            assert relative(program(x[:n]), model(x[:n]).detach()) < .05


def test_report(model, quantized, calibration):
    report = quantized.report
    folded = timm.utils.reparameterize_model(model)
    assert report.int8_layers == list(layers(folded))
    assert report.float_layers == {}
    assert (report.images, report.input_size, report.backend) == (8, (3, 64, 64), 'inductor')
    y, q = model(calibration[0]), quantized(calibration[0])
    assert report.relative_rms == pytest.approx(((q - y).norm() / y.norm()).item(), rel=1e-3)
    predicted = [torch.cat([f(x) for x in calibration]).argmax(1) for f in (model, quantized)]
    assert [report.accuracy.fp32, report.accuracy.int8] == [
        round((p == 0).float().mean().item() * 100, 2) for p in predicted]
    assert 'int8: 8 convolutions and linear layers\nfloat32: no convolutions and matrix products' in str(report)


def test_saved_and_loaded(quantized, tmp_path):
    quantized.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['model.pt2', REPORT_NAME]
    loaded = load_quantized(tmp_path)
    assert loaded.report == quantized.report
    x = images(4, seed=4)
    torch.testing.assert_close(loaded.program.graph(x), quantized(x))  # before it is compiled


class Written:
    """A program that is written at once."""

    def write(self, path):
        path.write_text('program')


@pytest.mark.parametrize('backend', [
    pytest.param(name, marks=() if name == 'onnxruntime' else pytest.mark.slow) for name in BACKENDS])
def test_copies_outlive_the_model(backend, tmp_path):
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    torch.manual_seed(0)
    quantized, x = timm_rep.quantize_ptq(nn.Conv2d(3, 4, 3).eval(), [images(2, 8)], backend), images(1, 8)
    expected, copied = quantized(x), copy.deepcopy(quantized)
    del quantized
    gc.collect()
    copied.save(tmp_path)
    assert torch.equal(copied(x), expected)
    assert torch.equal(load_quantized(tmp_path)(x), expected)


def test_the_model_of_another_backend_goes(quantized, tmp_path):
    """With the form that is replaced; a file of that name that is not of one stays."""
    quantized = Quantized(Written(), quantized.report)
    (tmp_path / 'model.onnx').write_text('exported')
    quantized.save(tmp_path)
    assert (tmp_path / 'model.onnx').read_text() == 'exported'
    report = json.loads((tmp_path / REPORT_NAME).read_text())
    (tmp_path / REPORT_NAME).write_text(json.dumps({**report, 'backend': 'onnxruntime'}))
    (tmp_path / 'model.onnx.data').write_text('weights')
    names = {'model.onnx', 'model.onnx.data', 'model.pt2', REPORT_NAME}
    assert {path.name for path in quantized_files(tmp_path)} == names
    quantized.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'model.pt2', REPORT_NAME}
    (tmp_path / REPORT_NAME).write_text('damaged')
    quantized.save(tmp_path)
    assert read_report(tmp_path) == quantized.report


def test_exported_files_beside_it(model, quantized, tmp_path):
    """None takes the place of the int8 model, and where it takes the place of one, that one's report goes."""
    quantized = Quantized(Written(), quantized.report)
    for name in 'model.pt2.verify.json', 'other.pt2.verify.json', 'verify.json':
        (tmp_path / name).write_text('{}')
    quantized.save(tmp_path)
    names = {'model.pt2', REPORT_NAME, 'other.pt2.verify.json', 'verify.json'}
    assert {path.name for path in tmp_path.iterdir()} == names
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r'model\.pt2.* int8 model'):
        timm_rep.export(model, tmp_path / 'model.pt2', format='pt2')
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    check_target(tmp_path / 'other.pt2', 'pt2')
    check_target(tmp_path / 'model.onnx', 'onnx')  # that of another backend


def test_a_folder_that_openvino_was_exported_to(quantized, tmp_path):
    report = Exported('openvino', 'resnet18', True, ['batch', 3, 8, 8], 1e-4, {}, {}, 'cpu', {})
    for backend, left in ('inductor', True), ('openvino', False):
        report.to_json(tmp_path / VERIFICATION_NAME)
        Quantized(Written(), replace(quantized.report, backend=backend)).save(tmp_path)
        assert (tmp_path / VERIFICATION_NAME).exists() == left


@pytest.mark.slow
@pytest.mark.parametrize('bits', [7, 8])
def test_a_program_of_a_cpu_with_vnni(model, calibration, tmp_path, monkeypatch, bits):
    monkeypatch.setattr(torch.cpu, '_is_vnni_supported', lambda: bits == 8)
    timm_rep.quantize_ptq(model, calibration).save(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        load_quantized(tmp_path)
        monkeypatch.setattr(torch.cpu, '_is_vnni_supported', lambda: False)
        load_quantized(tmp_path)
    found = [str(w.message) for w in caught if 'quantized on a CPU with VNNI' in str(w.message)]
    assert len(found) == (bits == 8)


@pytest.mark.slow
def test_layers_of_a_program_that_was_called():
    """inductor generates code for the first call only; each kernel found there is one layer's."""
    from timm_rep.deploy.inductor import InductorProgram, _take

    torch.manual_seed(0)
    program = InductorProgram.quantize(
        nn.Conv2d(16, 8, 3).eval(), [torch.ones(2, 16, 8, 8)], QuantizationSettings(True, 'minmax', 100.))
    x = images(2, 8).repeat(1, 6, 1, 1)[:, :16]
    y = program(x)
    for _ in range(2):
        assert program.layers(x)[1] == {}
    assert torch.equal(program(x), y)
    scales = [torch.ones(8), torch.zeros(8)]
    assert [_take(scales, scale) for scale in (torch.zeros(8), torch.zeros(8), None)] == [True, False, False]
    assert len(scales) == 1


def test_outputs_of_onnxruntime_are_nested_as_the_models(tmp_path):
    """And a convolution's output keeps its negative values where not only a ReLU reads it."""
    pytest.importorskip('onnxruntime')

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            return {'maps': [y, y.relu()], 'sum': (x.sum((2, 3)),)}

    torch.manual_seed(0)
    model, x = Nested().eval(), images(2, 8)
    quantized = timm_rep.quantize_ptq(model, [x], 'onnxruntime')
    quantized.save(tmp_path)
    for found in (quantized(x), load_quantized(tmp_path)(x)):
        assert isinstance(found['maps'], list)
        assert isinstance(found['sum'], tuple)
        for y, expected in zip((*found['maps'], *found['sum']), (*model(x)['maps'], *model(x)['sum']), strict=True):
            assert relative(y, expected.detach()) < 0.05

    class Constant(Nested):
        def forward(self, x):
            return self.conv(x), 'name'

    with pytest.raises(RuntimeError, match=r'outputs are tensors .* got str'):
        timm_rep.quantize_ptq(Constant().eval(), [x], 'onnxruntime')


class Shortcut(nn.Module):
    """Shortcuts around a linear layer and a convolution, both of little weight."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 1), nn.Linear(3, 3)
        for layer in (self.conv, self.fc):
            layer.weight.data.mul_(1e-3)
            layer.bias.data.zero_()

    def forward(self, x):
        x = (x + self.conv(x)).flatten(2).transpose(1, 2)
        return x + self.fc(x)


def test_shortcuts_stay_in_float_in_onnxruntime():
    """Other readers of the input of a layer are not rounded: the error is less than a step of 8 bits."""
    pytest.importorskip('onnxruntime')
    torch.manual_seed(0)
    quantized = timm_rep.quantize_ptq(Shortcut().eval(), [images(4, 8)], 'onnxruntime')
    assert sorted(quantized.report.int8_layers) == ['conv', 'fc']
    assert quantized.report.relative_rms < 1e-4


def test_ranges_of_onnxruntime():
    """Lowest and highest value that scale and zero point represent, not the zero point's distance from the highest."""
    onnx, _ = pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
    from timm_rep.deploy.observers import ACTIVATION_OBSERVERS
    from timm_rep.deploy.ort import _ranges

    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[None, 4])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node('Neg', ['input'], ['output'])], 'graph', [value('input')], [value('output')])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid('', 18)], ir_version=10)
    x = torch.tensor([[-1., 0., 1., 3.]])
    ranges = _ranges(model, ['input', 'output'], [x, x / 2], lambda: ACTIVATION_OBSERVERS['minmax'](
        dtype=torch.uint8, qscheme=torch.per_tensor_affine, quant_min=0, quant_max=255))
    step = 4 / 255
    found = {name: [float(y) for y in (data.lowest, data.highest)] for name, data in ranges.items()}
    assert found['input'] == pytest.approx([-1, 3], abs=step)
    assert found['output'] == pytest.approx([-3, 1], abs=step)


def test_pickled_values_are_refused(quantized, tmp_path):
    """torch.export.load would unpickle them."""
    quantized.save(tmp_path)
    path = tmp_path / 'model.pt2'
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    config = next(name for name in entries if name.endswith('model_weights_config.json'))
    weights = json.loads(entries[config])
    next(iter(weights['config'].values()))['use_pickle'] = True
    inputs = next(name for name in entries if name.endswith('model.pt'))
    code = f'{inputs.partition("/")[0]}/data/aotinductor/model/model.so'
    for change in ({config: json.dumps(weights)}, {inputs: b'cos\nsystem\n(S"false"\ntR.'}, {code: b'\x7fELF'}):
        with zipfile.ZipFile(path, 'w') as archive:
            for name, content in {**entries, **change}.items():
                archive.writestr(name, content)
        with pytest.raises(RuntimeError, match='must be a quantized program of this package, but '):
            load_quantized(tmp_path)
    with zipfile.ZipFile(path, 'w') as archive, warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name, content in (*entries.items(), (config, json.dumps(weights))):  # torch may read the second one
            archive.writestr(name, content)
    with pytest.raises(RuntimeError, match='several entries of the same name'):
        load_quantized(tmp_path)
    with zipfile.ZipFile(path, 'w') as archive:
        for name, content in {**entries, 'version': '8.0', 'serialized_state_dict.json': 'pickled'}.items():
            archive.writestr(name, content)
    with pytest.raises(RuntimeError, match='must be a quantized program of this package'):
        load_quantized(tmp_path)
    with zipfile.ZipFile(path, 'w') as archive:  # an entry that a newer torch may add
        for name, content in {**entries, f'{inputs.partition("/")[0]}/data/new/tensors.bin': '0'}.items():
            archive.writestr(name, content)
    load_quantized(tmp_path)
    path.write_bytes(b'PK')
    with pytest.raises(RuntimeError, match='must be a quantized program of this package: BadZipFile'):
        load_quantized(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r'model\.pt2'):
        load_quantized(tmp_path)
    with pytest.raises(FileNotFoundError, match=r'has no quantization\.json'):
        load_quantized(tmp_path / 'missing')


def test_wrong_images(quantized):
    with pytest.raises(ValueError, match=r'images of size \(N, 3, 64, 64\), but got \(2, 3, 32, 32\)'):
        quantized(images(2, 32))
    with pytest.raises(ValueError, match='an empty batch'):
        quantized(torch.zeros(0, 3, 64, 64))
    with pytest.raises(ValueError, match=r'float32 images on the CPU, but got torch\.float64 on cpu'):
        quantized(images(2).double())
    with pytest.raises(ValueError, match='train the float model'):
        quantized.train()


@pytest.mark.parametrize('kwargs, message', [
    (dict(backend='tensorrt'), "backend must be one of 'inductor', 'onnxruntime'.* got 'tensorrt'"),
    (dict(calibrator='mse'), "calibrator must be one of 'minmax', .* got 'mse'"),
    (dict(percentile=10), 'percentile must be .* got 10'),
    (dict(percentile='x'), "percentile must be .* got 'x'"),
    (dict(max_images=0), 'max_images must be an integer >= 1, got 0'),
])
def test_wrong_settings(model, calibration, kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm_rep.quantize_ptq(model, calibration, **kwargs)


def test_wrong_models_and_loaders(model, quantized, calibration):
    def refused(model, loader, message, error=ValueError):
        with pytest.raises(error, match=message):
            timm_rep.quantize_ptq(model, loader)

    refused('repopt_vgg_a0', calibration, 'model must be a module', TypeError)
    refused(copy.deepcopy(model).train(), calibration, 'RepOptVgg must be in eval mode: call model.eval')
    refused(tiny('repopt_vgg_a0', device='meta').eval(), calibration, 'meta device')
    refused(copy.deepcopy(model).half(), calibration, r'got weights in torch\.float16')
    refused(quantized, calibration, 'float model, but Quantized is quantized')
    refused(nn.Sequential(quantized, nn.Linear(5, 2)).eval(), calibration, 'is quantized')
    refused(model, [], 'calibration loader')
    refused(model, [{'label': 3}], 'Expected a batch', TypeError)
    refused(model, [images(2), images(2, 32)], r'of one size, got \(2, 3, 32, 32\) and.*\(2, 3, 64, 64\)')
    refused(model, [images(2) * float('nan')], 'Calibration images must be finite')
    annealed = timm.create_model(
        'repa_any', base='deit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3,
        num_classes=5, anneal_steps=5).eval()
    refused(annealed, [images(2, 32)], 'step')


def test_all_of_an_error_is_told(model, calibration, monkeypatch):
    from timm_rep.deploy.inductor import InductorProgram

    def fail(*args, **kwargs):
        raise RuntimeError('Failed.\nThe cause')

    monkeypatch.setattr(InductorProgram, 'quantize', fail)
    with pytest.raises(RuntimeError, match=r"RepOptVgg with 'inductor'(.|\n)*The cause"):
        timm_rep.quantize_ptq(model, calibration)


@pytest.mark.slow
def test_errors_of_the_program_on_validation_images(model, quantized, calibration, monkeypatch):
    class OtherBatchSize(type(quantized.program)):
        def __call__(self, images):
            if len(images) == 3:
                raise AssertionError('expected size 3')
            return super().__call__(images)

    monkeypatch.setattr('timm_rep.deploy.quantize._program', lambda name: OtherBatchSize)
    with pytest.raises(RuntimeError, match="Cannot quantize RepOptVgg with 'inductor': AssertionError: expected size"):
        timm_rep.quantize_ptq(model, calibration, validation_loader=[(images(3), torch.zeros(3))])


@pytest.mark.parametrize('loader, error, message', [
    ([], ValueError, 'the loader has none'),
    ([images(2)], TypeError, r'images \(N, C, H, W\) and labels \(N,\), .* got \(2, 3, 64, 64\)\.'),
    ([{'image': images(2), 'label': torch.zeros(2)}], TypeError, 'and labels .* got dict'),
    ([(images(2), torch.zeros(2, 5))], TypeError, r'and labels .* got \(2, 3, 64, 64\), \(2, 5\)'),
    ([(images(2, 32), torch.zeros(2))], ValueError, r'size \(3, 64, 64\), got \(3, 32, 32\)'),
    (iter([(images(2), torch.zeros(2))]), TypeError, 'got an iterator'),
    ([(images(2) * float('nan'), torch.zeros(2))], ValueError, 'validation_loader must have finite images'),
    ([(images(2).double(), torch.zeros(2))], ValueError, r'in float32 .* got \(3, 64, 64\) in torch\.float64'),
    ([(images(2), torch.tensor([0, 5]))], ValueError, 'labels from 0 to 4, got 0 to 5'),
    ([(images(2), torch.tensor([-1, 0]))], ValueError, 'labels from 0 to 4, got -1 to 0'),
])
def test_wrong_validation_loaders(model, calibration, loader, error, message, monkeypatch):
    """Refused before the model is quantized."""
    from timm_rep.deploy.inductor import InductorProgram

    monkeypatch.delattr(InductorProgram, 'quantize')
    with pytest.raises(error, match=message):
        timm_rep.quantize_ptq(model, calibration, validation_loader=loader)


@pytest.mark.parametrize('build', [
    lambda x: x, lambda x: [x], lambda x: {'a': x}, lambda x: (x, [x + 1, {'b': x + 2}])])
def test_structure_of_the_outputs(build):
    """A runtime returns one tensor, or a list of several."""
    class Net(nn.Module):
        def forward(self, x):
            return build(x)

    x = torch.arange(3.)[:, None]
    leaves = torch.utils._pytree.tree_leaves(build(x))
    restored = restore_structure(leaves if len(leaves) > 1 else leaves[0], output_structure(Net(), x))
    assert str(restored) == str(build(x))


_WITHOUT_VNNI = '''
import torch, timm_rep
torch.cpu._is_vnni_supported = lambda: False
layer = torch.nn.Conv2d(16, 8, 3)
torch.nn.init.constant_(layer.weight, .1)
x = torch.ones(2, 16, 8, 8)
print(timm_rep.quantize_ptq(layer.eval(), [x]).report.relative_rms)
'''


@pytest.mark.slow
def test_does_not_saturate_without_vnni():
    """oneDNN with kernels for an older CPU: two products of 8 bits, 255 * 127, exceed their 16 bits."""
    env = {**os.environ, 'ONEDNN_MAX_CPU_ISA': 'AVX2'}
    assert float(run([sys.executable, '-c', _WITHOUT_VNNI], env=env).splitlines()[-1]) < 0.01


def test_a_model_frozen_for_inference_is_trained_as_a_whole(images, monkeypatch):
    """Folding makes new convolutions, which are not frozen, unlike the other layers."""
    class Reached(Exception):
        pass

    def distil(student, *args, **kwargs):
        frozen.extend(name for name, p in student.named_parameters() if not p.requires_grad)
        raise Reached

    frozen = []
    monkeypatch.setattr('timm_rep.deploy.quantize.distil', distil)
    for name, args in (
            ('repvit_m0_9', dict(embed_dim=(16, 24), depth=(1, 1))),
            ('repopt_vgg_a0', dict(depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8))):
        model = timm.create_model(name, num_classes=4, **args).eval().requires_grad_(False)
        data = Images(model, str(images), val_split='validation', batch_size=10, img_size=32)
        with pytest.raises(Reached):
            quantize_qat(model, data, 1)
        assert not frozen
        assert not any(p.requires_grad for p in model.parameters())


class Dead(nn.Module):
    """A classifier without gradients in its first layer, whose outputs do not pass the ReLU."""

    num_classes, pretrained_cfg = 4, dict(input_size=(3, 8, 8))

    def __init__(self):
        super().__init__()
        self.dead, self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Linear(4, 4)
        nn.init.constant_(self.dead.bias, -100.)

    def forward(self, x):
        return self.head((self.conv(x) + self.dead(x).relu()).mean((2, 3)))


def test_quantization_aware_training(images, monkeypatch):
    """Trains what has a gradient, decays no weight, and leaves the model as it is."""
    from timm_rep.deploy.inductor import InductorProgram

    monkeypatch.setattr(InductorProgram, '__call__', lambda self, x: self.graph(x))  # nothing is compiled
    torch.manual_seed(0)
    model = Dead().eval()
    before = copy.deepcopy(model)
    data = Images(model, str(images), val_split='validation', batch_size=10, img_size=8)
    with pytest.raises(ValueError, match='checkpoint must be given with resume=True'):
        quantize_qat(model, data, 1, resume=True)
    quantized = quantize_qat(model, data, 1, lr=.1, validation_loader=data.validation())
    assert same_weights(model, before)
    report = quantized.report
    assert (report.qat_epochs, report.images, report.accuracy.images) == (1, 20, 8)
    scales = [
        x.flatten() for name, x in quantized.program.graph.state_dict().items()
        if 'scale' in name and x.numel() == 4]
    dead, *others = ((layer.weight.flatten(1).abs().amax(1) / 127.5) for layer in (model.dead, model.conv, model.head))
    assert any(torch.allclose(scale, dead, rtol=1e-6, atol=0) for scale in scales)
    assert not any(torch.allclose(scale, other, rtol=1e-3) for scale in scales for other in others)


def padded_in_words():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding='same'), nn.ReLU(),
        nn.Conv2d(8, 8, (3, 7), padding='same', dilation=(2, 1), groups=8), nn.ReLU(),
        nn.Conv2d(8, 8, 2, padding='same'), nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2, padding='valid', bias=False)).eval(), images(6, 21)[:, :1]


@torch.no_grad()
def test_convolutions_with_padding_in_words():
    """Such as ConvMixer's; 'same' with an even kernel, which pads one side more, stays in float."""
    from timm_rep.deploy.inductor import InductorProgram

    model, x = padded_in_words()
    graph = InductorProgram.quantize(model, [x], QuantizationSettings(True, 'minmax', 100.)).graph
    assert sum('dequantize_per_channel' in str(node.target) for node in graph.graph.nodes) == 3
    assert 1e-4 < relative(graph(x), model(x)) < .05


@pytest.mark.slow
def test_convolutions_with_padding_in_words_run_in_int8(tmp_path):
    model, x = padded_in_words()
    quantized = timm_rep.quantize_ptq(model, [x], diagnose=True)
    assert quantized.report.int8_layers == ['0', '2', '6']
    assert quantized.report.float_layers == {'4': 'conv2d'}
    quantized.save(tmp_path)
    for program in quantized, load_quantized(tmp_path):
        for n in (1, 3):
            y = x[:n].contiguous(memory_format=torch.channels_last)
            assert relative(program(y), model(y).detach()) < .05


def test_package_of_another_name(monkeypatch):
    """onnxruntime-gpu holds the module onnxruntime."""
    found = importlib.metadata.version

    def version(name):
        if name == 'onnxruntime':
            raise importlib.metadata.PackageNotFoundError(name)
        return '9.8' if name == 'onnxruntime-gpu' else found(name)

    monkeypatch.setattr(importlib.metadata, 'version', version)
    monkeypatch.setattr(importlib.metadata, 'packages_distributions', lambda: {'onnxruntime': ['onnxruntime-gpu']})
    assert package_versions(BACKENDS['onnxruntime'])['onnxruntime'] == '9.8'


def test_missing_package(monkeypatch, model, calibration):
    import importlib.util

    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"'inductor' requires torchao: pip install torchao"):
        timm_rep.quantize_ptq(model, calibration)


def test_other_files_of_the_folder_stay_as_they_are(quantized, tmp_path):
    """A log that is being written, a script, a private file, a link to a folder."""
    for name, mode in ('run.sh', 0o755), ('secret', 0o600):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / 'data').symlink_to(tmp_path.parent)
    with open(tmp_path / 'log.txt', 'w') as log:
        for _ in range(2):
            quantized.save(tmp_path)
        log.write('report')
    assert (tmp_path / 'log.txt').read_text() == 'report'
    assert (tmp_path / 'run.sh').stat().st_mode & 0o777 == 0o755
    assert (tmp_path / 'secret').stat().st_mode & 0o777 == 0o600
    assert (tmp_path / 'data').is_symlink()
    load_quantized(tmp_path)
