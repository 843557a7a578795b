"""Which block of a teacher a student's block is of.

`Initializing Models with Larger Ones` - https://arxiv.org/abs/2311.18823, "Layer Selection" and "Component Mapping"
"""
from itertools import chain
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from .elements import evenly_spaced

__all__ = ['DEPTHS', 'Shape', 'map_names', 'select_blocks', 'with_ones_of', 'without_ones']

DEPTHS = ('first', 'uniform', 'mid', 'last')

Shape = Tuple[int, ...]


def select_blocks(teacher: int, student: int, depth: str = 'first') -> List[int]:
    """``student`` of a teacher's blocks, ascending: its 'first', 'mid'dle or 'last' ones, or 'uniform'ly spaced."""
    if depth not in DEPTHS:
        raise ValueError(f'depth is one of {", ".join(DEPTHS)}, got {depth!r}.')
    if depth == 'uniform':
        return evenly_spaced(teacher, student).tolist()
    start = {'first': 0, 'mid': (teacher - student) // 2, 'last': teacher - student}[depth]
    return list(range(start, start + student))


def without_ones(shape: Shape) -> Shape:
    """A shape without the ones at both ends: a linear layer and a 1 x 1 convolution are the same map."""
    start, stop = 0, len(shape)
    while start < stop and shape[start] == 1:
        start += 1
    while stop > start and shape[stop - 1] == 1:
        stop -= 1
    return shape[start:stop]


def with_ones_of(shape: Shape, like: Shape) -> Shape:
    """A shape with the ones at both ends that another has, instead of its own."""
    inner = without_ones(like)
    before = next((i for i, length in enumerate(like) if length != 1), len(like))
    return (1,) * before + without_ones(shape) + (1,) * (len(like) - before - len(inner))


def _tree(shapes: Mapping[str, Shape]) -> Dict[str, Any]:
    root: Dict[str, Any] = {}
    for name, shape in shapes.items():
        *path, leaf = name.split('.')
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = shape
    return root


def _leaves(node: Any, path: str = '') -> Iterator[Tuple[str, Shape]]:
    if not isinstance(node, dict):
        yield path, node
        return
    for part, child in node.items():
        yield from _leaves(child, f'{path}.{part}' if path else part)


def _groups(node: Dict[str, Any], numbers: List[str]) -> List[Tuple[frozenset, List[str]]]:
    """The numbered children in groups of the same names and shapes, each with its kind: names and numbers of axes.

    The first block of a stage, which changes stride or width, is a group of its own.
    """
    groups: Dict[frozenset, List[str]] = {}
    for number in numbers:
        groups.setdefault(frozenset(_leaves(node[number])), []).append(number)
    return [
        (frozenset((path, len(without_ones(shape))) for path, shape in leaves), members)
        for leaves, members in groups.items()
    ]


def _numbers(node: Dict[str, Any]) -> List[str]:
    return sorted((part for part in node if part.isdigit()), key=int)


def _pairs(student: Dict[str, Any], teacher: Dict[str, Any], depth: str) -> Dict[str, str]:
    """For each numbered child of the student that has one, the teacher's."""
    of_student, of_teacher = _numbers(student), _numbers(teacher)
    if of_student == of_teacher:
        return dict(zip(of_student, of_teacher))
    pairs: Dict[str, str] = {}
    groups_of_teacher = _groups(teacher, of_teacher)
    groups_of_student = _groups(student, of_student)
    for kind in dict.fromkeys(kind for kind, _ in groups_of_student):
        ours = [members for other, members in groups_of_student if other == kind]
        theirs = [members for other, members in groups_of_teacher if other == kind]
        if len(ours) != len(theirs):
            # their first ones may differ in stride, though not in width
            flat = [sorted(chain.from_iterable(of), key=int) for of in (ours, theirs)]
            ours, theirs = ([members[:1], members[1:]] for members in flat)
        for mine, other in zip(ours, theirs):
            count = min(len(mine), len(other))
            pairs.update(zip(mine, (other[i] for i in select_blocks(len(other), count, depth)) if count else ()))
    return pairs


def map_names(
        student: Mapping[str, Shape],
        teacher: Mapping[str, Shape],
        depth: str = 'first',
) -> Dict[str, Optional[str]]:
    """For every tensor of a student the name of the teacher's, None where it has none.

    Names are the same but for the numbers of blocks. Wherever the two have different numbers of blocks in a row, in
    each stage of a hierarchical model by itself, those of the student are taken from the teacher's by ``depth``. Blocks
    that differ from their neighbours, such as the first of a ResNet's stage with its stride, are taken from those of
    the teacher's that do.

    Args:
        student: Shapes by name.
        teacher: Shapes by name.
        depth: 'first', 'uniform', 'mid' or 'last'.
    """
    found: Dict[str, Optional[str]] = {}

    def walk(of_student: Any, of_teacher: Any, name: str, teacher_name: str) -> None:
        if not isinstance(of_student, dict):
            found[name] = None if of_teacher is None or isinstance(of_teacher, dict) else teacher_name
            return
        known = of_teacher if isinstance(of_teacher, dict) else {}
        pairs = _pairs(of_student, known, depth)
        for part, child in of_student.items():
            other = pairs.get(part) if part.isdigit() else part
            walk(
                child,
                None if other is None else known.get(other),
                f'{name}.{part}' if name else part,
                f'{teacher_name}.{other}' if teacher_name else f'{other}',
            )

    walk(_tree(student), _tree(teacher), '', '')
    return {name: found[name] for name in student}
