"""RePa-PoolFormer: PoolFormers with re-parameterizable FFNs.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from typing import Any, Dict, List, Optional, Sequence, Type, Union

import torch
import torch.nn as nn
from timm.layers import GroupNorm1
from timm.models import generate_default_cfgs, register_model
from timm.models.metaformer import MetaFormer, Pooling, _cfg

from timm_rep.hub import build_model, register_released_keys
from timm_rep.layers import WindowAvgPool2d

from ._repa import RePaMixin, features_of_stages

__all__ = ['RePaPoolFormer']


class RePaPoolFormer(RePaMixin, MetaFormer):
    """PoolFormer with RePaFormer FFNs.

    The head normalizes before it pools, as in the authors' PoolFormer; timm's MetaFormer normalizes afterwards.
    """

    def __init__(
            self,
            *,
            depths: Sequence[int] = (2, 2, 6, 2),
            dims: Sequence[int] = (64, 128, 320, 512),
            pool_size: int = 3,
            mlp_act: Type[nn.Module] = nn.GELU,
            layer_scale_init_values: Optional[float] = 1e-5,
            norm_layers: Union[Type[nn.Module], List[Type[nn.Module]]] = GroupNorm1,
            output_norm: Type[nn.Module] = GroupNorm1,
            **kwargs: Any,
    ):
        """
        Args:
            depths: Number of blocks of each stage.
            dims: Number of channels of each stage.
            pool_size: Side of the pooling window, odd. The released RePaFormers have 7.
            mlp_act: Activation of the FFNs.
            layer_scale_init_values: Initial layer scale of all blocks; no layer scale if None.
            norm_layers: Norm before the token mixers.
            output_norm: Norm before the pooled classifier.
            kwargs: Arguments of RePaMixin; in_chans, num_classes, global_pool, drop_rate, drop_path_rate and
                proj_drop_rate of timm's MetaFormer.

        Raises:
            ValueError: An argument is out of range.
        """
        super().__init__(
            depths=depths,
            dims=dims,
            token_mixers=Pooling,
            mlp_act=mlp_act,
            mlp_bias=True,
            layer_scale_init_values=layer_scale_init_values,
            res_scale_init_values=None,
            downsample_norm=None,
            norm_layers=norm_layers,
            output_norm=output_norm,
            use_mlp_head=False,
            pool_size=pool_size,
            **kwargs,
        )
        for stage in self.stages:
            for block in stage.blocks:
                block.token_mixer.pool = WindowAvgPool2d(pool_size)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.head.norm(x)
        x = self.head.global_pool(x)
        x = self.head.flatten(x)
        x = self.head.drop(x)
        return x if pre_logits else self.head.fc(x)


register_released_keys(RePaPoolFormer, [
    (r'^stem\.conv\.', 'patch_embed.proj.'),
    # the release interleaves stages and downsampling in one list
    (r'^stages\.(\d+)\.downsample\.conv\.', lambda match: f'network.{2 * int(match[1]) - 1}.proj.'),
    (r'^stages\.(\d+)\.blocks\.', lambda match: f'network.{2 * int(match[1])}.'),
    (r'\.layer_scale1\.scale$', '.layer_scale_1'),
    (r'\.mlp\.ls\.gamma$', '.mlp.ls'),
    (r'^head\.norm\.', 'norm.'),
    (r'^head\.fc\.', 'head.'),
])

# Table 1, and the larger ones of the PoolFormer paper
model_cfgs: Dict[str, Dict[str, Any]] = {
    'repa_poolformer_s12': dict(depths=(2, 2, 6, 2)),
    'repa_poolformer_s24': dict(depths=(4, 4, 12, 4)),
    'repa_poolformer_s36': dict(depths=(6, 6, 18, 6), layer_scale_init_values=1e-6),
    'repa_poolformer_m36': dict(depths=(6, 6, 18, 6), dims=(96, 192, 384, 768), layer_scale_init_values=1e-6),
    'repa_poolformer_m48': dict(depths=(8, 8, 24, 8), dims=(96, 192, 384, 768), layer_scale_init_values=1e-6),
}


def _create_repa_poolformer(variant: str, /, pretrained: bool = False, **kwargs: Any) -> RePaPoolFormer:
    return build_model(
        RePaPoolFormer,
        variant,
        pretrained,
        model_cfgs,
        complete=features_of_stages,
        feature_cfg=dict(flatten_sequential=True),
        **kwargs,
    )


default_cfgs = generate_default_cfgs({
    'repa_poolformer_s12.untrained': _cfg(crop_pct=.9),
    'repa_poolformer_s24.untrained': _cfg(crop_pct=.9),
    'repa_poolformer_s36.untrained': _cfg(crop_pct=.9),
    'repa_poolformer_m36.untrained': _cfg(crop_pct=.95),
    'repa_poolformer_m48.untrained': _cfg(crop_pct=.95),
})


@register_model
def repa_poolformer_s12(pretrained: bool = False, **kwargs: Any) -> RePaPoolFormer:
    """RePa-PoolFormer-S12 of table 1: 11.9 M parameters, 6.0 M folded."""
    return _create_repa_poolformer('repa_poolformer_s12', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_s24(pretrained: bool = False, **kwargs: Any) -> RePaPoolFormer:
    """RePa-PoolFormer-S24 of table 1: 21.4 M parameters, 9.6 M folded."""
    return _create_repa_poolformer('repa_poolformer_s24', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_s36(pretrained: bool = False, **kwargs: Any) -> RePaPoolFormer:
    """RePa-PoolFormer-S36 of table 1: 30.9 M parameters, 13.1 M folded."""
    return _create_repa_poolformer('repa_poolformer_s36', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_m36(pretrained: bool = False, **kwargs: Any) -> RePaPoolFormer:
    """RePa-PoolFormer-M36."""
    return _create_repa_poolformer('repa_poolformer_m36', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_m48(pretrained: bool = False, **kwargs: Any) -> RePaPoolFormer:
    """RePa-PoolFormer-M48."""
    return _create_repa_poolformer('repa_poolformer_m48', pretrained=pretrained, **kwargs)
