"""Any timm model with RePa FFNs as a registered architecture, known to timm's scripts, config.json and the Hub.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`, ICML 2025 as
`RePaViT` - https://arxiv.org/abs/2505.21847
"""
from typing import Any, Dict, Optional, Sequence, Union

import timm
import torch.nn as nn
from timm.models import generate_default_cfgs, register_model

from timm_rep.convert import anneal_ffns, reparameterize, use_repa_ffns
from timm_rep.convert.ffn import find_ffns, ratios_of, replace_module
from timm_rep.convert.record import make_foldable
from timm_rep.layers import active_channels, check_annealing

from ._from_base import base_cfg, create_from_base

__all__ = []

_DEFAULT_BASE = 'vit_tiny_patch16_224'


def _build(
        base: str = _DEFAULT_BASE,
        idle_ratio: Union[float, Sequence[Optional[float]]] = 0.75,
        norm: str = 'keep',
        linear_path: Union[bool, Sequence[bool]] = True,
        idle_schedule: str = 'constant',
        bn_momentum: Optional[float] = 0.1,
        bn_eps: float = 1e-5,
        anneal_steps: int = 0,
        anneal_schedule: str = 'linear',
        reparameterized: bool = False,
        **kwargs: Any,
) -> nn.Module:
    """The timm model ``base`` with converted FFNs; see :func:`repa_any`."""
    if norm not in ('keep', 'batch'):
        raise ValueError(f"norm must be 'keep' or 'batch', got {norm!r}.")
    if not isinstance(reparameterized, bool):
        raise ValueError(f'reparameterized must be True or False, got {reparameterized!r}.')
    if linear_path is not True and (norm == 'batch' or anneal_steps):
        raise ValueError(f"linear_path must be True with norm='batch' or anneal_steps, got {linear_path!r}.")
    if (norm == 'keep' or anneal_steps) and idle_schedule != 'constant':
        raise ValueError(f"idle_schedule must be 'constant' with norm='keep' or anneal_steps, got {idle_schedule!r}.")
    check_annealing(anneal_steps or 2, anneal_schedule)
    model = timm.create_model(base, **kwargs)
    model._model_args = dict(base=base)  # create_model adds the others
    if anneal_steps and not reparameterized:
        anneal_ffns(model, anneal_steps, idle_ratio, norm, anneal_schedule, bn_momentum, bn_eps)
    elif norm == 'keep':
        use_linearized_ffns(model, idle_ratio, linear_path)
    else:
        use_repa_ffns(  # raises for None
            model, idle_ratio, idle_schedule, bn_momentum, bn_eps, reparameterized)  # type: ignore[arg-type]
    if reparameterized:
        reparameterize(model)  # including the layers that timm folds
    make_foldable(model)
    return model


def use_linearized_ffns(
        model: nn.Module,
        idle_ratio: Union[float, Sequence[Optional[float]]],
        linear_path: Union[bool, Sequence[bool]] = True,
) -> None:
    """Give the FFNs of a model the structure of :func:`timm_rep.convert.linearize_ffns`, with new weights.

    ``idle_ratio`` and ``linear_path`` may be sequences with one value for each pointwise FFN.
    """
    ffns, _ = find_ffns(model)
    if not ffns:
        raise ValueError(f'base must have a pointwise FFN that can be converted, got a {type(model).__name__}.')
    paths = [linear_path] * len(ffns) if isinstance(linear_path, bool) else linear_path
    if not isinstance(paths, (list, tuple)) or len(paths) != len(ffns) or not all(isinstance(p, bool) for p in paths):
        raise ValueError(
            f'linear_path must be a bool or a sequence of one bool for each of the {len(ffns)} FFNs, got '
            f'{linear_path!r}.')
    for ffn, ratio, path in zip(ffns, ratios_of([ffn.name for ffn in ffns], idle_ratio), paths):
        if ratio is not None:
            replace_module(model, ffn.module, ffn.replacement(
                active_channels(ffn.hidden_features, ratio), linear_path=path))


_CIFAR10_BASE = dict(
    base='fasternet_s', embed_dim=32, depths=(1, 3, 3), n_div=1, mlp_ratio=3., patch_size=1, feature_dim=384)

model_cfgs: Dict[str, Dict[str, Any]] = {
    'repa_any': dict(base=_DEFAULT_BASE),
    'repa_any.cifar10': dict(_CIFAR10_BASE, idle_ratio=.5, anneal_steps=2),
    'repa_any.cifar10_converted': dict(
        _CIFAR10_BASE, idle_ratio=(.49, .34, .365, .24, .003, .016, .37), linear_path=False, reparameterized=True),
}


def _create_repa_any(variant: str, /, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    is_annealed = kwargs.get('anneal_steps') and not kwargs.get('reparameterized')
    start_from_base: Optional[Dict[str, Any]] = {} if is_annealed else None
    return create_from_base(
        _build, variant, model_cfgs, pretrained, start_from_base,
        'To start from pretrained weights, use timm_rep.convert_to_repa(timm.create_model(base, pretrained=True), '
        'calibration=loader), or anneal_steps=N to train.', **kwargs)


_CIFAR10_CFG = dict(
    base_cfg('repa_any', 'fasternet_s'), license='apache-2.0', num_classes=10,
    input_size=(3, 32, 32), pool_size=(8, 8), crop_pct=.9,
    mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))

default_cfgs = generate_default_cfgs({
    'repa_any.cifar10': dict(_CIFAR10_CFG, hf_hub_id='timm-rep/repa_any.cifar10'),
    'repa_any.cifar10_converted': dict(_CIFAR10_CFG, hf_hub_id='timm-rep/repa_any.cifar10_converted'),
    # last, with '*', to be the default
    'repa_any.untrained*': base_cfg('repa_any', _DEFAULT_BASE),
})


@register_model
def repa_any(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any timm model with pointwise FFNs as a RePaFormer: ``create_model('repa_any', base='deit3_base_patch16_224')``.

    Args (in addition to the base model's):
        base: Name of a model of timm, without tag.
        idle_ratio: Share of the hidden channels that are idle, from 0 to 1; or a sequence with one ratio per FFN (per
            pointwise FFN with ``norm='keep'``, None to leave an FFN unchanged).
        norm: 'keep' for the structure of ``timm_rep.convert_to_repa(model, calibration=loader)``: three matrices for
            each FFN, norms and shortcuts as they are. 'batch' for the structure of the paper, to train:
            ``timm_rep.convert_to_repa(model)``, which folds.
        linear_path: For ``norm='keep'``, whether a matrix replaces the idle channels; if False they are dropped. Or a
            sequence with one bool per pointwise FFN.
        idle_schedule, bn_momentum, bn_eps: For ``norm='batch'``, see :func:`timm_rep.convert_to_repa`.
        anneal_steps: Training steps of the annealing from the pretrained base, see
            :func:`timm_rep.convert.anneal_ffns`. Such a model also loads checkpoints of the base and, with
            ``pretrained=True``, the base's published weights. 0 builds the final structure.
        anneal_schedule: 'linear' or 'cosine'.
        reparameterized: Build the deploy structure: folded FFNs, and what timm folds in the base.
    """
    return _create_repa_any('repa_any', pretrained=pretrained, **kwargs)
