import copy
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import BatchNormAct2d

from tests.helpers import relative
from tests.reference import branch_by_branch, grad_mult
from timm_rep.layers import ConvBranch, Csla, CslaBlock, CslaConv2d, IdentityBranch, RepOptConv
from timm_rep.optim import GradMult, RepAdamW, RepSGD, set_grad_mult

C3, C1, ID = ConvBranch(3), ConvBranch(1), IdentityBranch()
CSLAS = {
    'RepOpt-VGG': Csla(8, 8, (C3, C1, ID)),
    'RepOpt-VGG, first of a stage': Csla(4, 8, (C3, C1), stride=2),
    'RepOpt-GhostNet': Csla(8, 8, (C3, ID), groups=8),
    'GhostNet 5x5': Csla(6, 6, (ConvBranch(5), ID), groups=6),
    'asymmetric': Csla(6, 6, (ConvBranch((1, 3)), ConvBranch((3, 1)), C3)),
    'groups': Csla(8, 8, (C3, C1, ID), groups=2),
    'groups, stride, no identity': Csla(8, 4, (ConvBranch(5), C3), stride=(2, 1), groups=4),
    'dilation': Csla(4, 4, (C3, C1, ID), dilation=(2, 3)),
    '1x1 and identity': Csla(5, 5, (C1, ID)),
    'no branch covers the kernel': Csla(4, 4, (ConvBranch((1, 5)), ConvBranch((3, 1)), ID)),
    'twice the same': Csla(4, 4, (C3, ConvBranch(3, name='again'), C1, ID)),
    'one branch': Csla(4, 4, (C3,)),
    'identity': Csla(4, 4, (ID,)),
}


def random_scales(csla, seed=0, dtype=torch.float64):
    """Scales of both signs like the released ones, one of them zero."""
    g = torch.Generator().manual_seed(seed)
    scales = {name: torch.randn(csla.out_channels, generator=g, dtype=dtype) for name in csla.scaled_branches}
    for scale in scales.values():
        scale[0] = 0.
    return scales


def train_both(csla, scales, block_opt, target_opt, steps=20, seed=0):
    """Train the CSLA block and the target operator on the same data, each followed by a BatchNorm.

    Returns the relative differences of their outputs and of their kernels.
    """
    g = torch.Generator().manual_seed(seed)
    block = torch.nn.Sequential(CslaBlock(csla, scales, dtype=torch.float64), torch.nn.BatchNorm2d(csla.out_channels))
    target = torch.nn.Sequential(CslaConv2d(csla, dtype=torch.float64), torch.nn.BatchNorm2d(csla.out_channels))
    block.double()
    target.double()
    with torch.no_grad():
        target[0].weight.copy_(block[0].equivalent_kernel())
    set_grad_mult(target[0].weight, GradMult(csla, scales))
    optimizers = block_opt(block.parameters()), target_opt(target.parameters())
    for _ in range(steps):
        x = torch.randn(3, csla.in_channels, 7, 6, generator=g, dtype=torch.float64)
        outputs = [block(x), target(x)]
        y = torch.randn(outputs[0].shape, generator=g, dtype=torch.float64)
        for optimizer, output in zip(optimizers, outputs):
            optimizer.zero_grad()
            F.mse_loss(output, y).backward()
            optimizer.step()
    return relative(outputs[1], outputs[0]), relative(target[0].weight, block[0].equivalent_kernel())


