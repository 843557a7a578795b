"""Atomic updates of a folder: even after a failure or a killed process it holds either all old or all new files.

New files are written to a draft inside their folder. Renaming the complete draft is the commit: from then on the files
move to their places, and :func:`recover` finishes the moves of a process that was killed meanwhile.
"""
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Iterable, Iterator, List, Tuple

from filelock import FileLock, Timeout

from .files import StrPath

_DRAFT = '.writing'
_PENDING = '.written'
_REMOVED = '.removed.json'


def check_writable(folder: StrPath) -> Path:
    """Check that a folder exists or can be created, and that files can be written there, before any long work."""
    folder = Path(folder)
    missing = _missing(folder)
    try:
        for retries in range(20, -1, -1):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    break
            except (FileExistsError, FileNotFoundError):  # another process has just removed the folder it created
                if not retries:
                    raise
    except OSError as e:
        raise OSError(f'cannot write to the output folder {str(folder)!r}: {e.strerror or e}') from e
    finally:
        _remove_empty(missing)
    return folder


@contextlib.contextmanager
def locking_folder(folder: StrPath, wait: bool = True) -> Iterator[Path]:
    """Hold the lock of a folder, which one process has at a time; without ``wait``, BlockingIOError if another has it.

    The folder is created if necessary, and removed again if the body raises and leaves it empty. Files can still be
    replaced with :func:`replacing_files`, which has a lock of its own.
    """
    folder = Path(folder)
    with _removing_if_raised(folder), _locked(folder, '.lock', wait):
        yield folder


@contextlib.contextmanager
def replacing_files(
        folder: StrPath,
        copy: bool = False,
        outdated: Iterable[Path] = (),
) -> Iterator[Path]:
    """A temporary folder whose files move into ``folder`` at the end and replace files of the same name.

    If the body raises, ``folder`` stays as it was, and the message names it instead of the temporary folder. If the
    process is killed, ``folder`` has all old files or, after :func:`recover`, all new ones. The files get the
    permissions of a file that is opened here: safetensors writes for the owner alone.

    Args:
        folder: Folder, created if it does not exist, and removed again if the body raises and leaves it empty.
        copy: Start from a copy of the folder's files, except hidden ones, subfolders and links to these. Files that
            the body removes from the copy are removed, those that it leaves alone stay as they are. The temporary
            folder has the name of the folder.
        outdated: Files of ``folder`` that are removed in the same move, unless they are written.
    """
    folder = Path(folder)
    with _removing_if_raised(folder), _locked(folder, '.writing.lock'):
        _finish(folder)
        shutil.rmtree(folder / _DRAFT, ignore_errors=True)  # left by a killed process, since this one has the lock
        draft = folder / _DRAFT / (folder.resolve().name if copy else '')
        draft.mkdir(parents=True)
        try:
            copied = {}
            for path in folder.iterdir() if copy else ():
                if not path.name.startswith('.') and path.is_file():
                    copied[path.name] = _state(Path(shutil.copy2(path, draft, follow_symlinks=False)))
            try:
                yield draft
            except Exception as e:
                _rename_in_message(e, os.fspath(draft), os.fspath(folder))
                raise
            written = {path.name: path.is_dir() for path in draft.iterdir()}
            removed = sorted({*copied, *(path.name for path in outdated)} - set(written))
            for name in [name for name in copied if name in written and _state(draft / name) == copied[name]]:
                (draft / name).unlink()  # others may write to it meanwhile, or have opened it
                del written[name]
            for name, is_folder in {**dict.fromkeys(removed, False), **written}.items():
                target = folder / name
                if target.exists() and target.is_dir() != is_folder:
                    kind = 'folder' if target.is_dir() else 'file'
                    raise FileExistsError(f'{str(target)!r} must not be a {kind}: remove it.')
            _set_modes(draft)
            if removed:
                (draft / _REMOVED).write_text(json.dumps(removed), encoding='utf-8')
            draft.rename(folder / _PENDING)
            _finish(folder)
        finally:
            shutil.rmtree(folder / _DRAFT, ignore_errors=True)


def _state(path: Path) -> Tuple[int, int, int]:
    """What changes when a file is written or replaced."""
    stat = path.lstat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing but what a process that was killed while it wrote left there."""
    return {path.name for path in folder.iterdir()} <= {_DRAFT, '.writing.lock', '.lock'}


def recover(folder: StrPath) -> bool:
    """Finish the moves of a process that was killed at the end of :func:`replacing_files`; whether there was one."""
    folder = Path(folder)
    if not (folder / _PENDING).is_dir():
        return False
    with _locked(folder, '.writing.lock'):
        _finish(folder)
    return True


def _finish(folder: Path) -> None:
    """Move the pending files to their places; repeated after an interruption, it gives the same result."""
    pending = folder / _PENDING
    if not pending.is_dir():
        return
    # config.json is last, since it has the hashes of the other files
    for path in sorted(pending.iterdir(), key=lambda path: (path.name == 'config.json', path.name)):
        if path.name == _REMOVED:
            continue
        target = folder / path.name
        if target.is_symlink():
            target.unlink()
        elif path.is_dir() and target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    if (pending / _REMOVED).is_file():
        for name in json.loads((pending / _REMOVED).read_text(encoding='utf-8')):
            (folder / name).unlink(missing_ok=True)
    shutil.rmtree(pending)


def _rename_in_message(e: Exception, old: str, new: str) -> None:
    """Replace the folder that an error names, including in the file names of an OSError, which are not in its args."""
    e.args = tuple(arg.replace(old, new) if isinstance(arg, str) else arg for arg in e.args)
    for name in 'filename', 'filename2':
        if isinstance(getattr(e, name, None), str):
            setattr(e, name, getattr(e, name).replace(old, new))


@contextlib.contextmanager
def _locked(folder: Path, name: str, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file that exists as long as it is locked."""
    lock = FileLock(folder / name)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=-1 if wait else 0)
            break
        except Timeout as e:
            raise BlockingIOError(f'Another process is using {str(folder)!r}: try again when it is done.') from e
        except FileNotFoundError:  # the process that created the folder has just removed it
            continue
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file
            (folder / name).unlink()
        lock.release()


def _missing(folder: Path) -> List[Path]:
    """The folder and its parents that do not exist, from the innermost."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: List[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not created, or used by another process meanwhile
            folder.rmdir()


@contextlib.contextmanager
def _removing_if_raised(folder: Path) -> Iterator[None]:
    """Remove a folder and its parents if the body raises: those that it created and left empty."""
    missing = _missing(folder)
    try:
        yield
    except BaseException:
        _remove_empty(missing)
        raise


def _set_modes(folder: Path) -> None:
    """Give the files of a folder the permissions of a new file."""
    paths = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    probe = folder / '.mode'
    with open(probe, 'w') as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
    probe.unlink()
    for path in paths:
        path.chmod(mode)
