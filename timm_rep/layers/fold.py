"""Exact folding of the linear parts of a network: BatchNorm, linear, layer scale, shortcut.

Every function computes in float64, whatever the dtype of the model: rounding happens once, when
:meth:`Affine.write_to` casts the result back.
"""
from typing import NamedTuple, Optional, Tuple, Union

import torch
import torch.nn as nn

__all__ = ['Affine', 'batch_norm_scale_shift']


def _wide(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    if x.device.type == 'mps':  # no float64 there
        x = x.cpu()
    return x.to(torch.float64)


def batch_norm_scale_shift(norm: nn.modules.batchnorm._BatchNorm) -> Tuple[torch.Tensor, torch.Tensor]:
    """The affine map ``y = x * scale + shift`` that a BatchNorm is in eval mode (RePaFormer, eq. 4).

    Args:
        norm: Any BatchNorm with running statistics, SyncBatchNorm included. Its mode does not matter.

    Returns:
        ``scale`` and ``shift``, each of shape (C,), float64.

    Raises:
        ValueError: The BatchNorm has no running statistics, so it is no fixed map.
    """
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError(
            f'{norm} has no running statistics to fold: build it with track_running_stats=True and train it.')
    scale = torch.rsqrt(_wide(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * _wide(norm.weight)
    shift = -_wide(norm.running_mean) * scale
    if norm.bias is not None:
        shift = shift + _wide(norm.bias)
    return scale, shift


class Affine(NamedTuple):
    """The map ``y = x @ weight.T + bias`` on channels, in float64; of a convolution, on the entries of its window.

    Attributes:
        weight: (out, in), of a convolution (out, in * height * width).
        bias: (out,).
    """
    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def from_linear(cls, linear: Union[nn.Linear, nn.Conv2d]) -> 'Affine':
        """The map of an ``nn.Linear`` or a 1 x 1 convolution, its bias zero where it has none."""
        weight = _wide(linear.weight).flatten(1)
        return cls(weight, weight.new_zeros(weight.shape[0]) if linear.bias is None else _wide(linear.bias))

    def after_norm(self, norm: nn.modules.batchnorm._BatchNorm) -> 'Affine':
        """``x -> self(norm(x))`` (RePaFormer, eq. 4)."""
        scale, shift = batch_norm_scale_shift(norm)
        return Affine(self.weight * scale, self.bias + self.weight @ shift)

    def before_norm(self, norm: nn.modules.batchnorm._BatchNorm) -> 'Affine':
        """``x -> norm(self(x))``."""
        scale, shift = batch_norm_scale_shift(norm)
        return Affine(self.weight * scale[:, None], self.bias * scale + shift)

    def after(self, inner: 'Affine') -> 'Affine':
        """``x -> self(inner(x))`` (RePaFormer, eq. 6 and 9)."""
        return Affine(self.weight @ inner.weight, self.bias + self.weight @ inner.bias)

    def scaled(self, gamma: torch.Tensor) -> 'Affine':
        """``x -> gamma * self(x)``, gamma of shape (out,): a layer scale."""
        gamma = _wide(gamma)
        return Affine(self.weight * gamma[:, None], self.bias * gamma)

    def outputs(self, start: int, stop: Optional[int] = None) -> 'Affine':
        """The output channels ``start:stop`` only."""
        return Affine(self.weight[start:stop], self.bias[start:stop])

    def inputs(self, start: int, stop: Optional[int] = None) -> 'Affine':
        """The map on the input channels ``start:stop``, the others being zero."""
        return Affine(self.weight[:, start:stop], self.bias)

    @classmethod
    def from_kernel(cls, kernel: torch.Tensor) -> 'Affine':
        """The map of a convolution without bias, its kernel (out, in, height, width)."""
        weight = _wide(kernel).flatten(1)
        return cls(weight, weight.new_zeros(weight.shape[0]))

    def write_to(self, linear: Union[nn.Linear, nn.Conv2d], like: nn.Parameter) -> None:
        """Replace the parameters of ``linear`` by this map's, cast once.

        Args:
            linear: A linear or convolution of the same shape. Where it has no bias this map's is left out.
            like: The parameter whose dtype, device and ``requires_grad`` the new ones take.

        Raises:
            OverflowError: A folded value is finite, but not in the dtype of ``like``.
        """
        for name, value in self._asdict().items():
            if getattr(linear, name) is None:
                continue
            cast = value.to(dtype=like.dtype, device=like.device)
            if not cast.is_meta and not torch.equal(value.isfinite().to(cast.device), cast.isfinite()):
                raise OverflowError(
                    f'The folded {name} of shape {tuple(value.shape)} reaches {value.abs().max():.3g}, more than '
                    f'{like.dtype} holds ({torch.finfo(like.dtype).max:.3g}): convert the model to float32 or '
                    'bfloat16 before reparameterizing.')
            cast = cast.reshape(getattr(linear, name).shape)
            # a convolution's kernel keeps its memory format
            cast = torch.empty_like(like).copy_(cast) if cast.shape == like.shape else cast.contiguous()
            setattr(linear, name, nn.Parameter(cast, requires_grad=like.requires_grad))
