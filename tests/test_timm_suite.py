"""timm's own model tests on this package's models: ``pytest -m timm_suite``."""
import os
import sys
import tarfile

import pytest
import timm

from tests.helpers import run

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
