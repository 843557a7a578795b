"""Writing files so that a failure leaves the old ones intact."""
import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Iterator, Union

__all__ = ['check_writable', 'replacing_files']


def check_writable(folder: Union[str, os.PathLike]) -> Path:
    """Create a folder if need be and make sure that files can be written there, before any long work.

    Raises:
        OSError: They cannot; the message names the folder and why.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise OSError(f'cannot write to the output folder {str(folder)!r}: {e.strerror or e}') from e
    return folder


@contextlib.contextmanager
def replacing_files(folder: Union[str, os.PathLike]) -> Iterator[Path]:
    """A temporary folder whose files move into ``folder`` at the end, each in one step, replacing those of its name.

    They are for whom a file that is opened here is for: safetensors writes for the owner alone. If the body raises,
    nothing moves.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix='.writing-', dir=folder))
    try:
        yield temporary
        paths = sorted(temporary.iterdir())
        with open(temporary / '.mode', 'w') as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        for path in paths:
            if path.is_file():
                path.chmod(mode)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
