import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import timm
import torch
from safetensors import SafetensorError

from tests.helpers import ROOT, needs_recorded_args, save_model
from timm_rep.cli import _COMMANDS, main
from timm_rep.version import __version__


def test_help_and_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(['--help'])
    assert e.value.code == 0
    out = capsys.readouterr().out
    assert 'demo' in out
    assert 'models' in out
    with pytest.raises(SystemExit):
        main(['--version'])
    assert capsys.readouterr().out == f'timm-rep {__version__}\n'
    with pytest.raises(SystemExit) as e:
        main([])
    assert e.value.code == 2


def test_models(capsys):
    assert main(['models', '*deit_tiny*']) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.split()[1:3] == ['1', 'RePa-DeiT-Tiny'] and ' yes ' in line)
    assert row.split() == [
        'RePaFormer', '1', 'RePa-DeiT-Tiny', 'repa_deit_tiny', 'yes', '3.49', '3.5', '0.64', '~', '0.82', '0.6']
    row = next(line for line in lines if line.split()[1:3] == ['1', 'RePa-DeiT-Tiny'] and ' no ' in line)
    assert row.split()[1:] == ['1', 'RePa-DeiT-Tiny', 'repa_deit_tiny', 'no', '5.74', '5.7', '1.07', '=', '1.25', '1.1']
    assert not any('repa_deit_base' in line for line in lines)


def test_errors_are_one_line(capsys):
    assert main(['models', 'nothing']) == 1
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.startswith('timm-rep: ')
    assert captured.err.count('\n') == 1
    assert "'nothing'" in captured.err
    assert main(['models', 'nothing', '--traceback']) == 1
    error = capsys.readouterr().err
    assert error.startswith('Traceback')
    assert ', in run' in error
    assert error.endswith(captured.err)


@pytest.mark.parametrize('command', _COMMANDS, ids=lambda command: command.__name__.rpartition('.')[2])
def test_options_are_spelt_alike(command):
    """Each has --traceback, -o is --output, and an option of a name means the same everywhere."""
    commands = argparse.ArgumentParser().add_subparsers()
    command.add_parser(commands)
    parser, = commands.choices.values()
    options = {name: action for action in parser._actions for name in action.option_strings}
    assert not {'--split', '--num-images', '--num-workers', '--val-dir'} & options.keys()
    assert ('-o' in options) == ('--output' in options)
    assert parser.get_default('run') is command.run


def test_installed_command():
    command, = entry_points(group='console_scripts', name='timm-rep')
    assert command.load() is main


def test_run_reaches_scripts_that_a_script_starts(tmp_path, monkeypatch):
    """The timm next to a script is imported, as python would, and this package after it, in child processes too."""
    (tmp_path / 'timm.py').write_text('imported = []')
    (tmp_path / 'timm_rep').mkdir()  # of a folder in PYTHONPATH, in place of the real one, which takes seconds
    (tmp_path / 'timm_rep' / '__init__.py').write_text('import timm; timm.imported.append("timm_rep")')
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'sitecustomize.py').write_text('import sys; sys.hidden = "found"')
    (tmp_path / 'child.py').write_text(
        'import importlib.util, sys\n'
        'assert importlib.util.find_spec("timm")  # as libraries look whether timm is installed\n'
        'import timm\n'
        'print(timm.imported, sys.hidden, sys.argv[1:], __name__)\n'
        'def f():\n'
        '    raise ValueError("deep inside")\n'
        'f()\n')
    (tmp_path / 'script.py').write_text(
        'import pathlib, subprocess, sys\n'
        'assert "timm" not in sys.modules\n'
        'child = pathlib.Path(__file__).with_name("child.py")\n'
        'raise SystemExit(subprocess.run([sys.executable, child, *sys.argv[1:]]).returncode + 2)\n')
    started = []
    monkeypatch.setattr(os, 'execve', lambda *args: started.append(args))
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'site'))
    main(['run', str(tmp_path / 'script.py'), '--model', 'm', '-b', '1'])
    (_, command, env), = started
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout == f"['timm_rep'] found {['--model', 'm', '-b', '1']} __main__\n"
    assert 'line 6, in f' in done.stderr
    assert done.returncode == 3


