"""timm_rep.export: what is written computes what the model does, and what cannot be exported is refused by name."""
import copy
import importlib.util
import json
import multiprocessing
import pickle
import sys
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2

import timm_rep
from tests.convert.multi_branch import FAMILIES as MULTI_BRANCH
from tests.deploy.models import MODELS, VIT, build
from tests.helpers import (
    images,
    needs_recorded_args,
    needs_torch_2_6,
    normal_scales,
    randomize_,
    relative,
    same_weights,
    tiny,
)
from timm_rep.cli import main
from timm_rep.convert import use_repa_ffns
from timm_rep.deploy import FORMATS, VERIFICATION_NAME, onnx_runner
from timm_rep.hub import load_folder
from timm_rep.layers import RePaMlp, csla_layers, is_reparameterized
from timm_rep.scales import Scales, attached_scales
from timm_rep.utils.modes import default_dtype

ONNX = ('onnx', 'onnxscript', 'onnxruntime')
needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ONNX)), reason=f'needs {", ".join(ONNX)}: the extra deploy')
SUFFIXES = {name: format.suffix or '' for name, format in FORMATS.items()}

ARGS = ['--model-kwargs', *(f'{name}={value}' for name, value in VIT.items())]


def load(path, format):
    """A function that runs the written model, loaded as a user of the format would."""
    if format == 'safetensors':
        return timm.create_model(f'local-dir:{path}', pretrained=True).eval()
    if format == 'onnx':
        return onnx_runner(path)
    return torch.export.load(path).module() if format == 'pt2' else torch._inductor.aoti_load_package(str(path))


def verification(path):
    """The file with the measured differences."""
    return path / VERIFICATION_NAME if path.is_dir() else path.with_name(f'{path.name}.{VERIFICATION_NAME}')


def check(kind, format, folder, reparameterize=True):
    model, input_size = build(kind)
    model.train()
    before = copy.deepcopy(model)
    path = folder / f'model{SUFFIXES[format]}'
    real = images(3, input_size[1], seed=2)
    result = timm_rep.export(model, path, format, reparameterize, real)
    assert same_weights(model, before)
    assert all(module.training for module in model.modules())

    model.eval()
    exported = load(path, format)
    with torch.no_grad():
        for n in (1, 5):  # neither is the size of a batch that the model was traced with
            x = images(n, input_size[1], seed=n)
            expected = model(x)
            assert expected.std() > 0
            assert relative(exported(x), expected) < 1e-4

    entry = json.loads(verification(path).read_text())
    assert (entry['format'], entry['reparameterized'], entry['tolerance']) == (format, reparameterize, 1e-4)
    assert entry['input'] == ['batch', *input_size]
    assert {'torch', 'timm_rep'} <= entry['versions'].keys()
    assert entry['differences'].keys() == result.differences.keys() == {'random', 'real'}
    for name, difference in result.differences.items():
        assert difference.relative_rms == entry['differences'][name]['relative_rms'] < 1e-4
    assert (result.path, result.format) == (path, format)
    return path, exported


@pytest.mark.parametrize('kind, format', [
    pytest.param('repa_vit', 'safetensors', marks=needs_recorded_args),
    pytest.param('repa_vit', 'pt2', marks=[needs_torch_2_6, pytest.mark.slow]),
    pytest.param('repa_vit', 'onnx', marks=[needs_onnx, pytest.mark.slow]),
    pytest.param('repopt_vgg', 'safetensors', marks=needs_recorded_args), ('repopt_vgg', 'pt2'),
    pytest.param('repopt_vgg', 'onnx', marks=[needs_onnx, needs_torch_2_6]),
])
def test_folded(kind, format, tmp_path):
    path, exported = check(kind, format, tmp_path)
    if format == 'safetensors':
        assert is_reparameterized(exported)
        assert {p.name for p in path.iterdir()} == {'model.safetensors', 'config.json', VERIFICATION_NAME}
        return
    assert {p.name for p in tmp_path.iterdir()} == {path.name, verification(path).name}
    if format == 'onnx':
        import onnx

        graph = onnx.load(path).graph
        names = {node.op_type for node in graph.node}
        assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == 'batch'
        assert [x.name for x in (*graph.input, *graph.output)] == ['input', 'output']
    else:
        names = {str(node.target) for node in exported.graph.nodes if node.op == 'call_function'}
    assert not [name for name in names if 'batch_norm' in name or name == 'BatchNormalization']


