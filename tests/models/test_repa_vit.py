import copy
import math
from functools import partial
from types import MappingProxyType

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models._manipulate import group_parameters
from timm.utils import reparameterize_model

import timm_rep  # noqa: F401
from tests import helpers
from tests.helpers import randomize_, relative
from tests.models import contract
from tests.models.contract import RePaContract
from tests.reference import ffn
from timm_rep.layers import RePaMlp, RePaMlpDeploy

VARIANTS = [
    'repa_deit_tiny', 'repa_deit_small', 'repa_deit_base',
    'repa_vit_small', 'repa_vit_base', 'repa_vit_large', 'repa_vit_huge',
]
TINY = {**helpers.TINY['repa_deit'], 'depth': 3}
images = partial(helpers.images, size=32)


def tiny(**kwargs):
    return helpers.tiny('repa_deit_tiny', **{'depth': 3, **kwargs})


def trained(**kwargs):
    return randomize_(tiny(**kwargs))


def test_registered():
    assert set(VARIANTS) <= set(timm.list_models('repa_*'))
    assert set(timm.list_models(module='repa_vit')) == set(VARIANTS)
    assert timm.is_model('repa_deit_base')


@pytest.mark.parametrize('kwargs', [
    dict(),
    dict(idle_ratio=0.),
    dict(idle_ratio=1.),
    dict(idle_ratio=.4, mlp_ratio=2.5, init_values=.1),
    dict(idle_schedule='linear', act_layer='silu'),
    dict(class_token=False, global_pool='avg', reg_tokens=2, qk_norm=True),
    dict(proj_bias=False, qkv_bias=False, norm_layer='rmsnorm', pre_norm=False),
], ids=str)
@torch.no_grad()
def test_reparameterize_is_exact(kwargs):
    model = trained(**kwargs)
    x = images()
    expected = model(x)
    utility = reparameterize_model(model)
    assert any(isinstance(m, RePaMlp) for m in model.modules())  # the utility works on a copy
    model.train()  # timm's scripts fold before .eval()
    assert model.reparameterize() is model
    model.eval()
    assert not any(isinstance(m, (RePaMlp, nn.BatchNorm1d)) for m in model.modules())
    assert relative(model(x), expected) < 1e-5
    assert torch.equal(utility(x), model(x))
    once = {k: v.clone() for k, v in model.state_dict().items()}
    model.reparameterize()
    assert once.keys() == model.state_dict().keys()
    assert all(torch.equal(v, once[k]) for k, v in model.state_dict().items())
    assert 'RePaMlpDeploy' in repr(model)
    assert 'BatchNorm' not in repr(model)

    built = tiny(reparameterized=True, **kwargs).eval()
    assert built.reparameterized
    built.load_state_dict(once, strict=True)
    assert torch.equal(built(x), model(x))
    assert repr(built) == repr(model)


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name == 'repa_deit_tiny' else pytest.mark.slow) for name in VARIANTS])
@torch.no_grad()
def test_reparameterize_full_size(name):
    torch.manual_seed(0)
    model = randomize_(timm.create_model(name))
    x = images(1, size=224)
    expected = model(x)
    assert relative(model.reparameterize()(x), expected) < 1e-5


def test_a_failed_reparameterization_changes_nothing():
    for error, spoil in [
        (ValueError, lambda mlp: setattr(mlp.norm1, 'running_mean', None)),
        (OverflowError, lambda mlp: mlp.half().norm1.weight.data.fill_(6e4)),
    ]:
        model = trained()
        spoil(model.blocks[1].mlp)
        with pytest.raises(error):
            model.reparameterize()
        assert all(type(block.mlp) is RePaMlp for block in model.blocks)
        assert not model.reparameterized


