"""scripts/experiments: data files, procedures at toy size, interrupted and concurrent runs."""
import argparse
import copy
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.optim import list_optimizers, muon

from tests.helpers import ROOT, SCRIPTS, needs_recorded_args, randomize_, relative, run, same_weights
from timm_rep.convert import folded_copy
from timm_rep.convert.ffn import find_ffns
from timm_rep.deploy import BACKENDS, CALIBRATORS
from timm_rep.init.weight_select import ELEMENT_CHOICES
from timm_rep.layers import csla_layers
from timm_rep.optim import GradMult
from timm_rep.scales import Scales
from timm_rep.utils.profiling import count_macs

NAMES = sorted(path.stem for path in (SCRIPTS / 'experiments').glob('*.yaml'))
TOY = ['num_classes=4', 'classes=None', 'batch_size=10', 'warmup_epochs=1', 'train_images=20', 'amp=False']
VGG = "model_args={'depths': [1, 2, 1, 1], 'widths': [8, 8, 16, 16], 'stem_width': 8}"


@pytest.fixture
def start(script, images, tmp_path):
    """Runs an experiment at toy size and returns the rows of its file."""
    def begin(name, *args, settings=(), output='out', epochs=2):
        status = script(
            'experiments/run', name, '--data-dir', images, '--val-split', 'validation', '--output',
            tmp_path / output, *args, '--set', *TOY, *settings, f'epochs={epochs}')
        paths = list((tmp_path / 'results').glob(f'*/{name}.json'))
        return status, json.loads(paths[0].read_text())['rows'] if paths else []

    return begin


@pytest.fixture
def models_trained(load_script, monkeypatch):
    """(model before its first step, optimizer) of each training, in turn."""
    module, seen = load_script('experiments/train'), []
    fit = module.fit

    def spied(model, optimizer, *args, **kwargs):
        seen.append((copy.deepcopy(model), optimizer))
        return fit(model, optimizer, *args, **kwargs)

    monkeypatch.setattr(module, 'fit', spied)
    return seen


@pytest.mark.parametrize('supported', [False, True])
def test_bfloat16_where_the_cpu_has_it(script, load_script, images, tmp_path, monkeypatch, supported):
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: supported)
    module, dtypes, of_muon = load_script('experiments/train'), [], set()
    fit, newton_schulz = module.fit, muon.zeropower_via_newtonschulz

    def recorded(gradient, *args, dtype=torch.bfloat16, **kwargs):
        of_muon.add(dtype)
        return newton_schulz(gradient, *args, dtype=dtype, **kwargs)

    monkeypatch.setattr(module, 'fit', lambda *args, **kw: dtypes.append(kw['amp_dtype']) or fit(*args, **kw))
    monkeypatch.setattr(muon, 'zeropower_via_newtonschulz', recorded)
    settings = [setting for setting in TOY if not setting.startswith('amp')]
    args = ['--rows', 'sgd', '--seeds', '0', '--set', *settings, VGG, 'epochs=1', 'opt=muon']
    assert script(
        'experiments/run', 'repoptimizers', '--data-dir', images, '--val-split', 'validation',
        '--output', tmp_path / 'out', *args) == 0
    content = json.loads(next((tmp_path / 'results').glob('*/repoptimizers.json')).read_text())
    assert (dtypes, content['settings']['amp']) == ([torch.bfloat16 if supported else None], supported)
    assert of_muon == {torch.bfloat16 if supported else torch.float32}


def trainings(settings):
    """All settings of trainings and searches in the settings of a row."""
    if isinstance(settings, dict):
        if 'model' in settings:
            yield settings
        for value in settings.values():
            yield from trainings(value)


@pytest.fixture(scope='module')
def built():
    """Models by their settings: the experiments have most of them in common."""
    return {}


@pytest.mark.parametrize('scale', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow) if name == 'pretrained-teachers' else name for name in NAMES])
def test_data_files(load_script, built, name, scale):
    """Every row can begin: its models can be built, and start from each other; all names exist."""
    module, train = load_script('experiments/experiment'), load_script('experiments/train')
    methods = load_script('experiments/convert')

    def cached(create, *key):
        key = json.dumps(key, sort_keys=True)
        if key not in built:
            built[key] = create()
        return built[key]

    def model(settings):
        name, args = settings['model'], settings['model_args']
        if 'file' in settings:
            return cached(lambda: timm.create_model(name, **args), name, args)
        kind = 'init' if isinstance(settings.get('scales'), dict) else settings.get('scales')
        structure = {} if 'opt' in settings else {'structure': 'search'}
        return cached(lambda: train.build(settings, kind, **structure), name, args, kind, structure)

    experiment = module.load(name, scale)
    document = experiment.document
    assert document['what'].strip().endswith('.')
    assert len({(json.dumps(row.identity), row.seed) for row in experiment.rows}) == len(experiment.rows)
    used = {json.dumps(t, sort_keys=True) for row in experiment.rows for t in trainings(row.settings)}
    for settings in map(json.loads, used):
        net = model(settings)
        if 'file' in settings:
            continue
        assert settings['epochs'] >= 1
        assert set(settings['classes'] or []) <= set(range(10))
        if 'opt' not in settings:  # a search
            assert settings['epochs'] > settings['warmup_epochs']
            assert csla_layers(net)
            continue
        assert settings['opt'] in list_optimizers()
        assert bool(csla_layers(net)) == (settings['scales'] is not None)
        chosen = settings['start']
        if isinstance(chosen, dict):
            assert chosen.get('element_selection', 'uniform') in ELEMENT_CHOICES
            args = {k: v for k, v in chosen.items() if k not in ('teacher', 'calibrate')}
            assert train.weight_select_init(net, model(chosen['teacher']), **args).coverage > 50
        else:
            assert chosen in (None, 'mimetic')
    for row in experiment.rows:
        if row.procedure == 'accelerate':
            assert row.settings['method'] in (*methods.METHODS, methods.ANNEALED, methods.SCRATCH)
            assert row.settings['distil_epochs'] or row.settings['method'] != methods.ANNEALED
            assert bool(row.settings['teacher']) == (row.settings['method'] == methods.SCRATCH)
        if row.procedure == 'quantize':
            assert row.settings['backend'] in (None, *BACKENDS)
            assert row.settings['calibrator'] in CALIBRATORS
            assert row.settings['trained']['seed'] == row.seed


@pytest.mark.slow
def test_hybrids_of_equal_macs(load_script):
    """A RePaFormer, folded, and its controls, networks of narrower FFNs."""
    build = load_script('experiments/train').build
    macs = {}
    for row in load_script('experiments/experiment').load('hybrid').rows:
        if row.seed == 0:
            macs[row.name] = count_macs(folded_copy(build(row.settings)), (3, 32, 32)).total
    pairs = [name for name in macs if name.startswith('narrower')]
    assert len(pairs) == 7
    for name in pairs:
        assert macs[name] == macs[re.sub('narrower, .*as', 'RePa', name)]
    assert macs['plain'] == macs['RePa 0%'] > macs['RePa 25%'] > macs['RePa 50%'] > macs['RePa 75%'] > macs['RePa 100%']


@pytest.mark.parametrize('name', sorted({*NAMES} - {'pretrained-teachers'}))  # its weights are not published
def test_toy_jobs(load_script, name):
    """The settings of a GPU job at toy size fit every experiment."""
    command = load_script('gpu/run').JOBS[name](argparse.Namespace(
        output=SCRIPTS, device='cpu', data_dir=SCRIPTS, val_split='val', toy='any'), 0.)
    parser = argparse.ArgumentParser()
    parser.add_argument('--set', nargs='+', action=load_script('experiments/run').ModelKwargs)
    settings = parser.parse_args(command[command.index('--set'):]).set
    experiment = load_script('experiments/experiment').load(name, 'gpu', settings)
    assert all(t['epochs'] == 1 for row in experiment.rows for t in trainings(row.settings))


