"""RepOpt-VGG: plain stacks of 3 x 3 convolutions, with the structural prior in the optimizer.

`Re-parameterizing Your Optimizers rather than Architectures` - https://arxiv.org/abs/2205.15242
"""
from dataclasses import fields
from functools import partial
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.models import generate_default_cfgs, named_apply, register_model
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg, LayerFn, _cfg, _init_weights, get_layer_fns

from timm_rep.convert.repopt import set_scales
from timm_rep.hub import build_model, register_released_keys
from timm_rep.layers import ConvBranch, Csla, IdentityBranch, RepOptConv, RepOptConvDeploy
from timm_rep.scales import ScalesLike

from ._repopt import RepOptMixin, check_structure, choose_scales

__all__ = ['RepOptVgg']


class RepOptBlock(nn.Module):
    """3 x 3 convolution or its branches, BatchNorm, activation, and optionally attention.

    Input (N, in_chs, H, W), output (N, out_chs, H', W').
    """

    def __init__(
            self,
            in_chs: int,
            out_chs: int,
            stride: int = 1,
            dilation: Tuple[int, int] = (1, 1),
            layers: Optional[LayerFn] = None,
            drop_block: Optional[Callable[..., nn.Module]] = None,
            structure: str = 'target',
            reparameterized: bool = False,
            initial_scale: float = 1.,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
            **kwargs: Any,
    ):
        """
        Args:
            in_chs, out_chs, stride, dilation, layers, drop_block: As for the blocks of timm's ByobNet.
            structure: 'target', 'search' or 'csla'.
            reparameterized: Build the deploy structure.
            initial_scale: Initial value of the scales of this block in Hyper-Search.
            kwargs: Ignored; timm's ByobNet passes more arguments to every block.
        """
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        super().__init__()
        layers = layers or LayerFn()
        # as in timm's RepVGG, a block whose stride became dilation (output_stride) has no identity
        has_identity = in_chs == out_chs and stride == 1 and dilation[0] == dilation[1]
        csla = Csla(
            in_chs,
            out_chs,
            branches=(ConvBranch(3), ConvBranch(1)) + ((IdentityBranch(),) if has_identity else ()),
            stride=stride,
            dilation=dilation[0],
            initial_scale=initial_scale,
        )
        self.conv = RepOptConvDeploy(csla, **dd) if reparameterized else RepOptConv(csla, structure, **dd)
        self.drop = nn.Identity() if drop_block is None else drop_block()
        self.act = layers.act(inplace=True)
        self.attn = nn.Identity() if layers.attn is None else layers.attn(out_chs, **dd)

    def init_weights(self, zero_init_last: bool = False) -> None:
        # the rule of initialization assumes torch's initialization, not timm's by fan-out
        if isinstance(self.conv, RepOptConv):
            self.conv[0].reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = self.drop(x)
        x = self.act(x)
        x = self.attn(x)
        return x


