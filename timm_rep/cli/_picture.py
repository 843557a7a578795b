"""What commands that draw need: matplotlib, and an ``--output``."""
from pathlib import Path

from timm_rep.utils.atomic import check_writable, replacing_files


def check_matplotlib(command: str) -> None:
    """Check, before any work is done, that matplotlib is installed.

    Args:
        command: Name of the command, for the error message.

    Raises:
        ModuleNotFoundError: It is not.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{command} needs matplotlib: pip install matplotlib.") from e


def check_picture(output: str, command: str) -> Path:
    """Check, before any work is done, that a picture can be written to ``--output``.

    Args:
        output: Value of ``--output``.
        command: Name of the command, for the error message.

    Returns:
        The path.

    Raises:
        ValueError: ``output`` is not the name of a .png, .svg or .pdf file.
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The folder is not writable.
    """
    path = Path(output)
    if path.suffix not in ('.png', '.svg', '.pdf') or path.is_dir():
        raise ValueError(f'--output is a .png, .svg or .pdf file to write, got {output!r}.')
    check_matplotlib(command)
    check_writable(path.parent)
    return path


def save_picture(figure, path: Path) -> None:
    """Write a matplotlib Figure to a file and print its absolute path."""
    with replacing_files(path.parent) as temporary:
        figure.savefig(temporary / path.name, dpi=150)
    print(f'Picture: {path.resolve()}')
