"""``timm-rep run SCRIPT``: run one of timm's scripts, unmodified, with this package's models registered."""
import argparse
import os
import subprocess
import sys
from pathlib import Path

from ._arguments import Commands

# its sitecustomize.py imports this package when timm is imported
_STARTUP = Path(__file__).resolve().parent / 'startup'


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        'run', help="run one of timm's scripts (validate.py, benchmark.py, ...) with this package's models registered")
    parser.add_argument(
        'script', help='path of the script, e.g. validate.py; scripts that it launches get the models too')
    parser.add_argument('args', nargs=argparse.REMAINDER, help='arguments of the script')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not os.path.isfile(args.script):
        raise FileNotFoundError(f'Expected the file of a script, but {args.script!r} is none.')
    command = [sys.executable, args.script, *args.args]
    paths = [os.fspath(_STARTUP), *filter(None, [os.environ.get('PYTHONPATH')])]
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths)}
    if os.name == 'nt':  # without exec
        return subprocess.call(command, env=env)
    sys.stdout.flush()
    os.execve(sys.executable, command, env)
