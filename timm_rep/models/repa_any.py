"""Any timm model with RePa FFNs as a registered architecture, so that timm's scripts, config.json and the Hub know it.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`, ICML 2025 as
`RePaViT` - https://arxiv.org/abs/2505.21847
"""
import dataclasses
import inspect
from functools import partial
from typing import Any, Dict, Optional, Sequence, Union

import timm
import torch.nn as nn
from timm.models import PretrainedCfg, generate_default_cfgs, get_pretrained_cfg, is_model, register_model

from timm_rep.convert import (
    anneal_ffns,
    find_pointwise_ffns,
    ratios_of,
    reparameterize,
    replace_module,
    use_repa_ffns,
)
from timm_rep.convert.reparameterize import check_loaded_structure
from timm_rep.hub.load import build_model, resolve_pretrained
from timm_rep.layers import active_channels, advance_annealing

__all__ = []

_DEFAULT_BASE = 'vit_tiny_patch16_224'


def _build(
        base: str = _DEFAULT_BASE,
        idle_ratio: Union[float, Sequence[Optional[float]]] = 0.75,
        norm: str = 'keep',
        linear_path: Union[bool, Sequence[bool]] = True,
        idle_schedule: str = 'constant',
        bn_momentum: float = 0.1,
        bn_eps: float = 1e-5,
        anneal_steps: int = 0,
        anneal_schedule: str = 'linear',
        reparameterized: bool = False,
        **kwargs,
) -> nn.Module:
    """The timm model ``base`` with converted FFNs; see :func:`repa_any`."""
    model = timm.create_model(base, **kwargs)
    model._model_args = {}  # those of the base; create_model adds all
    if anneal_steps and not reparameterized:
        if idle_schedule != 'constant':
            raise ValueError(f"With anneal_steps, idle_schedule is 'constant', got {idle_schedule!r}.")
        anneal_ffns(model, anneal_steps, idle_ratio, norm, anneal_schedule, bn_momentum, bn_eps)
    elif norm == 'keep':
        use_linearized_ffns(model, idle_ratio, linear_path)
    elif norm == 'batch':
        use_repa_ffns(model, idle_ratio, idle_schedule, bn_momentum, bn_eps, reparameterized)
    else:
        raise ValueError(f"norm is 'keep' or 'batch', got {norm!r}.")
    model.register_load_state_dict_pre_hook(check_loaded_structure)
    model.reparameterize = partial(_reparameterize, model)
    return model


def use_linearized_ffns(
        model: nn.Module,
        idle_ratio: Union[float, Sequence[Optional[float]]],
        linear_path: Union[bool, Sequence[bool]] = True,
) -> None:
    """Give the FFNs of a model the structure of :func:`timm_rep.convert.linearize_ffns`, with new weights.

    Args:
        model: timm model.
        idle_ratio: Share of the idle hidden channels; or one for each pointwise FFN, None for those left as they are.
        linear_path: Whether the idle channels become a matrix, or are dropped; or one for each FFN.

    Raises:
        ValueError: The model has no pointwise FFN, or another number of them than ratios.
    """
    ffns, _ = find_pointwise_ffns(model)
    if not ffns:
        raise ValueError(f'{type(model).__name__} has no pointwise FFN that can be converted.')
    paths = [linear_path] * len(ffns) if isinstance(linear_path, bool) else linear_path
    if len(paths) != len(ffns):
        raise ValueError(f'linear_path is one value or one for each of the {len(ffns)} FFNs, got {linear_path!r}.')
    for ffn, ratio, path in zip(ffns, ratios_of(ffns, idle_ratio), paths):
        if ratio is not None:
            replace_module(model, ffn.module, ffn.replacement(
                active_channels(ffn.hidden_features, ratio), linear_path=path))


def _reparameterize(model: nn.Module) -> nn.Module:
    """Fold the model in place; config.json says so afterwards."""
    reparameterize(model)
    model._model_args = {**getattr(model, '_model_args', {}), 'reparameterized': True}
    return model


def _check_base(base: str) -> None:
    known = isinstance(base, str) and '.' not in base and is_model(base)
    entry = timm.models.model_entrypoint(base) if known else None
    if entry is None or not entry.__module__.startswith('timm.models.'):
        raise ValueError(
            f'base is the name of a model of timm without tag, such as {_DEFAULT_BASE!r}; got {base!r}, see '
            'timm.list_models().')


