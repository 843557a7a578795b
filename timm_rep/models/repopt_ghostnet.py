"""RepOpt-GhostNet: RepGhostNet without its fusion layers, whose prior is in the optimizer.

`Re-parameterizing Your Optimizers rather than Architectures` - https://arxiv.org/abs/2205.15242, appendix D
"""
from typing import Any, Mapping, Optional, Sequence

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model
from timm.models.repghost import RepGhostNet

from timm_rep.hub.load import build_model, published_cfgs, with_published
from timm_rep.hub.released import register_released_keys
from timm_rep.layers import ConvBranch, Csla, IdentityBranch
from timm_rep.scales import ScalesLike

from ._repopt import RepOptMixin, build_csla_layer, check_structure, choose_scales, fold_norm

__all__ = ['RepOptGhostNet']


def _structure_in(state_dict: Mapping[str, Any], prefix: str) -> Optional[str]:
    """Which form of the operation a state dict holds under ``prefix``, or None if none."""
    if f'{prefix}0.weights.conv3x3' in state_dict:
        return 'branches'
    if f'{prefix}1.running_mean' in state_dict:
        return 'training'
    return 'deploy' if f'{prefix}bias' in state_dict else None


class RepOptCheapOperation(nn.Sequential):
    """Depthwise 3 x 3 convolution, or the branches that it stands for, and BatchNorm.

    Input and output (N, channels, H, W). As a target, it has the parameters of timm's cheap operation without fusion.
    """
    structure_in = staticmethod(_structure_in)

    def __init__(self, channels: int, structure: str = 'target', initial_scale: float = 1., device=None, dtype=None):
        """
        Args:
            channels: Input and output channels.
            structure: 'target', 'search' or 'csla'.
            initial_scale: What Hyper-Search starts the scale of the convolution from.
        """
        dd = {'device': device, 'dtype': dtype}
        csla = Csla(
            channels,
            channels,
            branches=(ConvBranch(3), IdentityBranch()),
            groups=channels,
            initial_scale=initial_scale,
        )
        super().__init__(build_csla_layer(csla, structure, **dd), nn.BatchNorm2d(channels, **dd))
        self.structure = 'training' if structure == 'target' else 'branches'

    @torch.jit.ignore
    @torch.no_grad()
    def fuse(self) -> 'RepOptCheapOperationDeploy':
        """The same function in eval mode as a new depthwise convolution with a bias.

        Raises:
            ValueError: The BatchNorm has no running statistics.
            OverflowError: A folded weight does not fit the dtype of the model.
        """
        conv, norm = self
        # nothing to initialize, and no random numbers drawn
        deploy = RepOptCheapOperationDeploy(conv.csla.out_channels, device='meta')
        fold_norm(conv, norm, deploy)
        return deploy.train(self.training)


class RepOptCheapOperationDeploy(nn.Conv2d):
    """Depthwise 3 x 3 convolution with a bias, with the parameters of timm's folded cheap operation."""
    structure = 'deploy'
    structure_in = staticmethod(_structure_in)

    def __init__(self, channels: int, device=None, dtype=None):
        super().__init__(channels, channels, 3, padding=1, groups=channels, device=device, dtype=dtype)


class RepOptGhostNet(RepOptMixin, RepGhostNet):
    """RepOpt-GhostNet: timm's RepGhostNet with cheap operations of its own."""

    def __init__(
            self,
            cfgs: Sequence[Sequence[Sequence[float]]],
            width: float = 1.,
            structure: str = 'target',
            scales: Optional[ScalesLike] = 'init',
            reinit: bool = True,
            reparameterized: bool = False,
            device=None,
            dtype=None,
            **kwargs,
    ):
        """
        Args:
            cfgs: For each stage its blocks: (kernel size of the depthwise convolutions at stride 2, hidden channels,
                channels, SE ratio, stride), channels at width 1.
            width: Multiplier of all channels.
            structure: 'target', the plain net; 'search', the net that Hyper-Search trains, every cheap operation a sum
                of a convolution and an identity with trainable scales; 'csla', the same with constant scales.
            scales: Constants of the branches: Scales, a path, a Hub repository, the name of a model whose searched
                scales come with this package, 'ones', or 'init', the values that the search structure starts from. A
                target net gets its GradMults and its initial kernels from them, the other structures their scales.
                False (or None, which timm's create_model drops): a plain net, for plain optimizers. Of create_model,
                also 'default': the searched scales of the variant, or 'init' where there are none.
            reinit: Initialize the kernels of a target net by the rule of initialization.
            reparameterized: Build the deploy structure, for checkpoints of a folded model.
            kwargs: Of timm's RepGhostNet: num_classes, in_chans, global_pool, drop_rate.

        Raises:
            FileNotFoundError: There is no such file of scales.
            ValueError: The structure is unknown, width is not positive, or the scales do not fit.
            TypeError: ``reparam``, timm's fusion layers, which are what the optimizer stands for here.
        """
        check_structure(structure)
        if not width > 0:
            raise ValueError(f'width: expected a number over 0, got {width!r}.')
        if 'reparam' in kwargs:
            raise TypeError("reparam: not for RepOpt-GhostNet; structure='search' or 'csla' builds its branches.")
        dd = {'device': device, 'dtype': dtype}
        super().__init__(cfgs, width=width, reparam=False, **dd, **kwargs)
        depth = 0
        for block in (block for stage in self.blocks[:-1] for block in stage):
            # appendix B: the depth counts from the last block without a shortcut of its own
            depth = depth + 1 if len(block.shortcut) == 0 else 1
            for ghost, index in ((block.ghost1, 2 * depth - 1), (block.ghost2, 2 * depth)):
                if reparameterized:
                    ghost.cheap_operation = RepOptCheapOperationDeploy(ghost.out_chs, **dd)
                else:
                    ghost.cheap_operation = RepOptCheapOperation(
                        ghost.out_chs, structure, initial_scale=(2 / (index + 1)) ** .5, **dd)
        if not reparameterized:
            self._set_scales(structure, scales, reinit)

    def convert_to_deploy(self) -> None:
        """timm's name for ``reparameterize()`` of this family."""
        self.reparameterize()


