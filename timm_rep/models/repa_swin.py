"""RePa-Swin: Swin Transformers with re-parameterizable FFNs.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from typing import Any, Dict

from timm.models import generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformer, _cfg, checkpoint_filter_fn

from timm_rep.hub import build_model, register_released_keys

from ._repa import RePaMixin, features_of_stages

__all__ = ['RePaSwinTransformer']


class RePaSwinTransformer(RePaMixin, SwinTransformer):
    """Swin Transformer with RePaFormer FFNs."""


register_released_keys(RePaSwinTransformer, [
    # timm downsamples at the start of a stage, the release at the end of the previous one
    (r'^layers\.(\d+)\.downsample\.', lambda match: f'layers.{int(match[1]) - 1}.downsample.'),
    (r'^head\.fc\.', 'head.'),
])

# Table 1
model_cfgs: Dict[str, Dict[str, Any]] = {
    'repa_swin_tiny': dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    'repa_swin_small': dict(embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24)),
    'repa_swin_base': dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
}


def _create_repa_swin(variant: str, /, pretrained: bool = False, **kwargs: Any) -> RePaSwinTransformer:
    return build_model(
        RePaSwinTransformer,
        variant,
        pretrained,
        model_cfgs,
        complete=features_of_stages,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(flatten_sequential=True),
        **kwargs,
    )


default_cfgs = generate_default_cfgs({
    # the authors', https://huggingface.co/Ackesnal/RePaViT
    'repa_swin_tiny.in1k': _cfg(hf_hub_id='timm-rep/repa_swin_tiny.in1k', license='apache-2.0'),
    'repa_swin_small.in1k': _cfg(hf_hub_id='timm-rep/repa_swin_small.in1k', license='apache-2.0'),
    'repa_swin_base.in1k': _cfg(hf_hub_id='timm-rep/repa_swin_base.in1k', license='apache-2.0'),
})


@register_model
def repa_swin_tiny(pretrained: bool = False, **kwargs: Any) -> RePaSwinTransformer:
    """RePa-Swin-Tiny of table 1: 28.3 M parameters, 17.5 M folded."""
    return _create_repa_swin('repa_swin_tiny', pretrained=pretrained, **kwargs)


@register_model
def repa_swin_small(pretrained: bool = False, **kwargs: Any) -> RePaSwinTransformer:
    """RePa-Swin-Small of table 1: 49.7 M parameters, 29.9 M folded."""
    return _create_repa_swin('repa_swin_small', pretrained=pretrained, **kwargs)


@register_model
def repa_swin_base(pretrained: bool = False, **kwargs: Any) -> RePaSwinTransformer:
    """RePa-Swin-Base of table 1: 87.9 M parameters, 52.8 M folded."""
    return _create_repa_swin('repa_swin_base', pretrained=pretrained, **kwargs)