@needs_recorded_args
@pytest.mark.parametrize('reparameterize', [True, False])
def test_channels_last(tmp_path, reparameterize):
    """The model keeps its memory format; the written one has the default one."""
    model = build('repopt_vgg')[0].to(memory_format=torch.channels_last)
    assert not model.stem.conv[0].weight.is_contiguous()
    strides = [x.stride() for x in model.state_dict().values()]
    (tmp_path / 'out').mkdir()  # an empty folder is accepted
    timm_rep.export(model, tmp_path / 'out', reparameterize=reparameterize)
    assert [x.stride() for x in model.state_dict().values()] == strides
    loaded, x = load(tmp_path / 'out', 'safetensors'), images()
    assert all(value.is_contiguous() for value in loaded.state_dict().values())
    with torch.no_grad():
        assert relative(loaded(x), model(x)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('format', ['safetensors', pytest.param('onnx', marks=needs_onnx), 'pt2', 'aoti'])
@pytest.mark.parametrize('reparameterize', [True, False], ids=['folded', 'unfolded'])
def test_every_family(kind, format, reparameterize, tmp_path):
    if kind == 'repopt_vgg, search' and not reparameterize:
        pytest.skip('refused')
    check(kind, format, tmp_path, reparameterize)


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize('family', MULTI_BRANCH)
def test_multi_branch_models(family, tmp_path):
    """timm's own, and converted."""
    torch.manual_seed(0)
    model = randomize_(MULTI_BRANCH[family]())
    timm_rep.export(model, tmp_path / 'timm.onnx', 'onnx', input_size=(3, 64, 64))
    timm_rep.convert_to_repopt(model)
    for reparameterize in (True, False):
        timm_rep.export(model, tmp_path / 'repopt.onnx', 'onnx', reparameterize, input_size=(3, 64, 64))


@needs_onnx
@pytest.mark.slow
def test_large_weights(tmp_path, monkeypatch):
    """Weights that do not fit into a protobuf file are in a second file next to it."""
    monkeypatch.setattr(sys.modules['timm_rep.deploy.formats'], '_MAX_ONNX_WEIGHTS', 1000)
    model = nn.Conv2d(3, 64, 3)
    timm_rep.export(model, tmp_path / 'model.onnx', 'onnx', input_size=(3, 8, 8))
    assert {p.name for p in tmp_path.iterdir()} == {'model.onnx', 'model.onnx.data', f'model.onnx.{VERIFICATION_NAME}'}
    x = images(2, 8)
    with torch.no_grad():
        assert relative(onnx_runner(tmp_path / 'model.onnx')(x), model(x)) < 1e-5


class Nested(nn.Module):
    """A folded network inside another, without a cfg, and several outputs."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return {'logits': self.net(x), 'maps': [self.net.forward_features(x), x.mean((2, 3))]}


@pytest.mark.parametrize('format', [
    'pt2', *(pytest.param(name, marks=[pytest.mark.slow, needs_onnx]) for name in ('onnx', 'aoti'))])
def test_network_inside_another(format, tmp_path):
    model = Nested(build('repopt_vgg')[0])
    path = tmp_path / f'model{SUFFIXES[format]}'
    result = timm_rep.export(model, path, format, input_size=(3, 64, 64))
    assert result.differences['random'].relative_rms < 1e-5
    x = images(2)
    outputs = load(path, format)(x)
    logits = outputs[0] if format == 'onnx' else outputs['logits']
    with torch.no_grad():
        assert relative(logits, model(x)['logits']) < 1e-5
    with pytest.raises(ValueError, match=r'Nested.*input_size'):
        timm_rep.export(model, path, format)


def test_each_file_has_its_own_differences(tmp_path):
    """Also of files of the same stem, and whatever else the folder holds."""
    (tmp_path / VERIFICATION_NAME).write_text('3')
    model = nn.Conv2d(3, 3, 1)
    for name in ('a.pt2', 'b.pt2', 'a.pt2'):
        timm_rep.export(model, tmp_path / name, 'pt2', input_size=(3, 8, 8))
    assert {p.name for p in tmp_path.iterdir()} == {
        'a.pt2', 'b.pt2', f'a.pt2.{VERIFICATION_NAME}', f'b.pt2.{VERIFICATION_NAME}', VERIFICATION_NAME}
    assert (tmp_path / VERIFICATION_NAME).read_text() == '3'


def _export_to_a_full_disk(path, size):
    """torch's archive writer would end the process with SIGABRT."""
    resource = importlib.import_module('resource')
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(OSError, match='File too large'):
        timm_rep.export(nn.Conv2d(3, 64, 9), path, 'pt2', input_size=(3, 16, 16))


@pytest.mark.skipif(sys.platform != 'linux', reason='limits the size of files')
def test_a_full_disk(tmp_path):
    (tmp_path / 'm.pt2').write_text('old')
    process = multiprocessing.get_context('fork').Process(
        target=_export_to_a_full_disk, args=(tmp_path / 'm.pt2', 1 << 14))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {'m.pt2': 'old'}


def test_a_format_is_one_entry(tmp_path, monkeypatch):
    """A new format that is a folder, with a fixed batch size and a check of the model."""
    seen = []

    def write(model, images, folder):
        seen.append(len(images))
        torch.save(model.state_dict(), folder / 'weights.pt')

    def load(folder):
        model.load_state_dict(torch.load(folder / 'weights.pt', weights_only=True))
        return lambda x: seen.append(len(x)) or model(x)

    def check_model(model):
        if not isinstance(model, nn.Conv2d):
            raise ValueError('Expected a convolution')

    entry = FORMATS['pt2']._replace(
        suffix=None, write=write, load=load, dynamic_batch=False, check_model=check_model, packages=('torch',))
    monkeypatch.setitem(FORMATS, 'weights', entry)
    model = nn.Conv2d(3, 3, 1)
    result = timm_rep.export(model, tmp_path / 'new', 'weights', images=images(2, 8))
    assert seen == [1] * 6  # traced, three random images, two real ones
    assert {p.name for p in (tmp_path / 'new').iterdir()} == {'weights.pt', VERIFICATION_NAME}
    assert json.loads(verification(result.path).read_text())['input'] == [1, 3, 8, 8]
    assert 'batch size 1 only' in str(result)
    with pytest.raises(ValueError, match='Expected a convolution'):
        timm_rep.export(nn.Flatten(), tmp_path / 'other', 'weights', input_size=(3, 8, 8))
    monkeypatch.setitem(FORMATS, 'weights', entry._replace(packages=('no_such_package',), extra='deploy'))
    with pytest.raises(ModuleNotFoundError, match=r'no_such_package.*timm-rep\[deploy\]'):
        timm_rep.export(model, tmp_path / 'other', 'weights', input_size=(3, 8, 8))


@pytest.mark.parametrize('format', [
    pytest.param('safetensors', marks=needs_recorded_args), pytest.param('pt2', marks=pytest.mark.slow)])
def test_a_difference_is_an_error(format, tmp_path, monkeypatch):
    """A broken fold: the message has the difference, nothing is written, and an old file stays."""
    model, _ = build('repa_vit')
    fuse = RePaMlp.fuse

    def broken(self):
        deploy = fuse(self)
        deploy.fc_idle.weight.data.mul_(1.01)
        return deploy

    path = tmp_path / f'model{SUFFIXES[format]}'
    if format == 'pt2':
        path.write_text('old')
    monkeypatch.setattr(RePaMlp, 'fuse', broken)
    with pytest.raises(RuntimeError, match=rf"as '{format}' must be within .* got 0\.0.* on random images"):
        timm_rep.export(model, path, format)
    assert timm_rep.export(model, tmp_path / 'tolerant.pt2', 'pt2', tolerance=.1).images == {'random': 3}
    assert not (tmp_path / 'model' / 'model.safetensors').exists()
    assert format != 'pt2' or path.read_text() == 'old'


def test_all_of_an_error_is_told(tmp_path, monkeypatch):
    """Exporters name the cause after the first line."""
    def fail(*args):
        raise RuntimeError('Failed.\nThe cause')

    monkeypatch.setitem(FORMATS, 'pt2', FORMATS['pt2']._replace(write=fail))
    with pytest.raises(RuntimeError, match=r"Conv2d as 'pt2'(.|\n)*The cause"):
        timm_rep.export(nn.Conv2d(3, 3, 1), tmp_path / 'm.pt2', 'pt2', input_size=(3, 8, 8))


@pytest.mark.parametrize('error', [1., float('nan')])
def test_a_difference_on_real_images_alone(tmp_path, error):
    class Clipped(nn.Module):
        """Another network for images above 100, once it is compiled."""

        def forward(self, x):
            return x + torch.where(x > 100, error, 0.) if torch.compiler.is_compiling() else x

    with pytest.raises(RuntimeError, match=r'within the tolerance .* on real images'):
        timm_rep.export(Clipped(), tmp_path / 'm.pt2', 'pt2', images=200 + 0 * images(2, 8))
    assert not (tmp_path / 'm.pt2').exists()


def test_a_difference_on_a_single_image_alone(tmp_path):
    class Single(nn.Module):
        """Another network for single images, unless it is exported."""

        def forward(self, x):
            return x if torch.compiler.is_compiling() else x + float(len(x) == 1)

    with pytest.raises(RuntimeError, match=r'within the tolerance .* on random images'):
        timm_rep.export(Single(), tmp_path / 'm.pt2', 'pt2', input_size=(3, 8, 8))
    assert not list(tmp_path.iterdir())


deit = partial(tiny, 'repa_deit_tiny')


class Branching(nn.Module):
    """A network that torch.export does not take."""

    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


def _quantized():
    import torch.ao.nn.quantized.dynamic as quantized

    return nn.Sequential(nn.Flatten(), quantized.Linear(3, 3))


def _annealing():
    return timm.create_model('repa_any', base='deit3_small_patch16_224', anneal_steps=9, **VIT)


def _no_statistics():
    model = deit()
    model.blocks[1].mlp.norm1.running_mean = model.blocks[1].mlp.norm1.running_var = None
    return model


@torch.no_grad()
def _nan():
    model = deit()
    model.blocks[0].attn.proj.weight[0, 0] = float('nan')
    return model


def _changed_otherwise():
    model = timm.create_model('deit3_small_patch16_224', **VIT)
    use_repa_ffns(model)
    return model


REFUSED = [
    (deit, 'm', dict(format='onx'), ValueError, r"format must be .*'pt2', 'aoti'.* got 'onx'"),
    (deit, 'm.onnx', dict(format='pt2'), ValueError, r"path must end with \.pt2 .*'pt2', got .*m\.onnx"),
    (deit, 'm', dict(format=['onnx']), ValueError, r"format must be .* got \['onnx'\]"),
    (deit, 'm.safetensors', {}, ValueError, r"path must be a folder .* got the file '.*': name a folder\.$"),
    (deit, 'm.onnx', {}, ValueError, "path must be a folder .* or pass format='onnx'"),
    (deit, 'm.pt2', {}, ValueError, "or pass format='pt2' or format='aoti'"),
    (deit, '', {}, FileExistsError, 'is not empty'),
    (deit, 'folder.pt2', dict(format='pt2'), IsADirectoryError, 'got the folder'),
    (deit, 'text/m.pt2', dict(format='pt2'), OSError, 'cannot write to the output folder'),
    (lambda: 'repa_deit_tiny', 'm', {}, TypeError, "model must be a module, got 'repa_deit_tiny'"),
    (lambda: nn.DataParallel(deit()), 'm', {}, ValueError, 'DataParallel wraps'),
    (lambda: torch.compile(deit()), 'm', {}, ValueError, 'OptimizedModule wraps'),
    (lambda: deit().half(), 'm', {}, ValueError, r'got weights in torch\.float16: pass model\.float'),
    (lambda: deit(device='meta'), 'm', {}, ValueError, 'on the meta device'),
    (_quantized, 'm.pt2', dict(format='pt2', input_size=(3, 1, 1)), ValueError, 'Sequential is quantized'),
    (_annealing, 'm', {}, ValueError, 'step 0 of 9'),
    (_annealing, 'm', dict(reparameterize=False), ValueError, 'step 0 of 9'),
    (_no_statistics, 'm', {}, ValueError, r'blocks\.1\.mlp cannot be folded'),
    (_nan, 'm', {}, ValueError, r'outputs of blocks\.0\.attn\.proj must be finite'),
    (lambda: tiny('repopt_vgg_a0', structure='csla'), 'm', dict(reparameterize=False), ValueError,
     'reparameterize must be True for the csla structure'),
    (deit, 'm', dict(tolerance=float('nan')), ValueError, 'tolerance must be .* got nan'),
    (deit, 'm', dict(tolerance=float('inf')), ValueError, 'tolerance must be .* got inf'),
    (deit, 'm', dict(tolerance='x'), ValueError, "tolerance must be .* got 'x'"),
    (deit, 'm', dict(images=[1]), TypeError, 'images must be a tensor .* got list'),
    (deit, 'm', dict(images=torch.zeros(3, 32, 32)), ValueError, r'images must be .* got \(3, 32, 32\)'),
    (deit, 'm', dict(images=images(2, 32), input_size=(3, 64, 64)), ValueError,
     r'input_size \(3, 64, 64\), got \(3, 32, 32\)'),
    (deit, 'm', dict(input_size=(32, 32)), ValueError,
     r'input_size must be \(channels, height, width\), got \(32, 32\)'),
    (deit, 'm', dict(input_size=32), ValueError, r'input_size must be \(channels, height, width\), got 32'),
    (deit, 'm.onnx', dict(format='onnx', input_size=(3, 64, 64)), ValueError,
     'cannot process images of size .3, 64, 64.:'),
    (lambda: timm.create_model('repa_deit_tiny', features_only=True, out_indices=(0,), **VIT), 'm', {}, ValueError,
     'features_only'),
    (Branching, 'm.pt2', dict(format='pt2', input_size=(3, 8, 8)), RuntimeError,
     r"Cannot export Branching as 'pt2': \w+: \w+"),
    (lambda: nn.Conv2d(3, 3, 1), 'm', dict(input_size=(3, 8, 8)), ValueError, 'Expected a timm model.* got Conv2d'),
    (_changed_otherwise, 'm', {}, RuntimeError, 'builds another structure'),
    (lambda: timm.create_model('repghostnet_050', num_classes=5), 'm', dict(input_size=(3, 32, 32)), RuntimeError,
     r'reparameterize=False \(--no-reparam\)'),
]


@pytest.mark.parametrize('model,path,kwargs,error,message', REFUSED, ids=[str(case[4]) for case in REFUSED])
def test_refused(model, path, kwargs, error, message, tmp_path):
    (tmp_path / 'folder.pt2').mkdir()
    (tmp_path / 'text').write_text('')
    with pytest.raises(error, match=message):
        timm_rep.export(model(), tmp_path / path, **kwargs)
    assert not [p for p in tmp_path.rglob('*') if p.is_file() and p.name != 'text']


def test_missing_package(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name in ONNX[:2] else find_spec(name))
    with pytest.raises(ModuleNotFoundError, match='requires onnx, onnxscript: pip install onnx onnxscript'):
        timm_rep.export(deit(), tmp_path / 'm.onnx', 'onnx')


@needs_torch_2_6
def test_missing_compiler(tmp_path):
    # monkeypatch would remove the setting from torch's configuration at the end
    config = importlib.import_module('torch._inductor.config')
    message = r"'aoti' requires a C\+\+ compiler"
    with config.patch({'cpp.cxx': ('no-such-compiler',)}), pytest.raises(RuntimeError, match=message):
        timm_rep.export(deit(), tmp_path / 'm.pt2', 'aoti')


@needs_recorded_args
class TestCommand:
    def test_checkpoint_and_images(self, tmp_path, capsys, request):
        model, _ = build('repa_vit')
        torch.save({'state_dict': model.state_dict()}, tmp_path / 'c.pth')
        command = [
            'export', 'repa_deit_tiny', '--checkpoint', str(tmp_path / 'c.pth'), '--data-dir',
            str(request.getfixturevalue('images')), '--val-split', 'validation', '--images', '4', *ARGS]
        assert main([*command, '-o', str(tmp_path / 'out')]) == 0
        out = capsys.readouterr().out
        assert 'safetensors, folded' in out
        assert 'weights are random' not in out
        assert '4 real images: relative rms difference' in out
        loaded = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True).eval()
        x = images(2, 32)
        with torch.no_grad():
            assert relative(loaded(x), model(x)) < 1e-5
        # the entry that timm finds for the name is of other weights
        assert timm.get_pretrained_cfg('repa_deit_tiny').license
        assert loaded.pretrained_cfg.get('license') is None

        assert main([*command, '-o', str(tmp_path / 'm.pt2'), '--format', 'pt2', '--no-reparam']) == 0
        assert 'pt2, not folded' in capsys.readouterr().out
        exported = torch.export.load(tmp_path / 'm.pt2').module()
        assert 'blocks.0.mlp.norm1.running_var' in dict(exported.named_buffers())

    def test_random_weights(self, tmp_path, capsys):
        assert main(['export', 'repa_deit_tiny', '-o', str(tmp_path / 'out'), *ARGS]) == 0
        assert 'The weights are random' in capsys.readouterr().out
        name = f'local-dir:{tmp_path / "out"}'
        assert main(['export', name, '-o', str(tmp_path / 'same')]) == 0
        assert 'random:' not in capsys.readouterr().out
        assert main(['export', name, '-o', str(tmp_path / 'other'), '--model-kwargs', 'num_classes=7']) == 0
        assert f'The classifier is random: {name} has ' in capsys.readouterr().out

    def test_errors(self, tmp_path, capsys):
        for args, message in (
                (['repa_deit_tiny', '-o', str(tmp_path / 'm.txt'), '--format', 'pt2'], 'path must end with .pt2'),
                (['repa_deit_tiny', '-o', str(tmp_path / 'm'), '--tolerance', '-1', *ARGS], 'tolerance must be')):
            assert main(['export', *args]) == 1
            error = capsys.readouterr().err
            assert error.startswith('timm-rep: ')
            assert message in error
            assert len(error.splitlines()) == 1
        assert not list(tmp_path.iterdir())


