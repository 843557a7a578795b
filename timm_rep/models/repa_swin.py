"""RePa-Swin: Swin Transformers with re-parameterizable FFNs.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformer, checkpoint_filter_fn

from timm_rep.convert import ReparameterizeMixin, use_repa_ffns
from timm_rep.hub import build_model, register_released_keys, resolve_pretrained

__all__ = ['RePaSwinTransformer']


class RePaSwinTransformer(ReparameterizeMixin, SwinTransformer):
    """Swin Transformer with RePaFormer FFNs.

    Takes the arguments of timm's SwinTransformer and those below.
    """

    def __init__(
            self,
            *,
            idle_ratio: float = 0.75,
            idle_schedule: str = 'constant',
            reparameterized: bool = False,
            bn_momentum: float = 0.1,
            bn_eps: float = 1e-5,
            **kwargs,
    ):
        """
        Args:
            idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1.
            idle_schedule: 'constant' or 'linear', see :func:`timm_rep.layers.idle_ratios`.
            reparameterized: Build the deploy structure, for checkpoints of a folded model.
            bn_momentum: Momentum of the BatchNorms of the FFNs.
            bn_eps: Epsilon of the BatchNorms of the FFNs.
            kwargs: Other arguments of timm's SwinTransformer.

        Raises:
            ValueError: idle_ratio or idle_schedule is out of range.
        """
        super().__init__(**kwargs)
        use_repa_ffns(self, idle_ratio, idle_schedule, bn_momentum, bn_eps, reparameterized)


register_released_keys(RePaSwinTransformer, [
    # a stage here begins with its downsampling, there it ends with the next one's
    (r'^layers\.(\d+)\.downsample\.', lambda match: f'layers.{int(match[1]) - 1}.downsample.'),
    (r'^head\.fc\.', 'head.'),
])

# Table 1
model_cfgs = {
    'repa_swin_tiny': dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    'repa_swin_small': dict(embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24)),
    'repa_swin_base': dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
}


def _create_repa_swin(variant: str, pretrained: bool = False, **kwargs) -> RePaSwinTransformer:
    kwargs = resolve_pretrained(RePaSwinTransformer, variant, pretrained, kwargs)
    model_args = dict(model_cfgs[variant], **kwargs)
    out_indices = model_args.pop('out_indices', tuple(range(len(model_args['depths']))))
    return build_model(
        RePaSwinTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(flatten_sequential=True, out_indices=out_indices),
        **model_args,
    )


def _cfg(url: str = '', **kwargs):
    return {
        'url': url,
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': (7, 7),
        'crop_pct': .9, 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'patch_embed.proj', 'classifier': 'head.fc',
        'license': 'apache-2.0',
        **kwargs
    }


default_cfgs = generate_default_cfgs({
    # the authors', https://huggingface.co/Ackesnal/RePaViT
    'repa_swin_tiny.in1k': _cfg(hf_hub_id='timm-rep/repa_swin_tiny.in1k'),
    'repa_swin_small.in1k': _cfg(hf_hub_id='timm-rep/repa_swin_small.in1k'),
    'repa_swin_base.in1k': _cfg(hf_hub_id='timm-rep/repa_swin_base.in1k'),
})


@register_model
def repa_swin_tiny(pretrained=False, **kwargs) -> RePaSwinTransformer:
    """RePa-Swin-Tiny of table 1: 28.3 M parameters, 17.5 M folded."""
    return _create_repa_swin('repa_swin_tiny', pretrained=pretrained, **kwargs)


@register_model
def repa_swin_small(pretrained=False, **kwargs) -> RePaSwinTransformer:
    """RePa-Swin-Small of table 1: 49.7 M parameters, 29.9 M folded."""
    return _create_repa_swin('repa_swin_small', pretrained=pretrained, **kwargs)


@register_model
def repa_swin_base(pretrained=False, **kwargs) -> RePaSwinTransformer:
    """RePa-Swin-Base of table 1: 87.9 M parameters, 52.8 M folded."""
    return _create_repa_swin('repa_swin_base', pretrained=pretrained, **kwargs)
