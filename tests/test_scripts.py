"""The scripts of scripts/, on next to nothing."""
import copy
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml

import timm_rep.layers.repa_mlp as channel_idle
import timm_rep.scales.packaged as packaged
from tests.reference.ffn import relative
from tests.reference.rep_optim import normal_scales
from timm_rep.init.weight_select import ELEMENT_CHOICES
from timm_rep.layers import RePaMlp, use_fused_idle
from timm_rep.scales import Scales, packaged_scales
from timm_rep.utils.profiling import throughput

SCRIPTS = Path(__file__).parents[1] / 'scripts'


def reported(tmp_path, section):
    path, = (tmp_path / 'results').glob(f'*/{section}.json')
    return json.loads(path.read_text())


TINY = 'depths=(1,2,1,1) widths=(8,8,16,16) stem_width=8'.split()


def test_ablations(script, images, tmp_path, capsys, monkeypatch):
    """What each row starts from and trains with is what its row of table 4 says."""
    tiny = dict(depths=(1, 2, 1, 1), widths=(8, 8, 16, 16), stem_width=8)
    scales = normal_scales(timm.create_model('repopt_vgg_a0', **tiny), seed=0)
    scales.save(tmp_path / 's.safetensors')
    args = [
        '--model', 'repopt_vgg_a0', '--model-kwargs', *TINY, '--scales', tmp_path / 's.safetensors', '--dataset', '',
        '--data-dir', images, '--batch-size', 5, '--epochs', 2, '--search-epochs', 1, '-j', 0]
    module = importlib.import_module('ablations')
    started = {}

    def fit(model, optimizer, *args, description, **kwargs):
        started[description] = model.stages[1][1].conv.weight.detach().clone(), model, optimizer
        return training_fit(model, optimizer, *args, description=description, **kwargs)

    training_fit = module.fit
    monkeypatch.setattr(module, 'fit', fit)
    rows = [row for row in module.ROWS if not row.startswith('strides')]
    script('ablations', *rows[:3], *args)
    script('ablations', *rows[3:], 'strides-22121', *args)  # one command or several, one file
    result = reported(tmp_path, 'ablations-repopt_vgg_a0')
    assert [row['row'] for row in result['rows']] == [*rows, 'strides-22121']
    assert all(0 <= row['accuracy'] <= 100 for row in result['rows'])
    assert [row['search_accuracy'] is not None for row in result['rows']] == [False] * 9 + [True]

    name = 'stages.1.1.conv'
    expected = {
        'sgd': (None, 'SGD'), 'adamw': (None, 'AdamW'), 'repsgd': (scales, 'RepSGD'), 'no-init': (scales, 'RepSGD'),
        'no-gradients': (scales, 'SGD'), 'ones': (Scales.ones, 'RepSGD'), 'init': (Scales.initial, 'RepSGD'),
        'mean': (scales.mean_over_channels(), 'RepSGD'), 'repadamw': (scales, 'RepAdamW'),
    }
    for row in rows:
        kernel, model, optimizer = started[row]
        of, optimizer_name = expected[row]
        of = of(model) if callable(of) else of
        assert type(optimizer).__name__ == optimizer_name
        found = model.stages[1][1].conv.grad_mult
        if of is None:
            assert found is None
        else:
            mult = model.stages[1][1].conv.csla.grad_mult(of[name])
            assert torch.equal(found.dense('squared'), mult.dense('squared'))
        # by the rule of initialization the diagonal starts around 1
        diagonal = kernel[:, :, 1, 1].diagonal()
        assert (diagonal.mean() > .5) == (row not in ('sgd', 'adamw', 'no-init'))
    assert torch.equal(started['repsgd'][0], started['no-gradients'][0])
    assert torch.equal(started['repsgd'][0], started['repadamw'][0])
    searched = started['strides-22121'][1].stages[1][1].conv.grad_mult.dense('squared')
    assert not torch.equal(searched, started['init'][1].stages[1][1].conv.grad_mult.dense('squared'))
    assert started['strides-22121'][1].feature_info[-1]['reduction'] == 32

    for name, more, message in [
        ('repsgd', ['--model', 'repopt_vgg_l2'], 'repopt_vgg_l2 has no searched scales in this package'),
        ('strides-22121', ['--model', 'repopt_ghostnet_050'], 'no strides to change'),
    ]:
        with pytest.raises(SystemExit):
            script('ablations', name, *more)
        assert message in capsys.readouterr().err


