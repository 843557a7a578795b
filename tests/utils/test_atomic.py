import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from timm_rep.utils import atomic
from timm_rep.utils.atomic import check_writable, locking_folder, replacing_files, replacing_folder


def test_replacing_files(tmp_path):
    (tmp_path / 'a').write_text('old')
    with replacing_files(tmp_path) as temporary:
        (temporary / 'a').write_text('new')
        (temporary / 'b').write_text('new')
        assert (tmp_path / 'a').read_text() == 'old'
    assert sorted(os.listdir(tmp_path)) == ['a', 'b']
    assert (tmp_path / 'a').read_text() == 'new'


def test_a_failed_write_leaves_the_old_file(tmp_path):
    (tmp_path / 'a').write_text('old')

    def fail():
        with replacing_files(tmp_path) as temporary:
            (temporary / 'a').write_text('half')
            raise OSError('disk full')

    with pytest.raises(OSError, match='disk full'):
        fail()
    assert os.listdir(tmp_path) == ['a']
    assert (tmp_path / 'a').read_text() == 'old'


@pytest.mark.skipif(os.name == 'nt', reason='there are no such modes')
@pytest.mark.parametrize('umask', [0o022, 0o002, 0o077])
def test_who_may_read_them(tmp_path, umask):
    """Whoever may read a file that is opened here, also where a library writes for the owner alone."""
    before = os.umask(umask)
    try:
        with replacing_files(tmp_path) as temporary:
            save_file({'x': torch.ones(1)}, temporary / 'a.safetensors')
            (temporary / 'b').write_text('')
            (temporary / 'b').chmod(0o600)
            (temporary / 'folder').mkdir()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {'a.safetensors': 0o666 & ~umask, 'b': 0o666 & ~umask, 'folder': 0o777 & ~umask}


