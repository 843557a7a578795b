import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from timm_rep.cli import main
from timm_rep.demo import run_demo
from timm_rep.demo.training import load_split


@pytest.fixture(scope='module')
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp('demo') / 'new folder', epochs=1, seed=3)


def test_results(demo):
    plain, repa, folded = demo.rows.values()
    assert repa['accuracy'] == folded['accuracy']
    assert all(0 < row['accuracy'] <= 100 and row['throughput'] > 0 for row in demo.rows.values())
    assert folded['params'] < 0.6 * repa['params']
    assert folded['macs'] < 0.6 * plain['macs']
    assert demo.logits_difference < 1e-5
    assert all(0 < accuracy <= 100 for accuracy in demo.repopt.accuracy.values())
    assert all(len(losses) == 44 for losses in demo.repopt.losses.values())
    assert all(len(difference) == 50 for difference in demo.repopt.csla_difference.values())
    assert max(demo.repopt.csla_difference['RepSGD']) < 1e-10
    assert demo.repopt.csla_difference['SGD'][-1] > 1e-2
    assert demo.picture.read_bytes().startswith(b'\x89PNG')


def test_usage_runs(demo):
    assert demo.usage.count('\n') == 2
    run = subprocess.run(
        [sys.executable, '-c', demo.usage],
        capture_output=True, text=True, check=True, env={**os.environ, 'HF_HUB_OFFLINE': '1'},
    )
    assert run.stdout.strip() in set('0123456789')


def test_reproducible_by_seed(demo, tmp_path):
    again = run_demo(tmp_path, epochs=1, seed=3)
    first, second = (load_file(d.model_folder / 'model.safetensors') for d in (demo, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(v, second[k]) for k, v in first.items())
    assert again.repopt == demo.repopt
    assert [row['accuracy'] for row in again.rows.values()] == [row['accuracy'] for row in demo.rows.values()]


def test_seed_and_device_matter(demo, tmp_path, monkeypatch):
    seeds = {seed: [list(part.targets) for part in load_split(seed)] for seed in (3, 4)}
    assert seeds[3] != seeds[4]
    moved = []
    monkeypatch.setattr('timm_rep.demo.repopt._STEPS', 2)
    monkeypatch.setattr('timm_rep.demo.training.train', lambda *args, **kwargs: moved.append(args[4]) or [1.])
    other = run_demo(tmp_path, epochs=1, seed=4, device='cpu:0')
    assert moved == [torch.device('cpu:0')] * 4
    assert not torch.equal(*(load_file(d.model_folder / 'model.safetensors')['cls_token'] for d in (demo, other)))


def test_existing_output_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr('timm_rep.demo.repopt._STEPS', 2)
    monkeypatch.setattr('timm_rep.demo.training.train', lambda *a, **k: [1.])
    first = run_demo(tmp_path, seed=1)
    before = (first.model_folder / 'model.safetensors').read_bytes()
    run_demo(tmp_path, seed=2)
    assert (first.model_folder / 'model.safetensors').read_bytes() != before
    assert sorted(os.listdir(tmp_path)) == ['demo.png', 'digit.png', 'model']


@pytest.mark.slow
def test_learns(tmp_path, capsys):
    """The command as a newcomer types it."""
    assert main(['demo', '--output', str(tmp_path)]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith('RePa-DeiT, folded'))
    assert float(row.split()[2].rstrip('%')) > 95
    row = next(line for line in out.splitlines() if line.startswith('One stack'))
    with_rep, without = (float(word.rstrip('%')) for word in row.split() if word.endswith('%'))
    assert with_rep > 95
    assert with_rep > without + 10
    assert len(out.strip().splitlines()[-3:]) == 3
    assert out.strip().splitlines()[-3].startswith('import timm, timm_rep')


@pytest.mark.parametrize('args,message', [
    (['--output', '{file}'], "cannot write to the output folder '{file}'"),
    (['--device', 'cuda:99'], "cannot use the device 'cuda:99'"),
    (['--device', 'toaster'], "cannot use the device 'toaster'"),
    (['--device', 'meta'], "cannot use the device 'meta'"),
    (['--epochs', '0'], 'epochs'),
    (['--seed', '-1'], 'seed'),
    (['--seed', str(2 ** 32)], 'seed'),
    (['--output', '{parent}'], "demo.png in it is a folder"),
    (['--output', '{blocked}'], "cannot write to the output folder '{blocked}/model'"),
], ids=str)
def test_refused_before_any_training(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    places = {name: tmp_path / name for name in ('file', 'parent', 'blocked')}
    places['file'].write_text('old')
    (places['parent'] / 'demo.png').mkdir(parents=True)
    places['blocked'].mkdir()
    (places['blocked'] / 'model').write_text('old')
    monkeypatch.setattr('timm_rep.demo.training.train', lambda *a, **k: pytest.fail('trained'))
    assert main(['demo', *(a.format(**places) for a in args)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ''
    assert message.format(**places).lower() in captured.err.lower()
    assert places['file'].read_text() == (places['blocked'] / 'model').read_text() == 'old'
    assert not (tmp_path / 'timm-rep-demo').exists()


def test_missing_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'sklearn', None)
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    assert main(['demo', '--output', str(tmp_path)]) == 1
    assert "pip install 'timm-rep[demo]'" in capsys.readouterr().err
