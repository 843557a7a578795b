"""Wrong files and arguments: one line that names the file and the cause, exit status 1, nothing is written."""
import io
import json
import os
import pickle
import shutil
import struct
import zipfile

import pytest
import timm
import torch

from tests.hub.published import REPA, publish
from timm_rep.cli import main
from timm_rep.hub import CONFIG_NAME, sha256
from timm_rep.publish._metrics import METRICS_NAME

NAME = 'repa_deit_tiny.mine'


class NotATensor:
    def __reduce__(self):
        return print, ('executed',)


def _torch(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _zip(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _safetensors(header, data=b'0000'):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack('<Q', len(header)) + header + data


_TENSOR = {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}
JUNK = {
    'empty.pth': b'',
    'text.pth': b'hello world\n',
    'random.pth': bytes(range(200, 256)) * 50,
    'truncated.pth': _torch({'x': torch.zeros(100)})[:700],
    'archive.pth': _zip(**{'x/data.pkl': b'junk'}),
    'pickle.pth': pickle.dumps({'state_dict': NotATensor()}),
    'class.pth': _torch(NotATensor()),
    'number.pth': _torch(5),
    'none.pth': _torch(None),
    'list.pth': _torch([torch.zeros(2)]),
    'tensor.pth': _torch(torch.zeros(3)),
    'no-tensors.pth': _torch({'state_dict': {'a': 1, 'b': 'x'}}),
    'no-names.pth': _torch({1: torch.zeros(2)}),
    'nested.pth': _torch({'state_dict': {'inner': {'w': torch.zeros(2)}}}),
    'list-inside.pth': _torch({'state_dict': [torch.zeros(2)]}),
    'none-inside.pth': _torch({'state_dict': None}),
    'nothing-inside.pth': _torch({'state_dict': {}}),
    'empty.safetensors': b'',
    'text.safetensors': b'hello world\n',
    'truncated.safetensors': _safetensors({'x': {**_TENSOR, 'shape': [100], 'data_offsets': [0, 400]}}),
    'header.safetensors': _safetensors({'x': _TENSOR})[:20],
    'huge-header.safetensors': struct.pack('<Q', 1 << 40) + b'{}',
    'list.safetensors': _safetensors([1]),
    'bomb.safetensors': _safetensors(b'[' * 100_000),
    'shape.safetensors': _safetensors({'x': {**_TENSOR, 'shape': [1 << 40, 1 << 40]}}),
}


@pytest.fixture(scope='module')
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp('published') / NAME
    publish(folder)
    recipe = {'model': 'repa_deit_tiny', 'num_classes': 5, 'model_kwargs': REPA[1]}
    (folder / 'train.yaml').write_text(json.dumps(recipe))  # JSON is YAML
    return folder


@pytest.fixture
def folder(published, tmp_path, monkeypatch):
    """A published folder with a recipe, in the current directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(published, tmp_path / NAME)


def check_error(capsys, argv, *parts):
    """A command fails with one line that holds all of ``parts``."""
    assert main([str(arg) for arg in argv]) == 1, argv
    captured = capsys.readouterr()
    assert 'executed' not in captured.out
    lines = [line for line in captured.err.splitlines() if line.startswith('timm-rep: ')]
    assert len(lines) == 1
    assert captured.err.endswith(f'{lines[0]}\n'), captured.err
    for part in parts:
        assert str(part) in lines[0]
    assert 'retry with weights_only=False' not in lines[0]


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('name', JUNK)
def test_junk_checkpoints(folder, capsys, name):
    file = folder.parent / name
    file.write_bytes(JUNK[name])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    tiny = ['--model-kwargs', 'depth=1', 'embed_dim=24']
    for argv in (
            ['card', folder, '--checkpoint', file],
            ['convert', file, '--model', 'repa_deit_tiny', '-o', 'repa_deit_tiny.new', *tiny],
            ['convert', file, '--model', 'repopt_vgg_a0', '-o', 'repopt_vgg_a0.new'],
            ['plot-scales', file],
            ['plot-scales', '--kernels', file],
            ['plot-attention-weights', f'repa_deit_tiny={file}'],
            ['weight-select', '--student', 'repa_deit_tiny', '--teacher', file, '-o', 'x.safetensors', *tiny],
            *([['card', folder, '--use-ema', '--checkpoint', file]] if name.endswith('.pth') else []),
    ):
        check_error(capsys, argv, name)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(folder.parent.glob('*.new/*'))
    assert not (folder.parent / 'x.safetensors').exists()


def test_a_checkpoint_of_another_model(folder, capsys):
    torch.save(timm.create_model('repa_deit_tiny', **{**REPA[1], 'depth': 1}).state_dict(), 'other.pth')
    assert main(['card', str(folder), '--checkpoint', 'other.pth']) == 1
    error = capsys.readouterr().err
    assert error.startswith("timm-rep: Expected a checkpoint that fits the model, but got 'other.pth'")
    assert '(blocks.1.' in error


@pytest.mark.parametrize('recipe,parts', [
    (b'[a]', []),
    (b'a: [', ['must be valid YAML']),
    (b'root:x:0:0:root:/root:/bin/bash', []),
    (b'\xff\xfe', ['UTF-8']),
    pytest.param(b'[' * 3_000, ['must be valid YAML'], marks=pytest.mark.slow),
    (b'{"model": "repa_deit_tiny", "password": "x"}', ['password']),
    (b'{"model": "repa_deit_tiny", "model_kwargs": [1]}', ['model_kwargs', '[1]']),
    (b'{"model": "repa_deit_tiny", "num_classes": "many"}', ['num_classes', "'many'"]),
    (b'{"model": "repa_deit_tiny", "img_size": [32, 32]}', ['img_size', '[32, 32]']),
    (b'{"model": "repa_deit_tiny", "input_size": 3}', ['input_size', '3']),
    (b'{"model": "repa_deit_tiny", "mean": "x"}', ['mean', "'x'"]),
    (b'{"model": "repa_deit_tiny", "std": [1, 0, 1]}', ['std', 'positive']),
    (b'{"model": "repa_deit_tiny", "interpolation": "x"}', ['interpolation', "'x'"]),
    (b'{"model": "repa_deit_tiny", "interpolation": "random"}', ['interpolation', "'random'"]),  # of trainings only
    (b'{"model": "repa_deit_tiny", "global_pool": "max"}', ['global_pool']),  # train.py has gp, and ignores others
    (b'{"model": "repa_deit_tiny", "gp": 1}', ['gp', '1']),
    (b'{"model": "repa_deit_tiny", "model_kwargs": {"depth": "x"}}', ['model_kwargs cannot be used', 'TypeError']),
    (b'{"model": "repa_deit_tiny", "model_kwargs": {"num_heads": 0}}', ['model_kwargs cannot be used', 'ZeroDivision']),
    (b'{"model": "repa_deit_tiny", "model_kwargs": {"nothing": 1}}', ['model_kwargs cannot be used', "'nothing'"]),
])
def test_recipes(folder, capsys, recipe, parts):
    (folder.parent / 'recipe.yaml').write_bytes(recipe)
    torch.save({'x': torch.zeros(1)}, 'c.pth')
    check_error(capsys, ['card', folder, '--checkpoint', 'c.pth', '--recipe', 'recipe.yaml'], 'recipe.yaml', *parts)


def _edit(file, field, value):
    """Set a field of a JSON file, 'a.b' for one of a mapping; bytes replace the whole file."""
    if isinstance(value, bytes):
        file.write_bytes(value)
        return
    config = json.loads(file.read_text()) if file.is_file() else {}
    *parents, last = field.split('.')
    mapping = config
    for parent in parents:
        mapping = mapping.setdefault(parent, {})
    mapping[last] = value
    file.write_text(json.dumps(config))


@pytest.mark.parametrize('field,value,parts', [
    ('', b'[1]', ['[1]']),
    ('', b'null', ['None']),
    ('', b'{', ['must be valid JSON']),
    ('', b'[' * 100_000, ['must be valid JSON']),
    ('', b'\xff', ['UTF-8']),
    ('dataset', 5, ['dataset must be', '5']),
    ('accuracy', [1], ['accuracy must be', '[1]']),
    ('accuracy', {}, ['accuracy must have', "'top1'"]),
    ('accuracy', {'top1': 'x'}, ['accuracy: top1 must be', "'x'"]),
    ('cost', 'x', ['cost must be']),
    ('cost', {'forms': {'folded': {'params': 1, 'gmacs': 1, 'images_per_second': 0}}, 'batch_size': 1, 'dtype': 'x',
              'img_size': [1, 1], 'machine': 'x', 'date': 'x', 'versions': {'torch': 'x'}},
     ['folded: images_per_second must be positive']),
    ('cost', {'forms': {}, 'batch_size': 1, 'dtype': 'x', 'img_size': [1, 1], 'machine': 'x', 'date': 'x',
              'versions': {'torch': 'x'}}, ["forms must have 'folded'"]),
    ('cited', 'x', ['cited must be']),
    ('cited', [{'what': 'x'}], ['cited must have', "'value'"]),
])
def test_metrics(folder, capsys, field, value, parts):
    if field in ('accuracy', 'cost') and isinstance(value, dict):
        value = {**value, 'weights': sha256(folder / 'model.safetensors')}
        if 'top1' in value:
            value = {**value, 'top5': 1, 'images': 1, 'split': 'val', 'date': 'x', 'machine': 'x', 'versions': {}}
    _edit(folder / METRICS_NAME, field, value)
    for argv in (['card', folder], ['push', folder, '--folded', '--dry-run']):
        check_error(capsys, argv, METRICS_NAME, *parts)


@pytest.mark.parametrize('field,value,parts', [
    ('', b'[1]', ['[1]']),
    ('', b'', ['must be valid JSON']),
    ('', b'[' * 100_000, ['must be valid JSON', 'nested too deeply']),
    ('', b'\xff', ['UTF-8']),
    ('architecture', 5, ['architecture must be']),
    ('architecture', 'nothing', ["architecture' must be", "'nothing'"]),
    ('label_names', 5, ['label_names must be']),
    ('pretrained_cfg', [], ['pretrained_cfg must be']),
    ('pretrained_cfg.input_size', ['a', 'b', 'c'], ['input_size must be']),
    ('pretrained_cfg.std', [0, 0, 0], ['std must be positive']),
    ('pretrained_cfg.interpolation', 5, ['interpolation must be']),
    ('pretrained_cfg.crop_pct', 'x', ['crop_pct must be']),
    ('model_args', None, ['model_args must be']),
    ('model_args', [1], ['model_args must be']),
    ('model_args.depth', 'x', ['cannot be used: TypeError']),
    ('model_args.num_heads', 0, ['cannot be used: ZeroDivisionError']),
    ('model_args.num_heads', 7, ['cannot be used: AssertionError']),
    ('model_args.act_layer', 'nothing', ['cannot be used: KeyError']),
    ('model_args.embed_dim', 12, ['model.safetensors', 'weights that fit the model']),
    ('sha256', 5, ['sha256 must be']),
    ('sha256', {'model.safetensors': 5}, ['sha256: model.safetensors must be']),
])
def test_configs(folder, capsys, field, value, parts):
    _edit(folder / CONFIG_NAME, field, value)
    if 'weights that fit the model' in parts:  # a list of tensors follows
        assert main(['card', str(folder)]) == 1
        line = capsys.readouterr().err.splitlines()[0]
        assert all(part in line for part in (str(folder), *parts))
    else:
        where = os.fspath(folder) if 'cannot be used' in parts[0] else CONFIG_NAME
        check_error(capsys, ['card', folder, '--measure'], where, *parts)


@pytest.mark.parametrize('field,value', [
    ('num_classes', None), ('pretrained_cfg.input_size', [3, 64]), ('pretrained_cfg.input_size', 'x')])
def test_a_config_that_timm_cannot_use(tmp_path, capsys, field, value):
    """Also of a model of timm's own."""
    timm.models.save_for_hf(timm.create_model('test_resnet'), tmp_path / 'plain', safe_serialization=True)
    _edit(tmp_path / 'plain' / CONFIG_NAME, field, value)
    check_error(capsys, ['profile', f'local-dir:{tmp_path / "plain"}'], str(tmp_path / 'plain'))


@pytest.mark.parametrize('argv,parts', [
    (['card', NAME, '--data-dir', 'nowhere'], ["'nowhere'", 'CLASS/IMAGE']),
    (['hyper-search', 'repopt_vgg_a0', '-o', 's.safetensors', '--dataset', '', '--data-dir', 'nowhere'],
     ["'nowhere'"]),
    (['hyper-search', 'repopt_vgg_a0', '-o', 's.safetensors'], ["'torch/cifar100'", '--data-dir must be given']),
    (['hyper-search', 'repopt_vgg_a0', '-o', 's.safetensors', '--data-dir', '.', '--device', 'nothing'],
     ["--device must be one that torch can use, got 'nothing'"]),
    (['profile', 'repa_deit_tiny', '--model-kwargs', 'num_heads=7'], ["{'num_heads': 7} cannot be used"]),
    (['profile', 'repa_deit_tiny', '--model-kwargs', 'nothing=7'], ["{'nothing': 7} cannot be used"]),
    (['weight-select', '--student', 'repa_deit_tiny', '--teacher', 'x', '-o', 'x.safetensors',
      '--model-kwargs', 'num_heads=0'], ["{'num_heads': 0} cannot be used"]),
    (['convert', 'c.pth', '--model', 'repa_deit_tiny', '-o', 'repa_deit_tiny.new', '--model-kwargs', 'depth=x'],
     ["{'depth': 'x'} cannot be used"]),
])
def test_wrong_arguments(folder, capsys, argv, parts):
    torch.save({'x': torch.zeros(2, 2)}, 'c.pth')
    check_error(capsys, argv, *parts)


@pytest.mark.parametrize('argv,message', [
    (['card', NAME, '--device', 'nothing'], "device that torch can use, got 'nothing'"),
    (['card', NAME, '--device', 'hpu'], "device that torch can use, got 'hpu'"),
    (['profile', 'repa_deit_tiny', '--device', 'meta'], "device that torch can use, got 'meta'"),
    (['hyper-search', 'repopt_vgg_a0', '-o', 's.safetensors', '--seed', '9' * 20], 'from 0 to 2 ** 31 - 1'),
    (['weight-select', '--student', 'm', '--teacher', 'm', '-o', 's.safetensors', '--seed', '-1'],
     'from 0 to 2 ** 31 - 1'),
])
def test_arguments_of_a_wrong_type(capsys, argv, message):
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
