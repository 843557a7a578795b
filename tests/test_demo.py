import copy
import os
import re
import statistics
import subprocess
import sys

import pytest
import timm
import torch
from PIL.Image import BICUBIC
from safetensors.torch import load_file
from torchvision.transforms.functional import to_tensor

from tests.helpers import same_weights
from timm_rep import convert_to_repa
from timm_rep.cli import main
from timm_rep.demo import repa, repopt, run_demo, training
from timm_rep.demo.training import load_split
from timm_rep.hub import save_folder

STEPS = 8  # of the comparison with the CSLA net


@pytest.fixture(scope='module')
def small():
    """Makes the demo small: 64 and 32 images, two blocks, few steps. Its real size is for test_learns.

    Yields the function that gives the images of a seed.
    """

    def few(seed):
        parts = load_split(seed)
        for part, n in zip(parts, (64, 32)):
            part.images, part.targets = part.images[:n], part.targets[:n]
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('timm_rep.demo.load_split', few)
        patch.setattr(repa, '_MODEL_ARGS', dict(repa._MODEL_ARGS, embed_dim=32, depth=2, num_heads=2))
        patch.setattr(repopt, '_MODEL_ARGS', dict(repopt._MODEL_ARGS, depths=(1, 2, 1, 1)))
        patch.setattr(repopt, '_STEPS', STEPS)
        yield few


@pytest.fixture(scope='module')
def demo(small, tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp('demo') / 'new folder', epochs=2, seed=3)


def test_no_warnings_of_scales(small, caplog, monkeypatch):
    """The networks of the demo have no searched scales, and it does not ask for them."""
    monkeypatch.setattr(repopt, '_STEPS', 1)
    repopt._csla_difference(small(0)[0], 0)
    assert not caplog.records


def test_results(demo):
    plain, converted, repa, folded = demo.repa.rows.values()
    assert repa['accuracy'] == folded['accuracy']
    assert all(0 <= row['accuracy'] <= 100 and row['throughput'] > 0 for row in demo.repa.rows.values())
    assert folded['params'] < 0.7 * repa['params']
    assert folded['macs'] < 0.7 * plain['macs']
    assert converted['params'] < 0.7 * plain['params']
    assert (plain['macs'], converted['macs']) == demo.repa.conversion.macs
    assert demo.repa.logits_difference < 1e-5
    assert list(demo.repopt.accuracy) == ['SGD', 'SGD, kernels of RepSGD', 'RepSGD']
    for found in demo.repopt.accuracy.values():
        assert len(found) == 4
        assert all(0 <= accuracy <= 100 for accuracy in found.values())
    assert all(len(difference) == STEPS for difference in demo.repopt.csla_difference.values())
    assert max(demo.repopt.csla_difference['RepSGD']) < 1e-10
    assert demo.repopt.csla_difference['SGD'][-1] > 1e-2
    assert demo.picture.read_bytes().startswith(b'\x89PNG')


def test_conversion(small, demo):
    """The third part converts the plain ViT that the first part trains, as is done here by hand."""
    train_set, val_set = small(3)
    cpu = torch.device('cpu')
    model = training.create_model('deit_tiny_patch16_224', 3, cpu, **repa._MODEL_ARGS)
    loader = training.create_loader_for(train_set, model, is_training=True)
    training.train('', model, loader, 2, cpu, opt='adamw', lr=2e-3, weight_decay=0.05)
    model.eval()
    images, val_images = (
        torch.stack([(to_tensor(image.resize((16, 16), BICUBIC)) - 0.5) / 0.5 for image in part.images])
        for part in (train_set, val_set))
    before = model(val_images).argmax(-1)
    report = convert_to_repa(model, idle_ratio=0.75, calibration=[images])
    after = model(val_images).argmax(-1)
    assert demo.repa.rows['plain ViT, converted']['accuracy'] == pytest.approx(
        100 * (after == torch.tensor(val_set.targets)).double().mean().item())
    assert demo.repa.agreement == 100 * (before == after).double().mean().item()
    assert demo.repa.conversion.images == report.images == 64
    for ours, by_hand in zip(demo.repa.conversion.ffns, report.ffns, strict=True):
        assert ours.idle_ratio == by_hand.idle_ratio == 0.75
        assert ours.lost_variance == pytest.approx(by_hand.lost_variance, rel=1e-3)


def test_usage_runs(demo, monkeypatch, capsys):
    assert demo.usage.count('\n') == 2
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    exec(demo.usage, {})
    assert capsys.readouterr().out.strip() in set('0123456789')


@pytest.fixture
def no_picture(monkeypatch):
    """Replaces drawing, the longest part of the small demo."""
    monkeypatch.setattr('timm_rep.demo.draw', lambda result, path: path.touch())


@pytest.mark.slow
def test_reproducible_by_seed(demo, no_picture, tmp_path):
    """The same results in an existing folder, whose files are replaced; another seed gives other results."""
    first = load_file(demo.model_folder / 'model.safetensors')
    other = run_demo(tmp_path, epochs=2, seed=4)
    assert not torch.equal(first['cls_token'], load_file(other.model_folder / 'model.safetensors')['cls_token'])
    assert other.repopt != demo.repopt
    again = run_demo(tmp_path, epochs=2, seed=3)
    second = load_file(again.model_folder / 'model.safetensors')
    assert first.keys() == second.keys()
    assert all(torch.equal(v, second[k]) for k, v in first.items())
    assert again.repopt == demo.repopt
    assert [row['accuracy'] for row in again.repa.rows.values()] == [row['accuracy'] for row in demo.repa.rows.values()]
    assert sorted(os.listdir(tmp_path)) == ['demo.png', 'digit.png', 'model']


