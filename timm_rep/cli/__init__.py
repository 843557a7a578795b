"""The ``timm-rep`` command.

Each command is a module with ``add_parser(commands)``, which adds its arguments and ends with
``parser.set_defaults(run=run)``, and ``run(args)``, which calls the public API and returns the exit status, 0 if None.
``args`` has three reserved names: ``run``, ``command`` (the command line as text) and ``traceback``. A command may set
``args.interrupt_hint``, which is printed after an interruption. User errors are printed as one line without
a traceback; validate arguments before loading models.
"""
import argparse
import shlex
import sys
import traceback
from typing import List, Optional

from safetensors import SafetensorError

from timm_rep.utils.network import HTTP_ERROR
from timm_rep.version import __version__

from . import (
    accelerate,
    card,
    convert,
    demo,
    export,
    hyper_search,
    models,
    plot_attention_weights,
    plot_scales,
    profile,
    push,
    quantize,
    run,
    verify,
    weight_select,
)

__all__ = ['main']

_COMMANDS = (
    accelerate, card, convert, demo, export, hyper_search, models, plot_attention_weights, plot_scales, profile, push,
    quantize, run, verify, weight_select)
# printed as one line, unless --traceback is given; any other type is a bug in this package and shows its traceback
_ERRORS = (OSError, ValueError, RuntimeError, ImportError, OverflowError, SafetensorError, TypeError, HTTP_ERROR)


def main(argv: Optional[List[str]] = None) -> int:
    """Run ``timm-rep`` with arguments, by default ``sys.argv[1:]``, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog='timm-rep', description='Structural and gradient re-parameterization for timm models.')
    parser.add_argument('--version', action='version', version=f'timm-rep {__version__}')
    commands = parser.add_subparsers(title='commands', metavar='COMMAND', required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    for subparser in commands.choices.values():
        subparser.add_argument('--traceback', action='store_true', help='show where in the code an error occurred')
    args = parser.parse_args(argv)
    line = shlex.join(['timm-rep', *(sys.argv[1:] if argv is None else argv)])
    args.command = line.encode('utf-8', 'backslashreplace').decode()  # names of files may be other bytes
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        _print_error(f'interrupted. {getattr(args, "interrupt_hint", "")}')
        return 130  # as a shell reports SIGINT
    except _ERRORS as e:
        if args.traceback:
            traceback.print_exc()
        _print_error(str(e) or type(e).__name__)
    return 1


def _print_error(message: str) -> None:
    if 'Original Traceback' in message:  # from a data loading process; the last line is the error
        message = message.strip().splitlines()[-1]
    message = ' '.join(message.split())
    # names of layers and datasets come from files and may hold terminal escapes
    message = ''.join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    print(f'timm-rep: {message}', file=sys.stderr)