@pytest.mark.slow
def test_run_imports_what_python_would(tmp_path):
    """The script's folder comes first, also for what timm_rep imports, such as the timm of a checkout."""
    folder = tmp_path / 'checkout'
    (folder / 'timm').mkdir(parents=True)
    # the checkout's timm: a module of its own that runs the code of the installed one
    (folder / 'timm' / '__init__.py').write_text(
        'import sys\n'
        'from importlib.machinery import PathFinder\n'
        "spec = PathFinder.find_spec('timm', sys.path[1:])\n"
        '__path__ = list(spec.submodule_search_locations)\n'
        'exec(open(spec.origin).read())\n')
    (folder / 'beside.py').write_text('')
    (folder / 'script.py').write_text(
        'import sys\n'
        'import timm, beside\n'
        'import __main__\n'
        'def f(): pass\n'
        'print(timm.__file__, beside.__file__, sys.path[0], sys.argv, __name__, __file__, __main__.f is f)\n'
        'print(timm.is_model("repa_deit_tiny"))\n'
        'sys.exit(3)\n')
    (tmp_path / 'link.py').symlink_to(folder / 'script.py')
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    outputs = []
    for command in (), ('-m', 'timm_rep.cli', 'run'):
        command = [sys.executable, *command, 'link.py', '--model', 'm']
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 3, done.stderr
        outputs.append(done.stdout.splitlines())
    (expected, registered), (found, registered_by_run) = outputs
    assert str(folder / 'timm' / '__init__.py') in expected
    assert found == expected
    assert (registered, registered_by_run) == ('False', 'True')


def test_run_without_script(capsys):
    assert main(['run', 'nowhere.py']) == 1
    error = capsys.readouterr().err
    assert error.startswith('timm-rep: ')
    assert "'nowhere.py'" in error
    assert error.count('\n') == 1


_NO_FOLDER = "expected an existing folder, got 'nowhere'"


@pytest.mark.parametrize('argv,status,message', [
    (['profile', 'repa_deit_tiny', '--model-kwargs', 'idle_ratio'], 2, "expected NAME=VALUE, got 'idle_ratio'"),
    (['profile', 'repa_deit_tiny', '--batch-size', '0'], 2, "expected an integer >= 1, got '0'"),
    (['accelerate', 'm', '--data-dir', '.', '-o', 'x', '--macs', '1'], 2, "expected a number > 0 and < 1, got '1'"),
    (['hyper-search', 'repopt_vgg_a0', '-o', 's.safetensors', '--epochs', 'x'], 2, ">= 1, got 'x'"),
    (['hyper-search', 'repopt_vgg_a0', '-o', 's.safetensors', '--seed', '2147483648'], 2, '2 ** 31 - 1, got'),
    (['hyper-search', 'repopt_vgg_a0', '-o', 's.safetensors', '--seed', '-1'], 2, '2 ** 31 - 1, got'),
    (['accelerate', 'vit_tiny_patch16_224', '--data-dir', 'nowhere', '-o', 'x'], 2, _NO_FOLDER),
    (['quantize', 'repopt_vgg_a0', '--data-dir', 'nowhere', '-o', 'x'], 2, _NO_FOLDER),
    (['verify', 'repopt_vgg_a0', '--data-dir', 'nowhere'], 2, _NO_FOLDER),
])
def test_arguments_are_checked_where_they_enter(capsys, argv, status, message):
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == status
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize('path', ['', '/'])
@pytest.mark.parametrize('argv', [
    ['accelerate', 'vit_tiny_patch16_224', '--data-dir', '.'], ['convert', 'c.pth', '--model', 'repa_deit_tiny'],
    ['demo'], ['export', 'repa_deit_tiny'], ['quantize', 'repopt_vgg_a0', '--data-dir', '.'],
], ids=lambda argv: argv[0])
def test_outputs_without_a_name(capsys, argv, path):
    """Such outputs would be written to the current folder, or the root."""
    with pytest.raises(SystemExit) as e:
        main([*argv, '-o', path])
    assert e.value.code == 2
    assert f'got {path!r}' in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_is_not_a_model_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'fast').mkdir()
    assert main(['verify', 'fast']) == 1
    assert "the folder 'fast': to load it, pass local-dir:fast" in capsys.readouterr().err


@pytest.mark.parametrize('argv', [
    ['export', 'local-dir:tf', '-o', 'out'],
    ['export', 'local-dir:tf', '-o', 'out', '--model-kwargs', 'num_classes=3'],
    ['weight-select', '--student', 'repa_deit_tiny', '--teacher', 'local-dir:tf', '-o', 'x.safetensors'],
])
def test_a_model_of_another_library(tmp_path, monkeypatch, capsys, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'tf').mkdir()
    (tmp_path / 'tf' / 'config.json').write_text(json.dumps({'model_type': 'vit', 'architectures': ['ViTModel']}))
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert "tf/config.json' must have 'architecture'" in error
    assert error.count('\n') == 1


