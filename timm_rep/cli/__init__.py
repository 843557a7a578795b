"""The ``timm-rep`` command."""
import argparse
import shlex
import sys
from typing import List, Optional

from safetensors import SafetensorError

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


def main(argv: Optional[List[str]] = None) -> int:
    """Run ``timm-rep``.

    Args:
        argv: Command-line arguments. Default: those of the process.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(
        prog='timm-rep', description='Structural and gradient re-parameterization for timm models.')
    parser.add_argument('--version', action='version', version=f'timm-rep {__version__}')
    commands = parser.add_subparsers(title='commands', metavar='COMMAND', required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(argv)
    args.command = shlex.join(['timm-rep', *(sys.argv[1:] if argv is None else argv)])
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        hint = getattr(args, 'interrupt_hint', '')
        _print_error(f'interrupted. {hint}' if hint else 'interrupted.')
        return 130  # as a shell reports SIGINT
    except (OSError, ValueError, RuntimeError, ImportError, OverflowError, SafetensorError) as e:
        _print_error(str(e))
    except TypeError as e:
        _print_error(f'{e}; is it a --model-kwargs?' if 'unexpected keyword argument' in str(e) else str(e))
    return 1


def _print_error(message: str) -> None:
    if 'Original Traceback' in message:  # of a process that loads images, before its error
        message = message.strip().splitlines()[-1]
    # names of layers and data sets come from files, and may hold terminal escapes
    message = ''.join(c if c.isprintable() or c in '\n\t' else repr(c)[1:-1] for c in message)
    print(f'timm-rep: {message}', file=sys.stderr)
