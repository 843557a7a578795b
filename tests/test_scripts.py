"""The scripts of scripts/ at the smallest sizes."""
import copy
import itertools
import json
import os
import re
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

import timm_rep.layers.repa_mlp as repa_mlp
import timm_rep.scales.packaged as packaged
from tests.helpers import ROOT, SCRIPTS, TINY, relative, run, tiny
from timm_rep.cli import hyper_search
from timm_rep.cli import main as cli_main
from timm_rep.layers import RePaMlp, use_fused_idle
from timm_rep.optim import GradMult
from timm_rep.paper import SPEEDUPS
from timm_rep.scales import Scales, packaged_scales
from timm_rep.utils.profiling import throughput


def reported(tmp_path, section):
    path, = (tmp_path / 'results').glob(f'*/{section}.json')
    return json.loads(path.read_text())


@pytest.mark.slow
def test_compare_scales(script, tmp_path):
    """Pairs of one family; correlations of layer means over the layers that both searches changed."""
    start = Scales.from_model(timm.create_model('repopt_vgg_a0', structure='search', scales='init'))
    g = torch.Generator().manual_seed(0)

    def changed(scales, fn):
        return Scales({n: {b: fn(n, b, s) for b, s in branches.items()} for n, branches in scales.items()})

    def noise(n, b, s):
        return s + torch.randn(len(s), generator=g)

    a = changed(start, noise)
    b = changed(a, lambda n, b, s: 2 * s - start[n][b])  # twice the changes
    unsearched = {n: dict(branches) for n, branches in b.items()}
    unsearched['stages.2.9.conv.0']['conv3x3'] = torch.full((192,), 99.)
    a.save(tmp_path / 'a.safetensors')
    Scales(unsearched).save(tmp_path / 'b.safetensors')
    ghost = Scales.from_model(timm.create_model('repopt_ghostnet_050', structure='search', scales='init'))
    changed(ghost, noise).save(tmp_path / 'ghost.safetensors')
    script('scales', 'compare', *(f'repopt_vgg_a0={tmp_path / x}.safetensors={x}' for x in 'ab'),
           f'repopt_ghostnet_050={tmp_path / "ghost.safetensors"}=ghost')
    rows = {row['branch']: row for row in reported(tmp_path, 'scales')['rows']}
    assert rows.keys() == {'conv3x3', 'conv1x1', 'identity'}
    assert all((row['scales'], row['other'], row['changes']) == ('a', 'b', 1.) for row in rows.values())
    assert (rows['conv3x3']['layers'], rows['conv1x1']['layers']) == (21, 22)
    for branch, row in rows.items():
        layers = [n for n in a if branch in a[n] and not (branch == 'conv3x3' and n == 'stages.2.9.conv.0')]
        means = torch.tensor([[x[n][branch].mean() for n in layers] for x in (a, b, start)])
        assert row['correlation'] == pytest.approx(torch.corrcoef(means)[0, 1].item(), abs=1e-3)
        distances = [(a[n][branch] / start[n][branch] - 1).abs().mean().item() for n in a if branch in a[n]]
        assert row['moved'] == pytest.approx(sum(distances) / len(distances), abs=1e-3)
        if branch == 'identity':
            assert row['start_with_other'] is None  # the same 1 everywhere
        else:
            assert row['start_with_other'] == pytest.approx(torch.corrcoef(means)[1, 2].item(), abs=1e-3)


def test_package_scales(script, load_script, tmp_path, monkeypatch, capsys):
    """The file of the package has the layers in the model's order, the card a row for it."""
    module = load_script('scales')
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
    with pytest.raises(ValueError, match=r'has no metadata for dataset, epochs, batch_size, accuracy, timm_rep: pass'):
        script('scales', 'package', tmp_path / 's.safetensors', tmp_path / 'unknown.safetensors')
    assert packaged_scales() == []
    assert card.read_text() == before
    script('scales', 'package', tmp_path / 's.safetensors', '--metadata', 'dataset=Noise')
    again = Scales.load('repopt_vgg_a0')
    assert again == found
    assert list(again) == list(found)
    assert packaged_scales() == ['repopt_vgg_a0']
    assert card.read_text().splitlines()[-1] == (
        '| `repopt_vgg_a0` | Noise | 3 | 8 | 12.34% | 0 of 22 | 2020-01-01 | 0 |')
    assert card.read_text().startswith('# Searched scales')
    model = timm.create_model('repopt_vgg_a0')
    layer = model.stages[2][5].conv[0]
    assert torch.equal(
        layer.grad_mult.dense('squared'), GradMult(layer.csla, found['stages.2.5.conv.0']).dense('squared'))


def small_deit(monkeypatch, depth=2):
    """Gives the DeiTs that are created few blocks; returns how many."""
    create_model = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda name, **kwargs: create_model(name, depth=depth, **kwargs))
    return depth