def test_errors(load_script, monkeypatch, tmp_path, script, capsys):
    """A wrong data file or command is named in one line."""
    module = load_script('experiments/experiment')
    monkeypatch.setattr(module, 'EXPERIMENTS', tmp_path)

    def message(changes, *args):
        content = dict(what='What.', seeds=[0], settings={'model': 'vit_tiny_patch16_224'}, rows={'a': {}})
        (tmp_path / 'x.yaml').write_text(yaml.safe_dump({**content, **changes}))
        with pytest.raises(SystemExit):
            script('experiments/run', *(args or ['x']), '--output', tmp_path / 'out', '--data-dir', tmp_path)
        return capsys.readouterr().err.splitlines()[-1]

    assert "x.yaml: keys must be among what, claim, procedure" in message({'row': {}})
    assert "row 'a': keys must be among data, " in message({'rows': {'a': {'opd': 'sgd'}}})
    assert "row 'a' lacks 'model'" in message({'settings': {}})
    assert "procedure must be one of train, accelerate, compare, linear-path, quantize, got 'trains'" in message(
        {'procedure': 'trains'})
    other = {'trainings': {'vit': {'procedure': 'quantize'}}, 'rows': {'a': {'teacher': 'vit'}}}
    assert "training 'vit': procedure must be 'train', 'search'" in message(other)
    pretrained = {'procedure': 'linear-path', 'rows': {'a': {'trained': 'vit'}}}
    pretrained['trainings'] = {'vit': {'procedure': 'pretrained', 'file': 'x.pth'}}
    assert "training 'vit': procedure must be 'train' for 'trained', got 'pretrained'" in message(pretrained)
    other['trainings'] = {'deit': {}}
    assert "row 'a': teacher must be one of deit, got 'vit'" in message(other)
    assert "row 'a': teacher must be one of deit, got [1]" in message(
        {**other, 'rows': {'a': {}}}, 'x', '--set', 'teacher=[1]')
    assert "row 'a': expected 'seeds', but got 'seed'" in message({'rows': {'a': {'seed': 9}}})
    assert "x.yaml lacks 'seeds'" in message({'seeds': []})
    assert "x.yaml: gpu: keys must be among" in message({'gpu': {'setting': {}}})
    accelerated = {'procedure': 'accelerate', 'trainings': {'vit': {}}, 'settings': {'model': 'm', 'trained': 'vit'}}
    accelerated['rows'] = {'a': {}, 'b': {}}
    assert 'two rows closed form, 0.75, 0, None, 0, expected one' in message(accelerated)
    assert "Experiment must be one of x, got 'y'" in message({}, 'y')
    assert "Rows of x must be among a, got 'b'" in message({}, 'x', '--rows', 'b')
    assert 'Seeds of these rows must be among 0, got 7' in message({}, 'x', '--seeds', '0', '7')
    assert 'choose from [0] with --seeds' in message({}, 'x', '--set', 'seed=5')
    assert "model must be a model of timm, got 'foo'" in message({}, 'x', '--set', 'model=foo')
    assert "argument --set: expected NAME=VALUE, got 'epochs'" in message({}, 'x', '--set', 'epochs')
    assert "device that torch can use, got 'foo'" in message({}, 'x', '--device', 'foo')
    if not torch.cuda.is_available():
        assert "device that torch can use, got 'cuda'" in message({}, 'x', '--scale', 'gpu')
    assert 'Cannot open the split' in message({})
    message({})
    (tmp_path / 'x.yaml').write_text('what: [')
    with pytest.raises(SystemExit):
        script('experiments/run')
    assert 'x.yaml is not valid YAML' in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / 'out').exists()


def test_checked_before_anything_is_written(start, images, tmp_path, capsys):
    """Too many classes, an output folder that cannot be written, results of other settings, versions or images."""
    def error(*args, **kwargs):
        with pytest.raises(SystemExit):
            start('repoptimizers', '--seeds', 0, '--rows', 'sgd', *args, **kwargs)
        return capsys.readouterr().err.splitlines()[-1]

    assert f'Expected at most 3 classes, but got 4 in {str(images)!r}' in error(settings=[VGG, 'num_classes=3'])
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'file').write_text('')
    assert 'cannot write to the output folder' in error(settings=[VGG], output='file')
    _, rows = start('repoptimizers', '--seeds', 0, '--rows', 'sgd', settings=[VGG])
    assert 'has 1 rows of other settings (lr=0.1 instead of 7). Move it' in error(settings=[VGG, 'lr=7'])
    assert start('repoptimizers', '--seeds', 0, '--rows', 'sgd', settings=[VGG]) == (0, rows)
    path, = (tmp_path / 'results').glob('*/repoptimizers.json')
    content = json.loads(path.read_text())
    for name in 'torch', 'other':
        path.write_text(json.dumps({**content, 'versions': {**content['versions'], name: '2.4.0'}}))
        assert f'repoptimizers.json has rows of {name} 2.4.0. Move it away' in error(settings=[VGG])
    for found in {'train': 50, 'val': 10}, {**content['images'], 'digest': 'of as many others'}:
        path.write_text(json.dumps({**content, 'images': found}))
        assert f"has rows of other images, {found}, than these, {content['images']}" in error(settings=[VGG])
    path.write_text(json.dumps({**content, 'processor': 'cpu family 0'}))
    assert 'has rows of another processor, cpu family 0, than this, ' in error(settings=[VGG])
    counts = {key: count for key, count in content['images'].items() if key != 'digest'}
    assert counts == {'train': 20, 'validation': 8}
    path.write_text(json.dumps({**content, 'images': counts}))  # of an earlier version of the script
    assert start('repoptimizers', '--seeds', 0, '--rows', 'sgd', settings=[VGG]) == (0, rows)
    path.write_text('{"rows"')
    assert 'repoptimizers.json is not valid JSON, move it away' in error(settings=[VGG])


def test_results_of_a_run_that_began_at_the_same_time(start, load_script, tmp_path, monkeypatch, capsys):
    """Rows are not added to a file that got rows of other settings in the meantime."""
    module = load_script('experiments/run')
    check_writable, begun = module.check_writable, []

    def other_run(*args):
        if not begun:
            begun.append(args)
            start('repoptimizers', '--seeds', 0, '--rows', 'sgd', settings=[VGG, 'lr=7'])
        return check_writable(*args)

    monkeypatch.setattr(module, 'check_writable', other_run)
    status, rows = start('repoptimizers', '--seeds', 0, '--rows', 'repsgd', settings=[VGG])
    assert status == 1
    assert [row['row'] for row in rows] == ['sgd']
    assert 'rows of other settings' in capsys.readouterr().err


def test_other_classes(start, images, tmp_path, capsys):
    """Labels of two splits are of the same classes."""
    shutil.copytree(images, tmp_path / 'images')
    shutil.rmtree(tmp_path / 'images' / 'validation' / '1')
    with pytest.raises(SystemExit):
        start('repoptimizers', '--seeds', 0, '--data-dir', tmp_path / 'images', settings=[VGG])
    message = capsys.readouterr().err.splitlines()[-1]
    for part in ('train', 'validation'):
        assert repr(str(tmp_path / 'images' / part)) in message
    assert 'differ in 1.' in message
    assert not (tmp_path / 'out').exists()