@pytest.mark.slow
def test_seed_and_device_of_the_training(small, no_picture, tmp_path, monkeypatch):
    seeds = {seed: [list(part.targets) for part in load_split(seed)] for seed in (3, 4)}
    assert seeds[3] != seeds[4]
    devices, rates, starts = [], {}, {}

    def train(name, model, loader, epochs, device, **kwargs):
        devices.append(device)
        if epochs == 3:  # half of them
            label = name.removeprefix('plain VGG, ').rpartition(', lr')[0]
            rates.setdefault((label, kwargs['opt']), []).append(kwargs['lr'])
            starts[label, kwargs['lr']] = copy.deepcopy(model)

    monkeypatch.setattr(repopt, '_STEPS', 2)
    monkeypatch.setattr('timm_rep.demo.training.train', train)
    run_demo(tmp_path, seed=4, device='cpu:0', epochs=5)
    assert devices == [torch.device('cpu:0')] * 14
    assert list(rates) == [('SGD', 'sgd'), ('SGD, kernels of RepSGD', 'sgd'), ('RepSGD', 'repsgd')]
    found = list(rates.values())
    assert found[0] == found[1] == found[2] == sorted({*found[0]})
    assert len(found[0]) == 4
    for lr in found[0]:
        plain, kernels, rep = (starts[label, lr] for label, _ in rates)
        assert same_weights(kernels, rep)
        assert not same_weights(plain, rep)


@pytest.mark.slow
def test_learns(tmp_path):
    """The command with its defaults, and the code that it prints, each in a process that no fixture made small."""
    out = subprocess.run(
        [sys.executable, '-m', 'timm_rep.cli', 'demo', '--output', str(tmp_path)], capture_output=True, text=True,
        check=True).stdout
    row = next(line for line in out.splitlines() if line.startswith('RePa-DeiT, folded'))
    assert float(row.split()[2].rstrip('%')) > 95
    plain, converted = (
        float(re.search(rf'^{label} +([0-9.]+)%', out, re.MULTILINE)[1])
        for label in ('plain ViT', 'plain ViT, converted'))
    assert converted > plain - 3
    found = {
        label: [float(word) for word in re.findall(r': ([0-9.]+)%', line)]
        for label in ('SGD', 'RepSGD') for line in out.splitlines() if line.startswith(f'{label} ')}
    assert max(found['RepSGD']) > 95
    assert max(found['RepSGD']) > max(found['SGD']) + 5  # each at its best learning rate
    assert statistics.mean(found['RepSGD']) > statistics.mean(found['SGD']) + 10
    usage = '\n'.join(out.strip().splitlines()[-3:])
    assert usage.startswith('import timm, timm_rep')
    run = subprocess.run(
        [sys.executable, '-c', usage], capture_output=True, text=True, check=True,
        env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    assert run.stdout.strip() in set('0123456789')


@pytest.mark.parametrize('args,message', [
    (['-o', '{file}'], "cannot write to the output folder '{file}'"),
    (['--output', '{parent}'], "{parent}/demo.png' must not be a folder"),
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


@pytest.mark.parametrize('kwargs', [dict(seed=-1), dict(seed=2 ** 32), dict(epochs=0)], ids=str)
def test_arguments_refused_before_any_training(tmp_path, kwargs):
    name, = kwargs
    with pytest.raises(ValueError, match=f'{name} must be'):
        run_demo(tmp_path / 'new', **kwargs)
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('device', ['cuda:99', 'toaster', 'meta'])
def test_device_refused_before_any_training(tmp_path, capsys, monkeypatch, device):
    monkeypatch.setattr('timm_rep.demo.training.train', lambda *a, **k: pytest.fail('trained'))
    with pytest.raises(RuntimeError, match=f"device must be .*got '{device}'"):
        run_demo(tmp_path / 'new', device=device)
    with pytest.raises(SystemExit) as stopped:
        main(['demo', '--output', str(tmp_path / 'new'), '--device', device])
    assert stopped.value.code == 2
    assert f"argument --device: expected a device that torch can use, got '{device}'" in capsys.readouterr().err
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('args,expected', [([], 'cuda'), (['--device', 'cpu'], 'cpu')], ids=str)
def test_gpu_by_default(monkeypatch, args, expected):
    """Where there is a GPU, the demo runs on it, as other commands do."""
    devices = []

    def run(output, device, **kwargs):
        devices.append(device)
        raise RuntimeError('enough')

    monkeypatch.setattr('timm_rep.cli.demo.run_demo', run)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert main(['demo', *args]) == 1
    assert devices == [torch.device(expected)]


def test_another_model_is_not_overwritten(tmp_path, capsys):
    save_folder(timm.create_model('test_vit'), tmp_path / 'model')
    before = (tmp_path / 'model' / 'config.json').read_bytes()
    assert main(['demo', '-o', str(tmp_path), '--epochs', '1']) == 1
    assert 'another model' in capsys.readouterr().err
    assert (tmp_path / 'model' / 'config.json').read_bytes() == before


def test_missing_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'sklearn', None)
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    assert main(['demo', '--output', str(tmp_path)]) == 1
    assert "pip install matplotlib scikit-learn" in capsys.readouterr().err
