"""Time and memory of a conversion from data: conversion."""
import copy
import ctypes
import gc
from functools import partial
from pathlib import Path
from typing import Callable, Optional, Sequence

import timm
import torch
import torch.nn as nn

import timm_rep
from timm_rep.utils.profiling import model_input_size, time_calls

from .timing import speedup, timing_columns

__all__ = ['conversion']

_IMAGES = 256
_MODELS = {'vit_small_patch16_224': {}, 'vit_tiny_patch16_224': {'depth': 24}}


def _peak_memory(call: Callable[[], object]) -> Optional[int]:
    """MB by which the resident memory of this process grows at most in a second call; None where Linux does not say.

    The profiler behind :func:`benchmarks.timing.memory_use` misses what other threads allocate, in which the batches of
    a conversion run.
    """
    status, clear = Path('/proc/self/status'), Path('/proc/self/clear_refs')
    if not status.is_file():
        return None

    def kilobytes(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))

    call()  # imports and buffers that stay
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds
    clear.write_text('5')  # resets the peak
    before = kilobytes('VmRSS')
    call()
    return max(0, kilobytes('VmHWM') - before) // 1000


@torch.no_grad()
def _forward(model: nn.Module, loader: Sequence[torch.Tensor]) -> None:
    for images in loader:
        model(images.to(next(model.parameters())))


def _convert(model: nn.Module, loader: Sequence[torch.Tensor]) -> None:
    timm_rep.convert_to_repa(copy.deepcopy(model), calibration=loader)


def conversion(args):
    """Conversion of a ViT with random weights from 256 images, idle ratio 0.75, and one forward pass over the images.

    'passes': time of the conversion over that of the forward pass, all of the conversion included. 'peak (MB)':
    resident memory that the conversion adds to the model and its images.
    """
    for row in args.pending(model=args.models or _MODELS):
        torch.manual_seed(0)
        model = timm.create_model(row['model'], **_MODELS.get(row['model'], {})).to(args.device).eval()
        size = model_input_size(model)
        loader = [torch.randn(args.batch_size, *size) for _ in range(_IMAGES // args.batch_size)]

        convert = partial(_convert, model, loader)
        peak = _peak_memory(convert)
        times = time_calls(
            {'forward pass': partial(_forward, model, loader), 'conversion': convert}, args.device, args.rounds,
            warmup=0)
        yield {
            **row, 'blocks': len(model.blocks), 'passes': speedup(times['forward pass'], times['conversion']),
            'peak (MB)': peak, **timing_columns(times)}