def test_settings_that_nothing_takes(start, capsys):
    """A change of a setting of another procedure, or of none, is refused; one of a training that is needed is not."""
    for name, setting in ('repa', 'qat_epochs'), ('repa', 'idle_ratio'), ('quantization', 'epoch'):
        with pytest.raises(SystemExit):
            start(name, '--seeds', 0, settings=[f'{setting}=1'])
        message = capsys.readouterr().err.splitlines()[-1]
        assert f'Settings of {name} must be among amp, ' in message
        assert message.endswith(f'got {setting!r}.')
    with pytest.raises(SystemExit):
        start('repa', settings=['amp=false'])
    assert "amp must be True or False, got 'false'" in capsys.readouterr().err.splitlines()[-1]
    assert start('repoptimizers', '--seeds', 0, '--minutes', 0, settings=['smoothing=0.2']) == (75, [])


def test_one_epoch(start):
    """A search and a training of one epoch have no warm-up."""
    status, rows = start('repoptimizers', '--seeds', 0, '--rows', 'repsgd', settings=[VGG], epochs=1)
    assert (status, [len(row['curve']) for row in rows]) == (0, [1])


def test_a_row_that_fails(start, load_script, images, monkeypatch, capsys):
    """The other rows do not depend on it; the next run tries it again."""
    module, args = load_script('experiments/train'), ('repoptimizers', '--seeds', 0, '--rows', 'sgd', 'adamw')
    create = module.create_optimizer_v2

    def failing(model, opt, **kwargs):
        if opt == 'sgd':
            raise RuntimeError('no such kernel')
        return create(model, opt=opt, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(module, 'create_optimizer_v2', failing)
        status, rows = start(*args, settings=[VGG], epochs=1)
    assert (status, [row['row'] for row in rows]) == (1, ['adamw'])
    out, message = capsys.readouterr()
    assert 'RuntimeError: no such kernel' in message
    assert message.splitlines()[-1] == 'failed: sgd, seed 0'
    assert 'nothing is left' not in out
    status, rows = start(*args, settings=[VGG], epochs=1)
    assert (status, [row['row'] for row in rows]) == (0, ['adamw', 'sgd'])


def test_arguments_of_small_models(load_script):
    load_script('experiments/models')
    for name in 'mobileone_small', 'repvgg_small':
        with pytest.raises(TypeError, match="'widhts'"):
            timm.create_model(name, widhts=[8, 16])


@pytest.mark.slow
def test_repoptimizers(start, models_trained, tmp_path):
    """Rows start from and train with what their names say; those with searched scales share the search."""
    names = [
        'repsgd', 'sgd', 'rmsprop', 'adamw', 'repadamw', 'repvgg', "repvgg, timm's start", 'init', 'ones', 'mean',
        'no-init', 'no-gradients']
    status, found = start('repoptimizers', '--seeds', 0, '--rows', *names, settings=[VGG])
    assert status == 0
    assert [row['row'] for row in found] == names
    assert all(len(row['curve']) == 2 and row['curve'][-1] == row['top-1'] for row in found)
    seen = dict(zip(names, models_trained, strict=True))
    path, = tmp_path.glob('out/*/scales.safetensors')
    searched = Scales.load(path)
    expected = {
        'sgd': (None, 'SGD'), 'rmsprop': (None, 'RMSprop'), 'adamw': (None, 'AdamW'), 'repsgd': (searched, 'RepSGD'),
        'no-init': (searched, 'RepSGD'), 'no-gradients': (searched, 'SGD'), 'ones': (Scales.ones, 'RepSGD'),
        'init': (Scales.initial, 'RepSGD'), 'mean': (searched.mean_over_channels(), 'RepSGD'),
        'repadamw': (searched, 'RepAdamW')}
    for row, (scales, optimizer_name) in expected.items():
        model, optimizer = seen[row]
        assert type(optimizer).__name__ == optimizer_name
        conv = model.stages[1][1].conv[0]
        if scales is None:
            assert conv.grad_mult is None
        else:
            scales = scales(model) if callable(scales) else scales
            mult = GradMult(conv.csla, scales['stages.1.1.conv.0'])
            assert torch.equal(conv.grad_mult.dense('squared'), mult.dense('squared'))
        # by the rule of initialization the diagonal starts around 1
        diagonal = conv.weight[:, :, 1, 1].diagonal()
        assert (diagonal.mean() > .5) == (row not in ('sgd', 'rmsprop', 'adamw', 'no-init'))
    assert same_weights(seen['repsgd'][0], seen['no-gradients'][0])
    released, timms = (
        torch.stack([module.weight.mean() for module in seen[name][0].modules()
                     if isinstance(module, torch.nn.BatchNorm2d)]) for name in ('repvgg', "repvgg, timm's start"))
    assert (released == 1).all()
    assert timms.mean() < .2
    folded = {row['row']: row.get('MACs folded (M)', row['MACs (M)']) for row in found}
    assert folded['repvgg'] == folded['repsgd']  # the same network once folded


@pytest.mark.parametrize('scale', ['cpu', 'gpu'])
def test_repoptimizers_settings(load_script, scale):
    """Multiples of the learning rate and of the epochs are what their names say, at both sizes."""
    load = load_script('experiments/experiment').load
    rows = {row.name: row.settings for row in load('repoptimizers', scale).rows}
    deeper = {name for name in rows if 'layers' in name}
    assert deeper == ({'sgd, 22 layers', 'init, 22 layers'} if scale == 'cpu' else set())
    for name in deeper:
        assert 1 + sum(rows[name]['model_args']['depths']) == 22 > 1 + sum(rows['sgd']['model_args']['depths'])
    for name in 'sgd', 'repsgd':
        lr, epochs = rows[name]['lr'], rows[name]['epochs']
        assert rows[f'{name}, a third of the lr']['lr'] == pytest.approx(lr / 3, rel=.011)  # of two digits
        assert rows[f'{name}, 3 times the epochs']['epochs'] == 3 * epochs
    assert rows['sgd, 3 times the lr']['lr'] == pytest.approx(3 * rows['sgd']['lr'])


@pytest.mark.slow
def test_multi_branch(start, models_trained):
    """Rows differ in structure, optimizer, learning rate and scales only."""
    _, found = start('multi-branch', '--seeds', 0, settings=["model_args={'widths': [8, 16], 'depths': [1, 1]}"])
    rows = {row['row']: row for row in found}
    models = dict(zip(rows, (model for model, _ in models_trained), strict=True))
    assert [type(optimizer).__name__ for _, optimizer in models_trained] == [
        'RepSGD' if row.startswith('repsgd') else 'SGD' for row in rows]
    assert [optimizer.defaults['lr'] for _, optimizer in models_trained] == [
        float(row.partition(', lr ')[2] or .1) for row in rows]
    assert [row for row in rows if 'search (top-1)' in rows[row]] == ['repsgd, searched scales']
    macs = [
        {found['MACs (M)'] for row, found in rows.items() if row.startswith('branches') == many}
        for many in (False, True)]
    assert [len(each) for each in macs] == [1, 1]
    assert macs[0] < macs[0] | macs[1]
    assert not csla_layers(models['branches'])
    plain, repsgd, searched = (models[name] for name in ('plain', 'repsgd', 'repsgd, searched scales'))
    multipliers = [
        [layer.grad_mult.dense('squared') for layer in csla_layers(model).values()] for model in (repsgd, searched)]
    assert all(not torch.equal(a, b) for a, b in zip(*multipliers))
    for other in plain, models['plain, lr 1.0']:
        assert all(torch.equal(a, b) for a, b in zip(repsgd.parameters(), other.parameters()))
    pairs = zip(*(csla_layers(models[name]).values() for name in ('plain', 'default, lr 1.0')), strict=True)
    for layer, other in pairs:
        assert other.grad_mult is None
        # uniform in both directions up to the inverse root of the fan-in, as torch initializes
        bound = other.weight[0].numel() ** -.5
        assert .8 * bound < other.weight.abs().max() < 1.2 * bound < layer.weight.abs().max()


@pytest.mark.slow
def test_weight_selection(start, models_trained):
    """Every row starts as its name says; the teacher is trained once."""
    small = ["model_args={'img_size': 32, 'patch_size': 16}"]
    _, rows = start('weight-selection', '--seeds', 0, settings=small, epochs=1)
    names = [row['row'] for row in rows]
    assert len(models_trained) == len(names) + 1  # the teacher once, after the model of the first row that needs it
    teacher = next(i for i, (model, _) in enumerate(models_trained) if len(model.blocks) == 6)
    first = dict(zip(names, [model for i, (model, _) in enumerate(models_trained) if i != teacher]))
    plain = {name: model.state_dict() for name, model in first.items() if not name.startswith('RePa')}
    assert all(torch.equal(state['head.weight'], plain['random']['head.weight']) for state in plain.values())
    qkv = {tuple(state['blocks.0.attn.qkv.weight'].flatten().tolist()) for state in plain.values()}
    # the distilled rows start as random and uniform, and the first of uniform layers is the first
    assert len(qkv) == len(plain) - 3
    student = first['RePa, uniform']
    assert student.blocks[0].mlp.norm1.running_var.std() > 0


@pytest.mark.slow
def test_budgets(load_script):
    """Each rule stays within the MACs of one idle ratio for all FFNs, with idle ratios of its own."""
    module = load_script('experiments/convert')
    torch.manual_seed(0)
    net = randomize_(timm.create_model('fasternet_t0', embed_dim=16, depths=[2, 2], feature_dim=24, num_classes=4))
    loader = [(torch.randn(20, 3, 32, 32), None) for _ in range(2)]
    converted = {
        method: module.METHODS[method](copy.deepcopy(net), loader, .5)
        for method in module.METHODS if method.startswith('budget') or method == 'closed form'}
    macs = {method: count_macs(model, (3, 32, 32)).total for method, model in converted.items()}
    assert len(macs) == 4
    assert all(.9 * macs['closed form'] < x <= macs['closed form'] for x in macs.values())
    shapes = {tuple(p.shape for p in model.parameters()) for model in converted.values()}
    assert len(shapes) > 2


@pytest.mark.slow
def test_accelerate(start, load_script):
    """Each method changes the model as its name says, at the same cost."""
    module = load_script('experiments/convert')
    size = "model_args={'embed_dim': 16, 'depths': [1, 1], 'feature_dim': 24}"
    small = [size, 'images=40', 'batch_size=5']
    methods = [method for method in module.METHODS if not method.startswith('budget')]
    _, rows = start('accelerate', '--seeds', 0, '--rows', *(
        f'converted, {method}, {ratio}' for method in methods for ratio in (.5, .75)), 'trained',
        settings=small, epochs=1)
    macs = {(row['method'], row['idle_ratio']): row['MACs'] for row in rows}
    for ratio in (.5, .75):
        assert len({round(macs[method, ratio], 2) for method in methods}) == 1
    assert macs[module.SCRATCH, .75] == macs['first channels', .75] < macs['first channels', .5]
    assert len({row['original'] for row in rows}) == 1
    assert all(row['speedup'] > 0 for row in rows)
    _, rows = start('accelerate', '--seeds', 0, '--rows', *(
        f'distilled, 1, {method}' for method in ('closed form', module.ANNEALED)), settings=small, epochs=1)
    rows = [row for row in rows if row['distil_epochs']]
    assert [row['method'] for row in rows] == ['closed form', module.ANNEALED]
    assert len({round(row['MACs'], 2) for row in rows}) == 1


def _settings_of(module, model, **changes):
    train = dict(
        model=model, img_size=32, num_classes=4, classes=None, data='folders', train_images=None, holdout=0,
        batch_size=10)
    return dict(module.DEFAULTS, trained=train, **changes)


@pytest.fixture
def small_space(load_script, images, tmp_path):
    return load_script('experiments/workspace').Workspace(
        tmp_path / 'out', str(images), torch.device('cpu'), 'validation')


@pytest.mark.parametrize('method', ['closed form', 'VBP'])
def test_figures_of_a_conversion(load_script, small_space, monkeypatch, method):
    """A loss is a negative change, a faster network has a speedup above 1."""
    module = load_script('experiments/convert')
    net = timm.create_model(
        'fasternet_t0', embed_dim=16, depths=[1, 1], feature_dim=24, num_classes=4).eval()
    monkeypatch.setattr(module, 'trained', lambda *args: SimpleNamespace(model=net))
    measured = []

    def evaluate(model, *args):
        measured.append(model)
        return None, 50. if model is net else 40.

    monkeypatch.setattr(module, 'evaluate', evaluate)
    monkeypatch.setattr(module, 'time_passes', lambda nets, x: {
        side: [4. if model is net else 2.] * 3 for side, model in nets.items()})
    settings = _settings_of(module, 'm', method=method, idle_ratio=.5, images=20, timed_images=1)
    row = module.accelerate(settings, small_space)
    assert (row['top-1 change'], row['original'], row['speedup']) == (-10., 50., 2.)
    assert row['MACs'] < 1
    assert len(measured) == 2


def test_figures_of_forms(load_script, small_space, monkeypatch):
    module = load_script('experiments/convert')
    net = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=8, depth=2, num_heads=2, num_classes=4)
    monkeypatch.setattr(module, 'trained', lambda *args: SimpleNamespace(model=net.eval()))
    figures = iter([50., 40., 30., 60.])
    monkeypatch.setattr(module, 'evaluate', lambda *args: (None, next(figures)))
    settings = dict(module.FORMS, images=20, trained=_settings_of(module, 'm')['trained'])
    row = module.linear_path(settings, small_space)
    assert {form: row[form] for form in ('better', 'two matrices', 'three matrices')} == {
        'better': -10., 'two matrices': -20., 'three matrices': 10.}
    assert row['original'] == 50.