@pytest.mark.parametrize('name', CSLAS)
class TestEveryBlock:
    def test_target_is_the_block(self, name):
        csla = CSLAS[name]
        scales = random_scales(csla)
        x = torch.randn(2, csla.in_channels, 9, 8, dtype=torch.float64)
        for trainable in (False, True):
            block = CslaBlock(csla, scales, trainable, dtype=torch.float64)
            target = CslaConv2d(csla, dtype=torch.float64)
            assert target.weight.shape == csla.kernel_shape
            with torch.no_grad():
                for weight in block.weights.values():
                    weight.normal_()
                target.weight.copy_(block.equivalent_kernel())
            torch.testing.assert_close(target(x), block(x))
            assert block.structure == ('search' if trainable else 'csla')
            assert target.structure == 'target'

    def test_block_is_the_branches(self, name):
        """Adding the kernels or the feature maps gives the same output and the same gradients."""
        csla = CSLAS[name]
        block = CslaBlock(csla, random_scales(csla), trainable=True, dtype=torch.float64)
        with torch.no_grad():
            for weight in block.weights.values():
                weight.normal_()
        found = []
        for forward in (block, lambda x: branch_by_branch(csla, block.weights, block.scales, x)):
            block.zero_grad()
            x = torch.randn(
                2, csla.in_channels, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0),
                requires_grad=True)
            y = forward(x)
            y.sin().sum().backward()
            found.append([y, x.grad, *(p.grad.clone() for p in block.parameters())])
        assert len(found[0]) == 2 + len(csla.branches) + len(csla.scaled_branches)
        torch.testing.assert_close(found[1], found[0])

    def test_constant_scales_stay_constant(self, name):
        """Constant scales are buffers, which requires_grad_() leaves alone; their keys equal trainable scales' keys."""
        csla = CSLAS[name]
        constant, trainable = (
            CslaBlock(csla, random_scales(csla, dtype=torch.float32), trainable) for trainable in (False, True))
        constant.requires_grad_(True)
        keys = {f'scales.{branch}' for branch in csla.scaled_branches}
        assert constant.state_dict().keys() == trainable.state_dict().keys() >= keys
        assert dict(constant.named_buffers()).keys() == keys
        assert dict(trainable.named_parameters()).keys() == trainable.state_dict().keys()
        constant(torch.randn(2, csla.in_channels, 9, 8)).sum().backward()
        assert all(scale.grad is None for scale in constant.scales.values())

    @pytest.mark.parametrize('rule,power', [('squared', 2), ('absolute', abs)])
    def test_grad_mult(self, name, rule, power):
        csla = CSLAS[name]
        scales = random_scales(csla)
        branches = [(b.name, None if isinstance(b, IdentityBranch) else b.kernel_size) for b in csla.branches]
        expected = grad_mult(csla.kernel_shape, branches, scales, power)
        mult = GradMult(csla, scales)
        mult.dense('absolute' if rule == 'squared' else 'squared', torch.float64)  # a second entry in the cache
        torch.testing.assert_close(mult.dense(rule, torch.float64), expected)
        x = torch.randn(csla.kernel_shape, dtype=torch.float64)
        torch.testing.assert_close(mult.multiply(x, rule), x * expected)
        start = csla.out_channels // 2 - 1  # within a group
        for rows in (slice(start, None), slice(start, start + 1)):
            product = (x * expected)[rows]
            torch.testing.assert_close(mult.multiply(x[rows], rule, start=start), product)
            target = x[rows].clone()
            mult.add_product(target, x[rows], rule, start=start)
            torch.testing.assert_close(target, x[rows] + product)
            shard = mult.rows(1, csla.out_channels).rows(start - 1, start - 1 + len(product))
            torch.testing.assert_close(shard.multiply(x[rows], rule), product)
        again = pickle.loads(pickle.dumps(copy.deepcopy(mult)))
        assert torch.equal(again.dense(rule), mult.dense(rule))

    def test_csla_is_gr(self, name):
        """The proposition: the same outputs and kernels after any number of steps."""
        check_csla_is_gr(CSLAS[name], RepSGD, dict(lr=.05, momentum=.9, weight_decay=1e-3, nesterov=True))
        check_csla_is_gr(CSLAS[name], RepAdamW, dict(lr=.003, betas=(.8, .9), weight_decay=.1, amsgrad=True))


def check_csla_is_gr(csla, rep, kwargs):
    plain, tolerance = (torch.optim.SGD, 1e-10) if rep is RepSGD else (torch.optim.AdamW, 1e-6)
    kwargs = kwargs if rep is RepSGD else dict(kwargs, eps=1e-16)
    differences = train_both(
        csla, random_scales(csla), lambda p: plain([x for x in p if x.requires_grad], **kwargs),
        lambda p: rep(p, **kwargs))
    assert max(differences) < tolerance


@pytest.mark.parametrize('rep,kwargs', [
    (RepSGD, dict(lr=.1)),
    (RepSGD, dict(lr=.01, momentum=.8, dampening=.3, weight_decay=.1)),
    (RepSGD, dict(lr=.02, momentum=.9, maximize=True)),
    (RepAdamW, dict(lr=.01)),
    (RepAdamW, dict(lr=.01, maximize=True)),
], ids=str)
def test_csla_is_gr_with_every_option(rep, kwargs):
    check_csla_is_gr(CSLAS['groups'], rep, kwargs)