@pytest.mark.slow
def test_bench_converted(script, tmp_path, monkeypatch):
    create_model = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda name, **kwargs: create_model(name, **(
        {'depth': 1, **kwargs} if 'vit_tiny_patch16_224' in (name, kwargs.get('base')) else kwargs)))
    script(
        'bench', 'converted-infer', '--models', 'fasternet_cifar10', 'vit_tiny_patch16_224', '--rounds', 2,
        '--modes', 'eager', 'onnx')
    rows = reported(tmp_path, 'converted-infer')['rows']
    assert [(row['model'], row['images'], row['mode']) for row in rows] == [
        (name, images, mode) for name in ('fasternet_cifar10', 'vit_tiny_patch16_224') for images in (1, 8)
        for mode in ('eager', 'onnx')]
    for row in rows:
        assert all(row[ratio] > 0 for ratio in ('0.25', '0.5', '0.75', '0.9', '1.0'))
        macs = list(row['MACs'].values())
        assert macs == sorted(macs)
        assert macs[0] > 1


def test_bench_prepbn(script, tmp_path, monkeypatch):
    small_deit(monkeypatch)
    script('bench', 'prepbn', '--models', 'repa_deit_tiny', '--rounds', 2, '--batch-size', 1)
    row, = reported(tmp_path, 'prepbn')['rows']
    forms = ['vanilla', 'PRepBN', 'RePa, 25%', 'RePa, 75%']
    assert list(row['spread (%)']) == forms
    params = [row[f'{form} (M)'] for form in forms]
    assert params == sorted(params, reverse=True)
    assert params[-1] < params[0]
    assert all(row[f'{form} / vanilla'] > 0 for form in forms[1:])


@pytest.mark.slow
def test_bench_inference(script, load_script, tmp_path, monkeypatch, capsys):
    args = ['repa-infer', 'parts', '--models', 'repa_deit_tiny', '--rounds', 2, '--batch-size', 1]
    depth = small_deit(monkeypatch)
    script('bench', *args)
    result = reported(tmp_path, 'repa-infer')
    row, = result['rows']
    assert (row['model'], row['mode'], row['paper'], result['batch_size']) == ('repa_deit_tiny', 'eager', 1.33, 1)
    assert row['spread (%)'].keys() == {'vanilla', 'unfolded', 'folded'}
    assert all(row[side] > 0 for side in row['spread (%)'])
    row, = reported(tmp_path, 'parts')['rows']
    for form in ('vanilla', 'folded'):
        assert row[f'FFNs, {form}'] > 0
        assert row[f'head, {form}'] > 0
    tokens, dim = 197, 192
    rest = 196 * 3 * 16 ** 2 * dim + 1000 * dim + depth * 2 * tokens ** 2 * dim  # patches, classifier, attention
    vanilla, folded = (depth * matrices * tokens * dim ** 2 + rest for matrices in (12, 7))
    assert row['arithmetic'] == round(vanilla / folded, 2)
    before = {path: path.read_bytes() for path in (tmp_path / 'results').glob('*/*')}
    capsys.readouterr()
    script('bench', *args, '--resume')
    assert capsys.readouterr().out.split('\n') == [
        '', 'repa-infer: nothing is left to measure', '', 'parts: nothing is left to measure', '']
    assert {path: path.read_bytes() for path in before} == before
    monkeypatch.setattr(load_script('benchmarks/inference'), 'use_fused_attn', lambda experimental: experimental)
    script('bench', *args, '--resume')
    assert [row['mode'] for row in reported(tmp_path, 'repa-infer')['rows']] == ['eager', 'eager, TIMM_FUSED_ATTN=2']
    script('bench', 'parts', *args[2:], '--rounds', 1, '--resume')  # other settings
    assert reported(tmp_path, 'parts')['rounds'] == 1


@pytest.mark.slow
def test_bench_onnx(script, tmp_path, monkeypatch):
    pytest.importorskip('onnxscript')
    pytest.importorskip('onnxruntime')
    small_deit(monkeypatch)
    args = ['bench', 'onnx', '--models', 'repa_deit_tiny', '--rounds', 2]
    script(*args)
    result = reported(tmp_path, 'onnx')
    assert [(row['model'], row['images']) for row in result['rows']] == [('repa_deit_tiny', 1), ('repa_deit_tiny', 8)]
    assert result['batch_size'] is None
    for row in result['rows']:
        assert row['spread (%)'].keys() == {'eager', 'ONNX Runtime'}
        assert row['eager'] > 0
        assert row['ONNX Runtime'] > 0
        assert row['ONNX Runtime / eager'] > 0
    script(*args, '--batch-size', 2)
    assert [row['images'] for row in reported(tmp_path, 'onnx')['rows']] == [2]
    with pytest.raises(SystemExit, match='--device cpu --dtype float32'):
        script(*args, '--dtype', 'bfloat16')


