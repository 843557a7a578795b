"""timm's own onnx_export.py --reparam, onnx_validate.py and bulk_runner.py, unmodified, on models of this package."""
import csv
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.data import create_dataset, create_loader, resolve_data_config

from tests.helpers import ROOT, relative, run
from tests.helpers import images as random_images
from timm_rep.deploy import onnx_runner

_CHECKOUT = os.environ.get('TIMM_CHECKOUT')
_PACKAGES = ('onnx', 'onnxscript', 'onnxruntime')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _CHECKOUT, reason='TIMM_CHECKOUT is not set to a checkout of timm'),
]


def timm_script(name, *args):
    """Output of a script of timm; it takes no --device-modules, so timm-rep runs it."""
    return run([sys.executable, '-m', 'timm_rep.cli', 'run', Path(_CHECKOUT) / name, *args], cwd=_CHECKOUT)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, _PACKAGES)), reason=f'needs {", ".join(_PACKAGES)}: the extra deploy')
@pytest.mark.parametrize('name', ['repa_any.cifar10', 'repopt_vgg_a0.cifar10'])
def test_onnx_scripts(name, images, tmp_path, monkeypatch):
    monkeypatch.setenv('TIMM_REP_HUB', str(ROOT / 'hub'))
    path = tmp_path / 'model.onnx'
    timm_script('onnx_export.py', path, '--model', name, '--reparam', '--check-forward', '--img-size', 32, '-b', 2)
    model = timm.create_model(name, pretrained=True).eval()
    exported = onnx_runner(path)
    with torch.no_grad():
        for n in (1, 5):
            x = random_images(n, 32)
            assert relative(exported(x), model(x)) < 1e-4

    data = images / 'train'
    config = resolve_data_config({'img_size': 32})  # the script knows no model, so that its mean and std are ImageNet's
    loader = create_loader(
        create_dataset('', str(data)), batch_size=8, use_prefetcher=False, persistent_workers=False, num_workers=0,
        **{key: config[key] for key in ('input_size', 'interpolation', 'mean', 'std', 'crop_pct')})
    with torch.inference_mode():
        correct = torch.cat([model(x).argsort(1, descending=True)[:, :5] == y[:, None] for x, y in loader])
    expected = [100 * x.float().mean().item() for x in (correct[:, 0], correct.any(1))]
    out = timm_script('onnx_validate.py', data, '--onnx-input', path, '--img-size', 32, '-b', 8, '-j', 1)
    found = re.search(r' \* Prec@1 ([\d.]+) .* Prec@5 ([\d.]+) ', out).groups()
    assert [float(x) for x in found] == pytest.approx(expected, abs=1e-2)
    assert expected[1] > 0


def test_bulk_runner(tmp_path):
    """Each model gets a benchmark.py process of its own, where models of this package are registered too."""
    results = tmp_path / 'results.csv'
    out = timm_script(
        'bulk_runner.py', '--model-list', 'repa_deit_t*', '--results-file', results, Path(_CHECKOUT) / 'benchmark.py',
        '--device', 'cpu', '--bench', 'infer', '-b', 1, '--num-warm-iter', 1, '--num-bench-iter', 5)
    assert 'had errors' not in out
    with open(results) as file:
        row, = csv.DictReader(file)
    assert row['model'] == 'repa_deit_tiny'
    assert float(row['infer_samples_per_sec']) > 0
