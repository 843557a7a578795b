import argparse
import contextlib
import os
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
from safetensors.torch import load_file

import timm_rep  # noqa: F401  registers the models
from timm_rep.utils.checkpoints import (
    has_moving_average,
    load_checkpoint,
    read_state_dict,
    write_checkpoint,
    write_safetensors,
)


@contextlib.contextmanager
def full_disk():
    """Files cannot grow beyond 1,000 bytes, as on a full disk; that of pytest's own output neither."""
    resource = pytest.importorskip('resource')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize('write,name', [(write_safetensors, 'x.safetensors'), (write_checkpoint, 'x.pth')])
def test_a_full_disk_is_an_os_error(tmp_path, write, name):
    with full_disk(), pytest.raises(OSError, match=f"cannot write '{name}'"):
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
    with pytest.raises(RuntimeError, match=r"Expected a checkpoint .*'.*c\.pth\.tar'"):
        has_moving_average(path)


def test_a_program_is_no_checkpoint(tmp_path):
    """As OpenAI distributes CLIP; torch would advise to load it without weights_only."""
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / 'c.pt')
    with pytest.raises(RuntimeError, match=r"c\.pt' is a TorchScript program") as e:
        read_state_dict(tmp_path / 'c.pt')
    assert 'weights_only' not in str(e.value)


def test_a_missing_file_is_named(tmp_path):
    for read in (read_state_dict, has_moving_average, partial(load_checkpoint, nn.Linear(2, 2))):
        with pytest.raises(FileNotFoundError, match=r"'.*c\.pth'"):
            read(tmp_path / 'c.pth')


def test_a_checkpoint_of_another_model(tmp_path):
    """The file and the keys are named."""
    torch.save({'0.weights': torch.zeros(2, 2)}, tmp_path / 'c.pth')
    with pytest.raises(RuntimeError, match=r'c\.pth.* 1 \(0\.weight\).* 1 \(0\.weights\)'):
        load_checkpoint(nn.Sequential(nn.Linear(2, 2, bias=False)), tmp_path / 'c.pth')


def test_a_checkpoint_of_a_deeper_model(tmp_path):
    """Of many keys, the first are named, also where their shapes differ."""
    deep, wide = (nn.Sequential(*[nn.Linear(2, n)] * 50) for n in (2, 3))
    torch.save(deep.state_dict(), tmp_path / 'c.pth')
    with pytest.raises(RuntimeError, match=r' 98 \(1\.weight, 1\.bias, 2\.weight, \.\.\.\)') as e:
        load_checkpoint(deep[:1], tmp_path / 'c.pth')
    assert len(str(e.value)) < 300 + len(str(tmp_path))
    with pytest.raises(RuntimeError, match=r' 100 \(0\.weight, 0\.bias, 1\.weight, \.\.\.\)'):
        load_checkpoint(wide, tmp_path / 'c.pth')


@pytest.mark.parametrize('name, args, other, folded, advice', [
    ('repa_deit_tiny', dict(img_size=32, embed_dim=24, depth=1, num_heads=3), {}, True, 'with reparameterized=True'),
    ('repopt_vgg_a0', dict(depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8, structure='search'),
     dict(structure='target'), False, "with structure='search'")])
def test_a_checkpoint_of_another_structure(tmp_path, name, args, other, folded, advice):
    """The message says how to create the model of the checkpoint."""
    model, other = timm.create_model(name, **args), timm.create_model(name, **{**args, **other})
    torch.save((model.eval().reparameterize() if folded else model).state_dict(), tmp_path / 'c.pth')
    with pytest.raises(RuntimeError, match=rf'c\.pth.* structure .*{advice}'):
        load_checkpoint(other, tmp_path / 'c.pth')


@pytest.mark.parametrize('make', [lambda p: p.mkdir(), lambda p: p.symlink_to(p), lambda p: os.mkfifo(p)])
def test_what_is_not_a_regular_file_is_refused(tmp_path, make):
    for name in 'c.pth', 'c.safetensors':
        make(tmp_path / name)
        with pytest.raises(FileNotFoundError, match=f'{name}.*not a regular file'):
            read_state_dict(tmp_path / name)


def test_tensors_that_share_memory(tmp_path):
    """Tied weights, and slices of a larger tensor."""
    x = torch.randn(4, 3)
    tensors = {'a': x, 'tied': x, 'row': x[1], 'transposed': x.t(), 'empty': x[:0]}
    write_safetensors(tensors, tmp_path / 'x.safetensors')
    found = load_file(tmp_path / 'x.safetensors')
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert (tmp_path / 'x.safetensors').stat().st_size < 1000
