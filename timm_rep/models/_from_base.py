"""Registered architectures that are any model of timm, converted: ``create_model('repa_any', base=...)``."""
import dataclasses
import inspect
import sys
from functools import partial
from typing import Any, Callable, Dict, Mapping, Optional, Union

import timm
import torch.nn as nn
from timm.models import PretrainedCfg, get_pretrained_cfg, model_entrypoint

from timm_rep.convert.record import FACTORY_ARGS, WEIGHT_SOURCE, describe_input, is_timm_model
from timm_rep.hub import build_model, resolve_pretrained
from timm_rep.layers import AnnealedActivation, add_annealing_hooks

__all__ = ['base_cfg', 'create_from_base']


# fields of a pretrained_cfg: what its weights are
_DESCRIPTION = ('license', 'description', 'origin_url', 'paper_name', 'paper_ids', 'notes')


def _check_base(base: str, example: str) -> None:
    """Raise ValueError if base is not a timm model name without tag."""
    if not is_timm_model(base):
        raise ValueError(
            f'base must be the name of a timm model without tag, such as {example!r}, got {base!r}: see '
            'timm.list_models().')


def base_cfg(
        variant: str,
        base: str,
        pretrained_cfg: Union[str, Dict[str, Any], PretrainedCfg, None] = None,
        has_base_weights: bool = False,
) -> Dict[str, Any]:
    """The pretrained_cfg of the base without its weights, completed by a given one.

    What describes the weights of the base, such as their licence, is kept for a model that starts from them.
    """
    cfg = get_pretrained_cfg(base)
    cfg = cfg.to_dict() if cfg is not None else {}
    for name in WEIGHT_SOURCE if has_base_weights else WEIGHT_SOURCE + _DESCRIPTION:
        cfg.pop(name, None)
    if isinstance(pretrained_cfg, PretrainedCfg):
        pretrained_cfg = dataclasses.asdict(pretrained_cfg)
    given = {} if pretrained_cfg is None or isinstance(pretrained_cfg, str) else pretrained_cfg
    return {**cfg, **{k: v for k, v in given.items() if v is not None}, 'architecture': variant}


def _filter_fn(base: str) -> Optional[Callable[..., Dict[str, Any]]]:
    """timm's ``checkpoint_filter_fn`` of a base, which resizes position embeddings, or None."""
    filter_fn = getattr(sys.modules[model_entrypoint(base).__module__], 'checkpoint_filter_fn', None)
    return filter_fn and partial(_resize, filter_fn)


def _resize(
        filter_fn: Callable[..., Dict[str, Any]],
        state_dict: Mapping[str, Any],
        model: nn.Module,
) -> Dict[str, Any]:
    own = model.state_dict()
    others = [name for name, value in state_dict.items() if name in own and value.shape != own[name].shape]
    # the filter also renames, in NextViT by the order of the keys: only tensors of another shape are taken from it
    filtered = filter_fn(dict(state_dict), model) if others else {}
    resized = {name: filtered[name] for name in others if name in filtered and filtered[name].shape == own[name].shape}
    return {**state_dict, **resized}


def _take_layers(target: nn.Module, layers: Dict[str, nn.Module], name: str = '') -> None:
    """Swap converted layers into a feature extractor, whose names may have underscores for dots."""
    for child_name, child in target.named_children():
        path = f'{name}_{child_name}'.strip('_').replace('.', '_')
        layer = layers.get(path)
        if layer is None or isinstance(child, nn.Identity):  # timm prunes layers after the last features
            continue
        names = {name for name, _ in child.named_children()}
        # a block whose branches became one convolution has other children
        if type(layer) is type(child) and names and names <= {name for name, _ in layer.named_children()}:
            child._parameters, child._buffers = layer._parameters, layer._buffers
            _take_layers(child, layers, path)
        else:
            setattr(target, child_name, layer)


