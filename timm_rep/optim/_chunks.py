"""Cutting large parameters into pieces that stay in the cache, and updating a piece in one pass."""
from typing import Iterator, Optional

import torch

__all__ = ['Scratch', 'flat', 'fused_of', 'is_dense', 'match_strides', 'row_chunks', 'use_fused']

_CHUNK_BYTES = 4 << 20


def row_chunks(param: torch.Tensor) -> Iterator[slice]:
    """Slices of dim 0 that cover a parameter, of about 4 MB each on a CPU, whole on other devices.

    Those of a dense parameter are dense: it is one slice if its rows are not one after the other in memory.
    """
    rows = param.shape[0]
    row_bytes = max(1, param[:1].numel() * param.element_size())
    in_chunks = param.device.type == 'cpu' and (param.stride(0) * rows == param.numel() or not is_dense(param))
    step = max(1, _CHUNK_BYTES // row_bytes if in_chunks else rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Scratch:
    """Memory for one chunk, reused from chunk to chunk within a step."""

    def __init__(self):
        self._memory = {}

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor of the size and dtype of x, and of its strides where it is dense."""
        if not is_dense(x):
            return torch.empty_like(x)
        key = (x.device, x.dtype)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < x.numel():
            memory = self._memory[key] = torch.empty(x.numel(), device=x.device, dtype=x.dtype)
        return memory.as_strided(x.size(), x.stride())


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of x, in whatever order, fill its memory without gaps."""
    if x.is_contiguous() or x.numel() == 0:
        return True
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1 == x.numel()


def match_strides(param: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it with the strides of the parameter.

    A fused kernel on a CPU walks through the memory of all its tensors alike, and asks nobody for the strides.
    """
    if x.stride() == param.stride():
        return x
    strides = [[stride for n, stride in zip(t.shape, t.stride()) if n > 1] for t in (param, x)]
    return x if strides[0] == strides[1] or not is_dense(param) else torch.empty_like(param, dtype=x.dtype).copy_(x)


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory.

    The fused kernels on a CPU make a contiguous copy of a gradient in channels-last, and then read the gradient.
    """
    return x.as_strided((x.numel(),), (1,))


def fused_of(group: dict) -> Optional[bool]:
    """Whether a group asks for one kernel that does everything, None if it leaves that open."""
    return None if group['fused'] is None and group['foreach'] is None else bool(group['fused'])


def use_fused(param: torch.Tensor, group: dict) -> bool:
    """torch's fused kernel wherever there is one, unless the group says otherwise: one pass over each chunk."""
    if not is_dense(param):
        return False
    if fused_of(group) is not None:
        return fused_of(group)
    if param.device.type == 'cpu':  # with half precision on a CPU, that of torch 2.5 leaves parameters as they were
        return param.dtype in (torch.float32, torch.float64)
    return param.device.type == 'cuda' and param.is_floating_point()