def test_figures_of_a_quantization(load_script, small_space, monkeypatch):
    module = load_script('experiments/quantize')
    net, figures = torch.nn.Identity(), iter([50., 40.])
    report = SimpleNamespace(int8_layers=['a', 'b'], float_layers=['c'])
    monkeypatch.setattr(module, 'trained', lambda *args: SimpleNamespace(model=net))
    monkeypatch.setattr(module, 'quantize_ptq', lambda *args, **kwargs: SimpleNamespace(report=report))
    monkeypatch.setattr(module, 'evaluate', lambda *args: (None, next(figures)))
    row = module.quantize(_settings_of(module, 'm', images=8), small_space)
    assert row == {'top-1': 40., 'change': -10., 'layers in int8': 2, 'in float': 1}


@torch.no_grad()
def test_metrics_of_the_rules(load_script):
    """The rule 'relative' divides the error of an FFN by the deviation of its outputs."""
    module = load_script('experiments/convert')
    net = randomize_(timm.create_model(
        'vit_tiny_patch16_224', img_size=32, embed_dim=24, depth=2, num_heads=3, num_classes=4).eval())
    ffns, x = find_ffns(net)[0], torch.randn(6, 3, 32, 32)
    seen = {}
    for i, block in enumerate(net.blocks):
        block.mlp.fc2.register_forward_hook(lambda _, args, y, i=i: seen.__setitem__(f'blocks.{i}.mlp', y))
    shares = SimpleNamespace(shares=[SimpleNamespace(x=x)])
    assert all((m == 1).all() for m in module._plain_metrics(net, ffns, shares, relative=False).values())
    for name, metric in module._plain_metrics(net, ffns, shares, relative=True).items():
        assert metric.shape == (24,)
        torch.testing.assert_close(
            metric, seen[name].reshape(-1, 24).double().var(0).sum().rsqrt().expand(24), rtol=1e-4, atol=0)


