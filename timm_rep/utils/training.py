"""A small training loop for Hyper-Search, distillation, the demo and experiments."""
import contextlib
import hashlib
import math
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import AverageMeter, accuracy, random_seed
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from .batches import Loader, batches_of, labelled_images
from .checkpoints import read_training_state, write_training_state
from .compare import name_of_not_finite
from .data import Images
from .distributed import world_size_and_rank
from .preprocessing import PREPROCESSING


def fit(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler,
        loader: Loader,
        epochs: int,
        *,
        device: torch.device,
        start: int = 0,
        teacher: Optional[nn.Module] = None,
        smoothing: float = 0.1,
        clip_grad: Optional[float] = None,
        amp_dtype: Optional[torch.dtype] = None,
        channels_last: bool = False,
        seed: Optional[int] = None,
        after_epoch: Optional[Callable[[int], None]] = None,
        description: str = 'training',
        progress: bool = True,
) -> List[float]:
    """Train a classifier in place; in a process group, data-parallel.

    The loss is label-smoothed cross entropy; with a teacher the Kullback-Leibler divergence from its outputs, or of
    one output the squared difference, without labels.

    Args:
        model: A classifier on ``device``.
        optimizer: Optimizer of its parameters.
        scheduler: A timm scheduler that is updated each step.
        loader: Batches of images (N, C, H, W) and targets (N,), the same number every epoch.
        epochs: Number of epochs of the whole training.
        device: Device to train on.
        start: Index of the first epoch, the number of epochs done by an earlier run.
        teacher: Model in eval mode on ``device`` to distil from; None to train on the targets.
        smoothing: Label smoothing factor.
        clip_grad: Maximum norm of all gradients together; no clipping if None.
        amp_dtype: Dtype of autocast; no autocast if None.
        channels_last: Move the images to channels-last memory format.
        seed: If given, reseeds the global random number generators of torch, NumPy and Python, and the loader's sampler
            by its ``set_epoch()`` if it has one, before each epoch, so that an epoch depends only on its initial
            weights and a resumed run is reproducible. None leaves the generators alone.
        after_epoch: Called after each epoch with the number of epochs done.
        description: Label of the progress bar.
        progress: Show a progress bar.

    Returns:
        The loss of each step.
    """
    steps = len(loader)
    world_size, rank = world_size_and_rank()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    autocast = contextlib.nullcontext if amp_dtype is None else lambda: torch.autocast(device.type, amp_dtype)
    loss_fn = LabelSmoothingCrossEntropy(smoothing)
    average = AverageMeter()
    losses: List[float] = []
    model.train()
    parallel = model
    if world_size > 1:
        parallel = DistributedDataParallel(model, device_ids=None if device.type == 'cpu' else [device])
    with tqdm(total=epochs * steps, initial=start * steps, desc=description, unit='step',
              disable=not progress or rank > 0) as bar:
        for epoch in range(start, epochs):
            if seed is not None:
                _seed_epoch(seed, epoch, loader)
            average.reset()
            epoch_losses = []
            for step, batch in enumerate(batches_of(loader)):
                images, targets = batch if teacher is not None else labelled_images(batch)
                scheduler.step_update(epoch * steps + step)
                images = images.to(device, non_blocking=True, memory_format=memory_format)
                # checking labels on a GPU would wait for it, so only its first batch is checked
                if teacher is None and (targets.device.type == 'cpu' or not (losses or step)):
                    _check_labels(targets, getattr(model, 'num_classes', math.inf))
                targets = targets.to(device, torch.long, non_blocking=True)
                with autocast():
                    outputs = parallel(images)
                    loss = loss_fn(outputs, targets) if teacher is None else _divergence(outputs, teacher, images)
                optimizer.zero_grad()
                loss.backward()
                if clip_grad is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
                optimizer.step()
                epoch_losses.append(loss.detach())
                average.update(epoch_losses[-1], len(images))
                bar.update()
            losses += torch.stack(epoch_losses).tolist()
            bar.set_postfix(epoch=epoch + 1, loss=f'{average.avg:.3f}')
            if world_size > 1:
                _share_statistics(model)
            if after_epoch is not None:
                after_epoch(epoch + 1)
    return losses