def killed(body):
    """Run a function in a process that is killed in it."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            body()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def write(folder, replacing=replacing_folder, kill_in=None):
    with replacing(folder) as draft:
        (draft / 'a').write_text('new')
        (draft / 'b').write_text('new')
        if kill_in == 'body':
            os.kill(os.getpid(), signal.SIGKILL)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob('*') if path.is_file()}


OLD, NEW = {'a': 'old', 'c/d': 'kept'}, {'a': 'new', 'b': 'new', 'c/d': 'kept'}


@pytest.fixture
def folder(tmp_path):
    for name, text in OLD.items():
        (tmp_path / 'folder' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'folder' / name).write_text(text)
    return tmp_path / 'folder'


@pytest.mark.parametrize('can_exchange', [True, False])
def test_replacing_folder(folder, monkeypatch, can_exchange):
    """All files at once; other files stay."""
    if not can_exchange:
        monkeypatch.setattr(atomic.ctypes, 'CDLL', lambda name: None)
    with replacing_folder(folder) as draft:
        assert draft.name == 'folder'
        assert contents(draft) == OLD
        (draft / 'a').write_text('new')
        (draft / 'a').chmod(0o600)
        (draft / 'b').write_text('new')
        assert contents(folder) == OLD
    assert contents(folder) == NEW
    assert (folder / 'a').stat().st_mode == (folder / 'b').stat().st_mode
    with replacing_folder(folder.parent / 'other') as draft:
        (draft / 'a').write_text('new')
    assert sorted(os.listdir(folder.parent)) == ['folder', 'other']


def test_a_failed_replacement_leaves_the_old_folder(folder):
    def fail():
        with replacing_folder(folder) as draft:
            (draft / 'a').write_text('half')
            raise OSError('disk full')

    with pytest.raises(OSError, match='disk full'):
        fail()
    assert contents(folder) == OLD
    assert os.listdir(folder.parent) == ['folder']

    def read():
        with replacing_folder(folder) as draft:
            (draft / 'missing').read_text()

    with pytest.raises(FileNotFoundError) as error:  # it names the folder, not the copy
        read()
    assert str(error.value).endswith(f"'{folder / 'missing'}'")


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs processes that can be killed')
def test_killed(folder, monkeypatch):
    """The folder is the old one or the new one; the next run removes what the killed one left."""
    killed(lambda: write(folder, kill_in='body'))
    assert contents(folder) == OLD
    assert len(os.listdir(folder.parent)) == 2
    write(folder)
    assert contents(folder) == NEW
    assert os.listdir(folder.parent) == ['folder']

    # where folders cannot be exchanged: between the two renames
    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(atomic.ctypes, 'CDLL', lambda name: None)
        patch.setattr(Path, 'rename', lambda path, target: (
            os.kill(os.getpid(), signal.SIGKILL) if path != folder else rename(path, target)))
        killed(lambda: write(folder))
    assert not folder.exists()
    with replacing_folder(folder) as draft:
        assert contents(draft) == NEW
    assert os.listdir(folder.parent) == ['folder']


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs processes that can be killed')
def test_leftovers_of_killed_processes(folder):
    """They are removed, and those of a process that is still writing are not."""
    killed(lambda: write(folder, replacing_files, kill_in='body'))
    assert [name for name in os.listdir(folder) if name.startswith('.writing-')]
    with replacing_files(folder) as first:
        (first / 'a').write_text('first')
        write(folder, replacing_files)
        assert [name for name in os.listdir(folder) if name.startswith('.writing-')] == [first.name]
    assert contents(folder) == {**NEW, 'a': 'first'}


@pytest.mark.skipif(os.name == 'nt', reason='no locks')
def test_one_process_at_a_time(folder):
    with replacing_folder(folder) as draft:
        (draft / 'a').write_text('first')
        with pytest.raises(BlockingIOError, match=r"Another process is writing to '.*folder'"):
            write(folder)
    assert contents(folder) == {**OLD, 'a': 'first'}
    write(folder)
    assert contents(folder) == NEW


def test_check_writable(tmp_path):
    assert check_writable(tmp_path / 'new' / 'folder') == tmp_path / 'new' / 'folder'
    assert not list(tmp_path.iterdir())  # it only checks
    assert check_writable(tmp_path).is_dir()
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match=r"cannot write to the output folder '.*file'"):
        check_writable(tmp_path / 'file')
    with pytest.raises(OSError, match='cannot write to the output folder'):
        check_writable(tmp_path / 'file' / 'below')


@pytest.mark.parametrize('entering', [locking_folder, replacing_files, replacing_folder])
def test_a_failure_leaves_no_new_folder(tmp_path, entering):
    """Those that existed before, hold a file, or are locked by another process, stay."""
    (tmp_path / 'old').mkdir()

    def fail(folder, body=lambda: None):
        with entering(folder):
            assert folder.is_dir()
            body()
            raise OSError('disk full')

    new = tmp_path / 'old' / 'new' / 'folder'
    with pytest.raises(OSError, match='disk full'):
        fail(new)
    assert not list((tmp_path / 'old').iterdir())
    with pytest.raises(OSError, match='disk full'):
        fail(tmp_path / 'old')
    with pytest.raises(OSError, match='disk full'):
        fail(new, (new / 'a').touch)
    assert [path.name for path in new.iterdir()] == ['a']
    with entering(tmp_path / 'written'):
        pass
    assert (tmp_path / 'written').is_dir()


@pytest.mark.skipif(os.name == 'nt', reason='no locks')
def test_a_failure_leaves_a_folder_that_another_process_has_locked(tmp_path):
    def fail(folder):
        with replacing_files(folder / 'below'):
            stack.enter_context(locking_folder(folder))
            raise OSError('disk full')

    with contextlib.ExitStack() as stack:
        with pytest.raises(OSError, match='disk full'):
            fail(tmp_path / 'new')
        assert not list((tmp_path / 'new').iterdir())
    assert not check_writable(tmp_path / 'other').exists()


@pytest.mark.parametrize('entering', [locking_folder, replacing_files, replacing_folder])
def test_a_folder_that_another_process_removes_is_created_again(tmp_path, monkeypatch, entering):
    mkdir, removed = Path.mkdir, []

    def remove_once(path, **kwargs):
        mkdir(path, **kwargs)
        if path == tmp_path / 'folder' and not removed:
            removed.append(path.rmdir())

    monkeypatch.setattr(Path, 'mkdir', remove_once)
    with entering(tmp_path / 'folder'):
        pass
    assert removed
    assert (tmp_path / 'folder').is_dir()