@pytest.mark.slow
@pytest.mark.parametrize('bfloat16', [False, True])
def test_bench_int8(script, load_script, tmp_path, monkeypatch, bfloat16):
    pytest.importorskip('torchao')
    pytest.importorskip('onnxruntime')
    small_deit(monkeypatch)
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: bfloat16)
    module, times = load_script('benchmarks/deploy'), {}
    time_passes = module.time_passes

    def spied(*args, **kwargs):
        times.update(time_passes(*args, **kwargs))
        return times

    monkeypatch.setattr(module, 'time_passes', spied)
    script('bench', 'int8', '--models', 'repa_deit_tiny', '--rounds', 2, '--batch-size', 2)
    row, = reported(tmp_path, 'int8')['rows']
    baselines = {'eager', 'compiled', 'frozen', *(['bfloat16'] if bfloat16 else [])}
    backends = row['spread (%)'].keys() - baselines
    assert (row['model'], row['images']) == ('repa_deit_tiny', 2)
    assert backends >= {'int8, inductor', 'int8, onnxruntime'}
    assert row['spread (%)'].keys() >= baselines
    assert row['fastest float'] == max(baselines, key=row.get)
    assert row['layers in int8'].keys() == backends
    assert len(set(row['layers in int8'].values())) == 1
    for backend in backends:
        assert row[backend] > 0
        assert row[f'{backend}: speedup'] == module.speedup(times[backend], times[row['fastest float']]) > 0


@pytest.mark.slow
def test_frozen_weights(load_script, monkeypatch):
    """Only the side that says so has its weights as constants, although torch shares code among equal models."""
    import torch._inductor.freezing as freezing

    compiled, freeze, calls = load_script('benchmarks/deploy')._compiled, freezing.freeze, []
    monkeypatch.setattr(freezing, 'freeze', lambda *args, **kwargs: calls.append(args) or freeze(*args, **kwargs))
    model, x = torch.nn.Linear(3, 4).eval(), torch.randn(2, 3)
    with torch.inference_mode():
        for is_frozen in False, True:
            side = compiled(model, freeze=is_frozen)
            assert relative(side(x), model(x)) < 1e-5
            assert len(calls) == is_frozen


def test_bench_resumes(script, load_script, tmp_path, monkeypatch, capsys):
    """Rows are saved as they are measured; --resume skips the rows of the file."""
    module = load_script('bench')
    stop = True

    def section(args):
        """What."""
        for row in args.pending(model='ab'):
            if stop and row['model'] == 'b':
                raise KeyboardInterrupt
            yield {**row, 'stopped': stop}

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


def test_bench_batch_sizes(script, load_script, tmp_path, monkeypatch):
    module = load_script('bench')
    for section in ('parts', 'search-step', 'dense'):
        monkeypatch.setitem(module.SECTIONS, section, lambda args: iter([{'batch': args.batch_size}]))
        monkeypatch.setattr(module.SECTIONS[section], '__doc__', 'What.')
    for given, expected in (([], [8, 128, 1]), (['--batch-size', 2], [2, 2, 1])):
        script('bench', 'parts', 'search-step', 'dense', *given)
        results = [reported(tmp_path, section) for section in ('parts', 'search-step', 'dense')]
        assert [result['batch_size'] for result in results] == [row['batch'] for r in results for row in r['rows']]
        assert [result['batch_size'] for result in results] == expected
        assert [result.get('img_size') for result in results] == [None, None, [512, 512]]


@pytest.mark.parametrize('name', [
    'repa_deit_tiny',
    pytest.param('repa_poolformer_s12', marks=pytest.mark.slow), pytest.param('repa_lvvit_s', marks=pytest.mark.slow)])
def test_bench_training(load_script, name, monkeypatch):
    """The released form computes the same gradients as ours; each side of the comparison is what its name says."""
    bench = load_script('benchmarks/repa_train')
    many_tokens = name == 'repa_deit_tiny'
    model = tiny(name, drop_path_rate=0., **(dict(patch_size=4, embed_dim=192) if many_tokens else {})).train()
    released = bench.in_released_form(model)
    assert sum(isinstance(m, bench.MaskedActivation) for m in released.modules()) == sum(
        isinstance(m, RePaMlp) for m in model.modules()) > 0
    x = torch.randn(16 if many_tokens else 4, 3, *[32 if many_tokens else 64] * 2)
    before = use_fused_idle()
    seen = []
    pays = repa_mlp.fused_idle_is_faster
    monkeypatch.setattr(repa_mlp, 'fused_idle_is_faster', lambda *sizes: seen.append(pays(*sizes)) or True)
    steps = {
        'released': bench.TrainingStep(released, x, fused_idle=False),
        'layers': bench.TrainingStep(copy.deepcopy(model), x, fused_idle=False),
        'matrix': bench.TrainingStep(model, x)}
    times, peaks = bench.time_steps(steps, 1)
    assert seen
    assert use_fused_idle() == before
    assert times.keys() == peaks.keys() == {'released', 'layers', 'matrix'}
    assert peaks['layers'] <= peaks['released']
    if many_tokens:
        assert all(seen)
        assert peaks['matrix'] < peaks['layers']
    grads = [next(m for m in net.modules() if isinstance(m, RePaMlp)).fc1.weight.grad for net in (released, model)]
    assert relative(grads[0], grads[1]) < 1e-4
    assert bench.in_released_form(RePaMlp(8, 32).to('meta')).act.mask.is_meta  # on the device of the layers


