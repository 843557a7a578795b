"""Which elements of a teacher's tensor a student's takes, axis by axis.

`Initializing Models with Larger Ones` - https://arxiv.org/abs/2311.18823, "Element Selection" and algorithm 1
"""
import zlib
from typing import List, Optional, Sequence, Tuple

import torch

__all__ = ['ELEMENTS', 'evenly_spaced', 'select_elements']

ELEMENTS = ('uniform', 'consecutive', 'random', 'random_inconsistent', 'l1', 'magnitude')

Indices = List[Optional[torch.Tensor]]


def evenly_spaced(teacher: int, student: int) -> torch.Tensor:
    """``student`` of ``teacher`` positions, evenly spaced (algorithm 1), as in the released code.

    Every step-th where one divides the other, else from the first to the last, rounded.
    """
    if teacher % student == 0:
        return torch.arange(student) * (teacher // student)
    return torch.linspace(0, teacher - 1, student).round().long()


def _random(teacher: int, student: int, key: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randperm(teacher, generator=generator)[:student].sort().values


def _axis(tensor: torch.Tensor, dim: int, student: int, element: str, key: str, seed: int) -> torch.Tensor:
    """The positions to take along one axis."""
    teacher = tensor.shape[dim]
    if element == 'uniform':
        return evenly_spaced(teacher, student)
    if element == 'consecutive':
        return torch.arange(student)
    if element == 'random':
        return _random(teacher, student, f'{seed} {teacher} {student}')
    if element == 'random_inconsistent':
        return _random(teacher, student, f'{seed} {key} {dim}')
    norms = tensor.float().abs().movedim(dim, 0).reshape(teacher, -1).sum(dim=1)
    return norms.topk(student).indices.sort().values


def select_elements(
        tensor: torch.Tensor,
        shape: Sequence[int],
        element: str = 'uniform',
        seed: int = 0,
        key: str = '',
        parts: int = 1,
) -> Tuple[torch.Tensor, Indices]:
    """Select a student's tensor from a teacher's.

    - 'uniform': evenly spaced along every axis (algorithm 1).
    - 'consecutive': the first along every axis.
    - 'random': along every axis one random set of positions that depends on its two lengths only, so that layers that
      are connected agree.
    - 'random_inconsistent': a random set for every axis of every tensor.
    - 'l1': along every axis the positions of the largest L1 norms, a baseline.
    - 'magnitude': the largest entries, in the order they have, whatever their position, a baseline.

    Positions are in ascending order, so that an axis of equal length stays as it is.

    Args:
        tensor: The teacher's.
        shape: The student's, as many axes, none longer.
        element: One of the above.
        seed: Of the random sets.
        key: Name of the tensor, for 'random_inconsistent'.
        parts: Number of projections fused along the first axis (3 in a qkv). All but 'uniform', which takes them
            as one axis as the released code does, select in each by itself.

    Returns:
        The selected tensor, and the positions along every axis: None where all are kept, and of 'magnitude', which has
        none.

    Raises:
        ValueError: The shapes do not allow it, or there is no such selection.
    """
    shape = tuple(shape)
    if element not in ELEMENTS:
        raise ValueError(f'element is one of {", ".join(ELEMENTS)}, got {element!r}.')
    if tensor.dim() != len(shape) or any(s > t for s, t in zip(shape, tensor.shape)):
        raise ValueError(f'Cannot select {shape} from {tuple(tensor.shape)}: as many axes are needed, none longer.')
    if parts > 1 and element != 'uniform' and not (shape[0] % parts or tensor.shape[0] % parts):
        selected, indices = zip(*(
            select_elements(part, (shape[0] // parts, *shape[1:]), element, seed, f'{key} {i}')
            for i, part in enumerate(tensor.chunk(parts))))
        first = None
        if all(of[0] is not None for of in indices):
            first = torch.cat([of[0] + i * tensor.shape[0] // parts for i, of in enumerate(indices)])
        return torch.cat(selected), [first, *indices[0][1:]]
    if element == 'magnitude':
        kept = tensor.float().abs().flatten().topk(torch.Size(shape).numel()).indices.sort().values
        return tensor.flatten()[kept].reshape(shape), [None] * len(shape)
    indices: Indices = []
    selected = tensor
    for dim, student in enumerate(shape):
        if student == tensor.shape[dim]:
            indices.append(None)
            continue
        of = _axis(tensor, dim, student, element, key, seed)
        selected = selected.index_select(dim, of.to(tensor.device))
        indices.append(of)
    return selected, indices
