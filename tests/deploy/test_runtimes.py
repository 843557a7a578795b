"""Formats and int8 of runtimes that no extra for the tests installs: each test runs where its runtime is installed."""
import numpy as np
import pytest
import timm
import torch
import torch.nn as nn

import timm_rep
from tests.deploy.models import MODELS, build
from tests.helpers import images, randomize_, relative
from timm_rep.cli import main
from timm_rep.convert import folded_copy
from timm_rep.deploy import BACKENDS, FORMATS, load_quantized
from timm_rep.deploy.program import QuantizationSettings

pytestmark = pytest.mark.clients


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('format', ['openvino', 'executorch'])
def test_every_family(format, kind, tmp_path):
    pytest.importorskip(format)
    model, input_size = build(kind)
    path = tmp_path / f'model{FORMATS[format].suffix or ""}'
    result = timm_rep.export(model.train(), path, format, images=images(3, input_size[1], seed=2))
    assert result.differences.keys() == {'random', 'real'}
    model.eval()
    runner = FORMATS[format].load(path)
    with torch.no_grad():
        for n in (1, 5) if FORMATS[format].dynamic_batch else (1, 1):
            x = images(n, input_size[1], seed=n)
            assert relative(runner(x), model(x)) < 1e-4


@pytest.mark.parametrize('format', ['openvino', 'executorch'])
def test_a_broken_file_is_noticed(format, tmp_path, monkeypatch):
    pytest.importorskip(format)

    class Exported(nn.Module):
        def forward(self, x):
            return x * (1.01 if torch.compiler.is_compiling() else 1.)

    with pytest.raises(RuntimeError, match=f"as '{format}' must be within the tolerance"):
        timm_rep.export(Exported(), tmp_path / f'm{FORMATS[format].suffix or ""}', format, input_size=(3, 8, 8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('format', ['openvino', 'executorch'])
def test_several_outputs(format, tmp_path):
    pytest.importorskip(format)

    class Several(nn.Module):
        def forward(self, x):
            return {'a': x + 1, 'b': [x.mean(1), x * 2]}

    path = tmp_path / f'm{FORMATS[format].suffix or ""}'
    timm_rep.export(Several(), path, format, input_size=(3, 8, 8))
    x = images(1, 8)
    for y, expected in zip(FORMATS[format].load(path)(x), (x + 1, x.mean(1), x * 2), strict=True):
        assert relative(y, expected) < 1e-6


@pytest.mark.parametrize('format', ['openvino', 'executorch'])
def test_command(format, tmp_path, capsys):
    pytest.importorskip(format)
    path = tmp_path / f'm{FORMATS[format].suffix or ""}'
    args = ['--model-kwargs', 'img_size=32', 'patch_size=8', 'embed_dim=24', 'depth=1', 'num_heads=3']
    assert main(['export', 'repa_deit_tiny', '--format', format, '-o', str(path), *args]) == 0
    assert ('batch size 1 only' in capsys.readouterr().out) != FORMATS[format].dynamic_batch
    assert path.exists()
    if format == 'openvino':
        assert main(['export', 'repa_deit_tiny', '--format', format, '-o', str(path), *args]) == 1
        assert 'is not empty' in capsys.readouterr().err


@pytest.fixture(params=['openvino', 'executorch'])
def backend(request):
    for package in BACKENDS[request.param].packages:
        pytest.importorskip(package)
    return request.param


@pytest.mark.parametrize('kind', ['repopt_vgg', 'repa_vit'])
@pytest.mark.parametrize('kwargs', [{}, dict(per_channel=False, calibrator='percentile', percentile=99.9)], ids=str)
def test_int8(backend, kind, kwargs, tmp_path):
    model, input_size = build(kind)
    model.eval()
    x = images(4, input_size[1])
    quantized = timm_rep.quantize_ptq(model, [x[:3], x[3:]], backend, **kwargs)
    layers = [
        name for name, m in timm_rep.convert.folded_copy(model).named_modules()
        if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert set(quantized.report.int8_layers) == {*layers}
    assert 1e-3 < quantized.report.relative_rms < .2
    quantized.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*BACKENDS[backend].files, 'quantization.json'}
    loaded = load_quantized(tmp_path)
    assert loaded.report == quantized.report
    y = images(3, input_size[1], seed=7)
    assert torch.equal(loaded(y), quantized(y))
    kept = timm_rep.quantize_ptq(model, [x], backend, keep_float=layers[:1], **kwargs).report
    assert layers[0] in kept.float_layers
    assert set(kept.int8_layers) == {*layers[1:]}


@pytest.mark.parametrize('kind', ['repopt_vgg', 'repa_vit'])
@torch.no_grad()
def test_only_layers_are_rounded_by_openvino(kind):
    """Inputs of LayerNorms and pooling are not rounded: the error is about as large as with only the layers rounded."""
    for package in BACKENDS['openvino'].packages:
        pytest.importorskip(package)
    from timm_rep.deploy.diagnosis import RoundedModel
    from timm_rep.deploy.openvino_int8 import OpenVinoProgram

    model, input_size = build(kind)
    folded, x = timm_rep.convert.folded_copy(model.eval()), images(16, input_size[1])
    settings = QuantizationSettings(True, 'minmax', 100.)
    program = OpenVinoProgram.quantize(folded, [x], settings)
    rounded = RoundedModel(folded, [x], settings)
    rounded.rounded = {*rounded.names}
    assert relative(program(x), folded(x)) < 1.35 * relative(rounded(x), folded(x))


def test_layers_before_batchnorms_stay_in_float(backend):
    """The runtimes fold the BatchNorms of a plain network; a shared layer has a BatchNorm for each call."""
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(3)])
            self.shared = nn.Conv2d(8, 8, 3, padding=1, groups=2)
            self.head = nn.Linear(8, 5)

        def forward(self, x):
            x = self.norms[0](self.stem(x)).relu()
            for norm in self.norms[1:]:
                x = norm(self.shared(x)).relu()
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    model, x = randomize_(Shared()).eval(), images(8, 10)
    layers = 'stem', 'shared', 'head'
    errors = {}
    for kept in ((), ('stem',), ('shared',), layers):
        report = timm_rep.quantize_ptq(model, [x], backend, keep_float=kept).report
        assert set(report.int8_layers) == {*layers} - {*kept}
        assert report.float_layers.keys() == {*kept}
        errors[kept] = report.relative_rms
    assert errors[layers] < 1e-5 < errors[()] < .1