def test_memory_use(load_script):
    """Memory freed before the peak does not count; memory held before the call neither."""
    memory_use = load_script('benchmarks/timing').memory_use
    held = []

    def step(x):
        first = x.repeat(3)
        del first
        second, third = x.repeat(2), x.repeat(2)
        assert len(second) == len(third)
        del second, third
        held.append(torch.zeros(1000, 1000))

    for _ in range(2):
        x = torch.ones(10 ** 6)
        assert memory_use(lambda: step(x), x.device) == pytest.approx((4, 16), rel=1e-3)  # noqa: B023
    assert memory_use(lambda: step(torch.ones(10)), x.device) == pytest.approx((4, 4), rel=1e-3)


def arguments(**more):
    """The arguments that bench.py passes to a section."""
    def pending(**columns):
        return [dict(zip(columns, values)) for values in itertools.product(*columns.values())]

    return SimpleNamespace(**{**dict(
        device=torch.device('cpu'), dtype=torch.float32, batch_size=2, rounds=1, amp=False, pending=pending), **more})


@pytest.mark.slow
def test_bench_optim(load_script, monkeypatch):
    """All forms of the step are timed, from the same weights; extra memory includes the multipliers."""
    bench = load_script('benchmarks/optim')
    create = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda name, **kwargs: create(
        name, depths=(1, 2, 1, 1), widths=(8, 16, 16, 24), stem_width=8, **kwargs))
    monkeypatch.setattr(torch, 'compile', lambda step: step)
    rows = list(bench.optim(arguments(models=['repopt_vgg_a0'])))
    forms = [
        'torch, fused', 'torch, foreach', 'torch, one at a time', 'torch, compiled', 'released', 'ours', 'ours, fused']
    assert [(row['optimizer'], row['form']) for row in rows] == [
        (family, form) for family in ('SGD', 'AdamW') for form in forms]
    assert all(row['ms per step'] > 0 and row['over torch, fused'] > 0 for row in rows)
    for family in (rows[:7], rows[7:]):
        for row in family:  # time of the form, divided by torch's
            quotient = row['ms per step'] / family[0]['ms per step']
            assert row['over torch, fused'] == pytest.approx(quotient, rel=.01, abs=.006)
        assert len({row['state (MB)'] for row in family}) == 1
        extra = {row['form']: row['extra (MB)'] for row in family}
        assert extra['released'] >= extra['torch, one at a time']
    model = bench.build('repopt_vgg_a0', 'cpu')
    step = bench.Released(torch.optim.SGD, 'squared', list(model.parameters()), lr=.1)
    conv = model.stages[1][1].conv[0]
    before, grad = conv.weight.detach().clone(), conv.weight.grad.clone()
    step.step()
    torch.testing.assert_close(before - conv.weight, .1 * conv.grad_mult.dense('squared') * grad)


@pytest.mark.slow
def test_bench_ffn(load_script):
    """All forms of the FFN are timed; deploy-ffn itself checks that the folded ones agree."""
    args = arguments(pending=lambda **columns: [dict(C=32, tokens=64)])
    row, = load_script('benchmarks/inference').deploy_ffn(args)
    assert row['ms'].keys() == {'vanilla', 'one wide GEMM', 'two GEMMs, addmm', 'three linears'}
    rows = list(load_script('benchmarks/repa_train').ffn_train(args))
    assert all(row['ms'].keys() == {'vanilla', 'released', 'layers', 'matrix'} for row in rows)
    assert len(load_script('benchmarks/scaling')._ffn(32, 64, args)) == 5


