import ast
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from tests.helpers import in_processes, torchrun
from tests.search.distributed_worker import search
from timm_rep.scales import Scales


@pytest.mark.slow
@pytest.mark.parametrize('killed', [False, True])
def test_two_processes_are_one_with_the_doubled_batch(tmp_path, killed):
    """BatchNorm is frozen. Killed after an epoch and resumed, they come to the same scales."""
    in_processes(1, search, tmp_path / 'one', 16, 0)
    expected = Scales.load(tmp_path / 'one.0.safetensors')
    if killed:
        in_processes(2, search, tmp_path / 'two', 16, 1)
        assert not (tmp_path / 'two.0.safetensors').exists()
    in_processes(2, search, tmp_path / 'two', 16, 0)
    found = [Scales.load(tmp_path / f'two.{rank}.safetensors') for rank in range(2)]
    assert found[0] == found[1]
    seeds = [ast.literal_eval(scales.metadata['seeds']) for scales in found]
    assert len({*seeds[0], *seeds[1]}) == (4 if killed else 6)  # each epoch of each process draws other crops
    assert found[0].keys() == expected.keys()
    for layer, branches in expected.items():
        for branch, scale in branches.items():
            torch.testing.assert_close(found[0][layer][branch], scale, rtol=1e-6, atol=1e-6)
            assert scale.std() > 1e-4  # they have moved
    if killed:
        with pytest.raises(ProcessRaisedException, match='processes is 1 there and 2 here'):
            in_processes(2, search, tmp_path / 'one', 16, 0)


@pytest.mark.slow
def test_command(images, tmp_path):
    """The command under torchrun, as the README has it; one process writes and prints."""
    output = tmp_path / 's.safetensors'
    timm_rep = Path(sys.executable).with_name('timm-rep')
    printed = torchrun(
        2, '--no-python', timm_rep, 'hyper-search', 'repopt_vgg_a0', '--dataset', '', '--data-dir', images, '-o',
        output, '--epochs', '2', '--warmup-epochs', '0', '--batch-size', '5', '-j', '0', '--preload',
        CUDA_VISIBLE_DEVICES='', PATH=os.environ['PATH'])
    assert printed.count('Written:') == 1
    scales = Scales.load(output)
    assert scales.metadata['batch_size'] == '10'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['s.safetensors', 's.safetensors.checkpoint']
