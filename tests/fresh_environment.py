"""What the marked runs against other people's releases share: fetching them from PyPI, running pytest elsewhere."""
import subprocess
import sys
import venv
from pathlib import Path
from typing import List

ROOT = Path(__file__).parents[1]


def run(command: List[str], **kwargs) -> str:
    """Run a command; if it fails, fail the test with the end of its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)
    assert done.returncode == 0, f'{" ".join(command)}\n{done.stdout[-20000:]}'
    return done.stdout


def create(folder: Path) -> str:
    """Create a virtual environment and return its Python."""
    venv.create(folder, with_pip=True)
    return str(folder / ('Scripts/python.exe' if sys.platform == 'win32' else 'bin/python'))
