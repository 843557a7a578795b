"""Weight selection: a small model starts from a subset of a larger one's weights.

`Initializing Models with Larger Ones` - https://arxiv.org/abs/2311.18823
"""
import copy
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import timm
import torch
import torch.nn as nn
from timm.utils import unwrap_model

from .elements import ELEMENT_SELECTIONS, Indices, index_axes, select_elements
from .head_aware import (
    HEADS,
    ModelLayout,
    Unselectable,
    head_aware_indices,
    interpolate_positions,
    interpolated_axes,
)
from .matching import (
    COMPONENTS,
    Shape,
    absent_in_plain,
    classifier_names,
    component_of,
    map_names,
    match_outer_ones,
    matches,
    select_blocks,
)
from .teachers import TeacherSource, for_input_of, open_teacher

# most tensors that a message about a teacher names
_NAMED = 20

ELEMENT_CHOICES = (*ELEMENT_SELECTIONS, 'uniform_heads')


class TensorSelection(NamedTuple):
    """The origin of a tensor of the student.

    Attributes:
        name: Name in the student.
        component: 'patch_embed', 'pos_embed', 'attention', 'norm', 'mlp', 'head' or 'other'.
        shape: Shape in the student.
        teacher_name: Name in the teacher; None if the tensor keeps its own initialization.
        teacher_shape: Shape in the teacher.
        reason: Why the tensor keeps its own initialization, '' if it does not.
        problem: Whether the tensor should have had a counterpart.
        indices: Positions selected along each axis, None where the axis is kept whole or interpolated, by magnitude,
            and where the projections of a fused tensor have different ones.
    """
    name: str
    component: str
    shape: Shape
    teacher_name: Optional[str] = None
    teacher_shape: Optional[Shape] = None
    reason: str = ''
    problem: bool = False
    indices: Optional[Indices] = None

    def __str__(self) -> str:
        if self.teacher_shape is None:
            return f'{self.name} {self.shape}: not selected ({self.reason})'
        lengths = match_outer_ones(self.teacher_shape, self.shape)
        axes = [
            _shortened(positions.tolist()) if positions is not None else ':' if length == before else '[...]'
            for positions, length, before in zip(self.indices or (), self.shape, lengths)]
        selected = 'all of it' if set(axes) <= {':'} else ' x '.join(axes)
        return f'{self.name} {self.shape} <- {self.teacher_name} {self.teacher_shape}: {selected}'


def _shortened(positions: List[int]) -> str:
    values = positions if len(positions) <= 6 else [*positions[:3], '...', positions[-1]]
    return f"[{', '.join(map(str, values))}]"


class SelectionReport(NamedTuple):
    """The result of weight selection.

    Attributes:
        selections: One for each tensor of the student's state dict, in its order.
    """
    selections: Tuple[TensorSelection, ...]

    @property
    def coverage(self) -> float:
        """Percentage of the numbers in the student's state dict that are selected from the teacher."""
        total = sum(torch.Size(s.shape).numel() for s in self.selections)
        return 100 * sum(torch.Size(s.shape).numel() for s in self.selections if s.teacher_name) / total

    @property
    def not_selected(self) -> Tuple[TensorSelection, ...]:
        """The tensors that keep their own initialization."""
        return tuple(s for s in self.selections if s.teacher_name is None)

    def __str__(self) -> str:
        """One line for each tensor, and the coverage."""
        return '\n'.join(map(str, self.selections)) + (
            f"\n{self.coverage:.1f}% of the student's values were selected from the teacher.")


