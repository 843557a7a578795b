"""Folding of timm's own blocks: other norms than BatchNorm2d, training mode, and blocks that move their norms."""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import convert_sync_batchnorm, freeze_batch_norm_2d

import timm_rep
from tests.convert import families, multi_branch
from tests.helpers import images, randomize_, relative, same_weights
from timm_rep._verify import _folded_layers
from timm_rep.layers import RePaMlp

NEXTVIT, EFFICIENTVIM = 'nextvit', 'FFN: efficientvim'
MOVING = [name for name in (NEXTVIT, EFFICIENTVIM) if name in families.FAMILIES]  # the latter is newer than timm 1.0.26
QUICK = ('byobnet, RepVGG', 'repghost')


def build(family):
    """A model with random norms, and its images."""
    if family in families.FAMILIES:
        model, x = families.build(family)
        return model, x[:2]
    torch.manual_seed(0)
    return randomize_(multi_branch.FAMILIES[family]()).eval(), images(2, 56)


ALL = [*(family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in (
    *multi_branch.FAMILIES, *MOVING))]


@torch.no_grad()
@pytest.mark.parametrize('change, prefix', [(convert_sync_batchnorm, 'Sync'), (freeze_batch_norm_2d, 'Frozen')])
@pytest.mark.parametrize('family', ALL)
def test_other_norms(family, change, prefix):
    """Synchronized or frozen; folded, or refused with a model that is as it was. Norms that stay keep their class."""
    model, x = build(family)
    expected = model(x)
    model = change(model)
    before, kinds = copy.deepcopy(model), {m: type(m) for m in model.modules()}
    assert any(kind.__name__.startswith(f'{prefix}BatchNorm') for kind in kinds.values())
    if (family, prefix) == (NEXTVIT, 'Frozen'):
        with pytest.raises(ValueError, match='NextViT'):
            timm_rep.convert.reparameterize(model)
        assert same_weights(model, before)
        assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    else:
        torch.testing.assert_close(timm_rep.convert.reparameterize(model)(x), expected, rtol=1e-4, atol=1e-4)
    assert all(type(m) is kind for m, kind in kinds.items())


