"""Small models for the tests of convert: one or more of every file of ``timm.models`` that has pointwise FFNs."""
from functools import partial

import timm
import torch
import torch.nn as nn
from timm.layers import GluMlp
from timm.models import (
    byobnet,
    coat,
    convnext,
    crossvit,
    edgenext,
    efficientformer,
    efficientvit_msra,
    eva,
    fasternet,
    fastvit,
    focalnet,
    inception_next,
    levit,
    mlp_mixer,
    mobilevit,
    mvitv2,
    nextvit,
    pit,
    rdnet,
    repvit,
    shvit,
    starnet,
    swiftformer,
    swin_transformer_v2,
    swin_transformer_v2_cr,
    tiny_vit,
    tnt,
    visformer,
    vision_transformer,
    vitamin,
    xcit,
)

from tests.convert.test_to_train import MODELS
from tests.helpers import images

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
MAXXVIT = dict(img_size=64, embed_dim=(16, 32), depths=(1, 1), stem_width=8)
LEVIT = dict(img_size=64, stem_type='s8', embed_dim=(16, 24), depth=(1, 1), num_heads=(2, 2), key_dim=8)


def gate_first(*args, **kwargs):
    return GluMlp(*args, gate_last=False, **kwargs)


def _mobilevit(block, **kwargs):
    def build(num_classes):
        cfg = byobnet.ByoModelCfg(
            blocks=tuple(block(d=1, c=c, s=2, transformer_depth=1, patch_size=2, **kwargs) for c in (8, 16)),
            stem_chs=8, stem_type='3x3', stem_pool='', downsample='', num_features=24, act_layer='silu')
        return byobnet.ByobNet(cfg, num_classes)
    return build


def _vitamin(num_classes):
    cfg = vitamin.VitCfg(
        embed_dim=(8, 16, 24), depths=(1, 1, 1), stem_width=8, head_type='1d',
        conv_cfg=vitamin.VitConvCfg(norm_layer='layernorm2d', norm_eps=1e-6))
    return timm.create_model(
        'vitamin_small_224', embed_cfg=cfg, embed_dim=24, depth=1, num_heads=2, img_size=64, num_classes=num_classes)


def _mvitv2(num_classes):
    cfg = mvitv2.MultiScaleVitCfg(depths=(1, 1), embed_dim=(16, 32), num_heads=(1, 2), stride_q=((1, 1), (2, 2)))
    return mvitv2.MultiScaleVit(cfg, img_size=(32, 32), num_classes=num_classes)


