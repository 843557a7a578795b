"""Selection that respects what the axes of a tensor mean: heads, projections, halves, groups, positions."""
import math
import re
from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table

from .elements import Indices, evenly_spaced
from .matching import Shape
from .roles import fused_parts

__all__ = ['HEADS', 'ModelLayout', 'select_head_aware']

HEADS = ('whole', 'within')

_QKV = re.compile(r'(^|\.)(qkv|kv|q|k|v)\.(weight|bias)$|(^|\.)([qkv]_bias|in_proj_weight|in_proj_bias)$')
_PROJ = re.compile(r'(^|\.)attn\w*\.(proj|out_proj)\.weight$')
_TABLE = re.compile(r'(^|\.)relative_position_bias_table$')
_POS_EMBED = re.compile(r'^pos_embed$')
_HIDDEN = re.compile(r'^(.*)\.(fc1\.weight|fc1\.bias|norm2\.\w+|fc2\.weight)$')
_GLU = re.compile(r'(^|\.)(fc1|w12)\.(weight|bias)$')


class ModelLayout(NamedTuple):
    """What the names and shapes of a model's tensors do not say.

    Attributes:
        heads: Attention heads by the name of the module.
        groups: Groups by the name of a convolution that has more than one.
        active: Activated hidden channels by the name of a RePaFormer's FFN; they come first.
        shapes: Shapes by the name of the tensor.
    """
    heads: Mapping[str, int]
    groups: Mapping[str, int]
    active: Mapping[str, int]
    shapes: Mapping[str, Shape]

    @classmethod
    def of(cls, model: Optional[nn.Module], shapes: Mapping[str, Shape]) -> 'ModelLayout':
        """That of a model; without one only the shapes are known."""
        modules = dict(model.named_modules()) if model is not None else {}
        heads: Dict[str, int] = {n: m.num_heads for n, m in modules.items() if isinstance(
            getattr(m, 'num_heads', None), int)}
        groups = {n: m.groups for n, m in modules.items() if isinstance(m, nn.Conv2d) and m.groups > 1}
        active = {n: m.act.active_channels for n, m in modules.items() if hasattr(
            getattr(m, 'act', None), 'active_channels')}
        return cls(heads, groups, active, shapes)

    def heads_of(self, name: str) -> Optional[int]:
        """The heads of the attention that a tensor belongs to."""
        path = name
        while '.' in path:
            path = path.rsplit('.', 1)[0]
            if path in self.heads:
                return self.heads[path]
        return None


class _Idle(NamedTuple):
    """An axis of hidden channels, the activated ones first; and of all there are."""
    teacher: Tuple[int, int]
    student: Tuple[int, int]

    def positions(self, heads: str) -> torch.Tensor:
        (active, hidden), (active_s, hidden_s) = self.teacher, self.student
        if active_s > active or hidden_s - active_s > hidden - active:
            raise ValueError(
                f'the student activates {active_s} of {hidden_s} hidden channels, the teacher {active} of '
                f'{hidden}; channels that are activated and idle ones are selected by themselves.')
        return torch.cat([
            of for of in (
                evenly_spaced(active, active_s) if active_s else None,
                active + evenly_spaced(hidden - active, hidden_s - active_s) if hidden_s > active_s else None,
            ) if of is not None])


class _Axis(NamedTuple):
    """An axis of ``parts`` x ``outer`` x ``inner`` entries, in the teacher and in the student."""
    parts: int
    teacher: Tuple[int, int]
    student: Tuple[int, int]

    def positions(self, heads: str) -> torch.Tensor:
        (outer, inner), (outer_s, inner_s) = self.teacher, self.student
        if heads == 'within' and outer * inner >= outer_s * inner_s:
            within = evenly_spaced(outer * inner, outer_s * inner_s)
        elif outer_s > outer or inner_s > inner:
            raise ValueError(
                f'the student has {outer_s} heads or groups of {inner_s}, the teacher {outer} of {inner}; '
                "whole ones cannot be selected. heads='within' takes their channels together.")
        else:
            within = (evenly_spaced(outer, outer_s)[:, None] * inner + evenly_spaced(inner, inner_s)).flatten()
        return torch.cat([part * outer * inner + within for part in range(self.parts)])


def _split(length: int, parts: int, outer: int) -> Tuple[int, int]:
    return outer, length // parts // outer


