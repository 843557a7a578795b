"""The layers of a CSLA declaration: the target operator, the block of its branches, and these with a BatchNorm.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.
"""
import math
from functools import partial
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import register_notrace_module

from .csla import ConvBranch, Csla
from .fold import Affine, check_foldable, is_plain_batch_norm, to_float64
from .grad_mult import GradMult, get_grad_mult, set_grad_mult

# names that torch's wrappers insert into the names of modules
_WRAPPERS = {'module', '_orig_mod', '_checkpoint_wrapped_module', '_fsdp_wrapped_module'}


@register_notrace_module  # a copy of a traced model would lose its multipliers
class CslaConv2d(nn.Conv2d):
    """The target operator of a CSLA block: a convolution that keeps the GradMult of its weight.

    When a model is copied, unpickled, moved from 'meta' or loaded with ``assign=True``, torch replaces the parameter
    and drops its attributes; this module attaches the multiplier to the new parameter.

    Input (N, in_channels, H, W), output (N, out_channels, H', W').
    """
    structure = 'target'
    __jit_unused_properties__ = ('grad_mult',)

    def __init__(
            self,
            csla: Csla,
            bias: bool = False,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
    ):
        """
        Args:
            csla: The branches that this operator replaces.
            bias: Whether the convolution has a bias; branches have none.
            device: Device of the parameters.
            dtype: Dtype of the parameters.
        """
        super().__init__(**csla.conv_args, bias=bias, device=device, dtype=dtype)
        self.csla = csla

    @property
    def grad_mult(self) -> Optional[GradMult]:
        """The multiplier attached to the weight, or None."""
        weight = self._parameters.get('weight')
        return None if weight is None else get_grad_mult(weight)

    def set_scales(self, scales: Optional[Mapping[str, torch.Tensor]]) -> None:
        """Attach the multiplier of some scales to the weight (rule of iteration).

        Args:
            scales: Constant scale of each conv branch, (out_channels,); None removes the multiplier.

        Raises:
            ValueError: A scale is missing, has the wrong shape or is not finite, or the weight is not a parameter.
        """
        self.check_weight()
        old = self.grad_mult
        set_grad_mult(self.weight, None if scales is None else GradMult(self.csla, scales))
        if old is not None and old.layers is not None:
            old.layers.pop(old.name, None)

    def reset_parameters(self) -> None:
        """Initialize as torch.nn.Conv2d does; with a multiplier attached, the kernel by the rule of initialization."""
        super().reset_parameters()
        grad_mult = self.grad_mult
        if grad_mult is not None:
            self.reset_kernel(grad_mult.scales)

    def check_weight(self) -> None:
        """Raise ValueError unless the weight is a parameter, which a multiplier can be attached to."""
        if self._parameters.get('weight') is None:
            raise ValueError(
                'The weight must be a parameter, but a parametrization, weight_norm or pruning computes it from other '
                'parameters, which the optimizer updates instead: remove it before attaching the GradMult.')

    @torch.no_grad()
    def reset_kernel(self, scales: Mapping[str, torch.Tensor]) -> None:
        """Reinitialize the kernel by the rule of initialization (eq. 4), as the kernel of a new CSLA block.

        Args:
            scales: Constant scale of each conv branch, (out_channels,).

        Raises:
            ValueError: A scale is missing or has the wrong shape.
        """
        block = CslaBlock(self.csla, scales, device=self.weight.device, dtype=self.weight.dtype)
        self.weight.copy_(block.equivalent_kernel())

    def equivalent_kernel(self, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """The kernel, detached, in a dtype or its own; the same method as CslaBlock's."""
        return _detached(self.weight, dtype)

    # torch replaces the parameter in the methods below
    def _restore_grad_mult(self, grad_mult: Optional[GradMult]) -> None:
        weight = self._parameters.get('weight')
        if (grad_mult is None or weight is None or get_grad_mult(weight) is not None
                or tuple(weight.shape) != self.csla.kernel_shape):
            return
        is_whole = grad_mult.shape == self.csla.kernel_shape  # else it is of the rows of a shard, which are taken again
        set_grad_mult(weight, grad_mult if is_whole else GradMult(self.csla, grad_mult.scales))
        if self.grad_mult is not grad_mult and grad_mult.layers is not None:
            grad_mult.layers.add(grad_mult.name, self)

    def register_parameter(self, name: str, param: Optional[nn.Parameter]) -> None:
        grad_mult = self.grad_mult
        super().register_parameter(name, param)
        self._restore_grad_mult(grad_mult)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> 'CslaConv2d':
        grad_mult = self.grad_mult
        super()._apply(fn, recurse)
        self._restore_grad_mult(grad_mult)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        grad_mult = self.grad_mult
        super()._load_from_state_dict(*args, **kwargs)
        self._restore_grad_mult(grad_mult)

    def __getstate__(self) -> Dict[str, Any]:
        return {**super().__getstate__(), '_grad_mult': self.grad_mult}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        state = dict(state)
        grad_mult = state.pop('_grad_mult')
        super().__setstate__(state)
        self._restore_grad_mult(grad_mult)
        if grad_mult is not None and grad_mult.layers is not None:
            grad_mult.layers.setdefault(grad_mult.name, self)


class _BranchScales(nn.Module):
    """Scale of each conv branch, by name: parameters, or buffers where the scales are constant."""

    def __init__(self, scales: Mapping[str, torch.Tensor], trainable: bool):
        super().__init__()
        for name, scale in scales.items():
            if trainable:
                self.register_parameter(name, nn.Parameter(scale))
            else:
                self.register_buffer(name, scale)

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._parameters, *self._buffers))

    def keys(self) -> Tuple[str, ...]:
        return tuple(self)

    def values(self) -> Tuple[torch.Tensor, ...]:
        return tuple(self[name] for name in self)

    def items(self) -> Tuple[Tuple[str, torch.Tensor], ...]:
        return tuple((name, self[name]) for name in self)