def _base_cfg(base: str, pretrained_cfg: Union[str, Dict[str, Any], PretrainedCfg, None]) -> Dict[str, Any]:
    """The pretrained_cfg of the base without its weights, completed by a given one."""
    cfg = get_pretrained_cfg(base)
    cfg = cfg.to_dict() if cfg is not None else {}
    for name in ('url', 'file', 'state_dict', 'hf_hub_id', 'hf_hub_filename', 'source', 'tag', 'custom_load'):
        cfg.pop(name, None)
    if isinstance(pretrained_cfg, PretrainedCfg):
        pretrained_cfg = dataclasses.asdict(pretrained_cfg)
    given = {} if pretrained_cfg is None or isinstance(pretrained_cfg, str) else pretrained_cfg
    return {**cfg, **{k: v for k, v in given.items() if v is not None}, 'architecture': 'repa_any'}


def _take_layers(target: nn.Module, layers: Dict[str, nn.Module], name: str = '') -> None:
    """Put the layers of a model in the places of a copy of it, whose names may have underscores for dots."""
    for child_name, child in target.named_children():
        path = f'{name}_{child_name}'.strip('_').replace('.', '_')
        layer = layers.get(path)
        if layer is None or isinstance(child, nn.Identity):  # timm prunes layers after the last features
            continue
        if type(layer) is type(child) and any(True for _ in child.children()):
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
    features.register_forward_pre_hook(advance_annealing)
    return features


def _create_repa_any(variant: str, pretrained: bool = False, **kwargs) -> nn.Module:
    build = _build
    if pretrained and kwargs.get('anneal_steps') and not kwargs.get('pretrained_cfg'):
        # the weights to start from are those of the base
        overlay = kwargs.pop('pretrained_cfg_overlay', None)
        pretrained, build = False, partial(_build, pretrained=True, pretrained_cfg_overlay=overlay)
    kwargs = resolve_pretrained(_build, variant, pretrained, kwargs)
    base = kwargs.setdefault('base', _DEFAULT_BASE)
    _check_base(base)
    kwargs['pretrained_cfg'] = _base_cfg(base, kwargs.get('pretrained_cfg'))
    features_only = kwargs.pop('features_only', False)
    feature_args = {name: kwargs.pop(name) for name in ('out_indices', 'feature_cls') if name in kwargs}
    model = build_model(build, variant, pretrained, **kwargs)
    if not features_only:
        return model
    own = {*inspect.signature(_build).parameters, 'pretrained_cfg', 'pretrained_cfg_overlay', 'cache_dir', 'weights'}
    base_args = {name: value for name, value in kwargs.items() if name not in own}
    return _feature_extractor(model, base, **base_args, **feature_args)


default_cfgs = generate_default_cfgs({
    'repa_any.untrained': _base_cfg(_DEFAULT_BASE, None),
})


@register_model
def repa_any(pretrained=False, **kwargs) -> nn.Module:
    """Any timm model with pointwise FFNs as a RePaFormer: ``create_model('repa_any', base='deit3_base_patch16_224')``.

    Args, beside those of the base:
        base: Name of a model of timm, without tag.
        idle_ratio: Share of the hidden channels that are idle, from 0 to 1; with ``norm='keep'`` also one for each
            pointwise FFN, None for those that stay as they are.
        norm: 'keep' for the structure of ``timm_rep.convert_to_repa(model, calibration=loader)``: three matrices for
            each FFN, norms and shortcuts as they are. 'batch' for the structure of the paper, to train:
            ``timm_rep.convert_to_repa(model)``, which folds.
        linear_path: For ``norm='keep'``, whether the idle channels become a matrix, or are dropped; also one for each
            pointwise FFN.
        idle_schedule, bn_momentum, bn_eps: For ``norm='batch'``, see :func:`timm_rep.convert_to_repa`.
        anneal_steps: Number of training steps over which the pretrained base becomes this model, see
            :func:`timm_rep.convert.anneal_ffns`; it loads checkpoints of the base, and with ``pretrained=True`` its
            published weights. 0 for the structure of the end.
        anneal_schedule: 'linear' or 'cosine'.
        reparameterized: For ``norm='batch'`` or anneal_steps, build the deploy structure.
    """
    return _create_repa_any('repa_any', pretrained=pretrained, **kwargs)
