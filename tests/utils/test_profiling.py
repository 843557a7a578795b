import time

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import Attention
from torch.torch_version import TorchVersion

import timm_rep
from timm_rep.convert.ffn_classes import find_blocks
from timm_rep.latency import profile_latency
from timm_rep.layers import RePaMlp
from timm_rep.paper import VANILLA
from timm_rep.utils.profiling import (
    count_macs,
    count_params,
    device_name,
    measure_throughput,
    model_input_size,
    synchronize,
)


def test_device_name(monkeypatch):
    for threads, name in ((1, ', 1 thread'), (2, ', 2 threads')):
        monkeypatch.setattr(torch, 'get_num_threads', lambda threads=threads: threads)
        assert device_name(torch.device('cpu')).endswith(name)


@pytest.mark.parametrize('kwargs', [{}, dict(features_only=True, out_indices=(0,))])
def test_input_size(kwargs):
    """The size of the model as built, also inside of one made by features_only, not of the pretrained one."""
    model = timm.create_model(
        'repa_deit_tiny', img_size=(32, 48), in_chans=1, embed_dim=24, depth=1, num_heads=3, **kwargs)
    assert model_input_size(model) == (1, 32, 48)


@pytest.mark.skipif(not hasattr(timm.models, 'get_model_traits'), reason='recorded since timm 1.0.31')
@pytest.mark.parametrize('name', [
    'crossvit_tiny_240', 'efficientvit_m0', 'gcvit_xxtiny', 'hiera_tiny_224', 'levit_128s', 'maxvit_rmlp_pico_rw_256',
    'mvitv2_tiny', 'twins_pcpvt_small', 'volo_d1_224'])
def test_input_size_of_models_without_a_patch_embedding_of_it(name):
    with torch.device('meta'):
        model = timm.create_model(name, img_size=(size := 128 if 'maxvit' in name else 192), in_chans=2)
    assert model_input_size(model) == (2, size, size)


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
            x = self.embed(x).flatten(2).transpose(1, 2)
            if TorchVersion(torch.__version__) < (2, 6):  # multiplies these, without a bias, as batches, like attention
                x = x.contiguous()
            return self.fc(self.attn(x))

    net = Net().to(device)
    net.attn.eval()
    macs = count_macs(net, (3, 4, 4 * tokens))
    assert macs.projections == tokens * (3 * 16 * dim + 3 * dim * dim + dim * dim + dim * hidden)
    assert macs.attention == 2 * tokens * tokens * dim
    assert macs.total == macs.projections + macs.attention
    assert net.training
    assert not net.attn.training


class Fused(nn.Module):
    """Layers of torch that are one kernel in eval mode, over 16 tokens of 12 channels."""

    def __init__(self, layer, needs_values=False):
        super().__init__()
        self.embed, self.layer, self.needs_values = nn.Conv2d(3, 12, 4, 4), layer, needs_values
        self.register_buffer('shift', torch.zeros(12))

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2) + self.shift
        if self.needs_values and x.sum().item() == 5:
            return x
        return self.layer(*[x] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))


@pytest.mark.parametrize('layer, projections, attention', [
    (nn.LSTM(12, 8, batch_first=True, bidirectional=True), 2 * 16 * 4 * 8 * (12 + 8), 0),
    (nn.MultiheadAttention(12, 2, batch_first=True), 16 * 4 * 12 * 12, 2 * 16 * 16 * 12),
    (nn.TransformerEncoderLayer(12, 2, 20, batch_first=True), 16 * 12 * (4 * 12 + 2 * 20), 2 * 16 * 16 * 12)],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else '')
def test_count_macs_of_layers_that_are_one_kernel(layer, projections, attention):
    expected = (16 * 3 * 16 * 12 + projections, attention)
    net = Fused(layer).train()
    counts = count_macs(net, (3, 16, 16))
    assert counts.total == sum(expected)
    if TorchVersion(torch.__version__) >= (2, 6):  # before, the input projection is a batched product
        assert counts == expected
    assert net.training
    assert not any(value.is_meta for value in net.state_dict().values())
    assert count_macs(Fused(layer, needs_values=True), (3, 16, 16)).projections >= 16 * 3 * 16 * 12


def test_count_macs_of_the_size_the_model_was_built_for():
    kwargs = dict(patch_size=8, embed_dim=24, depth=1, num_heads=3, num_classes=5, device='meta')
    sizes = [(1, 32, 32), (3, 32, 48)]
    for chans, *size in sizes:
        model = timm.create_model('repa_deit_tiny', img_size=size, in_chans=chans, **kwargs)
        assert count_macs(model) == count_macs(model, (chans, *size))
    model.set_input_size(img_size=(64, 64))
    assert count_macs(model) == count_macs(model, (3, 64, 64))
    mixer = timm.create_model('repa_mixer_s16', img_size=64, device='meta')
    assert count_macs(mixer) == count_macs(mixer, (3, 64, 64))
    assert count_macs(timm.create_model('resnet18', device='meta')).projections == pytest.approx(1.814e9, rel=1e-3)


