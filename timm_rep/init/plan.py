"""Which tensor of the teacher each tensor of a student is selected from, before anything is."""
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn

from .elements import Indices
from .head_aware import ModelLayout, select_head_aware
from .matching import Shape, map_names, with_ones_of, without_ones
from .relatives import absent_in_plain, to_plain_names
from .roles import ROLES, Wanted, classifier_names, in_classifier, matches, role_of, words
from .teachers import Teacher

__all__ = ['Selection', 'plan_selections']


class Selection(NamedTuple):
    """Where a tensor of the student comes from.

    Attributes:
        name: In the student.
        role: 'patch_embed', 'pos_embed', 'attention', 'norm', 'mlp', 'head' or 'other'.
        shape: In the student.
        teacher_name: In the teacher; None if the tensor keeps its own initialization.
        teacher_shape: In the teacher.
        reason: Why it keeps its own, '' if it does not.
        problem: Whether it should have had a counterpart.
        indices: The positions taken along every axis, None where all are.
    """
    name: str
    role: str
    shape: Shape
    teacher_name: Optional[str] = None
    teacher_shape: Optional[Shape] = None
    reason: str = ''
    problem: bool = False
    indices: Optional[Indices] = None

    def __str__(self) -> str:
        if self.teacher_name is None:
            return f'{self.name} {self.shape}: its own initialization, {self.reason}'
        taken = [_shortened(of) for of in self.indices or ()]
        kept = 'all of it' if not any(of for of in taken) else ' x '.join(of or ':' for of in taken)
        return f'{self.name} {self.shape} <- {self.teacher_name} {self.teacher_shape}: {kept}'


def _shortened(indices: Optional[torch.Tensor]) -> str:
    if indices is None:
        return ''
    values = [str(i) for i in indices.tolist()]
    return f"[{', '.join(values if len(values) <= 6 else [*values[:3], '...', values[-1]])}]"


def plan_selections(
        student: nn.Module,
        shapes: Dict[str, Shape],
        teacher: Teacher,
        anatomies: Tuple[ModelLayout, ModelLayout],
        element: str,
        depth: str,
        heads: str,
        include: Wanted,
        exclude: Wanted,
        include_head: bool,
) -> List[Selection]:
    """A selection, its indices left open, for each tensor of the student, or why there is none.

    Args:
        student: The model.
        shapes: Of the tensors of its state dict.
        teacher: Where they are from.
        anatomies: Of student and teacher.
        element, depth, heads, include, exclude, include_head: As :func:`timm_rep.weight_select_init` has them.

    Raises:
        ValueError: No tensor of the student is called as ``include`` or ``exclude`` say.
    """
    names = _names(shapes, teacher.shapes, depth)
    classifiers = classifier_names(student)
    plan = [
        _planned(name, shape, names[name], teacher, classifiers, include, exclude, include_head)
        for name, shape in shapes.items()
    ]
    _check_patterns([(s.name, s.role) for s in plan], include, exclude)
    return [_feasible(s, element, anatomies, heads) for s in plan]


def _names(student: Dict[str, Shape], teacher: Dict[str, Shape], depth: str) -> Dict[str, Optional[str]]:
    """For each tensor of the student that of the teacher, whichever of them is a RePaFormer."""
    ours, theirs = to_plain_names(student, teacher), to_plain_names(teacher, student)
    of_plain = {plain: name for name, plain in theirs.items() if plain is not None}
    found = map_names(
        {plain: student[name] for name, plain in ours.items() if plain is not None},
        {plain: teacher[name] for plain, name in of_plain.items()},
        depth,
    )
    return {name: of_plain.get(found.get(plain)) for name, plain in ours.items()}


def _planned(
        name: str,
        shape: Shape,
        teacher_name: Optional[str],
        teacher: Teacher,
        classifiers: Sequence[str],
        include: Wanted,
        exclude: Wanted,
        include_head: bool,
) -> Selection:
    role = role_of(name, classifiers)
    selection = Selection(name, role, shape)
    if include is not None and not matches(name, role, include):
        return selection._replace(reason='not included')
    if matches(name, role, exclude):
        return selection._replace(reason='excluded')
    if in_classifier(name, classifiers) and not include_head:
        return selection._replace(reason='a classifier')
    if teacher_name is None:
        reason = absent_in_plain(name)
        return selection._replace(reason=reason or 'the teacher has none', problem=not reason)
    teacher_shape = teacher.shapes[teacher_name]
    if in_classifier(name, classifiers) and teacher_shape[0] != shape[0]:
        return selection._replace(reason=f'a classifier of {shape[0]} classes, the teacher has {teacher_shape[0]}')
    return selection._replace(teacher_name=teacher_name, teacher_shape=teacher_shape)


def _feasible(s: Selection, element: str, anatomies: Tuple[ModelLayout, ModelLayout], heads: str) -> Selection:
    """The selection, or why it cannot be made: of sizes, heads or positions that the teacher does not have."""
    if s.teacher_name is None:
        return s
    ours, theirs = without_ones(s.shape), without_ones(s.teacher_shape)
    reason = ''
    if len(ours) != len(theirs):
        reason = 'with another number of axes'
    elif element == 'uniform_heads':
        try:
            teacher_shape = with_ones_of(s.teacher_shape, s.shape)
            select_head_aware(
                torch.empty(teacher_shape, device='meta'), s.shape, s.name, s.teacher_name, *anatomies, heads=heads)
        except ValueError as e:
            reason = str(e)
    elif any(a > b for a, b in zip(ours, theirs)):
        reason = 'smaller'
    if not reason:
        return s
    return Selection(
        s.name, s.role, s.shape, reason=f'{s.teacher_name} of the teacher is {s.teacher_shape}, {reason}', problem=True)


def _check_patterns(tensors: List[Tuple[str, str]], *wanted: Wanted) -> None:
    for of in wanted:
        for word in words(of):
            if word not in ROLES and not any(matches(name, role, word) for name, role in tensors):
                raise ValueError(f'No tensor of the student is called {word!r}, nothing was changed.')
