"""PoolFormer's pooling, and its token mixer with a BatchNorm: norm, pooling, layer scale and shortcut in a convolution.

Beyond the RePaFormer paper, which folds the FFNs only; pooling is linear too.
"""
from typing import Any, Mapping, Optional, Type

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import DropPath, LayerScale2d
from torch.jit import Final

from .fold import Affine, batch_norm_scale_shift

__all__ = ['RePaPooling', 'RePaPoolingDeploy', 'WindowAvgPool2d', 'check_pool_size']


def check_pool_size(pool_size: int) -> None:
    """Raises a ValueError if a window of this side has no middle."""
    if pool_size < 1 or pool_size % 2 == 0:
        raise ValueError(f'pool_size is the side of a window around each token, so it is odd, got {pool_size}.')


def _eager_on_cpu(x: torch.Tensor) -> bool:
    """Whether operations run one by one as they are called, on a CPU: nobody records, fuses or exports them.

    In full precision: a convolution rounds more often than a pooling, and is no faster in half.
    """
    return (
        isinstance(x, torch.Tensor) and x.device.type == 'cpu' and x.ndim == 4
        and x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled('cpu')
        and not torch.jit.is_tracing() and not torch.compiler.is_compiling()
    )


def _window_coverage(x: torch.Tensor, pool_size: int) -> torch.Tensor:
    """(1, 1, H, W): how much of the window around each position of x is in the image, 1 but at the border."""
    return F.avg_pool2d(torch.ones_like(x[:1, :1]), pool_size, stride=1, padding=pool_size // 2)


def _renormalize_border_(y: torch.Tensor, pool_size: int) -> torch.Tensor:
    """Sums over windows that count zeros outside the image as means of what is inside, in place: only a border changes.

    The share of a window in the image is that of its rows times that of its columns.
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
    """PoolFormer's pooling: the mean of the tokens in a window around each one, of those inside the image.

    ``nn.AvgPool2d`` of stride 1 that does not count its padding. On a CPU, in float32 and not compiled, as a depthwise
    convolution, which takes a fraction of the time of torch's pooling there (``scripts/bench.py poolformer``).
    Input and output: (N, dim, H, W), in either memory format.
    """
    kernel_size: Final[int]

    def __init__(self, kernel_size: int):
        """
        Args:
            kernel_size: Side of the window, odd.

        Raises:
            ValueError: The window has no middle.
        """
        check_pool_size(kernel_size)
        super().__init__()
        self.kernel_size = kernel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.kernel_size
        if not torch.jit.is_scripting():
            # the gradient of torch's pooling is the faster one in channels-last
            if _eager_on_cpu(x) and (x.is_contiguous() or not x.requires_grad):
                weight = x.new_full((x.shape[1], 1, size, size), 1 / size ** 2)
                return _renormalize_border_(F.conv2d(x, weight, padding=size // 2, groups=x.shape[1]), size)
        return F.avg_pool2d(x, size, stride=1, padding=size // 2, count_include_pad=False)

    def extra_repr(self) -> str:
        return f'kernel_size={self.kernel_size}'


def _structure_in(state_dict: Mapping[str, Any], prefix: str) -> Optional[str]:
    """Which form of the mixer a state dict holds under ``prefix``: 'training', 'deploy', or None if neither."""
    if f'{prefix}norm.running_mean' in state_dict:
        return 'training'
    if f'{prefix}conv.weight' in state_dict:
        return 'deploy'
    return None


class RePaPooling(nn.Module):
    """The training form: ``x + drop_path(layer_scale(pool(y) - y))`` with ``y = BN(x)``.

    The pooling is PoolFormer's: the mean of the neighbours inside the image. Input and output: (N, dim, H, W), in
    either memory format.
    """
    structure = 'training'
    structure_in = staticmethod(_structure_in)

    def __init__(
            self,
            dim: int,
            pool_size: int = 3,
            norm_layer: Type[nn.Module] = nn.BatchNorm2d,
            init_values: Optional[float] = None,
            drop_path: float = 0.,
            device=None,
            dtype=None,
    ):
        """
        Args:
            dim: Channels.
            pool_size: Side of the window, odd.
            norm_layer: BatchNorm.
            init_values: Initial layer scale; no layer scale if None or 0.
            drop_path: Stochastic depth rate.

        Raises:
            ValueError: The window has no middle.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.pool = WindowAvgPool2d(pool_size)
        self.norm = norm_layer(dim, **dd)
        self.ls = LayerScale2d(dim, init_values=init_values, **dd) if init_values else nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path > 0. else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.drop_path(self.ls(self.pool(y) - y))

    @torch.jit.ignore
    @torch.no_grad()
    def fuse(self) -> 'RePaPoolingDeploy':
        """The same function in eval mode as a new module of deploy form, whatever mode this one is in.

        Raises:
            ValueError: The BatchNorm has no running statistics.
            OverflowError: A folded weight does not fit the dtype of the model.
        """
        # a mean of neighbours leaves the shift of the norm as it is, and the difference takes it away again
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
    """The deploy form: one depthwise convolution, corrected where its window leaves the image.

    ``(1 - c) x + conv(x) / inside``: every entry of a channel's kernel is c / window, where c is the norm's scale times
    the layer scale; ``inside`` is the share of the window in the image, 1 but at the border, where the convolution
    counts zeros. Input and output: (N, dim, H, W), in either memory format.
    """
    structure = 'deploy'
    structure_in = staticmethod(_structure_in)
    pool_size: Final[int]

    def __init__(self, dim: int, pool_size: int = 3, device=None, dtype=None):
        """
        Args:
            dim: Channels.
            pool_size: Side of the window, odd.

        Raises:
            ValueError: The window has no middle.
        """
        check_pool_size(pool_size)
        super().__init__()
        self.pool_size = pool_size
        self.conv = nn.Conv2d(
            dim, dim, pool_size, padding=pool_size // 2, groups=dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # a few numbers: one a channel, one a position
        keep = 1 - self.conv.weight.sum(dim=(1, 2, 3)).view(-1, 1, 1)
        if not torch.jit.is_scripting():
            # what is changed in place is to be nobody else's
            if _eager_on_cpu(x) and not torch.is_grad_enabled() and not self.conv._forward_hooks:
                return torch.addcmul(_renormalize_border_(self.conv(x), self.pool_size), x, keep)
        return torch.addcmul(x * keep, self.conv(x), 1 / _window_coverage(x, self.pool_size))