@pytest.mark.parametrize('device,waited', [('cpu', []), ('cuda:1', ['cuda:1']), ('xpu:0', ['xpu:0']), ('mps', [None])])
def test_synchronize_waits_for_that_device(monkeypatch, device, waited):
    seen = []
    for name in ('cuda', 'xpu'):
        monkeypatch.setattr(getattr(torch, name), 'synchronize', lambda device=None: seen.append(str(device)))
    monkeypatch.setattr(torch.mps, 'synchronize', lambda: seen.append(None))
    synchronize(torch.device(device))
    assert seen == waited


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


def ticking(module, clock, seconds):
    """Let the clock go on by so much at every call of a module."""
    forward = module.forward

    def slow(*args, **kwargs):
        clock[0] += seconds
        return forward(*args, **kwargs)

    module.forward = slow


VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


def test_profile_latency(monkeypatch):
    """Norms count to their halves, what is before and between blocks to the embedding, what is after to the head."""
    clock = [0.]
    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])
    vanilla = timm.create_model('deit_tiny_patch16_224', **VIT).eval()
    repa = timm.create_model('repa_deit_tiny', **VIT).eval()
    folded = timm.create_model('repa_deit_tiny', **VIT).eval().reparameterize()
    converted = timm.create_model('deit_tiny_patch16_224', **VIT).eval()
    timm_rep.convert_to_repa(converted)
    models = {'vanilla': vanilla, 'repa': repa, 'folded': folded, 'converted': converted}
    for model in models.values():
        ticking(model.patch_embed, clock, 1)
        ticking(model.norm, clock, 1)
        ticking(model.head, clock, 1)
        for i, block in enumerate(model.blocks):
            ticking(block.norm1, clock, 10)
            ticking(block.attn, clock, 20 + i)
            ticking(block.mlp, clock, 100)
    for block in vanilla.blocks:
        ticking(block.norm2, clock, 1000)
    swin = timm.create_model(
        'repa_swin_tiny', img_size=56, embed_dim=24, depths=(1, 1), num_heads=(2, 4), num_classes=5).eval()
    ticking(swin.layers[1].downsample, clock, 7)
    ticking(swin.layers[1].blocks[0].mlp, clock, 3)
    profiles = profile_latency(models, torch.zeros(2, 3, 32, 32), rounds=3, warmup=1)
    ours = {'patch embedding': 1e3, 'token mixers': 61e3, 'FFNs': 200e3, 'head': 2e3}
    assert profiles == {'vanilla': {**ours, 'FFNs': 2200e3}, **dict.fromkeys(('repa', 'folded', 'converted'), ours)}
    profiles = profile_latency({'swin': swin}, torch.zeros(2, 3, 56, 56), rounds=1, warmup=0)
    assert profiles == {'swin': {'patch embedding': 7e3, 'token mixers': 0., 'FFNs': 3e3, 'head': 0.}}
    for model in (*models.values(), swin):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_profile_latency_counts_medians(monkeypatch):
    clock, seconds = [0.], iter([9., 1., 5., 2.])
    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])
    model = timm.create_model('repa_deit_tiny', **{**VIT, 'depth': 1}).eval()
    forward = model.head.forward

    def head(x):
        clock[0] += next(seconds)
        return forward(x)

    model.head.forward = head
    assert profile_latency({'a': model}, torch.zeros(1, 3, 32, 32), rounds=3, warmup=1)['a']['head'] == 2e3


def test_profile_latency_refuses_models_without_ffns():
    with pytest.raises(ValueError, match='blocks with a known FFN, but ResNet'):
        profile_latency({'a': timm.create_model('resnet18')}, torch.zeros(1, 3, 32, 32))


def test_every_repaformer_has_a_vanilla_backbone():
    assert VANILLA.keys() == set(timm.list_models('repa_*')) - {'repa_any'}


SMALLEST = {'repa_deit_tiny', 'repa_swin_tiny', 'repa_lvvit_s', 'repa_poolformer_s12', 'repa_mixer_s32'}


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in SMALLEST else pytest.mark.slow) for name in VANILLA])
def test_vanilla_backbone_has_the_same_ffns(name):
    vanilla, args = VANILLA[name]
    repa = timm.create_model(name, device='meta')
    found = [m.fc1.weight.shape[:2] for m in repa.modules() if isinstance(m, RePaMlp)]
    blocks = find_blocks(timm.create_model(vanilla, device='meta', **args))
    assert found == [getattr(block.module, block.mlp).fc1.weight.shape[:2] for block in blocks]
