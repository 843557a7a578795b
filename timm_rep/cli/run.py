"""``timm-rep run SCRIPT``: run one of timm's scripts, unmodified, with this package's models registered."""
import argparse
import os
import subprocess
import sys
import traceback
import types
from importlib.machinery import PathFinder
from pathlib import Path

import timm_rep

# program of a new interpreter: its arguments are the folders of the script and of this package, then the script's own
_START = '''
import sys
folder, package, *sys.argv = sys.argv[1:]
sys.path[:] = [folder, *(path for path in sys.path if path), package]
from timm_rep.cli.run import run_script
run_script(sys.argv[0])
'''


def add_parser(commands) -> None:
    parser = commands.add_parser(
        'run', help="run one of timm's scripts (validate.py, benchmark.py, ...) with this package's models registered")
    parser.add_argument('script', help='path of the script, e.g. validate.py')
    parser.add_argument('args', nargs=argparse.REMAINDER, help='arguments of the script')
    parser.set_defaults(run=run)


def run(args) -> int:
    if not os.path.isfile(args.script):
        raise FileNotFoundError(f'Expected a script, but {args.script!r} does not exist.')
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
        run_script(args.script)
    except Exception:  # an error of the script, shown as python does
        traceback.print_exc()
        return 1
    return 0


def run_script(script: str) -> None:
    """Run a script as the module ``__main__``, with ``__file__`` and ``sys.argv`` as python sets them, unlike runpy."""
    main = types.ModuleType('__main__')
    main.__file__ = os.path.abspath(script)
    previous, sys.modules['__main__'] = sys.modules['__main__'], main
    try:
        exec(compile(Path(script).read_bytes(), main.__file__, 'exec'), vars(main))
    finally:
        sys.modules['__main__'] = previous


def _shadows(folder: str) -> bool:
    """Whether a folder has a module, such as timm in a checkout, that is already imported from elsewhere."""
    for path in Path(folder).iterdir():
        if path.stem in sys.modules and path.stem != '__main__':
            spec = PathFinder.find_spec(path.stem, [folder])
            imported = getattr(sys.modules[path.stem], '__file__', None) or ''
            if spec and spec.origin and os.path.realpath(spec.origin) != os.path.realpath(imported):
                return True
    return False
