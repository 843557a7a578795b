import copy
import pickle
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import BatchNormAct2d, GroupNorm1
from timm.models import beit, convit, eva, gcvit, metaformer, mlp_mixer, nest, volo
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model

import timm_rep
from tests.helpers import relative, same_weights, wild_
from tests.models import contract
from timm_rep.convert.ffn_classes import _BLOCKS, find_blocks
from timm_rep.convert.record import recorded_base
from timm_rep.layers import RePaMlp, RePaMlpDeploy, is_reparameterized

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
MAXVIT = dict(img_size=64, embed_dim=(32, 32), depths=(1, 1), stem_width=8)
# for every class of blocks a small model, by its timm name or its class, and the size of its images
MODELS = {
    'deit3': ('deit3_small_patch16_224', VIT, 32),
    'siglip': ('vit_base_patch16_siglip_224', VIT, 32),
    'beit': ('beit_base_patch16_224', dict(VIT, init_values=.1), 32),
    'beit without layer scale': (beit.Beit, dict(VIT, init_values=None), 32),
    'eva': ('eva_giant_patch14_224', VIT, 32),
    'eva with norms': (eva.Eva, dict(VIT, scale_mlp=True, init_values=.2), 32),
    'cait': ('cait_xxs24_224', VIT, 32),
    'convit': (convit.ConVit, dict(VIT, local_up_to_layer=1, embed_dim=8), 32),
    'convnext': ('convnext_atto', dict(dims=(8, 16, 16, 16), depths=(1, 1, 1, 1)), 64),
    'davit': ('davit_tiny', dict(depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4)), 56),
    'gcvit': (gcvit.GlobalContextVit, dict(
        img_size=64, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), embed_dim=8), 64),
    'hiera': ('hiera_tiny_224', dict(embed_dim=16, num_heads=1, stages=(1, 1, 1, 1), img_size=64), 64),
    'hieradet': ('hieradet_small', dict(
        embed_dim=16, num_heads=1, stages=(1, 1, 2, 1), window_spec=(8, 4, 4, 2), global_att_blocks=(3,)), 128),
    'lvvit': ('lvvit_s', dict(img_size=64, embed_dim=24, depth=2, num_heads=2), 64),
    'maxvit': ('maxvit_rmlp_pico_rw_256', MAXVIT, 64),
    'maxvit in parallel': ('maxvit_tiny_pm_256', MAXVIT, 64),
    'poolformer': (metaformer.MetaFormer, dict(
        depths=(1, 1), dims=(16, 24), norm_layers=GroupNorm1, layer_scale_init_values=.1, use_mlp_head=False), 32),
    'caformer': (metaformer.MetaFormer, dict(
        depths=(1, 1), dims=(16, 32), token_mixers=[metaformer.SepConv, metaformer.Attention],
        norm_layers=[metaformer.LayerNorm2dNoBias, metaformer.LayerNormNoBias], res_scale_init_values=[None, .5]), 32),
    'mixer': (mlp_mixer.MlpMixer, dict(img_size=64, embed_dim=24, num_blocks=2), 64),
    'resmlp': (mlp_mixer.MlpMixer, dict(
        img_size=32, embed_dim=24, num_blocks=2, mlp_ratio=4, block_layer=mlp_mixer.ResBlock,
        norm_layer=mlp_mixer.Affine), 32),
    'nest': (nest.Nest, dict(
        img_size=32, embed_dims=(16, 32), num_heads=(2, 4), depths=(1, 1), num_levels=2), 32),
    'sequencer': ('sequencer2d_s', dict(layers=(1, 1, 1, 1), embed_dims=[16] * 4, hidden_sizes=[4] * 4), 64),
    'swin': ('swin_tiny_patch4_window7_224', dict(img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4)), 56),
    'twins': ('twins_svt_small', dict(
        img_size=64, embed_dims=[16] * 4, num_heads=[1] * 4, depths=[2, 1, 1, 1]), 64),
    'relpos': ('vit_relpos_small_patch16_224', dict(VIT, init_values=.1), 32),
    'sam': ('samvit_base_patch16_224', dict(VIT, global_attn_indexes=(1,), window_size=2), 32),
    'volo': (volo.VOLO, dict(
        img_size=64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), num_heads=(2, 2, 2, 2)), 64),
}


