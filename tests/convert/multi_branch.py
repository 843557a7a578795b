"""Tiny models of every family of timm with blocks that are sums of linear branches."""
from functools import partial

import timm
import torch
import torch.nn as nn
from timm.models import fastvit, ghostnet, repghost, repvit
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg


def _byob(kind, groups=None, **block):
    gs = None if groups is None else 8
    return ByobNet(ByoModelCfg(
        blocks=(
            ByoBlockCfg(type=kind, d=2, c=16, s=2, gs=gs, **block),
            ByoBlockCfg(type=kind, d=2, c=24, s=2, gs=gs, **block),
        ),
        stem_type=kind, stem_chs=16, num_features=24,
    ), num_classes=5)


def _mobileone(**kwargs):
    def block(c, s):
        return (
            ByoBlockCfg(type='one', d=2, c=c, s=s, gs=1, block_kwargs=dict(kernel_size=3, num_conv_branches=2)),
            ByoBlockCfg(type='one', d=1, c=c, s=1, gs=0, block_kwargs=dict(kernel_size=1, num_conv_branches=3)),
        )

    return ByobNet(ByoModelCfg(
        blocks=(block(16, 2), block(16, 2)), stem_type='one', stem_chs=16, **kwargs), num_classes=5)


FAMILIES = {
    'byobnet, RepVGG': lambda: _byob('rep'),
    'byobnet, RepVGG with groups': lambda: _byob('rep', groups=True),
    'byobnet, MobileOne': _mobileone,
    'byobnet, MobileOne with SE': partial(_mobileone, attn_layer='se', attn_kwargs=dict(rd_ratio=.25)),
    'fastvit': lambda: fastvit.FastVit(
        layers=(1, 1), embed_dims=(16, 32), mlp_ratios=(2, 2), downsamples=(False, True),
        token_mixers=('repmixer', 'attention'), pos_embs=(None, partial(
            fastvit.RepConditionalPosEnc, spatial_shape=(7, 7))), num_classes=5, cls_ratio=1.),
    'fastvit, without layer scale': lambda: fastvit.FastVit(
        layers=(1, 1), embed_dims=(16, 32), mlp_ratios=(2, 2), downsamples=(False, True), se_downsamples=(False, True),
        token_mixers=('repmixer', 'repmixer'), layer_scale_init_value=None, num_classes=5, cls_ratio=1.),
    'repvit': lambda: repvit.RepVit(embed_dim=(16, 24), depth=(1, 1), num_classes=5),
    'repvit, legacy': lambda: repvit.RepVit(embed_dim=(16, 24), depth=(1, 1), legacy=True, num_classes=5),
    'repghost': lambda: repghost.RepGhostNet(
        cfgs=(((3, 8, 16, 0, 1),), ((5, 24, 24, .25, 2),), ((3, 20, 24, .25, 1),)), num_classes=5, drop_rate=0.),
    'ghostnet, v3': lambda: ghostnet.GhostNet(
        cfgs=[[[3, 16, 16, 0, 1]], [[5, 24, 24, .25, 2]], [[3, 24, 24, 0, 1]]], version='v3', num_classes=5,
        drop_rate=0.),
}
_NEWER = {  # than the oldest supported timm
    'lcnetv2': lambda: timm.create_model('lcnetv2_small', scale=.25, depths=(1, 1, 2, 2), num_classes=5),
    'iformer': lambda: timm.create_model(
        'iformer_t', dims=(8, 16, 24, 24), depths=(1, 1, 3, 3), attn_groups=(0, 0, 1, 1), num_classes=5),
}
FAMILIES.update({family: create for family, create in _NEWER.items() if hasattr(timm.models, family)})


@torch.no_grad()
def build(family, seed=0):
    """A model in eval mode with random BatchNorms and layer scales."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    g = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.copy_(.3 * torch.randn(module.num_features, generator=g))
            module.running_var.copy_(.5 + torch.rand(module.num_features, generator=g))
            for p, value in (
                    (module.weight, .5 + torch.rand(module.num_features, generator=g)),
                    (module.bias, .3 * torch.randn(module.num_features, generator=g))):
                if p is not None:
                    p.copy_(value)
        elif getattr(module, 'gamma', None) is not None:
            module.gamma.copy_(torch.rand(module.gamma.shape, generator=g))
    return model.eval()


