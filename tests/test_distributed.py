import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize('opt', ['repsgd', pytest.param('repadamw', marks=pytest.mark.slow)])
def test_two_processes_are_one_with_the_doubled_batch(tmp_path, opt):
    """BatchNorm frozen; GradMults are checked on every rank, whole under DDP and in rows under FSDP2."""
    one, = train(tmp_path / 'one', 1, opt, 'ddp')
    plain, = train(tmp_path / 'plain', 1, opt.removeprefix('rep'), 'ddp')
    assert any(not torch.allclose(plain[k], v, rtol=1e-3) for k, v in one.items())
    for parallel in ('ddp', 'fsdp'):
        for state in train(tmp_path / parallel, 2, opt, parallel):
            assert state.keys() == one.keys()
            for key, value in one.items():
                torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-9)
