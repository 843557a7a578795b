"""Calibration of BatchNorm statistics from data, for weights from a model without BatchNorms."""
import contextlib
import fnmatch
from itertools import islice
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import BatchNormAct2d

from timm_rep.utils.batches import batch_images, batches_of
from timm_rep.utils.modes import keeping_modes


@torch.no_grad()
def calibrate_batchnorm(
        model: nn.Module,
        loader: Iterable[Any],
        batches: Optional[int] = None,
        identity_norms: Union[str, Sequence[str]] = (),
) -> nn.Module:
    """Set the running statistics of all BatchNorms of a model from a dataset, in place.

    The statistics are averages over the batches with equal weights. During calibration, every BatchNorm normalizes by
    its batch, and all other modules are in eval mode; then the modes are restored. BatchNorms that do not run, such as
    those of an auxiliary head, keep their statistics. An error leaves all statistics unchanged.

    Args:
        model: A model with BatchNorms, such as a RePaFormer with the weights of a plain model, see
            :func:`timm_rep.weight_select_init`.
        loader: Batches of images (N, C, H, W) on any device; tuples or lists with the images first; or dicts with
            one tensor of images.
        batches: Number of batches to use, all if None.
        identity_norms: Name patterns of BatchNorms to turn into the identity in eval mode, by setting scale and shift
            to undo the running statistics: ``['*.mlp.norm2']`` brings a RePaFormer closest to the plain model.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module, or a batch has no tensor of images.
        ValueError: The model has no BatchNorm with running statistics, a pattern matches none with a scale and a shift,
            batches is no positive integer, the loader is empty, or the statistics are not finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'model must be a torch.nn.Module, got {model!r:.100}.')
    if batches is not None and (not isinstance(batches, int) or batches < 1):
        raise ValueError(f'batches must be an integer >= 1 or None, got {batches!r}.')
    norms = {
        name: m for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    }
    if not norms:
        raise ValueError(f'model must have a BatchNorm with running statistics, got {type(model).__name__} without.')
    patterns = [identity_norms] if isinstance(identity_norms, str) else identity_norms
    identities = [norm for name, norm in norms.items() if any(fnmatch.fnmatch(name, p) for p in patterns)]
    unknown = [p for p in patterns if not fnmatch.filter(norms, p)]
    if unknown or any(norm.weight is None for norm in identities):
        raise ValueError(f'identity_norms must match BatchNorms with a scale and a shift, got {unknown or patterns}.')
    before = {norm: (norm.momentum, {k: v.clone() for k, v in norm.named_buffers()}) for norm in norms.values()}
    like = next(model.parameters(), next(iter(norms.values())).running_mean)
    if like.is_meta:
        raise ValueError(f'Expected weights, but {type(model).__name__} is on the meta device: load them first.')
    count = 0
    hooks = contextlib.ExitStack()
    hooks.enter_context(keeping_modes(model))
    try:
        for norm in identities:
            hooks.enter_context(norm.register_forward_hook(_pass_input))
        model.eval()
        for norm in norms.values():
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # average over all batches
        for batch in islice(batches_of(loader), batches):
            images = batch_images(batch)
            if not len(images):
                continue
            model(images.to(device=like.device, dtype=like.dtype))
            count += 1
        if count == 0:
            raise ValueError('Expected a loader with images, but got none; nothing was changed.')
        for name, norm in norms.items():
            if not (norm.running_mean.isfinite().all() and norm.running_var.isfinite().all()):
                raise ValueError(
                    f'The statistics of {name} must be finite: check the images, and the weights before it, for NaN '
                    'and infinite values. Nothing was changed.')
        _restore({norm: saved for norm, saved in before.items() if not norm.num_batches_tracked})
    except BaseException:
        _restore(before)
        raise
    finally:
        hooks.close()
        for norm, (momentum, _) in before.items():
            norm.momentum = momentum
    for norm in identities:
        norm.weight.copy_((norm.running_var + norm.eps).sqrt())
        norm.bias.copy_(norm.running_mean)
    return model


def _restore(before: Mapping[nn.Module, Tuple[Any, Dict[str, torch.Tensor]]]) -> None:
    """Set the buffers of BatchNorms."""
    for norm, (_, buffers) in before.items():
        for name, value in buffers.items():
            getattr(norm, name).copy_(value)


def _pass_input(norm: nn.Module, args: Sequence[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """The input in place of the normalized one, with the dropout and activation of timm's BatchNormAct2d."""
    x, = args
    return norm.act(norm.drop(x.clone())) if isinstance(norm, BatchNormAct2d) else x