@needs_torch_2_6
def test_with_another_default_dtype(tmp_path):
    model, size = build('repa_vit')
    with default_dtype(torch.float64):
        timm_rep.export(model, tmp_path / 'model.pt2', 'pt2')
    assert torch.export.load(tmp_path / 'model.pt2').module()(images(2, size[1])).dtype == torch.float32


@needs_recorded_args
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_a_folder_with_another_default_dtype(dtype, tmp_path):
    """As rebuilt for the comparison with the model."""
    model, _ = build('repa_vit')
    with default_dtype(dtype):
        timm_rep.export(model, tmp_path / 'exported')
        timm_rep.hub.save_folder(model, tmp_path / 'saved')
        assert torch.get_default_dtype() == dtype
    assert same_weights(load_folder(tmp_path / 'saved'), model)


@needs_recorded_args
def test_scales_of_a_model_to_train_further(tmp_path):
    """The folder of the unfolded model has those of its optimizer; the folded one has none."""
    scales = normal_scales(tiny('repopt_vgg_a0'))
    scales.save(tmp_path / 'scales.safetensors')
    model = randomize_(tiny('repopt_vgg_a0', scales=str(tmp_path / 'scales.safetensors')))
    timm_rep.export(model, tmp_path / 'trained', reparameterize=False)
    timm_rep.export(model, tmp_path / 'folded')
    (tmp_path / 'scales.safetensors').unlink()
    loaded = timm.create_model(f'local-dir:{tmp_path / "trained"}', pretrained=True)
    assert type(create_optimizer_v2(loaded, opt='repsgd', lr=.1)).__name__ == 'RepSGD'
    assert Scales.load(tmp_path / 'trained' / 'scales.safetensors') == scales
    assert not (tmp_path / 'folded' / 'scales.safetensors').exists()


