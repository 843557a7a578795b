"""torchrun, on the CPU of this machine."""
import os
import subprocess
import sys
from pathlib import Path

__all__ = ['torchrun']


def torchrun(processes, *command, **env):
    """Run a script, or with '--no-python' a command, in several processes; returns what they printed."""
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(processes),
        *map(str, command),
    ]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).parents[1]), **env}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout
