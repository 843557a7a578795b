import subprocess
import sys

import pytest

from timm_rep.cli import main
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
    row = next(line for line in lines if line.split()[:2] == ['1', 'RePa-DeiT-Tiny'] and ' yes ' in line)
    assert row.split() == ['1', 'RePa-DeiT-Tiny', 'repa_deit_tiny', 'yes', '3.49', '3.5', '0.64', '~', '0.82', '0.6']
    assert not any('repa_deit_base' in line for line in lines)


def test_errors_are_one_line(capsys):
    assert main(['models', 'nothing']) == 1
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err == "timm-rep: no model of the papers' tables matches 'nothing'; see timm-rep models.\n"


def test_installed_command():
    run = subprocess.run(
        [sys.executable, '-c', 'from timm_rep.cli import main; raise SystemExit(main(["--version"]))'],
        capture_output=True, text=True, check=True)
    assert run.stdout == f'timm-rep {__version__}\n'
