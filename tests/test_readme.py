"""The documentation: its Python blocks run, its commands parse, its links lead somewhere, its tables are generated."""
import argparse
import csv
import functools
import importlib.util
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed.run
import yaml
from timm.models import save_for_hf
from timm.optim import list_optimizers

import timm_rep
from tests.helpers import ROOT, SCRIPTS, run
from timm_rep import cli
from timm_rep.convert import survey_convertible
from timm_rep.utils.profiling import count_params

_HAS_TORCHAO = importlib.util.find_spec('torchao') is not None  # tests/conftest.py hides it from torch before 2.6
_PATTERNS = 'hub/README.md', 'tests/README.md', 'docs/**/*.md', 'scripts/**/README.md', 'examples/*.md'
DOCUMENTS = ['README.md', 'CONTRIBUTING.md', *sorted(
    str(path.relative_to(ROOT)) for pattern in _PATTERNS for path in ROOT.glob(pattern))]

# Arguments that make a documented model small; the entry points of these names get them, their own arguments still win
_VIT = dict(img_size=32, embed_dim=48, depth=2, num_heads=4)
_DEIT = dict(depth=3, num_heads=3)
_SMALL = {
    'deit3_base_patch16_224': _VIT,
    'deit_base_patch16_224': _VIT,
    'deit_small_patch16_224': dict(_DEIT, embed_dim=96),
    'deit_tiny_patch16_224': dict(_DEIT, embed_dim=48),
    'repa_deit_base': _VIT,
    'repa_deit_tiny': dict(_DEIT, embed_dim=48),
    'repa_swin_tiny': dict(embed_dim=24, depths=(1, 1, 1, 1)),
    'repopt_vgg_a0': dict(depths=(1, 2, 2, 1), widths=(8, 16, 16, 24), stem_width=8),
    'repopt_vgg_b1': dict(depths=(1, 1, 1, 1), widths=(8, 8, 16, 16), stem_width=8),
    'vit_small_patch16_224': _VIT,
    'vit_tiny_patch16_224': dict(_VIT, embed_dim=24),
}


def read(document):
    return (ROOT / document).read_text()