@pytest.mark.parametrize('kwargs', [
    dict(),
    dict(init_values=.3),
    dict(act_layer='relu'),
    dict(mlp_ratio=2.5, idle_ratio=.5),
    dict(proj_bias=False),
], ids=str)
@torch.no_grad()
def test_block_is_equation_1_and_3(kwargs):
    """One block, by hand: attention on the LayerNorm of x, plus x; then the reference FFN."""
    model = trained(depth=1, **kwargs).double()
    block = model.blocks[0]
    gamma = 1.
    if 'init_values' in kwargs:
        gamma = block.ls1.gamma.normal_()
        assert 'ls.gamma' in block.mlp.state_dict()
    hidden = int(24 * kwargs.get('mlp_ratio', 4))
    assert block.mlp.fc1.out_features == hidden
    assert (block.mlp.fc1.bias is None) == (block.mlp.fc2.bias is None) == ('proj_bias' in kwargs)
    x = torch.randn(2, 17, 24, dtype=torch.float64)
    y = F.layer_norm(x, (24,), block.norm1.weight, block.norm1.bias, 1e-5)
    q, k, v = (y @ block.attn.qkv.weight.T + block.attn.qkv.bias).reshape(2, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
    y = ((q @ k.transpose(-2, -1)) / 8 ** 0.5).softmax(-1) @ v
    y = y.transpose(1, 2).reshape(2, 17, 24) @ block.attn.proj.weight.T
    y = x + gamma * (y if block.attn.proj.bias is None else y + block.attn.proj.bias)
    act = F.relu if 'act_layer' in kwargs else F.gelu
    active = math.ceil(hidden * (1 - kwargs.get('idle_ratio', .75)))
    expected = y + ffn(y.flatten(0, 1), block.mlp.state_dict(), act, active).view(2, 17, 24)
    assert relative(block(x), expected) < 1e-12


def test_drop_rates_reach_both_halves_of_a_block():
    model = tiny(drop_path_rate=.5, proj_drop_rate=.25, attn_drop_rate=.125).train()
    block = model.blocks[2]
    assert (block.drop_path1.drop_prob, block.drop_path2.drop_prob) == (.5, .5)
    assert (block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p) == (.25, .25, .25)
    assert block.attn.attn_drop.p == .125
    block.attn.eval()
    x = torch.randn(64, 17, 24)
    kept = sum(torch.equal(a, b) for a, b in zip(x, block(x)))  # images that kept neither half
    assert 5 < kept < 30


def test_norms_are_the_released_ones():
    model = tiny()
    assert (model.norm_pre.eps, model.norm.eps, model.blocks[1].norm1.eps) == (1e-6, 1e-6, 1e-5)
    assert model.patch_embed.proj.bias is None
    bn = tiny(bn_momentum=.05, bn_eps=1e-3).blocks[2].mlp.norm2
    assert (bn.momentum, bn.eps) == (.05, 1e-3)


def test_keys_match_timm_vit():
    """Everything outside the FFN is timm's module under timm's name, so its weights go over as they are."""
    plain = timm.create_model('deit_tiny_patch16_224', pre_norm=True, **TINY).state_dict()
    own = tiny().state_dict()
    outside = {k for k in plain if '.mlp.' not in k and '.norm2.' not in k}
    assert outside == {k for k in own if '.mlp.' not in k}
    assert {k for k in plain if '.mlp.' in k} <= own.keys()


@pytest.mark.parametrize('strict', [True, False])
def test_loading_the_other_structure(strict):
    training, deploy = tiny(), tiny(reparameterized=True)
    for model, other, match in [
        (deploy, training, 'deploy structure.*training structure.*reparameterize'),
        (training, deploy, 'training structure.*deploy structure.*reparameterized=True'),
    ]:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=match):
            model.load_state_dict(other.state_dict(), strict=strict)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        wrapped = nn.ModuleDict({'module': model})
        with pytest.raises(RuntimeError, match='structure'):
            wrapped.load_state_dict({f'module.{k}': v for k, v in other.state_dict().items()}, strict=strict)
    for ratio in (0., 1.):
        with pytest.raises(RuntimeError, match='deploy structure'):
            tiny(idle_ratio=ratio).load_state_dict(tiny(idle_ratio=ratio, reparameterized=True).state_dict())
        with pytest.raises(RuntimeError, match='training structure'):
            tiny(idle_ratio=ratio, reparameterized=True).load_state_dict(tiny(idle_ratio=ratio).state_dict())
    # a plain timm ViT is neither: torch names what is missing
    with pytest.raises(RuntimeError, match='Missing key'):
        training.load_state_dict(timm.create_model('deit_tiny_patch16_224', **TINY).state_dict())