def _feature_extractor(model: nn.Module, base: str, **kwargs) -> nn.Module:
    """timm's feature extractor of the base, with the layers of a converted model."""
    features = timm.create_model(base, features_only=True, **kwargs)
    inner = getattr(features, 'model', None)  # of timm's FeatureGetterNet
    if inner is None:
        inner = features
    else:
        inner._parameters, inner._buffers = model._parameters, model._buffers
    _take_layers(inner, {path.replace('.', '_'): layer for path, layer in model.named_modules()})
    features.pretrained_cfg = features.default_cfg = model.pretrained_cfg
    if any(isinstance(layer, AnnealedActivation) for layer in features.modules()):
        add_annealing_hooks(features)
    return features


def _resolve(
        build: Callable[..., nn.Module],
        variant: str,
        pretrained: bool,
        advice: str,
        kwargs: Dict[str, Any],
) -> Dict[str, Any]:
    """Call timm_rep.hub's ``resolve_pretrained`` and check that the weights were trained with this base.

    With a base and no name of weights, the error of missing weights gets the advice.
    """
    try:
        resolved = resolve_pretrained(build, variant, pretrained, kwargs)
    except RuntimeError as e:
        if 'base' not in kwargs or kwargs.get('pretrained_cfg'):
            raise
        raise RuntimeError(f'{e}\n  {advice}') from e
    base, weights = resolved.get('base'), resolved.get('weights')
    trained = weights.model_args.get('base', base) if weights else base
    if trained != base:
        raise ValueError(f'{weights.source} has a {variant} of base={trained!r}, got base={base!r}.')
    return resolved


def create_from_base(
        build: Callable[..., nn.Module],
        variant: str,
        default_base: str,
        pretrained: bool = False,
        start_from_base: Optional[Dict[str, Any]] = None,
        advice: str = '',
        **kwargs,
) -> nn.Module:
    """Create a converted model of timm with the arguments of ``timm.create_model``.

    Args:
        build: Function that creates the converted model from ``base``, its own arguments, and the base's arguments.
        variant: Name of the architecture.
        default_base: Name of the base without the argument ``base``.
        pretrained: Whether to load weights, of the converted model if pretrained_cfg says where they are.
        start_from_base: Arguments of ``build`` with which the converted model starts from the weights of its base,
            where those are to be loaded, with ``reparameterized=True`` folded afterwards; None if it cannot.
        advice: Other ways to start from the weights of the base, for the error of unpublished weights.
        kwargs: Arguments of ``create_model``.

    Raises:
        ValueError: base is not a timm model name, or not the base of the weights; or an argument of the conversion is
            invalid.
        RuntimeError: The weights cannot be found or do not fit.
    """
    has_base_weights = pretrained and start_from_base is not None and not kwargs.get('pretrained_cfg')
    folded_after = has_base_weights and kwargs.pop('reparameterized', False)
    if has_base_weights:
        overlay = kwargs.pop('pretrained_cfg_overlay', None)
        build = partial(build, pretrained=True, pretrained_cfg_overlay=overlay, **start_from_base)
        pretrained = False
    kwargs = _resolve(build, variant, pretrained, advice, kwargs)
    base = kwargs.setdefault('base', default_base)
    _check_base(base, default_base)
    kwargs['pretrained_cfg'] = base_cfg(variant, base, kwargs.get('pretrained_cfg'), has_base_weights)
    features_only = kwargs.pop('features_only', False)
    feature_args = {name: kwargs.pop(name) for name in ('out_indices', 'feature_cls') if name in kwargs}
    model = build_model(build, variant, pretrained, pretrained_filter_fn=_filter_fn(base), **kwargs)
    # create_model() records these since timm 1.0.31
    model._model_args = {
        **getattr(model, '_model_args', {}), **{k: v for k, v in kwargs.items() if k not in FACTORY_ARGS}}
    describe_input(model)
    if folded_after:
        model.reparameterize()
    if not features_only:
        return model
    own = {*inspect.signature(build).parameters, 'pretrained_cfg', 'pretrained_cfg_overlay', 'cache_dir', 'weights'}
    base_args = {name: value for name, value in kwargs.items() if name not in own}
    return _feature_extractor(model, base, **base_args, **feature_args)
