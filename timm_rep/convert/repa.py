"""A RePaFormer of any timm model: the ways to convert it, as one function."""
from functools import partial
from typing import Any, Iterable, Optional, Sequence, Union

import torch.nn as nn

from .anneal import anneal_ffns
from .ffn import use_repa_ffns
from .linearize import linearize_ffns
from .reparameterize import check_loaded_structure, check_unconverted, reparameterize
from .report import ConversionReport

__all__ = ['convert_to_repa']


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

    Args:
        model: timm model, not wrapped.
        idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1; with calibration or
            anneal_steps also one for each FFN, None for those that stay as they are.
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
        TypeError: model is not a module, or a batch has no images.
        ValueError: The model has no such FFN, or, for training from scratch, others beside them, such as GLUs,
            which are named; it is wrapped (DDP, torch.compile, features_only) or a RePaFormer already; or idle_ratio or
            idle_schedule is out of range. The model is unchanged.
    """
    if calibration is not None and anneal_steps:
        raise ValueError('Convert either with calibration images or over anneal_steps of a training.')
    if idle_schedule != 'constant' and (calibration is not None or anneal_steps):
        raise ValueError(f"With calibration or anneal_steps, idle_schedule is 'constant', got {idle_schedule!r}.")
    if calibration is not None:
        return linearize_ffns(model, calibration, idle_ratio, **kwargs)
    if anneal_steps:
        anneal_ffns(model, anneal_steps, idle_ratio, bn_momentum=bn_momentum, bn_eps=bn_eps, **kwargs)
    elif kwargs:
        raise TypeError(f'{", ".join(kwargs)}: only with calibration or anneal_steps.')
    else:
        check_unconverted(model)
        use_repa_ffns(model, idle_ratio, idle_schedule, bn_momentum, bn_eps)
    model.register_load_state_dict_pre_hook(check_loaded_structure)
    # an attribute of the instance, since timm's class has no such method; a partial is copied and pickled with it
    model.reparameterize = partial(reparameterize, model)
    return model