class RepOptVgg(RepOptMixin, ByobNet):
    """RepOpt-VGG: a stem and four stages of 3 x 3 convolutions, one convolution a block, on timm's ByobNet."""

    def __init__(
            self,
            depths: Sequence[int],
            widths: Sequence[int],
            stem_width: int = 64,
            in_chans: int = 3,
            structure: str = 'target',
            scales: Optional[ScalesLike] = 'init',
            reinit: bool = True,
            strides: Sequence[int] = (2, 2, 2, 2, 2),
            reparameterized: bool = False,
            output_stride: int = 32,
            drop_path_rate: float = 0.,
            act_layer: str = 'relu',
            attn_layer: Optional[str] = None,
            attn_kwargs: Optional[Dict[str, Any]] = None,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
            **kwargs: Any,
    ):
        """
        Args:
            depths: Number of blocks of each stage (table 1).
            widths: Number of channels of each stage, multiples of 8 (table 1).
            stem_width: Number of channels of the stem.
            in_chans: Number of image channels.
            structure: 'target', a plain network; 'search', the network that Hyper-Search trains, every convolution a
                sum of branches with trainable scales; 'csla', the same with constant scales, which trains as the
                target structure does if weight decay includes its identity branches (with timm's
                create_optimizer_v2, filter_bias_and_bn=False).
            scales: Constants of the branches: Scales, a path, a Hub repository, 'ones', a model with searched
                scales in this package, or 'init', the values that a search starts from. They determine the GradMults
                and initial kernels of the target structure, and the scales of the others. False (or None): no scales,
                a plain network for plain optimizers. create_model also accepts 'default': the searched scales
                of the variant, or 'init' where there are none.
            reinit: Initialize the kernels of the target structure by the rule of initialization; if False, as in a
                plain network (a row of table 4).
            strides: Strides of the stem and of each stage (table 6).
            reparameterized: Build the deploy structure, for checkpoints of a folded model.
            output_stride: 8, 16 or 32; strides beyond it become dilation.
            drop_path_rate: Must be 0, since RepOpt-VGG has no shortcuts.
            act_layer: Activation.
            attn_layer: Attention after the activation of every block, for example 'se'.
            attn_kwargs: Arguments of the attention.
            kwargs: num_classes, global_pool, drop_rate and drop_block_rate of timm's ByobNet.

        Raises:
            FileNotFoundError: The file of scales does not exist.
            ValueError: The structure is unknown, the scales do not fit, the strides are not compatible, or
                drop_path_rate is set.
            TypeError: An argument would change the blocks or the norm, so that they could not be folded.
        """
        _check_architecture(depths, widths, stem_width, strides, output_stride)
        check_structure(structure)
        if drop_path_rate:
            raise ValueError(
                f'drop_path_rate must be 0 for RepOpt-VGG, which has no shortcuts, got {drop_path_rate}: use drop_rate '
                'or drop_block_rate.')
        fixed = kwargs.keys() & {field.name for field in fields(ByoModelCfg)}
        if fixed:
            raise TypeError(
                f'{", ".join(sorted(fixed))} must not be given for RepOpt-VGG, or its blocks could not be folded.')
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        block = partial(RepOptBlock, structure=structure, reparameterized=reparameterized)
        stages = tuple(
            tuple(
                ByoBlockCfg(
                    type=partial(block, initial_scale=(2 / index) ** .5 if index else 1.),
                    d=1,
                    c=width,
                    s=1 if index else stride,
                ) for index in range(depth))
            for depth, width, stride in zip(depths, widths, strides[1:])
        )
        cfg = ByoModelCfg(
            blocks=stages,
            stem_chs=stem_width,
            stem_pool=None,
            act_layer=act_layer,
            attn_layer=attn_layer,
            attn_kwargs=attn_kwargs or {},
        )
        super().__init__(cfg, in_chans=in_chans, output_stride=output_stride, **dd, **kwargs)
        # timm builds its own stems only, all of them with stride 2
        self.stem = block(in_chans, stem_width, stride=strides[0], layers=get_layer_fns(cfg), **dd)
        named_apply(_init_weights, self.stem, include_root=True)  # timm has no public name for it
        for info in self.feature_info:
            info['reduction'] = info['reduction'] * strides[0] // 2
        if not reparameterized:
            set_scales(self, scales, reinit)


def _check_architecture(
        depths: Sequence[int],
        widths: Sequence[int],
        stem_width: int,
        strides: Sequence[int],
        output_stride: int,
) -> None:
    for name, numbers, count, allowed, what in (
            ('depths', depths, 4, range(1, 10_000), 'four positive integers'),
            ('widths', widths, 4, range(8, 100_000, 8), 'four multiples of 8'),
            ('stem_width', [stem_width], 1, range(1, 100_000), 'a positive integer'),
            ('strides', strides, 5, (1, 2), 'five of 1 and 2, for the stem and each stage'),
            ('output_stride', [output_stride], 1, (8, 16, 32), '8, 16 or 32'),
    ):
        if not isinstance(numbers, Sequence) or len(numbers) != count or any(n not in allowed for n in numbers):
            raise ValueError(f'{name} must be {what}, got {numbers if count > 1 else numbers[0]!r}.')
    if output_stride != 32 and tuple(strides) != (2,) * 5:
        raise ValueError(
            f'strides must be (2, 2, 2, 2, 2) with an output_stride of 8 or 16, which changes them too, got {strides}.')


register_released_keys(RepOptVgg, [
    (r'^stem\.', 'stage0.'),
    (r'^stages\.(\d)\.', lambda match: f'stage{int(match[1]) + 1}.'),
    (r'\.conv\.0\.weights\.conv3x3$', '.conv.weight'),
    (r'\.conv\.0\.scales\.conv3x3$', '.scale_conv.weight'),
    (r'\.conv\.0\.weights\.conv1x1$', '.conv_1x1.weight'),
    (r'\.conv\.0\.scales\.conv1x1$', '.scale_1x1.weight'),
    (r'\.conv\.0\.weights\.identity$', '.scale_identity.weight'),
    (r'\.conv\.0\.', '.conv.'),
    (r'\.conv\.1\.', '.bn.'),
    (r'\.attn\.fc1\.', '.post_se.down.'),
    (r'\.attn\.fc2\.', '.post_se.up.'),
    (r'^head\.fc\.', 'linear.'),
])


_COMMON = dict(stem_width=64, strides=(2, 2, 2, 2, 2), act_layer='relu', attn_layer=None)
_L2 = dict(_COMMON, depths=(8, 14, 24, 1), widths=(160, 320, 640, 2560))

