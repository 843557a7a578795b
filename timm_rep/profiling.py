"""Counting and timing models: parameters, multiply-accumulates, throughput."""
import statistics
import time
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

__all__ = ['Macs', 'count_macs', 'count_params', 'measure_throughput']


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


def count_macs(model: nn.Module, input_size: Optional[Tuple[int, ...]] = None) -> Macs:
    """Count the multiply-accumulates for one image with ``torch.utils.flop_counter``, in eval mode.

    Works on any device; on 'meta' nothing is computed.

    Args:
        model: A model; its mode is as before afterwards.
        input_size: (channels, height, width); if None the size that the model was built for, where it has a fixed one,
            or that of its pretrained_cfg.

    Returns:
        The counts, half of the counted floating-point operations.
    """
    if input_size is None:
        channels, *size = model.pretrained_cfg['input_size']
        size = getattr(getattr(model, 'patch_embed', None), 'img_size', None) or size
        input_size = (getattr(model, 'in_chans', channels), *size)
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


def _synchronize(device: torch.device) -> None:
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()


@torch.inference_mode()
def measure_throughput(
        models: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
        inputs: torch.Tensor,
        rounds: int = 15,
        warmup: int = 3,
) -> Dict[str, float]:
    """Images per second of several models, side by side.

    The models take turns, so that whatever else the machine does meets them alike, and the median of the rounds counts.

    Args:
        models: Models in eval mode on the device of the inputs, by name.
        inputs: One batch (N, ...).
        rounds: Timed passes of each model.
        warmup: Passes before them.

    Returns:
        Images per second by name.
    """
    times: Dict[str, List[float]] = {name: [] for name in models}
    for i in range(warmup + rounds):
        for name, model in models.items():
            _synchronize(inputs.device)
            start = time.perf_counter()
            model(inputs)
            _synchronize(inputs.device)
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: len(inputs) / statistics.median(t) for name, t in times.items()}
