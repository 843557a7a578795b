import time

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import Attention

import timm_rep  # noqa: F401
from timm_rep.profiling import count_macs, count_params, measure_throughput


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_count_macs_by_hand(device):
    tokens, dim, hidden = 7, 8, 12

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, dim, 4, 4)
            self.attn = Attention(dim, num_heads=2)
            self.fc = nn.Linear(dim, hidden)

        def forward(self, x):
            return self.fc(self.attn(self.embed(x).flatten(2).transpose(1, 2)))

    net = Net().to(device)
    net.attn.eval()
    macs = count_macs(net, (3, 4, 4 * tokens))
    assert macs.projections == tokens * (3 * 16 * dim + 3 * dim * dim + dim * dim + dim * hidden)
    assert macs.attention == 2 * tokens * tokens * dim
    assert macs.total == macs.projections + macs.attention
    assert net.training
    assert not net.attn.training


def test_count_macs_of_the_size_the_model_was_built_for():
    kwargs = dict(patch_size=8, embed_dim=24, depth=1, num_heads=3, num_classes=5, device='meta')
    sizes = [(1, 32, 32), (3, 32, 48)]
    for chans, *size in sizes:
        model = timm.create_model('repa_deit_tiny', img_size=size, in_chans=chans, **kwargs)
        assert count_macs(model) == count_macs(model, (chans, *size))
    model.set_input_size(img_size=(64, 64))
    assert count_macs(model) == count_macs(model, (3, 64, 64))
    assert count_macs(timm.create_model('resnet18', device='meta')).projections == pytest.approx(1.814e9, rel=1e-3)


def test_count_params():
    assert count_params(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))) == 3 * 4 + 4 + 2 * 4


def test_measure_throughput_takes_turns(monkeypatch):
    clock, order = [0.], []
    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])

    def model(name, seconds):
        seconds = iter(seconds)

        def forward(x):
            order.append(name)
            clock[0] += next(seconds)

        return forward

    rates = measure_throughput(
        {'a': model('a', [9, 1, 2, 4]), 'b': model('b', [9, 8, 8, .5])}, torch.zeros(16, 3), rounds=3, warmup=1)
    assert order == ['a', 'b'] * 4
    assert rates == {'a': 16 / 2, 'b': 16 / 8}
