"""Updating all kernels that have a GradMult in one launch of a Triton kernel."""
import functools
import os
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import torch
from torch.torch_version import TorchVersion

from ._chunks import in_layout_of, is_dense, use_fused
from .grad_mult import GradMult, get_grad_mult, local

__all__ = ['BLOCK', 'Launches', 'Row', 'launched_together', 'multipliers', 'reciprocal', 'runs_kernels']

BLOCK = 2048  # entries that one program updates
_ALIGNMENT = 16  # a GPU loads so many bytes at once
_ADDRESSES = 5  # columns of a Row that differ from step to step


class Row(NamedTuple):
    """What a Triton kernel knows of one tensor.

    Attributes:
        param: Address of the parameter; of the gradient and of up to three tensors of state likewise, 0 if there is
            none. All are in the memory order of the parameter.
        first: Whether the state is new.
        multipliers: Address of what :func:`multipliers` returns.
        channels_last: Whether a row has the positions in the window outside and the input channels inside.
        numel: Entries.
        window: Positions in the kernel's window.
        row: Entries of an output channel, with its reciprocal.
        inner: What is inside of a row, input channels or positions, with its reciprocal.
    """
    param: int
    grad: int
    state: int
    state2: int
    state3: int
    first: int
    multipliers: int
    channels_last: int
    numel: int
    window: int
    row: int
    row_magic: int
    row_shift: int
    inner: int
    inner_magic: int
    inner_shift: int


