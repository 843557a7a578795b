import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

WORKER = Path(__file__).parent / 'distributed_worker.py'


def train(path, processes, opt, parallel):
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(processes), str(WORKER),
        str(path), opt, parallel, '16',
    ]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(WORKER.parents[1])}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
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