def weight_select_init(
        student: nn.Module,
        teacher: Union[TeacherSource, Sequence[TeacherSource]],
        element_selection: str = 'uniform',
        layer_selection: str = 'first',
        include: Optional[Union[str, Sequence[str]]] = None,
        exclude: Optional[Union[str, Sequence[str]]] = None,
        include_head: bool = False,
        strict: bool = True,
        seed: int = 0,
        heads: str = 'whole',
) -> SelectionReport:
    """Initialize a model, in place, with a selection of the weights of a larger model of its family.

    Three steps: layer selection chooses a block of the teacher for each block of the student, component mapping the
    tensor of the same name in it, element selection the entries of that tensor (section 3). The teacher is not needed
    afterwards. After an error, the student is unchanged.

    Position embeddings and tables of relative positions are first interpolated to the student's grid or window, if the
    teacher's differs. The first convolution of a teacher of RGB images is adapted to a student with another number of
    input channels by timm's ``adapt_input_conv``.

    Args:
        student: The model to initialize, on any device and of any dtype.
        teacher: A model, a state dict, the path of a checkpoint (``.safetensors`` files are read tensor by tensor), or
            the name of a timm model with pretrained weights. A list is a chain: the first initializes a copy of the
            second, that one a copy of the third, and so on, and the last the student; all but the first are models or
            names of timm models.
        element_selection: 'uniform', evenly spaced along every axis (algorithm 1); 'consecutive'; 'random', the same
            positions for axes of the same length; 'random_inconsistent'; the baselines 'l1' and 'magnitude'; see
            :func:`timm_rep.init.select_elements`. Or 'uniform_heads', which respects heads, projections and groups,
            see :func:`timm_rep.init.head_aware.head_aware_indices`.
        layer_selection: 'first', 'uniform', 'mid' or 'last' blocks of the teacher, in each stage separately.
        include: Components ('patch_embed', 'pos_embed', 'attention', 'norm', 'mlp', 'head', 'other') or patterns of
            names to select; None for all.
        exclude: Components or patterns of names that keep their own initialization.
        include_head: Select the classifier too, if it has as many classes as the teacher's.
        strict: Raise an error if a tensor has no counterpart; otherwise it keeps its own initialization.
        seed: Seed of the random selections.
        heads: For 'uniform_heads': select 'whole' heads, or channels 'within' all heads together.

    Returns:
        The origin of every tensor; ``print`` shows one line for each.

    Raises:
        TypeError: The student is not a module, or the teacher is something else than the above.
        ValueError: An argument is unknown, selected weights are not finite, or (strict) tensors have no counterpart or
            too small a one: the message names the first ones.
        FileNotFoundError: The teacher does not exist.
        RuntimeError: The teacher cannot be read.
    """
    if not isinstance(student, nn.Module):
        raise TypeError(f'student must be a torch.nn.Module, got {student!r:.100}.')
    include, exclude = ([x] if isinstance(x, str) else x for x in (include, exclude))
    _check_arguments(element_selection, layer_selection, heads, [*(include or ()), *(exclude or ())])
    if 'head' in (include or ()) and not include_head:
        raise ValueError("include_head must be True with the component 'head' in include, got False.")
    chain = list(teacher) if isinstance(teacher, (list, tuple)) else [teacher]
    if not chain:
        raise ValueError('teacher must name at least one model, got an empty list.')
    first, *between = chain
    for source in between:
        model = _copy_or_create(source)
        weight_select_init(
            model, first, element_selection, layer_selection, include, exclude, include_head, strict, seed, heads)
        first = model

    student = unwrap_model(student)
    state_dict = student.state_dict()
    opened = for_input_of(open_teacher(first, state_dict), student)
    if isinstance(student, nn.ModuleDict):
        raise ValueError('student must be the plain model, got a ModuleDict (features_only=True), whose names differ.')
    if any(value.is_meta for value in state_dict.values()):
        raise ValueError("Expected a student with data, but it is on 'meta': create it on another device.")
    layout = ModelLayout.from_model(student, {name: tuple(value.shape) for name, value in state_dict.items()})
    teacher_layout = ModelLayout.from_model(opened.model, opened.shapes)

    of_heads = heads if element_selection == 'uniform_heads' else None
    selections = _choose_tensors(
        layout, teacher_layout, classifier_names(student), layer_selection, of_heads, include, exclude, include_head)
    problems = [s for s in selections if s.problem]
    if strict and problems:
        raise ValueError(
            f'Expected a counterpart in the teacher for each tensor of the student, but {len(problems)} of '
            f'{len(selections)} have none; nothing was changed. Initialize models before they are converted or folded. '
            'weight_select_init(..., strict=False) leaves these tensors as they are, and returns all reasons.\n  '
            + '\n  '.join(f'{s.name} {s.shape}: {s.reason}' for s in problems[:_NAMED])
            + (f'\n  and {len(problems) - _NAMED} more' if len(problems) > _NAMED else ''))

    # each tensor is written before the next one is read: a teacher in a file needs the memory of one tensor
    before: Dict[str, torch.Tensor] = {}
    try:
        for i, s in enumerate(selections):
            if s.teacher_name is None or s.teacher_shape is None:
                continue
            tensor = opened.read(s.teacher_name).reshape(match_outer_ones(s.teacher_shape, s.shape))
            if of_heads is None:
                tensor = interpolate_positions(tensor, s.name, s.shape, layout.grid, teacher_layout.grid)
                tensor, indices = select_elements(
                    tensor, s.shape, element_selection, seed, key=s.name, parts=layout.projections(s.name))
            else:
                indices = head_aware_indices(
                    s.name, s.teacher_name, tuple(tensor.shape), layout, teacher_layout, of_heads)
                tensor = interpolate_positions(tensor, s.name, s.shape, layout.grid, teacher_layout.grid)
                tensor = index_axes(tensor, indices)
            tensor = tensor.to(state_dict[s.name])
            if not tensor.isfinite().all():
                raise ValueError(
                    f'The weights for {s.name}, selected from {s.teacher_name} of the teacher, must be finite in '
                    f'{tensor.dtype}; nothing was changed. Exclude the tensor, or use another teacher or dtype.')
            before[s.name] = state_dict[s.name].detach().clone()
            with torch.no_grad():
                state_dict[s.name].copy_(tensor)
            selections[i] = s._replace(indices=indices)
            del tensor
    except BaseException:
        with torch.no_grad():
            for name, value in reversed(before.items()):  # of tied tensors, the first one has the original
                state_dict[name].copy_(value)
        raise
    return SelectionReport(tuple(selections))


