"""Small students of weight selection that timm has no entry for, of timm's own classes.

`Initializing Models with Larger Ones` - https://arxiv.org/abs/2311.18823
"""
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.mlp_mixer import MlpMixer
from timm.models.mlp_mixer import _cfg as mixer_cfg
from timm.models.swin_transformer import SwinTransformer, checkpoint_filter_fn
from timm.models.swin_transformer import _cfg as swin_cfg

default_cfgs = generate_default_cfgs({
    'mixer_t32.untrained': mixer_cfg(crop_pct=.9, mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD),
    'swin_femto.untrained': swin_cfg(license='apache-2.0'),
})


@register_model
def mixer_t32(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    """Mixer-T/32, half as wide as Mixer-S/32: 5.4 M parameters."""
    model_args = dict(patch_size=32, num_blocks=8, embed_dim=256)
    out_indices = kwargs.pop('out_indices', 3)
    return build_model_with_cfg(
        MlpMixer,
        'mixer_t32',
        pretrained,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **dict(model_args, **kwargs),
    )


@register_model
def swin_femto(pretrained: bool = False, **kwargs: Any) -> SwinTransformer:
    """Swin-F, half as wide as Swin-T: 7.3 M parameters, 7.5 M with the buffers of its windows, as the paper counts."""
    model_args = dict(embed_dim=48, depths=(2, 2, 6, 2), num_heads=(2, 3, 6, 12))
    out_indices = kwargs.pop('out_indices', tuple(range(4)))
    return build_model_with_cfg(
        SwinTransformer,
        'swin_femto',
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(flatten_sequential=True, out_indices=out_indices),
        **dict(model_args, **kwargs),
    )