def test_pruning(load_script):
    """Kept channels compute what they did, the others their mean; refitted, the error is smaller."""
    torch.manual_seed(0)
    model = timm.create_model(
        'fasternet_t0', embed_dim=16, depths=[1, 1], patch_size=2, mlp_ratio=4., feature_dim=24,
        drop_path_rate=0.).eval()
    x, mlp = torch.randn(60, 3, 16, 16, generator=torch.Generator().manual_seed(0)), model.stages[0].blocks[0].mlp
    seen = []
    hook = mlp[3].register_forward_pre_hook(lambda _, args: seen.append(args[0].movedim(1, -1).flatten(0, -2)))
    model(x)
    hook.remove()
    features, second, errors = seen[0].detach(), mlp[3].weight.flatten(1), []
    scale = mlp[1].weight / (mlp[1].running_var + mlp[1].eps).sqrt()
    first = mlp[0].weight.flatten(1) * scale[:, None]
    prune = load_script('experiments/convert').prune
    for refit in (False, True):
        pruned = prune(copy.deepcopy(model), [(x, None)], .5, refit).stages[0].blocks[0].mlp
        rows = pruned.fc_in.weight.flatten(1)
        kept = [i for i, row in enumerate(first) if (rows - row).abs().amax(1).min() < 1e-6]
        assert sorted(features.var(0).argsort(descending=True)[:len(kept)].tolist()) == kept
        assert len(kept) == 32 + 8
        hidden = features.mean(0).repeat(len(features), 1)
        hidden[:, kept] = features[:, kept]
        y = features[:, kept] @ pruned.fc_out.weight.flatten(1).T + pruned.fc_out.bias
        if not refit:
            assert relative(y, hidden @ second.T) < 1e-5
        errors.append((y - features @ second.T).square().mean().item())
    assert errors[1] < errors[0]


@pytest.mark.parametrize('model', ['repopt_vgg_a0', 'repvgg_small'])
def test_kernels(load_script, model):
    """The stages of a kernel on the way to the folded network, in eval mode with random statistics."""
    module = load_script('experiments/quantize')
    net = randomize_(timm.create_model(model, depths=[1, 3, 1, 1], widths=[8] * 4, stem_width=8))
    folded = folded_copy(net)
    stages = list(module.kernels(net, folded).values())
    assert len(stages) == (2 if model == 'repopt_vgg_a0' else 3)
    assert not torch.allclose(stages[0], stages[1])
    weights = [p for name, p in folded.named_parameters() if name.startswith('stages.1.1.') and p.ndim == 4]
    torch.testing.assert_close(stages[-1], weights[0])


@pytest.mark.slow
def test_quantization(start):
    """Rows of tables 10 and 11; the entries of RepVGG's kernel are those that folding makes."""
    pytest.importorskip('torchao')
    rows = [f'{model}, {how}' for how in ('float32', 'channel', 'tensor', 'qat') for model in ('repopt', 'repvgg')]
    _, found = start('quantization', '--seeds', 0, '--rows', *rows, settings=[VGG])
    assert [row['row'] for row in found] == rows
    assert all(row['layers in int8'] == 7 and not row['in float'] for row in found[2:])
    assert 'std of the branches added' not in found[0]
    assert all(row['largest entry'] >= max(
        row[key]['overall'] for key in row if key.startswith('std') and not key.endswith('3 x 3 kernel'))
        for row in found[:2])
    added = found[1]['std of the branches added']
    assert found[1]['std of the BatchNorm folded'] != added
    assert added['surrounding'] == found[1]['std of the BatchNorm folded']['surrounding']


@pytest.mark.slow
def test_forms_of_the_ffns(load_script, monkeypatch, start):
    """A row has a conversion to the better forms, to two matrices, and to three."""
    module, forms = load_script('experiments/convert'), []
    linearize_ffns = module.linearize_ffns

    def spied(*args, **kwargs):
        report = linearize_ffns(*args, **kwargs)
        forms.append([ffn.linear_path for ffn in report.ffns])
        return report

    monkeypatch.setattr(module, 'linearize_ffns', spied)
    _, (row,) = start('linear-path', '--seeds', 0, '--rows', 'vit, 0.75', settings=['images=8', 'warmup_epochs=0'])
    assert row['FFNs'] == 4
    assert row['with a linear path'] == sum(forms[0])
    assert forms[1:] == [[False] * 4, [True] * 4]


def test_strides_and_other_data(start):
    """Scales of a search with other strides or of other images fit the network that is trained."""
    pytest.importorskip('sklearn')
    rows = ['digits', 'strides 1 2 1 2 1']
    _, found = start('repoptimizers', '--seeds', 0, '--rows', *rows, settings=[VGG])
    assert [row['row'] for row in found] == rows


def test_classes(load_script, images, tmp_path):
    """A class split has the images of these classes only, numbered from 0; digits are resized and not flipped."""
    pytest.importorskip('sklearn')
    module = load_script('experiments/workspace')
    workspace = module.Workspace(tmp_path, str(images), torch.device('cpu'), 'validation')
    settings = dict(
        data='folders', img_size=16, classes=[3, 1], num_classes=4, train_images=6, holdout=0, batch_size=4, seed=0)
    loader = workspace.loader(settings, True, workspace.device)
    assert loader.targets.tolist() == [1, 1, 1, 0, 0, 0]
    assert workspace.loader(settings, False, workspace.device).targets.tolist() == [1, 1, 0, 0]
    brightness = loader.images[:, 4:-4, 4:-4].float().mean((1, 2, 3))
    assert brightness[:3].max() < brightness[3:].min()  # the fixture's images of class 3 are brighter
    digits = workspace.loader(
        {**settings, 'data': 'digits', 'classes': None, 'num_classes': 10, 'img_size': 32}, False, workspace.device)
    assert digits.images.shape == (360, 40, 40, 3)
    assert digits.targets.unique().tolist() == list(range(10))
    assert not digits.flip
    calibration = module.Images(workspace, settings, workspace.device).calibration(5)
    assert [len(x) for x, _ in calibration] == [4, 1]


def test_held_out_images(start, load_script, images, tmp_path):
    """Training and held-out images partition the training split; the latter are measured after the last epoch."""
    module = load_script('experiments/workspace')
    workspace = module.Workspace(tmp_path, str(images), torch.device('cpu'), 'validation')
    settings = dict(
        data='folders', img_size=16, classes=None, num_classes=4, train_images=None, holdout=4, batch_size=8, seed=0)
    found = module.Images(workspace, settings, workspace.device)
    held, train = found.held_out(), found._train
    assert held.targets.tolist() == [0, 1, 2, 3]
    assert not held.is_training
    assert len(train.targets) == 16
    both = {image.numpy().tobytes() for loader in (held, train) for image in loader.images}
    everything = module.Images(workspace, dict(settings, holdout=0), workspace.device)._train
    assert both == {image.numpy().tobytes() for image in everything.images}
    assert len(both) == 20
    for epochs in 1, 2:
        _, rows = start('repoptimizers', '--seeds', 0, '--rows', 'sgd', settings=[VGG, 'holdout=4'], epochs=epochs,
                        output=f'{epochs}')
        assert rows[-1]['held-out'] in (0., 25., 50., 75., 100.)
        load_script('experiments/report').RESULTS.rename(tmp_path / f'{epochs} epochs')