def blocks(document, language):
    """The code blocks of a document, after as many empty lines as there are lines before them."""
    text = read(document)
    return [
        '\n' * text.count('\n', 0, match.start(1)) + match[1]
        for match in re.finditer(rf'^```{language}\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
    ]


def _small(name, entry_point):
    @functools.wraps(entry_point)
    def create(pretrained=False, **kwargs):
        size = {} if isinstance(kwargs.get('pretrained_cfg'), dict) else _SMALL[name]  # a folder has its own
        # weights of timm's own models would be downloaded; its check of the tag does not depend on `pretrained`
        return entry_point(pretrained=pretrained and name.startswith('rep'), **{**size, **kwargs})

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
        (published / 'repa_any.cifar10').symlink_to(ROOT / 'hub' / 'repa_any.cifar10')
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
                code = code.replace("timm_rep.export(model, 'fast')", '')
            exec(compile(code, document, 'exec'), names)
            states.append((code, dict(names)))
    return states


# test_how_to.py runs the how-to pages
@pytest.mark.parametrize('document', [
    document for document in DOCUMENTS[2:] if blocks(document, 'python') and not document.startswith('docs/how-to/')])
def test_python_blocks(document, tmp_path):
    run_blocks(document, tmp_path)


# uses what the blocks of CONTRIBUTING.md define
_USE = '''
from timm_rep import cli

vit = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
for block in vit.blocks:
    block.mlp = Ffn(24)
report = timm_rep.convert_to_repa(vit.eval(), idle_ratio=0.5, calibration=[torch.randn(16, 3, 32, 32)])
assert [ffn.hidden_features for ffn in report.ffns] == [96, 96], report
blocks = nn.Sequential(Block(24), Block(24))
assert [ffn.name for ffn in timm_rep.convert_to_repa(blocks).ffns] == ['0.ffn', '1.ffn']
assert isinstance(blocks[0].ln, nn.Identity)
cli.models.add_parser, cli.models.run = add_parser, run
assert cli.main(['count', 'repa_beit_base']) == 0
'''


@pytest.mark.slow
def test_extension_points(tmp_path):
    """The code of CONTRIBUTING.md runs as one program, in a process of its own, whose registrations end with it."""
    program = tmp_path / 'program.py'
    program.write_text('\n'.join([*blocks('CONTRIBUTING.md', 'python'), _USE]))
    out = run([sys.executable, program], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert int(out.split()[-1]) > 80e6
    assert (tmp_path / 'beit.ts').is_file()


def test_readme(tmp_path):
    """The blocks of README.md run, and what they compute is as they say."""
    states = run_blocks('README.md', tmp_path)

    def names(containing):
        return next(names for code, names in states if containing in code)

    before, after = names('report.macs')['report'].macs
    assert after < before

    folding = names('reparameterize_model')
    assert count_params(folding['folded']) < count_params(folding['model'])
    torch.testing.assert_close(
        folding['folded'](folding['image']), folding['model'](folding['image']), rtol=1e-4, atol=1e-5)

    # RepSGD multiplies the gradients of the block by what is attached after it
    model = names("'repopt_vgg_a0', num_classes=10")['model']
    conv = model.stages[2][1].conv[0]
    timm_rep.attach_grad_mults(model, timm_rep.Scales.ones(model))
    assert conv.grad_mult.dense('squared')[0, :2, 1, 1].tolist() == [3., 2.]
    optimizer = timm.optim.create_optimizer_v2(model, opt='repsgd', lr=0.1, weight_decay=4e-5)
    kernel = conv.weight.detach().clone()
    optimizer.step()
    step = 0.1 * 1.9 * (conv.grad_mult.dense('squared') * conv.weight.grad + 4e-5 * kernel)  # Nesterov, first step
    torch.testing.assert_close(conv.weight.detach(), kernel - step)


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
        assert re.fullmatch(r'\.(?:\[(\w+)\])?', args[2])[1] in [None, *extras]
    elif program == 'timm-rep':
        _check_timm_rep(args, monkeypatch)
    elif program == 'torchrun':
        options = torch.distributed.run.get_args_parser().parse_args(args)
        inner = [options.training_script, *options.training_script_args]
        _check_command(inner if options.no_python else ['python', *inner], monkeypatch)
    elif program == 'python':
        check = _check_script if '/' in args[0] else _check_timm_script
        check(args[0], args[1:], monkeypatch)
    elif program == 'git':
        assert args == ['clone', re.search(r'Repository = "(.*)"', read('pyproject.toml'))[1]]
    else:
        assert command in (['pytest'], ['cd', 'timm-rep'])


@pytest.mark.parametrize('document', [document for document in DOCUMENTS if blocks(document, 'sh')])
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
    """Code blocks are Python, commands or output, and every named file or folder of the repository exists."""
    text = read(document)
    assert set(re.findall(r'^ *```(.+)$', text, re.MULTILINE)) <= {'python', 'sh', 'text'}
    text = text.partition('<!-- Below this line')[0]  # commands as they were when something was measured
    for path in re.findall(r'(?<![\w./])((?:docs|hub|scripts|tests|timm_rep)/[a-z0-9_./*-]*[a-z0-9_/])', text):
        if not path.startswith(('hub/repa_deit_tiny.mine', 'hub/repopt_vgg_b1.in1k')):
            assert list(ROOT.glob(path)), f'{document}: there is no {path}'


@pytest.mark.parametrize('document', DOCUMENTS)
def test_links(document):
    """Links to files of the repository, pictures too, exist, and so do the headings that they name."""
    for link in re.findall(r'\]\((?!https?://)(.*?)\)', read(document)):
        path, _, heading = link.partition('#')
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), f'{document}: {link} does not exist'
        if heading:
            headings = re.findall(r'^#+ (.*)$', target.read_text(), re.MULTILINE)
            assert heading in [re.sub(r'[^\w\- ]', '', text.lower()).replace(' ', '-') for text in headings], link


@pytest.fixture(scope='module')
def tables():
    with pytest.MonkeyPatch.context() as patch:
        return _load_script(SCRIPTS / 'tables.py', patch)


@pytest.mark.parametrize('document', DOCUMENTS)
def test_tables_of_results(document, tables):
    """Tables between markers are as scripts/tables.py writes them from the files of results."""
    text = read(document)
    assert tables.updated(text) == text, 'run python scripts/tables.py'


@pytest.fixture
def registry(monkeypatch):
    return _load_script(SCRIPTS / 'registry.py', monkeypatch)


def test_models_of_the_package(registry):
    """docs/models.md lists all of them; the counts are checked for one of each kind."""
    page = read('docs/models.md')
    listed = re.findall(r'^\| `(\w+)` \|', page, re.MULTILINE)
    assert listed == list(registry.own_models())
    for name in ('repa_deit_tiny', 'mixer_t32'):
        assert f'| {" | ".join(map(str, registry.model_row(name)))} |\n' in page


@pytest.mark.slow
def test_examples_of_timm(registry):
    """One model for each file of timm and kind of name, and the rows of some of them."""
    examples = registry.examples()
    assert {'convnext_atto', 'convnextv2_atto', 'mobileone_s0', 'repvgg_a0'} <= set(examples)
    page = read('docs/models.md')
    for name, row in (('visformer_small', registry.ffn_row), ('repvgg_a0', registry.branch_row)):
        found, = survey_convertible(name)
        assert f'| {" | ".join(row(found))} |\n' in page


@pytest.mark.slow
def test_registry_tables(registry):
    page = read('docs/models.md')
    for table in registry.tables().values():
        assert table in page, 'run python scripts/registry.py'


def test_pictures_of_results(tables):
    """Every declared picture is in a document, and draws the figures of its rows."""
    pytest.importorskip('matplotlib')
    for name, declared in yaml.safe_load(tables.PICTURES.read_text()).items():
        path = ROOT / name
        assert path.is_file()
        assert any(f'({path.name})' in page.read_text() for page in path.parent.glob('*.md')), name
        axes, = tables.draw(name, declared).axes
        assert axes.get_legend_handles_labels()[1] == list(declared['series'])
        for container, series in zip(axes.containers, declared['series'].values(), strict=True):
            drawn = container.lines[0].get_xdata().tolist()
            assert len(drawn) == len(series)
            if isinstance(series, dict):
                assert drawn == list(series)


def test_points_of_two_figures(tables, monkeypatch, tmp_path):
    """In a series given as a list, x is a figure of a file too."""
    pytest.importorskip('matplotlib')
    monkeypatch.setattr(tables, 'RESULTS', tmp_path)
    (tmp_path / 'speed.json').write_text(json.dumps({'rows': [{'form': 'a', 'speedup': {'1': 1.5, '2': 2.5}}]}))
    (tmp_path / 'loss.json').write_text(json.dumps({'rows': [
        {'ratio': ratio, 'seed': seed, 'loss': ratio + seed} for ratio in (1, 2) for seed in (0, 2)]}))
    points = [
        [{'file': 'speed', 'where': {'form': 'a'}, 'get': ['speedup', str(ratio)]}, {'where': {'ratio': ratio}}]
        for ratio in (1, 2)]
    axes, = tables.draw('p', dict(title='', x='', y='', file='loss', get='loss', series={'a': points})).axes
    line = axes.containers[0].lines[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1.5, 2.5], [2., 3.])


