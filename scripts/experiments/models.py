"""Small networks of timm's classes for images of 32 x 32 pixels; importing this registers them with timm."""
from typing import Any, Mapping, Optional, Sequence, Union

import torch.nn as nn
from timm.layers import ConvNormAct, GroupNorm1, Mlp
from timm.models import fasternet_t0, register_model
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg, LayerFn, RepVggBlock
from timm.models.efficientnet import _gen_efficientnet_lite
from timm.models.metaformer import MetaFormer

from timm_rep import convert_to_repa
from timm_rep.convert.ffn import find_ffns
from timm_rep.convert.repopt import set_scales, use_repopt_convs
from timm_rep.layers import ChannelIdle, RepOptConv
from timm_rep.scales import ScalesLike

__all__ = [
    'conv_metaformer', 'efficientnet_lite_half', 'fasternet_idle', 'idle_first_channels', 'mobileone_small',
    'repvgg_small',
]


def idle_first_channels(model: nn.Module, idle_ratio: float) -> nn.Module:
    """Remove the activation of all but the first hidden channels of each FFN."""
    for ffn in find_ffns(model)[0]:
        act = ffn.module.get_submodule(ffn.act_name)
        ffn.module.set_submodule(
            ffn.act_name,
            ChannelIdle(ffn.hidden_features, idle_ratio, lambda act=act: act, dim=1 if ffn.use_conv else -1))
    return model


class _ConvMixer(ConvNormAct):
    """Token mixer of a MetaFormer: 3 x 3 convolution of all channels, BatchNorm and ReLU."""

    def __init__(self, dim: int, proj_drop: float = 0., **dd):
        super().__init__(dim, dim, 3, **dd)


@register_model
def conv_metaformer(
        pretrained: bool = False,
        num_classes: int = 10,
        dims: Sequence[int] = (40, 80, 160),
        depths: Sequence[int] = (2, 2, 2),
        mlp_ratio: float = 4.,
        idle_ratio: Optional[float] = None,
        **kwargs,
) -> nn.Module:
    """A hybrid: timm's MetaFormer with convolutions as token mixers, GroupNorm as in PoolFormer, a stem of stride 2.

    Args:
        pretrained: Ignored.
        num_classes: Number of classes.
        dims: Channels of each stage.
        depths: Blocks of each stage.
        mlp_ratio: Hidden channels of an FFN for each channel.
        idle_ratio: Idle ratio of a RePaFormer; None for plain FFNs.
    """
    _check_arguments('conv_metaformer', kwargs)
    model = MetaFormer(
        num_classes=num_classes, dims=dims, depths=depths, token_mixers=_ConvMixer, res_scale_init_values=None,
        downsample_norm=None, norm_layers=GroupNorm1, output_norm=GroupNorm1, use_mlp_head=False)
    model.stem = nn.Sequential(ConvNormAct(3, dims[0], 3), nn.Conv2d(dims[0], dims[0], 3, stride=2, padding=1))
    for stage, dim in zip(model.stages, dims):
        for block in stage.blocks:
            block.mlp = Mlp(dim, round(mlp_ratio * dim), use_conv=True)
    model.apply(model._init_weights)
    if idle_ratio is not None:
        convert_to_repa(model, idle_ratio)
    return model


@register_model
def efficientnet_lite_half(pretrained: bool = False, **kwargs) -> nn.Module:
    """timm's ``tf_efficientnet_lite0`` with half of its channels; the arguments are timm's."""
    return _gen_efficientnet_lite('tf_efficientnet_lite0', channel_multiplier=0.5, **kwargs)


@register_model
def fasternet_idle(pretrained: bool = False, idle_ratio: float = 0.75, **kwargs) -> nn.Module:
    """timm's ``fasternet_t0`` with idle channels in its FFNs, as in a RePaFormer; the arguments are timm's."""
    return idle_first_channels(fasternet_t0(**kwargs), idle_ratio)


