"""RePa-PoolFormer: PoolFormers with re-parameterizable FFNs and, on request, token mixers.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from functools import partial
from typing import List, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import GroupNorm1
from timm.models import generate_default_cfgs, register_model
from timm.models.metaformer import MetaFormer, MetaFormerBlock, Pooling

from timm_rep.convert import ReparameterizeMixin
from timm_rep.hub.load import build_model, resolve_pretrained
from timm_rep.hub.released import register_released_keys
from timm_rep.layers import (
    RePaMlp,
    RePaMlpDeploy,
    RePaPooling,
    RePaPoolingDeploy,
    WindowAvgPool2d,
    check_pool_size,
    idle_ratios,
)

__all__ = ['RePaPoolFormer']


class RePaMetaFormerBlock(MetaFormerBlock):
    """timm's block, its FFN half replaced by a RePaMlp. Input and output (N, dim, H, W)."""

    @classmethod
    def adopt(cls, block: MetaFormerBlock, mlp: nn.Module) -> 'RePaMetaFormerBlock':
        """Make a block of timm's one of these, in place; its token half stays as it is."""
        block.__class__ = cls
        # the FFN brings its own norm, layer scale, drop path and shortcut, so that they can fold
        del block.norm2, block.layer_scale2, block.drop_path2, block.res_scale2
        block.mlp = mlp
        return block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.res_scale1(x) + self.layer_scale1(self.drop_path1(self.token_mixer(self.norm1(x))))
        return self.mlp(x)


class RePaPoolFormerBlock(RePaMetaFormerBlock):
    """A block whose token half is a RePaPooling, norm, layer scale and shortcut included."""

    @classmethod
    def adopt(cls, block: MetaFormerBlock, mlp: nn.Module, token_mixer: nn.Module) -> 'RePaPoolFormerBlock':
        """Make a block of timm's one of these, in place."""
        super().adopt(block, mlp)
        del block.norm1, block.layer_scale1, block.drop_path1, block.res_scale1
        block.token_mixer = token_mixer
        return block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.token_mixer(x))