def build(kind, **kwargs):
    torch.manual_seed(0)
    model, args, size = MODELS[kind]
    model = partial(timm.create_model, model) if isinstance(model, str) else model
    return model(**{'num_classes': 5, **args, **kwargs}).eval(), contract.images(2, size)


def ffns(model):
    return [m for m in model.modules() if isinstance(m, RePaMlp)]


@pytest.mark.parametrize('kind', MODELS)
@torch.no_grad()
def test_what_is_kept_and_what_folds(kind):
    model, x = build(kind)
    for parameter in model.parameters():
        if parameter.numel() == parameter.shape[-1]:  # layer scales and norms of no initialization, among others
            parameter.uniform_(.1, 1)
    # without the norms of the FFNs it is the same function, if these are neutral and nothing idles
    plain, parameters = copy.deepcopy(model), dict(model.named_parameters())
    converted = copy.deepcopy(model)
    timm_rep.convert_to_repa(converted, idle_ratio=0.)
    replaced = 0
    for block in find_blocks(plain):
        setattr(block.module, block.norm, nn.Identity())
        getattr(block.module, block.mlp).norm = nn.Identity()
        replaced += 1
    assert replaced == len(ffns(converted)) > 0
    for mlp in ffns(converted):
        for norm in (mlp.norm1, mlp.norm2):
            assert norm.running_var.eq(1).all()
            norm.weight.fill_((1 + norm.eps) ** .5)
            norm.bias.zero_()
    assert relative(converted(x), plain(x)) < 1e-5

    report = timm_rep.convert_to_repa(model)
    assert [ffn.hidden_features for ffn in report.ffns] == [mlp.act.channels for mlp in ffns(model)]
    assert [ffn.active_features for ffn in report.ffns] == [mlp.act.active_channels for mlp in ffns(model)]
    assert all(model.get_submodule(ffn.name) is mlp for ffn, mlp in zip(report.ffns, ffns(model)))
    assert not report.kept
    for i, mlp in enumerate(ffns(model)):
        hidden = mlp.act.channels
        assert mlp.act.active_channels == -(-hidden // 4)
        # the norm that was there gives its scale and shift
        assert mlp.norm1.weight.min() < 1
        before = mlp.norm1.weight.clone()
        wild_(mlp, i, log_var=(-1, 1))
        mlp.norm1.weight.copy_(before)
    kept = dict(model.named_parameters())
    assert all(kept[k] is p for k, p in parameters.items() if k in kept)
    assert not any('.fc1.' in k or '.fc2.' in k for k in parameters.keys() - kept.keys())
    expected = model(x)
    utility = reparameterize_model(model)
    assert model.train().reparameterize() is model
    model.eval()
    assert any(isinstance(m, RePaMlpDeploy) for m in model.modules())
    assert not ffns(model)
    assert relative(model(x), expected) < 1e-5
    assert torch.equal(utility(x), model(x))


def test_every_class_of_blocks_is_tested():
    tested = {cls for kind in MODELS for block in find_blocks(build(kind)[0]) for cls in type(block.module).__mro__}
    names = {f'{cls.__module__}.{cls.__qualname__}' for cls in tested}
    assert {name for name in _BLOCKS if name.startswith('timm.')} <= names


def test_weights_that_have_a_place_are_kept():
    model, _ = build('deit3', proj_drop_rate=.1, drop_path_rate=.2)
    before = copy.deepcopy(model.state_dict())
    dropped = model.blocks[1].drop_path2
    timm_rep.convert_to_repa(model, idle_ratio=.5, idle_schedule='linear', bn_momentum=.3, bn_eps=1e-3)
    after = model.state_dict()
    for i, block in enumerate(model.blocks):
        for ours, theirs in [
            ('mlp.fc1.weight', 'mlp.fc1.weight'), ('mlp.fc2.bias', 'mlp.fc2.bias'), ('mlp.norm1.bias', 'norm2.bias'),
            ('mlp.norm1.weight', 'norm2.weight'), ('mlp.ls.gamma', 'ls2.gamma'), ('attn.qkv.weight', 'attn.qkv.weight'),
        ]:
            assert torch.equal(after[f'blocks.{i}.{ours}'], before[f'blocks.{i}.{theirs}'])
        assert (block.mlp.drop1.p, block.mlp.norm1.momentum, block.mlp.norm2.eps) == (.1, .3, 1e-3)
    assert model.blocks[1].drop_path2 is dropped
    assert [b.mlp.act.active_channels for b in model.blocks] == [0, 96]
    assert not any(part in k for k in after for part in ('ls2.', '1.norm2.', '0.norm2.'))


def test_training_and_copies():
    """A converted model trains, and its copies, pickles and state dicts work as for any model."""
    model, x = build('deit3')
    timm_rep.convert_to_repa(model.train())
    assert model.training
    assert all(mlp.training for mlp in ffns(model))
    optimizer = create_optimizer_v2(model, opt='adamw', lr=3e-3, weight_decay=.05)
    x, target = contract.images(10, 32), torch.arange(10) % 5
    losses = contract.train(model, optimizer, x, target, steps=25)
    assert losses[-1] < .5 * losses[0]
    model.eval()
    assert not is_reparameterized(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(x), model(x))
        assert relative(other.reparameterize()(x), model(x)) < 1e-4
        assert is_reparameterized(other)
        assert not is_reparameterized(model)
    again, _ = build('deit3')
    timm_rep.convert_to_repa(again)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    how = 'convert a model with the same arguments, call its reparameterize'
    if recorded_base(build('deit3')[0]):  # timm 1.0.31
        how = "create it as 'repa_any' with base='deit3_.*', the same arguments and reparameterized=True"
    with pytest.raises(RuntimeError, match=how):
        again.load_state_dict(model.reparameterize().state_dict())
    assert type(model) is timm.models.VisionTransformer


def test_dtypes_devices_and_frozen_weights():
    model, _ = build('relpos', dtype=torch.bfloat16)
    timm_rep.convert_to_repa(model.requires_grad_(False))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert not ffns(model)[0].fc1.weight.requires_grad
    meta, _ = build('poolformer', device='meta')
    timm_rep.convert_to_repa(meta)
    meta.reparameterize()
    assert all(p.is_meta for p in meta.parameters())


@pytest.mark.parametrize('name,args,message', [
    ('eva02_tiny_patch14_224', dict(VIT), r'blocks\.0\.mlp is a GluMlp.*blocks\.1\.mlp is a GluMlp'),
    ('eva02_tiny_patch14_224', dict(VIT, swiglu_mlp=True, scale_mlp=True), r'blocks\.0\.mlp is a SwiGLU'),
    ('swinv2_tiny_window8_256', dict(), r'layers\.0\.blocks\.0\.mlp is in a block .*register_block.* and 7 more'),
    ('pvt_v2_b0', dict(), r'stages\.0\.blocks\.0\.mlp has a depthwise convolution'),
    ('resnet18', dict(), 'ResNet'),
    ('repa_deit_tiny', dict(), 'RePaVisionTransformer .*foldable'),
])
def test_other_models_are_refused_and_left_alone(name, args, message):
    model = timm.create_model(name, device='meta', **args)
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        timm_rep.convert_to_repa(model)
    assert repr(model) == before


def test_wrapped_models_are_refused_and_frozen_ones_stay_frozen():
    model, _ = build('deit3')
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend='eager')):
        with pytest.raises(ValueError, match='before wrapping it'):
            timm_rep.convert_to_repa(wrapped)
    with pytest.raises(ValueError, match=r'Feature\w+ wraps another model'):
        timm_rep.convert_to_repa(build('swin', features_only=True)[0])
    timm_rep.convert_to_repa(model.requires_grad_(False))
    assert not any(p.requires_grad for p in ffns(model)[0].norm1.parameters())
    assert ffns(model)[0].norm2.weight.requires_grad  # of which there was none


