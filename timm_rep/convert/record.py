"""Record a conversion for config.json: architecture and arguments of a converted model, and whether it is folded.

timm's save_for_hf() reads them from ``_model_args``, ``pretrained_cfg`` and ``_traits`` of the model.
"""
import inspect
from functools import partial
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple, Union

import timm
import torch
import torch.nn as nn
from timm.models import build_model_with_cfg, is_model, model_entrypoint

from timm_rep.layers import csla_layers, is_reparameterized
from timm_rep.scales import recorded_scales
from timm_rep.scales._transformers import extend_timm_wrapper

from ._reparameterize import check_loaded_structure, folds_itself, reparameterize, reparameterize_model

# arguments handled by create_model() and build_model_with_cfg(), not by model classes; some are file names, so they are
# rejected in a downloaded config.json
FACTORY_ARGS = {
    *inspect.signature(timm.create_model).parameters, *inspect.signature(build_model_with_cfg).parameters,
    'device', 'dtype', 'features_only', 'out_indices', 'weight_select', 'weights',
}
# fields of a pretrained_cfg that locate its weights
WEIGHT_SOURCE = ('url', 'file', 'state_dict', 'hf_hub_id', 'hf_hub_filename', 'source', 'tag', 'custom_load')


def is_timm_model(name: Any) -> bool:
    """Whether this is the name of a model of timm itself, without tag."""
    known = isinstance(name, str) and '.' not in name and is_model(name)
    return known and model_entrypoint(name).__module__.startswith('timm.models.')


def recorded_base(model: nn.Module) -> Optional[str]:
    """Name under which timm created a model; None if the name or the arguments it was created with are unknown."""
    name = (getattr(model, 'pretrained_cfg', None) or {}).get('architecture')
    return name if hasattr(model, '_model_args') and is_timm_model(name) else None


def record_conversion(model: nn.Module, architecture: str, **args: Any) -> None:
    """Record in a model's config that it is ``architecture`` with its original timm name as ``base``.

    Fields that describe the weights, such as the license, are kept; fields that locate them are dropped. A model
    without a recorded base, see :func:`recorded_base`, is left unchanged.
    """
    base = recorded_base(model)
    if base is None:
        return
    extend_timm_wrapper()
    # timm writes the current number of classes
    base_args = {k: v for k, v in model._model_args.items() if k not in FACTORY_ARGS and k != 'num_classes'}
    model._model_args = {**base_args, 'base': base, **args}
    cfg = {name: value for name, value in model.pretrained_cfg.items() if name not in WEIGHT_SOURCE}
    model.pretrained_cfg = model.default_cfg = {**cfg, 'architecture': architecture}


def _is_recorded(model: nn.Module) -> bool:
    return 'base' in getattr(model, '_model_args', {})


def _nearest(modules: Mapping[str, nn.Module], name: str) -> str:
    """The name, or that of its nearest parent that exists: folding may leave a layer where there was a block."""
    while name not in modules:
        name = name.rpartition('.')[0]
    return name


def _input_layers(model: nn.Module, names: Union[str, Sequence[str], None]) -> Union[str, Tuple[str, ...], None]:
    """The layers that images enter: the layers of these names, or the convolutions in their places.

    Without those that have no weight of their own, as in the structures of Hyper-Search; None if there is no other.
    """
    modules = dict(model.named_modules())
    found: List[str] = []
    for name in (names,) if isinstance(names, str) else names or ():
        place = _nearest(modules, name)
        if place == name:
            found += [name] if hasattr(modules[name], 'weight') else []
            continue
        convs = [
            path for path, m in modules[place].named_modules(prefix=place)
            if isinstance(m, nn.Conv2d) and m.in_channels == getattr(model, 'in_chans', m.in_channels)]
        found += convs[:1]
    unique = tuple(dict.fromkeys(found))
    return unique if len(unique) > 1 else next(iter(unique), None)


