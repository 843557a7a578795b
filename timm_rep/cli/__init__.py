"""The ``timm-rep`` command."""
import argparse
import sys
from typing import List, Optional

from timm_rep.version import __version__

from . import (
    card,
    convert,
    demo,
    hyper_search,
    models,
    plot_attention_weights,
    plot_scales,
    profile,
    push,
    run,
    weight_select,
)

__all__ = ['main']

_COMMANDS = (
    card, convert, demo, hyper_search, models, plot_attention_weights, plot_scales, profile, push, run, weight_select)


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
    try:
        return args.run(args) or 0
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as e:
        print(f'timm-rep: {e}', file=sys.stderr)
        return 1
    except TypeError as e:
        if 'unexpected keyword argument' not in str(e):
            raise
        print(f'timm-rep: {e}; is it a --model-kwargs?', file=sys.stderr)
        return 1
