"""Suites in environments of their own: the oldest timm and torch, each runtime, and timm's tests of models."""
import os
import re
import sys
import tarfile
import venv

import pytest
import timm

from tests.helpers import ROOT, run


def create_environment(folder, extra, *requirements):
    """The interpreter of a new environment with this package in place, an extra of it, and further requirements."""
    venv.create(folder, with_pip=True)
    python = folder / ('Scripts/python.exe' if sys.platform == 'win32' else 'bin/python')
    run([python, '-m', 'pip', 'install', '--quiet', '-e', f'{ROOT}[{extra}]', *requirements])
    return python


@pytest.mark.oldest
@pytest.mark.timeout(3600)
def test_oldest_timm_and_torch(tmp_path):
    pyproject = (ROOT / 'pyproject.toml').read_text()
    oldest = {name: re.search(rf'"{name}>=([\d.]+)"', pyproject)[1] for name in ('timm', 'torch')}
    readme = (ROOT / 'README.md').read_text()
    assert all(f'{name} {version}' in readme for name, version in oldest.items())
    pins = [f'{name}=={version}' for name, version in oldest.items()]
    python = create_environment(tmp_path / 'venv', 'test', *pins)
    out = run([python, '-m', 'pytest', '-q'], cwd=ROOT)
    print(out)
    assert re.search(r'\d+ passed', out)


@pytest.mark.clients
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('extra,requirements', [
    ('test,openvino', []), ('test,executorch', []), ('test', ['litert-torch', 'coremltools'])])
def test_runtimes(tmp_path, extra, requirements):
    """The runtimes have requirements of torch and torchao that exclude each other."""
    python = create_environment(tmp_path / 'venv', extra, *requirements)
    out = run([python, '-m', 'pytest', '-q', '-n', '0', '-m', 'clients', 'tests/deploy/test_runtimes.py'], cwd=ROOT)
    print(out)
    assert re.search(r'\d+ passed', out)


# for models with a 4-D output; timm excludes its own token models by name and tests them otherwise
CONV_CONFIGS = 'test_model_default_cfgs and (repa_any or repa_deit or repa_vit or lvvit_)'
TOKEN_CONFIGS = """
import timm, timm_rep
from tests.test_models import test_model_default_cfgs_non_std as check

for name in timm.list_models(['repa_any', 'repa_deit_*', 'repa_vit_*', 'repa_lvvit_*', 'lvvit_*']):
    check(name, 1, 'meta')
"""


@pytest.mark.timm_suite
@pytest.mark.timeout(3600)
def test_models(tmp_path):
    run([
        sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--no-binary', 'timm', '--dest', str(tmp_path),
        f'timm=={timm.__version__}',
    ])
    with tarfile.open(tmp_path / f'timm-{timm.__version__}.tar.gz') as archive:
        archive.extractall(tmp_path)
    suite = tmp_path / f'timm-{timm.__version__}'
    env = {**os.environ, 'TORCH_BACKEND': 'timm_rep', 'TIMEOUT': '1200'}
    run([sys.executable, '-c', TOKEN_CONFIGS], cwd=suite, env=env)
    out = run(
        [
            sys.executable, '-m', 'pytest', 'tests/test_models.py', '-q',
            # without tests that download pretrained weights
            '-k', f'(repa_ or repopt_ or lvvit_) and not _pretrained and not ({CONV_CONFIGS})',
        ],
        cwd=suite,
        env=env,
    )
    print(out)
    assert ' passed' in out
    assert ' failed' not in out