def test_signed_sum_of_the_released_adamw_breaks_the_equivalence():
    """With negative scales, which are common in the released files, only absolute values preserve CSLA = GR."""
    csla = CSLAS['RepOpt-VGG']
    scales = random_scales(csla)
    assert any((s < 0).any() for s in scales.values())

    class Signed(GradMult):
        def vectors(self, rule, device, dtype):
            scales = {**self.scales, 'identity': torch.ones(8)}
            return [(branch.kernel_size, scales[branch.name].to(device, dtype)[:, None, None, None], branch == ID)
                    for branch in self.csla.branches]

    def adamw(params):
        return torch.optim.AdamW([p for p in params if p.requires_grad], lr=.01, eps=1e-16)

    def signed_adamw(params):
        params = list(params)
        mult = params[0].grad_mult
        set_grad_mult(params[0], Signed(mult.csla, mult.scales))
        return RepAdamW(params, lr=.01, eps=1e-16)

    ours = train_both(csla, scales, adamw, lambda p: RepAdamW(p, lr=.01, eps=1e-16))
    released = train_both(csla, scales, adamw, signed_adamw)
    assert max(ours) < 1e-10
    assert min(released) > 1e-3


def test_scales_are_copied():
    """Neither a GradMult nor a block shares memory with the scales it was given; training leaves them unchanged."""
    csla = CSLAS['RepOpt-VGG']
    scales = random_scales(csla, dtype=torch.float32)
    before = {name: scale.clone() for name, scale in scales.items()}
    mult, blocks = GradMult(csla, scales), [CslaBlock(csla, scales, trainable) for trainable in (False, True)]
    expected = mult.dense('squared'), blocks[0].equivalent_kernel()
    blocks[1].equivalent_kernel()
    blocks[1](torch.randn(2, 8, 5, 5)).square().mean().backward()
    torch.optim.SGD(blocks[1].parameters(), lr=1.).step()
    assert not torch.equal(blocks[1].scales['conv3x3'], before['conv3x3'])
    assert all(torch.equal(scales[name], scale) for name, scale in before.items())
    for scale in scales.values():
        scale.zero_()
    assert torch.equal(GradMult(csla, before).dense('squared'), expected[0])
    mult._cache.clear()
    assert torch.equal(mult.dense('squared'), expected[0])
    assert torch.equal(blocks[0].equivalent_kernel(), expected[1])


def test_reset_parameters():
    """As after to_empty(): with a multiplier the kernel follows the rule of initialization, without torch's."""
    csla = Csla(6, 6, (ConvBranch(3), ConvBranch(1), IdentityBranch()))
    scales = {name: torch.randn(6) for name in csla.scaled_branches}
    conv = CslaConv2d(csla)
    conv.set_scales(scales)
    torch.manual_seed(0)
    conv.reset_parameters()
    kernel = conv.weight.detach().clone()
    torch.manual_seed(0)
    nn.Conv2d(**csla.conv_args, bias=False)  # as many random numbers
    conv.reset_kernel(scales)
    assert torch.equal(conv.weight, kernel)
    assert conv.grad_mult is not None
    conv.set_scales(None)
    torch.manual_seed(0)
    conv.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(conv.weight, nn.Conv2d(**csla.conv_args, bias=False).weight)


def test_scales_of_another_dtype():
    """The kernel has the dtype of the weights."""
    csla = CSLAS['RepOpt-VGG']
    for dtype in (torch.bfloat16, torch.float64):
        block = CslaBlock(csla, dtype=dtype)
        assert csla.kernel(block.weights, random_scales(csla, dtype=torch.float32)).dtype == dtype


def test_initial_kernel():
    """Equation 4: unit scales on the diagonal, both kernels scaled."""
    csla = Csla(64, 64, (C3, C1, ID))
    scales = {'conv3x3': torch.full((64,), 3.), 'conv1x1': torch.zeros(64)}
    conv = CslaConv2d(csla)
    torch.manual_seed(0)
    conv.reset_kernel(scales)
    torch.manual_seed(0)
    plain = CslaBlock(csla, scales).weights['conv3x3']
    expected = 3 * plain.detach()
    expected[torch.arange(64), torch.arange(64), 1, 1] += 1
    torch.testing.assert_close(conv.weight.detach(), expected)
    bound = (1 / (64 * 9)) ** .5  # torch's default for a convolution
    assert plain.abs().max() <= bound
    assert plain.abs().max() > .9 * bound


