"""Element selection: the entries of a teacher's tensor that a student's tensor starts from.

`Initializing Models with Larger Ones` - https://arxiv.org/abs/2311.18823, "Element Selection" and algorithm 1
"""
import zlib
from typing import List, Optional, Sequence, Tuple

import torch

ELEMENT_SELECTIONS = ('uniform', 'consecutive', 'random', 'random_inconsistent', 'l1', 'magnitude')

# positions along each axis, None for an axis that is kept whole
Indices = List[Optional[torch.Tensor]]


def evenly_spaced(length: int, count: int) -> torch.Tensor:
    """Evenly spaced positions along an axis (algorithm 1), as the released code computes them.

    Args:
        length: Entries along the axis, at least ``count``.
        count: Positions to return, at least 1.

    Returns:
        Ascending positions (count,), int64: every ``length // count``-th if ``count`` divides ``length``, otherwise
        ``linspace(0, length - 1, count)``, rounded.
    """
    if length % count == 0:
        return torch.arange(count) * (length // count)
    return torch.linspace(0, length - 1, count, dtype=torch.float32).round().long()


def index_axes(tensor: torch.Tensor, indices: Indices) -> torch.Tensor:
    """Select positions along each axis of a tensor; None keeps the axis."""
    for dim, positions in enumerate(indices):
        if positions is not None:
            tensor = tensor.index_select(dim, positions.to(tensor.device))
    return tensor


def _random(length: int, count: int, key: str) -> torch.Tensor:
    generator = torch.Generator('cpu').manual_seed(zlib.crc32(key.encode()))
    return torch.randperm(length, generator=generator, device='cpu')[:count].sort().values


def _positions(
        tensor: torch.Tensor, dim: int, count: int, element_selection: str, key: str, seed: int,
) -> Optional[torch.Tensor]:
    length = tensor.shape[dim]
    if count == length:
        return None
    if element_selection == 'uniform':
        return evenly_spaced(length, count)
    if element_selection == 'consecutive':
        return torch.arange(count)
    if element_selection == 'random':
        return _random(length, count, f'{seed} {length} {count}')
    if element_selection == 'random_inconsistent':
        return _random(length, count, f'{seed} {key} {dim}')
    norms = tensor.float().abs().movedim(dim, 0).reshape(length, -1).sum(dim=1)
    return norms.topk(count).indices.sort().values


def _common(positions: Sequence[Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
    first = positions[0]
    return first if first is not None and all(torch.equal(first, other) for other in positions) else None


def select_elements(
        tensor: torch.Tensor,
        shape: Sequence[int],
        element_selection: str = 'uniform',
        seed: int = 0,
        key: str = '',
        parts: int = 1,
) -> Tuple[torch.Tensor, Indices]:
    """Select a smaller tensor from a larger one.

    - 'uniform': evenly spaced positions along every axis (algorithm 1).
    - 'consecutive': the first positions along every axis.
    - 'random': random positions that depend only on ``seed`` and the two lengths of the axis, so that connected layers
      select the same channels.
    - 'random_inconsistent': random positions, different for every axis of every tensor.
    - 'l1': along every axis the positions with the largest L1 norms (a baseline).
    - 'magnitude': the entries of the flattened tensor with the largest magnitudes, in their original order (a
      baseline).

    Positions are ascending; an axis of equal length is kept whole.

    Args:
        tensor: The teacher's tensor.
        shape: Shape of the student's tensor: as many axes, none longer.
        element_selection: One of the above.
        seed: Seed of the random selections.
        key: Name of the tensor, part of the seed of 'random_inconsistent'.
        parts: Number of projections that are fused along the first axis (3 for a qkv). Each is selected separately,
            except by 'uniform', which treats them as one axis as the released code does.

    Returns:
        The selected tensor, and the positions along each axis: None where the axis is kept whole, for 'magnitude', and
        where they differ between the projections of a fused tensor.

    Raises:
        ValueError: The shapes do not allow it, or ``element_selection`` is unknown.

    Examples:
        >>> selected, (rows, columns) = select_elements(torch.arange(16).reshape(4, 4), (2, 4))
        >>> selected
        tensor([[ 0,  1,  2,  3],
                [ 8,  9, 10, 11]])
        >>> columns is None
        True
    """
    shape = tuple(shape)
    if element_selection not in ELEMENT_SELECTIONS:
        raise ValueError(
            f'element_selection must be one of {", ".join(ELEMENT_SELECTIONS)}, got {element_selection!r}.')
    if tensor.dim() != len(shape) or any(s > t for s, t in zip(shape, tensor.shape)):
        raise ValueError(f'shape must have as many axes as {tuple(tensor.shape)}, none longer, got {shape}.')
    if parts > 1 and shape and element_selection != 'uniform' and not (shape[0] % parts or tensor.shape[0] % parts):
        selected, axes = zip(*(
            select_elements(part, (shape[0] // parts, *shape[1:]), element_selection, seed, f'{key} {i}')
            for i, part in enumerate(tensor.chunk(parts))))
        rows, *others = zip(*axes)
        first = None if rows[0] is None else torch.cat(
            [positions + i * tensor.shape[0] // parts for i, positions in enumerate(rows)])
        return torch.cat(selected), [first, *(_common(of_parts) for of_parts in others)]
    if element_selection == 'magnitude':
        kept = tensor.float().abs().flatten().topk(torch.Size(shape).numel()).indices.sort().values
        return tensor.flatten()[kept].reshape(shape), [None] * len(shape)
    indices = [_positions(tensor, dim, count, element_selection, key, seed) for dim, count in enumerate(shape)]
    return index_axes(tensor, indices), indices
