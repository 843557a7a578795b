import importlib
import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / 'scripts'

# where the recorded outputs of the released implementations are, if they are here
_REFERENCE = Path(os.environ.get('TIMM_REP_REFERENCE', Path(__file__).parents[2] / 'shared' / 'ref'))


@pytest.fixture
def recorded():
    """Reads a recorded fixture by name: (tensors, configuration)."""
    import json

    from safetensors import safe_open

    def read(name):
        path = _REFERENCE / 'fixtures' / f'{name}.safetensors'
        if not path.is_file():
            pytest.skip(f'the recorded outputs of the released implementation are not here: {path}')
        with safe_open(path, 'pt') as f:
            return {key: f.get_tensor(key) for key in f.keys()}, json.loads(f.metadata()['config'])

    return read


@pytest.fixture
def released_scales():
    """The path of a file of scales that the authors of RepOptimizers released."""

    def find(name):
        path = _REFERENCE / 'scales' / name
        if not path.is_file():
            pytest.skip(f'the released scales are not here: {path}')
        return path

    return find


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hugging Face Hub on loopback, for the clients in this process, with an empty cache; no folder of our own."""
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
def script(monkeypatch, tmp_path):
    """Runs a script by its path in scripts/, without the suffix; what it reports goes to a temporary folder."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(importlib.import_module('_report'), 'RESULTS', tmp_path / 'results')

    def run(name, *args):
        path = SCRIPTS / f'{name}.py'
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, 'argv', [str(path), *map(str, args)])
        return importlib.import_module(path.stem).main()

    return run
