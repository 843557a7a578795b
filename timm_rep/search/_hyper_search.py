"""Hyper-Search: training of the scales of a multi-branch net, the constants of a RepOptimizer.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), sections 3.3 and 4.1.
"""
import math
from datetime import date
from numbers import Real
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sized, Union

import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed, unwrap_model

from timm_rep.layers import CslaBlock
from timm_rep.scales import Scales
from timm_rep.scales.scales import check_metadata
from timm_rep.utils.atomic import check_writable
from timm_rep.utils.batches import Loader, batches_of, labelled_images
from timm_rep.utils.checkpoints import write_training_state
from timm_rep.utils.distributed import world_size_and_rank
from timm_rep.utils.files import StrPath
from timm_rep.utils.training import check_not_diverged, check_start, evaluate, fit, load_training_state
from timm_rep.version import __version__

_History = Dict[str, Dict[str, List[float]]]


def parameter_groups(model: nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
    """Parameter groups for Hyper-Search (section 4.1).

    Args:
        model: A model in the search structure.
        weight_decay: Weight decay of kernels and identity scales; other scales, biases and norms have none.

    Returns:
        The group with weight decay and the group without, for a torch optimizer.
    """
    weights = {
        id(weight)
        for layer in model.modules() if isinstance(layer, CslaBlock)
        for weight in layer.weights.values()
    }
    decayed: List[torch.Tensor] = []
    others: List[torch.Tensor] = []
    for param in model.parameters():
        if param.requires_grad:
            (decayed if param.ndim > 1 or id(param) in weights else others).append(param)
    return [{'params': decayed, 'weight_decay': weight_decay}, {'params': others, 'weight_decay': 0.}]


def hyper_search(
        model: Union[str, nn.Module],
        train_loader: Loader,
        val_loader: Optional[Loader] = None,
        *,
        epochs: int = 240,
        lr: float = 0.1,
        warmup_epochs: int = 5,
        weight_decay: float = 4e-5,
        smoothing: float = 0.1,
        clip_grad: Optional[float] = 5.0,
        device: Optional[Union[str, torch.device]] = None,
        amp_dtype: Optional[torch.dtype] = None,
        channels_last: bool = False,
        seed: int = 0,
        checkpoint: Optional[StrPath] = None,
        checkpoint_epochs: int = 1,
        resume: bool = False,
        overwrite: bool = False,
        progress: bool = True,
        metadata: Optional[Mapping[str, str]] = None,
        **model_args: Any,
) -> Scales:
    """Train the search structure of a model and return its scales.

    SGD with Nesterov momentum 0.9, linear warm-up and a cosine schedule. In a process group (``torchrun``) each process
    trains on the batches of its own loader, and all return the same scales.

    Args:
        model: Name of a RepOpt model, or a model in the search structure, which is trained in place.
        train_loader: Batches of images (N, 3, H, W) and targets (N,), exactly ``len(train_loader)`` of them per epoch.
            Its randomness must come from the global random number generators of torch, NumPy and Python: they are
            seeded before each epoch, so that a resumed search equals an uninterrupted one. Workers must not outlive an
            epoch (no ``persistent_workers``). If its sampler has a ``set_epoch()``, as a DistributedSampler has, that
            is called.
        val_loader: Batches to measure the accuracy in the metadata with; not measured if None.
        epochs: Number of epochs.
        lr: Learning rate at the end of the warm-up.
        warmup_epochs: Epochs of warm-up, fewer than ``epochs``.
        weight_decay: Weight decay of kernels and identity scales.
        smoothing: Label smoothing factor, in [0, 1).
        clip_grad: Maximum norm of all gradients together; no clipping if None.
        device: Device to train on; the model's device if None, the CPU for a name.
        amp_dtype: Dtype of autocast, torch.bfloat16; no autocast if None.
        channels_last: Train in channels-last memory format, which is faster on most devices.
        seed: Seed of the initialization and of every epoch.
        checkpoint: File that rank 0 writes during the search; none if None.
        checkpoint_epochs: Epochs between two checkpoints; the last epoch always writes one.
        resume: Continue from the checkpoint if it exists.
        overwrite: Replace an existing checkpoint by a new search.
        progress: Show a progress bar.
        metadata: Further metadata of the scales, such as the dataset.
        model_args: Arguments of create_model, if ``model`` is a name.

    Returns:
        The scales, with the model, the recipe, the date, the package version and the accuracy as metadata, and their
        history.

    Raises:
        TypeError: A loader has no length or batches of something else, or there are model_args without a name.
        ValueError: The model is not in the search structure or cannot be trained, an argument is out of range, a label
            has no class, the metadata are not strings, or the checkpoint belongs to a different search.
        RuntimeError: Weights became infinite or NaN. The checkpoint holds an epoch before.
        OSError: The checkpoint cannot be written, is a folder, or exists without ``resume`` or ``overwrite``.
    """
    _check_recipe(dict(
        epochs=epochs, warmup_epochs=warmup_epochs, checkpoint_epochs=checkpoint_epochs, seed=seed, lr=lr,
        weight_decay=weight_decay, smoothing=smoothing, clip_grad=clip_grad))
    # a checkpoint with numbers of NumPy could not be loaded
    lr, weight_decay, smoothing = float(lr), float(weight_decay), float(smoothing)
    clip_grad = None if clip_grad is None else float(clip_grad)
    recipe = dict(
        epochs=epochs, lr=lr, warmup_epochs=warmup_epochs, weight_decay=weight_decay, smoothing=smoothing,
        clip_grad=clip_grad, seed=seed, amp_dtype=None if amp_dtype is None else str(amp_dtype))
    if amp_dtype not in (None, torch.bfloat16):
        raise ValueError(
            f'amp_dtype must be torch.bfloat16 or None, got {amp_dtype!r}: float16 needs a GradScaler, which '
            'hyper_search does not use.')
    metadata = dict(metadata or {})
    check_metadata(metadata)  # before the search rather than after it
    if resume and checkpoint is None:
        raise ValueError('checkpoint must be given with resume=True, got None.')
    if checkpoint is not None:
        checkpoint = _check_checkpoint(Path(checkpoint), resume, overwrite)
    _check_loaders(train_loader, val_loader)
    random_seed(seed)
    name = model if isinstance(model, str) else type(model).__name__
    model = _search_model(model, model_args)
    device = next(model.parameters()).device if device is None else torch.device(device)
    model = model.to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(
        parameter_groups(model, weight_decay), opt='sgd', lr=lr, momentum=0.9, weight_decay=weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched='cosine',
        num_epochs=epochs,
        warmup_epochs=warmup_epochs,
        warmup_lr=0.,
        warmup_prefix=False,
        step_on_epochs=False,
        updates_per_epoch=len(train_loader),
    )
    world_size, rank = world_size_and_rank()
    settings = dict(
        recipe,
        model=name,
        steps=len(train_loader),
        processes=world_size,
        channels_last=channels_last,
        model_args={key: str(value) for key, value in model_args.items()},
        metadata=metadata,
    )
    start = 0
    history: Dict[str, Any] = {}
    if resume and checkpoint is not None and checkpoint.is_file():
        state = load_training_state(checkpoint, settings, 'search', unwrap_model(model), optimizer, epochs)
        if not isinstance(state.get('history'), dict):
            raise ValueError(f'{str(checkpoint)!r} is damaged (it has no history): delete it to start again.')
        start, history = state['epoch'], state['history']
    check_start(start)

    def after_epoch(done: int) -> None:
        check_not_diverged(model, done)
        _record(history, Scales.from_model(model))
        if checkpoint is not None and rank == 0 and (done % checkpoint_epochs == 0 or done == epochs):
            _save_checkpoint(checkpoint, model, optimizer, settings, done, history)

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
    found = {
        'model': name,
        **{key: str(model_args[key]) for key in ('base',) if key in model_args},
        **{key: str(value) for key, value in recipe.items()},
        'date': date.today().isoformat(),
        'timm_rep': __version__,
        **metadata,
    }
    if val_loader is not None:
        found['accuracy'] = f'{evaluate(model, val_loader, device)[1]:.2f}'
    return Scales(Scales.from_model(model), found, history)


def _check_recipe(recipe: Mapping[str, Any]) -> None:
    for name, least in (('epochs', 1), ('warmup_epochs', 0), ('checkpoint_epochs', 1), ('seed', 0)):
        value = recipe[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f'{name} must be an integer >= {least}, got {value!r}.')
    if recipe['warmup_epochs'] >= recipe['epochs']:
        raise ValueError(
            f'warmup_epochs must be less than epochs, got {recipe["warmup_epochs"]} of {recipe["epochs"]}.')
    for name, is_valid, what in (
            ('lr', lambda x: 0 < x < math.inf, 'a positive finite number'),
            ('weight_decay', lambda x: 0 <= x < math.inf, 'a finite number >= 0'),
            ('smoothing', lambda x: 0 <= x < 1, 'a number in [0, 1)'),
            ('clip_grad', lambda x: x > 0, 'a positive number or None'),
    ):
        value = recipe[name]
        if not (isinstance(value, Real) and is_valid(value)) and (name, value) != ('clip_grad', None):
            raise ValueError(f'{name} must be {what}, got {value!r}.')


def _check_loaders(train_loader: Iterable[Any], val_loader: Optional[Iterable[Any]]) -> None:
    for name, loader in (('train_loader', train_loader), ('val_loader', val_loader)):
        if loader is None:
            continue
        if not isinstance(loader, Sized):
            raise TypeError(f'{name} must define `__len__`, such as a DataLoader or a list, got {loader!r:.100}.')
        if not len(loader):
            raise ValueError(f'{name} must have at least one batch, got none.')
    if val_loader is not None:  # it is read after the last epoch only
        labelled_images(next(batches_of(val_loader)))


def _check_checkpoint(path: Path, resume: bool, overwrite: bool) -> Path:
    check_writable(path.parent)
    if path.is_dir():
        raise IsADirectoryError(f'checkpoint must be a file, got the folder {str(path)!r}.')
    if path.exists() and not (resume or overwrite):
        raise FileExistsError(
            f'The checkpoint {str(path)!r} of an earlier search exists: resume=True (--resume) continues it, '
            'overwrite=True (--overwrite) replaces it by a new one.')
    return path


def _search_model(model: Union[str, nn.Module], model_args: Mapping[str, Any]) -> nn.Module:
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):
        try:
            model = timm.create_model(model, structure='search', **model_args)
        except (AssertionError, AttributeError, LookupError, TypeError) as e:  # arguments of the model
            raise ValueError(
                f"model must name a RepOpt model, built with structure='search' and {model_args}, got {name!r}: "
                f'{type(e).__name__}: {e}'
            ) from e
    elif model_args:
        raise TypeError(f'model must be a name to take arguments of create_model, got a {name} and {model_args}.')
    layers = [layer for layer in model.modules() if isinstance(layer, CslaBlock) and layer.structure == 'search']
    if not layers:
        raise ValueError(f"Expected scales to search, but {name} has none: create it with structure='search'.")
    if model_args.get('features_only') or getattr(model, 'num_classes', None) == 0:
        raise ValueError(f'Expected a classifier to train, but {name} has no classes: create it with num_classes.')
    params = [p for layer in layers for p in layer.parameters()]
    if any(p.is_meta for p in params):
        raise ValueError(f"Expected weights to train, but {name} is on 'meta': create it on another device.")
    if any(p.dtype not in (torch.float32, torch.float64) for p in params):
        raise ValueError(
            f'{name} must be float32 or float64 to be trained, got {params[0].dtype}: call its float(), and pass '
            'amp_dtype=torch.bfloat16 to compute in lower precision.')
    if not all(p.requires_grad for p in params):
        raise ValueError(f'Kernels and scales of {name} must require gradients to be searched: call requires_grad_().')
    return model


def _record(history: _History, scales: Scales) -> None:
    """Add the means of the last layer of each stage to the history."""
    for layers in scales.stages().values():
        for branch, scale in scales[layers[-1]].items():
            history.setdefault(layers[-1], {}).setdefault(branch, []).append(round(scale.mean().item(), 5))


def _save_checkpoint(
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Dict[str, Any],
        epoch: int,
        history: _History,
) -> None:
    write_training_state(path, dict(
        model=unwrap_model(model).state_dict(),
        optimizer=optimizer.state_dict(),
        settings=settings,
        epoch=epoch,
        history=history,
    ))
