"""Hyper-Search: the constants of a RepOptimizer are the trained scales of a multi-branch net.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.3 and 4.1.
"""
import os
from datetime import date
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed, unwrap_model

from timm_rep.layers import CslaBlock
from timm_rep.scales import Scales
from timm_rep.utils.atomic import check_writable, replacing_files
from timm_rep.utils.training import evaluate, fit, processes
from timm_rep.version import __version__

__all__ = ['hyper_search', 'parameter_groups']

_History = Dict[str, Dict[str, List[float]]]


def parameter_groups(model: nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
    """Weight decay on kernels and identity scales; none on the other scales, biases and norms (section 4.1)."""
    weights = {
        id(weight)
        for layer in model.modules() if isinstance(layer, CslaBlock)
        for weight in layer.weights.values()
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1 or id(p) in weights]
    chosen = {id(p) for p in decayed}
    return [
        {'params': decayed, 'weight_decay': weight_decay},
        {'params': [p for p in trained if id(p) not in chosen], 'weight_decay': 0.},
    ]


def hyper_search(
        model: Union[str, nn.Module],
        train_loader: Iterable,
        val_loader: Optional[Iterable] = None,
        *,
        epochs: int = 240,
        lr: float = 0.1,
        warmup_epochs: int = 5,
        weight_decay: float = 4e-5,
        smoothing: float = 0.1,
        clip_grad: Optional[float] = 5.0,
        device: Union[str, torch.device] = 'cpu',
        amp_dtype: Optional[torch.dtype] = None,
        channels_last: bool = False,
        seed: int = 0,
        checkpoint: Optional[Union[str, os.PathLike]] = None,
        checkpoint_epochs: int = 1,
        resume: bool = False,
        progress: bool = True,
        metadata: Optional[Dict[str, str]] = None,
        **model_args,
) -> Scales:
    """Train the search structure of a model; its scales in the end are the constants of the RepOptimizer.

    SGD with Nesterov momentum 0.9, a cosine schedule after a linear warm-up. In a process group (``torchrun``) every
    process trains on the batches of its own loader, and all return the same scales.

    Args:
        model: Name of a RepOpt model, or one in its search structure, which is trained in place.
        train_loader: Batches of images (N, 3, H, W) and targets (N,), the same number every epoch. Its randomness comes
            from torch's, NumPy's and Python's generators, which are seeded anew before each epoch, so that a resumed
            search is the uninterrupted one; workers must not outlive an epoch (no ``persistent_workers``). Where its
            sampler has a ``set_epoch()``, as a DistributedSampler, that is called.
        val_loader: Batches for the accuracy in the metadata; none if None.
        epochs: Passes over the training images.
        lr: Learning rate at the end of the warm-up.
        warmup_epochs: Epochs of warm-up, fewer than epochs.
        weight_decay: On kernels and identity scales.
        smoothing: Of the labels.
        clip_grad: Largest norm of all gradients; no clipping if None.
        device: Where to train.
        amp_dtype: Autocast to this dtype, torch.bfloat16 for example; float32 if None.
        channels_last: Train in channels-last memory, which is faster on most devices.
        seed: Of the initialization and of every epoch.
        checkpoint: A file that is replaced after an epoch, by the first process; none if None.
        checkpoint_epochs: After every how many epochs, and after the last.
        resume: Go on from the checkpoint, if there is one.
        progress: Show a progress bar.
        metadata: What else to note in the Scales: the data set, for example.
        model_args: Arguments of create_model, where model is a name.

    Returns:
        The scales, with the model, the recipe, the date, this package's version and the accuracy as metadata.

    Raises:
        ValueError: The model is not in its search structure, a number is out of range, or the checkpoint is that of
            another search.
        OSError: The checkpoint cannot be written.
    """
    if not 0 <= warmup_epochs < epochs:
        raise ValueError(f'warmup_epochs is less than epochs, got {warmup_epochs} of {epochs}.')
    if checkpoint_epochs < 1:
        raise ValueError(f'checkpoint_epochs is at least 1, got {checkpoint_epochs}.')
    checkpoint = None if checkpoint is None else Path(checkpoint)
    if checkpoint is not None:
        check_writable(checkpoint.parent)
    name = model if isinstance(model, str) else type(model).__name__
    random_seed(seed)
    if isinstance(model, str):
        try:
            model = timm.create_model(model, structure='search', **model_args)
        except TypeError as e:
            raise ValueError(
                f"{name} cannot be built with structure='search', which RepOpt models can, and {model_args}: {e}"
            ) from e
    if not any(isinstance(layer, CslaBlock) and layer.structure == 'search' for layer in model.modules()):
        raise ValueError(f"{name} has no scales to search: create it with structure='search'.")
    for what, loader in (('train_loader', train_loader), ('val_loader', val_loader)):
        if loader is not None and not len(loader):
            raise ValueError(f'{what} has no batches.')
    device = torch.device(device)
    model = model.to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(
        parameter_groups(model, weight_decay), opt='sgd', lr=lr, momentum=0.9, weight_decay=weight_decay)
    steps = len(train_loader)
    count, rank = processes()
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched='cosine',
        num_epochs=epochs,
        warmup_epochs=warmup_epochs,
        warmup_lr=0.,
        warmup_prefix=False,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    recipe = dict(
        epochs=epochs, lr=lr, warmup_epochs=warmup_epochs, weight_decay=weight_decay, smoothing=smoothing,
        clip_grad=clip_grad, seed=seed, amp_dtype=None if amp_dtype is None else str(amp_dtype))
    settings = dict(
        recipe, model=name, steps=steps, processes=count, channels_last=channels_last,
        **{what: {k: str(v) for k, v in of.items()} for what, of in (
            ('model_args', model_args), ('metadata', metadata or {}))})
    start, history = 0, {}
    if resume and checkpoint is not None and checkpoint.is_file():
        start, history = _resume(checkpoint, model, optimizer, settings)
    _check_start(start, count)

    def after_epoch(done: int) -> None:
        _record(history, Scales.from_model(model))
        if checkpoint is not None and rank == 0 and (done % checkpoint_epochs == 0 or done == epochs):
            _save(checkpoint, model, optimizer, settings, done, history)

    fit(
        model,
        optimizer,
        scheduler,
        train_loader,
        epochs,
        device=device,
        start=start,
        smoothing=smoothing,
        clip_grad=clip_grad,
        amp_dtype=amp_dtype,
        channels_last=channels_last,
        seed=seed,
        after_epoch=after_epoch,
        description=f'searching {name}',
        progress=progress,
    )
    noted = {
        'model': name,
        **{k: str(v) for k, v in recipe.items()},
        'date': date.today().isoformat(),
        'timm_rep': __version__,
        **(metadata or {}),
    }
    if val_loader is not None:
        noted['accuracy'] = f'{evaluate(model, val_loader, device)[1]:.2f}'
    return Scales(Scales.from_model(model), noted, history)


def _check_start(start: int, count: int) -> None:
    starts = [start]
    if count > 1:
        starts = [None] * count
        torch.distributed.all_gather_object(starts, start)
    if len(set(starts)) > 1:
        raise ValueError(
            f'The processes would start from the epochs {starts}: the checkpoint is to be where all of them see it.')


def _record(history: _History, scales: Scales) -> None:
    """Add the means of the last layer of each stage."""
    for layers in scales.stages().values():
        for branch, scale in scales[layers[-1]].items():
            history.setdefault(layers[-1], {}).setdefault(branch, []).append(round(scale.mean().item(), 5))


def _save(
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Dict[str, Any],
        epoch: int,
        history: _History,
) -> None:
    state = dict(
        model=unwrap_model(model).state_dict(),
        optimizer=optimizer.state_dict(),
        settings=settings,
        epoch=epoch,
        history=history,
    )
    with replacing_files(path.parent) as temporary:
        torch.save(state, temporary / path.name)


def _resume(
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Dict[str, Any],
) -> Tuple[int, _History]:
    """Load a checkpoint; returns how many epochs are done, and their history."""
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # whatever torch makes of a damaged file
        raise ValueError(f'{str(path)!r} cannot be read as the checkpoint of a search: {type(e).__name__}: {e}') from e
    found = state.get('settings', {}) if isinstance(state, dict) else {}
    others = [f'{k} is {found.get(k)!r} there and {v!r} here' for k, v in settings.items() if found.get(k) != v]
    if others:
        raise ValueError(f'{str(path)!r} is the checkpoint of another search: {", ".join(others)}.')
    unwrap_model(model).load_state_dict(state['model'])
    optimizer.load_state_dict(state['optimizer'])
    return state['epoch'], state['history']
