"""PoolFormer's pooling, and its token mixer with a BatchNorm, which folds into one convolution.

Beyond the RePaFormer paper, which folds only the FFNs: pooling is linear as well.
"""
from typing import Any, Mapping, Optional, Tuple, Type

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import LayerScale2d
from torch.jit import Final

from .fold import Affine, batch_norm_scale_shift, check_unmodified

__all__ = ['RePaPooling', 'RePaPoolingDeploy', 'WindowAvgPool2d', 'check_pool_size']


def check_pool_size(pool_size: int) -> None:
    """Raise a ValueError if a window of this side length has no centre."""
    if pool_size < 1 or pool_size % 2 == 0:
        raise ValueError(f'pool_size is the side of a window centred on each token, an odd number, got {pool_size}.')


def _is_eager_on_cpu(x: torch.Tensor) -> bool:
    """Whether x is processed in eager mode on a CPU in float32 or float64: not traced, compiled or exported.

    Half precision is excluded: a convolution rounds more often than a pooling, and is not faster there.
    """
    return (
        isinstance(x, torch.Tensor) and x.device.type == 'cpu' and x.ndim == 4
        and x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled('cpu')
        and not torch.jit.is_tracing() and not torch.compiler.is_compiling()
    )


def _window_coverage(x: torch.Tensor, pool_size: int) -> torch.Tensor:
    """(1, 1, H, W): share of the window around each position that lies inside the image, 1 except near the border."""
    return F.avg_pool2d(torch.ones_like(x[:1, :1]), pool_size, stride=1, padding=pool_size // 2)


def _renormalize_border_(y: torch.Tensor, pool_size: int) -> torch.Tensor:
    """Turn zero-padded window means into means over the positions inside the image, in place.

    The coverage of a window is the product of those of its rows and columns, so only the border is multiplied, once
    per dimension.
    """
    reach = pool_size // 2
    for dim in (2, 3):
        size = y.shape[dim]
        factors = 1 / F.avg_pool1d(y.new_ones(1, 1, size), pool_size, stride=1, padding=reach)[0, 0]
        factors = factors if dim == 3 else factors.unsqueeze(1)
        near = min(reach, size)
        far = max(near, size - reach)
        y.narrow(dim, 0, near).mul_(factors[:near])
        y.narrow(dim, far, size - far).mul_(factors[far:])
    return y


class WindowAvgPool2d(nn.Module):
    """PoolFormer's pooling: ``nn.AvgPool2d`` of stride 1 with ``count_include_pad=False``.

    In eager mode on a CPU in float32 it runs as a depthwise convolution, several times as fast as torch's pooling there
    (``scripts/bench.py poolformer``). Input and output: (N, dim, H, W), in either memory format.
    """
    kernel_size: Final[int]

    def __init__(self, kernel_size: int):
        """
        Args:
            kernel_size: Side of the window, odd.

        Raises:
            ValueError: The window has no centre.
        """
        check_pool_size(kernel_size)
        super().__init__()
        self.kernel_size = kernel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.kernel_size
        if not torch.jit.is_scripting():
            # in channels-last the backward pass of torch's pooling is faster than that of the convolution
            if _is_eager_on_cpu(x) and (x.is_contiguous() or not x.requires_grad):
                weight = x.new_full((x.shape[1], 1, size, size), 1 / size ** 2)
                return _renormalize_border_(F.conv2d(x, weight, padding=size // 2, groups=x.shape[1]), size)
        return F.avg_pool2d(x, size, stride=1, padding=size // 2, count_include_pad=False)

    def extra_repr(self) -> str:
        return f'kernel_size={self.kernel_size}'


def _structures_in(state_dict: Mapping[str, Any], prefix: str) -> Tuple[str, ...]:
    """Structures of the mixer that the entries of a state dict under ``prefix`` belong to."""
    if f'{prefix}norm.running_mean' in state_dict:
        return ('training',)
    return ('deploy',) if f'{prefix}conv.weight' in state_dict else ()


class RePaPooling(nn.Module):
    """Training structure of the token mixer: norm, pooling and layer scale, without the shortcut.

    ``layer_scale(pool(y) - y)`` with ``y = BN(x)``. In a block it takes the place of norm, token mixer and layer scale;
    the block adds the shortcut. Input and output: (N, dim, H, W), in either memory format.
    """
    structure = 'training'
    structures_in = staticmethod(_structures_in)

    def __init__(
            self,
            dim: int,
            pool_size: int = 3,
            norm_layer: Type[nn.Module] = nn.BatchNorm2d,
            init_values: Optional[float] = None,
            device=None,
            dtype=None,
    ):
        """
        Args:
            dim: Number of channels.
            pool_size: Side of the window, odd.
            norm_layer: BatchNorm.
            init_values: Initial layer scale; no layer scale if None or 0.

        Raises:
            ValueError: The window has no centre.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.pool = WindowAvgPool2d(pool_size)
        self.norm = norm_layer(dim, **dd)
        self.ls = LayerScale2d(dim, init_values=init_values, **dd) if init_values else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.ls(self.pool(y) - y)

    @torch.jit.ignore
    @torch.no_grad()
    def fuse(self) -> 'RePaPoolingDeploy':
        """The deploy structure with the same function as in eval mode, as a new module.

        Raises:
            ValueError: The BatchNorm has no running statistics, or a layer has hooks.
            OverflowError: A folded weight does not fit the dtype of the model.
        """
        check_unmodified(self)
        # the shift of the norm cancels: pooling keeps a constant, which the difference removes
        scale, _ = batch_norm_scale_shift(self.norm)
        if isinstance(self.ls, LayerScale2d):
            scale = scale * self.ls.gamma.to(scale)
        dim, size = self.norm.num_features, self.pool.kernel_size
        deploy = RePaPoolingDeploy(dim, size, device='meta')
        kernel = (scale / size ** 2).unsqueeze(1).expand(-1, size ** 2)
        like = self.norm.running_mean if self.norm.weight is None else self.norm.weight
        Affine(kernel, torch.zeros_like(scale)).write_to(deploy.conv, like=like)
        return deploy.train(self.training)


class RePaPoolingDeploy(nn.Module):
    """Deploy structure of the token mixer: one depthwise convolution with a corrected border.

    ``conv(x) / coverage - c x``, where every entry of a channel's kernel is c / window size, c is the scale of the norm
    times the layer scale, and the coverage is the share of the window inside the image. Input and output:
    (N, dim, H, W), in either memory format.
    """
    structure = 'deploy'
    structures_in = staticmethod(_structures_in)
    pool_size: Final[int]

    def __init__(self, dim: int, pool_size: int = 3, device=None, dtype=None):
        """
        Args:
            dim: Number of channels.
            pool_size: Side of the window, odd.

        Raises:
            ValueError: The window has no centre.
        """
        check_pool_size(pool_size)
        super().__init__()
        self.pool_size = pool_size
        self.conv = nn.Conv2d(
            dim, dim, pool_size, padding=pool_size // 2, groups=dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        minus_c = -self.conv.weight.sum(dim=(1, 2, 3)).view(-1, 1, 1)
        if not torch.jit.is_scripting():
            # in place only where the convolution's output has no other user
            if _is_eager_on_cpu(x) and not torch.is_grad_enabled() and not self.conv._forward_hooks:
                return _renormalize_border_(self.conv(x), self.pool_size).addcmul_(x, minus_c)
        return torch.addcmul(x * minus_c, self.conv(x), 1 / _window_coverage(x, self.pool_size))
