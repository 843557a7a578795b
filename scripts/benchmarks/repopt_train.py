"""Training of RepOpt networks: repopt-train, repopt-depth, repopt-any, repopt-parts."""
import statistics
import time
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Tuple

import timm
import torch
import torch.nn as nn
from experiments import experiment, train
from timm.optim import create_optimizer_v2
from torch.profiler import ProfilerActivity, profile

from timm_rep.utils.profiling import count_macs, synchronize, throughput, time_calls

from .repa_train import TrainingStep, time_steps
from .timing import speedup, timing_columns

__all__ = ['repopt_any', 'repopt_depth', 'repopt_parts', 'repopt_train']

# multi-branch networks of timm
_MULTI_BRANCH = ('mobileone_s0', 'mobileone_s1', 'fastvit_t8', 'repvit_m0_9', 'repghostnet_050', 'repvgg_a0')


def largest(fits: Callable[[int], bool], most: int = 2 ** 20, known: int = 0) -> int:
    """Largest n <= most for which ``fits(n)`` holds, or at most 1/64 less; ``known`` is a number that fits."""
    low, high = known, max(2, 2 * known)  # BatchNorm may need more than one image
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def out_of_memory(error: RuntimeError, fewer_fit: bool) -> bool:
    """Whether an error means too little memory.

    cuDNN and cuBLAS raise other errors than torch; those count only if a step with fewer images succeeded before.
    """
    messages = 'CUDNN_STATUS_', 'CUBLAS_STATUS_', 'nable to find an engine'
    return isinstance(error, torch.OutOfMemoryError) or (fewer_fit and any(part in str(error) for part in messages))


def largest_batch(
        create_step: Callable[[torch.Tensor], Callable[[], None]],
        img_size: int,
        gigabytes: float,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        known: int = 0,
) -> int:
    """Largest batch whose training step fits into that much memory of a GPU (MaxBS of table 2), see :func:`largest`.

    Args:
        create_step: Returns the training step on a batch (N, 3, img_size, img_size).
        img_size: Height and width in pixels.
        gigabytes: Memory limit in GB.
        device: GPU.
        dtype: Dtype of the images.
        known: A number of images that fits.
    """
    fewer_fit = known > 0
    before = torch.backends.cudnn.benchmark

    def fits(n):
        nonlocal fewer_fit
        try:
            create_step(torch.randn(n, 3, img_size, img_size, device=device, dtype=dtype))()
        except RuntimeError as e:
            if not out_of_memory(e, fewer_fit):
                raise
            return False
        finally:
            torch.cuda.empty_cache()
        fewer_fit = True
        return True

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1., gigabytes * 2 ** 30 / total), device)
    torch.backends.cudnn.benchmark = False  # else every batch size is tried with all algorithms
    try:
        return largest(fits, known=known)
    finally:
        torch.backends.cudnn.benchmark = before
        torch.cuda.set_per_process_memory_fraction(1., device)


def _sides(device: torch.device) -> Dict[str, Tuple[bool, torch.memory_format]]:
    """Sides of the comparison: whether it is RepOpt-VGG, and its memory format."""
    sides = {
        'RepVGG': (False, torch.contiguous_format),
        'RepVGG, channels-last': (False, torch.channels_last),
        'RepOpt-VGG': (True, torch.contiguous_format),
        'RepOpt-VGG, channels-last': (True, torch.channels_last),
    }
    if device.type == 'cpu':  # some builds of torch crash in the channels-last backward of a strided 1 x 1 convolution
        del sides['RepVGG, channels-last']
    return sides


def _step_of(
        create: Callable[[], nn.Module],
        opt: str,
        memory_format: torch.memory_format,
        args,
) -> Callable[[torch.Tensor], TrainingStep]:
    """Creates training steps, by batch, of a model with an optimizer."""
    torch.manual_seed(0)
    model = create().train().to(args.device, args.dtype, memory_format=memory_format)
    optimizer = create_optimizer_v2(model, opt=opt, lr=1e-3, weight_decay=4e-5)
    return lambda x: TrainingStep(model, x, optimizer=optimizer, amp=args.amp, memory_format=memory_format)


