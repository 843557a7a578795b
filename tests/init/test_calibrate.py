import copy

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import BatchNormAct2d

import timm_rep
from tests.helpers import relative
from timm_rep.layers import RePaMlp

TINY = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


def batches(count=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(4 + i, 3, 32, 32, generator=g) for i in range(count)]


@torch.no_grad()
def test_statistics_are_averages_over_batches():
    """Averages of the inputs of each norm when the norms before it normalize by their batch."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.5), nn.BatchNorm2d(4)).double()
    model[1].weight.uniform_(.5, 2)
    model.train()
    model[3].eval()
    data = [x.double() for x in batches()]
    timm_rep.calibrate_batchnorm(model, [(x, 'label') for x in data])
    means, variances = ([], []), ([], [])
    for x in data:
        x = model[0](x)
        for i, norm in enumerate((model[1], model[4])):
            flat = x.movedim(1, -1).reshape(-1, 4)
            means[i].append(flat.mean(0))
            variances[i].append(flat.var(0))
            x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + norm.eps).sqrt()
            x = x * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
            x = x.relu()
    for i, norm in enumerate((model[1], model[4])):
        torch.testing.assert_close(norm.running_mean, sum(means[i]) / 3)
        torch.testing.assert_close(norm.running_var, sum(variances[i]) / 3)
        assert norm.momentum == .1
    assert [m.training for m in model] == [True, True, True, False, True]
    limited = timm_rep.calibrate_batchnorm(copy.deepcopy(model), iter(data), batches=1)
    torch.testing.assert_close(limited[1].running_mean, means[0][0])


@torch.no_grad()
def test_a_plain_model_becomes_a_repaformer():
    """With nothing idle and hidden norms that undo themselves it is the plain one, but for the kind of norm."""
    torch.manual_seed(0)
    plain = timm.create_model('deit_tiny_patch16_224', **TINY).eval()
    for p in plain.parameters():
        p.add_(torch.randn(p.shape) * .1)
    model = timm.create_model('repa_deit_tiny', pre_norm=False, idle_ratio=0., **TINY).eval()
    report = timm_rep.weight_select_init(model, plain, include_head=True)
    assert {s.reason for s in report.not_selected} == {
        'a BatchNorm that the teacher does not have, see calibrate_batchnorm()'}
    for ours, theirs in zip(model.blocks, plain.blocks):
        assert torch.equal(ours.mlp.norm1.weight, theirs.norm2.weight)
        assert torch.equal(ours.mlp.fc1.weight, theirs.mlp.fc1.weight)
    timm_rep.calibrate_batchnorm(model, batches(), identity_norms=['*.mlp.norm2'])
    for ours, theirs in zip(model.blocks, plain.blocks):
        x = torch.randn(2, 17, 24)
        expected = theirs.mlp((x - ours.mlp.norm1.running_mean) / (
            ours.mlp.norm1.running_var + 1e-5).sqrt() * ours.mlp.norm1.weight + ours.mlp.norm1.bias)
        assert relative(ours.mlp(x), expected) < 1e-5
    other = timm.create_model('repa_deit_tiny', pre_norm=False, **TINY).eval()
    timm_rep.weight_select_init(other, plain)
    # the statistics of both norms: the hidden norm sees what the norm before it makes of its inputs
    timm_rep.calibrate_batchnorm(other, batches())
    inner = {}
    hook = other.blocks[0].mlp.norm2.register_forward_pre_hook(lambda _, args: inner.update(x=args[0]))
    other.blocks[0].mlp.norm1.train()
    other(batches()[0])
    hook.remove()
    assert relative(other.blocks[0].mlp.norm2.running_mean, inner['x'].mean(0)) < .3
    folded = copy.deepcopy(other).eval()
    x = batches()[0]
    assert relative(folded.reparameterize()(x), other.eval()(x)) < 1e-4
    assert not any(isinstance(m, RePaMlp) for m in folded.modules())


@torch.no_grad()
def test_norms_that_do_not_run_keep_their_statistics():
    class WithAuxiliary(nn.Sequential):
        def forward(self, x):
            return self[0](x) if not self.training else self[1](self[0](x))

    model = WithAuxiliary(nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, affine=False))  # without parameters
    data = [3 + x for x in batches()]
    model.train()
    model(data[0])
    before = copy.deepcopy(model[1].state_dict())
    timm_rep.calibrate_batchnorm(model, data)
    torch.testing.assert_close(model[0].running_mean, sum(x.mean((0, 2, 3)) for x in data) / 3)
    assert all(torch.equal(v, before[k]) for k, v in model[1].state_dict().items())
    assert (model[1].momentum, model[1].training) == (.1, True)


def test_refusals():
    with pytest.raises(ValueError, match=r'BatchNorm.*VisionTransformer'):
        timm_rep.calibrate_batchnorm(timm.create_model('deit_tiny_patch16_224', **TINY), batches())
    model = timm.create_model('repa_deit_tiny', **TINY)
    model(torch.randn(2, 3, 32, 32))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r'loader.*nothing was changed'):
        timm_rep.calibrate_batchnorm(model, [])
    with pytest.raises(ValueError, match=r'loader.*nothing was changed'):
        timm_rep.calibrate_batchnorm(model, [batches()[0][:0]])
    with pytest.raises(ValueError, match=r"identity_norms.*\*\.norm3"):
        timm_rep.calibrate_batchnorm(model, batches(), identity_norms=['*.norm3', '*.norm2'])
    with pytest.raises(AssertionError, match='height'):  # timm's, of the second batch
        timm_rep.calibrate_batchnorm(model, [batches()[0], torch.zeros(2, 3, 8, 8)])
    with pytest.raises(ValueError, match=r'statistics of blocks\.0\.mlp\.norm1 must be finite'):
        timm_rep.calibrate_batchnorm(model, [batches()[0], torch.full((2, 3, 32, 32), float('nan'))])
    with pytest.raises(TypeError, match=r"model must be .*'repa_deit_tiny'"):
        timm_rep.calibrate_batchnorm('repa_deit_tiny', batches())
    for count in (0, -1, 1.5):
        with pytest.raises(ValueError, match=rf'batches must be .* got {count}'):
            timm_rep.calibrate_batchnorm(model, batches(), batches=count)
    with pytest.raises(TypeError, match=r"Expected an iterable of batches .* got 'data'"):
        timm_rep.calibrate_batchnorm(model, 'data')
    with pytest.raises(TypeError, match=r'Expected an iterable .* got a tensor \(4, 3, 32, 32\)'):
        timm_rep.calibrate_batchnorm(model, torch.zeros(4, 3, 32, 32))
    with pytest.raises(TypeError, match=r"Expected a batch that is a tensor of images.* got 'data'"):
        timm_rep.calibrate_batchnorm(model, ['data'])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert model.blocks[0].mlp.norm1.momentum == .1
    loader = iter(batches(5))
    timm_rep.calibrate_batchnorm(model, loader, batches=2, identity_norms='*.mlp.norm2')
    assert len(list(loader)) == 3
    assert not any(m._forward_hooks for m in model.modules())


@torch.no_grad()
@pytest.mark.parametrize('inplace', [True, False])
def test_an_identity_with_an_activation(inplace):
    """The norms after it see the activated input, as afterwards in eval mode."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act_layer=nn.ReLU, inplace=inplace), nn.Conv2d(4, 5, 1),
        nn.BatchNorm2d(5)).double()
    data = [x.double() for x in batches()]
    timm_rep.calibrate_batchnorm(model, data, identity_norms='1')
    outputs = [model[2](model[0](x).relu()) for x in data]
    means = [y.mean((0, 2, 3)) for y in outputs]
    torch.testing.assert_close(model[3].running_mean, sum(means) / len(means))
    assert relative(model.eval()[:3](data[0]), outputs[0]) < 1e-6


def test_a_model_without_weights():
    with torch.device('meta'):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match='meta device: load'):
        timm_rep.calibrate_batchnorm(model, [torch.randn(2, 3, 4, 4)])