def test_csv(tables, monkeypatch, tmp_path):
    """A file of each file of results: columns of all rows, nested figures by name, lists as JSON."""
    monkeypatch.setattr(tables, 'RESULTS', tmp_path / 'results')
    (tmp_path / 'results' / 'cpu').mkdir(parents=True)
    rows = [{'row': 'a, b', 'std': {'all': 1.5, 'parts': {'centre': 2}}}, {'row': 'c', 'curve': [1, 2.5]}]
    (tmp_path / 'results' / 'cpu' / 'x.json').write_text(json.dumps({'rows': rows}))
    monkeypatch.setattr('sys.argv', ['tables.py', '--csv', str(tmp_path / 'csv')])
    tables.main()
    with (tmp_path / 'csv' / 'cpu.x.csv').open(newline='') as f:
        assert list(csv.reader(f)) == [
            ['row', 'std.all', 'std.parts.centre', 'curve'], ['a, b', '1.5', '2', ''], ['c', '', '', '[1, 2.5]']]


def test_every_table_is_in_a_document():
    declared = yaml.safe_load((SCRIPTS / 'results' / 'tables.yaml').read_text())
    found = [name for document in DOCUMENTS for name in re.findall(r'<!-- results: (\S+) -->', read(document))]
    assert sorted(found) == sorted(declared)


@pytest.fixture
def small_table(tables, monkeypatch, tmp_path):
    """The text of a table of two rows, with changes of its declaration."""
    monkeypatch.setattr(tables, 'RESULTS', tmp_path)
    rows = [dict(row=row, seed=seed, top1=value, memory=2 * value) for row, values in (
        ('a', (1., 4.)), ('b', (2., 8.))) for seed, value in reversed(list(enumerate(values)))]
    (tmp_path / 'x.json').write_text(json.dumps({'rows': [*rows, dict(row='c', seed=0, top1=.25)]}))
    declared = dict(file='x', get='top1', columns={'here': {}}, rows={'first': {'where': {'row': 'a'}}})

    def table(**changes):
        return tables.table('t', {**declared, **changes}).splitlines()[2:]

    return table


@pytest.mark.parametrize('minus, message', [
    ({'row': 'c'}, r'seeds must be 0 of x, 1 of x .* got 0 of x\.'),
    ({'row': 'd'}, r'seeds must be 0 of x, 1 of x .* got 0 of x, 2 of x\.'),
    ({'row': 'e'}, 'two rows .* seed 1')])
