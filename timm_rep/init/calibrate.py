"""Statistics of BatchNorms, from data, where weights come from a model that has none."""
import fnmatch
from itertools import islice
from typing import Any, Iterable, Optional, Sequence, Union

import torch
import torch.nn as nn

__all__ = ['calibrate_batchnorm']


@torch.no_grad()
def calibrate_batchnorm(
        model: nn.Module,
        loader: Iterable[Any],
        batches: Optional[int] = None,
        neutral: Union[str, Sequence[str]] = (),
) -> nn.Module:
    """Set the running statistics of all BatchNorms of a model to those of a data set, in place.

    They become averages over the batches, each of the same weight. While they are taken a BatchNorm normalizes by its
    batch and everything else is in eval mode, whatever the model's mode, which it has again afterwards.

    Args:
        model: A model, such as a RePaFormer with the weights of a plain one, see :func:`timm_rep.weight_select_init`.
        loader: Batches of images (N, C, H, W) of any device, alone or first in a tuple or list.
        batches: How many to take, all if None.
        neutral: Patterns of names of BatchNorms that are to be the identity, scale and shift undoing their statistics:
            ``['*.mlp.norm2']`` for a RePaFormer that is to start as close to the plain model as it can.

    Returns:
        The model.

    Raises:
        ValueError: There is no BatchNorm with running statistics, no such name or no batch.
    """
    norms = {
        name: m for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    }
    if not norms:
        raise ValueError(f'{type(model).__name__} has no BatchNorm with running statistics.')
    neutral = [neutral] if isinstance(neutral, str) else neutral
    identities = [norm for name, norm in norms.items() if any(fnmatch.fnmatch(name, p) for p in neutral)]
    unknown = [p for p in neutral if not fnmatch.filter(norms, p)]
    if unknown or any(norm.weight is None for norm in identities):
        raise ValueError(f'neutral names BatchNorms with a scale and a shift; {unknown or neutral} does not.')
    modes = {m: m.training for m in model.modules()}
    before = {norm: (norm.momentum, {k: v.clone() for k, v in norm.named_buffers()}) for norm in norms.values()}
    # these only watch
    hooks = [norm.register_forward_hook(lambda _, args, output: args[0]) for norm in identities]
    like = next(model.parameters())
    count = 0
    try:
        model.eval()
        for norm in norms.values():
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # an average over all batches
        for batch in islice(loader, batches):
            images = batch[0] if isinstance(batch, (tuple, list)) else batch
            model(images.to(device=like.device, dtype=like.dtype))
            count += 1
        if count == 0:
            raise ValueError('The loader has no batches; nothing was changed.')
    except BaseException:
        for norm, (_, buffers) in before.items():
            for name, value in buffers.items():
                getattr(norm, name).copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for m, training in modes.items():
            m.training = training
        for norm, (momentum, _) in before.items():
            norm.momentum = momentum
    for norm in identities:
        norm.weight.copy_((norm.running_var + norm.eps).sqrt())
        norm.bias.copy_(norm.running_mean)
    return model
