"""The documentation: its Python blocks run, its commands parse, its numbers are those of the committed results."""
import argparse
import functools
import importlib.util
import json
import os
import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed.run
import torch.nn.functional as F
from timm.models import save_for_hf
from timm.optim import list_optimizers

from timm_rep import cli
from timm_rep.layers import CslaBlock, csla_layers
from timm_rep.layers.grad_mult import get_grad_mult
from timm_rep.paper import PAPER_ROWS
from timm_rep.utils.profiling import count_params

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'scripts' / 'results'
_HAS_TORCHAO = importlib.util.find_spec('torchao') is not None  # tests/conftest.py hides it from torch before 2.6
DOCUMENTS = ['README.md', 'hub/README.md', *(
    f'scripts/{folder}/README.md' for folder in ('examples', 'gpu', 'recipes', 'results'))]

# Arguments that make a documented model small; the entry points of these names get them, their own arguments still win
_VIT = dict(img_size=32, embed_dim=48, depth=2, num_heads=4)
_SMALL = {
    'deit3_base_patch16_224': _VIT,
    'deit_base_patch16_224': _VIT,
    'repa_deit_base': _VIT,
    'repa_swin_tiny': dict(embed_dim=24, depths=(1, 1, 1, 1)),
    'repopt_vgg_b1': dict(depths=(1, 1, 1, 1), widths=(8, 8, 16, 16), stem_width=8),
    'vit_small_patch16_224': _VIT,
    'vit_tiny_patch16_224': dict(_VIT, embed_dim=24),
}


def read(document):
    return (ROOT / document).read_text()


