"""Training of RePaFormers: repa-train, ffn-train."""
import copy
from typing import Dict, List, Optional, Tuple

import timm
import torch
import torch.nn as nn

from timm_rep.layers import ChannelIdle, RePaMlp, set_fused_idle, use_fused_idle
from timm_rep.layers.fused_idle import fused_idle_is_faster
from timm_rep.paper import VANILLA
from timm_rep.utils.profiling import throughput, time_calls

from .timing import memory_use, speedup, timing_columns

__all__ = ['TrainingStep', 'WithShortcut', 'ffn_train', 'in_released_form', 'repa_train', 'vanilla_ffn']


class WithShortcut(nn.Sequential):
    """Layers and a shortcut around them, as in a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def vanilla_ffn(dim: int) -> nn.Module:
    """FFN of a ViT with its shortcut: x + Mlp(LayerNorm(x)), hidden width 4 * dim, GELU."""
    return WithShortcut(nn.LayerNorm(dim), timm.layers.Mlp(dim, 4 * dim))


class MaskedActivation(nn.Module):
    """Channel idling as in the released code (eq. 3): all channels activated, then selected by a mask."""

    def __init__(self, idle: ChannelIdle, device: torch.device):
        super().__init__()
        self.act = idle.act
        mask = (torch.arange(idle.channels, device=device) < idle.active_channels).float()
        self.register_buffer('mask', mask.view(-1, 1, 1) if idle.dim == 1 else mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask.to(x.dtype)
        return mask * self.act(x) + (1 - mask) * x


def in_released_form(model: nn.Module) -> nn.Module:
    """A copy of a model with each RePaMlp in the released form, which is never computed as one matrix."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, RePaMlp):
            module.act = MaskedActivation(module.act, module.fc1.weight.device)
    return model


class TrainingStep:
    """Forward pass, backward pass and optimizer step on one batch.

    Args:
        model: Model in train mode. The loss is the mean square of its first output.
        x: Batch (N, ...).
        fused_idle: Whether the idle channels of RePa FFNs may be computed as one matrix (on a CPU).
        optimizer: Optimizer of the model's parameters. No optimizer step if None.
        amp: Autocast to bfloat16.
        memory_format: Memory format of the batch.
    """

    def __init__(
            self,
            model: nn.Module,
            x: torch.Tensor,
            fused_idle: bool = True,
            optimizer: Optional[torch.optim.Optimizer] = None,
            amp: bool = False,
            memory_format: torch.memory_format = torch.preserve_format,
    ):
        self.model, self.optimizer, self.fused_idle, self.amp = model, optimizer, fused_idle, amp
        self.memory_format = memory_format
        self.x = x

    def __call__(self) -> None:
        before = use_fused_idle()
        set_fused_idle(self.fused_idle)
        try:
            self.model.zero_grad()
            x = self.x.to(memory_format=self.memory_format)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
                y = self.model(x)
            y = y if isinstance(y, torch.Tensor) else y[0]  # LV-ViT returns logits of every token, too
            y.float().square().mean().backward()
        finally:
            set_fused_idle(before)
        if self.optimizer is not None:
            self.optimizer.step()

    def peak_memory(self) -> float:
        """Peak memory of a step in MB, gradients included."""
        self.model.zero_grad()
        return memory_use(self, self.x.device)[1]


def time_steps(steps: Dict[str, TrainingStep], rounds: int) -> Tuple[Dict[str, List[float]], Dict[str, float]]:
    """Seconds of each round and peak memory in MB, by side."""
    device = next(iter(steps.values())).x.device
    return time_calls(steps, device, rounds), {side: step.peak_memory() for side, step in steps.items()}


def repa_train(args):
    """Training step, forward and backward, of vanilla backbones and RePa forms: speedup over the released form.

    'released': equations 3 and 4 with a mask over all channels. 'layers': our layers one after the other. 'matrix':
    our default, which on a CPU computes the idle channels as one matrix where that is faster (on a GPU the same as
    'layers'). Peak memory of a step in MB.
    """
    models = args.models or ['repa_deit_base', 'repa_swin_tiny', 'repa_poolformer_s12', 'repa_mixer_b16']
    for row in args.pending(model=models):
        vanilla, vanilla_args = VANILLA[row['model']]
        torch.manual_seed(0)
        repa = timm.create_model(row['model'])
        models = {
            'vanilla': timm.create_model(vanilla, **vanilla_args),
            'released': in_released_form(repa),
            'layers': copy.deepcopy(repa),
            'matrix': repa,
        }
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        times, peaks = time_steps({
            k: TrainingStep(m.train().to(args.device, args.dtype), x, fused_idle=k == 'matrix', amp=args.amp)
            for k, m in models.items()}, args.rounds)
        yield {
            **row,
            'released (img/s)': round(throughput(len(x), times)['released'], 2),
            **{k: speedup(times[k], times['released']) for k in ('vanilla', 'layers', 'matrix')},
            'matrix / vanilla': speedup(times['matrix'], times['vanilla']),
            **{f'{k}, peak (MB)': round(peaks[k]) for k in ('vanilla', 'released', 'matrix')},
            **timing_columns(times),
        }


def ffn_steps(dim: int, x: torch.Tensor, args) -> Dict[str, TrainingStep]:
    """Training steps of one FFN in four forms, 'matrix' regardless of the device and of whether it is faster."""
    torch.manual_seed(0)
    mlp = RePaMlp(dim, 4 * dim).train().to(args.device, args.dtype)
    always = copy.deepcopy(mlp)
    always._can_fuse_idle = lambda x: use_fused_idle()
    ffns = {
        'vanilla': vanilla_ffn(dim).to(args.device, args.dtype), 'released': WithShortcut(in_released_form(mlp)),
        'layers': WithShortcut(mlp), 'matrix': WithShortcut(always)}
    return {k: TrainingStep(ffn, x, fused_idle=k == 'matrix', amp=args.amp) for k, ffn in ffns.items()}


def ffn_train(args):
    """Training step of one FFN by the number of tokens: speedup of the matrix form over the others.

    'pays': whether RePaMlp chooses the matrix form. Peak memory of a step in MB.
    """
    on_gpu = args.device.type == 'cuda'
    for dim in (192, 384, 768):
        multiples = (1, 4, 8, 16, 32, 64, 128) if on_gpu else (1, 1.5, 2, 3, 4, 8)
        for row in args.pending(C=[dim], tokens=[int(multiple * dim) for multiple in multiples]):
            # inside a network the gradient of the input is needed
            x = torch.randn(row['tokens'], dim, device=args.device, dtype=args.dtype, requires_grad=True)
            times, peaks = time_steps(ffn_steps(dim, x, args), args.rounds)
            yield {
                **row,
                **{f'matrix / {k}': speedup(times['matrix'], times[k]) for k in ('layers', 'released', 'vanilla')},
                'pays': not on_gpu and fused_idle_is_faster(row['tokens'], dim, 3 * dim),
                **{f'{k}, peak (MB)': round(peaks[k], 1) for k in ('layers', 'matrix')},
                **timing_columns(times),
            }
