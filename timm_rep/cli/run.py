"""``timm-rep run SCRIPT``: run one of timm's scripts, unmodified, with this package's models registered."""
import argparse
import os
import runpy
import subprocess
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path

import timm_rep

# program of a new interpreter, whose arguments are the script's folder, this package's, the script, its arguments
_START = '''
import os, runpy, sys
folder, package, *sys.argv = sys.argv[1:]
sys.path[:] = [folder, *(path for path in sys.path if path), package]
import timm_rep
runpy.run_path(os.path.abspath(sys.argv[0]), run_name='__main__')
'''


def add_parser(commands) -> None:
    parser = commands.add_parser(
        'run', help="run one of timm's scripts (validate.py, benchmark.py, ...) with this package's models registered")
    parser.add_argument('script', help='path of the script, e.g. validate.py')
    parser.add_argument('args', nargs=argparse.REMAINDER, help='arguments of the script')
    parser.set_defaults(run=run)


def run(args) -> int:
    if not os.path.isfile(args.script):
        raise FileNotFoundError(f'no script at {args.script!r}.')
    folder = os.path.dirname(os.path.realpath(args.script))  # sys.path[0] of `python SCRIPT`
    if _shadows(folder):
        package = os.fspath(Path(timm_rep.__file__).resolve().parents[1])
        command = [sys.executable, '-c', _START, folder, package, args.script, *args.args]
        if os.name == 'nt':  # without exec
            return subprocess.call(command)
        sys.stdout.flush()
        os.execv(sys.executable, command)
    sys.argv = [args.script, *args.args]
    sys.path[0] = folder
    try:
        runpy.run_path(os.path.abspath(args.script), run_name='__main__')
    except Exception:  # an error of the script: show its traceback, as python does
        traceback.print_exc()
        return 1
    return 0


def _shadows(folder: str) -> bool:
    """Whether a folder has a module, such as the timm of a checkout, that is already imported from elsewhere."""
    for path in Path(folder).iterdir():
        if path.stem in sys.modules and path.stem != '__main__':
            spec = PathFinder.find_spec(path.stem, [folder])
            imported = getattr(sys.modules[path.stem], '__file__', None) or ''
            if spec and spec.origin and os.path.realpath(spec.origin) != os.path.realpath(imported):
                return True
    return False