def blocks(document, language):
    """The code blocks of a document, after as many empty lines as there are lines before them.

    Those of a section on other trainers are run by test_other_trainers.py, if the trainers are installed.
    """
    text = read(document).partition('\n## With other trainers\n')[0]
    return [
        '\n' * text.count('\n', 0, match.start(1)) + match[1]
        for match in re.finditer(rf'^```{language}\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
    ]


def _small(name, entry_point):
    @functools.wraps(entry_point)
    def create(pretrained=False, **kwargs):
        # weights of timm's own models would be downloaded; its check of the tag does not depend on `pretrained`
        return entry_point(pretrained=pretrained and name.startswith('rep'), **{**_SMALL[name], **kwargs})

    return create


def run_blocks(document, folder):
    """Run the Python blocks of a document one after the other, in one namespace.

    Real code except for: small models, initial weights in place of timm's pretrained ones, a local folder in place of
    the Hub, and a file in place of a released checkpoint.

    Returns:
        For each block its code and a copy of the namespace after it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / 'hub').symlink_to(ROOT / 'hub')
        published = folder / 'published'
        published.mkdir()
        (published / 'repa_lvvit_s.cifar10').symlink_to(ROOT / 'hub' / 'repa_lvvit_s.cifar10')
        patch.setenv('TIMM_REP_HUB', str(published))
        patch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
        entry_points = timm.models._registry._model_entrypoints
        for name in _SMALL:
            patch.setitem(entry_points, name, _small(name, entry_points[name]))
        model = timm.create_model('repa_deit_base')
        save_for_hf(model, published / 'repa_deit_base.in1k', model_args=_VIT, safe_serialization=True)
        torch.save({
            re.sub(r'^(blocks\.\d+)\.norm1\.', r'\1.attn.norm.', key): value
            for key, value in model.state_dict().items()
        }, 'RePaViT_Base.pth')
        names = dict(loader=[torch.randn(32, 3, 32, 32)] * 2, device='cpu')
        states = []
        for code in blocks(document, 'python'):
            if 'from transformers import' in code:  # run in test_transformers.py
                continue
            if 'quantize' in code and not _HAS_TORCHAO:
                continue
            if not hasattr(timm.models, 'get_model_args'):  # since timm 1.0.31, as the line says
                code = code.replace("timm_rep.export(model, 'converted')", '')
            exec(compile(code, document, 'exec'), names)
            states.append((code, dict(names)))
    return states


@pytest.mark.parametrize('document', DOCUMENTS[1:])
def test_python_blocks(document, tmp_path):
    run_blocks(document, tmp_path)


@pytest.fixture(scope='module')
def readme(tmp_path_factory):
    """The namespace after the block of README.md that contains a text."""
    states = run_blocks('README.md', tmp_path_factory.mktemp('readme'))
    return lambda containing: next(names for code, names in states if containing in code)


def test_readme_folds(readme):
    names = readme('reparameterize_model')
    assert names['deploy'].reparameterized
    assert names['model'].reparameterized
    assert readme("pretrained=True, reparameterized=True")['model'].reparameterized


def test_readme_asymmetric_block(readme):
    """The target operator trains as its 1x3 + 3x1 + 3x3 block does."""
    names = readme('Csla(64')
    block = CslaBlock(names['csla'], names['scales'])
    conv = names['conv']
    with torch.no_grad():
        conv.weight.copy_(block.equivalent_kernel())
    reference = torch.optim.SGD([p for p in block.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(10):
        x, y = torch.randn(2, 64, 8, 8), torch.randn(2, 64, 8, 8)
        for model, optimizer in ((block, reference), (conv, names['optimizer'])):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    kernel = block.equivalent_kernel()
    torch.testing.assert_close(conv.weight.detach(), kernel, rtol=0., atol=1e-5 * kernel.abs().max().item())


def test_readme_repopt(readme):
    """The optimizer, made first, multiplies by what is attached last."""
    names = readme("'repopt_vgg_a0', num_classes=10")
    model, conv = names['model'], names['model'].stages[2][1].conv
    assert conv.grad_mult.dense('squared')[0, :2, 1, 1].tolist() == [3., 2.]
    before = conv.weight.detach().clone()
    F.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([1, 2])).backward()
    names['optimizer'].step()
    grad = conv.weight.grad + 0.
    step = 0.1 * 1.9 * (conv.grad_mult.dense('squared') * grad + 4e-5 * before)  # Nesterov momentum 0.9, first step
    torch.testing.assert_close(conv.weight.detach(), before - step)


class _Parsed(Exception):
    pass


def _check_model(name):
    source, _, path = name.rpartition(':')
    if source == 'local-dir':  # a folder named MODEL.TAG
        name = Path(path).name.partition('.')[0]
    assert timm.is_model(name), f'{name!r} is not a model'
    if '.' in name:
        timm.get_pretrained_cfg(name, allow_unregistered=False)


def _load_script(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(f'documented_{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_script(path, args, monkeypatch):
    """Parse the arguments of one of this repository's scripts with its own parser."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(parser, *args):
        raise _Parsed(real(parser, *args))

    with monkeypatch.context() as patch:
        module = _load_script(ROOT / path, patch)
        patch.setattr(argparse.ArgumentParser, 'parse_args', parse_args)
        patch.setattr(sys, 'argv', [path, *args])
        with pytest.raises(_Parsed) as parsed:
            module.main()
    for name in ('model', 'backbone'):
        value = getattr(parsed.value.args[0], name, None)
        if value not in (None, 'retinanet', 'mask_rcnn'):
            _check_model(value)


def _check_timm_script(script, args, monkeypatch):
    """Look up what a command for one of timm's scripts names; with TIMM_CHECKOUT, also parse it with timm's parser."""
    assert script in ('train.py', 'validate.py', 'benchmark.py', 'onnx_export.py')
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument('--model', type=_check_model)
    parser.add_argument('--opt', choices=list_optimizers())
    parser.add_argument('--device-modules', choices=['timm_rep'])
    parser.add_argument('--config')
    options, _ = parser.parse_known_args(args)
    if options.config:
        assert (ROOT / options.config).is_file()
    if os.environ.get('TIMM_CHECKOUT'):
        with monkeypatch.context() as patch:
            module = _load_script(Path(os.environ['TIMM_CHECKOUT']) / script, patch)
            patch.chdir(ROOT)
            patch.setattr(sys, 'argv', [script, *args])
            getattr(module, '_parse_args', module.parser.parse_args)()  # train.py's reads --config first


def _check_timm_rep(args, monkeypatch):
    """Parse a `timm-rep` command with its own parser."""
    parsed = []
    with monkeypatch.context() as patch:
        for command in cli._COMMANDS:
            patch.setattr(command, 'run', parsed.append)
        assert cli.main(args) == 0
    options = vars(parsed[0])
    for value in (options.get(name) or [] for name in ('model', 'models', 'student', 'teacher')):
        for model in [value] if isinstance(value, str) else value:
            if not model.endswith('.safetensors'):  # --teacher also takes files
                _check_model(model)
    if args[0] == 'run':
        _check_timm_script(options['script'], options['args'], monkeypatch)


def _check_command(command, monkeypatch):
    program, *args = command
    if program == 'pip':
        assert args[:2] == ['install', '-e']
        extras = re.findall(r'^(\w+) = \[', read('pyproject.toml').split('optional-dependencies]')[1], re.MULTILINE)
        assert re.fullmatch(r'\.\[(\w+)\]', args[2])[1] in extras
    elif program == 'timm-rep':
        _check_timm_rep(args, monkeypatch)
    elif program == 'torchrun':
        options = torch.distributed.run.get_args_parser().parse_args(args)
        inner = [options.training_script, *options.training_script_args]
        _check_command(inner if options.no_python else ['python', *inner], monkeypatch)
    elif program == 'python':
        check = _check_script if '/' in args[0] else _check_timm_script
        check(args[0], args[1:], monkeypatch)
    else:
        assert command == ['pytest']


@pytest.mark.parametrize('document', DOCUMENTS)
def test_commands(document, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path('IMAGES').mkdir()
    for block in blocks(document, 'sh'):
        for line in block.strip().replace('\\\n', ' ').splitlines():
            for command in line.split('&&'):
                words = shlex.split(command, comments=True)
                try:
                    _check_command(words, monkeypatch)
                except SystemExit:
                    pytest.fail(f'{document}: {line!r} does not parse')


@pytest.mark.parametrize('document', [*DOCUMENTS, 'CHANGELOG.md', 'timm_rep/scales/packaged/README.md'])
def test_paths(document):
    """Every code block is Python or a command, and every file or folder of the repository that is named exists."""
    text = read(document)
    assert set(re.findall(r'^ *```(.+)$', text, re.MULTILINE)) <= {'python', 'sh'}
    text = text.partition('<!-- Below this line')[0]  # commands as they were when something was measured
    for path in re.findall(r'(?<![\w./])((?:docs|hub|scripts|tests|timm_rep)/[a-z0-9_./*-]*[a-z0-9_/])', text):
        if not path.startswith(('hub/repa_deit_tiny.mine', 'hub/repopt_vgg_b1.in1k')):
            assert list(ROOT.glob(path)), f'{document}: there is no {path}'


def test_readme_on_the_package_index():
    """README.md is short; its picture is small; its links, which setup.py makes absolute, are files."""
    text = read('README.md')
    assert len(text.splitlines()) <= 220
    links = re.findall(r'\]\((?!https://)(.*?)\)', text)
    assert len(links) == 8
    assert all((ROOT / link).is_file() for link in links)
    assert (ROOT / 'docs/demo.png').stat().st_size < 150_000
    for command in ("pip install -e '.[demo]' && timm-rep demo", "pip install -e '.[test]' && pytest"):
        assert command in text.splitlines()


def tables(document, heading):
    """The tables of a section, as lists of rows of cells, without their heads."""
    section = re.search(rf'^## {heading}\n(.*?)(?=^#+ |\Z)', read(document), re.DOTALL | re.MULTILINE)[1]
    return [[
        [cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()[2:]
    ] for table in re.findall(r'(?:^\|.*\|$\n?)+', section, re.MULTILINE)]


def _listed(names):
    """The names of models in a cell of the table, where those after the first leave out their common prefix."""
    names = re.findall(r'`(\w+)`', names)
    prefix = re.match(r'(.*_)?', names[0])[1]
    return [prefix + name[1:] if name.startswith('_') else name for name in names]


def test_all_models_are_listed():
    rows, = tables('README.md', 'Models')
    ours = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith('timm_rep.')]
    assert sorted(name for names, *_ in rows for name in _listed(names)) == sorted(ours)


@pytest.mark.slow
def test_parameters_of_the_models():
    """They are counted, or as in the papers, which test_paper compares."""
    published = {
        (row.model, row.folded): row.params for row in PAPER_ROWS
        if row.table == 1 and not row.model_args}
    rows, = tables('README.md', 'Models')
    for names, *cells in rows:
        names = _listed(names)
        for folded, numbers in enumerate(cells):
            if numbers in ('', 'the same'):
                continue
            expected = []
            for name in names:
                args = dict(reparameterized=True) if folded else {}
                params = published.get((name, bool(folded)))
                if params is None:
                    params = count_params(timm.create_model(name, device='meta', **args)) / 1e6
                expected.append(f'{params:.1f}')
            assert numbers.split(', ') == expected, names
    less = 1 - published['repa_deit_base', True] / published['repa_deit_base', False]
    assert f'{less:.0%} fewer parameters' in read('README.md')


def _rows(section, machine):
    path, = RESULTS.glob(f'{machine}*-2-threads/{section}.json')
    return json.loads(path.read_text())['rows']


MACHINES = 'amd-epyc', 'intel'


def _inference():
    """The speedups of folded models by (model, mode), on both machines."""
    return [
        {(row['model'], row['mode']): str(row['folded / vanilla']) for row in _rows('repa-infer', machine)}
        for machine in MACHINES]


def _training(section, columns, ours, theirs):
    """By model and image size: both machines' columns, and the ratio of the peak memories on the first one."""
    return {
        tuple(str(row[k]) for k in ('model', 'img_size') if k in row): [
            *(str(each[column]) for each in (row, other) for column in columns),
            str(round(row[f'{ours}, peak (MB)'] / row[f'{theirs}, peak (MB)'], 2)),
        ] for row, other in zip(*(_rows(section, machine) for machine in MACHINES), strict=True)
    }


def test_headline_speeds():
    rows, = tables('README.md', 'Results')[:1]
    epyc, xeon = _inference()
    paper = {row['model']: str(row['paper']) for row in _rows('repa-infer', 'amd-epyc')}
    repa = _training('repa-train', ['matrix'], 'matrix', 'released')
    repopt = _training('repopt-train', ['RepOpt-VGG'], 'RepOpt-VGG', 'RepVGG')
    for what, *numbers in rows:
        model, = re.findall(r'`(\w+)`', what)
        if what.startswith('folded'):
            assert numbers == [epyc[model, 'eager'], xeon[model, 'eager'], paper[model]]
            continue
        if 'int8' in what:
            path, = RESULTS.glob('intel*-1-thread/int8.json')
            row, = (row for row in json.loads(path.read_text())['rows'] if (row['model'], row['images']) == (model, 1))
            frozen = row['int8, inductor'] / row['frozen']
            assert numbers == ['', f"{row['int8, inductor: speedup']} ({frozen:.2f})", '']
            continue
        *speeds, memory = repa[model,] if model.startswith('repa') else repopt[model, '160']
        assert numbers[:2] == speeds
        assert f'({memory} of its memory)' in what


def _experiment(section):
    """The rows of an experiment on its page, as mappings from the columns to the cells."""
    text = re.search(rf'(?ms)^## {section}\n(.*?)(?=^## |\Z)', read('scripts/results/experiments.md'))
    head, _, *rows = (
        [cell.strip() for cell in line.strip('|').split('|')] for line in text[1].splitlines() if line.startswith('|'))
    return [dict(zip(head, row)) for row in rows]


def _top1(*sections):
    """By row, the accuracies of experiments, as cells."""
    return {row['row']: row['top-1'] for section in sections for row in _experiment(section)}


def test_accuracies_in_the_readme():
    """The cells of ours are those of experiments.md, that of the conversion is of an earlier script."""
    _, rows = tables('README.md', 'Results')
    vgg, scales, vit = _top1('repoptimizers'), _packaged_scales(), _top1('repa')
    change = {row['row']: row['change'] for row in _experiment('quantization') if row['change']}
    selected, repa = _top1('weight-selection'), _top1('repa-student')
    mobileone = [_top1(name) for name in ('multi-branch', 'multi-branch-step')]
    path, = RESULTS.glob('*/converted-accuracy.json')
    fasternet, = (
        f"{row['top-1 change']:.2f} ± {row['top-1 change ±']:.2f}" for row in json.loads(path.read_text())['summary']
        if (row['method'], row['MACs'], row['epochs']) == ('closed form', .56, 0))
    early, = (
        row['top-1 change'] for row in _experiment('accelerate')
        if (row['method'], row['idle_ratio']) == ('closed form', '0.75'))
    assert [ours for _, _, ours, _ in rows] == [
        f"{vgg['repsgd']}, {vgg['sgd']} ({_mean(scales['packaged'])}, {_mean(scales['init'])})",
        f"{change['repopt, tensor']}, {change['repvgg, tensor']}",
        f"{vit['RePa 75%']}, {vit['vanilla']}",
        f"{selected['uniform']}, {selected['random']}",
        '{}, {} ({}, {})'.format(*(top1[row] for top1 in mobileone for row in ('init', 'branches'))),
        f'{fasternet} ({early})',
    ]
    for cell in (
            f"only with timm's start of RepVGG: {change['timm, tensor']}",
            f"difference within the noise; with 100%: {vit['RePa 100%']} (73.7)",
            f"yes; RePaFormer: {repa['student, selected']}, {repa['student, random']}"):
        assert f'| {cell} |' in read('README.md')


def test_conversions_in_the_results():
    measured = tables('scripts/results/README.md', 'Converted models')[2]
    found = {(row['method'], row['idle_ratio']): row for row in _experiment('accelerate')}
    names = 'closed form', 'VBP, refitted', 'VBP', 'first channels', 'RePa from scratch'
    assert measured == [[
        ratio, f"{float(found['closed form', ratio]['speedup']):.2f}",
        *(found[name, ratio]['top-1 change'] if (name, ratio) in found else '' for name in names),
    ] for ratio in ('0.5', '0.75', '0.9')]
    text = ' '.join(read('scripts/results/README.md').split())
    assert f"reaches {found['closed form', '0.75']['original']}% after 10 epochs" in text
    distilled = {row['method']: row['top-1 change'] for row in _experiment('accelerate-distillation')
                 if row['distil_epochs'] == '3'}
    changes = [distilled[method] for method in ('closed form', 'VBP, refitted', 'annealed', 'VBP')]
    sentence = 'at {}, the refitted pruning at {}, annealed idle channels at {} and VBP at {} points'
    assert sentence.format(*changes) in text
    path, = RESULTS.glob('*/converted-infer.json')
    one, eight = (row['0.75'] for row in json.loads(path.read_text())['rows'] if row['model'] == 'fasternet_cifar10')
    assert f'is {one} times as fast for one image and {eight} times for eight at an idle ratio of 0.75' in text
    assert f'to 56% of its MACs, {eight} times as fast,' in read('README.md')
    speeds = {ratio: [float(row['speedup']) for (_, other), row in found.items() if other == ratio]
              for ratio in ('0.5', '0.75', '0.9')}
    assert max(max(values) - values[0] for values in speeds.values()) <= .1
    assert max(values[0] - min(values) for values in speeds.values()) <= .1
    budgets = [float(row['top-1 change'].split(' ± ')[0]) for row in _experiment('accelerate-budget')]
    assert len(budgets) == 12
    assert max(map(abs, budgets)) <= .1


def test_multi_branch_in_the_results():
    """Accuracies by learning rate, minutes of a core, and what is left of the differences at a larger rate."""
    *_, rows = tables('scripts/results/README.md', 'Multi-branch networks of timm')
    base, step, other = (
        {row['row']: row for row in _experiment(f'multi-branch{part}')} for part in ('', '-step', '-settings'))

    def cells(name):
        found = [base.get(name), other.get(f'{name}, 3 times the lr'), step.get(name),
                 other.get(f'{name}, 30 times the lr')]
        return [row['top-1'] if row else '' for row in found]

    assert [row[1:] for row in rows] == [
        *([f"{float(base[name]['minutes']):.1f}", *cells(name)] for name in ('branches', 'plain', 'init')),
        [f"{float(other['searched']['minutes']):.1f}", other['searched']['top-1'], '', '', '']]
    mean = {(i, name): float(row['top-1'].split()[0]) for i, found in enumerate((base, step))
            for name, row in found.items()}
    text = ' '.join(read('scripts/results/README.md').split())
    lead = 'at 0.1 it is ahead of SGD by {:.1f} points and of the branches by {:.1f}, at 1.0 by {:.1f} and {:.1f}'
    assert lead.format(
        *(mean[i, 'init'] - mean[i, name] for i in (0, 1) for name in ('plain', 'branches'))) in text
    assert f"The search took {float(other['searched']['search (minutes)']):.0f} minutes" in text
    # the README's quarter of the time
    assert all(float(found['branches']['minutes']) > 3.5 * float(found['init']['minutes']) for found in (base, step))


def test_repoptimizers_in_the_results():
    sections = [f'repoptimizers{part}' for part in ('', '-ablation', '-settings', '-longer')]
    top1 = _top1(*sections)
    paper = {row['row']: row.get("the paper's", '') for section in sections for row in _experiment(section)}
    rows, checked = tables('scripts/results/README.md', 'RepOptimizers and plain optimizers')
    names = (
        'repsgd', 'init', 'ones', 'mean', 'no-init', 'no-gradients', 'sgd', 'rmsprop', 'adamw', 'repadamw',
        'repvgg')
    assert [row[1:] for row in rows] == [[paper[name], top1[name]] for name in names]
    changes = [(f'repsgd, {change}', f'sgd, {change}') for change in ('a third of the lr', '3 times the epochs')]
    changes.append(('init, 22 layers', 'sgd, 22 layers'))
    assert [row[1:] for row in checked] == [
        [top1[name] if '±' in top1[name] else f'{float(top1[name]):.2f}' for name in pair] for pair in changes]
    text = ' '.join(read('scripts/results/README.md').split())
    found = {
        row['row']: row for path in (RESULTS / 'amd-epyc-1-thread').glob('repoptimizers*.json')
        for row in json.loads(path.read_text())['rows'] if row['seed'] == 0}
    searched, plain = found['repsgd']['search (top-1)'], found['sgd']['top-1']
    assert f'reaches {searched:.2f} with its one seed, for which SGD has {plain:.2f}' in text
    early = [found[f'{name}, 22 layers']['curve'][1] for name in ('init', 'sgd')]
    assert '{:.2f} against {:.2f} after two epochs'.format(*early) in text
    assert f"SGD at three times it ({top1['sgd, 3 times the lr']}, three seeds)" in text
    timms, faster = top1["repvgg, timm's start"], top1['repvgg, 3 times the lr']
    assert f'at three times the learning rate RepVGG ends at {faster}, where SGD on the plain network' in text
    assert f"timm's start with weights of 0.1 ± 0.1, and end at {timms}" in text


def _packaged_scales():
    """The accuracies of both experiments on packaged scales, by row, in the order of the seeds."""
    rows = [row for name in ('packaged-scales', 'packaged-scales-seeds') for row in json.loads(
        (RESULTS / 'amd-epyc-1-thread' / f'{name}.json').read_text())['rows']]
    rows.sort(key=lambda row: row['seed'])
    assert [row['seed'] for row in rows] == sorted([*range(6), *range(6)])
    return {name: [row['top-1'] for row in rows if row['row'] == name] for name in ('packaged', 'init')}


def _mean(values):
    return f'{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}'


def _relative_steps(scales):
    """Mean multiplier over squared norm of the initial kernel, for each output channel of each layer."""
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', num_classes=10, strides=[2] * 5, scales=scales)
    return [get_grad_mult(layer.weight).dense('squared').mean((1, 2, 3)) / layer.weight.detach().square().sum((1, 2, 3))
            for layer in csla_layers(model).values()]


def test_searches_in_the_results():
    images, strides, packaged = tables('scripts/results/README.md', 'Scales of other searches')
    found = {name: {row['row']: row for row in _experiment(name)} for name in ('transfer', 'strides')}
    worth = _packaged_scales()
    assert packaged == [
        ['searched scales' if row['row'] == 'packaged' else 'initial values', row["the paper's"],
         _mean(worth[row['row']]), ', '.join(map(str, worth[row['row']]))] for row in _experiment('packaged-scales')]
    changes = [a - b for a, b in zip(*worth.values())]
    assert [row[1:] for row in images] == [
        [found['transfer'][row].get("the paper's", ''), found['transfer'][row]['top-1']]
        for row in ('CIFAR-10 to CIFAR-10', 'digits to CIFAR-10', 'init', 'last to last classes',
                    'first to last classes', 'init, last classes')]
    assert [[row[2], *row[3:]] for row in strides] == [
        [row["the paper's"], row['search (top-1)'], row['top-1']] for row in found['strides'].values()]
    text = ' '.join(read('scripts/results/README.md').split())
    assert f'ahead by {statistics.mean(changes):.1f} points on average, with four seeds of six' in text
    assert sum(change > 0 for change in changes) == 4
    assert f'standard error of the difference is {statistics.stdev(changes) / 6 ** .5:.1f}' in text
    assert f'first three seeds alone were ahead by {statistics.mean(changes[:3]):.1f} points' in text
    assert f"end at {_top1('packaged-scales-step')['init, smaller steps']} (experiment" in text
    smaller = 1 - torch.stack([
        (searched / start).mean() for searched, start in zip(*map(_relative_steps, ('repopt_vgg_a0', 'init')))]).mean()
    assert f'the searched ones are {100 * smaller:.1f}% smaller on average' in text
    moved = {row: float(cells['search (moved %)']) for rows in found.values() for row, cells in rows.items()
             if cells['search (moved %)']}
    digits = moved.pop('digits to CIFAR-10')
    assert f'moved by {min(moved.values()):.1f} to {max(moved.values()):.1f}%' in text
    assert f"the digits' by {digits:.1f}%" in text
    rows = json.loads((RESULTS / 'amd-epyc-2-threads' / 'scales.json').read_text())['rows']
    ours, theirs = ({row['branch']: f'{100 * row[key]:.1f}%' for row in rows if (row['scales'], row['other']) == (
        'repopt_vgg_a0', 'released-b1')} for key in ('moved', 'other_moved'))
    assert f"18 epochs, have moved by {ours['conv3x3']} (3 x 3) and {ours['conv1x1']} (1 x 1)" in text
    assert f"240 epochs, by {theirs['conv3x3']} and {theirs['conv1x1']} (section `scales`)" in text


def test_repa_in_the_results():
    ratios, widths, changed, normed = tables('scripts/results/README.md', 'Idle ratios and widths')
    top1 = _top1('repa')
    names = ['vanilla', *(f'RePa {ratio}%' for ratio in range(0, 101, 25))]
    assert [row[3] for row in ratios] == [top1[name] for name in names]
    wide, settings = _top1('repa-widths'), _top1('repa-settings')
    assert widths == [[width, wide[f'{width} vanilla'], wide[f'{width} RePa']] for width in ('32', '64', '128')]
    chosen = 'vanilla', 'RePa 0%', 'RePa 75%'
    assert [row[1:] for row in normed] == [
        [top1[name] for name in chosen], [settings[f'{name}, pre-norm'] for name in chosen]]
    first = {
        row['row']: row['top-1'] for name in ('repa-widths', 'repa-settings')
        for row in json.loads((RESULTS / 'amd-epyc-1-thread' / f'{name}.json').read_text())['rows'] if row['seed'] == 0}
    pairs = [(f'{width} vanilla', f'{width} RePa') for width in (64, 128)] + [
        (f'vanilla, {change}', f'RePa 75%, {change}')
        for change in ('a third of the lr', '3 times the lr', '3 times the epochs')]
    assert [row[1:] for row in changed] == [[str(first[name]) for name in pair] for pair in pairs]
    (start, loss), *others = ((first[plain], first[plain] - first[repa]) for plain, repa in pairs)
    assert all((plain > start) == (lost > loss) for plain, lost in others), 'larger where more was learned'
    text = ' '.join(read('scripts/results/README.md').split())
    active = first['RePa 0%, 128 channels']
    assert 'channels has {}: {:.1f} of its {:.1f} points are of the BatchNorms, {:.1f} of the idle'.format(
        active, first['128 vanilla'] - active, first['128 vanilla'] - first['128 RePa'],
        active - first['128 RePa']) in text
    mean = {name: float(cell.split()[0]) for name, cell in {**top1, **wide}.items()}
    assert 'by less: {:.1f} points at 75%, and {:.1f} at 100%'.format(
        *(mean['vanilla'] - mean[f'RePa {ratio}%'] for ratio in (75, 100))) in text
    assert 'grows with the width here: {:.1f}, {:.1f} and {:.1f} points'.format(
        *(mean[f'{width} vanilla'] - mean[f'{width} RePa'] for width in (32, 64, 128))) in text
    by_row = {}
    for row in json.loads((RESULTS / 'amd-epyc-1-thread' / 'repa.json').read_text())['rows']:
        by_row.setdefault(row['row'], {})[row['seed']] = row['top-1']
    assert all(min(seeds, key=seeds.get) == 1 for seeds in by_row.values())


def test_int8_in_the_results():
    """The accuracies in int8 and the deviations of kernels."""
    *_, accuracies, kernels = tables('scripts/results/README.md', 'Int8 and ONNX Runtime')
    found = {row['row']: row for row in _experiment('quantization')}
    assert [row[1:] for row in accuracies] == [[
        found[f'{net}, float32']['top-1'], found[f'{net}, channel']['change'], found[f'{net}, tensor']['change'],
        found[f'{net}, float32']['largest entry'], found[f'{net}, qat']['change'],
    ] for net in ('repopt', 'repvgg', 'timm')]
    stages = [
        ('repopt', 'BatchNorm folded'), ('repvgg', 'BatchNorm folded'), ('repvgg', 'branches added'),
        ('timm', 'branches added')]
    assert [row[1:] for row in kernels] == [
        [f'{float(part.split()[-1]):.3f}' for part in found[f'{net}, float32'][f'std of the {stage}'].split(',')]
        for net, stage in stages]


def test_weight_selection_in_the_results():
    document = 'scripts/results/README.md'
    names = (
        'random', 'mimetic', 'uniform', 'consecutive', 'random-consistent', 'random-inconsistent', 'uniform-heads',
        'l1', 'magnitude', 'uniform-layers', 'mid-layers', 'last-layers', 'distilled', 'distilled-uniform')
    sections = [f'weight-selection{part}' for part in ('', '-layers', '-distillation')]
    top1 = _top1(*sections)
    paper = {row['row']: row.get("the paper's", '') for section in sections[::-1] for row in _experiment(section)}
    rows, students = tables(document, 'Weight selection')
    repa = _top1('repa-student')
    assert [row[1:] for row in students] == [[repa[name] for name in pair] for pair in (
        ('student, random', 'student, selected'), ('student, random, distilled', 'student, selected, distilled'),
        ('same size, random', 'same size, plain'))]
    assert [row[1:] for row in rows] == [[paper[name], top1[name]] for name in names]
    mean = {name: float(cell.split()[0]) for name, cell in top1.items()}
    text = ' '.join(read(document).split())
    pairs = [('uniform', 'random'), ('uniform', 'mimetic'), ('uniform', 'random-inconsistent'), ('uniform', 'l1'),
             ('uniform', 'magnitude'), ('distilled', 'random'), ('distilled-uniform', 'uniform')]
    assert (
        'Weight selection is worth {} points over random initialization and {} over mimetic; elements that differ from '
        'layer to layer lose {} of them; L1 pruning and magnitudes, which choose the elements of each tensor apart, '
        'lose {} and {}. Distillation alone is worth {} points, on top of weight selection {}.'
    ).format(*(f'{mean[a] - mean[b]:.1f}' for a, b in pairs)) in text
    gains = [float(chosen.split()[0]) - float(start.split()[0]) for start, chosen in (
        (repa['student, random'], repa['student, selected']), (top1['random'], top1['uniform']))]
    assert [f'{gain:.1f}' for gain in gains] == ['12.5', '12.5']
    assert 'is worth 12.5 points to the RePaFormer, as to the plain student' in text


def test_digits_in_the_results():
    top1 = _top1('weight-selection-digits')
    text = ' '.join(read('scripts/results/README.md').split())
    path = RESULTS / 'amd-epyc-1-thread' / 'weight-selection-digits.json'
    curves = {}
    for row in json.loads(path.read_text())['rows']:
        curves.setdefault(row['row'], []).append(row['curve'])
    mean = {name: [sum(epoch) / len(epoch) for epoch in zip(*rows)] for name, rows in curves.items()}
    passed = next(epoch for epoch, accuracy in enumerate(mean['uniform'], 1) if accuracy > mean['random'][-1])
    assert (
        'From random initialization it ends at {}%, from mimetic initialization at {}%, and from `uniform` selection '
        'at {}%, having passed the former after {} epochs'
    ).format(*(top1[name] for name in ('random', 'mimetic', 'uniform')), passed) in text
    selected = {name: float(top1[name].split()[0]) for name in (
        'uniform', 'consecutive', 'random-consistent', 'random-inconsistent', 'uniform-heads', 'l1', 'magnitude',
        'uniform-layers', 'mid-layers', 'last-layers')}
    first, last = (choice(selected, key=selected.get) for choice in (min, max))
    assert (first, last) == ('l1', 'mid-layers')
    assert f'between {selected[first]:.2f}% (L1 pruning) and {selected[last]:.2f}% (blocks in the middle)' in text
    lost = selected['random-consistent'] - selected['random-inconsistent']
    assert lost < float(top1['random-inconsistent'].split()[-1])
    assert f"from layer to layer lose {lost:.1f} points, less than their deviation" in text
    assert f"Nor does distillation help ({top1['distilled']}%)" in text
    assert 'has {:.2f}% after one epoch and ends at {}%; from random initialization it ends at {}%.'.format(
        mean['repa-plain'][0], top1['repa-plain'], top1['repa-random']) in text


def test_speeds_in_the_results():
    """Every number in the tables and in the text above the generated ones."""
    document = 'scripts/results/README.md'
    text = ' '.join(read(document).partition('<!-- Below this line')[0].split())
    epyc, xeon = _inference()
    models = [row for row in _rows('repa-infer', 'amd-epyc') if row['mode'] == 'eager']
    assert tables(document, 'Inference') == [[
        [f'`{name}`', epyc[name, 'eager'], epyc[name, 'compile'], xeon[name, 'eager'], str(row['paper'])]
        for row in models for name in [row['model']]]]
    fused = [xeon[f'repa_swin_{size}', 'eager, TIMM_FUSED_ATTN=2'] for size in ('tiny', 'small', 'base')]
    assert '{}, {} and {} for Swin-T, S and B'.format(*fused) in text
    forms = [row['ms']['three linears'] / row['ms']['one wide GEMM'] for row in _rows('deploy-ffn', 'amd-epyc')]
    assert f'takes {min(forms):.2f} to {max(forms):.2f} times as long as one wide GEMM' in text
    less = {row['model']: row['arithmetic'] for row in _rows('parts', 'amd-epyc')}
    names = 'repa_deit_base', 'repa_vit_huge', 'repa_lvvit_s', 'repa_lvvit_m'
    assert '{} times less for DeiT-Base, {} for ViT-Huge, {} and {} for LV-ViT-S and M'.format(
        *(less[name] for name in names)) in text

    for heading, compared in (
            ('Training steps of RePaFormers',
             _training('repa-train', ['matrix', 'matrix / vanilla'], 'matrix', 'released')),
            ('Training steps of RepOpt-VGG',
             _training('repopt-train', ['RepOpt-VGG', 'RepOpt-VGG, channels-last'], 'RepOpt-VGG', 'RepVGG'))):
        assert tables(document, heading) == [[
            [f'`{model}`', *size, *numbers] for (model, *size), numbers in compared.items()]]
    shares = []
    for machine in MACHINES:
        step, = (
            row for row in _rows('repopt-parts', machine)
            if (row['form'], row['img_size']) == ('RepOpt-VGG', 160))
        parts = [step[part] for part in ('convolutions', 'norms', 'optimizer', 'rest')]
        shares.append(f'{100 * parts[0] / sum(parts):.0f}%')
    assert "{} of B1's step at 160 pixels are convolutions on the EPYC, {} on the Xeon".format(*shares) in text