def _check_arguments(element_selection: str, layer_selection: str, heads: str, patterns: Sequence[str]) -> None:
    if element_selection not in ELEMENT_CHOICES:
        raise ValueError(f'element_selection must be one of {", ".join(ELEMENT_CHOICES)}, got {element_selection!r}.')
    if heads not in HEADS:
        raise ValueError(f'heads must be one of {", ".join(HEADS)}, got {heads!r}.')
    if heads == 'within' and element_selection != 'uniform_heads':
        raise ValueError(f"heads='within' is for the element_selection 'uniform_heads', got {element_selection!r}.")
    select_blocks(1, 1, layer_selection)
    for pattern in patterns:
        if not isinstance(pattern, str) or (pattern not in COMPONENTS and not any(c in pattern for c in '.*?[_')):
            raise ValueError(
                f'include and exclude must be components ({", ".join(COMPONENTS)}) or patterns of names such as '
                f"'blocks.*.attn.*', got {pattern!r}.")


def _choose_tensors(
        student: ModelLayout,
        teacher: ModelLayout,
        classifiers: Sequence[str],
        layer_selection: str,
        heads: Optional[str],
        include: Optional[Sequence[str]],
        exclude: Optional[Sequence[str]],
        include_head: bool,
) -> List[TensorSelection]:
    """The origin of each tensor of the student, without its indices; ``heads`` is None for all but 'uniform_heads'."""
    components = {name: component_of(name, classifiers) for name in student.shapes}
    absent = {*COMPONENTS} - {*(include or ())} - {*components.values()}  # there is nothing to exclude
    for pattern in [*(include or ()), *(exclude or ())]:
        if pattern not in absent and not any(
                matches(name, component, [pattern]) for name, component in components.items()):
            raise ValueError(f'{pattern!r} must match a tensor of the student, but matches none; nothing was changed.')
    classes, teacher_classes = (_class_counts(layout.shapes, classifiers) for layout in (student, teacher))
    selections = []
    names = map_names(student.shapes, teacher.shapes, layer_selection)
    for name, teacher_name in names.items():
        component, problem = components[name], False
        if include is not None and not matches(name, component, include):
            reason = 'not included'
        elif matches(name, component, exclude or ()):
            reason = 'excluded'
        elif component == 'head' and not include_head:
            reason = 'classifier'
        elif teacher_name is None:
            reason = absent_in_plain(name, names)
            reason, problem = reason or 'the teacher has none', not reason
        elif (component == 'head' and classes != teacher_classes and student.shapes[name][:1] in classes
                and teacher.shapes[teacher_name][:1] in teacher_classes):
            reason = (
                f'a classifier of {student.shapes[name][0]} classes, the teacher has {teacher.shapes[teacher_name][0]}')
        else:
            reason = _why_impossible(name, teacher_name, student, teacher, heads)
            problem = bool(reason)
        if reason or teacher_name is None:
            selections.append(TensorSelection(name, component, student.shapes[name], reason=reason, problem=problem))
        else:
            selections.append(TensorSelection(
                name, component, student.shapes[name], teacher_name, teacher.shapes[teacher_name]))
    return selections


def _class_counts(shapes: Mapping[str, Tuple[int, ...]], classifiers: Sequence[str]) -> Set[Tuple[int, ...]]:
    """Numbers of classes, the first axes of the last tensors of classifiers."""
    last = {x: name for x in classifiers for name, shape in shapes.items() if shape and name.startswith(f'{x}.')}
    return {shapes[name][:1] for name in last.values()}


def _why_impossible(
        name: str, teacher_name: str, student: ModelLayout, teacher: ModelLayout, heads: Optional[str],
) -> str:
    shape, reason = student.shapes[name], ''
    teacher_shape = match_outer_ones(teacher.shapes[teacher_name], shape)
    if len(shape) != len(teacher_shape):
        reason = 'with a different number of axes'
    else:
        try:
            if heads is not None:
                head_aware_indices(name, teacher_name, teacher_shape, student, teacher, heads)
            else:
                interpolated = interpolated_axes(name, shape, teacher_shape, student.grid, teacher.grid)
                if any(shape[i] > length for i, length in enumerate(teacher_shape) if i not in interpolated):
                    reason = 'smaller'
        except Unselectable as e:
            reason = str(e)
    return reason and f'{teacher_name} of the teacher is {teacher.shapes[teacher_name]}, {reason}'


def _copy_or_create(source: TeacherSource) -> nn.Module:
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    if isinstance(source, str) and timm.is_model(source):
        return timm.create_model(source)
    raise ValueError(
        f'In a chain of teachers, all but the first must be models or names of timm models, got {source!r}.')