def test_differences_of_other_seeds_are_refused(small_table, tmp_path, minus, message):
    content = json.loads((tmp_path / 'x.json').read_text())
    rows = [dict(row=row, seed=seed, top1=1.) for row, seeds in (('d', (0, 2)), ('e', (1, 1))) for seed in seeds]
    (tmp_path / 'x.json').write_text(json.dumps({'rows': [*content['rows'], *rows]}))
    with pytest.raises(ValueError, match=message):
        small_table(columns={'change': {'minus': minus}})


def test_tables_of_several_files(small_table, tmp_path):
    """The seeds of all files; differences within a file; a seed in two files is refused."""
    rows = [dict(row=row, seed=seed, top1=value) for row, seed, value in (('a', 2, 10.), ('b', 2, 9.), ('c', 1, 1.))]
    (tmp_path / 'y.json').write_text(json.dumps({'rows': rows}))
    columns = {'top1': {}, 'change': {'minus': {'row': 'b'}}}
    assert small_table(file=['x', 'y'], columns=columns) == ['| first | 5.00 ± 4.58 | -1.33 ± 2.52 |']
    with pytest.raises(ValueError, match=r'seeds must be 0 of x, 1 of x, 2 of y .* got 0 of x, 1 of y'):
        small_table(file=['x', 'y'], columns={'': {'minus': {'row': 'c'}}})
    (tmp_path / 'y.json').write_text(json.dumps({'rows': [*rows, dict(row='a', seed=1, top1=4.)]}))
    with pytest.raises(ValueError, match=r"two rows of x\.json, y\.json have {'row': 'a'} and the seed 1"):
        small_table(file=['x', 'y'])


def test_epochs_to_reach_another_row(small_table, tmp_path):
    """Of each seed, the first epoch at or above the last one of the other row."""
    curves = {'slow': ([1., 5., 3.], [1., 2., 4.]), 'fast': ([3., 2., 6.], [2., 4., 3.]), 'low': ([1.], [9.])}
    rows = [dict(row=row, seed=i, curve=curve) for row, both in curves.items() for i, curve in enumerate(both)]
    (tmp_path / 'y.json').write_text(json.dumps({'rows': rows}))
    cell = {'file': 'y', 'get': 'curve', 'digits': 1, 'reach': {'row': '{label}'}}
    assert small_table(columns={'': cell}, rows={'slow': {'where': {'row': 'fast'}}}) == ['| slow | 1.5 ± 0.7 |']
    with pytest.raises(ValueError, match=r'Table t: a curve up to 1\.0 never reaches 3\.0'):
        small_table(columns={'': cell}, rows={'slow': {'where': {'row': 'low'}}})
    (tmp_path / 'y.json').write_text(json.dumps({'rows': rows[:-1]}))
    with pytest.raises(ValueError, match=r'seeds must be 0 of y, 1 of y .* got 0 of y'):
        small_table(columns={'': cell}, rows={'low': {'where': {'row': 'fast'}}})


def test_a_table(small_table):
    """Means and deviations over the seeds, differences paired by the seed, quotients, texts."""
    assert small_table() == ['| first | 2.50 ± 2.12 |']
    assert small_table(rows={'': {'where': {'row': 'c'}}}) == ['|  | 0.25 |']
    assert small_table(rows={'': {'where': {'row': 'c'}}}, digits=1) == ['|  | 0.2 |']
    paired = {'change': {'minus': {'row': 'b'}}, 'memory': {'over': 'memory', 'digits': 3}, 'paper': {}}
    row = {'where': {'row': 'a'}, 'paper': 7}
    assert small_table(columns=paired, rows={'a': row}) == ['| a | -2.50 ± 2.12 | 0.500 ± 0.000 | 7 |']
    assert small_table(rows=['b', 'a'], by='row') == ['| `b` | 5.00 ± 4.24 |', '| `a` | 2.50 ± 2.12 |']
    assert small_table(rows={'a': {'here': None}}) == ['| a |  |']
    pattern = {'where': {'row': '{label}', 'seed': 0}}
    assert small_table(columns={'': pattern, 'b': {**pattern, 'minus': {'row': 'b'}}}, rows={'a': None, 'c': None}) == [
        '| a | 1.0 | -1.0 |', '| c | 0.25 | -1.75 |']
    assert small_table(columns={'': {'minus': {'row': '{label}'}}}, rows={'a': {'where': {'row': 'b'}}}) == [
        '| a | +2.50 ± 2.12 |']
    with pytest.raises(ValueError, match=r"Table t: no row of x.json has {'row': 'd'}"):
        small_table(rows=['d'], by='row')