def test_bad_ratios_change_nothing():
    model, _ = build('deit3')
    before = repr(model)
    for kwargs in (dict(idle_ratio=1.5), dict(idle_schedule='cosine')):
        with pytest.raises(ValueError, match='idle_'):
            timm_rep.convert_to_repa(model, **kwargs)
    assert repr(model) == before
    timm_rep.convert_to_repa(model)
    with pytest.raises(ValueError, match=r'VisionTransformer .*foldable'):
        timm_rep.convert_to_repa(model)


def test_scale_and_shift_of_norms_are_kept():
    """Also of a norm of the hidden features."""
    model, _ = build('eva with norms')
    with torch.no_grad():
        for p in model.parameters():
            if p.numel() == max(p.shape, default=1):
                p.uniform_(.2, 1.2)
    old = copy.deepcopy(model)
    timm_rep.convert_to_repa(model)
    for block, before in zip(model.blocks, old.blocks):
        for ours, theirs in ((block.mlp.norm1, before.norm2), (block.mlp.norm2, before.mlp.norm)):
            assert isinstance(theirs, nn.LayerNorm)
            assert torch.equal(ours.weight, theirs.weight)
            assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize('mode', [False, True])
def test_batch_norms_keep_their_statistics_and_mode(mode):
    """A network whose norms are BatchNorms, frozen or not."""
    model = metaformer.MetaFormer(
        depths=(1, 1), dims=(8, 16), num_classes=5, norm_layers=nn.BatchNorm2d, output_norm=nn.BatchNorm2d).train()
    for block in (m for stage in model.stages for m in stage.blocks):
        norm = block.norm2.train(mode)
        norm.running_mean.normal_()
        norm.running_var.uniform_(.5, 2)
        norm.weight.data.normal_()
    expected = copy.deepcopy(model.stages[1].blocks[0].norm2)
    timm_rep.convert_to_repa(model)
    found = model.stages[1].blocks[0].mlp.norm1
    assert same_weights(found, expected)
    assert found.training == mode
    assert model.stages[1].blocks[0].mlp.norm2.training