def _axis(
        name: str,
        dim: int,
        shape: Sequence[int],
        teacher_shape: Sequence[int],
        student: ModelLayout,
        teacher: ModelLayout,
        teacher_name: str,
) -> Optional[Union[_Axis, _Idle]]:
    """What an axis is composed of, None if of nothing."""
    ours, theirs = shape[dim], teacher_shape[dim]
    is_heads = (dim == 0 and _QKV.search(name)) or (dim == 1 and _PROJ.search(name))
    if (is_heads or (dim == 1 and _TABLE.search(name))) and student.heads_of(name):
        parts = fused_parts(name) if dim == 0 else 1
        heads, heads_of_teacher = student.heads_of(name), teacher.heads_of(teacher_name)
        if heads_of_teacher is None:  # a state dict: heads are as wide as the student's, if that divides them
            width = ours // parts // heads
            heads_of_teacher = theirs // parts // width if theirs // parts % width == 0 else heads
        return _Axis(parts, _split(theirs, parts, heads_of_teacher), _split(ours, parts, heads))
    if dim == 0 and _GLU.search(name):
        second = re.sub(r'(fc1|w12)\.\w+$', lambda m: {'fc1': 'fc2', 'w12': 'w3'}[m[1]] + '.weight', name)
        halves = second in student.shapes and 2 * student.shapes[second][1] == ours
        if halves:
            return _Axis(2, _split(theirs, 2, 1), _split(ours, 2, 1))
    hidden, hidden_of_teacher = _HIDDEN.match(name), _HIDDEN.match(teacher_name)
    if hidden and hidden_of_teacher and dim == (hidden[2] == 'fc2.weight'):
        active, active_of_teacher = student.active.get(hidden[1]), teacher.active.get(hidden_of_teacher[1])
        if active is not None and active_of_teacher is not None:
            return _Idle((active_of_teacher, theirs), (active, ours))
    module, of_teacher = (of.rsplit('.', 1)[0] for of in (name, teacher_name))
    groups = student.groups.get(module, 1)
    if dim == 0 and groups > 1 and student.shapes[f'{module}.weight'][1] > 1:
        width, width_of_teacher = student.shapes[f'{module}.weight'][1], teacher.shapes[f'{of_teacher}.weight'][1]
        # a state dict: groups have as many outputs for an input as the student's
        guess = max(theirs * width * groups // (ours * width_of_teacher), 1)
        return _Axis(1, _split(theirs, 1, teacher.groups.get(of_teacher, guess)), _split(ours, 1, groups))
    return None


def select_head_aware(
        tensor: torch.Tensor,
        shape: Sequence[int],
        name: str,
        teacher_name: str,
        student: ModelLayout,
        teacher: ModelLayout,
        heads: str = 'whole',
) -> Tuple[torch.Tensor, Indices]:
    """Select a student's tensor from a teacher's, evenly spaced in each of the things that an axis holds.

    - A ``qkv`` or ``kv`` (ViT, Swin, PVT): each projection by itself, and in it whole heads, evenly spaced, of each
      head its channels evenly spaced; or (``heads='within'``) the channels of all heads together, evenly spaced.
    - The inputs of an attention's ``proj``: as the channels of its values.
    - ``relative_position_bias_table`` (Swin, BEiT): interpolated to the student's window, and the heads that are kept.
    - ``pos_embed`` (ViT): interpolated to the student's grid, class and register tokens as they are, the first ones
      where the teacher has more.
    - The first layer of a GLU: gates and values by themselves.
    - The hidden channels of a RePaFormer's FFN from another's: the activated ones and the idle ones by themselves.
    - Convolutions with groups of more than a channel: whole groups, and in them channels evenly spaced.
    - Every other axis, the width of the residual stream and that of hidden layers: evenly spaced (algorithm 1).

    Args:
        tensor: The teacher's.
        shape: The student's.
        name: In the student.
        teacher_name: In the teacher.
        student: Of the student.
        teacher: Of the teacher. Where it knows no heads they are taken to be as wide as the student's.
        heads: 'whole' or 'within'.

    Returns:
        The selected tensor, and the positions along every axis, None where all are kept or it is interpolated.

    Raises:
        ValueError: The teacher's is smaller, or has fewer heads or groups than the student or narrower ones, and whole
            ones are asked.
    """
    if _POS_EMBED.search(name) and tensor.dim() == 3 and tensor.shape[1] != shape[1]:
        (prefix, old), (kept, new) = _grids(tensor.shape[1], shape[1])
        tensor = torch.cat([tensor[:, :kept], tensor[:, prefix:]], dim=1)
        tensor = resample_abs_pos_embed(tensor, [new, new], [old, old], num_prefix_tokens=kept)
    if _TABLE.search(name) and tensor.shape[0] != shape[0]:
        window, size = _window(shape[0]), (shape[0], tensor.shape[1])
        # that of an older timm computes on the CPU, whatever it is given
        tensor = tensor.new_empty(size) if tensor.is_meta else resize_rel_pos_bias_table(tensor, (window,) * 2, size)
    indices: Indices = []
    selected = tensor
    for dim, length in enumerate(shape):
        axis = _axis(name, dim, shape, tensor.shape, student, teacher, teacher_name)
        if axis is not None and axis.student != axis.teacher:
            of = axis.positions(heads)
        elif length > tensor.shape[dim]:
            raise ValueError('smaller')
        elif length < tensor.shape[dim]:
            of = evenly_spaced(tensor.shape[dim], length)
        else:
            indices.append(None)
            continue
        selected = selected.index_select(dim, of.to(tensor.device))
        indices.append(of)
    return selected, indices


def _grids(old: int, new: int) -> Tuple[Tuple[int, int], Tuple[int, int]]:
    """Tokens before the grid and the side of it, of position embeddings of these lengths; as few as may be."""
    found = []
    for length in (old, new):
        sides = {prefix: math.isqrt(max(length - prefix, 0)) for prefix in range(10)}
        found.append([(prefix, side) for prefix, side in sides.items() if side and side ** 2 == length - prefix])
    pairs = [(a, b) for b in found[1] for a in found[0] if a[0] >= b[0]]
    if not pairs:
        raise ValueError(f'{old} and {new} positions are not those of square grids and tokens before them.')
    # most likely the tokens before the grid are the same, or else the grids are
    return min(pairs, key=lambda pair: (pair[0][0] != pair[1][0] and pair[0][1] != pair[1][1], pair[1], pair[0]))


def _window(length: int) -> int:
    """The side of a window that has a table of relative positions of this length; BEiT's have 3 more."""
    for extra in (0, 3):
        side = math.isqrt(length - extra)
        if side ** 2 == length - extra:
            return (side + 1) // 2
    raise ValueError(f'{length} positions are not those of a square window.')
