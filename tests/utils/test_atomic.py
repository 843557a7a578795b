import os

import pytest
import torch
from safetensors.torch import save_file

from timm_rep.utils.atomic import check_writable, replacing_files


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


def test_check_writable(tmp_path):
    assert check_writable(tmp_path / 'new' / 'folder').is_dir()
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match=r"cannot write to the output folder '.*file'"):
        check_writable(tmp_path / 'file')
    with pytest.raises(OSError, match='cannot write to the output folder'):
        check_writable(tmp_path / 'file' / 'below')
