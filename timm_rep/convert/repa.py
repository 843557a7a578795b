"""RePa FFNs for any timm model: to train, from data, or annealed."""
import inspect
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Union

import torch
import torch.nn as nn

from timm_rep.layers import active_channels

from ._reparameterize import check_unconverted
from .anneal import anneal_ffns
from .ffn import names_without_hooks, plain_ratio
from .linearize import linearize_ffns
from .record import make_foldable, record_conversion
from .report import ConversionReport
from .to_train import use_repa_ffns

# arguments of the three conversions that convert_to_repa() passes on, by how one chooses the conversion
_OWN_ARGS = ('model', 'idle_ratio', 'loader', 'anneal_steps', 'reparameterized')
_ARGS = {
    how: [name for name in inspect.signature(convert).parameters if name not in _OWN_ARGS]
    for how, convert in {
        'without calibration and anneal_steps': use_repa_ffns,
        'with calibration': linearize_ffns,
        'with anneal_steps': anneal_ffns,
    }.items()
}


@torch.inference_mode(False)  # inference tensors cannot be trained
def convert_to_repa(
        model: nn.Module,
        idle_ratio: Union[float, Sequence[Optional[float]], None] = None,
        calibration: Optional[Iterable[Any]] = None,
        anneal_steps: Optional[int] = None,
        **kwargs: Any,
) -> ConversionReport:
    """Convert the FFNs of a timm model to RePa FFNs, in place, in one of three ways.

    - To train, without ``calibration`` and ``anneal_steps``, as the RePaFormer paper (eq. 3): the FFNs get BatchNorms
      and idle channels, so that the function changes and the model has to be trained; see
      :func:`timm_rep.convert.use_repa_ffns`. All FFNs must be two linear layers with an activation,
      such as ``timm.layers.Mlp``.
    - From data, with ``calibration``: each FFN is replaced by at most three small matrices fitted to the images, which
      keeps the function approximately without training; see :func:`timm_rep.convert.linearize_ffns`.
    - Annealed, with ``anneal_steps``: the first training step computes the original function, and the FFNs fold after
      step ``anneal_steps``; see :func:`timm_rep.convert.anneal_ffns`.

    ``model.reparameterize()`` folds the result. timm's ``save_for_hf()`` and ``timm_rep.export(model, 'folder')`` write
    it as a ``repa_any``, folded or not, if the model was created with ``timm.create_model`` of timm 1.0.31 or newer;
    while it is annealed, only save_for_hf() does. Create optimizers after the conversion.

    Args:
        model: timm model, not wrapped.
        idle_ratio: Share of the hidden channels of each FFN that skip the activation, from 0 to 1 (default: 0.75); or
            a sequence of one ratio per FFN. In a sequence, None keeps an FFN, with calibration or with anneal_steps and
            norm='keep'.
        calibration: Batches of images, preprocessed as for the model. The first ``max_images`` are used, 2,048 by
            default.
        anneal_steps: Training steps until the annealed FFNs are foldable, an integer >= 2.
        kwargs: Arguments of the chosen function: ``idle_schedule``, ``bn_momentum``, ``bn_eps`` to train; ``macs``,
            ``max_images``, ``tokens_per_image``, ``compensate``, ``ridge``, ``progress`` from data; ``norm``,
            ``anneal_schedule``, ``bn_momentum``, ``bn_eps`` annealed.

    Returns:
        The report of the conversion.

    Raises:
        TypeError: model is not a module, an argument belongs to a different way, or as the chosen function.
        ValueError: Both calibration and anneal_steps are given, or as the chosen function. The model is unchanged.
    """
    if calibration is not None and anneal_steps is not None:
        raise ValueError('Expected either calibration or anneal_steps, but got both.')
    to_train, from_data, annealed = _ARGS
    chosen = from_data if calibration is not None else annealed if anneal_steps is not None else to_train
    for name in kwargs:
        if name not in _ARGS[chosen]:
            ways = ' or '.join(how for how, names in _ARGS.items() if name in names)
            raise TypeError(
                f'{name} is an argument of convert_to_repa() {ways}, but got it {chosen}.' if ways
                else f'convert_to_repa() got an unexpected keyword argument {name!r}')
    if idle_ratio is not None:
        kwargs['idle_ratio'] = plain_ratio(idle_ratio)
    check_unconverted(model)
    if calibration is not None:
        names = names_without_hooks(model)
        report = linearize_ffns(model, calibration, **kwargs)
        args = _linearized_args(names, report)
    elif anneal_steps is not None:
        names = names_without_hooks(model)
        report = anneal_ffns(model, anneal_steps, **kwargs)
        args = _with_defaults(anneal_ffns, anneal_steps=int(anneal_steps), **kwargs)
        if not report.kept.keys().isdisjoint(names):  # loaded without its hooks, the model keeps the same FFNs
            args['idle_ratio'] = _linearized_args(names, report)['idle_ratio']
    else:
        report = use_repa_ffns(model, **kwargs)
        args = dict(_with_defaults(use_repa_ffns, **kwargs), norm='batch')
    record_conversion(model, 'repa_any', **args)
    make_foldable(model)
    return report


def _with_defaults(convert: Callable[..., Any], **kwargs: Any) -> Dict[str, Any]:
    defaults = {
        name: p.default for name, p in inspect.signature(convert).parameters.items()
        if p.default is not p.empty and name != 'reparameterized'}
    return {**defaults, **kwargs}


def _linearized_args(names: Sequence[str], report: ConversionReport) -> Dict[str, Any]:
    """Arguments of ``repa_any`` for a model of pointwise FFNs of these names, which are converted or kept."""
    converted = {ffn.name: ffn for ffn in report.ffns}
    found = [converted.get(name) for name in names]
    ratios = [ffn and _ratio(ffn.active_features, ffn.hidden_features) for ffn in found]
    paths = [ffn is None or ffn.linear_path for ffn in found]
    return dict(
        idle_ratio=ratios[0] if len(set(ratios)) == 1 else ratios,
        linear_path=paths[0] if len(set(paths)) == 1 else paths,
    )


def _ratio(active: int, hidden: int) -> float:
    """An idle ratio of few digits that gives this number of active channels."""
    digits = range(1, 17)
    return next(
        ratio for ratio in [*(round(1 - active / hidden, n) for n in digits), 1 - (active - 0.5) / hidden]
        if active_channels(hidden, ratio) == active)
