"""RePa-ViT and RePa-DeiT: Vision Transformers with re-parameterizable FFNs.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`, ICML 2025 as
`RePaViT` - https://arxiv.org/abs/2505.21847
"""
from typing import Any, Dict, Optional

import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerType
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from timm_rep.hub import build_model, register_released_keys

from ._repa import RePaMixin

__all__ = ['RePaVisionTransformer']


class RePaVisionTransformer(RePaMixin, VisionTransformer):
    """Vision Transformer with RePaFormer FFNs."""

    def __init__(self, *, norm_layer: Optional[LayerType] = None, **kwargs: Any):
        """
        Args:
            norm_layer: Norm layer outside the FFNs. By default (None, not 'layernorm') LayerNorm, with eps 1e-5 in the
                blocks and 1e-6 elsewhere, as released.
            kwargs: Arguments of RePaMixin, and other arguments of timm's VisionTransformer.

        Raises:
            ValueError: An argument is out of range, or mlp_layer is not two linear layers with an activation.
        """
        super().__init__(norm_layer=norm_layer, **kwargs)
        if norm_layer is None:
            for module in self.blocks.modules():
                if isinstance(module, nn.LayerNorm):
                    module.eps = 1e-5


register_released_keys(RePaVisionTransformer, [(r'^(blocks\.\d+)\.norm1\.', r'\1.attn.norm.')])

# Table 1. The released models have a LayerNorm before the blocks, and so no patch embedding bias.
_COMMON = dict(patch_size=16, pre_norm=True)

model_cfgs: Dict[str, Dict[str, Any]] = {
    'repa_deit_tiny': dict(_COMMON, embed_dim=192, depth=12, num_heads=3),
    'repa_deit_small': dict(_COMMON, embed_dim=384, depth=12, num_heads=6),
    'repa_deit_base': dict(_COMMON, embed_dim=768, depth=12, num_heads=12),
    'repa_vit_small': dict(_COMMON, embed_dim=384, depth=12, num_heads=6),
    'repa_vit_base': dict(_COMMON, embed_dim=768, depth=12, num_heads=12),
    'repa_vit_large': dict(_COMMON, embed_dim=1024, depth=24, num_heads=16),
    'repa_vit_huge': dict(_COMMON, embed_dim=1280, depth=32, num_heads=16),
}


def _create_repa_vit(variant: str, /, pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    return build_model(
        RePaVisionTransformer,
        variant,
        pretrained,
        model_cfgs,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=3, feature_cls='getter'),
        **kwargs,
    )


def _cfg(url: str = '', **kwargs: Any) -> Dict[str, Any]:
    return {
        'url': url,
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': None,
        'crop_pct': .9, 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'patch_embed.proj', 'classifier': 'head',
        'license': 'apache-2.0',
        **kwargs
    }


default_cfgs = generate_default_cfgs({
    # in1k: the authors', https://huggingface.co/Ackesnal/RePaViT
    'repa_deit_tiny.in1k': _cfg(hf_hub_id='timm-rep/repa_deit_tiny.in1k'),
    'repa_deit_small.in1k': _cfg(hf_hub_id='timm-rep/repa_deit_small.in1k'),
    'repa_deit_base.in1k': _cfg(hf_hub_id='timm-rep/repa_deit_base.in1k'),
    'repa_vit_small.untrained': _cfg(),
    'repa_vit_base.untrained': _cfg(),
    'repa_vit_large.in1k': _cfg(hf_hub_id='timm-rep/repa_vit_large.in1k'),
    'repa_vit_huge.in1k': _cfg(hf_hub_id='timm-rep/repa_vit_huge.in1k'),
})


@register_model
def repa_deit_tiny(pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    """RePa-DeiT-Tiny of table 1: 5.7 M parameters, 3.5 M folded."""
    return _create_repa_vit('repa_deit_tiny', pretrained=pretrained, **kwargs)


@register_model
def repa_deit_small(pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    """RePa-DeiT-Small of table 1: 22.1 M parameters, 13.2 M folded."""
    return _create_repa_vit('repa_deit_small', pretrained=pretrained, **kwargs)


@register_model
def repa_deit_base(pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    """RePa-DeiT-Base of table 1: 86.6 M parameters, 51.1 M folded."""
    return _create_repa_vit('repa_deit_base', pretrained=pretrained, **kwargs)


@register_model
def repa_vit_small(pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    """RePa-ViT-Small of table 5, the self-supervised backbone: 12.8 M parameters folded, without a head."""
    return _create_repa_vit('repa_vit_small', pretrained=pretrained, **kwargs)


@register_model
def repa_vit_base(pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    """RePa-ViT-Base of table 5, the self-supervised backbone: 50.4 M parameters folded, without a head."""
    return _create_repa_vit('repa_vit_base', pretrained=pretrained, **kwargs)


@register_model
def repa_vit_large(pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    """RePa-ViT-Large of table 1: 304.5 M parameters, 178.4 M folded."""
    return _create_repa_vit('repa_vit_large', pretrained=pretrained, **kwargs)


@register_model
def repa_vit_huge(pretrained: bool = False, **kwargs: Any) -> RePaVisionTransformer:
    """RePa-ViT-Huge of table 1, patch size 16: 632.5 M parameters, 369.9 M folded."""
    return _create_repa_vit('repa_vit_huge', pretrained=pretrained, **kwargs)
