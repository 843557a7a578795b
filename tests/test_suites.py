"""This test suite with the oldest timm and torch that pyproject.toml allows: ``pytest -m oldest``."""
import re
import sys
import venv

import pytest

from tests.helpers import ROOT, run


@pytest.mark.oldest
@pytest.mark.timeout(3600)
def test_oldest_timm_and_torch(tmp_path):
    pyproject = (ROOT / 'pyproject.toml').read_text()
    oldest = {name: re.search(rf'"{name}>=([\d.]+)"', pyproject)[1] for name in ('timm', 'torch')}
    readme = (ROOT / 'README.md').read_text()
    assert all(f'{name} {version}' in readme for name, version in oldest.items())
    venv.create(tmp_path / 'venv', with_pip=True)
    python = tmp_path / 'venv' / ('Scripts/python.exe' if sys.platform == 'win32' else 'bin/python')
    pins = [f'{name}=={version}' for name, version in oldest.items()]
    run([python, '-m', 'pip', 'install', '--quiet', *pins, '-e', f'{ROOT}[test]'])
    out = run([python, '-m', 'pytest', '-q'], cwd=ROOT)
    print(out)
    assert re.search(r'\d+ passed', out)
