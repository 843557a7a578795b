"""Weight selection: a small model starts from a subset of a larger one's weights.

`Initializing Models with Larger Ones` - https://arxiv.org/abs/2311.18823
"""
import copy
from typing import List, NamedTuple, Sequence, Tuple, Union

import timm
import torch
import torch.nn as nn
from timm.utils import unwrap_model

from .elements import ELEMENTS, select_elements
from .head_aware import HEADS, ModelLayout, select_head_aware
from .matching import select_blocks, with_ones_of
from .plan import Selection, plan_selections
from .roles import ROLES, Wanted, fused_parts, words
from .teachers import TeacherSource, open_teacher

__all__ = ['CHOICES', 'SelectionReport', 'weight_select_init']

CHOICES = (*ELEMENTS, 'uniform_heads')


class SelectionReport(NamedTuple):
    """What weight selection did, tensor by tensor of the student's state dict.

    Attributes:
        selections: In the order of the student's state dict.
    """
    selections: Tuple[Selection, ...]

    @property
    def coverage(self) -> float:
        """Percent of the numbers in the student's state dict that are the teacher's."""
        total = sum(torch.Size(s.shape).numel() for s in self.selections)
        return 100 * sum(torch.Size(s.shape).numel() for s in self.selections if s.teacher_name) / total

    @property
    def own(self) -> Tuple[Selection, ...]:
        """Those that keep their own initialization."""
        return tuple(s for s in self.selections if s.teacher_name is None)

    def __str__(self) -> str:
        """A line a tensor, and the coverage."""
        return '\n'.join(map(str, self.selections)) + f'\n{self.coverage:.1f}% of the student is from the teacher.'


def weight_select_init(
        student: nn.Module,
        teacher: Union[TeacherSource, Sequence[TeacherSource]],
        element: str = 'uniform',
        depth: str = 'first',
        include: Wanted = None,
        exclude: Wanted = None,
        include_head: bool = False,
        strict: bool = True,
        seed: int = 0,
        heads: str = 'whole',
) -> SelectionReport:
    """Initialize a model, in place, with a selection of a larger relative's weights.

    Three steps: which block of the teacher (``depth``, in each stage of a hierarchical model by itself), which tensor
    in it (the one of the same name), which elements of that (``element``). The teacher is not needed afterwards.

    Args:
        student: The model to initialize, on any device and of any dtype.
        teacher: A model, a state dict, the path of a checkpoint (a ``.safetensors`` file is read tensor by tensor), or
            the name of a timm model with pretrained weights. Of several the first is the teacher of a copy of the
            second, that of the third and so on, and the last that of the student; all but the first are models, or
            names of timm models.
        element: 'uniform', evenly spaced along every axis (algorithm 1); 'consecutive'; 'random', the same positions
            for axes of the same length; 'random_inconsistent'; the baselines 'l1' and 'magnitude'; see
            :func:`timm_rep.init.select_elements`. Or 'uniform_heads', which respects heads, projections, groups and
            positions, see :func:`timm_rep.init.select_head_aware`.
        depth: 'first', 'uniform', 'mid' or 'last' blocks.
        include: Roles ('patch_embed', 'pos_embed', 'attention', 'norm', 'mlp', 'head', 'other') or patterns of names to
            select, all if None.
        exclude: Roles or patterns of names that keep their own initialization.
        include_head: Select the classifier too; it has as many classes as the teacher's, or keeps its own.
        strict: Raise an error where something has no counterpart; else it keeps its own initialization.
        seed: Of the random selections.
        heads: Of 'uniform_heads': 'whole' heads, or 'within' all of them together.

    Returns:
        Which tensor came from where. ``print`` it for a line a tensor.

    Raises:
        ValueError: An argument is unknown, or (strict) tensors have no counterpart or one that is too small: they are
            listed, and the student is as it was.
        FileNotFoundError, RuntimeError, TypeError: There is no such teacher, it cannot be read, or is no state dict.
            The student is as it was, unless a file that was whole when it was opened fails later.
    """
    _check_words(element, depth, heads, include, exclude)
    chain = list(teacher) if isinstance(teacher, (list, tuple)) else [teacher]
    if not chain:
        raise ValueError('teacher is empty.')
    options = dict(
        element=element, depth=depth, include=include, exclude=exclude, strict=strict, seed=seed, heads=heads)
    first, *between = chain
    for source in between:
        model = _model(source)
        weight_select_init(model, first, include_head=include_head, **options)
        first = model

    source = open_teacher(first)
    student = unwrap_model(student)
    if isinstance(student, nn.ModuleDict):
        raise ValueError('The student is a ModuleDict, as features_only models are, with other names: use one without.')
    own = student.state_dict()
    if any(value.is_meta for value in own.values()):
        raise ValueError("The student is on 'meta', where there is nothing to initialize: create it on a device.")
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    anatomies = ModelLayout.of(student, shapes), ModelLayout.of(source.model, source.shapes)
    plan = plan_selections(
        student, shapes, source, anatomies, element, depth, heads, include, exclude, include_head)
    problems = [s for s in plan if s.problem]
    if strict and problems:
        raise ValueError(
            f'{len(problems)} of {len(plan)} tensors of the student have no counterpart in the teacher, nothing was '
            'changed. strict=False leaves them at their own initialization.\n  '
            + '\n  '.join(f'{s.name} {s.shape}: {s.reason}' for s in problems))

    # each tensor is in place before the next one is read: of a teacher in a file there is never more in memory than one
    report: List[Selection] = []
    for s in plan:
        if s.teacher_name is not None:
            tensor = source.read(s.teacher_name)
            tensor = tensor.reshape(with_ones_of(s.teacher_shape, s.shape))
            if element == 'uniform_heads':
                tensor, indices = select_head_aware(tensor, s.shape, s.name, s.teacher_name, *anatomies, heads=heads)
            else:
                tensor, indices = select_elements(
                    tensor, s.shape, element, seed, key=s.name, parts=fused_parts(s.name))
            with torch.no_grad():
                own[s.name].copy_(tensor)
            s = s._replace(indices=indices)
        report.append(s)
    return SelectionReport(tuple(report))


def _check_words(element: str, depth: str, heads: str, *wanted: Wanted) -> None:
    if element not in CHOICES:
        raise ValueError(f'element is one of {", ".join(CHOICES)}, got {element!r}.')
    if heads not in HEADS:
        raise ValueError(f'heads is one of {", ".join(HEADS)}, got {heads!r}.')
    select_blocks(1, 1, depth)
    for of in wanted:
        for word in words(of):
            if word not in ROLES and not any(c in word for c in '.*?[_'):
                raise ValueError(
                    f'include and exclude take roles ({", ".join(ROLES)}) or patterns of names such as '
                    f"'blocks.*.attn.*', got {word!r}.")


def _model(source: TeacherSource) -> nn.Module:
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    if isinstance(source, str) and timm.is_model(source):
        return timm.create_model(source)
    raise ValueError(
        f'In a chain of teachers all but the first are models or names of timm models, got {source!r}.')
