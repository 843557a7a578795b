import os

import pytest

from timm_rep.atomic import check_writable, replacing_files


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


def test_check_writable(tmp_path):
    assert check_writable(tmp_path / 'new' / 'folder').is_dir()
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match=r"cannot write to the output folder '.*file'"):
        check_writable(tmp_path / 'file')
    with pytest.raises(OSError, match='cannot write to the output folder'):
        check_writable(tmp_path / 'file' / 'below')
