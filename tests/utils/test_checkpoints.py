import argparse

import pytest
import torch
from safetensors.torch import load_file

from timm_rep.utils.checkpoints import has_moving_average, write_checkpoint, write_safetensors


@pytest.fixture
def full_disk():
    """Files cannot grow beyond 1,000 bytes, as on a full disk."""
    resource = pytest.importorskip('resource')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize('write,name', [(write_safetensors, 'x.safetensors'), (write_checkpoint, 'x.pth')])
def test_a_full_disk_is_an_os_error(full_disk, tmp_path, write, name):
    with pytest.raises(OSError, match=f"cannot write '{name}'"):
        write({'x': torch.zeros(10000)}, tmp_path / name)


def test_tensors_need_not_be_contiguous(tmp_path):
    x = torch.arange(6.).view(2, 3).t()
    write_safetensors({'x': x}, tmp_path / 'x.safetensors')
    assert torch.equal(load_file(tmp_path / 'x.safetensors')['x'], x)


def test_moving_average(tmp_path):
    path = tmp_path / 'c.pth.tar'
    for extra, expected in ({}, False), ({'state_dict_ema': {}}, True), ({'model_ema': None}, False):
        torch.save({'state_dict': {}, 'args': argparse.Namespace(lr=.1), **extra}, path)
        assert has_moving_average(path) == expected
    path.write_bytes(b'junk')
    with pytest.raises(RuntimeError, match=r"Cannot read '.*c\.pth\.tar'"):
        has_moving_average(path)