@register_model
def mobileone_small(
        pretrained: bool = False,
        num_classes: int = 10,
        widths: Sequence[int] = (32, 64, 128),
        depths: Sequence[int] = (1, 2, 2),
        branches: int = 4,
        structure: str = 'target',
        scales: Union[ScalesLike, bool, None] = None,
        **kwargs,
) -> nn.Module:
    """MobileOne with alternating depthwise and pointwise blocks; all stages but the first begin with a stride of 2.

    Args:
        pretrained: Ignored.
        num_classes: Number of classes.
        widths: Channels of each stage.
        depths: Pairs of blocks of each stage.
        branches: Convolutions of the same size in a block.
        structure: 'target', or 'search' for Hyper-Search.
        scales: Scales of the plain network; False for none, and torch's initialization; None for timm's branches.
    """
    _check_arguments('mobileone_small', kwargs)
    before, stages = widths[0], []
    for i, (width, depth) in enumerate(zip(widths, depths)):
        sums = dict(num_conv_branches=branches)
        stages.append(tuple(
            block for j in range(depth) for block in (
                ByoBlockCfg(type='one', d=1, c=before if j == 0 else width, s=2 if i and j == 0 else 1, gs=1,
                            block_kwargs=sums),
                ByoBlockCfg(type='one', d=1, c=width, s=1, gs=0, block_kwargs=dict(kernel_size=1, **sums)))))
        before = width
    config = ByoModelCfg(
        blocks=tuple(stages), stem_type='one', stem_chs=widths[0], stem_pool='', num_features=0)
    model = ByobNet(config, num_classes=num_classes)
    if structure == 'search':
        use_repopt_convs(model, structure)
        set_scales(model, 'init', reinit=False)
    elif scales is not None:
        use_repopt_convs(model)
        for layer in (m for m in model.modules() if isinstance(m, RepOptConv)):
            layer[1].reset_parameters()
            if scales is False:
                layer[0].reset_parameters()
        set_scales(model, scales, reinit=True)
    return model


@register_model
def repvgg_small(
        pretrained: bool = False,
        num_classes: int = 10,
        depths: Sequence[int] = (2, 4, 14, 1),
        widths: Sequence[int] = (48, 96, 192, 1280),
        stem_width: int = 48,
        strides: Sequence[int] = (2, 2, 2, 2, 2),
        norm_weight: Optional[float] = None,
        **kwargs,
) -> nn.Module:
    """timm's RepVGG with the arguments of RepOpt-VGG.

    Args:
        pretrained: Ignored.
        num_classes: Number of classes.
        depths: Blocks of each stage.
        widths: Channels of each stage.
        stem_width: Channels of the stem.
        strides: Strides of the stem and of the stages.
        norm_weight: Initial weight of the BatchNorms, with biases of 0; 1 in the released code. Default: timm's random
            weights (0.1 ± 0.1) and biases (0 ± 0.1).
    """
    _check_arguments('repvgg_small', kwargs)
    blocks = tuple(
        ByoBlockCfg(type='rep', d=depth, c=width, s=stride)
        for depth, width, stride in zip(depths, widths, strides[1:]))
    model = ByobNet(
        ByoModelCfg(blocks=blocks, stem_type='rep', stem_chs=stem_width, stem_pool=''), num_classes=num_classes)
    if strides[0] != 2:  # the stride of all stems of timm
        model.stem = RepVggBlock(3, stem_width, stride=strides[0], layers=LayerFn())
        model.stem.init_weights()
    if norm_weight is not None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, norm_weight)
                nn.init.zeros_(module.bias)
    return model


def _check_arguments(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments other than those that create_model adds."""
    unknown = kwargs.keys() - {'pretrained_cfg', 'pretrained_cfg_overlay', 'cache_dir'}
    if unknown:
        raise TypeError(f'{name}() got an unexpected argument {", ".join(map(repr, sorted(unknown)))}.')
