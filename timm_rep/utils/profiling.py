"""Counting and timing models: parameters, multiply-accumulates, throughput, latency by part."""
import platform
import statistics
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from timm_rep.version import __version__

__all__ = [
    'Macs',
    'count_macs',
    'count_params',
    'machine',
    'measure_throughput',
    'model_input_size',
    'synchronize',
    'throughput',
    'time_passes',
    'versions',
]

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