def _classifier_layers(model: nn.Module, names: Union[str, Sequence[str], None]) -> Union[str, Sequence[str], None]:
    """The classifiers of these names, or the linear layers that they were folded into; the names if there are none."""
    modules = dict(model.named_modules())
    found: List[str] = []
    for name in (names,) if isinstance(names, str) else names or ():
        place = _nearest(modules, name)
        if place == name or isinstance(modules[place], nn.Linear):
            found.append(place)
    unique = list(dict.fromkeys(found))
    return names if not unique else unique if len(unique) > 1 else unique[0]


def adapted_layers(model: nn.Module, cfg: Mapping[str, Any]) -> Dict[str, Any]:
    """``first_conv`` and ``classifier`` of a pretrained_cfg, with the names that these layers have in a model.

    timm adapts the weights of the former to the number of input channels, and drops those of the latter where the
    number of classes differs.
    """
    return {
        'first_conv': _input_layers(model, cfg.get('first_conv')),
        'classifier': _classifier_layers(model, cfg.get('classifier')),
    }


def describe_layers(model: nn.Module) -> None:
    """Record the names of :func:`adapted_layers` in a model's config."""
    layers = adapted_layers(model, model.pretrained_cfg)
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **layers}
    if hasattr(model, '_traits'):  # since timm 1.0.31
        model._traits = {**model._traits, **layers}


def _unfolded_names(model: nn.Module) -> FrozenSet[str]:
    """Names of parameters and buffers that ``reparameterize()`` removes, of the first layer from which it does."""
    for name, layer in model.named_modules():
        if name and folds_itself(layer):
            keys = set(layer.state_dict())
            if not hasattr(layer, 'structure_keys'):  # the method of timm's may have nothing to fold
                keys -= _keys_without_branches(layer)
            if keys:
                return frozenset(f'{name}.{key}' for key in keys)
    return frozenset()


@torch.no_grad()
def _keys_without_branches(layer: nn.Module) -> Set[str]:
    """Keys of the state dict of a layer that timm folds; none if it cannot be folded."""
    try:
        folded, = reparameterize_model(nn.Sequential(layer))
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
        return set()
    return set(folded.state_dict())


def _has(model: nn.Module, names: FrozenSet[str]) -> bool:
    return names <= {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


def is_folded(model: nn.Module) -> bool:
    """Whether all foldable layers of a model, the timm base's included, are folded."""
    unfolded: FrozenSet[str] = getattr(model, '_unfolded', frozenset())
    return is_reparameterized(model) and not (unfolded and _has(model, unfolded))


def _describe(model: nn.Module, *hook_args: Any) -> None:
    """Record in a model's config whether it is folded and which scales are attached.

    The argument ``scales`` that create_model records may be a file or differ from the attached scales.
    """
    if not _is_recorded(model) or model._model_args.get('reparameterized'):
        return
    args = {name: value for name, value in model._model_args.items() if name != 'scales'}
    if csla_layers(model):
        args['scales'] = recorded_scales(model)
    if not _has(model, model._unfolded):
        args['reparameterized'] = True
        describe_layers(model)
    if args != model._model_args:
        model._model_args = args


def _reparameterize(model: nn.Module) -> nn.Module:
    reparameterize(model)
    _describe(model)
    return model


def make_foldable(model: nn.Module) -> None:
    """Add ``reparameterize()`` to a converted model, and refuse checkpoints of a different structure.

    The next ``state_dict()``, which timm's save_for_hf() calls before it reads the arguments, records for config.json
    what happens later: create_model() sets its arguments, ``timm.utils.reparameterize_model`` folds the model without
    calling ``reparameterize()``, scales are attached.

    Args:
        model: Converted model, which may be folded already.
    """
    model._unfolded = _unfolded_names(model)
    if _is_recorded(model):
        describe_layers(model)
    _describe(model)
    model.register_state_dict_pre_hook(_describe)
    model.register_load_state_dict_pre_hook(check_loaded_structure)
    # an attribute of the instance, since timm's class has no such method; a partial is copied and pickled with it
    model.reparameterize = partial(_reparameterize, model)