@pytest.mark.parametrize('kwargs', [{}, dict(anneal_steps=2, norm='batch')], ids=str)
def test_norms_with_an_activation_are_refused(kwargs):
    """The matrices hold no activation but that of the FFN."""
    model = metaformer.MetaFormer(
        token_mixers=metaformer.Pooling, norm_layers=BatchNormAct2d, depths=(1,) * 4, dims=(8,) * 4, num_classes=3)
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=r'mlp follows a BatchNormAct2d, .* Nothing was changed'):
        timm_rep.convert_to_repa(model, **kwargs)
    assert list(model.state_dict()) == before


@pytest.mark.parametrize('part', ['ls2', 'norm2'])
@pytest.mark.parametrize('kwargs', [{}, dict(anneal_steps=2, norm='batch')], ids=['to train', 'annealed'])
def test_hooks_on_what_moves_into_the_ffn(part, kwargs):
    """They would be lost, and with them what they compute; those on other parts stay."""
    model, x = build('deit3')
    hook = getattr(model.blocks[0], part).register_forward_hook(lambda module, args, y: y * 3)
    before = model(x)
    with pytest.raises(ValueError, match=rf'blocks\.0\.mlp .*{part} has hooks'):
        timm_rep.convert_to_repa(model, **kwargs)
    assert torch.equal(model(x), before)
    hook.remove()
    model.blocks[0].norm1.register_forward_hook(lambda module, args, y: y * 3)
    timm_rep.convert_to_repa(model, **kwargs)
    assert model.blocks[0].norm1._forward_hooks