def _vgg_step(name: str, side: str, args) -> Callable[[torch.Tensor], TrainingStep]:
    """Creates training steps, by batch: a RepOpt-VGG with RepSGD or timm's RepVGG of the same size with SGD."""
    repopt, memory_format = _sides(args.device)[side]
    name, opt = (name, 'repsgd') if repopt else (name.replace('opt_', ''), 'sgd')
    return _step_of(partial(timm.create_model, name), opt, memory_format, args)


def _steps(name: str, img_size: int, args) -> Dict[str, TrainingStep]:
    x = torch.randn(args.batch_size, 3, img_size, img_size, device=args.device, dtype=args.dtype)
    return {side: _vgg_step(name, side, args)(x) for side in _sides(args.device)}


def repopt_train(args):
    """Training step of RepOpt-VGG with RepSGD: speedup over timm's RepVGG of the same depth and width with SGD.

    Includes the optimizer's step. Peak memory of a step in MB. On a GPU at 224 pixels also the largest batch in that
    much memory, to one in 64, and the images per second at the largest. 'paper': table 2, at the largest batches.
    """
    sizes = (32, 160, 224) if args.device.type == 'cuda' else (32, 160)
    for row in args.pending(model=args.models or ['repopt_vgg_a0', 'repopt_vgg_b1'], img_size=sizes):
        name, img_size = row.values()
        times, peaks = time_steps(_steps(name, img_size, args), args.rounds)
        row = {
            **row,
            'RepVGG (img/s)': round(throughput(args.batch_size, times)['RepVGG'], 2),
            **{k: speedup(seconds, times['RepVGG']) for k, seconds in times.items() if k != 'RepVGG'},
            'paper': 1.8 if (name, img_size) == ('repopt_vgg_b1', 224) else None,
            **{f'{k}, peak (MB)': round(peak) for k, peak in peaks.items()},
            **timing_columns(times),
        }
        if args.device.type == 'cuda' and img_size == 224:
            for side in _sides(args.device):
                create_step, batch = _vgg_step(name, side, args), 0  # one model at a time in the memory
                for gigabytes in (8, 16, 32):
                    batch = largest_batch(create_step, img_size, gigabytes, args.device, args.dtype, known=batch)
                    row[f'{side}, batch in {gigabytes} GB'] = batch
                x = torch.randn(batch, 3, img_size, img_size, device=args.device, dtype=args.dtype)
                times = time_calls({side: create_step(x)}, args.device, rounds=5, warmup=2)
                row[f'{side}, img/s at that'] = round(throughput(batch, times)[side], 2)
                del create_step, x
        yield row


def _depth_step(settings: Mapping[str, Any], args) -> TrainingStep:
    """Training step of a row of an experiment."""
    memory_format = torch.channels_last if settings['channels_last'] else torch.contiguous_format
    x = torch.randn(args.batch_size, 3, *[settings['img_size']] * 2, device=args.device, dtype=args.dtype)
    return _step_of(partial(train.build, settings, settings['scales']), settings['opt'], memory_format, args)(x)


def repopt_depth(args):
    """Training step of the networks of experiment depth: time over that of the plain network with SGD.

    Includes the optimizer's step. Peak memory of a step in MB.
    """
    scale = 'gpu' if args.device.type == 'cuda' else 'cpu'
    settings = {row.name: row.settings for row in experiment.load('depth', scale).rows}
    sides = {'SGD': 'sgd', 'RepSGD': 'repsgd', 'RepVGG': 'repvgg'}
    for row in args.pending(convolutions=(10, 19, 28)):
        times, peaks = time_steps({
            side: _depth_step(settings[f'{name}-{row["convolutions"]}, best'], args)
            for side, name in sides.items()}, args.rounds)
        yield {
            **row,
            **{side: speedup(times['SGD'], times[side]) for side in sides if side != 'SGD'},
            **{f'{side}, peak (MB)': round(peak) for side, peak in peaks.items()},
            **timing_columns(times),
        }


