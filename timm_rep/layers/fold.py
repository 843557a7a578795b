"""Exact folding of the linear parts of a network: BatchNorm, linear, layer scale, shortcut.

All functions compute in float64 whatever the dtype of the model; values are rounded once, by :meth:`Affine.write_to`.

A foldable layer has the structure 'training' or 'deploy' (RePa), or 'target', 'search', 'csla' or 'deploy' (RepOpt), in
its attribute ``structure``, and a table ``structure_keys``: keys of its state dict, or beginnings of them that end in a
dot, with the structures that have such a key.
"""
import contextlib
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn as nn
from torch.nn.utils import parametrize


def unfoldable_reason(module: nn.Module) -> Optional[str]:
    """Reason why a module cannot be folded, or None."""
    for part in module.modules():
        if 'forward' in part.__dict__ or part._forward_hooks or part._forward_pre_hooks:
            return 'has hooks, or a forward() that was replaced: remove them first'
    return None


def check_foldable(module: nn.Module) -> None:
    """Raise ValueError if a layer or a part of it has hooks, or a ``forward()`` that was replaced."""
    reason = unfoldable_reason(module)
    if reason:
        raise ValueError(f'Expected a plain layer, but the {type(module).__name__} {reason}.')


def is_plain_batch_norm(norm: Any) -> bool:
    """Whether a module is a BatchNorm without an activation; timm's BatchNormAct2d has one, which does not fold."""
    act = getattr(norm, 'act', None)
    return isinstance(norm, nn.modules.batchnorm._BatchNorm) and (act is None or isinstance(act, nn.Identity))


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Eval mode, in which a parametrized weight does not change: spectral norm in train mode does at each access."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def to_float64(x: torch.Tensor) -> torch.Tensor:
    """A tensor in float64, without gradient, on the CPU if its device has none."""
    x = x.detach()
    if x.device.type == 'mps':  # no float64 there
        x = x.cpu()
    return x.to(torch.float64)


def batch_norm_scale_shift(norm: nn.modules.batchnorm._BatchNorm) -> Tuple[torch.Tensor, torch.Tensor]:
    """The affine map ``y = x * scale + shift`` of a BatchNorm in eval mode (RePaFormer, eq. 4).

    Args:
        norm: Any BatchNorm with running statistics, SyncBatchNorm included. Its mode does not matter.

    Returns:
        ``scale`` and ``shift``, each of shape (C,), float64.

    Raises:
        ValueError: The BatchNorm has no running statistics, so it is not a fixed map; or they are not finite or a
            variance is negative.
    """
    if getattr(norm, 'running_mean', None) is None or norm.running_var is None:
        raise ValueError(
            f'{norm} must have running statistics to be folded: train it with track_running_stats=True.')
    if not norm.running_var.is_meta and not (
            norm.running_mean.isfinite().all() and norm.running_var.isfinite().all() and (norm.running_var >= 0).all()):
        raise ValueError(
            f'The running statistics of {type(norm).__name__}({norm.num_features}) must be finite, and no variance '
            'negative: training has diverged or the checkpoint is damaged. Load an earlier one, or reset the '
            'statistics and run calibrate_batchnorm().')
    scale = torch.rsqrt(to_float64(norm.running_var) + norm.eps)
    if norm.weight is not None:
        scale = scale * to_float64(norm.weight)
    shift = -to_float64(norm.running_mean) * scale
    if norm.bias is not None:
        shift = shift + to_float64(norm.bias)
    return scale, shift