class TestContract(RePaContract):
    """The interface of any timm ViT, in both structures."""
    variants = VARIANTS
    tiny, trained_form = map(staticmethod, (tiny, trained))
    training = MappingProxyType(dict(global_pool='avg'))
    size = 32
    block = 'blocks.1'
    layers = 2 + 3  # stem, blocks, head and final norm
    timms = 'deit_tiny_patch16_224'
    taps = ((2, 24, 4, 4),) * 3
    feature_args = MappingProxyType(dict(out_indices=(0, 2)))
    features = ((24, 8, (2, 24, 4, 4)),) * 2
    arguments = (
        (dict(num_classes=0), (2, 24)),
        (dict(num_classes=0, global_pool=''), (2, 17, 24)),
        (dict(global_pool='avg'), (2, 5)),
        (dict(in_chans=1), (2, 5)),
        (dict(embed_dim=12, depth=2, mlp_ratio=1.5), (2, 5)),
        (dict(drop_path_rate=.3, proj_drop_rate=.1, drop_rate=.1, patch_drop_rate=.2), (2, 5)),
        (dict(fix_init=True, weight_init='jax'), (2, 5)),
    )

    @torch.no_grad()
    def test_feature_shapes(self, model):
        assert model.forward_features(images()).shape == (2, 17, 24)

    @torch.no_grad()
    def test_forward_intermediates(self, model):
        super().test_forward_intermediates(model)
        x = images()
        final, taps = model.forward_intermediates(x)
        last, prefix = model.forward_intermediates(
            x, [2], return_prefix_tokens=True, norm=True, output_fmt='NLC', intermediates_only=True)[0]
        assert torch.equal(torch.cat([prefix, last], 1), final)
        early = model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)
        assert torch.equal(early[0], taps[0])
        assert torch.equal(model.get_intermediate_layers(x, [1], reshape=True)[0], taps[1])

    @torch.no_grad()
    def test_prune_intermediate_layers(self, model):
        x = images()
        taps = model.forward_intermediates(x, intermediates_only=True)
        model.prune_intermediate_layers([1])
        assert len(model.blocks) == 2
        assert torch.equal(model.forward_intermediates(x, [1], intermediates_only=True)[0], taps[1])

    def test_attention_mask(self, model):
        mask = torch.ones(17, 17, dtype=torch.bool).tril()
        with torch.no_grad():
            causal = model(images(), is_causal=True)
            assert torch.allclose(model(images(), attn_mask=mask), causal, atol=1e-6)
            assert relative(model(images()), causal) > 1e-3

    def test_image_sizes(self, model, kind):
        with torch.no_grad():
            expected = model(images())
            dynamic = tiny(dynamic_img_size=True, reparameterized=kind == 'deploy').eval()
            dynamic.load_state_dict(model.state_dict())
            assert torch.equal(dynamic(images()), expected)
            assert dynamic(images(size=48)).shape == (2, 5)
            model.set_input_size(img_size=48)
            assert torch.allclose(model(images(size=48)), dynamic(images(size=48)), atol=1e-5)
            assert tiny(img_size=(48, 32), reparameterized=kind == 'deploy')(torch.randn(2, 3, 48, 32)).shape == (2, 5)

    def test_parameter_groups(self, model):
        super().test_parameter_groups(model)
        groups = group_parameters(model, model.group_matcher(), reverse=True)
        assert len({groups[n] for n in groups if n.startswith('blocks.1.')}) == 1
        assert model.no_weight_decay() & groups.keys() == {'pos_embed', 'cls_token'}

    @pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float16])
    def test_dtype(self, model, kind, dtype):
        built = tiny(dtype=dtype, reparameterized=kind == 'deploy').eval()
        assert all(p.dtype == dtype for p in built.parameters())
        built.load_state_dict(model.state_dict())
        y = built(images(dtype=dtype))
        assert y.dtype == dtype
        assert relative(y.float(), model(images(dtype=dtype).float())) < 5e-2

    def test_autocast(self, model):
        with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
            y = model(images())
        assert relative(y.float(), model(images())) < 5e-2

    @pytest.mark.slow
    def test_compile_inductor(self, model):
        with torch.no_grad():
            assert torch.allclose(torch.compile(model)(images()), model(images()), atol=1e-5)


def test_refusals():
    for kwargs, match in [
        (dict(idle_ratio=1.5), r'idle.ratio'),
        (dict(idle_schedule='cosine'), "'constant' or 'linear'"),
        (dict(mlp_layer=nn.Identity), r'blocks\.0\.mlp is a Identity'),
    ]:
        with pytest.raises(ValueError, match=match):
            tiny(**kwargs)
    with pytest.raises(TypeError):
        tiny(not_an_argument=1)


def test_deploy_form_is_in_place_everywhere():
    model = tiny(idle_schedule='linear', depth=5, reparameterized=True)
    forms = [{n for n, _ in block.mlp.named_parameters()} for block in model.blocks]
    assert all(isinstance(block.mlp, RePaMlpDeploy) for block in model.blocks)
    three = {'fc_in.weight', 'fc_in.bias', 'fc_out.weight', 'fc_idle.weight', 'fc_idle.bias'}
    assert forms[0] == forms[1] == three
    assert forms[3] == {'fc_idle.weight', 'fc_idle.bias'}  # ratio 1
    assert forms[4] == {'fc_in.weight', 'fc_in.bias', 'fc_out.weight', 'fc_out.bias'}  # ratio 0


@pytest.mark.slow
def test_compiles_and_exports():
    """The other families and structures: -m slow."""
    contract.check_compile(tiny(depth=1), images())
    contract.check_export(tiny(depth=1).eval().reparameterize(), images)
