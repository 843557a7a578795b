"""Updating all kernels that have a GradMult in one launch of a Triton kernel."""
import functools
import os
import warnings
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import torch
from torch.torch_version import TorchVersion

from ._chunks import fused_of, in_layout_of
from .grad_mult import GradMult, GradTerm, get_grad_mult, local, set_grad_mult

__all__ = [
    'BLOCK', 'Launches', 'Row', 'kernels_run_on', 'launched_together', 'multipliers', 'reciprocal', 'runs_kernels',
]

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


def kernels_run_on() -> str:
    """The type of the devices that Triton's kernels run on now, '' if it is none.

    A GPU; in Triton's interpreter (``TRITON_INTERPRET=1``) the CPU and nothing else.
    """
    if torch.compiler.is_compiling():  # which sees what torch's parts do, and not what a kernel writes
        return ''
    if os.environ.get('TRITON_INTERPRET') == '1':
        return 'cpu'
    # a graph would keep the addresses of a table that is not its own
    return 'cuda' if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing() else ''


def runs_kernels(param: torch.Tensor, grad: torch.Tensor, states: Iterable[torch.Tensor], group: dict) -> bool:
    """Whether a Triton kernel can update a parameter, on a device of :func:`kernels_run_on`, and is wanted to."""
    return (
        fused_of(group) is not False
        and param.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and 0 < param.numel() < 2 ** 31 - BLOCK and param[0].numel() < 2 ** 24
        and _memory_order(param) is not None
        # a kernel believes its table; torch's own parts say what is wrong with other tensors, or convert them
        and all(x.dtype == param.dtype and x.device == param.device and x.shape == param.shape for x in (grad, *states))
        and _has_triton()
        and (param.device.type == 'cpu' or _works_on(param.device))
    )


@functools.cache
def _has_triton() -> bool:
    """One that the kernels are tested with; it comes with torch, but not on every machine."""
    try:
        import triton
    except ImportError:
        return False
    return TorchVersion(triton.__version__) >= (3, 2)


@functools.cache
def _works_on(device: torch.device) -> bool:
    """Whether a kernel runs there, tried once: Triton needs a C compiler, and a GPU that is not too old."""
    param = torch.nn.Parameter(torch.zeros(1, 1, 1, 1, device=device))
    param.grad = torch.zeros_like(param)
    set_grad_mult(param, GradMult((1, 1, 1, 1), [GradTerm((1, 1), torch.ones(1))]))
    try:
        Launches()(
            'sgd_kernel', 'squared', [param], [], lr=0., momentum=0., new_weight=1., weight_decay=0., grad_scale=None,
            found_inf=None, has_momentum=False, nesterov=False, maximize=False)
        torch.cuda.synchronize(device)
    except Exception as e:  # of compilers, linkers and drivers
        warnings.warn(
            f'Triton cannot run a kernel on {device}, so that a step of RepSGD or RepAdamW takes several there: '
            f'{type(e).__name__}: {e}', stacklevel=2)
        return False
    return True


def launched_together(param: torch.Tensor) -> tuple:
    """What parameters of one launch have in common; one of an odd size slows down the others."""
    return param.device, param.dtype, param.numel() % _ALIGNMENT == 0


def _memory_order(param: torch.Tensor) -> Optional[bool]:
    """Whether a kernel is channels-last; None if it is neither that nor contiguous."""
    if param.is_contiguous():
        return False
    return True if param.is_contiguous(memory_format=torch.channels_last) else None


class _Table(NamedTuple):
    signature: tuple  # of the tensors it is of
    tensors: torch.Tensor
    blocks: torch.Tensor
    aligned: bool


class Launches:
    """Launches a kernel on lists of tensors, and keeps the tables it needs as long as the addresses stay."""

    def __init__(self):
        self._layouts: WeakKeyDictionary[GradMult, dict] = WeakKeyDictionary()
        self._tables: Dict[tuple, _Table] = {}

    def __call__(
            self,
            kernel: str,
            rule: str,
            params: Sequence[torch.Tensor],
            states: Sequence[Sequence[torch.Tensor]],
            *args: torch.Tensor,
            first: Optional[Sequence[bool]] = None,
            grad_scale: Optional[torch.Tensor],
            found_inf: Optional[torch.Tensor],
            lr,
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
            first: Whether the state of each parameter is new; of none if None.
            grad_scale: What the gradients are to be divided by, of GradScaler.
            found_inf: Of GradScaler, 1 if the step is to be skipped.
            lr: Learning rate, a number or a tensor.
            kwargs: The other numbers and switches of the kernel.
        """
        import triton.language as tl

        from . import _kernels

        shards = [local(p) for p in params]
        device, dtype = shards[0].device, shards[0].dtype
        # held until the launch: a gradient in another layout is copied
        grads = [in_layout_of(shard, local(p.grad)) for shard, p in zip(shards, params)]
        columns = [shards, grads, *([local(x) for x in state] for state in states)]
        table = self._table(rule, columns, [get_grad_mult(p) for p in params], first or [False] * len(params))
        # Triton compiles anew for the values of integers: those of switches, and not those of rates
        numbers = {
            k: x if isinstance(x, (bool, torch.Tensor)) else float(x) for k, x in {**kwargs, 'lr': lr}.items()}
        tensors = dict(numbers, grad_scale=grad_scale, found_inf=found_inf)
        *args, = (x.to(device, torch.float32, non_blocking=True) for x in args)
        with torch.cuda.device_of(shards[0]):
            getattr(_kernels, kernel)[(len(table.blocks),)](
                table.tensors,
                table.blocks,
                *args,
                dtype=getattr(tl, str(dtype).removeprefix('torch.')),
                aligned=table.aligned,
                lr_is_tensor=torch.is_tensor(lr),
                **{k: x.to(device, torch.float32) if torch.is_tensor(x) else x for k, x in tensors.items()},
            )

    def _table(
            self,
            rule: str,
            columns: Sequence[Sequence[torch.Tensor]],
            grad_mults: Sequence[GradMult],
            first: Sequence[bool],
    ) -> _Table:
        addresses = [[x.data_ptr() for x in column] for column in columns]
        key = tuple((x.data_ptr(), x.numel()) for x in columns[0])
        # all is where it was in the step before, mostly the gradients too
        signature = (rule, *map(tuple, addresses), tuple(grad_mults), tuple(first))
        known = self._tables.get(key)
        if known is not None and known.signature == signature:
            return known
        shards = columns[0]
        addresses += [[0] * len(shards)] * (_ADDRESSES - len(columns))
        rows = [
            Row(*of_one, int(new), *self._layout(shard, grad_mult, rule))
            for shard, grad_mult, new, *of_one in zip(shards, grad_mults, first, *addresses)
        ]
        device = shards[0].device
        self._tables[key] = table = _Table(
            signature,
            _to_device(rows, torch.int64, device),
            _blocks([row.numel for row in rows]).to(device) if known is None else known.blocks,
            all(x % _ALIGNMENT == 0 for row in rows for x in (*row[:_ADDRESSES], row.numel)),
        )
        return table

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


def _blocks(numels: List[int]) -> torch.Tensor:
    """(blocks, 2): which tensor each is of, and how many of it come before."""
    counts = torch.tensor([-(-n // BLOCK) for n in numels])
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)
    before = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((tensor, before), dim=1).int()


def _to_device(rows: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    on_gpu = device.type == 'cuda'
    return torch.tensor(rows, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