@pytest.mark.parametrize('fused', [False, True])
def test_products_of_attention_are_reported(fused):
    for package in BACKENDS['openvino'].packages:
        pytest.importorskip(package)
    model = timm.create_model('deit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    for block in model.blocks:
        block.attn.fused_attn = fused
    report = timm_rep.quantize_ptq(model.eval(), [images(4, 32)], 'openvino').report
    assert report.float_layers == {
        f'blocks.{i}.attn': 'ScaledDotProductAttention' if fused else 'MatMul' for i in range(2)}


def test_int8_with_group_norms(backend):
    """Left in float, they make OpenVINO compute the same outputs for all images."""
    model, input_size = build('repa_poolformer')
    x = images(16, input_size[1])
    quantized = timm_rep.quantize_ptq(model.eval(), [x], backend)
    assert quantized.report.relative_rms < .1
    assert quantized(x).std(0).min() > 0


def test_int8_with_several_outputs(backend, tmp_path):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            return {'maps': [y, y.relu()]}

    torch.manual_seed(0)
    model, x = Several().eval(), images(2, 8)
    quantized = timm_rep.quantize_ptq(model, [x], backend)
    quantized.save(tmp_path)
    for found in (quantized(x), load_quantized(tmp_path)(x)):
        for y, expected in zip(found['maps'], model(x)['maps'], strict=True):
            assert relative(y, expected.detach()) < .05


def test_a_damaged_int8_file(backend, tmp_path):
    quantized = timm_rep.quantize_ptq(nn.Conv2d(3, 4, 3).eval(), [images(2, 8)], backend)
    quantized.save(tmp_path)
    (tmp_path / BACKENDS[backend].files[0]).write_bytes(b'damaged')
    with pytest.raises(RuntimeError, match=BACKENDS[backend].files[0]):
        load_quantized(tmp_path)


def test_openvino_has_no_entropy():
    for package in BACKENDS['openvino'].packages:
        pytest.importorskip(package)
    with pytest.raises(ValueError, match=r"calibrator must be one of 'minmax', 'percentile' .*'openvino'"):
        timm_rep.quantize_ptq(nn.Conv2d(3, 3, 1).eval(), [images(2, 8)], 'openvino', calibrator='entropy')


@pytest.mark.parametrize('kind', MODELS)
def test_other_converters(kind, tmp_path):
    """The converters of docs/how-to/export.md take folded models; Core ML programs run on macOS only."""
    litert_torch = pytest.importorskip('litert_torch')
    coremltools = pytest.importorskip('coremltools')
    model, input_size = build(kind)
    folded, x = folded_copy(model.eval()), images(1, input_size[1], seed=2)
    with torch.no_grad():
        converted = litert_torch.convert(folded, (x,))
        assert relative(torch.from_numpy(np.asarray(converted(x))), model(x)) < 1e-4
        program = torch.export.export(folded, (x,)).run_decompositions({})
    if kind == 'repa_swin':
        with pytest.raises(NotImplementedError, match='alias'):
            coremltools.convert(program)
    else:
        coremltools.convert(program).save(str(tmp_path / 'model.mlpackage'))
