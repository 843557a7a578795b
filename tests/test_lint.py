"""The linter and the type checker, with the settings of pyproject.toml."""
import sys

from tests.helpers import ROOT, run


def test_ruff():
    run([sys.executable, '-m', 'ruff', 'check', '--no-cache', ROOT])


def test_mypy(tmp_path):
    run([sys.executable, '-m', 'mypy', '--cache-dir', tmp_path], cwd=ROOT)
