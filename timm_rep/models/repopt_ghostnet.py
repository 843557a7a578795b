"""RepOpt-GhostNet: RepGhostNet without its fusion layers, with the structural prior in the optimizer.

`Re-parameterizing Your Optimizers rather than Architectures` - https://arxiv.org/abs/2205.15242, appendix D
"""
from typing import Any, Dict, Optional, Sequence, Union

import torch
from timm.models import generate_default_cfgs, register_model
from timm.models.repghost import RepGhostNet, _cfg

from timm_rep.convert.repopt import set_scales
from timm_rep.hub import build_model, register_released_keys
from timm_rep.layers import ConvBranch, Csla, IdentityBranch, RepOptConv, RepOptConvDeploy
from timm_rep.scales import ScalesLike

from ._repopt import RepOptMixin, check_structure, choose_scales

__all__ = ['RepOptGhostNet']


class RepOptGhostNet(RepOptMixin, RepGhostNet):
    """RepOpt-GhostNet: timm's RepGhostNet whose cheap operations are CSLA layers."""

    def __init__(
            self,
            cfgs: Sequence[Sequence[Sequence[float]]],
            width: float = 1.,
            structure: str = 'target',
            scales: Optional[ScalesLike] = 'init',
            reinit: bool = True,
            reparameterized: bool = False,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
            **kwargs: Any,
    ):
        """
        Args:
            cfgs: Blocks of each stage: (kernel size of the depthwise convolution at stride 2, hidden channels, output
                channels, SE ratio, stride), with the numbers of channels at width 1.
            width: Multiplier of all numbers of channels, positive.
            structure: 'target', 'search' or 'csla', as for :class:`RepOptVgg`. The branches of a cheap operation are a
                convolution and an identity.
            scales, reinit, reparameterized: As for :class:`RepOptVgg`.
            kwargs: num_classes, in_chans, global_pool and drop_rate of timm's RepGhostNet.

        Raises:
            FileNotFoundError: The file of scales does not exist.
            ValueError: The structure is unknown, width is not positive, or the scales do not fit.
            TypeError: ``reparam`` is given, which adds timm's fusion layers; the optimizer replaces them here.
        """
        check_structure(structure)
        if not width > 0:
            raise ValueError(f'width must be positive, got {width!r}.')
        if 'reparam' in kwargs:
            raise TypeError("reparam must not be given to RepOpt-GhostNet: pass structure='search' or 'csla' instead.")
        dd = {'device': device, 'dtype': dtype}
        super().__init__(cfgs, width=width, reparam=False, **dd, **kwargs)
        depth = 0
        for block in (block for stage in self.blocks[:-1] for block in stage):
            # appendix B: the depth counts from the last block with a projection shortcut
            depth = depth + 1 if len(block.shortcut) == 0 else 1
            for ghost, index in ((block.ghost1, 2 * depth - 1), (block.ghost2, 2 * depth)):
                csla = Csla(
                    ghost.out_chs,
                    ghost.out_chs,
                    branches=(ConvBranch(3), IdentityBranch()),
                    groups=ghost.out_chs,
                    initial_scale=(2 / (index + 1)) ** .5,
                )
                ghost.cheap_operation = (
                    RepOptConvDeploy(csla, **dd) if reparameterized else RepOptConv(csla, structure, **dd))
        if not reparameterized:
            set_scales(self, scales, reinit)

    def convert_to_deploy(self) -> None:
        """Same as ``reparameterize()``, under the name in timm's RepGhostNet."""
        self.reparameterize()


register_released_keys(RepOptGhostNet, [
    (r'\.cheap_operation\.1\.', '.final_bn.'),
    (r'\.cheap_operation\.0\.weights\.conv3x3$', '.cheap_operation.0.weight'),
    (r'\.cheap_operation\.0\.scales\.conv3x3$', '.cheap_operation.1.weight'),
    (r'\.cheap_operation\.0\.weights\.identity$', '.fusion_scale.weight'),
])


# blocks of each stage, as in timm's RepGhostNet: (kernel size, hidden channels, channels, SE ratio, stride)
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

model_cfgs: Dict[str, Dict[str, Any]] = {
    'repopt_ghostnet_050': dict(cfgs=_CFGS, width=.5),
    'repopt_ghostnet_058': dict(cfgs=_CFGS, width=.58),
    'repopt_ghostnet_080': dict(cfgs=_CFGS, width=.8),
    'repopt_ghostnet_100': dict(cfgs=_CFGS, width=1.),
    'repopt_ghostnet_111': dict(cfgs=_CFGS, width=1.11),
    'repopt_ghostnet_130': dict(cfgs=_CFGS, width=1.3),
    'repopt_ghostnet_150': dict(cfgs=_CFGS, width=1.5),
    'repopt_ghostnet_200': dict(cfgs=_CFGS, width=2.),
}


def _create_repopt_ghostnet(variant: str, /, pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    return build_model(
        RepOptGhostNet,
        variant,
        pretrained,
        model_cfgs,
        complete=lambda args: {**args, 'scales': choose_scales(variant, args, model_cfgs[variant])},
        feature_cfg=dict(flatten_sequential=True),
        **kwargs,
    )


default_cfgs = generate_default_cfgs({f'{variant}.untrained': _cfg(license='apache-2.0') for variant in model_cfgs})


@register_model
def repopt_ghostnet_050(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 0.5x."""
    return _create_repopt_ghostnet('repopt_ghostnet_050', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_058(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 0.58x."""
    return _create_repopt_ghostnet('repopt_ghostnet_058', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_080(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 0.8x."""
    return _create_repopt_ghostnet('repopt_ghostnet_080', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_100(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.0x."""
    return _create_repopt_ghostnet('repopt_ghostnet_100', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_111(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.11x."""
    return _create_repopt_ghostnet('repopt_ghostnet_111', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_130(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.3x."""
    return _create_repopt_ghostnet('repopt_ghostnet_130', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_150(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 1.5x."""
    return _create_repopt_ghostnet('repopt_ghostnet_150', pretrained=pretrained, **kwargs)


@register_model
def repopt_ghostnet_200(pretrained: bool = False, **kwargs: Any) -> RepOptGhostNet:
    """RepOpt-GhostNet 2.0x."""
    return _create_repopt_ghostnet('repopt_ghostnet_200', pretrained=pretrained, **kwargs)
