"""Int8 of every family: the folded form loses no more than the unfolded one, and all its layers run in int8."""
import copy

import pytest
import timm
import torch
import torch.nn as nn

import timm_rep
from tests.helpers import images, randomize_, tiny
from timm_rep.layers import ChannelIdle, RePaMlp, RePaMlpDeploy

# models of families, with the size of their images in TINY
FAMILIES = {
    'repa_deit_tiny': 32, 'repa_vit_small': 32, 'repa_swin_tiny': 56, 'repa_mixer_s32': 64, 'repa_poolformer_s12': 64,
    'repa_lvvit_s': 64,
}
SIZES = {**FAMILIES, 'repopt_vgg_a0': 64, 'repopt_ghostnet_050': 64}


def first_and_others(names):
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@torch.no_grad()
def like_trained_(model):
    """Small weights in the FFNs, as training leaves them: what they add to the shortcut is small compared to it."""
    randomize_(model)
    for mlp in (m for m in model.modules() if isinstance(m, RePaMlp)):
        for p in mlp.parameters():
            p.mul_(0.1 if p.ndim > 1 else 1)
        for norm in (mlp.norm1, mlp.norm2):
            norm.reset_running_stats()
            norm.weight.fill_(1.)
            norm.bias.zero_()
    g = torch.Generator().manual_seed(2)
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    head.weight.copy_(torch.randn(head.weight.shape, generator=g))
    return model


@torch.no_grad()
def rounded_weights(model):
    """A copy with the weights of the FFNs rounded to eight bits, per channel."""
    model = copy.deepcopy(model)
    mlps = [m for m in model.modules() if isinstance(m, (RePaMlp, RePaMlpDeploy))]
    for layer in (layer for mlp in mlps for layer in mlp.modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            w = layer.weight.flatten(1)
            scale = w.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            layer.weight.copy_(((w / scale).round() * scale).view_as(layer.weight))
    return model


@pytest.mark.parametrize('name', first_and_others(FAMILIES))
@torch.no_grad()
def test_folding_loses_no_accuracy_of_int8_weights(name):
    unfolded = like_trained_(tiny(name))
    folded = timm.utils.reparameterize_model(unfolded)
    x = images(8, FAMILIES[name])
    y = unfolded(x)

    def error(model):
        return ((rounded_weights(model)(x) - y).norm() / y.norm()).item()

    assert error(folded) < 1.5 * error(unfolded)
    # with the identity in the same matrix, the larger rounding step swallows the other entries
    for module in folded.modules():
        idle = getattr(module, 'fc_idle', None)
        if idle is not None:
            w = idle.weight.flatten(1)
            identity = torch.eye(*w.shape)
            scale = (w + identity).abs().amax(1, keepdim=True) / 127
            idle.weight.copy_((((w + identity) / scale).round() * scale - identity).view_as(idle.weight))
    assert error(folded) > 2 * error(unfolded)


@pytest.mark.slow
@pytest.mark.parametrize('backend', ['inductor', 'onnxruntime'])
@pytest.mark.parametrize('name', SIZES)
@torch.no_grad()
def test_all_layers_run_in_int8(name, backend):
    pytest.importorskip('torchao')
    pytest.importorskip('onnxruntime')
    model = like_trained_(tiny(name)) if name in FAMILIES else randomize_(tiny(name))
    quantized = timm_rep.quantize_ptq(model, [images(8, SIZES[name], seed=s) for s in (1, 2)], backend)
    report = quantized.report
    folded = timm.utils.reparameterize_model(model)
    layers = {n for n, m in folded.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert set(report.int8_layers) | set(report.float_layers) >= layers - {''}
    assert not layers & set(report.float_layers)
    assert report.relative_rms < 0.1
    x = images(3, SIZES[name], seed=3)
    assert ((quantized(x) - model(x)).norm() / model(x).norm()).item() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize('name', ['repvgg_a0', 'mobileone_s0', 'fastvit_t8', 'repvit_m0_9', 'repghostnet_050'])
def test_reparameterizable_models_of_timm(name):
    pytest.importorskip('torchao')
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).eval()
    report = timm_rep.quantize_ptq(model, [images(2, 64)]).report
    folded = timm.utils.reparameterize_model(model)
    assert {n for n, m in folded.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))} == set(report.int8_layers)


@pytest.mark.slow
def test_generated_code_calls_int8_kernels():
    """As many kernels as the report has layers; no convolution and no product of matrices in float."""
    pytest.importorskip('torchao')
    from torch._inductor.utils import run_and_get_code

    x = images(4, 64)
    quantized = timm_rep.quantize_ptq(randomize_(tiny('repopt_vgg_a0')), [x])
    torch.compiler.reset()
    _, code = run_and_get_code(quantized, x)
    calls = [line for line in '\n'.join(code).splitlines() if ' = ' in line or line.strip().startswith('torch.ops')]
    int8 = [line for line in calls if 'onednn.qconv' in line or 'onednn.qlinear' in line]
    assert len(int8) == len(quantized.report.int8_layers) == 8
    assert not [line for line in calls if 'extern_kernels' in line or 'mkldnn._' in line]


def test_idle_layers_are_linear_in_the_test_models():
    """The tests above assume that the models have idle channels, whose matrix is small compared to the identity."""
    model = like_trained_(tiny('repa_deit_tiny'))
    assert any(isinstance(m, ChannelIdle) for m in model.modules())
    folded = timm.utils.reparameterize_model(model)
    assert folded.blocks[0].mlp.fc_idle.weight.abs().max() < 0.2