@pytest.mark.parametrize('module, section, models, expected', [
    ('inference', 'deploy_ffn', None, {'one wide GEMM': .5, 'two GEMMs, addmm': .25, 'three linears': .12}),
    ('inference', 'repa_infer', 'repa_deit_tiny', {'folded / vanilla': .25, 'folded / unfolded': .5}),
    ('inference', 'converted_infer', 'vit_tiny_patch16_224', {'0.25': .5, '0.5': .25, '1.0': .03}),
    ('inference', 'prepbn', 'repa_deit_tiny', {'PRepBN / vanilla': .5, 'RePa, 25% / vanilla': .25}),
    ('repa_train', 'repa_train', 'repa_deit_tiny', {
        'vanilla': 2., 'layers': .5, 'matrix': .25, 'matrix / vanilla': .12}),
    ('repa_train', 'ffn_train', None, {'matrix / layers': .5, 'matrix / released': .25, 'matrix / vanilla': .12}),
    ('repopt_train', 'repopt_train', 'repopt_vgg_a0', {'RepOpt-VGG': .5}),
    ('repopt_train', 'repopt_depth', None, {'RepSGD': 2., 'RepVGG': 4.}),
    ('repopt_train', 'repopt_any', 'mobileone_s1', {'RepOpt': .5, 'RepOpt, channels-last': .25}),
    ('search_step', 'search_step', 'repopt_vgg_a0', {'ratio': 2.}),
    ('conversion', 'conversion', 'vit_tiny_patch16_224', {'passes': 2.}),
])
def test_quotients(load_script, monkeypatch, module, section, models, expected):
    """Speedups and their inverses, when the sides take 1, 2, 4, ... seconds in their order."""
    bench = load_script(f'benchmarks/{module}')
    for name in 'time_calls', 'time_passes':
        if hasattr(bench, name) or module == 'repopt_train':
            monkeypatch.setattr(bench, name, lambda sides, *args, **kwargs: {
                side: [2. ** i, 2. ** i] for i, side in enumerate(sides)}, raising=False)
    training = load_script('benchmarks/repa_train')
    monkeypatch.setattr(training, 'time_calls', lambda sides, *args: {
        side: [2. ** i, 2. ** i] for i, side in enumerate(sides)})
    monkeypatch.setattr(training.TrainingStep, 'peak_memory', lambda self: 1.)
    create = timm.create_model
    small = {
        'deit': dict(depth=1), 'vit': dict(depth=1, embed_dim=24, num_heads=3), 'rep': dict(num_classes=4), 'mob': {}}

    def tiny(name, **kwargs):
        of = kwargs.get('base', name)
        key = 'deit' if 'deit' in of else of[:3]
        return create(name, **{**small[key], **kwargs})

    monkeypatch.setattr(timm, 'create_model', tiny)
    if section == 'conversion':
        monkeypatch.setattr(bench, '_peak_memory', lambda call: None)
    args = arguments(models=[models] if models else None, modes=['eager'])
    row = next(iter(getattr(bench, section)(args)))
    assert {key: row[key] for key in expected} == expected


@pytest.mark.slow
def test_bench_conversion(load_script, monkeypatch):
    bench = load_script('benchmarks/conversion')
    create, converted = timm.create_model, []
    monkeypatch.setattr(timm, 'create_model', lambda name, depth=1: create(
        name, depth=depth, img_size=32, embed_dim=24, num_heads=3, num_classes=4))
    convert = bench.timm_rep.convert_to_repa
    monkeypatch.setattr(bench.timm_rep, 'convert_to_repa', lambda model, calibration: converted.append(
        [model, convert(model, calibration=calibration)]))
    monkeypatch.setattr(bench, '_IMAGES', 32)
    monkeypatch.setattr(bench, '_MODELS', {'vit_small_patch16_224': {}, 'vit_tiny_patch16_224': {'depth': 2}})
    rows = list(bench.conversion(arguments(batch_size=16, models=None)))
    assert [row['model'] for row in rows] == ['vit_small_patch16_224', 'vit_tiny_patch16_224']
    assert [row['blocks'] for row in rows] == [1, 2]
    assert [report.images for _, report in converted] == [32] * 6  # before and for the memory, and for the time
    assert len({id(model) for model, _ in converted}) == 6
    for row in rows:
        assert row['passes'] > 0
        assert row['peak (MB)'] is None or row['peak (MB)'] >= 0


def test_bench_search_step(load_script, monkeypatch):
    """Both forms of the search block are the same function of the same weights."""
    bench = load_script('benchmarks/search_step')
    create = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda name, structure, num_classes: create(
        name, structure=structure, **TINY['_'.join(name.split('_')[:2])]))
    steps, time_calls = [], bench.time_calls
    monkeypatch.setattr(bench, 'time_calls', lambda sides, *args, **kwargs: steps.append(sides) or time_calls(
        sides, *args, **kwargs))
    rows = list(bench.search_step(arguments(models=['repopt_vgg_a0', 'repopt_ghostnet_050'])))
    assert [(row['model'], row['memory']) for row in rows] == [
        ('repopt_vgg_a0', 'contiguous'), ('repopt_ghostnet_050', 'contiguous'),
        ('repopt_ghostnet_050', 'channels-last')]
    assert all(row['ratio'] > 0 for row in rows)
    kernels, maps = (step.model.eval()(step.x) for step in steps[0].values())
    assert relative(kernels, maps) < 1e-3
    blocks = [{type(m).__name__ for m in step.model.modules()} for step in steps[0].values()]
    assert ['FeatureMaps' in names for names in blocks] == [False, True]