def test_stopped(start, load_script, monkeypatch, tmp_path, capsys):
    """Killed after every epoch, a training ends with the same weights; finished rows are skipped."""
    train = load_script('experiments/train')
    args = ['repoptimizers', '--seeds', 1, '--rows', 'repsgd']
    _, once = start(*args, settings=[VGG], epochs=3)
    load_script('experiments/report').RESULTS.rename(tmp_path / 'once')
    write = train.write_training_state

    def killed(path, state):
        write(path, state)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, 'write_training_state', killed)
    for _ in range(4):  # three epochs, and the result without the optimizer
        with pytest.raises(KeyboardInterrupt):
            start(*args, settings=[VGG], epochs=3, output='again')
    monkeypatch.setattr(train, 'write_training_state', write)
    status, again = start(*args, settings=[VGG], epochs=3, output='again')
    assert status == 0
    assert again[0]['curve'] == once[0]['curve']
    states = [torch.load(next(tmp_path.glob(f'{out}/*/last.pth')), weights_only=True) for out in ('out', 'again')]
    assert states[0]['epoch'] == states[1]['epoch'] == 3
    assert states[0].keys() == states[1].keys()
    assert same_weights(*(state['model'] for state in states))

    shutil.rmtree(tmp_path / 'again')  # nothing of it is needed
    assert start(*args, settings=[VGG], epochs=3, output='again')[0] == 0
    assert not list(tmp_path.glob('again/*/last.pth'))
    status, rows = start(*args, '--minutes', 0, settings=[VGG], epochs=3, output='new')
    assert (status, rows) == (0, again)  # nothing is left
    args[-1] = 'sgd'
    assert start(*args, 'repsgd', '--minutes', 0, settings=[VGG], epochs=3, output='new') == (75, again)
    assert '1 of 2 rows are left' in capsys.readouterr().out


def test_stopped_search(start, load_script, monkeypatch, tmp_path):
    """Killed at the beginning of every second epoch, a search ends with the same scales."""
    workspace = load_script('experiments/workspace')
    args = ['repoptimizers', '--seeds', 0, '--rows', 'repsgd']
    start(*args, settings=[VGG], epochs=3)
    load_script('experiments/report').RESULTS.rename(tmp_path / 'once')
    begin, epochs = workspace.Timed.__iter__, []

    def killed(self):
        epochs.append(self)
        if len(epochs) % 2 == 0:
            raise KeyboardInterrupt
        return begin(self)

    monkeypatch.setattr(workspace.Timed, '__iter__', killed)
    for _ in range(5):  # the second and third epoch of the search, and all of the training
        with pytest.raises(KeyboardInterrupt):
            start(*args, settings=[VGG], epochs=3, output='again')
    assert start(*args, settings=[VGG], epochs=3, output='again')[0] == 0
    first, second = (Scales.load(next(tmp_path.glob(f'{out}/*/scales.safetensors'))) for out in ('out', 'again'))
    assert all(torch.equal(first[layer][branch], second[layer][branch]) for layer in first for branch in first[layer])
    assert 'minutes' in first.metadata
    assert 'minutes' not in second.metadata  # the minutes of the last part alone would be wrong


def test_trainings_of_other_images(start, load_script, images, tmp_path, monkeypatch):
    """A finished training on other images, measured on another split, or by another torch, is not taken; one on a copy
    of the images is.
    """
    args = ['repoptimizers', '--seeds', 0, '--rows', 'sgd']
    start(*args, settings=[VGG], epochs=1)
    shutil.copytree(images, tmp_path / 'copy')
    copied = '--data-dir', tmp_path / 'copy'
    for name, *data in ('copy', *copied), ('changed', *copied), ('split', '--val-split', 'train'), ('torch',):
        (tmp_path / 'results').rename(tmp_path / f'results of {name}')
        if name == 'changed':
            Image.new('RGB', (40, 40)).save(tmp_path / 'copy' / 'train' / '0' / '0.png')
        if name == 'torch':
            monkeypatch.setattr(load_script('experiments/workspace'), 'versions', lambda: {'torch': '2.4.0'})
        before = len(list(tmp_path.glob('out/*/last.pth')))
        assert start(*args, *data, settings=[VGG], epochs=1)[0] == 0
        assert len(list(tmp_path.glob('out/*/last.pth'))) == before + (name != 'copy')


def test_settings_reach_the_training(load_script, images, small_space, monkeypatch):
    """Every setting, at a value that is not its default, gets to the function that it is for."""
    train, seen = load_script('experiments/train'), {}

    def spy(name):
        function = getattr(train, name)

        def spied(*args, **kwargs):
            seen[name] = args, kwargs
            return function(*args, **kwargs)

        monkeypatch.setattr(train, name, spied)

    for name in ('fit', 'create_optimizer_v2', 'create_scheduler_v2', 'weight_select_init'):
        spy(name)
    vit = dict(img_size=16, patch_size=8, embed_dim=8, depth=2, num_heads=2)
    common = dict(
        train.DEFAULTS, model='vit_tiny_patch16_224', num_classes=4, img_size=16, batch_size=7, model_args=vit)
    teacher = dict(common, model_args=dict(vit, embed_dim=16), epochs=1, warmup_epochs=0, seed=2)
    settings = dict(
        common, opt='adamw', opt_args={'betas': (.8, .9)}, lr=.02, warmup_lr=.003, weight_decay=.04, epochs=5,
        warmup_epochs=2, smoothing=.25, clip_grad=.5, channels_last=True, seed=3, teacher=teacher,
        start={'teacher': teacher, 'layer_selection': 'last'})
    train.trained(settings, small_space)
    (_, select), ((_, optimizer, _, loader, epochs), fit) = seen['weight_select_init'], seen['fit']
    assert select == dict(seed=3, layer_selection='last')
    assert epochs == 5
    assert {key: fit[key] for key in ('smoothing', 'clip_grad', 'channels_last', 'seed', 'amp_dtype')} == dict(
        smoothing=.25, clip_grad=.5, channels_last=True, seed=3, amp_dtype=None)
    assert fit['teacher'].embed_dim == 16
    assert len(next(iter(loader))[0]) == 7
    group = optimizer.param_groups[0]
    assert type(optimizer).__name__ == 'AdamW'
    assert group['betas'] == (.8, .9)
    assert {group['weight_decay'] for group in optimizer.param_groups} == {0., .04}
    assert seen['create_optimizer_v2'][1]['lr'] == .02
    scheduler = seen['create_scheduler_v2'][1]
    assert (scheduler['num_epochs'], scheduler['warmup_epochs'], scheduler['warmup_lr']) == (5, 2, .003)


def test_settings_reach_the_search(load_script, small_space, monkeypatch):
    train, seen = load_script('experiments/train'), []
    search = train.hyper_search
    monkeypatch.setattr(train, 'hyper_search', lambda *args, **kwargs: seen.append((args, kwargs)) or search(
        *args, **kwargs))
    settings = dict(
        train.SEARCH, model='repopt_vgg_a0', num_classes=4, img_size=16, batch_size=9, epochs=3, warmup_epochs=2,
        lr=.05, weight_decay=.001, smoothing=.3, channels_last=True, seed=4,
        model_args=dict(depths=[1, 2, 1, 1], widths=[8, 8, 16, 16], stem_width=8, strides=[1, 1, 2, 2, 1]))
    train.searched(settings, small_space)
    ((name, loader, _), kwargs), = seen
    expected = {k: settings[k] for k in (
        'epochs', 'warmup_epochs', 'lr', 'weight_decay', 'smoothing', 'channels_last', 'seed', 'num_classes')}
    assert {k: kwargs[k] for k in expected} == expected
    assert (name, len(next(iter(loader))[0]), kwargs['strides']) == ('repopt_vgg_a0', 9, [1, 1, 2, 2, 1])


