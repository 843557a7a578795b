"""The sections of bench.py about training RePaFormers."""
import copy
import itertools
from typing import Callable, Dict, List, Tuple

import timm
import torch
import torch.nn as nn
from _timing import milliseconds, speedup, spreads
from torch.profiler import ProfilerActivity, profile

from timm_rep.layers import RePaMlp, set_fused_idle, use_fused_idle
from timm_rep.layers.fused_idle import fused_idle_is_faster
from timm_rep.paper import VANILLA
from timm_rep.utils.profiling import throughput, time_passes

__all__ = ['ReleasedForm', 'VanillaFfn', 'bench_ffn_train', 'bench_repa_train', 'peak_memory', 'training_step']


class VanillaFfn(nn.Module):
    """The FFN of a ViT: LayerNorm, two linear layers with a GELU between them, shortcut."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(dim), timm.layers.Mlp(dim, 4 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


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
        set_fused_idle(fast)
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


def time_training(
        models: Dict[str, Tuple[nn.Module, bool]], x: torch.Tensor, rounds: int, amp: bool = False,
) -> Tuple[Dict[str, List[float]], Dict[str, float]]:
    """Seconds of the steps, and the peak memory of one in MB, by name."""
    before = use_fused_idle()
    steps = {name: training_step(model, fast, amp=amp) for name, (model, fast) in models.items()}
    try:
        times = time_passes(steps, x, rounds=rounds, warmup=1)
        peaks = {name: peak_memory(step, x) for name, step in steps.items()}
    finally:
        set_fused_idle(before)
    return times, peaks


def bench_repa_train(args):
    """A training step, forward and backward, of vanilla backbones and RePa forms; as speed over the released form.

    'released': equations 3 and 4 word by word, a mask over all channels. 'layers': ours, one after the other. 'matrix':
    ours, the idle channels as one matrix where that pays, the default. In MB, the peak memory of the step.
    """
    for name in args.models or ['repa_deit_base', 'repa_swin_tiny', 'repa_poolformer_s12', 'repa_mixer_b16']:
        if args.measured(model=name):
            continue
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
        yield {
            'model': name,
            'released (img/s)': round(throughput(len(x), times)['released'], 2),
            **{k: speedup(times[k], times['released']) for k in ('vanilla', 'layers', 'matrix')},
            'matrix / vanilla': speedup(times['matrix'], times['vanilla']),
            **{f'{k}, peak (MB)': round(peaks[k]) for k in ('vanilla', 'released', 'matrix')},
            'ms': milliseconds(times),
            'spread (%)': spreads(times),
        }


def bench_ffn_train(args):
    """A training step of one FFN by the number of tokens: how much faster the matrix is than layer by layer.

    'pays': what RePaMlp chooses.
    """
    on_gpu = args.device.type == 'cuda'
    for dim in (192, 384, 768):
        for multiple in (1, 4, 8, 16, 32, 64, 128) if on_gpu else (1, 1.5, 2, 3, 4, 8):
            tokens = int(multiple * dim)
            if args.measured(C=dim, tokens=tokens):
                continue
            torch.manual_seed(0)
            mlp = RePaMlp(dim, 4 * dim).train().to(args.device, args.dtype)
            vanilla = VanillaFfn(dim).to(args.device, args.dtype)
            always = copy.deepcopy(mlp)
            always._can_fuse_idle = lambda x: use_fused_idle()
            x = torch.randn(tokens, dim, device=args.device, dtype=args.dtype, requires_grad=True)
            times, peaks = time_training({
                'vanilla': (vanilla, False), 'released': (ReleasedForm(copy.deepcopy(mlp)), False),
                'layers': (mlp, False), 'matrix': (always, True),
            }, x, args.rounds, args.amp)
            yield {
                'C': dim,
                'tokens': tokens,
                **{f'matrix / {k}': speedup(times['matrix'], times[k]) for k in ('layers', 'released', 'vanilla')},
                'pays': fused_idle_is_faster(tokens, dim, 3 * dim),
                **{f'{k}, peak (MB)': round(peaks[k], 1) for k in ('layers', 'matrix')},
                'ms': milliseconds(times),
                'spread (%)': spreads(times),
            }
