"""The linter, with the settings of pyproject.toml."""
import sys

from tests.helpers import ROOT, run


def test_ruff():
    run([sys.executable, '-m', 'ruff', 'check', '--no-cache', ROOT])
