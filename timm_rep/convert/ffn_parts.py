"""Layers of pointwise FFNs: finding them by the names of a registration, their affine maps, and what is unsupported."""
import re
from typing import List, Optional, Sequence

import torch
import torch.nn as nn

from timm_rep.layers import Affine, unfoldable_reason

from .ffn_classes import FfnSpec

__all__ = ['affine_of', 'chain', 'linear_of', 'unsupported_reason']


def chain(module: nn.Module, names: str) -> List[nn.Module]:
    """The layers of these names, separated by spaces."""
    return [module.get_submodule(name) for name in names.split()]


def linear_of(layer: nn.Module) -> nn.Module:
    """The linear layer in a composite."""
    return next(m for m in layer.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def affine_of(layers: Sequence[nn.Module]) -> Affine:
    """The affine map of a linear layer followed by BatchNorms, with composites of both expanded."""
    parts: List[nn.Module] = []
    for layer in layers:
        if isinstance(layer, (nn.Linear, nn.Conv2d, nn.modules.batchnorm._BatchNorm)):
            parts.append(layer)
        else:
            parts += [m for m in layer.children() if not isinstance(m, (nn.Identity, nn.Dropout))]
    affine = Affine.from_linear(parts[0])
    for norm in parts[1:]:
        affine = affine.before_norm(norm)
    return affine


def _type_name(module: nn.Module) -> str:
    cls = type(module)
    return re.sub(r'^torch\.nn\.modules\.[a-z]+\.', '', f'{cls.__module__}.{cls.__qualname__}')


def _unsupported_linear(part: nn.Module) -> Optional[str]:
    """Why a module in the place of a linear layer is not one, or one with BatchNorms; None if it is."""
    if type(part) is nn.Linear or type(part) is nn.Conv2d:
        if isinstance(part, nn.Conv2d) and not (
                part.kernel_size == part.stride == (1, 1) and part.groups == 1
                and part.padding in ((0, 0), 'same', 'valid')):
            return f'has a {_type_name(part)} where a linear layer is expected'
        weight = part.weight
        # quantized and distributed weights are subclasses of Tensor
        if type(weight.data) is not torch.Tensor or not weight.is_floating_point():
            return f'has a weight that is a {type(weight.data).__name__} of {weight.dtype}'
        return None
    known = isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.Identity, nn.Dropout)) or (
        # composites of timm; adapters are subclasses of linear layers
        type(part).__module__.startswith('timm.') and any(part.children())
        and not isinstance(part, (nn.Linear, nn.Conv2d)))
    return None if known else f'has a {_type_name(part)} where a linear layer is expected'


def unsupported_reason(module: nn.Module, spec: FfnSpec) -> Optional[str]:
    """Why a module of a registered class is not a pointwise FFN; None if it is."""
    try:
        parts = {part: chain(module, names) for part, names in spec._asdict().items() if (
            isinstance(names, str) and part not in ('norm', 'absent', 'attribute'))}
    except AttributeError as e:
        return f'does not have the registered parts ({e})'
    norm, absent = (getattr(module, name) if name else None for name in (spec.norm, spec.absent))
    if absent is not None and not isinstance(absent, nn.Identity):
        return 'has a convolution between its linear layers'
    act, = parts['act']
    for layer in (*parts['first'], *parts['last'], *parts['value']):
        for part in layer.modules():
            reason = None if part in act.modules() else _unsupported_linear(part)  # composites hold the activation
            if reason:
                return reason
    if any(p.numel() > 1 for p in act.parameters()):
        return 'has an activation with parameters for every channel'
    use_conv = isinstance(linear_of(parts['first'][0]), nn.Conv2d)
    # LayerNorm2d is a LayerNorm
    if norm is not None and not isinstance(norm, nn.Identity if use_conv else (nn.Identity, nn.LayerNorm)):
        return f'has a {type(norm).__name__} before its last linear layer'
    named = [m for layers in (*parts.values(), [norm, absent]) for m in layers if m is not None]
    known = {p for m in named for p in m.parameters()}
    others = [name for name, p in module.named_parameters() if p not in known]
    if others and not spec.inline:
        return f'has parameters outside of its registered parts: {others[0]}'
    return unfoldable_reason(module)
