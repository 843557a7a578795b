"""Constant-Scale Linear Addition (CSLA): one declaration of a block's linear branches, its operator and multiplier.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.2, appendix A.

A CSLA block is a sum of linear branches on the same input, each ``scale * operator``. It computes the same function as
one convolution, and training this convolution with its gradients multiplied by constants (its GradMult) is equivalent
to training the block: CSLA = GR (gradient re-parameterization).
"""
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F


def _pair(x: Union[int, Tuple[int, int]], name: str) -> Tuple[int, int]:
    """(height, width) of an argument that is one positive int or two of them; raises ValueError for anything else."""
    pair = (x, x) if isinstance(x, int) else tuple(x)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(f'{name} must be one int or (height, width), each at least 1, got {x!r}.')
    return pair


def _check_name(name: str) -> None:
    """Raise ValueError unless a name can be a parameter's name and a part of a key in a file."""
    if not name.isidentifier() or hasattr(nn.ParameterDict(), name):
        raise ValueError(
            f'The name of a branch must be an identifier and not an attribute of nn.ParameterDict, got {name!r}.')


@dataclass(frozen=True)
class ConvBranch:
    """A convolution with a constant scale for each output channel.

    Attributes:
        kernel_size: (height, width) or one int, odd: the kernels of all branches share their centre.
        name: Name of the branch, of its scale in a Scales file and of its parameters; ``'conv{height}x{width}'`` if
            empty.

    Raises:
        ValueError: The kernel size is even, or the name is not usable.
    """
    kernel_size: Union[int, Tuple[int, int]]
    name: str = ''

    def __post_init__(self) -> None:
        kernel_size = _pair(self.kernel_size, 'kernel_size')
        if any(k % 2 == 0 for k in kernel_size):
            raise ValueError(
                f'kernel_size must be odd, since the kernels of a CSLA block share their centre, got {kernel_size}.')
        object.__setattr__(self, 'kernel_size', kernel_size)
        object.__setattr__(self, 'name', self.name or f'conv{kernel_size[0]}x{kernel_size[1]}')
        _check_name(self.name)