def test_seeds_have_other_weights_and_batches(load_script, small_space):
    """The same seed trains the same network twice; another seed starts, and goes on, elsewhere."""
    train, first = load_script('experiments/train'), {}
    fit = train.fit

    def spied(model, optimizer, scheduler, loader, *args, seed, **kwargs):
        def record(batches):
            for batch in batches:
                first.setdefault(seed, []).append(batch[0].clone())
                yield batch

        class Recorded:
            sampler = getattr(loader, 'sampler', None)
            __len__ = lambda self: len(loader)  # noqa: E731
            __iter__ = lambda self: record(loader)  # noqa: E731

        return fit(model, optimizer, scheduler, Recorded(), *args, seed=seed, **kwargs)

    vit = dict(img_size=16, patch_size=8, embed_dim=8, depth=1, num_heads=2)
    common = dict(
        train.DEFAULTS, model='vit_tiny_patch16_224', num_classes=4, img_size=16, batch_size=10, model_args=vit,
        epochs=1, warmup_epochs=0, lr=0.)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'fit', spied)
        models = [train.trained(dict(common, seed=seed), small_space).model for seed in (0, 1)]
    assert not torch.equal(models[0].head.weight, models[1].head.weight)
    assert not torch.equal(first[0][0], first[1][0])


def test_calibration_of_a_start(load_script, models_trained, images, tmp_path):
    """The start from a plain teacher depends on the seed alone, not on whether this process trained the teacher."""
    train, workspace = load_script('experiments/train'), load_script('experiments/workspace')
    common = dict(
        train.DEFAULTS, num_classes=4, epochs=1, warmup_epochs=0, batch_size=8, train_images=16, opt='adamw', lr=1e-3)
    vit = dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2)
    teacher = dict(common, model='vit_tiny_patch16_224', model_args=vit)
    student = dict(
        common, model='repa_deit_tiny', model_args=dict(vit, pre_norm=False), seed=1,
        start={'teacher': teacher, 'calibrate': 12})
    space = workspace.Workspace(tmp_path / 'out', str(images), torch.device('cpu'), 'validation')
    train.trained(student, space)
    next((tmp_path / 'out').glob('repa_deit_tiny-*/last.pth')).unlink()
    train.trained(student, space)
    _, first, second = (model for model, _ in models_trained)
    assert same_weights(first.state_dict(), second.state_dict())
    assert first.blocks[0].mlp.norm1.running_mean.abs().min() > 0


def test_committed_rows(load_script, monkeypatch):
    """Committed results are of the data files, which count them as finished."""
    module, experiment = load_script('experiments/run'), load_script('experiments/experiment')
    results = load_script('experiments/report')
    workspace = module.Workspace(None, None, torch.device('cpu'))
    for path in (SCRIPTS / 'results').glob('*/*.json'):
        if path.stem in NAMES:
            content = json.loads(path.read_text())
            monkeypatch.setattr(results, 'read', lambda section, device, content=content: content)
            monkeypatch.setattr(module, 'versions', lambda content=content: content['versions'])
            monkeypatch.setattr(results, 'processor', lambda device, content=content: content.get('processor'))
            scale = 'gpu' if content['machine'].startswith('NVIDIA') else 'cpu'
            changes = {'amp': False} if content.get('settings', {}).get('amp') is False else {}
            one = experiment.load(path.stem, scale, changes)
            finished = [row for row in one.rows if module.is_finished(one, row, torch.device('cpu'))]
            assert len(finished) == len(content['rows'])
            workspace.images = {'train': 50000, 'val': 10000, 'digest': '345ded87a3'}  # the unpacked CIFAR-10
            module.check_results(content, one, workspace)


def test_comparison_of_searches(load_script, monkeypatch):
    """The correlation is between the relative changes from the initial scales, over all channels of all layers."""
    train = load_script('experiments/train')
    search = dict(train.SEARCH, model='repopt_vgg_a0', model_args=dict(
        depths=[1, 2, 1, 1], widths=[8, 8, 16, 16], stem_width=8))
    start = Scales.initial(train.build(search, 'init'))
    changes, found = {}, {}
    for seed in 1, 2:
        changed = {layer: {branch: scale * (1 + 0.1 * torch.randn_like(scale)) for branch, scale in branches.items()}
                   for layer, branches in start.items()}
        found[seed] = Scales(changed)
        changes[seed] = np.concatenate([
            changed[layer][branch] / start[layer][branch] - 1 for layer in start for branch in start[layer]])
    monkeypatch.setattr(train, 'searched', lambda settings, workspace: found[settings['seed']])
    row = train.compare({'scales': {**search, 'seed': 1}, 'other': {**search, 'seed': 2}, 'seed': 0}, None)
    assert row['moved %'] == pytest.approx(100 * np.abs(changes[1]).mean(), abs=0.01)
    assert row['correlation'] == pytest.approx(np.corrcoef(changes[1], changes[2])[0, 1], abs=1e-3)


def _add_rows(report, results, first):
    report.RESULTS = results
    for i in range(first, first + 20):
        report.save('a', 'What.', [{'row': str(i), 'seed': 0}], torch.device('cpu'), {}, ['row', 'seed'], check=bool)