@pytest.mark.slow
def test_parts_of_a_training_step(load_script, monkeypatch):
    """Each operator counts once; operators of the optimizer count as the optimizer."""
    bench = load_script('benchmarks/repopt_train')
    args = arguments(models=['repopt_vgg_a0'])
    args.pending = lambda model, img_size: [{'model': model[0], 'img_size': img_size[0]}]
    step = bench._vgg_step('repopt_vgg_a0', 'RepOpt-VGG', args)(torch.randn(2, 3, 32, 32))
    step()
    start = time.perf_counter()
    parts = bench.parts_of_step(step)
    assert 0 < sum(parts.values()) < 1e3 * (time.perf_counter() - start)
    assert all(ms > 0 for ms in parts.values())
    assert parts['convolutions'] > parts['norms']
    assert not step.optimizer._optimizer_step_pre_hooks
    rows = list(bench.repopt_parts(args))
    assert [(row['form'], row['img_size']) for row in rows] == [
        (side, 32) for side in ('RepVGG', 'RepOpt-VGG', 'RepOpt-VGG, channels-last')]
    # 3 x 3 and 1 x 1 over 3 x 3, except for the classifier
    assert rows[0]['GMACs'] / rows[1]['GMACs'] == pytest.approx(10 / 9, rel=2e-2)


def test_rows_kept_in_a_file(load_script, monkeypatch, tmp_path, capsys):
    """Rows with other keys and their commands are kept if versions and settings are the same."""
    module = load_script('experiments/report')
    monkeypatch.setattr(module, 'RESULTS', tmp_path)
    for name in module._SWITCHES:
        monkeypatch.delenv(name, raising=False)

    def report(name, value, **settings):
        monkeypatch.setattr(sys, 'argv', ['bench.py', '--minutes', '8.3', name])  # a limit that is not recorded
        module.report('a', 'What.', [dict(model=name, x=value)], torch.device('cpu'), settings, ['model'])
        content = json.loads(next(tmp_path.glob('*/a.json')).read_text())
        return {row['model']: row['x'] for row in content['rows']}, content['commands']

    assert report('p', 1, rounds=3) == ({'p': 1}, ['python bench.py p'])
    both = ['python bench.py p', 'python bench.py q']
    assert report('q', 2, rounds=3) == ({'p': 1, 'q': 2}, both)
    assert report('q', 3, rounds=3) == ({'p': 1, 'q': 3}, both)
    assert 'Removed' not in capsys.readouterr().out
    monkeypatch.setenv('TIMM_FUSED_ATTN', '2')
    assert report('q', 4, rounds=5) == ({'q': 4}, ['TIMM_FUSED_ATTN=2 python bench.py q'])
    assert 'Removed 1 rows of' in capsys.readouterr().out


@pytest.mark.parametrize('most', [0, 1, 2, 3, 7, 8, 100, 1000])
def test_largest_batch_by_bisection(load_script, most):
    bench = load_script('benchmarks/repopt_train')
    tried = []
    found, best = bench.largest(lambda n: tried.append(n) or n <= most, 500), min(most, 500)
    assert best * 63 / 64 <= found <= best
    assert max(tried) <= 500
    assert len(tried) == len(set(tried)) <= 20
    for known in (most // 2, most):
        assert most * 63 / 64 <= bench.largest(lambda n: n <= most, 10 ** 6, known=known) <= most


@pytest.mark.parametrize('name', ['RepVGG', 'RepOpt-VGG'])
def test_largest_batch_of_a_training(load_script, monkeypatch, name):
    """Largest batch of a measured step, with memory for three images."""
    bench = load_script('benchmarks/repopt_train')
    create_step, tried, limits = bench._vgg_step('repopt_vgg_a0', name, arguments()), [], []

    def limited(x):
        tried.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError
        return create_step(x)

    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(total_memory=2 ** 34))
    monkeypatch.setattr(
        torch.cuda, 'set_per_process_memory_fraction', lambda fraction, device: limits.append(fraction))
    assert bench.largest_batch(limited, 32, 8, torch.device('cpu')) == 3
    assert (tried, limits) == ([2, 4, 3], [.5, 1.])
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(ValueError, match='more than 1 value per channel'):  # why one image is not tried
        create_step(torch.randn(1, 3, 32, 32))()


def test_errors_that_mean_too_little_memory(load_script):
    """An error of cuDNN counts only if fewer images fit before."""
    bench = load_script('benchmarks/repopt_train')
    cudnn = RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED')
    assert bench.out_of_memory(torch.OutOfMemoryError(), False)
    assert bench.out_of_memory(cudnn, True)
    assert not bench.out_of_memory(cudnn, False)
    assert not bench.out_of_memory(RuntimeError('size mismatch'), True)


