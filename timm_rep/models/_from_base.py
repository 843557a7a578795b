"""Registered architectures that are any model of timm, converted: ``create_model('repa_any', base=...)``."""
import dataclasses
import inspect
from functools import partial
from typing import Any, Callable, Dict, Mapping, Optional, Union

import timm
import torch.nn as nn
from timm.models import FeatureDictNet, PretrainedCfg, get_pretrained_cfg

from timm_rep.convert.record import FACTORY_ARGS, WEIGHT_SOURCE, describe_layers, is_timm_model
from timm_rep.hub import build_model, separate_overlay
from timm_rep.layers import AnnealedActivation, add_annealing_hooks, remove_annealing_hooks

from ._own_weights import are_own_weights, filter_of

# fields of a pretrained_cfg that describe its weights
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

    Fields that describe the weights of the base, such as the license, are kept for a model that starts from them.
    """
    cfg = get_pretrained_cfg(base)
    cfg = cfg.to_dict() if cfg is not None else {}
    for name in WEIGHT_SOURCE if has_base_weights else WEIGHT_SOURCE + _DESCRIPTION:
        cfg.pop(name, None)
    if isinstance(pretrained_cfg, PretrainedCfg):
        pretrained_cfg = dataclasses.asdict(pretrained_cfg)
    given = {} if pretrained_cfg is None or isinstance(pretrained_cfg, str) else pretrained_cfg
    return {**cfg, **{k: v for k, v in given.items() if v is not None}, 'architecture': variant}


def _takes_size(base: str, img_size: Any) -> bool:
    """Whether a base has an argument ``img_size``."""
    try:
        timm.create_model(base, img_size=img_size, device='meta')
    except TypeError:
        return False
    return True


def _filter_fn(base: str) -> Optional[Callable[..., Dict[str, Any]]]:
    """timm's ``checkpoint_filter_fn`` of a base, which resizes position embeddings, or None."""
    filter_fn = filter_of(base)
    return filter_fn and partial(_resize, filter_fn)


def _resize(
        filter_fn: Callable[..., Dict[str, Any]],
        state_dict: Mapping[str, Any],
        model: nn.Module,
) -> Dict[str, Any]:
    own = model.state_dict()
    others = [name for name, value in state_dict.items() if name in own and value.shape != own[name].shape]
    # the filter also renames, in NextViT by the order of the keys: only tensors of a different shape are taken from it
    filtered = filter_fn(dict(state_dict), model) if others else {}
    resized = {name: filtered[name] for name in others if name in filtered and filtered[name].shape == own[name].shape}
    return {**state_dict, **resized}


def _feature_cfg(base: str, args: Dict[str, Any]) -> Dict[str, Any]:
    """timm's ``feature_cfg`` of a base: how its features are extracted, read off its feature extractor."""
    try:
        features = timm.create_model(base, features_only=True, **args, device='meta')
    except IndexError:  # fewer stages than timm's default out_indices
        if 'out_indices' in args:
            raise
        others = {name: value for name, value in args.items() if name != 'feature_cls'}
        stages = len(timm.create_model(base, **others, device='meta').feature_info)
        features = timm.create_model(base, features_only=True, out_indices=tuple(range(stages)), **args, device='meta')
    info = features.feature_info
    cfg = dict(feature_cls=type(features), out_indices=info.out_indices, output_fmt=features.output_fmt)
    if isinstance(features, FeatureDictNet):
        cfg['flatten_sequential'] = any('.' in name for name in info.module_name())
    return cfg