@dataclass(frozen=True)
class IdentityBranch:
    """A depthwise 1 x 1 convolution: a trainable scale for each channel, with the constant scale 1.

    Attributes:
        name: Name of the branch and of its parameter.

    Examples:
        >>> csla = Csla(8, 8, branches=(ConvBranch(3), IdentityBranch()))
        >>> list(csla.scaled_branches)
        ['conv3x3']
    """
    name: str = 'identity'
    kernel_size = (1, 1)

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True)
class Csla:
    """The linear branches of a block.

    Attributes:
        in_channels: Input channels.
        out_channels: Output channels.
        branches: At least one ConvBranch or IdentityBranch, with distinct names.
        stride: (height, width) or one int, default 1.
        groups: Groups of every convolution, default 1.
        dilation: (height, width) or one int, default 1.
        initial_scale: Initial value of the trainable scales of the conv branches in Hyper-Search, default 1.

    Raises:
        ValueError: The branches do not add up to one convolution.
    """
    in_channels: int
    out_channels: int
    branches: Tuple[Union[ConvBranch, IdentityBranch], ...]
    stride: Union[int, Tuple[int, int]] = 1
    groups: int = 1
    dilation: Union[int, Tuple[int, int]] = 1
    initial_scale: float = 1.

    def __post_init__(self) -> None:
        object.__setattr__(self, 'stride', _pair(self.stride, 'stride'))
        object.__setattr__(self, 'dilation', _pair(self.dilation, 'dilation'))
        object.__setattr__(self, 'branches', tuple(self.branches))
        for name in ('in_channels', 'out_channels', 'groups'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}.')
        others = [b for b in self.branches if not isinstance(b, (ConvBranch, IdentityBranch))]
        if others:
            raise ValueError(f'branches must be ConvBranch(kernel_size) or IdentityBranch(), got {others}.')
        names = [branch.name for branch in self.branches]
        if not names or len(set(names)) < len(names):
            raise ValueError(f'branches must be at least one, with distinct names, got {names}.')
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f'groups={self.groups} must divide in_channels={self.in_channels} and '
                f'out_channels={self.out_channels}.')
        has_identity = any(isinstance(branch, IdentityBranch) for branch in self.branches)
        if has_identity and (self.in_channels != self.out_channels or self.stride != (1, 1)):
            raise ValueError(
                f'An identity branch must have as many output as input channels and stride 1, got {self.in_channels} '
                f'to {self.out_channels} channels at stride {self.stride}: leave it out of this block.')

    @property
    def kernel_size(self) -> Tuple[int, int]:
        """(height, width) of the target operator's kernel, the smallest that covers every branch."""
        return tuple(  # type: ignore[return-value]
            max(branch.kernel_size[axis] for branch in self.branches) for axis in (0, 1))  # type: ignore[index]

    @property
    def scaled_branches(self) -> Tuple[str, ...]:
        """Names of the branches that have a constant scale, the conv branches."""
        return tuple(branch.name for branch in self.branches if isinstance(branch, ConvBranch))

    @property
    def kernel_shape(self) -> Tuple[int, int, int, int]:
        """Shape of the target operator's kernel, (out_channels, in_channels / groups, height, width)."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    @property
    def conv_args(self) -> Dict[str, Any]:
        """Arguments of the nn.Conv2d that computes the sum of the branches."""
        return dict(
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding(self.kernel_size),
            dilation=self.dilation,
            groups=self.groups,
        )

    def padding(self, kernel_size: Tuple[int, int]) -> Tuple[int, int]:
        """Padding (height, width) that keeps kernels of every size centred on the same pixel."""
        return tuple(  # type: ignore[return-value]
            k // 2 * d for k, d in zip(kernel_size, self.dilation))  # type: ignore[arg-type]

    def check_scales(self, scales: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Validate scales.

        Args:
            scales: Scale of each conv branch, (out_channels,), by the name of the branch. An entry 'identity', which
                a search model has, is ignored.

        Returns:
            The scales of the conv branches, detached.

        Raises:
            ValueError: A scale is missing, has the wrong shape or is of another branch.
        """
        others = set(scales).difference(['identity'], (branch.name for branch in self.branches))
        if others:
            raise ValueError(
                f'Expected scales for {list(self.scaled_branches)}, but got one for the branch {min(others)!r} too.')
        for name in self.scaled_branches:
            if name not in scales:
                raise ValueError(
                    f'Expected scales for {list(self.scaled_branches)}, but got none for the branch {name!r}.')
            if tuple(scales[name].shape) != (self.out_channels,):
                raise ValueError(
                    f'The scale of the branch {name!r} must have the shape ({self.out_channels},), a number for each '
                    f'output channel, got {tuple(scales[name].shape)}.')
        return {name: scales[name].detach() for name in self.scaled_branches}

    def initial_scales(
            self,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
    ) -> Dict[str, torch.Tensor]:
        """The scales at the start of Hyper-Search: ``initial_scale`` for every channel of each conv branch."""
        return {
            name: torch.full((self.out_channels,), float(self.initial_scale), device=device, dtype=dtype)
            for name in self.scaled_branches
        }

    def kernel(self, weights: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The kernel of the one convolution that equals the block (eq. 4), differentiable.

        Args:
            weights: By the name of the branch, a conv branch's kernel or an identity branch's trainable scale
                (channels,).
            scales: Scale of each conv branch, (out_channels,). Not validated, so that this method can be traced; see
                check_scales().

        Returns:
            The kernel, of shape kernel_shape and the dtype of the weights.
        """
        by_size: Dict[Tuple[int, int], torch.Tensor] = {}
        for branch in self.branches:
            weight = weights[branch.name]
            if isinstance(branch, IdentityBranch):
                kernel = self._diagonal(weight)
            else:
                kernel = weight * scales[branch.name].to(weight)[:, None, None, None]
            size: Any = branch.kernel_size
            by_size[size] = by_size[size] + kernel if size in by_size else kernel
        total = None
        for size, kernel in by_size.items():
            if size != self.kernel_size:
                height, width = ((whole - part) // 2 for whole, part in zip(self.kernel_size, size))
                kernel = F.pad(kernel, (width, width, height, height))
            total = kernel if total is None else total + kernel
        return total

    def _diagonal(self, scale: torch.Tensor) -> torch.Tensor:
        """The 1 x 1 kernel that multiplies every channel by its scale."""
        kernel = scale[:, None]
        if self.groups < self.in_channels:
            kernel = kernel * scale.new_ones(self.in_channels // self.groups).diag().repeat(self.groups, 1)
        return kernel[:, :, None, None]