def test_medians_and_spread(load_script):
    timing = load_script('benchmarks/timing')
    # the machine slows down from round to round by more than the sides differ
    times = {'fast': [1., 2., 4., 8., 16.], 'slow': [1.5, 3., 6., 12.8, 20.]}
    assert throughput(8, times) == {'fast': 2., 'slow': 8 / 6}
    assert timing.milliseconds(times) == {'fast': 4000., 'slow': 6000.}
    assert timing.speedup(times['fast'], times['slow']) == 1.5
    assert timing.speedup(times['slow'], times['fast']) == .67
    assert timing.timing_columns({**times, 'once': [3.]}) == {
        'ms': {'fast': 4000., 'slow': 6000., 'once': 3000.}, 'spread (%)': {'fast': 75., 'slow': 81.7, 'once': None}}


def test_exponent(load_script):
    exponent = load_script('benchmarks/scaling').exponent
    for b in (-1., 0., .5, 2.):
        assert abs(exponent([2, 5, 7, 100], [3 * n ** b for n in (2, 5, 7, 100)]) - b) < 1e-9


def test_committed_results(load_script):
    """Files of results are in the folder of their machine, by commands of scripts that exist."""
    sections = load_script('bench').SECTIONS
    for path in (SCRIPTS / 'results').glob('*/*.json'):
        recorded = json.loads(path.read_text())
        assert re.sub(r'[^a-z0-9]+', '-', recorded['machine'].lower()) == path.parent.name
        assert recorded['section'] == path.stem
        for command in recorded['commands']:
            name, arguments = re.search(r'python (\S+)(.*)', command).groups()
            assert (ROOT / name).is_file(), command
            if name == 'scripts/bench.py':
                assert recorded['section'] in sections
                assert recorded['section'] in arguments.split()