register_released_keys(RepOptGhostNet, [
    (r'\.cheap_operation\.1\.', '.final_bn.'),
    (r'\.cheap_operation\.0\.weights\.conv3x3$', '.cheap_operation.0.weight'),
    (r'\.cheap_operation\.0\.scales\.conv3x3$', '.cheap_operation.1.weight'),
    (r'\.cheap_operation\.0\.weights\.identity$', '.fusion_scale.weight'),
])


# (kernel size, hidden channels, channels, SE ratio, stride) of the blocks of each stage, as in timm's RepGhostNet
_CFGS = (
    ((3, 8, 16, 0, 1),),
    ((3, 24, 24, 0, 2),),
    ((3, 36, 24, 0, 1),),
    ((5, 36, 40, .25, 2),),
    ((5, 60, 40, .25, 1),),
    ((3, 120, 80, 0, 2),),
    ((3, 100, 80, 0, 1), *((3, 120, 80, 0, 1),) * 2, (3, 240, 112, .25, 1), (3, 336, 112, .25, 1)),
    ((5, 336, 160, .25, 2),),
    ((5, 480, 160, 0, 1), (5, 480, 160, .25, 1)) * 2,
)

model_cfgs = {
    'repopt_ghostnet_050': dict(width=.5),
    'repopt_ghostnet_058': dict(width=.58),
    'repopt_ghostnet_080': dict(width=.8),
    'repopt_ghostnet_100': dict(width=1.),
    'repopt_ghostnet_111': dict(width=1.11),
    'repopt_ghostnet_130': dict(width=1.3),
    'repopt_ghostnet_150': dict(width=1.5),
    'repopt_ghostnet_200': dict(width=2.),
}


@with_published
def _create_repopt_ghostnet(variant: str, pretrained: bool = False, **kwargs) -> RepOptGhostNet:
    architecture = dict(cfgs=_CFGS, **model_cfgs[variant])
    scales = choose_scales(variant, kwargs, architecture)
    return build_model(
        RepOptGhostNet,
        variant,
        pretrained,
        feature_cfg=dict(flatten_sequential=True),
        **{**architecture, **kwargs, 'scales': scales},
    )


def _cfg(url: str = '', **kwargs):
    return {
        'url': url,
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': (7, 7),
        'crop_pct': .875, 'interpolation': 'bicubic',
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'conv_stem', 'classifier': 'classifier',
        'license': 'apache-2.0',
        **kwargs
    }


default_cfgs = generate_default_cfgs(published_cfgs({variant: _cfg() for variant in model_cfgs}))


@register_model
def repopt_ghostnet_050(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 0.5x."""
    return _create_repopt_ghostnet('repopt_ghostnet_050', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_058(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 0.58x."""
    return _create_repopt_ghostnet('repopt_ghostnet_058', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_080(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 0.8x."""
    return _create_repopt_ghostnet('repopt_ghostnet_080', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_100(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.0x."""
    return _create_repopt_ghostnet('repopt_ghostnet_100', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_111(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.11x."""
    return _create_repopt_ghostnet('repopt_ghostnet_111', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_130(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.3x."""
    return _create_repopt_ghostnet('repopt_ghostnet_130', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_150(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.5x."""
    return _create_repopt_ghostnet('repopt_ghostnet_150', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_200(pretrained=False, **kwargs) -> RepOptGhostNet:
    """RepOpt-GhostNet 2.0x."""
    return _create_repopt_ghostnet('repopt_ghostnet_200', pretrained=pretrained, **kwargs)
