"""Error that int8 adds in each layer, and layers that stay in float."""
import copy

import pytest
import torch
import torch.nn as nn
from timm.layers import ConvNormAct

import timm_rep
from tests.helpers import images, relative, same_weights

pytest.importorskip('torchao')

from tests.deploy.test_quantize import simulated
from timm_rep.deploy import BACKENDS
from timm_rep.deploy.diagnosis import RoundedModel, fewest_to_keep, layer_errors
from timm_rep.deploy.program import QuantizationSettings

MINMAX = QuantizationSettings(True, 'minmax', 100.)


class Net(nn.Module):
    """A strided and a dilated, grouped convolution, and a linear layer, not made in the order of execution."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.b = nn.Conv2d(4, 6, 3, dilation=2, groups=2)
        self.a = nn.Conv2d(3, 4, 3, stride=2)

    def forward(self, x):
        return self.head(self.b(self.a(x).relu()).relu().mean((2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@torch.no_grad()
def test_against_the_definition(net, monkeypatch):
    """All layers rounded are the simulated quantization; a layer alone is one of a model whose others are exact."""
    monkeypatch.setattr(torch.cpu, '_is_vnni_supported', lambda: True)  # inputs of 8 bits
    calibration, x = [images(4, 16, seed=1), 2 * images(3, 16, seed=2)], images(5, 16, seed=3)
    before = copy.deepcopy(net)
    for per_channel in (True, False):
        rounded = RoundedModel(net, calibration, QuantizationSettings(per_channel, 'minmax', 100.))
        assert rounded.names == ['a', 'b', 'head']
        assert torch.equal(rounded(x), net(x))
        rounded.rounded = {*rounded.names}
        expected = simulated(net, calibration, x, per_channel)
        assert relative(expected, net(x)) > 1e-3
        assert relative(rounded(x), expected) < 1e-5
        rounded.rounded = set()
        assert torch.equal(rounded(x), net(x))
    assert same_weights(net, before)


@torch.no_grad()
def damage(net):
    """A channel of large weights that is not used."""
    net.b.weight[0] *= 100
    net.b.bias[0] = -1e6


@torch.no_grad()
def test_the_most_harmful_layer_is_first(net):
    """Channels of different size suit one scale for the tensor badly, and a scale for each channel well."""
    damage(net)
    x = images(4, 16)
    errors = layer_errors(RoundedModel(net, [x], QuantizationSettings(False, 'minmax', 100.)), x)
    assert next(iter(errors)) == 'b'
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert layer_errors(RoundedModel(net, [x], MINMAX), x)['b'] < errors['b'] / 4
    rounded = RoundedModel(net, [x], QuantizationSettings(False, 'minmax', 100.))
    rounded.rounded = {'b'}
    expected = net(x)
    assert errors['b'] == pytest.approx(((rounded(x) - expected).norm() / expected.norm()).item(), rel=1e-5)


@pytest.mark.parametrize('needed', range(4))
def test_the_fewest_layers_that_are_enough(needed):
    order = ['b', 'head', 'a']
    assert fewest_to_keep(order, lambda kept: {*order[:needed]} <= {*kept}) == order[:needed]
    assert fewest_to_keep(order, lambda kept: False) == order


@torch.no_grad()
@pytest.mark.parametrize('kept', [[], ['b'], ['a', 'head']])
def test_layers_kept_in_float_by_inductor(net, kept, monkeypatch):
    from timm_rep.deploy.inductor import InductorProgram

    monkeypatch.setattr(torch.cpu, '_is_vnni_supported', lambda: True)
    x = images(4, 16)
    graph = InductorProgram.quantize(net, [x], MINMAX, keep_float=kept).graph
    rounded = RoundedModel(net, [x], MINMAX)
    rounded.rounded = {'a', 'b', 'head'}.difference(kept)
    assert relative(graph(x), rounded(x)) < 1e-4
    assert relative(graph(x), net(x)) > 1e-3


@pytest.mark.slow
def test_layers_kept_in_float_by_onnxruntime(net):
    pytest.importorskip('onnxruntime')
    x = images(4, 16)
    quantized = timm_rep.quantize_ptq(net, [x], 'onnxruntime', keep_float=['b'], diagnose=True)
    assert quantized.report.int8_layers == ['a', 'head']
    assert quantized.report.float_layers == {'b': 'Conv'}
    assert quantized.report.layers.keys() == {'a', 'b', 'head'}
    assert f'  {next(iter(quantized.report.layers))}: ' in str(quantized.report)


@pytest.mark.slow
def test_names_of_folded_layers_kept_in_float_by_onnxruntime():
    """They are names that keep_float takes, although the BatchNorms are folded, and those of fc layers are too."""
    pytest.importorskip('onnxruntime')
    torch.manual_seed(0)
    model = nn.Sequential(ConvNormAct(3, 8), ConvNormAct(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model, x = nn.Sequential(model).eval(), images(4, 16)
    kept = ['0.1.conv', '0.4']
    report = timm_rep.quantize_ptq(model, [x], 'onnxruntime', keep_float=kept).report
    assert report.float_layers.keys() == {*kept}
    assert report.int8_layers == ['0.0.conv']
    again = timm_rep.quantize_ptq(model, [x], 'onnxruntime', keep_float=list(report.float_layers)).report
    assert (again.int8_layers, again.float_layers) == (report.int8_layers, report.float_layers)


@pytest.mark.slow
def test_all_layers_kept_in_float_by_onnxruntime(net):
    pytest.importorskip('onnxruntime')
    report = timm_rep.quantize_ptq(net, [images(4, 16)], 'onnxruntime', keep_float=['a', 'b', 'head']).report
    assert report.int8_layers == []
    assert report.relative_rms < 1e-5


def test_automatic_choice(net, unmeasured):
    damage(net)
    x = images(4, 16)
    labels = net(x).argmax(1)
    settings = dict(per_channel=False, keep_float='auto', validation_loader=[(x, labels)])
    errors = timm_rep.quantize_ptq(net, [x], **settings, max_error=1e9).report.layers
    assert unmeasured == []
    timm_rep.quantize_ptq(net, [x], **settings, max_error=errors['b'] / 2)
    assert unmeasured == ['b']
    unmeasured.clear()
    timm_rep.quantize_ptq(net, [x], **settings, max_error=0.)
    assert unmeasured == list(errors)
    unmeasured.clear()
    timm_rep.quantize_ptq(net, [x], **settings, max_accuracy_loss=100.)
    assert unmeasured == []
    timm_rep.quantize_ptq(net, [x], **settings, max_accuracy_loss=0., max_error=0.)
    assert unmeasured == list(errors)


@pytest.fixture
def inexact(unmeasured, monkeypatch):
    """Quantizes nothing, but adds errors to be set by the name of a layer, unless it stays in float."""
    from timm_rep.deploy.quantize import _program

    program, added = _program(''), {}

    class Inexact(program):
        @classmethod
        def quantize(cls, model, *args, keep_float, **kwargs):
            unmeasured.clear()
            result = super().quantize(model, *args, **kwargs, keep_float=keep_float)
            result.error = sum(error for name, error in added.items() if name not in keep_float)
            return result

        def __call__(self, x):
            outputs = self.model(x)
            return outputs - self.error * outputs.norm() / outputs.numel() ** .5 * outputs.sign()

    monkeypatch.setattr('timm_rep.deploy.quantize._program', lambda name: Inexact)
    return added


@pytest.mark.parametrize('needed', range(4))
def test_automatic_choice_by_the_measured_error(net, unmeasured, inexact, needed, recwarn):
    """The simulated error is small; the backend adds .1 for each layer, in the order of harm."""
    x = images(4, 16)
    order = list(timm_rep.quantize_ptq(net, [x], diagnose=True).report.layers)
    inexact.update(dict.fromkeys(order, .1))
    quantized = timm_rep.quantize_ptq(net, [x], keep_float='auto', max_error=.35 - .1 * needed)
    assert quantized.program.kept == order[:needed]
    assert quantized.report.relative_rms == pytest.approx(.1 * (3 - needed), abs=1e-6)
    assert not [w for w in recwarn if 'max_error' in str(w.message)]


def test_automatic_choice_by_the_measured_accuracy(net, unmeasured, inexact):
    x = images(4, 16)
    labels = net(x).argmax(1)
    order = list(timm_rep.quantize_ptq(net, [x], diagnose=True).report.layers)
    inexact[order[1]] = 1e3  # the opposite sign
    settings = dict(keep_float='auto', max_error=1e9, validation_loader=[(x, labels)])
    quantized = timm_rep.quantize_ptq(net, [x], **settings, max_accuracy_loss=1.)
    assert quantized.program.kept == order[:2]
    assert quantized.report.accuracy.loss == 0
    quantized = timm_rep.quantize_ptq(net, [x], **settings, max_accuracy_loss=100.)
    assert quantized.program.kept == []
    assert quantized.report.accuracy.loss > 1


@pytest.mark.parametrize('needed', range(4))
def test_no_choice_of_layers_is_quantized_twice(net, inexact, monkeypatch, needed):
    from timm_rep.deploy.quantize import _program

    tried, program = [], _program('')
    quantize = program.quantize
    monkeypatch.setattr(program, 'quantize', lambda *args, keep_float: (
        tried.append(tuple(keep_float)), quantize(*args, keep_float=keep_float))[1])
    order = list(timm_rep.quantize_ptq(net, [images(4, 16)], diagnose=True).report.layers)
    inexact.update(dict.fromkeys(order, .1))
    tried.clear()
    timm_rep.quantize_ptq(net, [images(4, 16)], keep_float='auto', max_error=.35 - .1 * needed)
    assert len({*tried}) == len(tried)
    assert tuple(order[:needed]) in tried


def test_warns_if_the_limit_is_not_reached(net, unmeasured, inexact):
    inexact['something else'] = .25
    with pytest.warns(UserWarning, match=r'max_error=0\.1.*0\.25') as found:
        report = timm_rep.quantize_ptq(net, [images(4, 16)], keep_float='auto', max_error=.1).report
    assert {*unmeasured} == {'a', 'b', 'head'}
    assert report.relative_rms == pytest.approx(.25)
    assert all(w.filename == __file__ for w in found)


@pytest.mark.parametrize('kwargs, message', [
    (dict(keep_float='b'), "keep_float must be a list of names of layers, or 'auto', got 'b'"),
    (dict(keep_float=None), "keep_float must be a list of names of layers, or 'auto', got None"),
    (dict(keep_float=True), "keep_float must be a list of names of layers, or 'auto', got True"),
    (dict(keep_float=['c']), "keep_float must be names of convolutions and linear layers .* got 'c'"),
    (dict(keep_float=['']), "got ''"),
    (dict(keep_float='auto'), 'max_error and max_accuracy_loss must be given together'),
    (dict(max_error=.1), 'must be given together'),
    (dict(keep_float='auto', max_error=-1.), r'max_error must be a number >= 0, got -1\.0'),
    (dict(keep_float='auto', max_error='x'), "max_error must be a number >= 0, got 'x'"),
    (dict(keep_float='auto', max_accuracy_loss=1.), 'validation_loader must be given with max_accuracy_loss'),
])
def test_wrong_settings(net, unmeasured, kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm_rep.quantize_ptq(net, [images(2, 16)], **kwargs)


@pytest.mark.parametrize('fp32, int8', [(.001, .002), (.002, .001)])
def test_warns_if_int8_is_slower(net, unmeasured, monkeypatch, recwarn, fp32, int8):
    monkeypatch.setattr(
        'timm_rep.deploy.quantize.time_calls', lambda calls, *args, **kwargs: {'fp32': [fp32] * 3, 'int8': [int8] * 3})
    report = timm_rep.quantize_ptq(net, [images(2, 16)]).report
    assert report.milliseconds == {'fp32': 1e3 * fp32, 'int8': 1e3 * int8}
    found = [str(w.message) for w in recwarn if 'slower' in str(w.message)]
    assert len(found) == (int8 > fp32)
    assert all('2.0 ms' in text and '1.0 ms' in text for text in found)


class Block(nn.Module):
    """Attention that calls F.linear with the weight of a child, as that of BEiT."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(8, 16, bias=False)
        self.proj = nn.Linear(8, 8)
        self.register_buffer('bias', torch.linspace(-1, 1, 16))

    def forward(self, x):
        q, k = nn.functional.linear(x, self.qk.weight, self.bias).chunk(2, -1)
        return self.proj((q @ k.mT).softmax(-1) @ x)


