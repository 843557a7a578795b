"""Sums of branches that one convolution can replace, and its kernel."""
import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

import timm_rep
from tests.convert.multi_branch import build
from tests.helpers import images, randomize_, relative
from timm_rep.convert.linear_sums import LinearSum, Term, find_linear_sums
from timm_rep.layers import CslaConv2d


def _conv(size, padding, **kwargs):
    return nn.Conv2d(16, 16, size, padding=padding, bias=False, **kwargs)


@torch.no_grad()
def test_kernels_that_are_not_square():
    """The sum of the kernels covers the tallest and the widest."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(4, 6, size, padding=padding, groups=2).double() for size, padding in (
        ((3, 5), (1, 2)), ((1, 3), (0, 1)), ((7, 1), (3, 0)))]
    linear_sum = LinearSum('', nn.Identity(), [Term(conv) for conv in convs], 'conv', {})
    csla = linear_sum.csla(1.)
    assert csla.kernel_size == (7, 5)
    kernel, bias = linear_sum.kernel(csla)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    y = F.conv2d(x, kernel.view(csla.kernel_shape), bias, padding=csla.padding(csla.kernel_size), groups=2)
    assert relative(y, sum(conv(x) for conv in convs)) < 1e-12


@torch.no_grad()
def test_dilated_branches():
    torch.manual_seed(0)
    cfg = ByoModelCfg(
        blocks=tuple(ByoBlockCfg(type='rep', d=2, c=c, s=2) for c in (8, 8, 8)), stem_type='rep', stem_chs=8)
    model = randomize_(ByobNet(cfg, num_classes=5, output_stride=8))
    x = images(2, 64)
    expected = model(x)
    timm_rep.convert_to_repopt(model)
    assert {m.dilation for m in model.modules() if isinstance(m, CslaConv2d)} == {(1, 1), (2, 2)}
    assert relative(model(x), expected) < 1e-4
    assert relative(model.reparameterize()(x), expected) < 1e-4


@pytest.mark.parametrize('branch,conv', [
    ('conv_kxk', dict(size=4, padding=2)),  # even
    ('conv_kxk', dict(size=(1, 3), padding=(1, 0))),  # the paddings are swapped
    ('conv_kxk', dict(size=3, padding=0)),
    ('conv_kxk', dict(size=3, padding=1, padding_mode='reflect')),
    ('conv_kxk', dict(size=3, padding=1, groups=2)),
    ('conv_kxk', dict(size=3, padding=1, stride=2)),
    ('conv_kxk', dict(size=3, padding='same')),
    ('conv_1x1', dict(size=3, padding=2, dilation=2)),  # the other has no dilation
])
def test_branches_that_cannot_be_added(branch, conv):
    model = build('byobnet, RepVGG')
    block = model.stages[0][1]
    assert f'{block.conv_kxk.conv.kernel_size} {block.conv_kxk.conv.stride}' == '(3, 3) (1, 1)'
    getattr(block, branch).conv = _conv(**conv)
    report = timm_rep.convert_to_repopt(model)
    assert list(report.kept) == ['stages.0.1.reparam_conv']
    assert model.stages[0][1] is block
    assert getattr(block, branch) is not None


def test_padding_by_reflection():
    """One convolution would pad the input once, with the width of the largest kernel."""
    model = build('byobnet, RepVGG')
    block = model.stages[0][1]
    for branch in (block.conv_kxk, block.conv_1x1):
        branch.conv.padding_mode = 'reflect'
    assert list(timm_rep.convert_to_repopt(model).kept) == ['stages.0.1.reparam_conv']


def test_the_sums_of_a_block_are_converted_together():
    """timm folds the two sums of a Ghost module at once."""
    model, x = build('ghostnet, v3'), images(2, 64)
    found = [s for s in find_linear_sums(model)[0] if s.slot == 'cheap_operation']
    block = found[0].module
    block.cheap_rpr_conv[0].conv.register_forward_hook(lambda module, args, y: 2 * y)
    expected = model(x)
    report = timm_rep.convert_to_repopt(model)
    assert list(report.kept) == [f'{found[0].name}.cheap_operation']
    names = [layer.name for layer in report.layers]
    assert names
    assert not any(name.startswith(f'{found[0].name}.primary') for name in names)
    assert relative(model(x), expected) < 1e-5


@pytest.mark.parametrize('family', ['byobnet, RepVGG', 'repvit, legacy'])
def test_the_norm_of_the_branches_gives_momentum_and_epsilon(family):
    model = build(family)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum, m.eps = .3, 1e-3
    expected = model(x := images(2, 64))
    timm_rep.convert_to_repopt(model)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.momentum, m.eps) for m in norms} == {(.3, 1e-3)}
    assert relative(model(x), expected) < 1e-5


def test_half_precision_weights_are_summed_in_float64():
    """The kernel is rounded once."""
    model = build('byobnet, RepVGG').bfloat16()
    exact = [s.kernel(s.csla(1.)).weight for s in find_linear_sums(copy.deepcopy(model).double())[0]]
    timm_rep.convert_to_repopt(model)
    for kernel, layer in zip(exact, (m for m in model.modules() if isinstance(m, CslaConv2d))):
        assert layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.weight.flatten(1), kernel.bfloat16())
    wide = copy.deepcopy(model).double().reparameterize()
    names = [name.removesuffix('.0') for name, m in model.named_modules() if isinstance(m, CslaConv2d)]
    model.reparameterize()
    for name in names:
        folded, exact = model.get_submodule(name), wide.get_submodule(name)
        assert torch.equal(folded.weight, exact.weight.bfloat16())
        assert torch.equal(folded.bias, exact.bias.bfloat16())