def _any_steps(name: str, img_size: int, args) -> Dict[str, TrainingStep]:
    """Training steps of a multi-branch network of timm with SGD and of its plain structure with RepSGD."""
    last = torch.channels_last
    sides = {
        'timm': (name, {}, 'sgd', torch.contiguous_format),
        'timm, channels-last': (name, {}, 'sgd', last),
        'RepOpt': ('repopt_any', dict(base=name), 'repsgd', torch.contiguous_format),
        'RepOpt, channels-last': ('repopt_any', dict(base=name), 'repsgd', last),
    }
    if args.device.type == 'cpu':  # as in _sides
        del sides['timm, channels-last']
    x = torch.randn(args.batch_size, 3, img_size, img_size, device=args.device, dtype=args.dtype)
    return {
        side: _step_of(partial(timm.create_model, model_name, **kwargs), opt, memory_format, args)(x)
        for side, (model_name, kwargs, opt, memory_format) in sides.items()}


def repopt_any(args):
    """Training step of multi-branch networks as plain ones with RepSGD: speedup over timm's with SGD.

    Includes the optimizer's step. Peak memory of a step in MB. 'MACs': timm's network divided by the plain one.
    """
    for row in args.pending(model=args.models or _MULTI_BRANCH, img_size=(32, 224)):
        steps = _any_steps(*row.values(), args)
        times, peaks = time_steps(steps, args.rounds)
        macs = {side: count_macs(step.model, step.x.shape[1:]).total for side, step in steps.items()}
        yield {
            **row,
            'timm (img/s)': round(throughput(args.batch_size, times)['timm'], 2),
            **{k: speedup(seconds, times['timm']) for k, seconds in times.items() if k != 'timm'},
            'MACs': round(macs['timm'] / macs['RepOpt'], 2),
            **{f'{k}, peak (MB)': round(peak) for k, peak in peaks.items()},
            **timing_columns(times),
        }


def parts_of_step(step: TrainingStep) -> Dict[str, float]:
    """Profiled milliseconds of a training step: convolutions, norms, the optimizer, the rest.

    Copies made for convolutions belong to the rest. Profiling slows all parts down.
    """
    device = step.x.device
    on_gpu = device.type == 'cuda'
    moments: List[float] = []

    def now(*args) -> None:
        synchronize(device)
        moments.append(1e3 * time.perf_counter())

    hooks = step.optimizer.register_step_pre_hook(now), step.optimizer.register_step_post_hook(now)
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        now()
        step()
        now()
    for hook in hooks:
        hook.remove()
    start, before, after, end = moments
    parts = {'convolutions': 0., 'norms': 0., 'optimizer': after - before}
    for event in profiler.key_averages():
        if event.key.startswith('aten::'):
            part = 'convolutions' if 'conv' in event.key else 'norms' if 'batch_norm' in event.key else None
            if part:
                parts[part] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3
    return {**parts, 'rest': end - start - sum(parts.values())}


def repopt_parts(args):
    """Training step of RepOpt-VGG and of timm's RepVGG by part: profiled milliseconds.

    'GMACs': multiply-accumulates of the forward pass of the batch; the backward pass has twice as many.
    """
    for row in args.pending(model=args.models or ['repopt_vgg_b1'], img_size=(32, 160)):
        steps = _steps(*row.values(), args)
        rounds = [{side: parts_of_step(step) for side, step in steps.items()} for _ in range(1 + args.rounds)][1:]
        for side, step in steps.items():
            yield {
                **row,
                'form': side,
                **{part: float(f'{statistics.median(parts[side][part] for parts in rounds):.3g}')
                   for part in rounds[0][side]},
                'GMACs': float(f'{args.batch_size * count_macs(step.model, step.x.shape[1:]).total / 1e9:.3g}'),
            }
