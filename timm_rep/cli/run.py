"""``timm-rep run SCRIPT``: run one of timm's scripts, unmodified, with this package's models registered."""
import argparse
import os
import runpy
import sys
import traceback

import timm_rep  # noqa: F401, registers the models


def add_parser(commands) -> None:
    parser = commands.add_parser(
        'run', help="run one of timm's scripts (validate.py, benchmark.py, ...) with this package's models registered")
    parser.add_argument('script', help='path of the script, e.g. validate.py')
    parser.add_argument('args', nargs=argparse.REMAINDER, help='arguments of the script')
    parser.set_defaults(run=run)


def run(args) -> int:
    if not os.path.isfile(args.script):
        raise FileNotFoundError(f'no script at {args.script!r}.')
    sys.argv = [args.script, *args.args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))  # as in `python SCRIPT`
    try:
        runpy.run_path(args.script, run_name='__main__')
    except Exception:  # an error of the script: show its traceback, as python does
        traceback.print_exc()
        return 1
    return 0