def test_compare_scales(script, tmp_path):
    """Pairs of one family; the correlations are those of the layers' means, of what was searched only."""
    start = Scales.from_model(timm.create_model('repopt_vgg_a0', structure='search', scales='init'))
    g = torch.Generator().manual_seed(0)
    a = Scales({n: {b: s + torch.randn(len(s), generator=g) for b, s in of.items()} for n, of in start.items()})
    b = Scales({n: {k: 2 * s - start[n][k] for k, s in of.items()} for n, of in a.items()})  # twice as far, same way
    unsearched = {n: dict(of) for n, of in b.items()}
    unsearched['stages.2.9.conv']['conv3x3'] = torch.full((192,), 99.)
    a.save(tmp_path / 'a.safetensors')
    Scales(unsearched).save(tmp_path / 'b.safetensors')
    ghost = Scales.from_model(timm.create_model('repopt_ghostnet_050', structure='search', scales='init'))
    Scales({n: {b: torch.randn(len(s), generator=g) for b, s in of.items()} for n, of in ghost.items()}).save(
        tmp_path / 'ghost.safetensors')
    script('compare_scales', *(f'repopt_vgg_a0={tmp_path / x}.safetensors={x}' for x in 'ab'),
           f'repopt_ghostnet_050={tmp_path / "ghost.safetensors"}=ghost')
    rows = {row['branch']: row for row in reported(tmp_path, 'scales')['rows']}
    assert rows.keys() == {'conv3x3', 'conv1x1', 'identity'}
    assert all((row['scales'], row['other'], row['changes']) == ('a', 'b', 1.) for row in rows.values())
    assert (rows['conv3x3']['layers'], rows['conv1x1']['layers']) == (21, 22)
    for branch, row in rows.items():
        layers = [n for n in a if branch in a[n] and not (branch == 'conv3x3' and n == 'stages.2.9.conv')]
        means = torch.tensor([[x[n][branch].mean() for n in layers] for x in (a, b, start)])
        assert row['correlation'] == pytest.approx(torch.corrcoef(means)[0, 1].item(), abs=1e-3)
        if branch == 'identity':
            assert row['start_with_other'] is None  # the same 1 everywhere
        else:
            assert row['start_with_other'] == pytest.approx(torch.corrcoef(means)[1, 2].item(), abs=1e-3)


