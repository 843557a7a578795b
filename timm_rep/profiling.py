"""Counting and timing models: parameters, multiply-accumulates, throughput, latency by part."""
import platform
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from timm_rep.layers import RePaMlp, RePaMlpDeploy
from timm_rep.models.repa_convert import find_ffns
from timm_rep.version import __version__

__all__ = [
    'PARTS',
    'Macs',
    'count_macs',
    'count_params',
    'machine',
    'measure_throughput',
    'model_input_size',
    'profile_latency',
    'synchronize',
    'throughput',
    'time_passes',
    'versions',
]

# of figure 3 of the RePaFormer paper, and the rest
PARTS = ('patch embedding', 'token mixers', 'FFNs', 'head')


class Macs(NamedTuple):
    """Multiply-accumulates of one forward pass.

    Attributes:
        projections: Those of layers with weights: linear layers and convolutions.
        attention: Those of products of activations: query with key, attention with value.
    """
    projections: int
    attention: int

    @property
    def total(self) -> int:
        return self.projections + self.attention


def count_params(model: nn.Module) -> int:
    """Number of parameters; buffers, such as the running statistics of a BatchNorm, are none."""
    return sum(p.numel() for p in model.parameters())


def model_input_size(model: nn.Module) -> Tuple[int, int, int]:
    """(channels, height, width) that the model was built for, where it has a fixed size, or of its pretrained_cfg."""
    channels, *size = model.pretrained_cfg['input_size']
    embeds = (getattr(model, name, None) for name in ('patch_embed', 'stem'))  # the latter in a mixer
    size = next((embed.img_size for embed in embeds if getattr(embed, 'img_size', None)), size)
    return (getattr(model, 'in_chans', channels), *size)


