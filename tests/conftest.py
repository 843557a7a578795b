"""Fixtures of several folders, and how many processes run the tests."""
import gc
import importlib
import os
import sys
from functools import partial
from pathlib import Path

import pytest

# before torch is imported, here and in subprocesses: processes of one thread each are faster than one of several
os.environ.setdefault('OMP_NUM_THREADS', '1')

# folder of recorded outputs and scales of the released implementations, which are not part of this repository
_REFERENCE = Path(os.environ.get('TIMM_REP_REFERENCE', Path(__file__).parents[2] / 'shared' / 'ref'))


def pytest_xdist_auto_num_workers(config):
    """Number of processes for ``-n auto``, which pyproject.toml sets: up to four for the default tests of folders.

    None for single files, -k and other markers, such as slow and gpu: starting processes takes longer, or the tests
    need the whole machine.
    """
    paths = [Path(arg.split('::')[0]) for arg in config.args]
    is_default = config.option.markexpr.startswith('not slow') and not config.option.keyword
    if not is_default or not all(path.is_dir() for path in paths):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return min(cores, 4)


def pytest_configure(config):
    """Prepare torch, except in the process that starts the others, which would wait for its import."""
    if config.option.numprocesses:
        return
    import torch
    from torch.torch_version import TorchVersion

    torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))
    # torchao does not say which torch it needs
    try:
        if torch.__version__ < TorchVersion('2.6'):
            import torchao  # noqa: F401
    except AttributeError:
        sys.modules['torchao'] = None  # skips its tests


def pytest_collection_finish(session):
    """Less time for garbage collection: what is imported by now is excluded, the rest is looked at less often."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    """Released scales are downloaded from an address where nothing answers."""
    monkeypatch.setattr('timm_rep.scales.released.RELEASE_URL', 'http://127.0.0.1:9/')


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """Throughput is measured in two rounds by default: no test depends on its value."""
    monkeypatch.setattr('timm_rep.utils.profiling.measure_throughput.__defaults__', (2, 0))


def _reference(*parts):
    path = _REFERENCE.joinpath(*parts)
    if not path.is_file():
        pytest.skip(f'recorded outputs of the released implementations are not in {_REFERENCE}, see tests/README.md')
    return path


@pytest.fixture
def recorded():
    """Reads a recorded fixture by name: (tensors, configuration). Skips if it does not exist."""
    import json

    from safetensors import safe_open

    def read(name):
        with safe_open(_reference('fixtures', f'{name}.safetensors'), 'pt') as f:
            return {key: f.get_tensor(key) for key in f.keys()}, json.loads(f.metadata()['config'])

    return read


@pytest.fixture
def released_scales():
    """Path of a file of scales released by the authors of RepOptimizers, by name. Skips if it does not exist."""
    return partial(_reference, 'scales')


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hugging Face Hub on loopback for the clients in this process, with an empty cache and no local folder."""
    from tests.hub_server import HubServer

    monkeypatch.setenv('TIMM_REP_HUB', str(tmp_path / 'no-folder'))
    monkeypatch.delenv('TIMM_REP_ORG', raising=False)
    with HubServer() as server:
        server.use(monkeypatch, tmp_path / 'home')
        yield server


@pytest.fixture(scope='session')
def images(tmp_path_factory):
    """Folders of 40 x 40 images, four classes: train/CLASS/IMAGE.png, validation/CLASS/IMAGE.png."""
    import torch
    from PIL import Image

    root = tmp_path_factory.mktemp('images')
    g = torch.Generator().manual_seed(0)
    for split, n in (('train', 5), ('validation', 2)):
        for label in range(4):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for i in range(n):
                pixels = torch.randint(0, 100, (40, 40, 3), generator=g, dtype=torch.uint8) + 30 * label
                Image.fromarray(pixels.numpy()).save(folder / f'{i}.png')
    return root


@pytest.fixture
def load_script(monkeypatch, tmp_path):
    """Imports a script by its path in scripts/, or 'examples/NAME'; its results go to a temporary folder."""
    from tests.helpers import ROOT, SCRIPTS

    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(importlib.import_module('experiments.report'), 'RESULTS', tmp_path / 'results')

    def load(name):
        folder, _, stem = name.rpartition('/')
        if folder in ('benchmarks', 'experiments'):  # packages
            return importlib.import_module(f'{folder}.{stem}')
        monkeypatch.syspath_prepend((ROOT if folder == 'examples' else SCRIPTS) / folder)
        return importlib.import_module(stem)

    return load


@pytest.fixture
def script(load_script, monkeypatch):
    """Runs main() of a script, named as for ``load_script``, with arguments of the command line."""

    def run(name, *args):
        module = load_script(name)
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *map(str, args)])
        return module.main()

    return run
