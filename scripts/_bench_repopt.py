"""The sections of bench.py about training RepOpt-VGG."""
import statistics
import time
from typing import Callable, Dict, List, Tuple

import timm
import torch
from _bench_train import peak_memory, training_step
from _timing import milliseconds, speedup, spreads
from timm.optim import create_optimizer_v2
from torch.profiler import ProfilerActivity, profile

from timm_rep.utils.profiling import count_macs, synchronize, throughput, time_passes

__all__ = ['bench_repopt_parts', 'bench_repopt_train']


def largest(fits: Callable[[int], bool], most: int = 2 ** 20, known: int = 0) -> int:
    """The largest number, up to ``most``, for which ``fits`` is true, or up to 1/64 less; at least ``known``."""
    low, high = known, max(2, 2 * known)  # one image alone may be too few for a BatchNorm
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def out_of_memory(error: RuntimeError, fewer_fit: bool) -> bool:
    """Whether an error says that memory was short.

    The libraries of a GPU have other words for it, which mean it if a step with fewer images went well before.
    """
    words = 'CUDNN_STATUS_', 'CUBLAS_STATUS_', 'nable to find an engine'
    return isinstance(error, torch.OutOfMemoryError) or (fewer_fit and any(word in str(error) for word in words))


def largest_batch(
        step: Callable[[torch.Tensor], None],
        img_size: int,
        gigabytes: float,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        known: int = 0,
) -> int:
    """How many images a training step can take in so much memory of a GPU, ``known`` or more (MaxBS of table 2).

    Found as :func:`largest` has it.
    """
    fewer_fit = known > 0
    trying = torch.backends.cudnn.benchmark

    def fits(n):
        nonlocal fewer_fit
        try:
            step(torch.randn(n, 3, img_size, img_size, device=device, dtype=dtype))
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
    torch.backends.cudnn.benchmark = False  # which would try all algorithms for every number of images
    try:
        return largest(fits, known=known)
    finally:
        torch.backends.cudnn.benchmark = trying
        torch.cuda.set_per_process_memory_fraction(1., device)


def _sides(device: torch.device) -> Dict[str, Tuple[bool, torch.memory_format]]:
    """Of the comparison with RepVGG: whether it is RepOpt-VGG, and in which memory format it trains."""
    sides = {
        'RepVGG': (False, torch.contiguous_format),
        'RepVGG, channels-last': (False, torch.channels_last),
        'RepOpt-VGG': (True, torch.contiguous_format),
        'RepOpt-VGG, channels-last': (True, torch.channels_last),
    }
    if device.type == 'cpu':  # some builds of torch crash there in the 1 x 1 branch of a RepVGG's stem
        del sides['RepVGG, channels-last']
    return sides


def _vgg_step(name: str, side: str, args) -> Callable[[torch.Tensor], None]:
    """The training step of a RepOpt-VGG with RepSGD, or of timm's RepVGG of its depth and width with SGD."""
    repopt, memory_format = _sides(args.device)[side]
    torch.manual_seed(0)
    model = timm.create_model(name if repopt else name.replace('opt_', '')).train()
    model = model.to(args.device, args.dtype, memory_format=memory_format)
    optimizer = create_optimizer_v2(model, opt='repsgd' if repopt else 'sgd', lr=1e-3, weight_decay=4e-5)
    return training_step(model, amp=args.amp, optimizer=optimizer, memory_format=memory_format)


def bench_repopt_train(args):
    """A training step of RepOpt-VGG with RepSGD over one of timm's RepVGG with SGD, of the same depth and width.

    With the optimizer's step; in MB, the peak memory of it. On a GPU at 224 pixels also the largest batch in so much
    memory, to one in 64, and the images per second at that in the most. 'paper': table 2, at the largest batches.
    """
    for name in args.models or ['repopt_vgg_a0', 'repopt_vgg_b1']:
        for img_size in (32, 160, 224) if args.device.type == 'cuda' else (32, 160):
            if args.measured(model=name, img_size=img_size):
                continue
            sides = _sides(args.device)
            steps = {side: _vgg_step(name, side, args) for side in sides}
            x = torch.randn(args.batch_size, 3, img_size, img_size, device=args.device, dtype=args.dtype)
            times = time_passes(steps, x, rounds=args.rounds, warmup=1)
            row = {
                'model': name,
                'img_size': img_size,
                'RepVGG (img/s)': round(throughput(len(x), times)['RepVGG'], 2),
                **{k: speedup(seconds, times['RepVGG']) for k, seconds in times.items() if k != 'RepVGG'},
                'paper': 1.8 if (name, img_size) == ('repopt_vgg_b1', 224) else None,
                **{f'{k}, peak (MB)': round(peak_memory(step, x)) for k, step in steps.items()},
                'ms': milliseconds(times),
                'spread (%)': spreads(times),
            }
            del steps
            if args.device.type == 'cuda' and img_size == 224:
                for side in sides:
                    step, batch = _vgg_step(name, side, args), 0  # one by one, alone in the memory
                    for gigabytes in (8, 16, 32):
                        batch = largest_batch(step, img_size, gigabytes, args.device, args.dtype, known=batch)
                        row[f'{side}, batch in {gigabytes} GB'] = batch
                    x = torch.randn(batch, 3, img_size, img_size, device=args.device, dtype=args.dtype)
                    row[f'{side}, img/s at that'] = round(
                        throughput(batch, time_passes({side: step}, x, rounds=5, warmup=2))[side], 2)
                    del step, x
            yield row


def parts_of_step(step: Callable[[torch.Tensor], None], x: torch.Tensor) -> Dict[str, float]:
    """Milliseconds of a training step that go into convolutions, norms, the optimizer and all else.

    What convolutions copy is something else. All of it takes longer than in a step that nobody watches.
    """
    on_gpu = x.device.type == 'cuda'

    def now(*args) -> None:
        synchronize(x.device)
        moments.append(1e3 * time.perf_counter())

    moments: List[float] = []
    hooks = step.optimizer.register_step_pre_hook(now), step.optimizer.register_step_post_hook(now)
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        now()
        step(x)
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


def bench_repopt_parts(args):
    """Where the time of a training step of RepOpt-VGG and of timm's RepVGG goes: milliseconds by part, profiled.

    'GMACs': of the forward pass, of the batch; backward takes twice as many.
    """
    for name in args.models or ['repopt_vgg_b1']:
        for img_size in (32, 160):
            if args.measured(model=name, img_size=img_size):
                continue
            sides = {side: _vgg_step(name, side, args) for side in _sides(args.device)}
            x = torch.randn(args.batch_size, 3, img_size, img_size, device=args.device, dtype=args.dtype)
            found: Dict[str, List[Dict[str, float]]] = {side: [] for side in sides}
            for i in range(1 + args.rounds):
                for side, step in sides.items():
                    parts = parts_of_step(step, x)
                    if i:
                        found[side].append(parts)
            for side, step in sides.items():
                yield {
                    'model': name,
                    'img_size': img_size,
                    'form': side,
                    **{part: float(f'{statistics.median(parts[part] for parts in found[side]):.3g}')
                       for part in found[side][0]},
                    'GMACs': float(f'{len(x) * count_macs(step.model, x.shape[1:]).total / 1e9:.3g}'),
                }