# Table 1; A0, A1 and B0 have the depths and widths of RepVGG.
model_cfgs: Dict[str, Dict[str, Any]] = {
    'repopt_vgg_a0': dict(_COMMON, depths=(2, 4, 14, 1), widths=(48, 96, 192, 1280), stem_width=48),
    'repopt_vgg_a0.cifar10': dict(
        depths=(3, 4, 6, 1), widths=(32, 64, 128, 192), stem_width=32, strides=(1, 1, 2, 2, 2)),
    'repopt_vgg_a1': dict(_COMMON, depths=(2, 4, 14, 1), widths=(64, 128, 256, 1280)),
    'repopt_vgg_b0': dict(_COMMON, depths=(4, 6, 16, 1), widths=(64, 128, 256, 1280)),
    'repopt_vgg_b1': dict(_COMMON, depths=(4, 6, 16, 1), widths=(128, 256, 512, 2048)),
    'repopt_vgg_b2': dict(_COMMON, depths=(4, 6, 16, 1), widths=(160, 320, 640, 2560)),
    'repopt_vgg_l1': dict(_COMMON, depths=(8, 14, 24, 1), widths=(128, 256, 512, 2048)),
    'repopt_vgg_l2': _L2,
    # table 3, with the released SE ratio of 1 / 4
    'repopt_vgg_l2se': dict(_L2, attn_layer='se', attn_kwargs=dict(rd_ratio=.25, rd_divisor=1)),
}


def _create_repopt_vgg(variant: str, /, pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    def complete(args: Dict[str, Any]) -> Dict[str, Any]:
        # a feature map for each resolution: a stage of stride 1 adds none
        strides = args['strides']
        features = 1 + sum(stride != 1 for stride in strides[1:]) if isinstance(strides, Sequence) else 0
        scales = choose_scales(variant, args, model_cfgs[variant])
        if args.get('reparameterized') and 'weights' not in args:  # others are loaded before folding
            args = {**args, 'pretrained_cfg_overlay': {
                'first_conv': 'stem.conv', **(args.get('pretrained_cfg_overlay') or {})}}
        return {'out_indices': tuple(range(features)), **args, 'scales': scales}

    return build_model(
        RepOptVgg,
        variant,
        pretrained,
        model_cfgs,
        complete,
        feature_cfg=dict(flatten_sequential=True),
        **kwargs,
    )


default_cfgs = generate_default_cfgs({
    'repopt_vgg_a0.cifar10': _cfg(
        hf_hub_id='timm-rep/repopt_vgg_a0.cifar10', first_conv='stem.conv.0',
        num_classes=10, input_size=(3, 32, 32), pool_size=(4, 4), crop_pct=.9, interpolation='bicubic',
        mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616)),
    # last, with '*', to be the default
    **{f'{variant}.untrained*': _cfg(first_conv='stem.conv.0') for variant in model_cfgs if '.' not in variant},
})


@register_model
def repopt_vgg_a0(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG with the depths and widths of RepVGG-A0."""
    return _create_repopt_vgg('repopt_vgg_a0', pretrained=pretrained, **kwargs)


@register_model
def repopt_vgg_a1(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG with the depths and widths of RepVGG-A1."""
    return _create_repopt_vgg('repopt_vgg_a1', pretrained=pretrained, **kwargs)


@register_model
def repopt_vgg_b0(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG with the depths and widths of RepVGG-B0."""
    return _create_repopt_vgg('repopt_vgg_b0', pretrained=pretrained, **kwargs)


@register_model
def repopt_vgg_b1(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG-B1 of table 1: 51.8 M parameters."""
    return _create_repopt_vgg('repopt_vgg_b1', pretrained=pretrained, **kwargs)


@register_model
def repopt_vgg_b2(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG-B2 of table 1: 80.3 M parameters."""
    return _create_repopt_vgg('repopt_vgg_b2', pretrained=pretrained, **kwargs)


@register_model
def repopt_vgg_l1(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG-L1 of table 1: 76.0 M parameters."""
    return _create_repopt_vgg('repopt_vgg_l1', pretrained=pretrained, **kwargs)


@register_model
def repopt_vgg_l2(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG-L2 of table 1: 118.1 M parameters."""
    return _create_repopt_vgg('repopt_vgg_l2', pretrained=pretrained, **kwargs)


@register_model
def repopt_vgg_l2se(pretrained: bool = False, **kwargs: Any) -> RepOptVgg:
    """RepOpt-VGG-L2 with an SE block after every convolution, of table 3."""
    return _create_repopt_vgg('repopt_vgg_l2se', pretrained=pretrained, **kwargs)