@torch.no_grad()
@pytest.mark.parametrize('family', ALL)
def test_in_training_mode(family):
    """Folded by the running statistics; every layer is in training mode afterwards, as before."""
    model, x = build(family)
    expected = model(x)
    folded = timm_rep.convert.folded_copy(model.train())
    assert all(m.training for m in (*model.modules(), *folded.modules()))
    torch.testing.assert_close(folded.eval()(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('family', [
    NEXTVIT, *(pytest.param(family, marks=pytest.mark.slow) for family in MOVING if family != NEXTVIT)])
def test_verify_compares_blocks_that_move_norms(family):
    """They fold a norm, or a shortcut, into layers next to it, whose outputs change."""
    model, x = build(family)
    result = timm_rep.verify(model, x)
    assert result.passed
    assert result.first_difference is None
    assert result.folded > 5


def test_verify_names_the_layer_inside_a_model():
    """A model of this package in another one folds itself, but is not the layer that differs."""
    torch.manual_seed(0)
    model = nn.ModuleDict({'part': nn.Sequential(randomize_(timm.create_model(
        'repa_deit_tiny', img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)))})
    assert _folded_layers(model, timm_rep.convert.folded_copy(model)) == [
        'part.0.blocks.0.mlp', 'part.0.blocks.1.mlp']


class Lora(nn.Module):
    """An adapter with the attributes of the layer in it, as peft's."""

    def __init__(self, layer, attributes):
        super().__init__()
        self.base_layer = layer
        self.down = nn.Conv2d(layer.in_channels, 2, layer.kernel_size, layer.stride, layer.padding)
        self.up = nn.Conv2d(2, layer.out_channels, 1)
        for name in attributes:
            setattr(self, name, getattr(layer, name))

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Doubling(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


GEOMETRY = ('kernel_size', 'stride', 'padding', 'dilation', 'groups', 'in_channels', 'out_channels')


def repvgg():
    torch.manual_seed(0)
    model = randomize_(multi_branch.FAMILIES['byobnet, RepVGG']()).eval()
    model.stages[1][0].requires_grad_(False)
    return model


def assert_unchanged(model, before):
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert same_weights(model, before)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in before.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize('adapter', [
    lambda layer: Lora(layer, GEOMETRY),
    lambda layer: Lora(layer, ()),
    lambda layer: Doubling(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, bias=False),
])
def test_adapters_in_blocks_of_timm(adapter):
    """timm would fold the weight that they show, and drop what they add to it."""
    model = repvgg()
    block = model.stages[1][0].conv_kxk
    block.conv = adapter(block.conv)
    before, x = copy.deepcopy(model), images(2, 56)
    expected = model(x)
    with pytest.raises(ValueError, match=r'stages\.1\.0\.conv_kxk\.conv cannot be folded'):
        timm_rep.convert.reparameterize(model)
    assert_unchanged(model, before)
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_parametrized_weights():
    model, x = repvgg(), images(2, 56)
    nn.utils.parametrizations.weight_norm(model.stages[1][0].conv_kxk.conv)
    expected = model(x)
    torch.testing.assert_close(timm_rep.convert.reparameterize(model)(x), expected, rtol=1e-4, atol=1e-4)


class Fails(nn.Module):
    def fuse(self):
        raise NotImplementedError('not yet')


@pytest.mark.parametrize('hooked', [False, True])
def test_all_or_none(hooked):
    """What was folded before a module that cannot be is unfolded again, and hooks can still be removed."""
    model = nn.Sequential(repvgg(), randomize_(timm.create_model(
        'repa_deit_tiny', img_size=56, patch_size=8, embed_dim=24, depth=2, num_heads=3)), Fails())
    calls = []
    handle = model[0].stages[0].register_forward_hook(lambda *args: calls.append(1))
    if not hooked:
        handle.remove()
    model[0].head.fc.register_buffer('own', torch.ones(3), persistent=False)
    before = copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match='not yet'):
        timm_rep.convert.reparameterize(model)
    assert_unchanged(model, before)
    assert not model[1].reparameterized
    model[0](images(1, 56))
    handle.remove()
    model[0](images(1, 56))
    assert len(calls) == hooked
    del model[2]
    assert timm_rep.convert.reparameterize(model)[1].reparameterized


@pytest.mark.parametrize('converted', [False, True])
@pytest.mark.parametrize('name', [
    'stages.0.blocks.0.norm', pytest.param('stages.2.blocks.4.norm2', marks=pytest.mark.slow)])
@torch.no_grad()
def test_all_or_none_within_parameters(name, converted):
    """NextViT's blocks multiply their weights in place."""
    model, x = build(NEXTVIT)
    if converted:
        timm_rep.convert_to_repa(model, idle_ratio=.5, anneal_steps=2)
        with torch.enable_grad():
            for _ in range(3):
                model.train()(x).sum().backward()
        model.zero_grad()
        model.eval()
    before = copy.deepcopy(model)
    handle = model.get_submodule(name).register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match='hooks'):
        timm_rep.convert.reparameterize(model)
    handle.remove()
    assert_unchanged(model, before)
    expected = before(x)
    assert torch.equal(model(x), expected)
    assert relative(timm_rep.convert.reparameterize(model)(x), expected) < 1e-4


def test_no_module():
    with pytest.raises(TypeError, match='Expected a timm model'):
        timm_rep.convert.reparameterize('repa_deit_tiny')


def test_one_layer():
    """It has no parent in which its folded form could take its place."""
    layer = RePaMlp(8, 16)
    with pytest.raises(ValueError, match=r'RePaMlp is one layer.* fuse'):
        timm_rep.convert.reparameterize(layer)
    folded = layer.fuse()
    assert timm_rep.convert.reparameterize(folded) is folded


@pytest.mark.parametrize('name,args', [
    ('repa_deit_tiny', dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)),
    pytest.param('mobileone_s0', {}, marks=pytest.mark.slow),
    ('repa_any', dict(base='fastvit_t8')),
])
def test_parameters_of_inference_mode(name, args):
    """Of a model that was created in it; in it and outside, and if an error is raised."""
    x = images(2, 32).double()
    with torch.inference_mode():
        models = [randomize_(timm.create_model(name, **args).double()).eval() for _ in range(2)]
        expected = [model(x) for model in models]
        timm_rep.convert.reparameterize(models[0])
    with pytest.raises(NotImplementedError, match='not yet'):
        timm_rep.convert.reparameterize(nn.Sequential(models[1], Fails()))
    with torch.inference_mode():
        torch.testing.assert_close(models[1](x), expected[1])
    timm_rep.convert.reparameterize(models[1])
    with torch.inference_mode():
        torch.testing.assert_close([model(x) for model in models], expected)
        if name == 'repa_any':
            assert timm.create_model(name, reparameterized=True, **args)(x.float()).shape == (2, 1000)


@pytest.mark.parametrize('fold', [timm_rep.convert.reparameterize, timm.utils.reparameterize_model])
def test_a_converted_fastvit_inside_a_model(fold):
    """timm visits its modules again after the method that folds all of them."""
    model = nn.Sequential(randomize_(timm.create_model('repa_any', base='fastvit_t8').double())).eval()
    x = images(2, 32).double()
    expected = model(x)
    folded = fold(model)
    assert all(block.token_mixer.reparam_conv is not None for block in folded[0].stages[0].blocks)
    torch.testing.assert_close(folded(x), expected)
    torch.testing.assert_close(fold(folded)(x), expected)
