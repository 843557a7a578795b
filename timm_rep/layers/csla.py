"""Constant-Scale Linear Addition: one description of a block's linear branches, and all that follows from it.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.2, appendix A.

A CSLA block is a sum of linear branches on the same input, each ``scale * operator``. The same function is one
convolution, and training that one with its gradients multiplied by constants (its GradMult) is training the block:
CSLA = GR.
"""
import math
from dataclasses import dataclass
from typing import Dict, Mapping, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F

from .grad_mult import BranchScale, GradMult, get_grad_mult, set_grad_mult

__all__ = ['ConvBranch', 'Csla', 'CslaBlock', 'CslaConv2d', 'IdentityBranch', 'SearchBlock', 'csla_layers']


# what torch's wrappers put between the names of modules
_WRAPPERS = {'module', '_orig_mod', '_checkpoint_wrapped_module', '_fsdp_wrapped_module'}


def _pair(x: Union[int, Tuple[int, int]], what: str) -> Tuple[int, int]:
    pair = (x, x) if isinstance(x, int) else tuple(x)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(f'{what} is (height, width) or one number, each at least 1, got {x!r}.')
    return pair


def _check_name(name: str) -> None:
    # it names a parameter, and part of a key in a file
    if not name.isidentifier() or hasattr(nn.ParameterDict, name):
        raise ValueError(
            f'The name of a branch is a word of letters, digits and underscores and no method of a dict, got {name!r}.')


@dataclass(frozen=True)
class ConvBranch:
    """A convolution with a constant scale for each output channel.

    Attributes:
        kernel_size: (height, width) or one number, odd: the branches' kernels share their centre.
        name: Name of the branch, of its scale in a Scales file and of its parameters; from the kernel size if None.
    """
    kernel_size: Union[int, Tuple[int, int]]
    name: Optional[str] = None

    def __post_init__(self):
        kernel_size = _pair(self.kernel_size, 'kernel_size')
        if any(k % 2 == 0 for k in kernel_size):
            raise ValueError(
                f'The kernels of a CSLA block share their centre, so their sizes are odd, got {kernel_size}.')
        object.__setattr__(self, 'kernel_size', kernel_size)
        object.__setattr__(self, 'name', self.name or f'conv{kernel_size[0]}x{kernel_size[1]}')
        _check_name(self.name)


@dataclass(frozen=True)
class IdentityBranch:
    """The input, with a trainable scale for each channel and the constant 1: a depthwise 1 x 1 convolution."""
    name: str = 'identity'
    kernel_size = (1, 1)

    def __post_init__(self):
        _check_name(self.name)