def test_gpu_hyper_search(images, tmp_path):
    """Stopped before it began, then run to its end, then nothing left to do; on a CPU, for it has no other way."""
    command = [
        sys.executable, SCRIPTS / 'gpu' / 'hyper_search.py', '--output', tmp_path, '--models', 'repopt_ghostnet_050',
        '--data-dir', images, '--val-split', 'validation', '--epochs', 1, '--warmup-epochs', 0, '--batch-size', 10,
        '--workers', 0, '--device', 'cpu', '--minutes']

    def run(minutes):
        done = subprocess.run([str(c) for c in (*command, minutes)], capture_output=True, text=True)
        assert done.returncode == (0 if 'nothing is left' in done.stdout else 75), done.stderr
        return done.stdout

    assert 'left: repopt_ghostnet_050; run this again' in run(0)
    assert 'nothing is left' in run(5)
    path = tmp_path / 'repopt_ghostnet_050.safetensors'
    before = path.stat().st_mtime_ns
    assert "epochs='1'" in run(5)
    assert path.stat().st_mtime_ns == before
    command[command.index('--output') + 1] = tmp_path / 'other'
    command[command.index('--data-dir') + 1] = tmp_path / 'nothing'
    failed = subprocess.run([str(c) for c in (*command, 5)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert 'failed: repopt_ghostnet_050' in failed.stderr
    assert 'Cannot open the split' in failed.stdout
    assert timm.create_model('repopt_ghostnet_050', scales=str(path))


def test_package_scales(script, tmp_path, monkeypatch, capsys):
    """The file of the package has the layers in the model's order, the card a row for it."""
    module = importlib.import_module('package_scales')
    card = tmp_path / 'packaged' / 'README.md'
    card.parent.mkdir()
    card.write_text(module.CARD.read_text())
    monkeypatch.setattr(packaged, '_FOLDER', card.parent)
    monkeypatch.setattr(module, 'FOLDER', card.parent)
    monkeypatch.setattr(module, 'CARD', card)
    search = timm.create_model('repopt_vgg_a0', structure='search')
    found = Scales.from_model(search)
    shuffled = Scales({name: found[name] for name in sorted(found)}, {
        'model': 'repopt_vgg_a0', 'dataset': 'x', 'epochs': '3', 'batch_size': '8', 'accuracy': '12.34',
        'date': '2020-01-01', 'timm_rep': '0'})
    shuffled.save(tmp_path / 's.safetensors')
    Scales(found, {'model': 'repopt_vgg_a0', 'date': '2020-01-01'}).save(tmp_path / 'unknown.safetensors')
    before = card.read_text()
    with pytest.raises(ValueError, match=r'does not say its dataset, epochs, batch_size, accuracy, timm_rep: pass'):
        script('package_scales', tmp_path / 's.safetensors', tmp_path / 'unknown.safetensors')
    assert packaged_scales() == []
    assert card.read_text() == before
    script('package_scales', tmp_path / 's.safetensors', '--metadata', 'dataset=Noise')
    again = Scales.load('repopt_vgg_a0')
    assert again == found
    assert list(again) == list(found)
    assert packaged_scales() == ['repopt_vgg_a0']
    assert card.read_text().splitlines()[-1] == (
        '| `repopt_vgg_a0` | Noise | 3 | 8 | 12.34% | 0 of 22 | 2020-01-01 | 0 |')
    assert card.read_text().startswith('# Searched scales')
    model = timm.create_model('repopt_vgg_a0')
    layer = model.stages[2][5].conv
    assert torch.equal(
        layer.grad_mult.dense('squared'), layer.csla.grad_mult(found['stages.2.5.conv']).dense('squared'))


def test_weight_selection(script, images, tmp_path, capsys, monkeypatch):
    """Every row starts as it says; all train on, and the first is always there to be compared with."""
    module = importlib.import_module('weight_selection')
    starts, teachers, train = {}, [], module.train

    def spied(model, loaders, epochs, seed, args, description):
        starts[description] = {k: v.clone() for k, v in model.state_dict().items()}
        courses = train(model, loaders, epochs, seed, args, description)
        if description == 'teacher':
            teachers.append(model.state_dict())
        return courses

    monkeypatch.setattr(module, 'train', spied)
    chosen = {'element_selection': [], 'layer_selection': []}
    init = module.weight_select_init

    def select(student, teacher, **kwargs):
        for key in chosen.keys() & kwargs.keys():
            chosen[key].append(kwargs[key])
        init(student, teacher, **kwargs)

    monkeypatch.setattr(module, 'weight_select_init', select)
    rows = [row for row in module.ROWS if row != 'random']
    script(
        'weight_selection', *rows, '--data-dir', images, '--val-split', 'validation', '--num-classes', 4, '-j', 0,
        '--student', 'patch_size=16', 'depth=1', 'embed_dim=16', 'num_heads=2',
        '--teacher', 'patch_size=16', 'depth=3', 'embed_dim=24', 'num_heads=3',
        '--batch-size', 10, '--epochs', 2, '--teacher-epochs', 1, '--warmup-epochs', 0, '--seeds', 0, 1)
    result = reported(tmp_path, 'weight-selection-folders')
    assert [row['row'] for row in result['rows']] == list(module.ROWS)
    assert all(0 <= row['accuracy'] <= 100 for row in result['rows'])
    assert result['rows'][0]['epochs_to_random'] <= 2
    assert sorted({*chosen['element_selection']}) == sorted(set(ELEMENT_CHOICES) - {'uniform'})
    assert sorted({*chosen['layer_selection']}) == ['last', 'mid', 'uniform']
    # the head, and all of it in one case, is that of the seed
    first, small = starts['random, seed 0'], [row for row in module.ROWS if not row.startswith('repa-')]
    assert all(torch.equal(starts[f'{row}, seed 0']['head.weight'], first['head.weight']) for row in small)
    assert not torch.equal(starts['random, seed 1']['head.weight'], first['head.weight'])
    qkv = {row: starts[f'{row}, seed 0']['blocks.0.attn.qkv.weight'].flatten().tolist() for row in small}
    assert len({tuple(of) for of in qkv.values()}) == len(small) - 1  # of one block the first is evenly spaced
    # a RePaFormer of the teacher's size has all of its weights
    repa = starts['repa-plain, seed 0']
    assert repa['blocks.2.mlp.norm1.running_var'].std() > 0
    for name in ('head.weight', 'blocks.2.attn.qkv.weight', 'blocks.2.mlp.fc1.weight'):
        assert torch.equal(repa[name], teachers[0][name])
        assert not torch.equal(starts['repa-random, seed 0'][name], repa[name])
    with pytest.raises(SystemExit):
        script('weight_selection', 'randum')
    assert 'there are no rows randum' in capsys.readouterr().err


def test_bench_of_inference(script, tmp_path, monkeypatch, capsys):
    args = ['repa-infer', 'parts', '--models', 'repa_deit_tiny', '--rounds', 3, '--batch-size', 1]
    script('bench', *args)
    result = reported(tmp_path, 'repa-infer')
    row, = result['rows']
    assert (row['model'], row['mode'], row['paper'], result['batch_size']) == ('repa_deit_tiny', 'eager', 1.33, 1)
    assert row['spread (%)'].keys() == {'vanilla', 'unfolded', 'folded'}
    assert all(row[side] > 0 for side in row['spread (%)'])
    row, = reported(tmp_path, 'parts')['rows']
    for form in ('vanilla', 'folded'):
        assert row[f'FFNs, {form}'] > row[f'head, {form}'] > 0
    tokens, dim = 197, 192
    rest = 196 * 3 * 16 ** 2 * dim + 1000 * dim + 12 * 2 * tokens ** 2 * dim  # patches, classifier, attention
    vanilla, folded = (12 * matrices * tokens * dim ** 2 + rest for matrices in (12, 7))
    assert row['arithmetic'] == round(vanilla / folded, 2)
    before = {path: path.read_bytes() for path in (tmp_path / 'results').glob('*/*')}
    capsys.readouterr()
    script('bench', *args, '--resume')
    assert capsys.readouterr().out.split('\n') == [
        '', 'repa-infer: nothing is left to measure', '', 'parts: nothing is left to measure', '']
    assert {path: path.read_bytes() for path in before} == before
    monkeypatch.setattr(importlib.import_module('bench'), 'use_fused_attn', lambda experimental: experimental)
    script('bench', *args, '--resume')
    assert [row['mode'] for row in reported(tmp_path, 'repa-infer')['rows']] == ['eager', 'eager, TIMM_FUSED_ATTN=2']
    script('bench', 'parts', *args[2:], '--rounds', 1, '--resume')  # of other settings
    assert reported(tmp_path, 'parts')['rounds'] == 1


def test_a_stopped_bench_goes_on(script, tmp_path, monkeypatch, capsys):
    """What is measured is kept, row by row, and not measured again."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module('bench')
    stop = True

    def section(args):
        """What."""
        for name in 'ab':
            if args.measured(model=name):
                continue
            if stop and name == 'b':
                raise KeyboardInterrupt
            yield {'model': name, 'stopped': stop}

    monkeypatch.setitem(module.SECTIONS, 'parts', section)
    with pytest.raises(KeyboardInterrupt):
        script('bench', 'parts')
    assert reported(tmp_path, 'parts')['rows'] == [{'model': 'a', 'stopped': True}]
    stop = False
    script('bench', 'parts', '--resume')
    assert reported(tmp_path, 'parts')['rows'] == [{'model': 'a', 'stopped': True}, {'model': 'b', 'stopped': False}]
    script('bench', 'parts')
    assert reported(tmp_path, 'parts')['rows'] == [{'model': name, 'stopped': False} for name in 'ab']
    assert 'nothing is left' not in capsys.readouterr().out


@pytest.mark.parametrize('name', ['repa_deit_tiny', 'repa_poolformer_s12', 'repa_lvvit_s'])
def test_bench_training(script, name, monkeypatch):
    """The released form computes what ours does, and the sides of the comparison are what they say."""
    monkeypatch.syspath_prepend(SCRIPTS)
    bench = importlib.import_module('_bench_train')
    torch.manual_seed(0)
    size = dict(img_size=32, patch_size=16) if name != 'repa_poolformer_s12' else {}
    if name == 'repa_deit_tiny':
        size.update(patch_size=4)
    model = timm.create_model(name, num_classes=3, drop_path_rate=0., **size).train()
    released = bench.in_released_form(model)
    assert sum(isinstance(m, bench.ReleasedForm) for m in released.modules()) == sum(
        isinstance(m, RePaMlp) for m in model.modules()) > 0
    x = torch.randn(32 if name == 'repa_deit_tiny' else 4, 3, 32, 32)
    before = use_fused_idle()
    seen = []
    pays = channel_idle.fused_idle_is_faster
    monkeypatch.setattr(channel_idle, 'fused_idle_is_faster', lambda *sizes: seen.append(pays(*sizes)) or True)
    times, peaks = bench.time_training({
        'released': (released, False), 'layers': (copy.deepcopy(model), False), 'matrix': (model, True)}, x, 1)
    assert seen
    assert use_fused_idle() == before
    assert times.keys() == peaks.keys() == {'released', 'layers', 'matrix'}
    assert peaks['layers'] <= peaks['released']
    if all(seen):
        assert peaks['matrix'] < peaks['layers']
    grads = [next(m for m in of.modules() if isinstance(m, RePaMlp)).fc1.weight.grad for of in (released, model)]
    assert relative(grads[0], grads[1]) < 1e-4
    assert bench.ReleasedForm(RePaMlp(8, 32).to('meta')).mask.is_meta  # wherever the layers are


def test_peak_memory(monkeypatch):
    """At its highest, what was given back by then not counted; nor gradients of before."""
    monkeypatch.syspath_prepend(SCRIPTS)
    bench = importlib.import_module('_bench_train')
    model = torch.nn.Linear(1000, 1000, bias=False)

    def step(x):
        model.zero_grad()
        first = x.repeat(3)
        del first
        second, third = x.repeat(2), x.repeat(2)
        assert len(second) == len(third)
        del second, third
        model.weight.grad = torch.zeros(1000, 1000)

    step.model = model
    for _ in range(2):
        assert bench.peak_memory(step, torch.ones(10 ** 6)) == pytest.approx(16, rel=1e-3)
    assert bench.peak_memory(step, torch.ones(10)) == pytest.approx(4, rel=1e-3)


def test_parts_of_a_training_step(monkeypatch):
    """Each operator counts once, and the optimizer's to the optimizer."""
    monkeypatch.syspath_prepend(SCRIPTS)
    bench = importlib.import_module('_bench_repopt')
    args = SimpleNamespace(models=['repopt_vgg_a0'], device=torch.device('cpu'), dtype=torch.float32, batch_size=2,
                           rounds=1, amp=False, measured=lambda **names: False)
    step, x = bench._vgg_step('repopt_vgg_a0', 'RepOpt-VGG', args), torch.randn(2, 3, 32, 32)
    step(x)
    start = time.perf_counter()
    parts = bench.parts_of_step(step, x)
    assert 0 < sum(parts.values()) < 1e3 * (time.perf_counter() - start)
    assert all(ms > 0 for ms in parts.values())
    assert parts['convolutions'] > parts['norms']
    assert not step.optimizer._optimizer_step_pre_hooks
    rows = list(bench.bench_repopt_parts(args))
    assert [(row['form'], row['img_size']) for row in rows] == [
        (side, size) for size in (32, 160) for side in ('RepVGG', 'RepOpt-VGG', 'RepOpt-VGG, channels-last')]
    # 3 x 3 beside 1 x 1, but for the classifier
    assert rows[3]['GMACs'] / rows[4]['GMACs'] == pytest.approx(10 / 9, rel=1e-2)


def test_what_a_report_keeps(monkeypatch, tmp_path, capsys):
    """Rows of other names with the commands that measured them, if they depend on the same."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module('_report')
    monkeypatch.setattr(module, 'RESULTS', tmp_path)
    for name in module._SWITCHES:
        monkeypatch.delenv(name, raising=False)

    def report(name, value, **settings):
        monkeypatch.setattr(sys, 'argv', ['bench.py', name])
        module.report('a', 'What.', [dict(model=name, x=value)], torch.device('cpu'), settings, ['model'])
        content = json.loads(next(tmp_path.glob('*/a.json')).read_text())
        return {row['model']: row['x'] for row in content['rows']}, content['commands']

    assert report('p', 1, rounds=3) == ({'p': 1}, ['python bench.py p'])
    both = ['python bench.py p', 'python bench.py q']
    assert report('q', 2, rounds=3) == ({'p': 1, 'q': 2}, both)
    assert report('q', 3, rounds=3) == ({'p': 1, 'q': 3}, both)
    assert '`python bench.py p`, `python bench.py q`; ' in (tmp_path / 'README.md').read_text()
    assert 'no longer there' not in capsys.readouterr().out
    monkeypatch.setenv('TIMM_FUSED_ATTN', '2')
    assert report('q', 4, rounds=5) == ({'q': 4}, ['TIMM_FUSED_ATTN=2 python bench.py q'])
    assert '1 rows of' in capsys.readouterr().out


@pytest.mark.parametrize('most', [0, 1, 2, 3, 7, 8, 100, 1000])
def test_largest_batch_by_bisection(monkeypatch, most):
    monkeypatch.syspath_prepend(SCRIPTS)
    bench = importlib.import_module('_bench_repopt')
    tried = []
    found, best = bench.largest(lambda n: tried.append(n) or n <= most, 500), min(most, 500)
    assert best * 63 / 64 <= found <= best
    assert max(tried) <= 500
    assert len(tried) == len(set(tried)) <= 20
    for known in (most // 2, most):
        assert most * 63 / 64 <= bench.largest(lambda n: n <= most, 10 ** 6, known=known) <= most


@pytest.mark.parametrize('name', ['RepVGG', 'RepOpt-VGG'])
def test_largest_batch_of_a_training(monkeypatch, name):
    """Of the steps that are measured, on a machine whose memory holds three images."""
    monkeypatch.syspath_prepend(SCRIPTS)
    bench = importlib.import_module('_bench_repopt')
    args = SimpleNamespace(device=torch.device('cpu'), dtype=torch.float32, amp=False)
    train, tried, limits = bench._vgg_step('repopt_vgg_a0', name, args), [], []

    def step(x):
        tried.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError
        train(x)

    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(total_memory=2 ** 34))
    monkeypatch.setattr(
        torch.cuda, 'set_per_process_memory_fraction', lambda fraction, device: limits.append(fraction))
    assert bench.largest_batch(step, 32, 8, args.device) == 3
    assert (tried, limits) == ([2, 4, 3], [.5, 1.])
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(ValueError, match='more than 1 value per channel'):  # why one image is not tried
        train(torch.randn(1, 3, 32, 32))


def test_words_for_too_little_memory(monkeypatch):
    """A library that fails even with one image has another reason."""
    monkeypatch.syspath_prepend(SCRIPTS)
    bench = importlib.import_module('_bench_repopt')
    cudnn = RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED')
    assert bench.out_of_memory(torch.OutOfMemoryError(), False)
    assert bench.out_of_memory(cudnn, True)
    assert not bench.out_of_memory(cudnn, False)
    assert not bench.out_of_memory(RuntimeError('size mismatch'), True)


def test_numbers_out_of_times(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    timing = importlib.import_module('_timing')
    # from round to round the machine grows slower, more than one side is faster than the other
    times = {'fast': [1., 2., 4., 8., 16.], 'slow': [1.5, 3., 6., 12.8, 20.]}
    assert throughput(8, times) == {'fast': 2., 'slow': 8 / 6}
    assert timing.milliseconds(times) == {'fast': 4000., 'slow': 6000.}
    assert timing.speedup(times['fast'], times['slow']) == 1.5
    assert timing.speedup(times['slow'], times['fast']) == .67
    assert timing.spreads({**times, 'once': [3.]}) == {'fast': 75., 'slow': 81.7, 'once': None}


def test_exponent_of_a_growth(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    scaling = importlib.import_module('_bench_scaling')
    for b in (-1., 0., .5, 2.):
        assert abs(scaling.exponent([2, 5, 7, 100], [3 * n ** b for n in (2, 5, 7, 100)]) - b) < 1e-9


def test_tables_of_the_results(monkeypatch, tmp_path):
    """The committed tables are those of the committed files; nothing in them is typed."""
    monkeypatch.syspath_prepend(SCRIPTS)
    tables = importlib.import_module('tables')
    results = SCRIPTS / 'results'
    assert (results / 'README.md').read_text() == tables.tables(results)
    content = dict(
        section='a', what='What\n  it is.', machine='M', date='2026-01-01', commands=['python a.py'],
        versions={'torch': '1'}, rounds=3,
        img_size=[2, 3], nothing=None, rows=[dict(x=1.5, y=True), dict(x=None, z={'p': 2}, y=False)])
    (tmp_path / 'm').mkdir()
    (tmp_path / 'm' / 'a.json').write_text(json.dumps(content))
    tables.write_tables(tmp_path)
    text = (tmp_path / 'README.md').read_text()
    assert text.endswith("""## M

### a

What it is.

`python a.py`; 2026-01-01; torch 1; rounds 3, img_size 2 x 3.

| x | y | z |
| --- | --- | --- |
| 1.5 | yes |  |
|  | no | p 2 |
""")


def test_gpu_jobs(script, tmp_path, monkeypatch, capsys):
    """Nothing of a failed or stopped job is taken for done, and what is done is not repeated."""
    monkeypatch.syspath_prepend(SCRIPTS / 'gpu')
    module = importlib.import_module('run')
    code = {
        'good': "import os; open(os.environ['TIMM_REP_RESULTS'] + '.txt', 'a').write('x')",
        'long': 'import time; time.sleep(60)', 'bad': 'raise SystemExit(3)', 'unfinished': 'raise SystemExit(75)',
        'uninstalled': f"import sys; assert sys.path[1] == '{SCRIPTS.parent}', sys.path",
    }
    monkeypatch.setattr(
        module, 'JOBS', {name: lambda options, deadline, line=line: ['-c', line] for name, line in code.items()})
    out = tmp_path / 'out'

    def run(seconds, *jobs):
        status = script('gpu/run', '--device', 'cpu', '--seconds', seconds, '--output', out, '--jobs', *jobs)
        return status, capsys.readouterr().out.splitlines()

    assert run(0, 'good') == (75, ['good: not begun', 'left: good; run this again'])
    assert run(1, 'long') == (75, ['long: stopped', 'left: long; run this again'])
    # what takes too long does not stand before the others for ever
    assert run(9, 'long', 'good', 'bad', 'unfinished') == (1, [
        'good: finished', f'bad: failed, see {out / "bad"}.log', 'unfinished: stopped', 'long: stopped',
        'left: unfinished, long; run this again'])
    assert {path.name: path.stat().st_size for path in (out / 'tried').iterdir()} == {'long': 2, 'bad': 1}
    assert run(9, 'good', 'uninstalled') == (0, ['good: finished before', 'uninstalled: finished', 'nothing is left'])
    assert run(9, 'good', 'bad')[1][-1] == 'nothing is left but what failed: bad'
    assert (out / 'results.txt').read_text() == 'x'
    monkeypatch.undo()
    none, half = tmp_path / 'none.tar.gz', tmp_path / 'half.tar.gz'
    none.write_bytes(b'no archive')
    with tarfile.open(half, 'w:gz') as archive:
        archive.add(SCRIPTS, 'train')
    half.write_bytes(half.read_bytes()[:half.stat().st_size // 2])
    for archive, message in (
            ('cifar10.tar.gz', 'and no archive cifar10.tar.gz'), (none, 'not a gzip file'), (half, 'half.tar.gz: ')):
        assert script('gpu/run', '--device', 'cpu', '--seconds', 9, '--output', out, '--jobs', 'search', '--data-dir',
                      tmp_path / 'no', '--archive', archive) == 1
        assert message in capsys.readouterr().err
    assert not (out / 'data').exists()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit):
        script('gpu/run', '--seconds', 9, '--output', tmp_path / 'none')
    assert 'torch finds no GPU here' in capsys.readouterr().err
    assert not (tmp_path / 'none').exists()


def test_gpu_jobs_without_an_installation(tmp_path):
    """The checkout is enough: -S leaves out what an editable installation adds to the path."""
    packages = os.pathsep.join(path for path in sys.path if path.endswith('-packages'))
    run = subprocess.run(
        [sys.executable, '-S', SCRIPTS / 'gpu' / 'run.py', '--device', 'cpu', '--seconds', '0', '--output', tmp_path],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': packages}, capture_output=True, text=True)
    assert run.returncode == 75, run.stderr
    assert 'optim: not begun' in run.stdout


def test_gpu_job_is_killed_with_the_script(tmp_path):
    """Nothing runs on when whoever lent the machine ends the script."""
    log = tmp_path / 'out' / 'import.log'
    code = (SCRIPTS / 'gpu' / 'run.py').read_text().replace("__file__", repr(str(SCRIPTS / 'gpu' / 'run.py')))
    main = code.index("if __name__ == '__main__'")
    job = "JOBS['import'] = lambda options, deadline: ['-uc', 'import os, time; print(os.getpid()); time.sleep(60)']\n"
    process = subprocess.Popen([
        sys.executable, '-c', code[:main] + job + code[main:], '--device', 'cpu', '--seconds', '60', '--output',
        tmp_path / 'out', '--jobs', 'import'])
    try:
        while not (log.exists() and log.read_text().endswith('\n')):
            assert process.poll() is None
            time.sleep(.1)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_gpu_training(script, tmp_path, monkeypatch, capsys, images):
    """Stopped after every epoch it ends as it does at once, and what it followed is said."""
    monkeypatch.syspath_prepend(SCRIPTS / 'gpu')
    module = importlib.import_module('train')
    monkeypatch.setattr(module, 'HUB', tmp_path / 'hub')
    folder = tmp_path / 'hub' / 'repa_deit_tiny.test'
    folder.mkdir(parents=True)
    recipe = yaml.safe_load((SCRIPTS.parent / 'hub' / 'repa_deit_tiny.cifar10' / 'train.yaml').read_text())
    recipe['model_kwargs'] |= dict(embed_dim=24, depth=2)
    (folder / 'train.yaml').write_text(yaml.safe_dump(dict(recipe, num_classes=4)))
    args = [
        '--device', 'cpu', '--data-dir', images, '--val-split', 'validation', '--workers', 0, '--epochs', 3,
        '--batch-size', 10]
    assert script('gpu/train', '--output', tmp_path / 'once', *args) == 0
    for left in (2, 1, 0):
        # a second passes from look to look: the deadline comes between the first look and that after an epoch
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=itertools.count().__next__))
        status = script('gpu/train', '--output', tmp_path / 'often', *args, '--minutes', 1.5 / 60)
        assert status == (75 if left else 0)
    assert 'left: repa_deit_tiny.test; run this again' in capsys.readouterr().out
    assert script('gpu/train', '--output', tmp_path / 'often', *args) == 0
    assert capsys.readouterr().out.endswith('%\nnothing is left\n')
    states = [torch.load(tmp_path / run / folder.name / 'last.pth', weights_only=True) for run in ('once', 'often')]
    assert states[0]['epoch'] == states[1]['epoch'] == 3
    assert all(torch.equal(x, states[1]['state_dict'][name]) for name, x in states[0]['state_dict'].items())
    followed = yaml.safe_load((tmp_path / 'often' / folder.name / 'train.yaml').read_text())
    assert (followed['epochs'], followed['batch_size'], followed['lr']) == (3, 10, recipe['lr'])
    assert float((tmp_path / 'often' / folder.name / 'accuracy.txt').read_text()) <= 100


def run_on_cpu(*args):
    command = [sys.executable, SCRIPTS / 'gpu' / 'run.py', '--device', 'cpu', *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_gpu_job(images, tmp_path):
    """At toy size, the images from an archive."""
    with tarfile.open(tmp_path / 'images.tar.gz', 'w:gz') as archive:
        for split in ('train', 'validation'):
            archive.add(images / split, split)
    args = ['--output', tmp_path / 'out', '--data-dir', tmp_path / 'nothing', '--archive', tmp_path / 'images.tar.gz']
    for toy, jobs in (
            ('repa_deit_tiny', [
                'repa-infer', 'repa-train', 'ffn-train', 'deploy-ffn', 'scaling', 'repa-infer-all', 'parts', 'search',
                'train']),
            ('repopt_vgg_a0', ['optim', 'repopt-train', 'repopt-parts'])):
        status, out = run_on_cpu(
            '--seconds', 900, *args, '--toy', toy, '--val-split', 'validation', '--jobs', *jobs)
        assert status == 0, out
        assert 'nothing is left' in out
    out = tmp_path / 'out' / 'toy'
    assert {path.stem for path in (out / 'results').glob('*/*.json')} == {
        'ffn-train', 'repa-train', 'repa-infer', 'deploy-ffn', 'scaling', 'parts', 'optim', 'repopt-train',
        'repopt-parts'}
    assert 'nothing is left to measure' in (out / 'repa-infer-all.log').read_text()
    assert (out / 'search' / 'repopt_ghostnet_050.safetensors').is_file()
    assert (out / 'train' / 'repopt_vgg_a0.cifar10' / 'last.pth').is_file()
