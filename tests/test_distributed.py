import functools

import pytest
import torch
import torch.distributed.fsdp

from tests.distributed_worker import train
from tests.helpers import in_processes


def states(path, processes, opt, parallel):
    in_processes(processes, train, path, opt, parallel, 16)
    return [torch.load(f'{path}.{rank}', weights_only=True) for rank in range(processes)]


@pytest.fixture(scope='module')
def one_process(tmp_path_factory):
    """Weights after training in one process, by optimizer."""
    return functools.cache(lambda opt: states(tmp_path_factory.mktemp('one') / 'state', 1, opt, 'ddp')[0])


@pytest.mark.parametrize('opt', ['repsgd', pytest.param('repadamw', marks=pytest.mark.slow)])
class TestTwoProcesses:
    """Equal one process with twice the batch, BatchNorm frozen; every rank checks that it has GradMults."""

    @pytest.mark.parametrize('parallel', [pytest.param('ddp', marks=pytest.mark.slow), 'fsdp'])
    def test_weights(self, tmp_path, one_process, opt, parallel):
        if parallel == 'fsdp' and not hasattr(torch.distributed.fsdp, 'fully_shard'):
            pytest.skip('FSDP2 of this torch requires an accelerator')
        expected = one_process(opt)
        for state in states(tmp_path / 'state', 2, opt, parallel):
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-9)

    def test_multipliers_change_the_weights(self, tmp_path, one_process, opt):
        plain, = states(tmp_path / 'state', 1, opt.removeprefix('rep'), 'ddp')
        assert any(not torch.allclose(plain[k], v, rtol=1e-3) for k, v in one_process(opt).items())