class Affine(NamedTuple):
    """The map ``y = x @ weight.T + bias`` in float64, on channels or, for a convolution, on the entries of its window.

    Attributes:
        weight: Matrix (out, in), for a convolution (out, in * height * width).
        bias: Vector (out,).
    """
    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def from_linear(cls, linear: Union[nn.Linear, nn.Conv2d]) -> 'Affine':
        """The map of an ``nn.Linear`` or a 1 x 1 convolution in eval mode; a missing bias is zero.

        Raises:
            ValueError: The layer has a different type, for example that of an adapter, or is quantized.
        """
        kind = type(linear).__bases__[0] if parametrize.is_parametrized(linear) else type(linear)
        if kind not in (nn.Linear, nn.Conv2d):
            raise ValueError(
                f'Expected a linear layer, but got {kind.__name__}: merge adapters into the layers that they adapt, '
                'and quantize after folding.')
        with in_eval_mode(linear):
            weight = to_float64(linear.weight).flatten(1)
        return cls(weight, weight.new_zeros(weight.shape[0]) if linear.bias is None else to_float64(linear.bias))

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

    def scale_outputs(self, gamma: torch.Tensor) -> 'Affine':
        """``x -> gamma * self(x)``, gamma of shape (out,): a layer scale."""
        gamma = to_float64(gamma)
        return Affine(self.weight * gamma[:, None], self.bias * gamma)

    def outputs(self, start: int, stop: Optional[int] = None) -> 'Affine':
        """The output channels ``start:stop`` only."""
        return Affine(self.weight[start:stop], self.bias[start:stop])

    def inputs(self, start: int, stop: Optional[int] = None) -> 'Affine':
        """The map of the input channels ``start:stop``, with the other inputs zero."""
        return Affine(self.weight[:, start:stop], self.bias)

    @classmethod
    def from_kernel(cls, kernel: torch.Tensor) -> 'Affine':
        """The map of a convolution without bias, given its kernel (out, in, height, width)."""
        weight = to_float64(kernel).flatten(1)
        return cls(weight, weight.new_zeros(weight.shape[0]))

    def write_to(self, linear: Union[nn.Linear, nn.Conv2d], like: nn.Parameter) -> None:
        """Replace the parameters of a layer by this map, rounded once.

        Args:
            linear: Linear layer or convolution of the same shape. Without a bias, the map's bias is dropped.
            like: Parameter whose dtype, device and ``requires_grad`` the new parameters take; a kernel of the same
                shape also takes its memory format.

        Raises:
            OverflowError: A folded value is finite, but not in the dtype of ``like``.
        """
        for name, value in self._asdict().items():
            if getattr(linear, name) is None:
                continue
            cast = value.to(dtype=like.dtype, device=like.device)
            if not cast.is_meta and not torch.equal(value.isfinite().to(cast.device), cast.isfinite()):
                raise OverflowError(
                    f'The folded {name} of shape {tuple(value.shape)} must be in the range of {like.dtype}, up to '
                    f'{torch.finfo(like.dtype).max:.3g}, got {value.abs().max():.3g}: convert the model to float32 or '
                    'bfloat16 before reparameterizing.')
            cast = cast.reshape(getattr(linear, name).shape)
            cast = torch.empty_like(like).copy_(cast) if cast.shape == like.shape else cast.contiguous()
            setattr(linear, name, nn.Parameter(cast, requires_grad=like.requires_grad))


def foldable_layers(module: nn.Module, prefix: str = '') -> Iterator[Tuple[str, nn.Module]]:
    """Yield foldable and folded layers by name."""
    for name, layer in module.named_modules(prefix=prefix):
        if hasattr(layer, 'structure_keys'):
            yield name, layer


def structures_in(layer: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Tuple[str, ...]:
    """Structures of a layer that the entries of a state dict under a prefix belong to, none without such entries."""
    for key, structures in layer.structure_keys.items():
        key = prefix + key
        if key in state_dict or (key.endswith('.') and any(name.startswith(key) for name in state_dict)):
            return structures
    return ()


def holds_structure(model: nn.Module, state_dict: Mapping[str, Any], structure: str) -> bool:
    """Whether a state dict in the key layout of this package holds a layer of the model in this structure."""
    return any(structure in structures_in(layer, state_dict, f'{name}.') for name, layer in foldable_layers(model))


def is_reparameterized(model: nn.Module) -> bool:
    """Whether a model has foldable layers and all of them have the deploy structure."""
    return {layer.structure for _, layer in foldable_layers(model)} == {'deploy'}
