import os
from pathlib import Path

import pytest

# where the recorded outputs of the released implementations are, if they are here
_FIXTURES = Path(os.environ.get('TIMM_REP_FIXTURES', Path(__file__).parents[2] / 'shared' / 'ref' / 'fixtures'))


@pytest.fixture
def recorded():
    """Reads a recorded fixture by name: (tensors, configuration)."""
    import json

    from safetensors import safe_open

    def read(name):
        path = _FIXTURES / f'{name}.safetensors'
        if not path.is_file():
            pytest.skip(f'the recorded outputs of the released implementation are not here: {path}')
        with safe_open(path, 'pt') as f:
            return {key: f.get_tensor(key) for key in f.keys()}, json.loads(f.metadata()['config'])

    return read