@register_notrace_module
class CslaBlock(nn.Module):
    """A CSLA block with a kernel for each branch and scales (figure 1): the block that Hyper-Search trains.

    The kernels of the branches are added before one convolution. Input (N, in_channels, H, W), output
    (N, out_channels, H', W').
    """

    def __init__(
            self,
            csla: Csla,
            scales: Optional[Mapping[str, torch.Tensor]] = None,
            trainable: bool = False,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
    ):
        """
        Args:
            csla: The branches.
            scales: Scale of each conv branch, (out_channels,), copied; ``csla.initial_scales()`` if None.
            trainable: Whether the scales are parameters, as in Hyper-Search (section 3.3), or constant, buffers.
            device: Device of the parameters.
            dtype: Dtype of the parameters.

        Raises:
            ValueError: A scale is missing or has the wrong shape.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.csla = csla
        self.structure = 'search' if trainable else 'csla'
        self.weights = nn.ParameterDict()
        for branch in csla.branches:
            if isinstance(branch, ConvBranch):
                shape = (csla.out_channels, csla.in_channels // csla.groups, *branch.kernel_size)  # type: ignore[misc]
                self.weights[branch.name] = nn.Parameter(torch.empty(shape, **dd))
            else:
                self.weights[branch.name] = nn.Parameter(torch.empty(csla.out_channels, **dd))
        scales = csla.initial_scales(**dd) if scales is None else csla.check_scales(scales)
        self.scales = _BranchScales({name: scale.clone().to(**dd) for name, scale in scales.items()}, trainable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the kernels as torch.nn.Conv2d does and the scales of the identity branch with 1."""
        for weight in self.weights.values():
            if weight.ndim == 4:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            else:
                nn.init.ones_(weight)

    @torch.no_grad()
    def set_scales(self, scales: Mapping[str, torch.Tensor]) -> None:
        """Replace the scales of the conv branches.

        Args:
            scales: Scale of each conv branch, (out_channels,).

        Raises:
            ValueError: A scale is missing or has the wrong shape.
        """
        for name, scale in self.csla.check_scales(scales).items():
            self.scales[name].copy_(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(
            x,
            self.csla.kernel(self.weights, self.scales),
            stride=self.csla.stride,
            padding=self.csla.padding(self.csla.kernel_size),
            dilation=self.csla.dilation,
            groups=self.csla.groups,
        )

    def equivalent_kernel(self, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """The kernel of the one convolution with the same output (eq. 4), detached, in a dtype or the weights'.

        In float64 it is on the CPU if the weights' device has no float64.
        """
        weights, scales = (
            {name: _detached(x, dtype) for name, x in group.items()} for group in (self.weights, self.scales))
        return self.csla.kernel(weights, scales)


def _detached(x: torch.Tensor, dtype: Optional[torch.dtype]) -> torch.Tensor:
    return to_float64(x) if dtype == torch.float64 else x.detach().to(dtype or x.dtype)


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


@register_notrace_module
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

        Raises:
            TypeError: The norm is not a BatchNorm, or has an activation.
            ValueError: The structure is unknown.
        """
        if structure not in _LAYERS:
            raise ValueError(f'structure must be one of {", ".join(map(repr, _LAYERS))}, got {structure!r}.')
        if norm is not None and not is_plain_batch_norm(norm):
            raise TypeError(f'norm must be a BatchNorm without activation, got {type(norm).__name__}.')
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
        like = max(conv.parameters(), key=lambda p: p.ndim)  # scales may be in float32 beside the kernels
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


def csla_layers(model: nn.Module) -> Dict[str, nn.Module]:
    """The CslaConv2d and CslaBlock layers of a model, by their names.

    Names that torch's wrappers insert ('module', '_orig_mod', ...) are removed, unless two names would become equal.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (CslaBlock, CslaConv2d))}
    names = ['.'.join(part for part in name.split('.') if part not in _WRAPPERS) for name in layers]
    return dict(zip(names, layers.values())) if len(set(names)) == len(names) else layers