class RePaPoolFormer(ReparameterizeMixin, MetaFormer):
    """PoolFormer with RePaFormer FFNs.

    Normalizes before it pools over the image, as PoolFormer's authors do; timm's MetaFormer does it after.
    """

    def __init__(
            self,
            *,
            depths: Sequence[int] = (2, 2, 6, 2),
            dims: Sequence[int] = (64, 128, 320, 512),
            pool_size: int = 3,
            mlp_ratio: float = 4.,
            mlp_act: Type[nn.Module] = nn.GELU,
            proj_drop_rate: float = 0.,
            layer_scale_init_values: Optional[float] = 1e-5,
            norm_layers: Union[Type[nn.Module], List[Type[nn.Module]]] = GroupNorm1,
            output_norm: Type[nn.Module] = GroupNorm1,
            fold_token_mixer: bool = False,
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
            dims: Channels of each stage.
            pool_size: Side of the window that tokens are mixed over. The released RePaFormers have 7.
            mlp_ratio: Hidden channels of an FFN by its channels.
            mlp_act: Activation of the FFNs.
            proj_drop_rate: Dropout rate in the FFNs.
            layer_scale_init_values: Initial layer scale of all blocks; no layer scale if None.
            norm_layers: Norm before the token mixers, unless they fold.
            output_norm: Norm before the pooled classifier.
            fold_token_mixer: Train with a BatchNorm before the token mixers, so that they fold too.
            idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1.
            idle_schedule: 'constant' or 'linear' over all blocks, see :func:`timm_rep.layers.idle_ratios`.
            reparameterized: Build the deploy structure, for checkpoints of a folded model.
            bn_momentum: Momentum of the BatchNorms.
            bn_eps: Epsilon of the BatchNorms.
            kwargs: in_chans, num_classes, global_pool, drop_rate and drop_path_rate of timm's MetaFormer.

        Raises:
            ValueError: idle_ratio, idle_schedule or pool_size is out of range.
        """
        check_pool_size(pool_size)
        ratios = iter(idle_ratios(sum(depths), idle_ratio, idle_schedule))
        dd = {'device': device, 'dtype': dtype}
        super().__init__(
            depths=depths,
            dims=dims,
            token_mixers=Pooling,
            mlp_act=mlp_act,
            mlp_bias=True,
            proj_drop_rate=proj_drop_rate,
            layer_scale_init_values=layer_scale_init_values,
            res_scale_init_values=None,
            downsample_norm=None,
            norm_layers=norm_layers,
            output_norm=output_norm,
            use_mlp_head=False,
            pool_size=pool_size,
            **dd,
            **kwargs,
        )
        norm_layer = partial(nn.BatchNorm2d, eps=bn_eps, momentum=bn_momentum)
        for block, dim in ((block, dim) for stage, dim in zip(self.stages, dims) for block in stage.blocks):
            drop_path = getattr(block.drop_path2, 'drop_prob', 0.)
            train_args = dict(norm_layer=norm_layer, init_values=layer_scale_init_values, drop_path=drop_path)
            mlp_args = dict(hidden_features=int(dim * mlp_ratio), idle_ratio=next(ratios), act_layer=mlp_act)
            if reparameterized:
                mlp = RePaMlpDeploy(dim, use_conv=True, **mlp_args, **dd)
            else:
                mlp = RePaMlp(dim, use_conv=True, drop=proj_drop_rate, **mlp_args, **train_args, **dd)
            mlp.apply(self._init_weights)
            if not fold_token_mixer:
                block.token_mixer.pool = WindowAvgPool2d(pool_size)
                RePaMetaFormerBlock.adopt(block, mlp)
            elif reparameterized:
                RePaPoolFormerBlock.adopt(block, mlp, RePaPoolingDeploy(dim, pool_size, **dd))
            else:
                RePaPoolFormerBlock.adopt(block, mlp, RePaPooling(dim, pool_size, **train_args, **dd))

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.head.norm(x)
        x = self.head.global_pool(x)
        x = self.head.flatten(x)
        x = self.head.drop(x)
        return x if pre_logits else self.head.fc(x)


register_released_keys(RePaPoolFormer, [
    (r'^stem\.conv\.', 'patch_embed.proj.'),
    # there stages and downsamplings take turns in one list
    (r'^stages\.(\d+)\.downsample\.conv\.', lambda match: f'network.{2 * int(match[1]) - 1}.proj.'),
    (r'^stages\.(\d+)\.blocks\.', lambda match: f'network.{2 * int(match[1])}.'),
    (r'\.layer_scale1\.scale$', '.layer_scale_1'),
    (r'\.mlp\.ls\.gamma$', '.mlp.ls'),
    (r'^head\.norm\.', 'norm.'),
    (r'^head\.fc\.', 'head.'),
])

# Table 1, and the larger ones of the PoolFormer paper
model_cfgs = {
    'repa_poolformer_s12': dict(depths=(2, 2, 6, 2)),
    'repa_poolformer_s24': dict(depths=(4, 4, 12, 4)),
    'repa_poolformer_s36': dict(depths=(6, 6, 18, 6), layer_scale_init_values=1e-6),
    'repa_poolformer_m36': dict(depths=(6, 6, 18, 6), dims=(96, 192, 384, 768), layer_scale_init_values=1e-6),
    'repa_poolformer_m48': dict(depths=(8, 8, 24, 8), dims=(96, 192, 384, 768), layer_scale_init_values=1e-6),
}


def _create_repa_poolformer(variant: str, pretrained: bool = False, **kwargs) -> RePaPoolFormer:
    kwargs = resolve_pretrained(RePaPoolFormer, variant, pretrained, kwargs)
    model_args = dict(model_cfgs[variant], **kwargs)
    out_indices: Tuple[int, ...] = model_args.pop('out_indices', tuple(range(len(model_args['depths']))))
    return build_model(
        RePaPoolFormer,
        variant,
        pretrained,
        feature_cfg=dict(flatten_sequential=True, out_indices=out_indices),
        **model_args,
    )


def _cfg(url: str = '', **kwargs):
    return {
        'url': url,
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': (7, 7),
        'crop_pct': .9, 'interpolation': 'bicubic',
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'stem.conv', 'classifier': 'head.fc',
        'license': 'apache-2.0',
        **kwargs
    }


default_cfgs = generate_default_cfgs({
    'repa_poolformer_s12.untrained': _cfg(),
    'repa_poolformer_s24.untrained': _cfg(),
    'repa_poolformer_s36.untrained': _cfg(),
    'repa_poolformer_m36.untrained': _cfg(crop_pct=.95),
    'repa_poolformer_m48.untrained': _cfg(crop_pct=.95),
})


@register_model
def repa_poolformer_s12(pretrained=False, **kwargs) -> RePaPoolFormer:
    """RePa-PoolFormer-S12 of table 1: 11.9 M parameters, 6.0 M folded."""
    return _create_repa_poolformer('repa_poolformer_s12', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_s24(pretrained=False, **kwargs) -> RePaPoolFormer:
    """RePa-PoolFormer-S24 of table 1: 21.4 M parameters, 9.6 M folded."""
    return _create_repa_poolformer('repa_poolformer_s24', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_s36(pretrained=False, **kwargs) -> RePaPoolFormer:
    """RePa-PoolFormer-S36 of table 1: 30.9 M parameters, 13.1 M folded."""
    return _create_repa_poolformer('repa_poolformer_s36', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_m36(pretrained=False, **kwargs) -> RePaPoolFormer:
    """RePa-PoolFormer-M36."""
    return _create_repa_poolformer('repa_poolformer_m36', pretrained=pretrained, **kwargs)


@register_model
def repa_poolformer_m48(pretrained=False, **kwargs) -> RePaPoolFormer:
    """RePa-PoolFormer-M48."""
    return _create_repa_poolformer('repa_poolformer_m48', pretrained=pretrained, **kwargs)
