"""Scales of a model: resolving what they are given as, and attaching them."""
import os
from typing import Literal, Mapping, Optional, Union

import torch
import torch.nn as nn

from timm_rep.layers import CslaConv2d, csla_layers
from timm_rep.layers.grad_mult import MultipliedLayers
from timm_rep.utils.files import StrPath

from .packaged import packaged_scales
from .released import RELEASED_PREFIX
from .scales import Scales

ScalesLike = Union[Scales, Mapping[str, Mapping[str, torch.Tensor]], StrPath, Literal[False]]

# scales that follow from the layers of a model
_RULES = ('ones', 'init')


def resolve_scales(model: nn.Module, scales: Optional[ScalesLike]) -> Optional[Scales]:
    """Load scales and check that they fit the CSLA layers of a model.

    Args:
        model: A model with CSLA layers.
        scales: As for :func:`attach_grad_mults`.

    Returns:
        The scales; None for no scales.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The model has no CSLA layers, or the scales do not fit it; the message names every layer.
    """
    if scales is None or scales is False:
        return None
    initial = Scales.initial(model)  # refuses a model without CSLA layers
    if isinstance(scales, Mapping):
        scales = scales if isinstance(scales, Scales) else Scales(scales)
    elif scales in _RULES:
        source, scales = scales, initial.ones_like() if scales == 'ones' else initial
        scales.source = source
    elif isinstance(scales, (str, os.PathLike)):
        scales = Scales.load(scales)
    else:
        raise ValueError(
            'scales must be Scales, a mapping of vectors by branch by layer, a path, a Hub repository, the name of a '
            f"model with packaged scales, 'ones', 'init' or False, got {scales!r}.")
    layers = csla_layers(model)
    problems = {name: 'not a layer of the model' for name in scales if name not in layers}
    for name, layer in layers.items():
        try:
            layer.csla.check_scales(scales.get(name, {}))
        except ValueError as e:
            problems[name] = str(e)
    if problems:
        fitting = [name for name in layers if name not in problems]
        raise ValueError(
            f'Expected scales of {type(model).__name__}, but {scales!r} fit {len(fitting)} of its {len(layers)} '
            f'layers{": " if fitting else ""}{", ".join(fitting)}. Scales belong to an architecture: search again '
            'for other depths or widths. If only the names of the layers differ, as with features_only=True or in a '
            'larger model, pass a mapping from the names here to the vectors.\n  '
            + '\n  '.join(f'{name}: {problem}' for name, problem in problems.items()))
    return scales


def attach_grad_mults(model: nn.Module, scales: Optional[ScalesLike]) -> nn.Module:
    """Attach a GradMult to the kernel of every target operator of a model, for RepSGD and RepAdamW.

    ``create_model`` attaches GradMults to the models of this package. Call it for other scales, and after a wrapper has
    replaced the parameters (FSDP2): a shard on dim 0 gets the multiplier of its rows. Existing optimizers use the new
    multipliers from their next step on.

    Args:
        model: A model with target operators (:class:`CslaConv2d`), wrapped or not.
        scales: Scales; a nested mapping from layers to branches to vectors (channels,); a source of
            :meth:`Scales.load` (a path, a Hub repository, the name of a model with packaged scales); ``'ones'`` or
            ``'init'``. False or None for no scales, which removes the GradMults; timm's create_model drops arguments
            that are None.

    Returns:
        The model.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The model has no target operator, the scales do not fit it, a weight is not a parameter (a
            parametrization computes it), or a weight is sharded on a dim other than 0. The model is unchanged except
            in the last case.
    """
    targets = {name: layer for name, layer in csla_layers(model).items() if isinstance(layer, CslaConv2d)}
    if not targets:
        raise ValueError(
            f'Expected a target operator to attach a GradMult to, but {type(model).__name__} has none: create a RepOpt '
            "model with structure='target' (the default), and do not reparameterize it before training; in a model of "
            'your own use timm_rep.layers.CslaConv2d.')
    scales = resolve_scales(model, scales)
    for name, layer in targets.items():
        try:
            layer.check_weight()
        except ValueError as e:
            raise ValueError(f'{name}: {e}') from None
    layers = MultipliedLayers(scales)
    for name, layer in targets.items():
        layer.set_scales(None if scales is None else scales.get(name, {}))
        if scales is not None:
            layers.add(name, layer)
    return model


def attached_scales(model: nn.Module) -> Optional[Scales]:
    """Scales of the GradMults of a model, whatever they were read from; None unless all target operators have one."""
    layers = csla_layers(model)
    grad_mults = [layer.grad_mult for layer in layers.values() if isinstance(layer, CslaConv2d) and layer.grad_mult]
    if not layers or len(grad_mults) < len(layers):
        return None
    together, *others = {id(grad_mult.layers): grad_mult.layers for grad_mult in grad_mults}.values()
    given = None if together is None or others else together.scales
    scales = Scales({name: grad_mult.scales for name, grad_mult in zip(layers, grad_mults)})
    if isinstance(given, Scales):
        if given.keys() == scales.keys():
            return given
        if given.source in _RULES:  # given to a model around this one
            scales.source = given.source
    return scales


def has_name(scales: str) -> bool:
    """Whether scales are known by name on every machine, so that config.json may name them."""
    return scales in (*_RULES, *packaged_scales()) or scales.startswith(RELEASED_PREFIX)


def recorded_scales(model: nn.Module) -> Union[str, bool]:
    """Value of ``scales`` in config.json: the name of the attached scales, or False if they have none.

    With False, RepSGD refuses to train the loaded model without scales. The weights of a search or CSLA structure hold
    its scales: 'init' stands for them.
    """
    if not any(isinstance(layer, CslaConv2d) for layer in csla_layers(model).values()):
        return 'init'
    scales = attached_scales(model)
    return scales.source if scales is not None and scales.source and has_name(scales.source) else False
