"""Counting and timing: parameters, multiply-accumulates, throughput."""
import contextlib
import platform
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from timm_rep.version import __version__

from .modes import keeping_modes

__all__ = [
    'Macs',
    'count_macs',
    'count_params',
    'device_name',
    'measure_throughput',
    'model_img_size',
    'model_input_size',
    'synchronize',
    'throughput',
    'time_calls',
    'time_passes',
    'versions',
]


# layers whose forward is one kernel on some devices
_SINGLE_KERNELS = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Macs(NamedTuple):
    """Multiply-accumulates of one forward pass.

    Attributes:
        projections: Multiply-accumulates of linear layers and convolutions.
        attention: Multiply-accumulates of products of activations: query with key, attention with value.
    """
    projections: int
    attention: int

    @property
    def total(self) -> int:
        """All multiply-accumulates."""
        return self.projections + self.attention


def count_params(model: nn.Module) -> int:
    """Number of parameters, without buffers such as the running statistics of a BatchNorm."""
    return sum(p.numel() for p in model.parameters())


def model_img_size(model: nn.Module) -> Optional[Tuple[int, int]]:
    """Size of images (height, width) that a model was built for, None for one of any size, such as most CNNs."""
    model = getattr(model, 'model', model)  # FeatureGetterNet has one
    embeds = (getattr(model, name, None) for name in ('patch_embed', 'stem'))  # the latter in a mixer
    size = next(filter(None, (getattr(embed, 'img_size', None) for embed in embeds)), None)
    if size is None and hasattr(timm.models, 'get_model_traits'):  # since timm 1.0.31
        size = timm.models.get_model_traits(model).get('img_size')
    return size and tuple(size)


def model_input_size(model: nn.Module) -> Tuple[int, int, int]:
    """Input size (channels, height, width) that a model was built for, or else the size in its pretrained_cfg."""
    channels, *size = model.pretrained_cfg['input_size']
    size = model_img_size(model) or size
    return (getattr(getattr(model, 'model', model), 'in_chans', channels), *size)


def count_macs(
        model: nn.Module,
        input_size: Optional[Tuple[int, ...]] = None,
        inputs: Any = None,
) -> Macs:
    """Count the multiply-accumulates for one image with ``torch.utils.flop_counter``, in eval mode.

    torch's own recurrent layers and attentions are single kernels on a device, which the counter does not know: models
    that have some are counted on 'meta', if they can be run there.

    Args:
        model: A model on any device, 'meta' included; its mode is restored.
        input_size: (channels, height, width); from :func:`model_input_size` if None.
        inputs: Argument of the model for one image, in place of an image of that size.

    Returns:
        The counts: half of the counted floating-point operations.
    """
    if inputs is None:
        param = next(model.parameters())
        inputs = torch.empty(1, *(input_size or model_input_size(model)), device=param.device, dtype=param.dtype)
    # the counter asks for the gradient of an input of a layer that is a view of a parameter, such as a class token
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    if any(isinstance(layer, _SINGLE_KERNELS) for layer in model.modules()):
        everything = {**tensors, **dict(model.named_buffers())}
        with contextlib.suppress(NotImplementedError, RuntimeError):  # its forward needs values
            return _count(model, *tree_map_only(torch.Tensor, lambda x: x.to('meta'), (everything, inputs)))
    return _count(model, tensors, inputs)


def _count(model: nn.Module, tensors: Dict[str, torch.Tensor], inputs: Any) -> Macs:
    """The counts with other tensors in place of those of the model."""
    from torch.utils.flop_counter import FlopCounterMode  # imports much of torch

    # not every version of torch counts fused attention on every device
    with keeping_modes(model), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        torch.func.functional_call(model.eval(), tensors, (inputs,))
    counts = counter.get_flop_counts().get('Global', {})
    attention = sum(n for op, n in counts.items() if 'bmm' in str(op))
    return Macs(projections=(sum(counts.values()) - attention) // 2, attention=attention // 2)


def synchronize(device: torch.device) -> None:
    """Wait for all kernels of a device; returns at once for a CPU."""
    if device.type != 'cpu':
        # torch.mps.synchronize() takes no device
        getattr(torch, device.type).synchronize(*[device] * (device.type != 'mps'))


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the CPU and the number of threads that torch uses."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    cpu = platform.processor() or platform.machine()
    info = Path('/proc/cpuinfo')
    if info.is_file():
        cpu = next((line.split(':')[1].strip() for line in info.read_text().splitlines() if 'model name' in line), cpu)
    threads = torch.get_num_threads()
    return f'{cpu}, {threads} thread{"s" if threads > 1 else ""}'


def versions() -> Dict[str, str]:
    """Versions of the software that a measurement depends on, by name."""
    return {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'timm': timm.__version__,
        'timm_rep': __version__,
    }


def time_calls(
        calls: Mapping[str, Callable[[], object]],
        device: torch.device,
        rounds: int,
        warmup: int = 1,
) -> Dict[str, List[float]]:
    """Time several functions on a device, in turn, so that other load on the machine affects all alike.

    Returns:
        Seconds of each of the ``rounds`` calls after ``warmup`` ones, by name.
    """
    times: Dict[str, List[float]] = {name: [] for name in calls}
    for i in range(warmup + rounds):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


@torch.inference_mode()
def time_passes(
        models: Mapping[str, Callable[[torch.Tensor], object]],
        inputs: torch.Tensor,
        rounds: int = 15,
        warmup: int = 3,
) -> Dict[str, List[float]]:
    """Time forward passes of models or other callables on a batch, in turn, see :func:`time_calls`."""
    return time_calls(
        {name: partial(model, inputs) for name, model in models.items()}, inputs.device, rounds, warmup)


def throughput(n: int, times: Mapping[str, Sequence[float]]) -> Dict[str, float]:
    """Items per second by name, from the median of the seconds that ``n`` items take."""
    return {name: n / statistics.median(seconds) for name, seconds in times.items()}


def measure_throughput(
        models: Mapping[str, Callable[[torch.Tensor], object]],
        inputs: torch.Tensor,
        rounds: int = 15,
        warmup: int = 3,
) -> Dict[str, float]:
    """Images per second of several models by name, from the medians of :func:`time_passes`."""
    return throughput(len(inputs), time_passes(models, inputs, rounds, warmup))
