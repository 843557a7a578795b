"""PoolFormer's pooling."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.jit import Final


def _is_eager_on_cpu(x: torch.Tensor) -> bool:
    """Whether x is processed in eager mode on a CPU in float32 or float64: not traced, compiled, exported or counted.

    Half precision is excluded: a convolution rounds more often than a pooling, and is not faster there.
    """
    return (
        isinstance(x, torch.Tensor) and x.device.type == 'cpu' and x.ndim == 4
        and x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled('cpu')
        and not torch.jit.is_tracing() and not torch.compiler.is_compiling()
        # a pooling has no multiply-accumulates in torch's FlopCounterMode
        and not torch._C._len_torch_dispatch_stack()
    )


def _renormalize_border_(y: torch.Tensor, pool_size: int) -> torch.Tensor:
    """Turn zero-padded window means into means over the positions inside the image, in place.

    The share of a window inside the image is a product of one factor for its rows and one for its columns, so only the
    border is multiplied, once per dimension.
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
            ValueError: kernel_size is not a positive odd integer.
        """
        if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f'kernel_size must be a positive odd integer, got {kernel_size!r}.')
        super().__init__()
        self.kernel_size = kernel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.kernel_size
        if not torch.jit.is_scripting():
            # in channels-last, torch's pooling has a faster backward pass than the convolution
            if _is_eager_on_cpu(x) and (x.is_contiguous() or not x.requires_grad):
                weight = x.new_full((x.shape[1], 1, size, size), 1 / size ** 2)
                return _renormalize_border_(F.conv2d(x, weight, padding=size // 2, groups=x.shape[1]), size)
        return F.avg_pool2d(x, size, stride=1, padding=size // 2, count_include_pad=False)

    def extra_repr(self) -> str:
        return f'kernel_size={self.kernel_size}'
