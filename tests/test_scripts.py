"""The scripts of scripts/, on next to nothing."""
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import timm_rep.scales.packaged as packaged
from tests.reference.rep_optim import normal_scales
from timm_rep.scales import Scales, packaged_scales

SCRIPTS = Path(__file__).parents[1] / 'scripts'


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Imports a script by name; what it reports goes to a temporary folder."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(importlib.import_module('_report'), 'RESULTS', tmp_path / 'results')

    def run(name, *args):
        monkeypatch.setattr(sys, 'argv', [str(SCRIPTS / f'{name}.py'), *map(str, args)])
        return importlib.import_module(name).main()

    return run


def reported(tmp_path, section):
    path, = (tmp_path / 'results').glob(f'*/{section}.json')
    return json.loads(path.read_text())


TINY = 'depths=(1,2,1,1) widths=(8,8,16,16) stem_width=8'.split()


def test_ablations(script, images, tmp_path, capsys):
    """Rows differ in what they name: one row twice is the same, every other one another."""
    tiny = dict(depths=(1, 2, 1, 1), widths=(8, 8, 16, 16), stem_width=8)
    normal_scales(timm.create_model('repopt_vgg_a0', **tiny), seed=0).save(tmp_path / 's.safetensors')
    rows = ['sgd', 'repsgd', 'no-init', 'ones', 'mean', 'repadamw', 'strides-22121']
    args = [
        '--model', 'repopt_vgg_a0', '--model-kwargs', *TINY, '--scales', tmp_path / 's.safetensors', '--dataset', '',
        '--data-dir', images, '--batch-size', 5, '--epochs', 2, '--search-epochs', 1, '-j', 0]
    script('ablations', *rows, *args)
    result = reported(tmp_path, 'ablations')
    assert [row['row'] for row in result['rows']] == rows
    assert all(0 <= row['accuracy'] <= 100 for row in result['rows'])
    assert [row['search_accuracy'] is not None for row in result['rows']] == [False] * 6 + [True]
    with pytest.raises(SystemExit):
        script('ablations', 'repsgd', '--model', 'repopt_vgg_l2')
    assert 'repopt_vgg_l2 has no searched scales in this package' in capsys.readouterr().err


def test_gpu_hyper_search(images, tmp_path):
    """Stopped before it began, then run to its end, then nothing left to do; on a CPU, for it has no other way."""
    command = [
        sys.executable, SCRIPTS / 'gpu' / 'hyper_search.py', '--output', tmp_path, '--models', 'repopt_ghostnet_050',
        '--data-dir', images, '--val-split', 'validation', '--epochs', 1, '--warmup-epochs', 0, '--batch-size', 10,
        '--workers', 0, '--device', 'cpu', '--minutes']

    def run(minutes):
        done = subprocess.run([str(c) for c in (*command, minutes)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert 'left: repopt_ghostnet_050; run this again' in run(0)
    assert 'nothing is left' in run(5)
    path = tmp_path / 'repopt_ghostnet_050.safetensors'
    before = path.stat().st_mtime_ns
    assert "epochs='1'" in run(5)
    assert path.stat().st_mtime_ns == before
    assert timm.create_model('repopt_ghostnet_050', scales=str(path))


def test_package_scales(script, tmp_path, monkeypatch, capsys):
    """The file of the package has the layers in the model's order, the card a row for it."""
    monkeypatch.setattr(packaged, '_FOLDER', tmp_path / 'packaged')
    module = importlib.import_module('package_scales')
    monkeypatch.setattr(module, 'FOLDER', tmp_path / 'packaged')
    search = timm.create_model('repopt_vgg_a0', structure='search')
    found = Scales.from_model(search)
    shuffled = Scales({name: found[name] for name in sorted(found)}, {
        'model': 'repopt_vgg_a0', 'dataset': 'x', 'epochs': '3', 'batch_size': '8', 'accuracy': '12.34',
        'date': '2020-01-01', 'timm_rep': '0'})
    shuffled.save(tmp_path / 's.safetensors')
    script('package_scales', tmp_path / 's.safetensors', '--dataset', 'Noise')
    again = Scales.load('repopt_vgg_a0')
    assert again == found
    assert list(again) == list(found)
    assert packaged_scales() == ['repopt_vgg_a0']
    row = '| `repopt_vgg_a0` | Noise | 3 | 8 | 12.34% | 2020-01-01 | 0 |'
    assert row in (tmp_path / 'packaged' / 'README.md').read_text().splitlines()
    model = timm.create_model('repopt_vgg_a0')
    layer = model.stages[2][5].conv
    assert torch.equal(
        layer.grad_mult.dense('squared'), layer.csla.grad_mult(found['stages.2.5.conv']).dense('squared'))
