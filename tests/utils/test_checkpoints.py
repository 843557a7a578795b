import argparse
from functools import partial

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file

from timm_rep.utils.checkpoints import (
    has_moving_average,
    load_checkpoint,
    read_state_dict,
    write_checkpoint,
    write_safetensors,
)


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


def test_a_missing_file_is_named(tmp_path):
    for read in (read_state_dict, has_moving_average, partial(load_checkpoint, nn.Linear(2, 2))):
        with pytest.raises(FileNotFoundError, match=r"No checkpoint at '.*c\.pth'"):
            read(tmp_path / 'c.pth')


def test_a_checkpoint_of_another_model_in_a_few_lines(tmp_path):
    """Five names of each kind, and the number of the others."""
    def message(model, state):
        torch.save(state, tmp_path / 'c.pth')
        with pytest.raises(RuntimeError) as e:
            load_checkpoint(model, tmp_path / 'c.pth')
        first, *lines = str(e.value).splitlines()
        assert first.startswith(f"'{tmp_path / 'c.pth'}' does not fit the model.")
        return lines

    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(7)])
    state = model.state_dict()
    first = ', '.join(f'"{i}.weight"' for i in range(5))
    assert message(model, {f'{name}s': x for name, x in state.items()}) == [
        f'\tMissing key(s) in state_dict: {first} and 2 more. ',
        f'\tUnexpected key(s) in state_dict: {first.replace("weight", "weights")} and 2 more. ']
    assert message(model, {name: x for name, x in state.items() if name > '2'}) == [
        '\tMissing key(s) in state_dict: "0.weight", "1.weight". ']
    larger = {name: torch.zeros(3, 3) for name in state}
    lines = message(model, larger)
    assert [line.split(':')[0] for line in lines[:-1]] == [f'\tsize mismatch for {i}.weight' for i in range(5)]
    assert lines[-1] == '\tand 2 more of another size'
    assert len(message(model, {**state, **dict(list(larger.items())[:5])})) == 5