def count_macs(model: nn.Module, input_size: Optional[Tuple[int, ...]] = None) -> Macs:
    """Count the multiply-accumulates for one image with ``torch.utils.flop_counter``, in eval mode.

    Works on any device; on 'meta' nothing is computed.

    Args:
        model: A model; its mode is as before afterwards.
        input_size: (channels, height, width); that of :func:`model_input_size` if None.

    Returns:
        The counts, half of the counted floating-point operations.
    """
    if input_size is None:
        input_size = model_input_size(model)
    param = next(model.parameters())
    modes = {m: m.training for m in model.modules()}
    try:
        # fused attention kernels are not counted on every device by every torch: the plain products are
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model.eval()(torch.empty(1, *input_size, device=param.device, dtype=param.dtype))
    finally:
        for module, training in modes.items():
            module.training = training
    counts = counter.get_flop_counts().get('Global', {})
    attention = sum(n for op, n in counts.items() if 'bmm' in str(op))
    return Macs(projections=(sum(counts.values()) - attention) // 2, attention=attention // 2)


def synchronize(device: torch.device) -> None:
    """Wait for what a device has still to do; a CPU has done it."""
    if device.type != 'cpu':
        # there may be several of a kind, of Apple's there is one
        getattr(torch, device.type).synchronize(*[device] * (device.type != 'mps'))


def machine(device: torch.device) -> str:
    """What a measurement on this device was made on: the GPU, or the CPU and how many threads of it torch uses."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    cpu = platform.processor() or platform.machine()
    info = Path('/proc/cpuinfo')
    if info.is_file():
        cpu = next((line.split(':')[1].strip() for line in info.read_text().splitlines() if 'model name' in line), cpu)
    return f'{cpu}, {torch.get_num_threads()} threads'


def versions() -> Dict[str, str]:
    """Of what a measurement depends on."""
    return {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'timm': timm.__version__,
        'timm_rep': __version__,
    }


@torch.inference_mode()
def time_passes(
        models: Mapping[str, Callable[[torch.Tensor], object]],
        inputs: torch.Tensor,
        rounds: int = 15,
        warmup: int = 3,
) -> Dict[str, List[float]]:
    """Seconds that several models take for a batch, side by side.

    The models take turns, so that whatever else the machine does meets them alike.

    Args:
        models: Models in eval mode on the device of the inputs, or what else is to be timed, by name.
        inputs: One batch (N, ...).
        rounds: Timed passes of each model.
        warmup: Passes before them.

    Returns:
        Seconds of the timed passes, round by round, by name.
    """
    times: Dict[str, List[float]] = {name: [] for name in models}
    for i in range(warmup + rounds):
        for name, model in models.items():
            synchronize(inputs.device)
            start = time.perf_counter()
            model(inputs)
            synchronize(inputs.device)
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def throughput(n: int, times: Mapping[str, Sequence[float]]) -> Dict[str, float]:
    """How many of n things a second, by name: by the median of the seconds that they took."""
    return {name: n / statistics.median(seconds) for name, seconds in times.items()}


def measure_throughput(
        models: Mapping[str, Callable[[torch.Tensor], object]],
        inputs: torch.Tensor,
        rounds: int = 15,
        warmup: int = 3,
) -> Dict[str, float]:
    """Images per second of several models, side by side, by the medians of :func:`time_passes`.

    Returns:
        Images per second by name.
    """
    return throughput(len(inputs), time_passes(models, inputs, rounds, warmup))


def _blocks(model: nn.Module) -> Iterator[Tuple[nn.Module, nn.Module]]:
    """The blocks of a model, and what runs first in the FFN half of each."""
    for block in model.modules():
        for child in block.children():
            if isinstance(child, (RePaMlp, RePaMlpDeploy)):
                yield block, child
    for ffn in find_ffns(model):
        mlp = getattr(ffn.block, ffn.mlp)
        if mlp is not None and not isinstance(mlp, (RePaMlp, RePaMlpDeploy)):
            yield ffn.block, getattr(ffn.block, ffn.norm)


class _Stopwatch:
    """Passes through a model, timed part by part."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.marks: List[Tuple[str, Any]] = []
        blocks = list(_blocks(model))
        if not blocks:
            raise ValueError(f'{type(model).__name__} has no blocks of a token mixer and an FFN that are known here.')
        embed, mixer, ffn, _ = PARTS
        self.hooks = [
            handle for block, first in blocks for handle in (
                block.register_forward_pre_hook(lambda *args: self._mark(mixer)),
                first.register_forward_pre_hook(lambda *args: self._mark(ffn)),
                block.register_forward_hook(lambda *args: self._mark(embed)),
            )
        ]

    def _mark(self, part: str) -> None:
        if self.device.type == 'cuda':  # asynchronous: events keep the time there
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.device))
        else:
            synchronize(self.device)
            now = time.perf_counter()
        self.marks.append((part, now))

    def run(self, inputs: torch.Tensor) -> Dict[str, float]:
        """Seconds of one pass by part."""
        embed, *_, head = PARTS
        self.device, self.marks = inputs.device, []
        synchronize(self.device)
        self._mark(embed)
        self.model(inputs)
        self.marks[-1] = (head, self.marks[-1][1])  # what comes after the last block is no embedding
        self._mark('')
        synchronize(self.device)
        seconds = dict.fromkeys(PARTS, 0.)
        for (part, start), (_, end) in zip(self.marks, self.marks[1:]):
            seconds[part] += start.elapsed_time(end) / 1e3 if self.device.type == 'cuda' else end - start
        return seconds

    def close(self) -> None:
        for handle in self.hooks:
            handle.remove()


@torch.inference_mode()
def profile_latency(
        models: Mapping[str, nn.Module],
        inputs: torch.Tensor,
        rounds: int = 15,
        warmup: int = 3,
) -> Dict[str, Dict[str, float]]:
    """Where the time of a pass goes: patch embedding, token mixers, FFNs, head (RePaFormer, figure 3).

    Norms, layer scales and shortcuts count to the half of the block that they belong to, downsampling and positions to
    the embedding. The models take turns, and the median of the rounds counts, of each part by itself.

    Args:
        models: Models in eval mode on the device of the inputs, by name; RePaFormers, folded or not, and models of
            timm's that :func:`timm_rep.convert_to_repa` knows.
        inputs: One batch (N, C, H, W).
        rounds: Timed passes of each model.
        warmup: Passes before them.

    Returns:
        Milliseconds by part, by name.

    Raises:
        ValueError: A model has no blocks with an FFN that are known here, or rounds is not positive.
    """
    if rounds < 1:
        raise ValueError(f'rounds is the number of timed passes, 1 or more, got {rounds}.')
    watches: Dict[str, _Stopwatch] = {}
    passes: Dict[str, List[Dict[str, float]]] = {name: [] for name in models}
    try:
        for name, model in models.items():
            watches[name] = _Stopwatch(model)
        for i in range(warmup + rounds):
            for name, watch in watches.items():
                seconds = watch.run(inputs)
                if i >= warmup:
                    passes[name].append(seconds)
    finally:
        for watch in watches.values():
            watch.close()
    return {
        name: {part: 1e3 * statistics.median(seconds[part] for seconds in timed) for part in PARTS}
        for name, timed in passes.items()
    }