def _from_a_file(folder):
    model = tiny('repopt_vgg_a0')
    path = folder / 's.safetensors'
    normal_scales(model).save(path)
    return tiny('repopt_vgg_a0', scales=str(path)), path


def _overwritten(folder):
    model, path = _from_a_file(folder)
    normal_scales(model, seed=1).save(path)
    return model


def _deleted(folder):
    model, path = _from_a_file(folder)
    path.unlink()
    return model


def _of_one_layer(folder):
    model = tiny('repopt_vgg_a0', scales='init')
    layer = model.stages[0][0].conv[0]
    layer.set_scales({branch: 2 * scale for branch, scale in layer.grad_mult.scales.items()})
    return model


def _copied(folder):
    model, path = _from_a_file(folder)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    path.unlink()
    return copied


@needs_recorded_args
@pytest.mark.parametrize('create', [
    _overwritten, _deleted, _of_one_layer, _copied,
    lambda folder: tiny('repopt_vgg_a0', scales=normal_scales(tiny('repopt_vgg_a0'))),
    lambda folder: tiny('repopt_vgg_a0', scales={
        layer: dict(branches) for layer, branches in normal_scales(tiny('repopt_vgg_a0')).items()}),
    lambda folder: tiny('repopt_vgg_a0', scales=normal_scales(tiny('repopt_vgg_a0')).mean_over_channels()),
    lambda folder: timm_rep.attach_grad_mults(
        nn.ModuleDict(dict(backbone=tiny('repopt_vgg_a0', scales='init'))), 'ones')['backbone'],
], ids=['overwritten', 'deleted', 'of one layer', 'copied', 'object', 'mapping', 'averaged', 'around the model'])
def test_the_saved_scales_are_the_attached_ones(tmp_path, create):
    """Wherever they came from, and whatever their file holds now; by timm's function, the same or none."""
    model = create(tmp_path)
    timm_rep.export(model, tmp_path / 'out', reparameterize=False)
    loaded = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True)
    for (name, layer), other in zip(csla_layers(model).items(), csla_layers(loaded).values()):
        assert torch.equal(layer.grad_mult.dense('squared'), other.grad_mult.dense('squared')), name
    recorded = model._model_args['scales']
    if recorded:
        again = timm_rep.attach_grad_mults(copy.deepcopy(model), recorded)
        assert attached_scales(again) == attached_scales(model)


@needs_recorded_args
def test_after_a_killed_export(tmp_path):
    """What it left in its folder is no content."""
    folder = tmp_path / 'out'
    (folder / '.writing').mkdir(parents=True)
    (folder / '.writing' / 'model.safetensors').write_bytes(b'half')
    (folder / '.writing.lock').touch()
    timm_rep.export(deit(), folder)
    assert {path.name for path in folder.iterdir() if not path.name.startswith('.')} == {
        'config.json', 'model.safetensors', 'verify.json'}
    with pytest.raises(FileExistsError, match='not empty'):
        timm_rep.export(deit(), folder)