@needs_recorded_args
@pytest.mark.parametrize('where, name, value, message', [
    ('model_args', 'num_heads', 0, 'config.json'),
    ('model_args', 'patch_size', 0, 'config.json'),
    ('pretrained_cfg', 'interpolation', 'foo', 'interpolation'),
    ('pretrained_cfg', 'mean', 'x', 'mean'),
])
def test_a_damaged_folder_of_timm(tmp_path, capsys, images, where, name, value, message):
    folder = tmp_path / 'plain'
    save_model(timm.create_model('test_vit', num_classes=4, img_size=32).eval(), folder)
    config = json.loads((folder / 'config.json').read_text())
    config.setdefault(where, {})[name] = value
    (folder / 'config.json').write_text(json.dumps(config))
    assert main(['verify', f'local-dir:{folder}', '--data-dir', str(images), '--val-split', 'validation']) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count('\n') == 1


@needs_recorded_args
def test_damaged_weights_of_a_folder(tmp_path, capsys):
    save_model(timm.create_model('test_vit').eval(), tmp_path / 'plain')
    weights = tmp_path / 'plain' / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:20])
    assert main(['verify', f'local-dir:{tmp_path / "plain"}']) == 1
    error = capsys.readouterr().err
    assert 'plain' in error
    assert error.count('\n') == 1


def test_empty_names_of_checkpoints(capsys):
    """Of a variable of the shell that is not set: no random weights in their place."""
    for command in ('verify', 'profile', 'export'):
        with pytest.raises(SystemExit):
            main([command, 'repa_deit_tiny', '--checkpoint', ''])
        assert 'checkpoint' in capsys.readouterr().err
    assert main(['plot-attention-weights', 'test_vit=']) == 1
    assert 'checkpoint' in capsys.readouterr().err


def test_a_model_without_a_released_layout(tmp_path, capsys):
    torch.save({'fc.weight': torch.zeros(2, 2)}, tmp_path / 'c.pth')
    assert main(['convert', str(tmp_path / 'c.pth'), '--model', 'resnet18', '-o', str(tmp_path / 'resnet18.in1k')]) == 1
    error = capsys.readouterr().err
    assert error.startswith('timm-rep: model must be')
    assert error.count('\n') == 1


@pytest.mark.parametrize('error,status,printed', [
    (KeyboardInterrupt(), 130, 'timm-rep: interrupted.\n'),
    (ValueError('layer \x1b[31mred\x1b[0m'), 1, 'timm-rep: layer \\x1b[31mred\\x1b[0m\n'),
    (RuntimeError('of an exporter:\n\tcause\n\n  advice'), 1, 'timm-rep: of an exporter: cause advice\n'),
    (FileNotFoundError(), 1, 'timm-rep: FileNotFoundError\n'),
    (SafetensorError('damaged'), 1, 'timm-rep: damaged\n'),
    (ImportError('needs other releases of torch'), 1, 'timm-rep: needs other releases of torch\n'),
    (OverflowError('float16 cannot'), 1, 'timm-rep: float16 cannot\n'),
    (TypeError('f() got an unexpected keyword argument \'x\''), 1,
     "timm-rep: f() got an unexpected keyword argument 'x'\n"),
])
def test_failures_are_one_line(monkeypatch, capsys, error, status, printed):
    def fail(args):
        raise error
    monkeypatch.setattr('timm_rep.cli.models.fnmatch.fnmatch', lambda *args: fail(args))
    assert main(['models']) == status
    assert capsys.readouterr().err == printed


def test_an_interrupted_search_says_how_to_continue(monkeypatch, capsys, tmp_path):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt
    monkeypatch.setattr('timm_rep.cli.hyper_search.create_search_dataset', interrupt)
    paths = ['--data-dir', str(tmp_path), '-o', str(tmp_path / 's.safetensors')]
    assert main(['hyper-search', 'repopt_vgg_a0', *paths]) == 130
    assert '--resume continues' in capsys.readouterr().err


def test_names_that_are_not_utf8(monkeypatch):
    """The command can be written to a file."""
    from timm_rep.cli import profile

    found = []
    monkeypatch.setattr(profile, 'run', lambda args: found.append(args.command))
    main(['profile', 'x\udce9', 'y z'])
    assert found == [r"timm-rep profile 'x\udce9' 'y z'"]