def reciprocal(divisor: int) -> Tuple[int, int]:
    """(magic, shift) so that ``x // divisor == x * magic >> shift`` for 0 <= x < 2 ** 31; magic has 32 bits.

    A division by a number that is not known when a kernel is compiled takes a GPU longer than the memory does.
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def multipliers(grad_mult: GradMult, rule: str, channels_last: bool) -> torch.Tensor:
    """(out_channels, window + 2): the multiplier of each position, what the diagonal adds, and which entry that is.

    In float32, the entry too (exact up to 2 ** 24), counted within the output channel in the memory's order; -1 if the
    multiplier has no diagonal.
    """
    out_channels, in_channels, height, width = grad_mult.shape
    window = height * width
    table = torch.zeros(out_channels, window + 2)
    table[:, -1] = -1
    positions = table[:, :window].unflatten(1, (height, width))
    for (h, w), vector, diagonal in grad_mult.vectors(rule, torch.device('cpu'), torch.float32):
        if diagonal:
            channel = (torch.arange(out_channels) + grad_mult.first_row) % in_channels
            centre = height // 2 * width + width // 2
            table[:, -2] += vector.flatten()
            table[:, -1] = centre * in_channels + channel if channels_last else channel * window + centre
        else:
            positions[:, (height - h) // 2:(height + h) // 2, (width - w) // 2:(width + w) // 2] += vector[..., 0]
    return table


def runs_kernels(param: torch.Tensor, grad: torch.Tensor, group: dict) -> bool:
    """Whether a Triton kernel is to update a parameter: where torch's fused one would, on a GPU.

    In Triton's interpreter (``TRITON_INTERPRET=1``) on a CPU too.
    """
    if param.device.type == 'cuda':
        # a graph would keep the addresses of a table that is not its own
        if not use_fused(param, group) or torch.cuda.is_current_stream_capturing():
            return False
    elif param.device.type != 'cpu' or os.environ.get('TRITON_INTERPRET') != '1':
        return False
    return (
        _has_triton()
        and param.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and grad.dtype == param.dtype
        and 0 < param.numel() < 2 ** 31 - BLOCK and param[0].numel() < 2 ** 24
        and is_dense(param) and _memory_order(param) is not None
    )


@functools.cache
def _has_triton() -> bool:
    """One that the kernels are tested with; it comes with torch, but not on every machine."""
    try:
        import triton
    except ImportError:
        return False
    return TorchVersion(triton.__version__) >= (3, 2)


def launched_together(param: torch.Tensor) -> tuple:
    """What parameters of one launch have in common; one of an odd size slows down the others."""
    return param.device, param.dtype, param.numel() % _ALIGNMENT == 0


def _memory_order(param: torch.Tensor) -> Optional[bool]:
    """Whether a kernel is channels-last; None if it is neither that nor contiguous."""
    if param.is_contiguous():
        return False
    return True if param.is_contiguous(memory_format=torch.channels_last) else None


class Launches:
    """Launches a kernel on lists of tensors, and keeps the tables it needs as long as the addresses stay."""

    def __init__(self):
        self._layouts: WeakKeyDictionary[GradMult, dict] = WeakKeyDictionary()
        self._tables: Dict[tuple, Tuple[tuple, torch.Tensor, torch.Tensor]] = {}

    def __call__(
            self,
            kernel: str,
            rule: str,
            params: Sequence[torch.Tensor],
            states: Sequence[Sequence[torch.Tensor]],
            *args: torch.Tensor,
            first: bool = False,
            lr,
            grad_scale: Optional[torch.Tensor],
            found_inf: Optional[torch.Tensor],
            **kwargs,
    ) -> None:
        """Launch it once.

        Args:
            kernel: Its name in :mod:`timm_rep.optim._kernels`.
            rule: Of the GradMults.
            params: Parameters with a GradMult that :func:`runs_kernels` is true of, that :func:`launched_together`
                puts together.
            states: Up to three lists of as many tensors, in the layouts of the parameters.
            args: More tensors that the kernel takes after its tables, wherever they are.
            first: Whether the state of each parameter is new; one for all, or a sequence.
            lr: Learning rate, a number or a tensor.
            grad_scale: What the gradients are to be divided by, of GradScaler.
            found_inf: Of GradScaler, 1 if the step is to be skipped.
            kwargs: The others of the kernel.
        """
        import triton.language as tl

        from . import _kernels

        shards = [local(p).detach() for p in params]
        device, dtype = shards[0].device, shards[0].dtype
        # held until the launch: a gradient in another layout is copied
        grads = [in_layout_of(shard, local(p.grad)) for shard, p in zip(shards, params)]
        columns = [shards, grads, *([local(x) for x in state] for state in states)]
        nothing = [0] * (_ADDRESSES - len(columns))
        first = [first] * len(params) if isinstance(first, bool) else first
        rows = tuple(
            (*(x.data_ptr() for x in tensors), *nothing, int(new), *self._layout(tensors[0], get_grad_mult(p), rule))
            for p, new, *tensors in zip(params, first, *columns)
        )
        tensors, blocks = self._table(rows, device, dtype)
        lr, grad_scale, found_inf, *args = (
            x.to(device, torch.float32, non_blocking=True) if torch.is_tensor(x) else x
            for x in (lr, grad_scale, found_inf, *args))
        # Triton compiles anew for the values of integers: those of switches, and not those of rates
        kwargs = {k: float(x) if type(x) is int else x for k, x in {**kwargs, 'lr': lr}.items()}
        with torch.cuda.device_of(shards[0]):
            getattr(_kernels, kernel)[(len(blocks),)](
                tensors, blocks, *args, grad_scale=grad_scale, found_inf=found_inf,
                dtype=getattr(tl, str(dtype).removeprefix('torch.')),
                lr_is_tensor=torch.is_tensor(lr),
                aligned=all(
                    x % _ALIGNMENT == 0 for row in rows for x in (*row[:_ADDRESSES], row[Row._fields.index('numel')])),
                **kwargs,
            )

    def _layout(self, param: torch.Tensor, grad_mult: GradMult, rule: str) -> tuple:
        """The part of a Row that stays, from the multipliers on."""
        channels_last = _memory_order(param)
        layouts = self._layouts.setdefault(grad_mult, {})
        key = (rule, channels_last, param.device)
        if key not in layouts:
            numbers = multipliers(grad_mult, rule, channels_last).to(param.device)
            in_channels, window = param.shape[1], param.shape[2:].numel()
            row, inner = param[0].numel(), in_channels if channels_last else window
            layouts[key] = numbers, (
                numbers.data_ptr(), int(channels_last), param.numel(), window,
                row, *reciprocal(row), inner, *reciprocal(inner))
        return layouts[key][1]

    def _table(self, rows: tuple, device: torch.device, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
        numels = [row[Row._fields.index('numel')] for row in rows]
        key = (device, dtype, *numels)
        known = self._tables.get(key)
        if known is None or known[0] != rows:
            blocks = _blocks(numels).to(device) if known is None else known[2]
            self._tables[key] = known = rows, _to(rows, torch.int64, device), blocks
        return known[1:]


def _blocks(numels: List[int]) -> torch.Tensor:
    """(blocks, 2): which tensor each is of, and how many of it come before."""
    counts = torch.tensor([-(-n // BLOCK) for n in numels])
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)
    before = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((tensor, before), dim=1).int()


def _to(rows: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    on_gpu = device.type == 'cuda'
    return torch.tensor(rows, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
