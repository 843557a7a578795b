import functools
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

from tests.torchrun import torchrun

WORKER = Path(__file__).parent / 'distributed_worker.py'


def train(path, processes, opt, parallel):
    torchrun(processes, WORKER, path, opt, parallel, 16)
    return [torch.load(f'{path}.{rank}', weights_only=True) for rank in range(processes)]


@pytest.fixture(scope='module')
def one_process(tmp_path_factory):
    """The weights that one process comes to, by optimizer."""
    return functools.cache(lambda opt: train(tmp_path_factory.mktemp('one') / 'state', 1, opt, 'ddp')[0])


@pytest.mark.parametrize('opt', ['repsgd', pytest.param('repadamw', marks=pytest.mark.slow)])
class TestTwoProcesses:
    """They are one with the doubled batch. BatchNorm is frozen; every rank checks that it has GradMults."""

    @pytest.mark.parametrize('parallel', ['ddp', 'fsdp'])
    def test_weights(self, tmp_path, one_process, opt, parallel):
        if parallel == 'fsdp' and not hasattr(torch.distributed.fsdp, 'fully_shard'):
            pytest.skip("FSDP2 of this torch is for accelerators only")
        expected = one_process(opt)
        for state in train(tmp_path / 'state', 2, opt, parallel):
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-9)

    def test_multipliers_are_at_work(self, tmp_path, one_process, opt):
        plain, = train(tmp_path / 'state', 1, opt.removeprefix('rep'), 'ddp')
        assert any(not torch.allclose(plain[k], v, rtol=1e-3) for k, v in one_process(opt).items())