@dataclass(frozen=True)
class Csla:
    """The linear branches of a block.

    Attributes:
        in_channels: Input channels.
        out_channels: Output channels.
        branches: At least one ConvBranch or IdentityBranch, of different names.
        stride: (height, width) or one number.
        groups: Groups of every convolution.
        dilation: (height, width) or one number.
        initial_scale: What the trainable scales of the conv branches start at in Hyper-Search.

    Raises:
        ValueError: The branches do not add up to one operator; the message says which and why.
    """
    in_channels: int
    out_channels: int
    branches: Tuple[Union[ConvBranch, IdentityBranch], ...]
    stride: Union[int, Tuple[int, int]] = 1
    groups: int = 1
    dilation: Union[int, Tuple[int, int]] = 1
    initial_scale: float = 1.

    def __post_init__(self):
        object.__setattr__(self, 'stride', _pair(self.stride, 'stride'))
        object.__setattr__(self, 'dilation', _pair(self.dilation, 'dilation'))
        object.__setattr__(self, 'branches', tuple(self.branches))
        for what in ('in_channels', 'out_channels', 'groups'):
            if getattr(self, what) < 1:
                raise ValueError(f'{what} is at least 1, got {getattr(self, what)}.')
        strangers = [b for b in self.branches if not isinstance(b, (ConvBranch, IdentityBranch))]
        if strangers:
            raise ValueError(f'A branch is a ConvBranch(kernel_size) or an IdentityBranch(), got {strangers}.')
        names = [branch.name for branch in self.branches]
        if not names or len(set(names)) < len(names):
            raise ValueError(f'A CSLA block has at least one branch, each with a name of its own, got {names}.')
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f'groups={self.groups} must divide in_channels={self.in_channels} and '
                f'out_channels={self.out_channels}.')
        has_identity = any(isinstance(branch, IdentityBranch) for branch in self.branches)
        if has_identity and (self.in_channels != self.out_channels or self.stride != (1, 1)):
            raise ValueError(
                f'An identity branch needs as many output as input channels and stride 1, got {self.in_channels} to '
                f'{self.out_channels} channels at stride {self.stride}: leave it out of this block.')

    @property
    def kernel_size(self) -> Tuple[int, int]:
        """Kernel of the target operator: the smallest that covers every branch."""
        return tuple(max(branch.kernel_size[axis] for branch in self.branches) for axis in (0, 1))

    @property
    def scaled_branches(self) -> Tuple[str, ...]:
        """Names of the branches that have a scale."""
        return tuple(branch.name for branch in self.branches if isinstance(branch, ConvBranch))

    @property
    def kernel_shape(self) -> Tuple[int, int, int, int]:
        """Shape of the target operator's kernel, (out_channels, in_channels / groups, height, width)."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    def padding(self, kernel_size: Tuple[int, int]) -> Tuple[int, int]:
        """What keeps the kernels of the branches on the same centre."""
        return tuple(k // 2 * d for k, d in zip(kernel_size, self.dilation))

    def check_scales(self, scales: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """The scales of the conv branches, each (out_channels,); others, as a search model's identity has, are dropped.

        Raises:
            ValueError: One is missing or misshapen.
        """
        for name in self.scaled_branches:
            if name not in scales:
                raise ValueError(f'No scale for the branch {name!r}: the block has {list(self.scaled_branches)}.')
            if tuple(scales[name].shape) != (self.out_channels,):
                raise ValueError(
                    f'The scale of the branch {name!r} has the shape {tuple(scales[name].shape)}, expected one number '
                    f'for each of the {self.out_channels} output channels.')
        return {name: scales[name].detach() for name in self.scaled_branches}

    def initial_scales(self, device=None, dtype=None) -> Dict[str, torch.Tensor]:
        """What Hyper-Search starts from: initial_scale for every channel of each conv branch."""
        return {
            name: torch.full((self.out_channels,), self.initial_scale, device=device, dtype=dtype)
            for name in self.scaled_branches
        }

    def build_conv(self, bias: bool = False, device=None, dtype=None) -> 'CslaConv2d':
        """The target operator: one convolution, freshly initialized as torch does, without a GradMult yet."""
        return CslaConv2d(self, bias=bias, device=device, dtype=dtype)

    def grad_mult(self, scales: Mapping[str, torch.Tensor]) -> GradMult:
        """The multiplier of the target kernel's gradient or update (eq. 3, appendix A).

        Args:
            scales: Constant scale of each conv branch, (out_channels,).
        """
        scales = self.check_scales(scales)
        return GradMult(self.kernel_shape, [
            BranchScale(branch.kernel_size, scales[branch.name])
            if isinstance(branch, ConvBranch) else
            BranchScale(branch.kernel_size, torch.ones(self.out_channels, device='cpu'), True)
            for branch in self.branches
        ])

    def kernel(self, weights: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The kernel of the one convolution that equals the block (eq. 4), differentiable.

        Args:
            weights: For a conv branch its kernel, for an identity branch its trainable scale (channels,).
            scales: Scale of each conv branch, (out_channels,).

        Returns:
            The kernel, of shape kernel_shape.

        Raises:
            ValueError: A scale is missing or misshapen.
        """
        self.check_scales(scales)
        return self.unchecked_kernel(weights, scales)

    def unchecked_kernel(
            self,
            weights: Mapping[str, torch.Tensor],
            scales: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """kernel(), for a forward pass: looks at no shape, so that everything traces."""
        by_size: Dict[Tuple[int, int], torch.Tensor] = {}
        for branch in self.branches:
            weight = weights[branch.name]
            if isinstance(branch, IdentityBranch):
                kernel = self._diagonal(weight)
            else:
                kernel = weight * scales[branch.name].to(weight)[:, None, None, None]
            size = branch.kernel_size
            by_size[size] = by_size[size] + kernel if size in by_size else kernel
        total = None
        for size, kernel in by_size.items():
            if size != self.kernel_size:
                height, width = ((whole - part) // 2 for whole, part in zip(self.kernel_size, size))
                kernel = F.pad(kernel, (width, width, height, height))
            total = kernel if total is None else total + kernel
        return total

    def initial_kernel(self, scales: Mapping[str, torch.Tensor], device=None, dtype=None) -> torch.Tensor:
        """A fresh kernel by the rule of initialization (eq. 4): that of an independently initialized CSLA block."""
        block = CslaBlock(self, scales, device=device, dtype=dtype)
        return block.equivalent_kernel()

    def _diagonal(self, scale: torch.Tensor) -> torch.Tensor:
        """The 1 x 1 kernel that multiplies every channel by its scale."""
        kernel = scale[:, None]
        if self.groups < self.in_channels:
            kernel = kernel * scale.new_ones(self.in_channels // self.groups).diag().repeat(self.groups, 1)
        return kernel[:, :, None, None]


class CslaConv2d(nn.Conv2d):
    """The target operator of a CSLA block: a plain convolution, but its GradMult stays with its weight.

    torch replaces a parameter, and loses what is attached to it, when a model is copied, unpickled, moved from 'meta'
    or loaded with ``assign=True``; the multiplier follows. Input (N, in_channels, H, W), output
    (N, out_channels, H', W').
    """
    __jit_unused_properties__ = ('grad_mult',)

    def __init__(self, csla: Csla, bias: bool = False, device=None, dtype=None):
        """
        Args:
            csla: The branches that this operator stands for.
            bias: Whether it has a bias, which is no part of them.
        """
        super().__init__(
            csla.in_channels,
            csla.out_channels,
            csla.kernel_size,
            stride=csla.stride,
            padding=csla.padding(csla.kernel_size),
            dilation=csla.dilation,
            groups=csla.groups,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.csla = csla

    @property
    def grad_mult(self) -> Optional[GradMult]:
        """The multiplier of the weight, if it has one."""
        weight = self._parameters.get('weight')
        return None if weight is None else get_grad_mult(weight)

    def set_scales(self, scales: Optional[Mapping[str, torch.Tensor]]) -> None:
        """Give the weight the multiplier of these scales (rule of iteration), or take it off (None).

        Raises:
            ValueError: A scale is missing or misshapen, or the weight is no parameter.
        """
        self.check_weight()
        set_grad_mult(self.weight, None if scales is None else self.csla.grad_mult(scales))

    def check_weight(self) -> None:
        """Make sure that the weight is a parameter, which can have a multiplier.

        Raises:
            ValueError: It is computed from others.
        """
        if self._parameters.get('weight') is None:
            raise ValueError(
                'The weight is no parameter: something computes it from others (a parametrization, weight_norm, '
                'pruning), which an optimizer trains in its place. Remove that, then attach the GradMult.')

    @torch.no_grad()
    def reset_kernel(self, scales: Mapping[str, torch.Tensor]) -> None:
        """Draw the kernel anew, by the rule of initialization (eq. 4).

        Raises:
            ValueError: A scale is missing or misshapen.
        """
        self.weight.copy_(self.csla.initial_kernel(scales, device=self.weight.device, dtype=self.weight.dtype))

    def equivalent_kernel(self, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """The kernel, as the blocks with branches have it."""
        return self.weight.detach().to(dtype or self.weight.dtype)

    # The multiplier belongs to the parameter. Wherever torch puts another one in its place, it is handed on.
    def _restore_grad_mult(self, grad_mult: Optional[GradMult]) -> None:
        weight = self._parameters.get('weight')
        if grad_mult is not None and weight is not None and get_grad_mult(weight) is None:
            if tuple(weight.shape) == grad_mult.shape:
                set_grad_mult(weight, grad_mult)

    def register_parameter(self, name: str, param: Optional[nn.Parameter]) -> None:
        grad_mult = self.grad_mult
        super().register_parameter(name, param)
        self._restore_grad_mult(grad_mult)

    def _apply(self, fn, recurse=True):
        grad_mult = self.grad_mult
        super()._apply(fn, recurse)
        self._restore_grad_mult(grad_mult)
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        grad_mult = self.grad_mult
        super()._load_from_state_dict(*args, **kwargs)
        self._restore_grad_mult(grad_mult)

    def __getstate__(self):
        return {**self.__dict__, '_grad_mult': self.grad_mult}

    def __setstate__(self, state):
        state = dict(state)
        grad_mult = state.pop('_grad_mult')
        super().__setstate__(state)
        self._restore_grad_mult(grad_mult)


class CslaBlock(nn.Module):
    """A CSLA block as it is declared: every branch an operator of its own, with constant scales.

    Input (N, in_channels, H, W), output (N, out_channels, H', W'). For tests and ablations: the target operator with
    its GradMult trains the same, faster.
    """
    trainable_scales = False

    def __init__(
            self,
            csla: Csla,
            scales: Optional[Mapping[str, torch.Tensor]] = None,
            device=None,
            dtype=None,
    ):
        """
        Args:
            csla: The branches.
            scales: Scale of each conv branch, (out_channels,); what Hyper-Search starts from if None.

        Raises:
            ValueError: A scale is missing or misshapen.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.csla = csla
        self.weights = nn.ParameterDict()
        self.scales = nn.ParameterDict()
        for branch in csla.branches:
            if isinstance(branch, ConvBranch):
                shape = (csla.out_channels, csla.in_channels // csla.groups, *branch.kernel_size)
                self.weights[branch.name] = nn.Parameter(torch.empty(shape, **dd))
            else:
                self.weights[branch.name] = nn.Parameter(torch.empty(csla.out_channels, **dd))
        scales = csla.initial_scales(**dd) if scales is None else csla.check_scales(scales)
        for name, scale in scales.items():
            self.scales[name] = nn.Parameter(scale.clone().to(**dd), requires_grad=self.trainable_scales)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kernels as torch initializes a convolution's (MSRA), identity scales at 1."""
        for weight in self.weights.values():
            if weight.ndim == 4:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            else:
                nn.init.ones_(weight)

    @torch.no_grad()
    def set_scales(self, scales: Mapping[str, torch.Tensor]) -> None:
        """Replace the scales of the conv branches.

        Raises:
            ValueError: A scale is missing or misshapen.
        """
        for name, scale in self.csla.check_scales(scales).items():
            self.scales[name].copy_(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = None
        for branch in self.csla.branches:
            weight = self.weights[branch.name]
            if isinstance(branch, IdentityBranch):
                z = x * weight[:, None, None]
            else:
                z = F.conv2d(
                    x,
                    weight,
                    stride=self.csla.stride,
                    padding=self.csla.padding(branch.kernel_size),
                    dilation=self.csla.dilation,
                    groups=self.csla.groups,
                )
                z = z * self.scales[branch.name][:, None, None]
            y = z if y is None else y + z
        return y

    def equivalent_kernel(self, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """The kernel of the one convolution with the same output (eq. 4), computed in a dtype or the parameters'."""
        weights, scales = (
            {name: x.detach().to(dtype or x.dtype) for name, x in group.items()}
            for group in (self.weights, self.scales))
        return self.csla.kernel(weights, scales)


class SearchBlock(CslaBlock):
    """The block that Hyper-Search trains: the same branches, their scales trainable (section 3.3).

    The branches are added up as kernels, not as feature maps: the same outputs and gradients but for rounding, in one
    convolution.
    """
    trainable_scales = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(
            x,
            self.csla.unchecked_kernel(self.weights, self.scales),
            stride=self.csla.stride,
            padding=self.csla.padding(self.csla.kernel_size),
            dilation=self.csla.dilation,
            groups=self.csla.groups,
        )


def csla_layers(model: nn.Module) -> Dict[str, nn.Module]:
    """The layers of a model that a CSLA declaration stands behind, by their names without those of torch's wrappers."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (CslaBlock, CslaConv2d))}
    names = ['.'.join(part for part in name.split('.') if part not in _WRAPPERS) for name in layers]
    # a model may have a part of such a name itself
    return dict(zip(names, layers.values())) if len(set(names)) == len(names) else layers
