"""Shared by the commands that draw."""
import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from timm_rep.utils.atomic import replacing_files

from ._arguments import check_output_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_picture(parser: argparse.ArgumentParser, default: str) -> None:
    """Add --output, the file of the picture."""
    parser.add_argument(
        '-o', '--output', default=default, metavar='FILE',
        help='.png, .svg or .pdf file to write (%(default)s in the current directory)')


def check_matplotlib(command: str) -> None:
    """Check, before any work, that matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f'{command} requires matplotlib: pip install matplotlib.') from e


def check_picture(output: str, command: str) -> Path:
    """Check, before any work, that a picture can be written."""
    check_matplotlib(command)
    check_output_file(output, '.png', '.svg', '.pdf')
    return Path(output)


def save_picture(figure: 'Figure', path: Path) -> None:
    """Write a matplotlib Figure to a file and print its absolute path."""
    with replacing_files(path.parent) as draft:
        figure.savefig(draft / path.name, dpi=150)
    print(f'Picture: {path.resolve()}')
