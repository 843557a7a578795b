"""Writing files and folders so that a failure, or the end of the process, leaves the old ones intact."""
import contextlib
import ctypes
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, List, Union

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ['check_writable', 'locking_folder', 'replacing_files', 'replacing_folder']

_PREFIX = '.writing-'
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h


def check_writable(folder: Union[str, os.PathLike]) -> Path:
    """Check that a folder exists or can be created, and that files can be written there, before any long work.

    Raises:
        OSError: They cannot; the message names the folder and why.
    """
    folder = Path(folder)
    missing = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise OSError(f'cannot write to the output folder {str(folder)!r}: {e.strerror or e}') from e
    finally:
        _remove_unused(missing)
    return folder


@contextlib.contextmanager
def locking_folder(folder: Union[str, os.PathLike], wait: bool = True) -> Iterator[Path]:
    """Hold the lock of a folder, which one process has at a time; it is released when the process ends.

    Where the file system has no locks, nothing is locked.

    Args:
        folder: Folder, which is created if it does not exist, and removed again if the body raises and leaves it empty.
        wait: Wait for another process that holds the lock.

    Raises:
        BlockingIOError: Another process holds the lock, and ``wait`` is False.
    """
    folder = Path(folder)
    with _removing_if_raised(folder):
        while True:
            try:
                lock = _create_and_lock(folder)
                break
            except BlockingIOError as e:
                if not wait:
                    raise BlockingIOError(
                        f'Another process is using {str(folder)!r}: try again when it is done.') from e
                time.sleep(.1)
        try:
            yield folder
        finally:
            _unlock(lock)


@contextlib.contextmanager
def replacing_files(folder: Union[str, os.PathLike]) -> Iterator[Path]:
    """A temporary folder whose files move into ``folder`` at the end, each in one step, replacing those of its name.

    They get the permissions of a file that is opened here: safetensors writes for the owner alone. If the body raises,
    nothing moves, and ``folder`` is removed if it is empty and was created here.
    """
    folder = Path(folder)
    with _removing_if_raised(folder), _temporary_folder(folder, _PREFIX) as temporary:
        yield temporary
        _set_modes(temporary)
        for path in sorted(temporary.iterdir()):
            os.replace(path, folder / path.name)


@contextlib.contextmanager
def replacing_folder(folder: Union[str, os.PathLike]) -> Iterator[Path]:
    """A copy of ``folder`` to write to, of the same name, which takes its place at the end, in one step.

    If the body raises, the folder is as it was, and the message names it instead of the copy. If the process is killed,
    it is the old one or the new one; where the file system cannot exchange two folders (outside Linux) it may be
    missing, until the next call puts it back.

    Raises:
        BlockingIOError: Another process is replacing the folder.
    """
    folder = Path(folder).resolve()
    prefix = f'{_PREFIX}{folder.name}-'
    _restore(folder, prefix)
    with _removing_if_raised(folder):
        try:
            lock = _create_and_lock(folder)
        except BlockingIOError as e:
            raise BlockingIOError(f'Another process is writing to {str(folder)!r}: try again when it is done.') from e
        try:
            with _temporary_folder(folder.parent, prefix) as temporary:
                draft = temporary / folder.name
                shutil.copytree(folder, draft, symlinks=True, ignore=shutil.ignore_patterns(f'{_PREFIX}*'))
                try:
                    yield draft
                except Exception as e:  # its message is to name the folder, not the draft, which is about to be removed
                    e.args = tuple(_renamed(arg, draft, folder) for arg in e.args)
                    for name in 'filename', 'filename2':  # of an OSError, which are not in args
                        if getattr(e, name, None) is not None:
                            setattr(e, name, _renamed(getattr(e, name), draft, folder))
                    raise
                _set_modes(draft)
                _exchange(draft, folder)
        finally:
            _unlock(lock)


def _renamed(arg: Any, draft: Path, folder: Path) -> Any:
    return arg.replace(os.fspath(draft), os.fspath(folder)) if isinstance(arg, str) else arg


def _restore(folder: Path, prefix: str) -> None:
    """Put a folder back that was moved away by a process that was killed before it moved the new one there."""
    for old in sorted(folder.parent.glob(f'{prefix}*/{folder.name}.old')) if not folder.exists() else ():
        old.rename(folder)
        return


def _exchange(new: Path, old: Path) -> None:
    exchange = getattr(ctypes.CDLL(None), 'renameat2', None) if os.name == 'posix' else None
    if not exchange or exchange(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE):
        old.rename(new.with_name(f'{new.name}.old'))
        new.rename(old)


def _missing(folder: Path) -> List[Path]:
    """The folder and those above it that do not exist, from the innermost."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_unused(folders: List[Path]) -> None:
    """Remove those folders that are empty and that no process has locked."""
    for folder in folders:
        with contextlib.suppress(OSError):  # not created, or used by another process meanwhile
            lock = _lock(folder)
            try:
                folder.rmdir()
            finally:
                _unlock(lock)


@contextlib.contextmanager
def _removing_if_raised(folder: Path) -> Iterator[None]:
    """Remove a folder, and those above it, if the body raises: only what it created and left empty."""
    missing = _missing(folder)
    try:
        yield
    except BaseException:
        _remove_unused(missing)
        raise


@contextlib.contextmanager
def _temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder, locked while it is in use; those that no process has locked, because it was killed, are removed."""
    for leftover in parent.glob(f'{prefix}*') if fcntl else ():
        with contextlib.suppress(OSError):
            lock = _lock(leftover)
            if lock >= 0:
                shutil.rmtree(leftover, ignore_errors=True)
            _unlock(lock)
    lock = None
    while lock is None:
        parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except FileNotFoundError:
            if parent.exists():
                raise
            continue  # the process that created the parent has just removed it
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # just taken for a leftover
            lock = _lock(temporary)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _unlock(lock)


def _lock(folder: Path) -> int:
    """Lock a folder until :func:`_unlock`, or until the process ends; -1 where the file system has no locks.

    Raises:
        BlockingIOError: It is locked, or was replaced in the meantime.
    """
    if fcntl is None:
        return -1
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(folder)):
            raise BlockingIOError(f'{str(folder)!r} was replaced')
    except OSError as e:
        os.close(lock)
        if isinstance(e, (BlockingIOError, FileNotFoundError)):
            raise
        return -1
    return lock


def _create_and_lock(folder: Path) -> int:
    """Create a folder, if it does not exist, and lock it, as :func:`_lock`."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the process that created it has just removed it
            return _lock(folder)


def _unlock(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def _set_modes(folder: Path) -> None:
    """Give the files of a folder the permissions of a new file."""
    paths = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    probe = folder / '.mode'
    with open(probe, 'w') as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
    probe.unlink()
    for path in paths:
        path.chmod(mode)