@torch.no_grad()
def _share_statistics(model: nn.Module) -> None:
    """Give all ranks the statistics of rank 0, as DistributedDataParallel does only before the next step."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.broadcast(buffer, 0)


def _check_labels(targets: torch.Tensor, num_classes: float) -> None:
    """Raise TypeError or ValueError if labels are not indices of classes."""
    if targets.is_floating_point():
        raise TypeError(f'Labels must be integers, the indices of classes, got {targets.dtype}.')
    low, high = (bound.item() for bound in targets.aminmax())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f'Labels must be from 0 to {num_classes - 1}, for the classes of the model, got {low} to {high}: set '
            'num_classes.')


def _divergence(outputs: torch.Tensor, teacher: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = teacher(images).float()
    if target.shape[1] == 1:  # of which the softmax is constant
        return F.mse_loss(outputs.float(), target)
    target = target.log_softmax(1)
    return F.kl_div(outputs.float().log_softmax(1), target, log_target=True, reduction='batchmean')


def _seed_epoch(seed: int, epoch: int, loader: Iterable[Any]) -> None:
    world_size, rank = world_size_and_rank()
    random_seed(seed + 1 + epoch * world_size + rank)
    sampler = getattr(loader, 'sampler', None)
    if sampler is not None and hasattr(sampler, 'set_epoch'):
        sampler.set_epoch(seed + 1 + epoch)  # a DistributedSampler shuffles by its own seed


def check_not_diverged(model: nn.Module, epochs: int) -> None:
    """Raise RuntimeError if a weight or a running statistic is not finite after the given number of epochs."""
    name = name_of_not_finite(model)
    if name is not None:
        raise RuntimeError(
            f'The training of {type(model).__name__} diverged in epoch {epochs}: {name} is not finite. Train with a '
            'smaller lr.')


def check_start(epoch: int) -> None:
    """Raise ValueError unless all processes of a group start from the same epoch."""
    world_size, _ = world_size_and_rank()
    starts = [epoch]
    if world_size > 1:
        starts *= world_size
        torch.distributed.all_gather_object(starts, epoch)
    if len(set(starts)) > 1:
        raise ValueError(
            f'All processes must start from the same epoch, got {starts}: put the checkpoint into a folder that all of '
            'them see.')


def load_training_state(
        path: Path,
        settings: Mapping[str, Any],
        training: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        epochs: int,
) -> Dict[str, Any]:
    """Load the file of an interrupted training into model and optimizer.

    Args:
        path: File with 'model', 'optimizer' and 'epoch', the number of epochs done.
        settings: As for :func:`timm_rep.utils.checkpoints.read_training_state`.
        training: Likewise.
        model: Model of the training.
        optimizer: Its optimizer.
        epochs: Number of epochs of the training.

    Returns:
        The content of the file.

    Raises:
        ValueError: It is damaged, or its run had other settings.
    """
    state = read_training_state(path, settings, training)
    try:
        epoch = state['epoch']
        if not isinstance(epoch, int) or not 0 <= epoch <= epochs:
            raise ValueError(f'epoch must be an integer from 0 to {epochs}, got {epoch!r}')
        model.load_state_dict(state['model'])
        optimizer.load_state_dict(state['optimizer'])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f'{str(path)!r} is damaged ({type(e).__name__}: {e}): delete it to start again.') from e
    return state


def check_distillation(epochs: int, lr: float = 1.) -> None:
    """Raise ValueError unless epochs is an integer >= 0 and lr a finite number > 0."""
    if not isinstance(epochs, int) or epochs < 0:
        raise ValueError(f'The number of distillation epochs must be an integer >= 0, got {epochs!r}.')
    if not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise ValueError(f'lr must be a finite number > 0, got {lr!r}.')


def distil(
        model: nn.Module,
        teacher: nn.Module,
        images: Images,
        epochs: int,
        lr: float,
        weight_decay: float = 1e-4,
        checkpoint: Optional[Path] = None,
        resume: bool = False,
        settings: Optional[Mapping[str, Any]] = None,
) -> None:
    """Train a model, in place, on the outputs of a teacher, without labels.

    AdamW with a cosine schedule; the loss is the Kullback-Leibler divergence of the two outputs, or their squared
    difference if the models have one output. The global random number generators of torch, NumPy and Python are seeded.
    In a process group the ranks split the images, and rank 0 writes the checkpoint.

    Args:
        model: Converted or quantized model.
        teacher: Original model; it is moved to the device of the images, in eval mode.
        images: Images to train on.
        epochs: Number of epochs.
        lr: Learning rate of the first step.
        weight_decay: Weight decay of the weight matrices.
        checkpoint: File for the state after every epoch, to resume from.
        resume: Continue from that file, if it exists.
        settings: Further settings that must not change if the distillation is resumed.

    Raises:
        RuntimeError: Weights became infinite or NaN. The checkpoint holds the epoch before.
        ValueError: epochs or lr is out of range, the checkpoint is damaged or of other settings, or the processes of a
            group do not all see it.
    """
    check_distillation(epochs, lr)
    lr, weight_decay = float(lr), float(weight_decay)  # a checkpoint with numbers of NumPy could not be loaded
    device = images.device
    model.to(device)
    if not epochs:
        model.eval()
        return
    teacher.to(device).eval()
    loader = images.training()
    optimizer = create_optimizer_v2(model, opt='adamw', lr=lr, weight_decay=weight_decay)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs * len(loader), t_in_epochs=False)
    start = 0
    if checkpoint is not None:
        # other classes of images need none of these
        config = getattr(images, 'config', {})
        own = {
            name: getattr(images, attribute) for name, attribute in (('batch_size', 'batch_size'), ('images', 'digest'))
            if hasattr(images, attribute)}
        settings = dict(
            settings or {}, teacher=_digest(teacher, values=True), student=_digest(model), epochs=epochs, lr=lr,
            weight_decay=weight_decay, steps=len(loader), seed=images.seed,
            **own, **{name: config[name] for name in PREPROCESSING if name in config})
    if resume and checkpoint is not None and checkpoint.is_file():
        start = load_training_state(checkpoint, settings or {}, 'distillation', model, optimizer, epochs)['epoch']
    check_start(start)

    def after_epoch(epoch: int) -> None:
        check_not_diverged(model, epoch)
        if checkpoint is not None and world_size_and_rank()[1] == 0:
            write_training_state(checkpoint, dict(
                settings=settings, model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch))

    fit(
        model, optimizer, scheduler, loader, epochs, device=device, start=start, teacher=teacher, clip_grad=1.,
        seed=images.seed, after_epoch=after_epoch, description='distillation')
    model.eval()


def _digest(model: nn.Module, values: bool = False) -> str:
    """A digest of the names and shapes of a model's parameters and buffers and, on request, of their values."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f'{name} {tuple(value.shape)}\n'.encode())
        if values:
            digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return f'sha256:{digest.hexdigest()[:12]}'


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Iterable[Any], device: torch.device) -> Tuple[torch.Tensor, float]:
    """Evaluate a classifier, which is left in eval mode.

    Args:
        model: A classifier on ``device``.
        loader: Batches of images (N, C, H, W) and targets (N,).
        device: Device of the model.

    Returns:
        The logits of all images (images, classes) on the CPU, and the top-1 accuracy in percent.
    """
    model.eval()
    outputs: List[Tuple[torch.Tensor, torch.Tensor]] = []
    for images, targets in map(labelled_images, batches_of(loader)):
        logits = model(images.to(device))
        if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
            raise ValueError(
                f'The outputs of {type(model).__name__} must be logits (images, classes) to have an accuracy.')
        outputs.append((logits.cpu(), targets.cpu()))
    if not outputs:
        raise ValueError('Expected images to measure the accuracy on, but the loader has none.')
    logits, targets = map(torch.cat, zip(*outputs))
    return logits, accuracy(logits, targets)[0].item()