def test_rows_of_two_processes(load_script, tmp_path):
    """Rows that two processes save at the same time are all kept, and so are older ones."""
    report, context = load_script('experiments/report'), multiprocessing.get_context('fork')
    processes = [context.Process(target=_add_rows, args=(report, tmp_path, first)) for first in (0, 20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    content = json.loads(next(tmp_path.glob('*/a.json')).read_text())
    assert {row['row'] for row in content['rows']} == {str(i) for i in range(40)}


@pytest.mark.slow
def test_the_same_command_twice(images, tmp_path):
    """Two processes share the rows of an experiment and do every training once."""
    command = [
        sys.executable, str(SCRIPTS / 'experiments' / 'run.py'), 'repoptimizers', '--rows', 'repsgd', 'sgd', 'init',
        'mean', '--seeds', '0', '1', '--data-dir', str(images), '--val-split', 'validation',
        '--output', str(tmp_path / 'out'), '--set', *TOY, VGG, 'epochs=2']
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'TIMM_REP_RESULTS': str(tmp_path / 'results')}
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    rows = json.loads(next(tmp_path.glob('results/*/repoptimizers.json')).read_text())['rows']
    assert len(rows) == len({(row['row'], row['seed']) for row in rows}) == 8
    assert sum(output.count('curve') for output in outputs) == 8
    assert 'nothing is left' in run(command, env=env)


@pytest.mark.parametrize('name', NAMES)
def test_can_begin(name, start, tmp_path):
    """All checks before the first row pass; nothing is computed, for lack of time."""
    if name == 'quantization':
        pytest.importorskip('torchao')
        pytest.importorskip('onnxruntime')
    for file in ('vit_small_patch14_dinov2.safetensors', 'vit_small_patch14_dinov2.cifar10.safetensors',
                 'tf_efficientnet_lite0.pth'):
        (tmp_path / file).touch()
    assert start(name, '--minutes', 0, '--weights-dir', tmp_path) == (75, [])


@needs_recorded_args  # before, timm took weights of augreg for a NumPy archive
def test_pretrained_weights(load_script, start, images, tmp_path, monkeypatch, capsys):
    """A training starts from a file of weights, which is looked for before anything else."""
    module = load_script('experiments/experiment')
    monkeypatch.setattr(module, 'EXPERIMENTS', tmp_path)
    net = 'model: vit_tiny_patch16_224, model_args: {img_size: 16, patch_size: 8, embed_dim: %d, depth: 2, num_heads: 2'
    (tmp_path / 'x.yaml').write_text(
        f'what: X.\nseeds: [0]\nsettings: {{img_size: 16, opt: adamw, lr: 0.0, {net % 8}}}}}\n'
        f'trainings: {{big: {{procedure: pretrained, file: big.pth, {net % 16}, num_classes: 4}}}}}}\n'
        'rows: {small: {start: {teacher: big}, teacher: big}}\n')
    with pytest.raises(SystemExit):
        start('x', '--weights-dir', tmp_path, epochs=1)
    assert 'big.pth' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
    big = timm.create_model(
        'vit_tiny_patch16_224', img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=4)
    torch.save(big.state_dict(), tmp_path / 'big.pth')
    seen, fit = [], load_script('experiments/train').fit

    def spied(model, *args, teacher, **kwargs):
        seen.append((copy.deepcopy(model), teacher))
        return fit(model, *args, teacher=teacher, **kwargs)

    monkeypatch.setattr(load_script('experiments/train'), 'fit', spied)
    status, rows = start('x', '--weights-dir', tmp_path, epochs=1)
    assert (status, len(rows)) == (0, 1)
    (student, teacher), = seen
    assert same_weights(teacher, big)
    chosen = student.blocks[1].attn.proj.bias
    assert set(chosen.tolist()) <= set(big.blocks[1].attn.proj.bias.tolist())
    torch.testing.assert_close(
        student.patch_embed.proj.weight[:, 0, 0, 0], big.patch_embed.proj.weight[::2, 0, 0, 0], rtol=0, atol=0)


    # other weights of the same name: their training is another one, and their rows are not mixed with these
    torch.nn.init.normal_(big.head.weight)
    torch.save(big.state_dict(), tmp_path / 'big.pth')
    with pytest.raises(SystemExit):
        start('x', '--weights-dir', tmp_path, epochs=1)
    assert 'rows of another big.pth' in capsys.readouterr().err
    path, = (tmp_path / 'results').glob('*/x.json')
    path.unlink()
    assert start('x', '--weights-dir', tmp_path, epochs=1)[0] == 0
    assert same_weights(seen[1][1], big)


def test_list(script, capsys):
    script('experiments/run')
    assert [line.partition(' ')[0] for line in capsys.readouterr().out.splitlines()] == NAMES


@pytest.fixture
def real_vit(load_script, images, tmp_path, monkeypatch):
    """The script for a smaller network, the arguments that all of its commands share, and its images."""
    module, create = load_script('experiments/real_vit'), timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda name, **kwargs: create(
        name, **kwargs, **(dict(embed_dim=32, depth=2, num_heads=2) if name == 'vit_small_patch14_dinov2' else {})))
    (tmp_path / 'data').mkdir()
    for name, split in (('train', 'train'), ('val', 'validation')):
        (tmp_path / 'data' / name).symlink_to(images / split)
    torch.manual_seed(0)
    weights = timm.create_model('vit_small_patch14_dinov2', img_size=56, num_classes=0).state_dict()
    save_file(weights, tmp_path / 'weights.safetensors')
    return module, [tmp_path / 'weights.safetensors', '--data-dir', tmp_path / 'data', '--batch-size', 4]


@pytest.mark.slow
def test_real_vit(script, real_vit, tmp_path, capsys, monkeypatch):
    module, args = real_vit
    convert, seen = module.timm_rep.convert_to_repa, []
    monkeypatch.setattr(
        module.timm_rep, 'convert_to_repa', lambda *args, **kwargs: seen.append(kwargs) or convert(*args, **kwargs))
    classifier, methods = tmp_path / 'classifier.pth', ['timm-rep', 'timm-rep, two matrices, no correction', 'VBP']
    script('experiments/real_vit', 'finetune', *args, '--epochs', 1, '-o', classifier)
    args = [
        'compare', *args, '--classifier', classifier, '--idle-ratios', 0.75, '--images', 16, '--val-images', 8,
        '--samples', 3, '--methods', *methods, '--states', tmp_path / 'states']
    script('experiments/real_vit', *args)
    script('experiments/real_vit', *args, '--distil-epochs', 2, '--lr', 1e-3)
    paths = sorted((tmp_path / 'results').glob('*/real-vit-*.json'))  # classifier, distilled
    contents = [path.read_text() for path in paths]
    plain, distilled = (json.loads(content)['rows'] for content in contents)
    assert [(row['method'], row['distil_epochs']) for row in plain] == [(method, 0) for method in methods]
    rows = {(row['method'], row['distil_epochs']): row for row in distilled}
    assert rows.keys() == {(method, epochs) for method in methods for epochs in (0, 1, 2)}
    assert all(row['error'] == rows[row['method'], 0]['error'] for row in plain)
    for i, kwargs in enumerate(seen):  # all images, as for the other methods
        assert kwargs['max_images'] == sum(map(len, kwargs['calibration'])) == 16
        assert kwargs['compensate'] == (i % 2 == 0)
    for (method, epochs), row in rows.items():
        assert row['top-1 change'] == pytest.approx(row['top-1'] - row['original'], abs=.01)
        assert row['macs'] == rows['timm-rep', 0]['macs'] < 1
        assert (row['error'] != rows[method, 0]['error']) == (epochs > 0)
    # once more: no row is measured again
    script('experiments/real_vit', *args)
    script('experiments/real_vit', *args, '--distil-epochs', 2, '--lr', 1e-3)
    assert [path.read_text() for path in paths] == contents
    # another classifier, and another network: nothing of the first ones is used
    state = torch.load(classifier, weights_only=True)
    state['model']['head.bias'] += torch.arange(10.)
    torch.save(state, classifier)
    script('experiments/real_vit', *args)
    other = json.loads(paths[0].read_text())
    assert [row['original'] for row in other['rows']] != [row['original'] for row in plain]
    assert other['classifier'] != json.loads(contents[0])['classifier']
    with pytest.raises(ValueError, match=r'training.*is of another one: classifier'):
        script('experiments/real_vit', *args, '--distil-epochs', 2, '--lr', 1e-3)
    weights = load_file(args[1])
    save_file({name: -value for name, value in weights.items()}, args[1])
    with pytest.raises(ValueError, match=r'training.*is of another one: weights'):
        script('experiments/real_vit', 'finetune', *args[1:6], '--epochs', 1, '-o', classifier)


def test_real_vit_distils_from_whole_images(real_vit, monkeypatch, tmp_path):
    module, (_, _, data, *_) = real_vit
    args, loaders = argparse.Namespace(data_dir=data, batch_size=5, lr=1e-3), []
    train = module.read(args, 'train', 28)
    whole = torch.cat([images for images, _ in module.chosen(train, list(range(20)))])
    monkeypatch.setattr(module, 'fit', lambda *args, **kwargs: loaders.append(args[3]))
    for teacher in None, torch.nn.Linear(1, 1):
        module.train_parts(torch.nn.Linear(1, 1), train, args, 1, tmp_path / 'state.pth', print, {}, teacher=teacher)
    torch.manual_seed(0)
    assert any(not (whole == x).flatten(1).all(1).any() for x in next(iter(loaders[0]))[0])  # crops
    images, targets = map(torch.cat, zip(*(batch for _ in range(4) for batch in loaders[1])))
    flips = 0
    for image, target in zip(images, targets):
        same, mirrored = ((whole == x).flatten(1).all(1).nonzero().flatten() for x in (image, image.flip(2)))
        flips += len(mirrored)
        assert train.targets[torch.cat([same, mirrored])] == target
    assert len(images) == 20
    assert 3 < flips < 17
