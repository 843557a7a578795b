"""Scales put onto a model."""
import os
from typing import List, Mapping, Optional, Union

import torch
import torch.nn as nn

from timm_rep.layers import CslaConv2d, csla_layers

from .scales import Scales

__all__ = ['ScalesLike', 'attach_grad_mults', 'resolve_scales']

ScalesLike = Union[Scales, Mapping[str, Mapping[str, torch.Tensor]], str, os.PathLike]


def resolve_scales(model: nn.Module, scales: Optional[ScalesLike]) -> Optional[Scales]:
    """Scales for a model, checked to fit it.

    Args:
        model: A model with CSLA layers.
        scales: Scales, a mapping like theirs, what :meth:`Scales.load` takes, ``'ones'`` or ``'init'``; None, or
            ``'none'``, since timm's create_model drops arguments that are None, for no scales.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The model has no CSLA layers, or the scales do not fit it; every misfit is named.
    """
    if scales is None or scales is False:
        return None
    layers = csla_layers(model)
    if not layers:
        raise ValueError(
            f'{type(model).__name__} has no CSLA layers: scales are for RepOpt models in their training structure, and '
            'for models built with timm_rep.layers.Csla.')
    if isinstance(scales, Mapping):
        scales = scales if isinstance(scales, Scales) else Scales(scales)
    elif scales in ('ones', 'init'):
        scales = Scales.ones(model) if scales == 'ones' else Scales.initial(model)
    elif isinstance(scales, (str, os.PathLike)):
        scales = Scales.load(scales)
    else:
        raise ValueError(
            'scales are Scales, a mapping like theirs, a path, a Hub repository, the name of a model whose searched '
            f"scales come with this package, 'ones', 'init' or 'none', got {scales!r}.")
    problems: List[str] = [f'{name}: not a layer of the model' for name in scales if name not in layers]
    for name, layer in layers.items():
        try:
            layer.csla.check_scales(scales.get(name, {}))
        except ValueError as e:
            problems.append(f'{name}: {e}')
    if problems:
        raise ValueError(f'{scales!r} do not fit {type(model).__name__}.\n  ' + '\n  '.join(problems))
    return scales


def attach_grad_mults(model: nn.Module, scales: Optional[ScalesLike]) -> nn.Module:
    """Attach a GradMult to the kernel of every target operator of a model, where RepSGD and RepAdamW find it.

    ``create_model`` does it for the models of this package. Again it is needed for other scales, and after a wrapper
    that replaces the parameters (FSDP2): a shard on dim 0 gets the multiplier of its rows. An optimizer that has the
    parameters already takes the new multipliers from its next step on.

    Args:
        model: A model with target operators (:meth:`Csla.target`), wrapped or not.
        scales: Scales, a mapping like theirs, what :meth:`Scales.load` takes (a path, a Hub repository, the name of a
            model whose searched scales come with this package), ``'ones'`` or ``'init'``. None or ``'none'`` takes the
            GradMults off.

    Returns:
        The model.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The model has no target operator, the scales do not fit it, a weight is no parameter (a
            parametrization computes it), or one is sharded on another dim; nothing has changed but in the last case.
    """
    targets = {name: layer for name, layer in csla_layers(model).items() if isinstance(layer, CslaConv2d)}
    if not targets:
        raise ValueError(
            f"{type(model).__name__} has no target operator to attach a GradMult to: create a RepOpt model with "
            "structure='target' (the default), and do not reparameterize it before training; in a model of your own "
            'use the convolution that Csla.build_conv() makes.')
    scales = resolve_scales(model, scales)
    for name, layer in targets.items():
        try:
            layer.check_weight()
        except ValueError as e:
            raise ValueError(f'{name}: {e}') from None
    for name, layer in targets.items():
        layer.set_scales(None if scales is None else scales[name])
    return model
