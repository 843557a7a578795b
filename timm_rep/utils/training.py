"""Epochs of training on a small data set, for what this package trains itself: Hyper-Search, the demo, ablations.

Training on a large one is the job of timm's train.py.
"""
import contextlib
from typing import Callable, Iterable, List, Optional, Tuple

import torch
import torch.nn as nn
from timm.loss import LabelSmoothingCrossEntropy
from timm.scheduler.scheduler import Scheduler
from timm.utils import AverageMeter, accuracy, random_seed
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

__all__ = ['evaluate', 'fit', 'processes']


def processes() -> Tuple[int, int]:
    """How many processes train together, and which of them this is."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def fit(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler,
        loader: Iterable,
        epochs: int,
        *,
        device: torch.device,
        start: int = 0,
        smoothing: float = 0.1,
        clip_grad: Optional[float] = None,
        amp_dtype: Optional[torch.dtype] = None,
        channels_last: bool = False,
        seed: Optional[int] = None,
        after_epoch: Optional[Callable[[int], None]] = None,
        description: str = 'training',
        progress: bool = True,
) -> List[float]:
    """Train a model in place; in a process group together with the other processes.

    Args:
        model: A classifier on the device.
        optimizer: Of its parameters.
        scheduler: A scheduler of timm's that counts steps.
        loader: Batches of images (N, C, H, W) and targets (N,), the same number every epoch.
        epochs: The epoch to stop before.
        device: Where to train.
        start: The epoch to start with.
        smoothing: Of the labels.
        clip_grad: Largest norm of all gradients; no clipping if None.
        amp_dtype: Autocast to this dtype; none if None.
        channels_last: Give the model its images in channels-last memory.
        seed: Seed the generators of torch, NumPy and Python, and a sampler of the loader that has a set_epoch(), before
            every epoch, so that each depends on the weights it starts from only; left alone if None.
        after_epoch: Called with the number of epochs done.
        description: Of the progress bar.
        progress: Whether to show it.

    Returns:
        The loss of every step.
    """
    steps = len(loader)
    count, rank = processes()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    autocast = contextlib.nullcontext if amp_dtype is None else lambda: torch.autocast(device.type, amp_dtype)
    loss_fn = LabelSmoothingCrossEntropy(smoothing)
    average = AverageMeter()
    losses = []
    model.train()
    parallel = model
    if count > 1:
        parallel = DistributedDataParallel(model, device_ids=None if device.type == 'cpu' else [device])
    with tqdm(total=epochs * steps, initial=start * steps, desc=description, unit='step',
              disable=not progress or rank > 0) as bar:
        for epoch in range(start, epochs):
            if seed is not None:
                _seed_epoch(seed, epoch, loader)
            average.reset()
            of_epoch = []
            for step, (images, targets) in enumerate(loader):
                scheduler.step_update(epoch * steps + step)
                images = images.to(device, non_blocking=True, memory_format=memory_format)
                targets = targets.to(device, non_blocking=True)
                with autocast():
                    loss = loss_fn(parallel(images), targets)
                optimizer.zero_grad()
                loss.backward()
                if clip_grad is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
                optimizer.step()
                of_epoch.append(loss.detach())
                average.update(of_epoch[-1], len(images))
                bar.update()
            losses += torch.stack(of_epoch).tolist()
            bar.set_postfix(epoch=epoch + 1, loss=f'{average.avg:.3f}')
            if after_epoch is not None:
                after_epoch(epoch + 1)
    return losses


def _seed_epoch(seed: int, epoch: int, loader: Iterable) -> None:
    count, rank = processes()
    random_seed(seed + 1 + epoch * count + rank)
    sampler = getattr(loader, 'sampler', None)
    if hasattr(sampler, 'set_epoch'):
        sampler.set_epoch(seed + 1 + epoch)  # a DistributedSampler knows no other seed


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Iterable, device: torch.device) -> Tuple[torch.Tensor, float]:
    """The logits of all images, on the CPU and in their order, and the percentage that is right; in eval mode."""
    model.eval()
    logits, targets = zip(*((model(images.to(device)).cpu(), targets.cpu()) for images, targets in loader))
    logits, targets = torch.cat(logits), torch.cat(targets)
    return logits, accuracy(logits, targets)[0].item()
