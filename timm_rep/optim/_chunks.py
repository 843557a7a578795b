"""Pieces of large parameters that fit the cache of a CPU, and the layouts that torch's fused kernels need."""
from typing import Any, Dict, Iterator, Optional, Sequence

import torch

_CHUNK_BYTES = 4 << 20


def in_chunks(param: torch.Tensor) -> bool:
    """Whether a parameter is updated in chunks, which pays for kernels above the size of a CPU's cache."""
    return param.device.type == 'cpu'


def row_chunks(param: torch.Tensor) -> Iterator[slice]:
    """Slices of dim 0 that cover a parameter, of about 4 MB each.

    The chunks of a dense parameter are dense: a parameter whose rows are not contiguous in memory is one chunk.
    """
    rows = param.shape[0]
    row_bytes = max(1, param[:1].numel() * param.element_size())
    has_rows = param.stride(0) * rows == param.numel() or not is_dense(param)
    step = max(1, _CHUNK_BYTES // row_bytes if has_rows else rows)
    for start in range(0, max(rows, 1), step):  # an empty shard is one chunk, so that its step count advances
        yield slice(start, min(start + step, rows))


class Scratch:
    """Memory for one chunk, reused from chunk to chunk within a step."""

    def __init__(self) -> None:
        self._memory: Dict[Any, torch.Tensor] = {}

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor of the shape, dtype and device of x, and of its strides if x is dense."""
        if not is_dense(x):
            return torch.empty_like(x)
        key = (x.device, x.dtype)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < x.numel():
            memory = self._memory[key] = torch.empty(x.numel(), device=x.device, dtype=x.dtype)
        return memory.as_strided(x.size(), x.stride())


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of x fill its memory without gaps, in any order of the dimensions."""
    if x.is_contiguous() or x.numel() == 0:
        return True
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1 == x.numel()


def match_strides(param: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x if it has the strides of a parameter or the parameter is not dense, else a copy of x with these strides.

    Fused kernels index the memory of all their tensors alike, whatever the strides.
    """
    if x.stride() == param.stride():
        return x
    strides = [[stride for n, stride in zip(t.shape, t.stride()) if n > 1] for t in (param, x)]
    return x if strides[0] == strides[1] or not is_dense(param) else torch.empty_like(param, dtype=x.dtype).copy_(x)


def flat(x: torch.Tensor) -> torch.Tensor:
    """A 1-dim view of a dense tensor in the order of its memory.

    torch's fused kernels on a CPU write a contiguous copy of a channels-last gradient and then read the original.
    """
    return x.as_strided((x.numel(),), (1,))


def use_fused(param: torch.Tensor, group: Dict[str, Any], state: Sequence[Optional[torch.Tensor]]) -> bool:
    """Whether torch's fused kernel updates the chunks of a parameter on a CPU, the default where it applies."""
    if not is_dense(param):
        return False
    if group['fused'] is not None or group['foreach'] is not None:
        return bool(group['fused'])
    # the CPU kernel of torch 2.5 leaves parameters in half precision unchanged; all require a state of one dtype
    return param.dtype in (torch.float32, torch.float64) and all(
        x is None or x.dim() == 0 or x.dtype == param.dtype for x in state)
