"""Pictures that commands write."""
from pathlib import Path

from timm_rep.utils.atomic import check_writable, replacing_files


def check_picture(output: str, command: str) -> Path:
    """The path of ``--output``, if a picture can be written there; before the work whose picture it is.

    Raises:
        ValueError: It is no name of a picture.
        ModuleNotFoundError: There is no matplotlib.
        OSError: Its folder cannot be written.
    """
    path = Path(output)
    if path.suffix not in ('.png', '.svg', '.pdf') or path.is_dir():
        raise ValueError(f'--output is a .png, .svg or .pdf file to write, got {output!r}.')
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{command} needs matplotlib: pip install 'timm-rep[plot]'.") from e
    check_writable(path.parent)
    return path


def save_picture(figure, path: Path) -> None:
    with replacing_files(path.parent) as temporary:
        figure.savefig(temporary / path.name, dpi=150)
    print(f'Picture: {path}')
