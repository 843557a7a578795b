"""A RePaFormer of any timm model: the ways to convert it, as one function."""
from typing import Any, Dict, Iterable, Optional, Sequence, Union

import torch
import torch.nn as nn

from timm_rep.layers import active_channels

from .anneal import anneal_ffns
from .ffn import use_repa_ffns
from .linearize import check_convertible, linearize_ffns
from .pointwise import plain_ratio
from .record import make_foldable, record_conversion
from .reparameterize import check_unconverted
from .report import ConversionReport

__all__ = ['convert_to_repa']


@torch.inference_mode(False)  # whose tensors could not be trained later
def convert_to_repa(
        model: nn.Module,
        idle_ratio: Union[float, Sequence[Optional[float]]] = 0.75,
        idle_schedule: str = 'constant',
        bn_momentum: float = 0.1,
        bn_eps: float = 1e-5,
        calibration: Optional[Iterable[Any]] = None,
        anneal_steps: int = 0,
        **kwargs,
) -> Union[nn.Module, ConversionReport]:
    """Turn a timm model into a RePaFormer, in place: from data, over a training, or for training from scratch.

    With ``calibration``, from its own weights: every pointwise FFN becomes three small matrices fitted to the images,
    so that the model computes nearly the same at once, see :func:`timm_rep.convert.linearize_ffns`. Its norms stay.

    With ``anneal_steps``, over the first steps of a training: the function is the pretrained model's in the first one,
    see :func:`timm_rep.convert.anneal_ffns`, and folds after the last with ``model.reparameterize()``.

    With neither, for training from scratch (eq. 3): the FFNs get BatchNorms, which fold afterwards in the same way. For
    models whose FFNs are ``timm.layers.Mlp``: DeiT, DeiT-III, BEiT, CaiT, ConvNeXt, EVA without GLU, Swin, PoolFormer,
    MLP-Mixer, ResMLP, MaxViT, Hiera and others. Existing weights are kept where they have a place: both linear layers,
    layer scales, and the scale and shift of the norms, which become those of the BatchNorms. Idle channels and batch
    statistics change the function, so the model has to be trained. Blocks keep their shortcuts, and a layer scale that
    is a parameter of the block (BEiT, CaiT, ConvNeXt, EVA). Create optimizers after the conversion.

    timm's save_for_hf() and ``timm_rep.export(model, 'folder')`` write the result as a ``repa_any``, folded or not, if
    the model was created with ``timm.create_model`` of timm 1.0.31 or newer.

    Args:
        model: timm model, not wrapped.
        idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1; or one for each FFN,
            with calibration or anneal_steps None for those that stay as they are.
        idle_schedule: 'constant' or 'linear' over all FFNs, see :func:`timm_rep.layers.idle_ratios`; 'constant' with
            calibration or anneal_steps.
        bn_momentum: Momentum of the BatchNorms, which calibration does not add.
        bn_eps: Epsilon of the BatchNorms.
        calibration: Batches of images, a few hundred, preprocessed as for the model.
        anneal_steps: Number of training steps over which the model changes; 0 to change it at once.
        kwargs: Other arguments of :func:`timm_rep.convert.linearize_ffns` or :func:`timm_rep.convert.anneal_ffns`.

    Returns:
        The model, with a method ``reparameterize()``; with calibration the report of the conversion.

    Raises:
        TypeError: model is not a module, a batch has no images, or, with macs, the outputs hold no tensor.
        ValueError: The model has no such FFN, or, for training from scratch, others beside them, such as GLUs,
            which are named; it is wrapped (DDP, torch.compile, features_only) or a RePaFormer already; or idle_ratio or
            idle_schedule is out of range. The model is unchanged.
    """
    if calibration is not None and anneal_steps:
        raise ValueError('Convert either with calibration images or over anneal_steps of a training.')
    if idle_schedule != 'constant' and (calibration is not None or anneal_steps):
        raise ValueError(f"With calibration or anneal_steps, idle_schedule is 'constant', got {idle_schedule!r}.")
    result = model
    args = dict(idle_ratio=plain_ratio(idle_ratio), bn_momentum=bn_momentum, bn_eps=bn_eps)
    if calibration is not None:
        names = [ffn.name for ffn in check_convertible(model)[0]]
        result = linearize_ffns(model, calibration, idle_ratio, **kwargs)
        args = _linearized_args(names, result)
    elif anneal_steps:
        args.update(anneal_steps=anneal_steps, **kwargs)
        anneal_ffns(model, **args)
    elif kwargs:
        raise TypeError(f'{", ".join(kwargs)}: only with calibration or anneal_steps.')
    else:
        check_unconverted(model)
        args.update(idle_schedule=idle_schedule)
        use_repa_ffns(model, **args)
        args.update(norm='batch')
    record_conversion(model, 'repa_any', **args)
    make_foldable(model)
    return result


def _linearized_args(names: Sequence[str], report: ConversionReport) -> Dict[str, Any]:
    """The arguments of ``repa_any`` for what a conversion from data made of the pointwise FFNs of these names."""
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
