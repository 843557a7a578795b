"""A CSLA layer with the BatchNorm behind it, and what both fold into.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.
"""
from typing import Any, Mapping, Optional, Tuple

import torch
import torch.nn as nn

from .csla import Csla
from .csla_conv import CslaBlock, CslaConv2d, SearchBlock
from .fold import Affine, check_unmodified

__all__ = ['RepOptConv', 'RepOptConvDeploy', 'build_csla_layer', 'csla_of', 'fold_norm']


def build_csla_layer(csla: Csla, structure: str, device=None, dtype=None) -> nn.Module:
    """The layer of a CSLA declaration in a structure.

    Args:
        csla: The declaration.
        structure: 'target', one convolution; 'search', branches with trainable scales; 'csla', with constant scales.
    """
    layers = {layer.structure: layer for layer in (CslaConv2d, SearchBlock, CslaBlock)}
    return layers[structure](csla, device=device, dtype=dtype)


def csla_of(layer: nn.Module) -> Csla:
    """The declaration of a CSLA layer.

    Raises:
        ValueError: An adapter or another layer has taken its place.
    """
    if not isinstance(layer, (CslaConv2d, SearchBlock, CslaBlock)):
        raise ValueError(
            f'There is a {type(layer).__name__} where a CSLA layer is expected: merge adapters into the layers that '
            'they adapt, and quantize after folding.')
    return layer.csla


def fold_norm(conv: nn.Module, norm: nn.modules.batchnorm._BatchNorm, deploy: nn.Conv2d) -> None:
    """Fold a CSLA layer and the BatchNorm behind it into one convolution with a bias.

    Args:
        conv: CSLA layer of any structure.
        norm: BatchNorm of its output.
        deploy: Convolution of the same size, whose parameters are replaced.

    Raises:
        ValueError: The BatchNorm has no running statistics.
        OverflowError: A folded weight does not fit the dtype of the layer.
    """
    kernel = conv.equivalent_kernel(dtype=torch.float64)
    like = next(p for p in conv.parameters() if p.ndim == 4)
    Affine.from_kernel(kernel).before_norm(norm).write_to(deploy, like=like)


def _structures_in(state_dict: Mapping[str, Any], prefix: str) -> Tuple[str, ...]:
    """Structures of the layer that the entries of a state dict under ``prefix`` belong to."""
    if any(name.startswith(f'{prefix}0.weights.') for name in state_dict):
        return ('search', 'csla')
    if f'{prefix}1.running_mean' in state_dict:
        return ('target',)
    return ('deploy',) if f'{prefix}bias' in state_dict else ()


class RepOptConv(nn.Sequential):
    """A CSLA layer and BatchNorm.

    Input (N, in_channels, H, W), output (N, out_channels, H', W').
    """
    structures_in = staticmethod(_structures_in)

    def __init__(
            self,
            csla: Csla,
            structure: str = 'target',
            norm: Optional[nn.modules.batchnorm._BatchNorm] = None,
            device=None,
            dtype=None,
    ):
        """
        Args:
            csla: The declaration.
            structure: 'target', 'search' or 'csla'.
            norm: BatchNorm of the output; a new BatchNorm2d if None.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__(
            build_csla_layer(csla, structure, **dd),
            nn.BatchNorm2d(csla.out_channels, **dd) if norm is None else norm,
        )
        self.structure = structure

    @torch.jit.ignore
    @torch.no_grad()
    def fuse(self) -> 'RepOptConvDeploy':
        """The deploy structure with the same function as in eval mode, as a new module.

        Raises:
            ValueError: The BatchNorm has no running statistics, or a layer has hooks or was replaced.
            OverflowError: A folded weight does not fit the dtype of the model.
        """
        check_unmodified(self)
        conv, norm = self
        deploy = RepOptConvDeploy(csla_of(conv), device='meta')  # its parameters are replaced
        fold_norm(conv, norm, deploy)
        return deploy.train(self.training)


class RepOptConvDeploy(nn.Conv2d):
    """The convolution with a bias that a :class:`RepOptConv` folds into."""
    structure = 'deploy'
    structures_in = staticmethod(_structures_in)

    def __init__(self, csla: Csla, device=None, dtype=None):
        super().__init__(**csla.conv_args, device=device, dtype=dtype)
