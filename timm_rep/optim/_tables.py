"""What a Triton kernel knows of the tensors that it updates: addresses, layouts, multipliers by output channel."""
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import torch

from timm_rep.layers.grad_mult import GradMult

__all__ = ['ALIGNMENT', 'BLOCK', 'Row', 'Table', 'Tables', 'memory_order', 'multipliers', 'reciprocal']

BLOCK = 2048  # entries that one program updates
ALIGNMENT = 16  # a GPU loads so many bytes at once
_KEPT = 8  # steps that a table is not forgotten for
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
    table = torch.zeros(out_channels, window + 2, device='cpu')
    table[:, -1] = -1
    positions = table[:, :window].unflatten(1, (height, width))
    for (h, w), vector, diagonal in grad_mult.vectors(rule, torch.device('cpu'), torch.float32):
        if diagonal:
            channel = (torch.arange(out_channels, device='cpu') + grad_mult.row_offset) % in_channels
            centre = height // 2 * width + width // 2
            table[:, -2] += vector.flatten()
            table[:, -1] = centre * in_channels + channel if channels_last else channel * window + centre
        else:
            positions[:, (height - h) // 2:(height + h) // 2, (width - w) // 2:(width + w) // 2] += vector[..., 0]
    return table


def memory_order(param: torch.Tensor) -> Optional[bool]:
    """Whether a kernel is channels-last; None if it is neither that nor contiguous."""
    if param.is_contiguous():
        return False
    return True if param.is_contiguous(memory_format=torch.channels_last) else None


class Table(NamedTuple):
    """
    Attributes:
        signature: Of the tensors that it is of.
        tensors: A Row of each, (tensors, columns), int64.
        blocks: Of each block which tensor it is of, and how many of that come before, (blocks, 2), int32.
        aligned: Whether all of them can be read 16 bytes at a time.
    """
    signature: tuple
    tensors: torch.Tensor
    blocks: torch.Tensor
    aligned: bool


class Tables:
    """Makes tables, and keeps each as long as the addresses in it stay and steps need it."""

    def __init__(self):
        self._layouts: WeakKeyDictionary[GradMult, dict] = WeakKeyDictionary()
        self._tables: Dict[tuple, Tuple[Table, int]] = {}  # with the step that needed it last
        self._steps = 0

    def __len__(self) -> int:
        return len(self._tables)

    def begin_step(self) -> None:
        """Forget what none of the last steps needed: parameters move, or others have gradients."""
        self._steps += 1
        for key, (_, step) in list(self._tables.items()):
            if step < self._steps - _KEPT:
                del self._tables[key]

    @property
    def multipliers(self) -> List[torch.Tensor]:
        """What they hold of :func:`multipliers`."""
        return [numbers for layouts in self._layouts.values() for numbers, _ in layouts.values()]

    def of(
            self,
            rule: str,
            columns: Sequence[Sequence[torch.Tensor]],
            grad_mults: Sequence[GradMult],
            first: Sequence[bool],
    ) -> Table:
        """
        Args:
            rule: Of the GradMults.
            columns: Parameters, their gradients and up to three tensors of state of each, in one memory order each.
            grad_mults: Of the parameters.
            first: Whether the state of each is new.
        """
        addresses = [[x.data_ptr() for x in column] for column in columns]
        key = tuple((x.data_ptr(), x.numel()) for x in columns[0])
        # all is where it was in the step before, mostly the gradients too
        signature = (rule, *map(tuple, addresses), tuple(grad_mults), tuple(first))
        known, _ = self._tables.get(key, (None, None))
        if known is not None and known.signature == signature:
            self._tables[key] = known, self._steps
            return known
        shards = columns[0]
        addresses += [[0] * len(shards)] * (_ADDRESSES - len(columns))
        rows = [
            Row(*of_one, int(new), *self._layout(shard, grad_mult, rule))
            for shard, grad_mult, new, *of_one in zip(shards, grad_mults, first, *addresses)
        ]
        device = shards[0].device
        table = Table(
            signature,
            _to_device(rows, device),
            _blocks([row.numel for row in rows]).to(device) if known is None else known.blocks,
            all(x % ALIGNMENT == 0 for row in rows for x in (*row[:_ADDRESSES], row.numel)),
        )
        self._tables[key] = table, self._steps
        return table

    def _layout(self, param: torch.Tensor, grad_mult: GradMult, rule: str) -> tuple:
        """The part of a Row that stays, from the multipliers on."""
        channels_last = memory_order(param)
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
    counts = torch.tensor([-(-n // BLOCK) for n in numels], device='cpu')
    tensor = torch.repeat_interleave(torch.arange(len(numels), device='cpu'), counts)
    before = torch.arange(len(tensor), device='cpu') - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack((tensor, before), dim=1).int()


def _to_device(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    on_gpu = device.type == 'cuda'
    return torch.tensor(rows, dtype=torch.int64, device='cpu', pin_memory=on_gpu).to(device, non_blocking=on_gpu)
