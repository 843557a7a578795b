"""The sections of bench.py about training."""
import copy
import itertools
import statistics
import time
from typing import Callable, Dict, List, Tuple

import timm
import torch
import torch.nn as nn
from _timing import milliseconds, speedup, spreads
from timm.optim import create_optimizer_v2
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from timm_rep.layers import RePaMlp, set_fast_train, use_fast_train
from timm_rep.layers.idle_training import idle_matrix_pays
from timm_rep.paper import VANILLA
from timm_rep.profiling import throughput, time_passes

__all__ = ['bench_ffn_train', 'bench_repa_train', 'bench_repopt_parts', 'bench_repopt_train']


class ReleasedForm(nn.Module):
    """The FFN of a RePaMlp as equations 3 and 4 have it: all channels activated, and those kept that a mask says."""

    def __init__(self, mlp: RePaMlp):
        super().__init__()
        self.mlp = mlp
        weight = mlp.fc1.weight
        mask = (torch.arange(mlp.act.channels, device=weight.device) < mlp.act.active_channels).to(weight.dtype)
        self.register_buffer('mask', mask.view(-1, 1, 1) if mlp.use_conv else mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mlp = self.mlp
        y = mlp.norm1(x if mlp.use_conv else x.reshape(-1, x.shape[-1]))
        y = mlp.fc1(y)
        mask = self.mask.to(y.dtype)
        y = mask * mlp.act.act(y) + (1 - mask) * y
        y = mlp.fc2(mlp.norm2(y)).view(x.shape)
        y = mlp.drop_path(mlp.ls(y))
        return torch.add(x, y, alpha=mlp.residual_scale) if mlp.shortcut else y * mlp.residual_scale


def in_released_form(model: nn.Module) -> nn.Module:
    """A copy of a model with its FFNs in it."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RePaMlp):
                setattr(module, name, ReleasedForm(child))
    return model


def training_step(
        model: nn.Module,
        fast: bool = True,
        optimizer=None,
        amp: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
) -> Callable[[torch.Tensor], None]:
    """Forward and backward pass, with the idle channels as one matrix or not, and the step of an optimizer."""

    def step(x: torch.Tensor) -> None:
        set_fast_train(fast)
        model.zero_grad()
        with torch.inference_mode(False), torch.enable_grad():
            x = x.to(memory_format=memory_format)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
                y = model(x)
            y = y if isinstance(y, torch.Tensor) else y[0]  # LV-ViT has logits of every token beside
            y.float().square().mean().backward()
            if optimizer is not None:
                optimizer.step()

    step.model, step.optimizer = model, optimizer
    return step


def peak_memory(step: Callable[[torch.Tensor], None], x: torch.Tensor) -> float:
    """The most that a training step takes at a time, gradients included, in MB, less what was there before."""
    step.model.zero_grad()
    if x.device.type == 'cuda':
        before = torch.cuda.memory_allocated(x.device)
        torch.cuda.reset_peak_memory_stats(x.device)
        step(x)
        return (torch.cuda.max_memory_allocated(x.device) - before) / 1e6
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(x)
    # what was allocated, and given back with a minus, in the order of time
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in profiler.profiler.kineto_results.events()
        if event.name() == '[memory]')
    return max(itertools.accumulate(size for _, size in changes)) / 1e6


def largest(fits: Callable[[int], bool], most: int = 2 ** 20, known: int = 0) -> int:
    """The largest number, up to ``most``, for which ``fits`` is true, by bisection; at least ``known``."""
    low, high = known, max(1, 2 * known)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
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
    """How many images a training step can take in so much memory of a GPU, ``known`` or more (MaxBS of table 2)."""
    fewer_fit = known > 0

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
    try:
        return largest(fits, known=known)
    finally:
        torch.cuda.set_per_process_memory_fraction(1., device)


def time_training(
        models: Dict[str, Tuple[nn.Module, bool]], x: torch.Tensor, rounds: int, amp: bool = False,
) -> Tuple[Dict[str, List[float]], Dict[str, float]]:
    """Seconds of the steps, and the peak memory of one in MB, by name."""
    before = use_fast_train()
    steps = {name: training_step(model, fast, amp=amp) for name, (model, fast) in models.items()}
    try:
        times = time_passes(steps, x, rounds=rounds, warmup=1)
        peaks = {name: peak_memory(step, x) for name, step in steps.items()}
    finally:
        set_fast_train(before)
    return times, peaks


def bench_repa_train(args):
    """A training step, forward and backward, of vanilla backbones and RePa forms; as speed over the released form.

    'released': equations 3 and 4 word by word, a mask over all channels. 'layers': ours, one after the other. 'matrix':
    ours, the idle channels as one matrix where that pays, the default. In MB, the peak memory of the step.
    """
    rows = []
    for name in args.models or ['repa_deit_base', 'repa_swin_tiny', 'repa_poolformer_s12', 'repa_mixer_b16']:
        vanilla, vanilla_args = VANILLA[name]
        torch.manual_seed(0)
        repa = timm.create_model(name)
        models = {
            'vanilla': (timm.create_model(vanilla, **vanilla_args), False),
            'released': (in_released_form(repa), False),
            'layers': (copy.deepcopy(repa), False),
            'matrix': (repa, True),
        }
        models = {k: (model.train().to(args.device, args.dtype), fast) for k, (model, fast) in models.items()}
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        times, peaks = time_training(models, x, args.rounds, args.amp)
        rows.append({
            'model': name,
            'released (img/s)': round(throughput(len(x), times)['released'], 2),
            **{k: speedup(times[k], times['released']) for k in ('vanilla', 'layers', 'matrix')},
            'matrix / vanilla': speedup(times['matrix'], times['vanilla']),
            **{f'{k}, peak (MB)': round(peaks[k]) for k in ('vanilla', 'released', 'matrix')},
            'ms': milliseconds(times),
            'spread (%)': spreads(times),
        })
        print(rows[-1], flush=True)
    return rows


def bench_ffn_train(args):
    """A training step of one FFN by the number of tokens: how much faster the matrix is than layer by layer.

    'pays': what RePaMlp chooses.
    """
    rows = []
    for dim in (192, 384, 768):
        for tokens in (dim * multiple // 2 for multiple in (2, 3, 4, 6, 8, 16)):
            torch.manual_seed(0)
            mlp = RePaMlp(dim, 4 * dim).train().to(args.device, args.dtype)
            vanilla = nn.Sequential(nn.LayerNorm(dim), timm.layers.Mlp(dim, 4 * dim)).to(args.device, args.dtype)
            always = copy.deepcopy(mlp)
            always._trains_fast = lambda x: use_fast_train()
            x = torch.randn(tokens, dim, device=args.device, dtype=args.dtype, requires_grad=True)
            times, peaks = time_training({
                'vanilla': (vanilla, False), 'released': (ReleasedForm(copy.deepcopy(mlp)), False),
                'layers': (mlp, False), 'matrix': (always, True),
            }, x, args.rounds, args.amp)
            rows.append({
                'C': dim,
                'tokens': tokens,
                **{f'matrix / {k}': speedup(times['matrix'], times[k]) for k in ('layers', 'released', 'vanilla')},
                'pays': idle_matrix_pays(tokens, dim, 3 * dim),
                **{f'{k}, peak (MB)': round(peaks[k], 1) for k in ('layers', 'matrix')},
                'ms': milliseconds(times),
                'spread (%)': spreads(times),
            })
            print(rows[-1], flush=True)
    return rows


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

    With the optimizer's step; in MB, the peak memory of it; on a GPU also the largest batch in so much memory. 'paper':
    table 2, at the largest batches.
    """
    rows = []
    for name in args.models or ['repopt_vgg_a0', 'repopt_vgg_b1']:
        for img_size in (32, 160, 224) if args.device.type == 'cuda' else (32, 160):
            sides = _sides(args.device)
            steps = {side: _vgg_step(name, side, args) for side in sides}
            x = torch.randn(args.batch_size, 3, img_size, img_size, device=args.device, dtype=args.dtype)
            times = time_passes(steps, x, rounds=args.rounds, warmup=1)
            row = {
                'model': name,
                'img_size': img_size,
                'RepVGG (img/s)': round(throughput(len(x), times)['RepVGG'], 2),
                **{k: speedup(seconds, times['RepVGG']) for k, seconds in times.items() if k != 'RepVGG'},
                'paper': 1.8 if name == 'repopt_vgg_b1' else None,
                **{f'{k}, peak (MB)': round(peak_memory(step, x)) for k, step in steps.items()},
                'ms': milliseconds(times),
                'spread (%)': spreads(times),
            }
            del steps
            if args.device.type == 'cuda':
                for side in sides:
                    step, batch = _vgg_step(name, side, args), 0  # one by one, alone in the memory
                    for gigabytes in (8, 16, 32):
                        batch = largest_batch(step, img_size, gigabytes, args.device, args.dtype, known=batch)
                        row[f'{side}, batch in {gigabytes} GB'] = batch
                    del step
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


def parts_of_step(step: Callable[[torch.Tensor], None], x: torch.Tensor) -> Dict[str, float]:
    """Milliseconds of a training step that go into convolutions, norms, the optimizer and all else.

    What convolutions copy is something else. All of it takes longer than in a step that nobody watches.
    """
    on_gpu = x.device.type == 'cuda'

    def now(*args) -> None:
        if on_gpu:
            torch.cuda.synchronize()
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
    rows = []
    for name in args.models or ['repopt_vgg_b1']:
        for img_size in (32, 160):
            sides = {side: _vgg_step(name, side, args) for side in _sides(args.device)}
            x = torch.randn(args.batch_size, 3, img_size, img_size, device=args.device, dtype=args.dtype)
            found: Dict[str, List[Dict[str, float]]] = {side: [] for side in sides}
            for i in range(1 + args.rounds):
                for side, step in sides.items():
                    parts = parts_of_step(step, x)
                    if i:
                        found[side].append(parts)
            for side, step in sides.items():
                with FlopCounterMode(display=False) as counter, torch.no_grad():
                    step.model(x)
                rows.append({
                    'model': name,
                    'img_size': img_size,
                    'form': side,
                    **{part: float(f'{statistics.median(parts[part] for parts in found[side]):.3g}')
                       for part in found[side][0]},
                    'GMACs': float(f'{counter.get_total_flops() / 2e9:.3g}'),
                })
                print(rows[-1], flush=True)
    return rows
