import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from timm_rep.utils import atomic
from timm_rep.utils.atomic import check_writable, locking_folder, recover, replacing_files

OLD, NEW = {'a': 'old', 'b': 'old', 'config.json': 'old'}, {'a': 'new', 'config.json': 'new', 'z': 'new'}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'folder').mkdir()
    for name, text in OLD.items():
        (tmp_path / 'folder' / name).write_text(text)
    return tmp_path / 'folder'


def write(folder, copy=False, kill_in=None):
    """Replace OLD by NEW; 'b' stays unless the temporary folder is a copy."""
    with replacing_files(folder, copy) as draft:
        for name, text in NEW.items():
            (draft / name).write_text(text)
        if copy:
            (draft / 'b').unlink()
        if kill_in == 'body':
            (draft / 'leftover').write_text('half')
            os.kill(os.getpid(), signal.SIGKILL)


def after(copy):
    return NEW if copy else {**NEW, 'b': 'old'}


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def killed(body):
    """Run a function in a process that is killed in it."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            body()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs processes that can be killed')


@pytest.mark.parametrize('copy', [False, True])
def test_files_are_replaced_at_the_end(folder, copy):
    with replacing_files(folder, copy) as draft:
        assert contents(draft) == (OLD if copy else {})
        assert not copy or draft.name == 'folder'
        (draft / 'a').write_text('half')
        assert contents(folder).items() >= OLD.items()
    write(folder, copy)
    assert contents(folder) == after(copy)
    assert sorted(os.listdir(folder)) == sorted(after(copy))


@pytest.mark.parametrize('copy', [False, True])
def test_a_failed_write_leaves_the_old_files(folder, copy):
    def fail():
        with replacing_files(folder, copy) as draft:
            (draft / 'a').write_text('half')
            (draft / 'missing').read_text()

    with pytest.raises(FileNotFoundError) as error:  # the message names the folder of the caller
        fail()
    assert str(error.value).endswith(f"'{folder / 'missing'}'")
    assert contents(folder) == OLD
    assert sorted(os.listdir(folder)) == sorted(OLD)


def test_a_folder_in_the_place_of_a_file_is_refused_before_any_file_moves(folder):
    (folder / 'z').mkdir()
    with pytest.raises(FileExistsError, match="z'"):
        write(folder)
    assert contents(folder) == OLD


def test_a_folder_in_the_place_of_an_outdated_file_is_refused_too(folder):
    (folder / 'z').mkdir()
    with pytest.raises(FileExistsError, match="z'"), replacing_files(folder, outdated=[folder / 'z']) as draft:
        (draft / 'new').write_text('new')
    assert contents(folder) == OLD
    (folder / 'z').rmdir()
    with replacing_files(folder, outdated=[folder / 'z']) as draft:
        (draft / 'new').write_text('new')
    assert contents(folder) == {**OLD, 'new': 'new'}


def test_folders_are_replaced_as_a_whole(folder):
    for text in 'one', 'two':
        with replacing_files(folder) as draft:
            (draft / 'sub').mkdir()
            (draft / 'sub' / text).write_text(text)
    assert contents(folder / 'sub') == {'two': 'two'}


@needs_fork
@pytest.mark.parametrize('copy', [False, True])
@pytest.mark.parametrize('moves', range(5))
def test_killed_while_files_move(folder, monkeypatch, copy, moves):
    """Whichever file is the next to move, :func:`recover` gives all new ones."""
    replace, done = os.replace, []

    def replace_or_die(*args):
        if len(done) == moves:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(replace(*args))

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', replace_or_die)
        killed(lambda: write(folder, copy))
    if moves < len(NEW):
        assert contents(folder)['config.json'] == 'old'  # it is the last, since it has the hashes of the others
        assert recover(folder)
    assert not recover(folder)
    assert contents(folder) == after(copy)


@needs_fork
@pytest.mark.parametrize('copy', [False, True])
def test_killed_before_the_commit(folder, copy):
    killed(lambda: write(folder, copy, kill_in='body'))
    assert not recover(folder)
    assert contents(folder).items() >= OLD.items()
    write(folder, copy)
    assert contents(folder) == after(copy)
    assert sorted(os.listdir(folder)) == sorted(after(copy))


@needs_fork
def test_the_next_write_finishes_the_one_before(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(atomic, '_finish', lambda folder: (folder / '.written').exists() and os._exit(1))
        killed(lambda: write(folder))
    with replacing_files(folder, copy=True) as draft:
        assert contents(draft) == after(copy=False)


def test_outdated_files_leave_in_the_same_move(folder, monkeypatch):
    """Outdated files leave at the end, not before, and files that are written stay."""
    outdated = folder / 'b', folder / 'c', folder / 'none'
    before = contents(folder)
    for error in ValueError, None:
        (folder / 'c').write_text('old')
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            with replacing_files(folder, outdated=outdated) as draft:
                (draft / 'c').write_text('new')
                if error:
                    raise error
        expected = {**before, 'c': 'old'} if error else {**{k: v for k, v in before.items() if k != 'b'}, 'c': 'new'}
        assert contents(folder) == expected


@pytest.mark.skipif(os.name == 'nt', reason='there are no such modes')
@pytest.mark.parametrize('umask', [0o022, 0o002, 0o077])
def test_permissions_follow_the_umask(tmp_path, umask):
    """Also where a library writes for the owner alone."""
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


def test_links_stay(folder, tmp_path):
    """Links stay links, wherever they lead; a folder that is written replaces one."""
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'file').write_text('other')
    for name, target in ('link', 'a'), ('data', '../other'), ('nowhere', 'nothing'):
        (folder / name).symlink_to(target)
    with replacing_files(folder, copy=True) as draft:
        assert contents(draft) == {**OLD, 'link': 'old'}
        assert (draft / 'link').is_symlink()
        (draft / 'a').write_text('new')
    assert (folder / 'link').read_text() == 'new'
    assert {name: os.readlink(folder / name) for name in ('link', 'data', 'nowhere')} == {
        'link': 'a', 'data': '../other', 'nowhere': 'nothing'}
    with replacing_files(folder) as draft:
        (draft / 'data').mkdir()
    assert not (folder / 'data').is_symlink()
    assert (tmp_path / 'other' / 'file').read_text() == 'other'


@pytest.mark.skipif(os.name == 'nt', reason='an open file cannot be replaced there')
def test_files_that_the_body_leaves_alone_stay(folder):
    """They keep their modes and what is written to them meanwhile; a file written again with its content is new."""
    for name in OLD:
        (folder / name).chmod(0o700)
    with open(folder / 'b', 'a') as log, replacing_files(folder, copy=True) as draft:
        (draft / 'a').write_text('old')
        (draft / 'config.json').write_text('new')
        log.write(' and more')
    assert contents(folder) == {'a': 'old', 'b': 'old and more', 'config.json': 'new'}
    assert {name: (folder / name).stat().st_mode & 0o100 for name in OLD} == {'a': 0, 'b': 0o100, 'config.json': 0}


@needs_fork
def test_one_process_at_a_time(folder):
    """A second process waits, or is refused; files can be replaced in a locked folder."""
    def second():
        try:
            with locking_folder(folder, wait=False):
                pass
        except BlockingIOError as e:
            os._exit(3 if str(folder) in str(e) else 4)
        os._exit(0)

    def status(body):
        pid = os.fork()
        if not pid:
            body()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with locking_folder(folder):
        assert status(second) == 3
        write(folder)
        assert contents(folder).items() >= NEW.items()
    assert status(second) == 0
    assert sorted(os.listdir(folder)) == sorted(after(copy=False))


@needs_fork
def test_a_process_that_waits_gets_the_lock(folder, tmp_path):
    """The lock is not on the file that the previous process removes."""
    pid = os.fork()
    if not pid:
        while not (tmp_path / 'is taken').exists():
            time.sleep(.01)
        (tmp_path / 'waits').touch()
        with locking_folder(folder):
            (tmp_path / 'has it').touch()
            while not (tmp_path / 'end').exists():
                time.sleep(.01)
        os._exit(0)
    try:
        with locking_folder(folder):
            (tmp_path / 'is taken').touch()
            while not (tmp_path / 'waits').exists():
                time.sleep(.01)
            time.sleep(.3)  # until it waits
        while not (tmp_path / 'has it').exists():
            time.sleep(.01)
        with pytest.raises(BlockingIOError), locking_folder(folder, wait=False):
            pass
    finally:
        (tmp_path / 'end').touch()
        os.waitpid(pid, 0)


def test_check_writable(tmp_path):
    assert check_writable(tmp_path / 'new' / 'folder') == tmp_path / 'new' / 'folder'
    assert not list(tmp_path.iterdir())  # it only checks
    assert check_writable(tmp_path).is_dir()
    (tmp_path / 'file').write_text('')
    for name in 'file', 'file/below':
        with pytest.raises(OSError, match='file'):
            check_writable(tmp_path / name)


@pytest.mark.parametrize('times', [1, 5])
def test_check_writable_beside_another_process(tmp_path, monkeypatch, times):
    """The other one creates the same folder to check it, and removes it again."""
    folder, opened = tmp_path / 'new' / 'folder', []
    temporary_file = tempfile.TemporaryFile

    def other_first(dir):
        opened.append(dir)
        if len(opened) <= times:
            folder.rmdir()
            folder.parent.rmdir()
        return temporary_file(dir=dir)

    monkeypatch.setattr(tempfile, 'TemporaryFile', other_first)
    assert check_writable(folder) == folder
    assert len(opened) == times + 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('entering', [locking_folder, replacing_files])
def test_a_failure_leaves_no_new_folder(tmp_path, entering):
    """Folders that existed before, or hold a file, stay."""
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


@pytest.mark.parametrize('entering', [locking_folder, replacing_files])
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
