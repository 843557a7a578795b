"""RePa-Swin: Swin Transformers with re-parameterizable FFNs.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from functools import partial
from typing import Sequence

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model
from timm.models._manipulate import named_apply
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, checkpoint_filter_fn
from timm.models.vision_transformer import get_init_weights_vit

from timm_rep.convert import ReparameterizeMixin
from timm_rep.hub.load import build_model, resolve_pretrained
from timm_rep.hub.released import register_released_keys
from timm_rep.layers import RePaMlp, RePaMlpDeploy, idle_ratios

__all__ = ['RePaSwinTransformer']


class RePaSwinBlock(SwinTransformerBlock):
    """timm's block of windowed attention, its FFN half replaced by a RePaMlp.

    Input and output (N, H, W, dim).
    """

    @classmethod
    def adopt(cls, block: SwinTransformerBlock, mlp: nn.Module) -> 'RePaSwinBlock':
        """Make a block of timm's one of these, in place; its attention half stays as it is.

        timm's stages build their blocks themselves, so there is no other way in that is no copy of the stage.
        """
        block.__class__ = cls
        # the FFN brings its own norm, drop path and shortcut, so that they can fold
        del block.norm2, block.drop_path2
        block.mlp = mlp
        return block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        return self.mlp(x)


class RePaSwinTransformer(ReparameterizeMixin, SwinTransformer):
    """Swin Transformer with RePaFormer FFNs.

    The arguments of timm's SwinTransformer, and those below.
    """

    def __init__(
            self,
            *,
            depths: Sequence[int] = (2, 2, 6, 2),
            proj_drop_rate: float = 0.,
            weight_init: str = '',
            idle_ratio: float = 0.75,
            idle_schedule: str = 'constant',
            reparameterized: bool = False,
            bn_momentum: float = 0.1,
            bn_eps: float = 1e-5,
            device=None,
            dtype=None,
            **kwargs,
    ):
        """
        Args:
            depths: Blocks of each stage.
            proj_drop_rate: Dropout rate in the attention and the FFNs.
            weight_init: Of timm.
            idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1.
            idle_schedule: 'constant' or 'linear' over all blocks, see :func:`timm_rep.layers.idle_ratios`.
            reparameterized: Build the deploy structure, for checkpoints of a folded model.
            bn_momentum: Momentum of the BatchNorms of the FFNs.
            bn_eps: Epsilon of the BatchNorms of the FFNs.
            kwargs: The other arguments of timm's SwinTransformer.

        Raises:
            ValueError: idle_ratio or idle_schedule is out of range.
        """
        ratios = iter(idle_ratios(sum(depths), idle_ratio, idle_schedule))
        dd = {'device': device, 'dtype': dtype}
        super().__init__(depths=depths, proj_drop_rate=proj_drop_rate, weight_init=weight_init, **dd, **kwargs)
        if reparameterized:
            mlp_layer = RePaMlpDeploy
        else:
            norm_layer = partial(nn.BatchNorm1d, eps=bn_eps, momentum=bn_momentum)
            mlp_layer = partial(RePaMlp, norm_layer=norm_layer, drop=proj_drop_rate)
        for block in (block for stage in self.layers for block in stage.blocks):
            drop_path = getattr(block.drop_path2, 'drop_prob', 0.)
            mlp = mlp_layer(
                block.dim,
                hidden_features=int(block.dim * block.mlp_ratio),
                idle_ratio=next(ratios),
                **({} if reparameterized else dict(drop_path=drop_path)),
                **dd,
            )
            if weight_init != 'skip':
                named_apply(get_init_weights_vit(weight_init, needs_reset=False), mlp, name='mlp')
            RePaSwinBlock.adopt(block, mlp)


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