# one model for every FFN class and option: model name or class, arguments, size and number of the images
CLASSES = {
    'Mlp: vision_transformer': ('vit_tiny_patch16_224', VIT, 32),
    'Mlp with LayerNorm: vision_transformer': ('vit_base_patch16_224', dict(VIT, scale_mlp_norm=True), 32),
    'Mlp with convolutions: convnext': (
        convnext.ConvNeXt, dict(
        dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), conv_mlp=True, ls_init_value=.5), 64),
    'Mlp called several times: coat': (coat.CoaT, dict(
        img_size=64, patch_size=4, embed_dims=(16, 16, 16, 16), serial_depths=(1, 1, 1, 1), parallel_depth=1,
        num_heads=8, mlp_ratios=(2, 2, 2, 2)), 64),
    'ConvMlp: maxxvit': ('coatnext_nano_rw_224', dict(MAXXVIT, num_classes=5), 64),
    'GluMlp: mlp_mixer': (mlp_mixer.MlpMixer, dict(
        img_size=32, patch_size=8, embed_dim=24, num_blocks=2, mlp_ratio=(1., 4.), mlp_layer=GluMlp,
        act_layer=nn.SiLU), 32),
    'GluMlp, gates first: vision_transformer': (
        'vit_giant_patch14_dinov2', dict(VIT, mlp_layer=gate_first, mlp_ratio=4), 32),
    'GluMlp with LayerNorm: vision_transformer': (
        'vit_giant_patch14_dinov2', dict(VIT, mlp_ratio=4, scale_mlp_norm=True), 32),
    'SwiGLU: vision_transformer': ('aimv2_large_patch14_224', VIT, 32),
    'SwiGLU with LayerNorm: eva': (eva.Eva, dict(VIT, swiglu_mlp=True, scale_mlp=True, mlp_ratio=2), 32),
    'ConvMlpWithNorm: efficientformer': (efficientformer.EfficientFormer, dict(
        depths=(1, 2), embed_dims=(16, 24), num_vit=1, mlp_ratios=2, layer_scale_init_value=.5), 56),
    'FFN: efficientvim': ('efficientvim_m1', dict(
        embed_dim=(16, 24), depths=(1, 1), mlp_ratio=2., state_dim=(9, 9)), 64),
    'ConvMlp: efficientvit_msra': (efficientvit_msra.EfficientVitMsra, dict(
        img_size=64, embed_dim=(16, 24), key_dim=(4, 4), depth=(1, 1), num_heads=(2, 2), window_size=(4, 4),
        down_ops=(('', 1), ('subsample', 2))), 64),
    'ConvMlp: fastvit': (fastvit.FastVit, dict(
        layers=(1, 1), token_mixers=('repmixer', 'attention'), embed_dims=(32, 32), mlp_ratios=(2, 2),
        downsamples=(False, True), se_downsamples=(False, False), pos_embs=(None, None),
        layer_scale_init_value=.5), 32),
    'ConvMlp: inception_next': (inception_next.MetaNeXt, dict(
        depths=(1, 1), dims=(16, 24), mlp_ratios=(2, 2), ls_init_value=.5), 32),
    'LevitMlp: levit': (levit.Levit, LEVIT, 64),
    'LevitMlp with convolutions: levit': (levit.Levit, dict(LEVIT, use_conv=True), 64),
    'RepVitMlp: repvit': (repvit.RepVit, dict(embed_dim=(16, 24), depth=(1, 1)), 32),
    'FFN: shvit': (shvit.SHViT, dict(
        embed_dim=(16, 24, 32), partial_dim=(8, 8, 8), qk_dim=(4, 4, 4), depth=(1, 1, 1), types=('i', 's', 's')), 128),
    'Mlp: swiftformer': (swiftformer.SwiftFormer, dict(
        layers=[1, 2], embed_dims=[16, 24], mlp_ratios=2, downsamples=[False, True], layer_scale_init_value=.5), 32),
    'ConvEncoder: swiftformer': (swiftformer.SwiftFormer, dict(
        layers=[2, 2], embed_dims=[16, 24], mlp_ratios=2, downsamples=[False, True], layer_scale_init_value=.5), 32),
    'Block: starnet': (starnet.StarNet, dict(base_dim=8, depths=[1, 2], mlp_ratio=4), 64),
    'NormMlp: tiny_vit': (tiny_vit.TinyVit, dict(
        embed_dims=(16, 24), depths=(1, 1), num_heads=(2, 2), window_sizes=(4, 4), mlp_ratio=2.,
        drop_path_rate=0.), 64),
    'SpatialMlp: visformer': (visformer.Visformer, dict(
        img_size=64, patch_size=8, init_channels=8, embed_dim=24, depth=(1, 1, 1), num_heads=2, mlp_ratio=2.,
        group=2, attn_stage='011', spatial_conv='100', norm_layer=nn.BatchNorm2d), 64),
    'GeGluMlp: vitamin': (_vitamin, {}, 64),
    'MLPBlock: fasternet': (fasternet.FasterNet, dict(
        embed_dim=16, depths=(1, 1), feature_dim=24, layer_scale_init_value=.5), 32),
    'FFN: iformer': ('iformer_t', dict(
        dims=(8, 16, 24, 24), depths=(1, 1, 3, 3), attn_groups=(0, 0, 1, 1)), 64),
    'Block: rdnet': (rdnet.RDNet, dict(
        growth_rates=(16,), num_blocks_list=(2,), block_type=('Block',), is_downsample_block=(None,),
        num_init_features=16, ls_init_value=.5), 32),
}
# the other files of timm.models
FILES = {
    'coat, lite': (coat.CoaT, dict(
        img_size=64, patch_size=4, embed_dims=(16, 16, 24, 24), serial_depths=(1, 1, 1, 1), num_heads=8,
        mlp_ratios=(2, 2, 2, 2)), 64),
    'crossvit': (crossvit.CrossVit, dict(
        img_size=48, img_scale=(1., 32 / 48), patch_size=(6, 8), embed_dim=(16, 24), depth=((1, 2, 0),),
        num_heads=(2, 2), mlp_ratio=(2, 2, 1)), 48),
    'csatv2': ('csatv2', dict(
        dims=(16, 16, 24, 24), depths=(1, 1, 1, 1), transformer_depths=(0, 0, 1, 1)), 256),
    'deepseek_vit': ('deepseek_vit_412m', dict(
        img_size=48, patch_size=8, embed_dim=24, depth=1, num_heads=3, mlp_ratio=2., downsample_ratio=2), 48),
    'deit': ('deit_tiny_distilled_patch16_224', VIT, 32),
    'edgenext': (edgenext.EdgeNeXt, dict(
        dims=(16, 16, 24, 24), depths=(1, 2, 1, 1), global_block_counts=(0, 1, 1, 1), kernel_sizes=(3, 3, 3, 3),
        heads=(2, 2, 2, 2), ls_init_value=.5, expand_ratio=2), 64),
    'eva, dinov3 plus': ('vit_small_plus_patch16_dinov3', VIT, 32),
    'eva, eva02': ('eva02_tiny_patch14_224', dict(VIT, ref_feat_shape=(4, 4)), 32),
    'focalnet': (focalnet.FocalNet, dict(
        embed_dim=16, depths=(1, 1), focal_levels=(2, 2), focal_windows=(3, 3), use_post_norm=True), 32),
    'maxxvit, coatnet': ('coatnet_nano_rw_224', dict(MAXXVIT, embed_dim=(32, 32), block_type=('C', 'T')), 64),
    'maxxvit, maxxvit': ('maxxvit_rmlp_nano_rw_256', dict(MAXXVIT, embed_dim=(32, 32)), 64),
    'mobilevit': (_mobilevit(mobilevit._mobilevit_block, transformer_dim=16), {}, 32),
    'mobilevit v2': (_mobilevit(mobilevit._mobilevitv2_block), {}, 32),
    'mvitv2': (_mvitv2, {}, 32),
    'naflexvit': ('naflexvit_base_patch16_gap', dict(
        patch_size=8, embed_dim=24, depth=1, num_heads=3, pos_embed_grid_size=(4, 4)), 32),
    'nextvit': (nextvit.NextViT, dict(
        in_chans=3, stem_chs=(8, 8, 8), depths=(1, 1, 5, 1), head_dim=8), 32, 400),
    'pit': (pit.PoolingVisionTransformer, dict(
        img_size=32, patch_size=8, stride=4, base_dims=(8, 8), depth=(1, 1), heads=(2, 2)), 32),
    'qwen3_vit': ('qwen3_vit_88m_merge', dict(
        img_size=64, patch_size=8, embed_dim=24, depth=1, num_heads=3, mlp_ratio=2., pos_embed_grid_size=8), 64),
    'swin_transformer_v2': (swin_transformer_v2.SwinTransformerV2, dict(
        img_size=32, embed_dim=16, depths=(2, 1), num_heads=(2, 2), window_size=4), 32),
    'swin_transformer_v2_cr': (swin_transformer_v2_cr.SwinTransformerV2Cr, dict(
        img_size=(32, 32), embed_dim=16, depths=(2, 1), num_heads=(2, 2), window_size=4, init_values=.5), 32),
    'tnt': (tnt.TNT, dict(
        img_size=64, embed_dim=24, inner_dim=16, depth=1, num_heads_inner=2, num_heads_outer=2), 64),
    'vision_transformer, dinov2': ('vit_giant_patch14_dinov2', VIT, 32),
    'vision_transformer, parallel': ('vit_small_patch16_36x1_224', dict(
        VIT, block_fn=vision_transformer.ParallelThingsBlock), 32),
    'vision_transformer_hybrid': ('vit_tiny_r_s16_p8_224', dict(
        img_size=64, embed_dim=24, depth=1, num_heads=3), 64),
    'xcit': (xcit.Xcit, dict(img_size=64, embed_dim=24, depth=1, num_heads=2, cls_attn_layers=1, eta=.5), 64),
    **MODELS,
    'gcvit': (*MODELS['gcvit'], 80),
    'hiera': (*MODELS['hiera'], 170),
    'hieradet': (*MODELS['hieradet'], 48),
}
# the oldest supported timm lacks some
FAMILIES = {
    family: row for family, row in {**CLASSES, **FILES}.items() if not isinstance(row[0], str) or timm.is_model(row[0])}
# one of each kind: plain, with convolutions, with BatchNorms, gated, with a LayerNorm, in a Sequential, with a norm,
# the layers of a block
KINDS = (
    'Mlp: vision_transformer', 'Mlp with convolutions: convnext', 'Mlp called several times: coat',
    'GluMlp: mlp_mixer', 'SwiGLU with LayerNorm: eva', 'LevitMlp: levit', 'ConvMlp: fastvit', 'NormMlp: tiny_vit',
    'MLPBlock: fasternet', 'Block: rdnet', 'Block: starnet',
)


@torch.no_grad()
def build(family, seed=0):
    """A model in eval mode, with random BatchNorm statistics, norms and layer scales; and 32 images."""
    torch.manual_seed(seed)
    model, args, size, *n = FAMILIES[family]
    model = partial(timm.create_model, model) if isinstance(model, str) else model
    model = model(**{'num_classes': 5, **args}).eval()
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.numel() in (1, max(p.shape, default=1)):  # norms, biases and layer scales
            p.add_(.3 * torch.rand(p.shape, generator=g))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.copy_(.3 * torch.randn(module.num_features, generator=g))
            module.running_var.copy_(.5 + torch.rand(module.num_features, generator=g))
    return model, images(*n or [32], size)