@pytest.mark.slow
def test_gpu_jobs(script, load_script, tmp_path, monkeypatch, capsys):
    """Finished jobs are not repeated; failed and stopped ones do not count as finished, and come last."""
    module = load_script('gpu/run')
    code = {
        'good': "import os; open(os.environ['TIMM_REP_RESULTS'] + '.txt', 'a').write('x')",
        'long': 'import time; time.sleep(60)', 'bad': 'raise SystemExit(3)', 'unfinished': 'raise SystemExit(75)',
        'uninstalled': f"import sys; assert sys.path[1] == '{SCRIPTS.parent}', sys.path",
    }
    monkeypatch.setattr(
        module, 'JOBS', {name: lambda options, deadline, line=line: ['-c', line] for name, line in code.items()})
    out = tmp_path / 'out'

    def start(seconds, *jobs):
        status = script('gpu/run', '--device', 'cpu', '--seconds', seconds, '--output', out, '--jobs', *jobs)
        return status, capsys.readouterr().out.splitlines()

    assert start(0, 'good') == (75, ['good: not begun', 'left: good; run this again'])
    assert start(1, 'long') == (75, ['long: stopped', 'left: long; run this again'])
    # a job that takes too long comes after the others
    assert start(4, 'long', 'good', 'bad', 'unfinished') == (1, [
        'good: finished', f'bad: failed, see {out / "bad"}.log', 'unfinished: stopped', 'long: stopped',
        'left: unfinished, long; run this again'])
    assert {path.name: path.stat().st_size for path in (out / 'tried').iterdir()} == {'long': 2, 'bad': 1}
    assert start(9, 'good', 'uninstalled') == (0, ['good: finished before', 'uninstalled: finished', 'nothing is left'])
    assert start(9, 'good', 'bad')[1][-1] == 'nothing is left but what failed: bad'
    assert (out / 'results.txt').read_text() == 'x'
    monkeypatch.undo()
    none, half = tmp_path / 'none.tar.gz', tmp_path / 'half.tar.gz'
    none.write_bytes(b'no archive')
    with tarfile.open(half, 'w:gz') as archive:
        archive.add(SCRIPTS, 'train')
    half.write_bytes(half.read_bytes()[:half.stat().st_size // 2])
    for archive, message in (
            ('cifar10.tar.gz', 'or the archive cifar10.tar.gz'), (none, 'not a gzip file'),
            (half, 'half.tar.gz: ')):
        assert script('gpu/run', '--device', 'cpu', '--seconds', 9, '--output', out, '--jobs', 'search-repopt_vgg_b1',
                      '--data-dir',                      tmp_path / 'no', '--archive', archive) == 1
        assert message in capsys.readouterr().err
    assert not (out / 'cifar10').exists()
    with module.locking_folder(out), pytest.raises(SystemExit):
        start(9, 'search-repopt_vgg_b1')
    assert 'Another process is using' in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit):
        script('gpu/run', '--seconds', 9, '--output', tmp_path / 'none')
    assert 'torch finds no GPU' in capsys.readouterr().err
    assert not (tmp_path / 'none').exists()


def test_gpu_benchmarks_parse(script, load_script, tmp_path, monkeypatch):
    """The command lines of the benchmarks are accepted by bench.py, at full and at toy size."""
    module, bench = load_script('gpu/run'), load_script('bench')
    called, modes = [], []

    def section(args):
        """What."""
        called.append((args.batch_size, args.rounds, args.models))
        modes.append(args.modes)
        return iter(())

    for name in bench.SECTIONS:
        monkeypatch.setitem(bench.SECTIONS, name, section)
    experiments = {path.stem for path in (SCRIPTS / 'experiments').glob('*.yaml')}
    assert experiments - {'pretrained-teachers'} <= module.JOBS.keys()  # its weights are not published
    benchmarks = [name for name in module.JOBS if name not in experiments and not name.startswith('search-')]
    for toy in (None, 'repa_deit_tiny'):
        options = SimpleNamespace(toy=toy, device='cpu')
        for name in benchmarks:
            path, *args = module.JOBS[name](options, 0.)
            assert Path(path) == SCRIPTS / 'bench.py'
            script('bench', *args)
            assert not toy or called[-1] == (2, 1, [toy])
    assert len(called) == 2 * len(benchmarks)
    for name, mode in (('repa-infer-all', 'eager'), ('repa-infer-all-compiled', 'compile')):
        assert called[benchmarks.index(name)] == (128, 11, list(SPEEDUPS))
        assert modes[benchmarks.index(name)] == [mode]


def test_gpu_searches_parse(load_script, tmp_path, monkeypatch):
    """The command lines of the searches are accepted by timm-rep, at full and at toy size."""
    jobs, parsed = load_script('gpu/run').JOBS, []
    monkeypatch.setattr(hyper_search, 'run', parsed.append)
    for toy in (None, 'repa_deit_tiny'):
        options = SimpleNamespace(toy=toy, device='cpu', output=tmp_path, data_dir=tmp_path, val_split='val')
        for name in (name for name in jobs if name.startswith('search-')):
            module, command, *args = jobs[name](options, 0.)
            assert (module, command) == ('-m', 'timm_rep.cli')
            assert not cli_main(args)
            assert parsed[-1].model == name.removeprefix('search-')
            assert parsed[-1].epochs == (1 if toy else 240)


@pytest.mark.slow
def test_gpu_job_without_an_installation_is_killed_with_the_script(tmp_path):
    """The checkout is enough: -S leaves out an editable installation. Ending the script ends its job."""
    log = tmp_path / 'out' / 'import.log'
    path = SCRIPTS / 'gpu' / 'run.py'
    code = path.read_text().replace('__file__', repr(str(path)))
    main = code.index("if __name__ == '__main__'")
    job = "JOBS['import'] = lambda options, deadline: ['-uc', 'import os, time; print(os.getpid()); time.sleep(60)']\n"
    packages = os.pathsep.join(path for path in sys.path if path.endswith('-packages'))
    process = subprocess.Popen([
        sys.executable, '-S', '-c', code[:main] + job + code[main:], '--device', 'cpu', '--seconds', '60', '--output',
        tmp_path / 'out', '--jobs', 'import'], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': packages})
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_gpu_job(images, tmp_path):
    """All jobs in processes of their own at toy size, with images from an archive."""
    with tarfile.open(tmp_path / 'images.tar.gz', 'w:gz') as archive:
        for split in ('train', 'validation'):
            archive.add(images / split, split)
    args = ['--output', tmp_path / 'out', '--data-dir', tmp_path / 'nothing', '--archive', tmp_path / 'images.tar.gz']
    for toy, jobs in (
            ('repa_deit_tiny', [
                'repa-infer', 'repa-train', 'ffn-train', 'deploy-ffn', 'scaling', 'repa-infer-all', 'parts',
                'search-repopt_ghostnet_050', 'multi-branch']),
            ('repopt_vgg_a0', ['optim', 'repopt-train', 'repopt-parts']), ('repghostnet_050', ['repopt-any']),
            ('fasternet_cifar10', ['converted-infer'])):
        out = run([
            sys.executable, SCRIPTS / 'gpu' / 'run.py', '--device', 'cpu', '--seconds', 900, *args, '--toy', toy,
            '--val-split', 'validation', '--jobs', *jobs])
        assert 'nothing is left' in out
    out = tmp_path / 'out' / 'toy'
    assert {path.stem for path in (out / 'results').glob('*/*.json')} == {
        'ffn-train', 'repa-train', 'repa-infer', 'deploy-ffn', 'scaling', 'parts', 'optim', 'repopt-train',
        'repopt-parts', 'repopt-any', 'converted-infer', 'multi-branch'}
    assert 'nothing is left to measure' in (out / 'repa-infer-all.log').read_text()
    assert (out / 'search' / 'repopt_ghostnet_050.safetensors').is_file()
