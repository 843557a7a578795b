"""A CSLA layer followed by a BatchNorm, and the convolution they fold into.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.
"""
from functools import partial
from typing import Callable, Dict, Optional, Union

import torch
import torch.nn as nn

from .csla import Csla
from .csla_conv import CslaBlock, CslaConv2d
from .fold import Affine, check_foldable

__all__ = ['RepOptConv', 'RepOptConvDeploy']

_LAYERS: Dict[str, Callable[..., nn.Module]] = {
    'target': CslaConv2d,
    'search': partial(CslaBlock, trainable=True),
    'csla': CslaBlock,
}

_STRUCTURE_KEYS = {
    '0.weights.': ('search', 'csla'),
    '1.running_mean': ('target',),
    'bias': ('deploy',),
}


class RepOptConv(nn.Sequential):
    """A CSLA layer and a BatchNorm.

    Input (N, in_channels, H, W), output (N, out_channels, H', W').
    """
    structure_keys = _STRUCTURE_KEYS

    def __init__(
            self,
            csla: Csla,
            structure: str = 'target',
            norm: Optional[nn.modules.batchnorm._BatchNorm] = None,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
    ):
        """
        Args:
            csla: The declaration.
            structure: 'target', one convolution; 'search', branches with trainable scales; 'csla', with constant ones.
            norm: BatchNorm of the output; a new BatchNorm2d if None.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__(
            _LAYERS[structure](csla, **dd),
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
        check_foldable(self)
        conv, norm = self
        if not isinstance(conv, (CslaConv2d, CslaBlock)):
            raise ValueError(
                f'Expected a CSLA layer, but got {type(conv).__name__}: merge adapters into the layers that they '
                'adapt, and quantize after folding.')
        deploy = RepOptConvDeploy(conv.csla, device='meta')  # its parameters are replaced
        like = next(p for p in conv.parameters() if p.ndim == 4)
        kernel = conv.equivalent_kernel(dtype=torch.float64)
        Affine.from_kernel(kernel).before_norm(norm).write_to(deploy, like=like)
        return deploy.train(self.training)


class RepOptConvDeploy(nn.Conv2d):
    """The convolution with a bias that a :class:`RepOptConv` folds into."""
    structure = 'deploy'
    structure_keys = _STRUCTURE_KEYS

    def __init__(
            self,
            csla: Csla,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
    ):
        super().__init__(**csla.conv_args, device=device, dtype=dtype)
