"""Cutting large parameters into pieces that stay in the cache, and updating a piece in one pass."""
from typing import Iterator

import torch

__all__ = ['Scratch', 'row_chunks', 'use_fused']

_CHUNK_BYTES = 4 << 20


def row_chunks(param: torch.Tensor) -> Iterator[slice]:
    """Slices of dim 0 that cover a parameter, of about 4 MB each on a CPU, whole on other devices."""
    rows = param.shape[0]
    row_bytes = max(1, param[:1].numel() * param.element_size())
    step = max(1, _CHUNK_BYTES // row_bytes) if param.device.type == 'cpu' else rows
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Scratch:
    """Memory for one chunk, reused from chunk to chunk within a step."""

    def __init__(self):
        self._memory = {}

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor of the size, strides and dtype of x, which must be dense."""
        key = (x.device, x.dtype)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < x.numel():
            memory = self._memory[key] = torch.empty(x.numel(), device=x.device, dtype=x.dtype)
        return memory.as_strided(x.size(), x.stride())


def use_fused(param: torch.Tensor, group: dict) -> bool:
    """torch's fused kernel wherever there is one, unless the group says otherwise: one pass over each chunk."""
    if group['fused'] is not None or group['foreach'] or group['differentiable']:
        return bool(group['fused'])
    if param.device.type == 'cpu':  # with half precision on a CPU, that of torch 2.5 leaves parameters as they were
        return param.dtype in (torch.float32, torch.float64)
    return param.device.type == 'cuda' and param.is_floating_point()