def test_refusals():
    with pytest.raises(ValueError, match='odd'):
        ConvBranch(2)
    with pytest.raises(ValueError, match='distinct names'):
        Csla(4, 4, (C3, C3))
    with pytest.raises(ValueError, match='branches must'):
        Csla(4, 4, ())
    with pytest.raises(ValueError, match='groups=3'):
        Csla(4, 4, (C3,), groups=3)
    for kwargs in (dict(out_channels=8), dict(out_channels=4, stride=2)):
        with pytest.raises(ValueError, match='identity branch'):
            Csla(4, branches=(C3, ID), **kwargs)
    for name in ('a.b', 'keys', 'training', '1x1', ''):
        for branch in (ConvBranch, IdentityBranch):
            if name or branch is IdentityBranch:
                with pytest.raises(ValueError, match='name of a branch'):
                    branch(3, name=name) if branch is ConvBranch else branch(name=name)
    for kwargs, match in [
        (dict(stride=0), 'stride must'), (dict(dilation=(1, 2, 3)), 'dilation must'), (dict(groups=0), 'groups must'),
        (dict(in_channels=0), 'in_channels must'), (dict(branches=(3, 1)), r'branches must be ConvBranch.*\[3, 1\]'),
    ]:
        with pytest.raises(ValueError, match=match):
            Csla(**{**dict(in_channels=4, out_channels=4, branches=(C3,)), **kwargs})
    with pytest.raises(ValueError, match='kernel_size must'):
        ConvBranch((3,))
    csla = CSLAS['RepOpt-VGG']
    with pytest.raises(ValueError, match=r"structure must be one of 'target', .* got 'train'"):
        RepOptConv(csla, 'train')
    for norm in BatchNormAct2d(8), nn.GroupNorm(1, 8):
        with pytest.raises(TypeError, match=type(norm).__name__):
            RepOptConv(csla, norm=norm)
    for value in (float('nan'), float('inf')):
        with pytest.raises(ValueError, match=r'conv3x3.*finite'):
            GradMult(csla, {'conv3x3': torch.full((8,), value), 'conv1x1': torch.ones(8)})
    with pytest.raises(OverflowError, match=r'range of torch\.float16, got 9e\+04'):
        GradMult(csla, {'conv3x3': torch.full((8,), 300.), 'conv1x1': torch.zeros(8)}).dense('squared', torch.float16)
    with pytest.raises(ValueError, match="'conv1x1'"):
        GradMult(csla, {'conv3x3': torch.ones(8)})
    with pytest.raises(ValueError, match=r'\(8,\).*\(7,\)'):
        CslaBlock(csla, {'conv3x3': torch.ones(7), 'conv1x1': torch.ones(8)})
    with pytest.raises(ValueError, match=r'\(8, 8, 1, 1\).*\(8, 8, 3, 3\)'):
        set_grad_mult(torch.zeros(8, 8, 1, 1), GradMult(csla, random_scales(csla)))


def test_initial_scale_as_an_integer():
    block = CslaBlock(Csla(4, 4, branches=(ConvBranch(3),), initial_scale=2), trainable=True)
    assert block.scales['conv3x3'].tolist() == [2.] * 4


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('structure', ['target', 'search', 'csla'])
def test_folding_keeps_the_mode(structure, training):
    layer = RepOptConv(Csla(4, 4, (ConvBranch(3), IdentityBranch())), structure).train(training)
    assert layer.fuse().training is training


@pytest.mark.parametrize('structure', ['target', 'search', 'csla'])
@torch.no_grad()
def test_folding_without_a_kernel(structure):
    """Of identities only."""
    torch.manual_seed(0)
    layer = RepOptConv(Csla(4, 4, (IdentityBranch(),)), structure).eval()
    for p in layer.parameters():
        p.normal_()
    layer[1].running_mean.normal_()
    x = torch.randn(2, 4, 5, 7)
    assert relative(layer.fuse()(x), layer(x)) < 1e-5


def test_scales_of_further_branches():
    csla = Csla(4, 4, (ConvBranch(3), ConvBranch(1), IdentityBranch('shortcut')))
    scales = {name: torch.rand(4) for name in ('conv3x3', 'conv1x1')}
    for name in ('identity', 'shortcut'):
        assert csla.check_scales({**scales, name: torch.ones(4)}).keys() == scales.keys()
    with pytest.raises(ValueError, match="got one for the branch 'conv1x3' too"):
        csla.check_scales({**scales, 'conv1x3': torch.rand(4)})