class Functional(nn.Module):
    """A network with such a block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.block = Block()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.block(self.stem(x).flatten(2).mT).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize('backend', BACKENDS)
@torch.no_grad()
def test_layers_that_are_called_by_functions(backend):
    """They have the names of their modules, in the report and to stay in float."""
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    torch.manual_seed(0)
    net, x, layers = Functional().eval(), images(4, 16), ['stem', 'block.qk', 'block.proj', 'head']
    report = timm_rep.quantize_ptq(net, [x], backend, diagnose=True).report
    assert {*report.int8_layers} == {*report.layers} == {*layers}
    report = timm_rep.quantize_ptq(net, [x], backend, keep_float=['block.qk']).report
    assert {*report.int8_layers} == {*layers} - {'block.qk'}
    assert 'block.qk' in report.float_layers
    assert timm_rep.quantize_ptq(net, [x], backend, keep_float=iter(layers)).report.relative_rms < 1e-5
    for name in ('block', ''):
        with pytest.raises(ValueError, match=f"got '{name}'.* has .*block.qk, block.proj"):
            timm_rep.quantize_ptq(net, [x], backend, keep_float=[name])


@torch.no_grad()
def test_functional_layers_are_rounded():
    net, x = Functional().eval(), images(4, 16)
    rounded = RoundedModel(net, [x], MINMAX)
    rounded.rounded = {'block.qk'}
    tokens = net.stem(x).flatten(2).mT
    low, high = tokens.min(), tokens.max()
    scale = (high - low) / 255
    zero = (-low / scale).round()
    tokens8 = (((tokens * (1 / scale)).round() + zero).clamp(0, 255) - zero) * scale
    steps = net.block.qk.weight.abs().amax(1, keepdim=True) / 127.5
    weight = (net.block.qk.weight * (1 / steps)).round().clamp(-128, 127) * steps
    q, k = (tokens8 @ weight.T + net.block.bias).chunk(2, -1)
    expected = net.head(net.block.proj((q @ k.mT).softmax(-1) @ tokens).mean(1))
    assert relative(expected, net(x)) > 1e-4
    assert relative(rounded(x), expected) < 1e-6