def create_from_base(
        build: Callable[..., nn.Module],
        variant: str,
        /,
        model_cfgs: Mapping[str, Mapping[str, Any]],
        pretrained: bool = False,
        start_from_base: Optional[Dict[str, Any]] = None,
        advice: str = '',
        **kwargs: Any,
) -> nn.Module:
    """Create a converted model of timm with the arguments of ``timm.create_model``.

    Args:
        build: Function that creates the converted model from ``base``, arguments of its own and of the base.
        variant: Name of the architecture.
        model_cfgs: Default arguments, as for :func:`timm_rep.hub.build_model`.
        pretrained: Whether to load weights, of the converted model if pretrained_cfg says where they are.
        start_from_base: Arguments of ``build`` for starting from the base's pretrained weights (folded afterwards with
            ``reparameterized=True``), unless a file of the converted model is given; None if that is not supported.
        advice: Other ways to start from the weights of the base, for the error of unpublished weights.
        kwargs: Arguments of ``create_model``.
    """
    kwargs = separate_overlay(variant, kwargs)
    own = {*inspect.signature(build).parameters, *FACTORY_ARGS}
    has_base_weights = pretrained and start_from_base is not None and not kwargs.get('pretrained_cfg')
    overlay = dict(kwargs.get('pretrained_cfg_overlay') or {})
    if has_base_weights and overlay:
        others = 'pretrained_cfg_overlay', 'features_only', 'out_indices', 'weight_select', 'device', 'reparameterized'
        args = {name: value for name, value in kwargs.items() if name not in others}
        create = partial(create_from_base, build, variant, model_cfgs, **args)
        has_base_weights = not are_own_weights(
            variant, create, own, overlay, kwargs.get('reparameterized', False), kwargs.get('cache_dir'))
    if has_base_weights and start_from_base is not None:
        kwargs.pop('pretrained_cfg_overlay', None)
        build = partial(build, pretrained=True, pretrained_cfg_overlay=overlay or None, **start_from_base)
        pretrained = False
        if kwargs.pop('reparameterized', False):
            build = partial(_fold, build)
    resolved = {}

    def complete(args: Dict[str, Any]) -> Dict[str, Any]:
        base, weights = args['base'], args.get('weights')
        trained = weights.model_args.get('base', base) if weights else base
        if weights and trained != base:
            raise ValueError(f'base must be {trained!r} with the weights of {weights.source}, got {base!r}.')
        _check_base(base, model_cfgs[variant]['base'])
        cfg = args.get('pretrained_cfg')
        if f'{variant}.{cfg}' in model_cfgs:
            cfg = get_pretrained_cfg(f'{variant}.{cfg}')
        elif isinstance(cfg, str) and cfg and not weights:
            get_pretrained_cfg(f'{variant}.{cfg}')  # raises the error of a tag that is not registered
            cfg = None  # that of no weights
        args['pretrained_cfg'] = base_cfg(variant, base, cfg, has_base_weights)
        args['pretrained_filter_fn'] = _filter_fn(base)
        size = args.get('img_size')
        if size is not None and not args['pretrained_cfg'].get('fixed_input_size') and not _takes_size(base, size):
            del args['img_size']  # timm's scripts pass --img-size if the size of the default base is fixed
        if args.get('features_only'):
            names = args.keys() - own | args.keys() & {'out_indices', 'feature_cls'}
            args['feature_cfg'] = _feature_cfg(base, {name: args[name] for name in names})
        resolved.update(args)
        return args

    try:
        model = build_model(build, variant, pretrained, model_cfgs, complete, **kwargs)
    except RuntimeError as e:
        if not pretrained or 'base' not in kwargs or kwargs.get('pretrained_cfg'):
            raise
        raise RuntimeError(f'{e}\n  {advice}') from e
    # create_model() records these since timm 1.0.31
    model._model_args = {
        **getattr(model, '_model_args', {}), **{k: v for k, v in resolved.items() if k not in FACTORY_ARGS}}
    if not kwargs.get('features_only'):
        describe_layers(model)
    elif any(isinstance(layer, AnnealedActivation) for layer in model.modules()):
        remove_annealing_hooks(model)  # of the model in it: a step would count twice
        add_annealing_hooks(model)
    return model


def _fold(build: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    return build(**kwargs).reparameterize()
