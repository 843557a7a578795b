"""This test suite with the oldest timm and torch that pyproject.toml allows: ``pytest -m oldest``."""
import re

import pytest

from tests.fresh_environment import ROOT, create, run


@pytest.mark.oldest
@pytest.mark.timeout(3600)
def test_oldest_timm_and_torch(tmp_path):
    pyproject = (ROOT / 'pyproject.toml').read_text()
    oldest = {name: re.search(rf'"{name}>=([\d.]+)"', pyproject)[1] for name in ('timm', 'torch')}
    readme = (ROOT / 'README.md').read_text()
    assert all(f'{name} {version}' in readme for name, version in oldest.items())
    python = create(tmp_path / 'venv')
    pins = [f'{name}=={version}' for name, version in oldest.items()]
    run([python, '-m', 'pip', 'install', '--quiet', *pins, '-e', f'{ROOT}[test]'])
    out = run([python, '-m', 'pytest', '-q'], cwd=ROOT)
    print(out)
    assert re.search(r'\d+ passed', out)
