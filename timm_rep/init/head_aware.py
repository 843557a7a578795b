"""Element selection by the structure of an axis: heads, projections, gates, groups, hidden channels, positions."""
import math
import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table

from .attention import AttentionLayout, fused_projections
from .elements import Indices, evenly_spaced, index_axes
from .matching import Shape

HEADS = ('whole', 'within')
Grid = Tuple[int, int]

_BIAS_TABLE = re.compile(r'(^|\.)relative_position_bias_table$')
_HIDDEN = re.compile(r'^(.*)\.(fc1\.weight|fc1\.bias|norm2\.\w+|fc2\.weight)$')
_GLU = re.compile(r'^(.*\.)?(fc1|w12)\.(weight|bias)$')
# layers of a bottleneck of ResNet, RegNet or RegNetZ by axis that has the channels of its middle convolution
_BOTTLENECK = (
    re.compile(r'^(.*\.)?(?:(?:conv[12]b?|bn[12])(?:_\w+)?|(se|attn)\.fc2)\.'),
    re.compile(r'^(.*\.)?(?:conv3(?:_\w+)?|(se|attn)\.fc1)\.'),
)
_MIDDLE = ('conv2', 'conv2.conv', 'conv2_kxk.conv')


class Unselectable(Exception):
    """A tensor of the teacher that the student's cannot be selected from; the message is the reason."""


class ModelLayout(NamedTuple):
    """The structure of a model's axes that the shapes of its tensors do not show.

    Attributes:
        attentions: Layouts of the attentions by module.
        active: Numbers of activated hidden channels, which come first, by RePaFormer FFN.
        shapes: Shapes by tensor.
        known: Whether there is a model, and not only shapes.
        grid: Rows and columns of the positions of ``pos_embed``; None if unknown.
    """
    attentions: Mapping[str, AttentionLayout]
    active: Mapping[str, int]
    shapes: Mapping[str, Shape]
    known: bool = False
    grid: Optional[Grid] = None

    @classmethod
    def from_model(cls, model: Optional[nn.Module], shapes: Mapping[str, Shape]) -> 'ModelLayout':
        """Read the layout from a model; without one only the shapes are known."""
        attentions: Dict[str, AttentionLayout] = {}
        active: Dict[str, int] = {}
        for name, module in model.named_modules() if model is not None else ():
            attention = AttentionLayout.of(module)
            if attention is not None:
                attentions[name] = attention
            if hasattr(getattr(module, 'act', None), 'active_channels'):
                active[name] = module.act.active_channels
        grid = getattr(getattr(model, 'patch_embed', None), 'grid_size', None)
        return cls(attentions, active, shapes, model is not None, grid)

    def attention_of(self, name: str) -> Tuple[Optional[AttentionLayout], List[str]]:
        """The innermost attention that a tensor belongs to, None if unknown, and the parts of its name within it."""
        parts = name.split('.')
        for i in range(len(parts) - 1, 0, -1):
            attention = self.attentions.get('.'.join(parts[:i]))
            if attention is not None:
                return attention, parts[i:]
        return None, parts

    def projections(self, name: str) -> int:
        """Number of projections one after the other along the first axis of a tensor."""
        attention, parts = self.attention_of(name)
        if attention is None or not attention.projections(parts, 0):
            return fused_projections(name)
        return 1 if attention.head_first else len(attention.projections(parts, 0))

    def groups(self, name: str, dim: int) -> int:
        """Number of groups of channels along an axis that has the channels of a bottleneck's grouped convolution."""
        match = _BOTTLENECK[dim].match(name) if dim < 2 else None
        if match is None:
            return 1
        block, squeeze = match[1] or '', match[2]
        middle = next((w for w in (f'{block}{layer}.weight' for layer in _MIDDLE) if w in self.shapes), '')
        first = self.shapes.get(middle.replace('conv2', 'conv1').replace('kxk', '1x1'))
        # ResNet has its squeeze-and-excitation after the last convolution, RegNet after the middle one
        if not first or (squeeze and f'{block}bn2.weight' in self.shapes):
            return 1
        outputs, inputs = self.shapes[middle][:2]
        return outputs // inputs if self.shapes[name][dim] == first[0] == outputs else 1


class _Unit(NamedTuple):
    """Entries along an axis that are selected by themselves.

    Attributes:
        ours: Positions along the student's axis, (heads or groups, entries of each); the heads of an attention are
            (heads of keys and values, heads that share one of these, channels of a head).
        theirs: Positions along the teacher's axis.
        kind: 'heads', 'groups' or a kind of hidden channels; '' for an axis, or half of one, without structure.
    """
    ours: torch.Tensor
    theirs: torch.Tensor
    kind: str = ''

    def select(self, heads: str) -> torch.Tensor:
        """The teacher's positions, one for each of the student's; Unselectable if there are too few."""
        length, teacher_length = self.ours.numel(), self.theirs.numel()
        if heads == 'within' and teacher_length >= length > 0:
            return self.theirs.flatten()[evenly_spaced(teacher_length, length)]
        if any(ours > theirs for ours, theirs in zip(self.ours.shape, self.theirs.shape)):
            if not self.kind:
                raise Unselectable('smaller')
            if 'channels' in self.kind:
                raise Unselectable(f'the student has {length} {self.kind}, the teacher {teacher_length}')
            (*numbers, width), (*teacher_numbers, teacher_width) = self.ours.shape, self.theirs.shape
            of = ['', '']
            if self.kind == 'heads' and max(numbers[1], teacher_numbers[1]) > 1:
                of = [f' in {n} groups' for n in (numbers[0], teacher_numbers[0])]
            raise Unselectable(
                f'the student has {math.prod(numbers)} {self.kind} of {width} channels{of[0]}, the teacher '
                f"{math.prod(teacher_numbers)} of {teacher_width}{of[1]}; heads='within' selects among the channels of "
                'all of them')
        if length == 0:
            return torch.arange(0)
        every = [evenly_spaced(theirs, ours) for theirs, ours in zip(self.theirs.shape, self.ours.shape)]
        return index_axes(self.theirs, every).flatten()


def _parts(length: int, first: int) -> Tuple[torch.Tensor, ...]:
    """The first positions of an axis and the others, each (1, entries)."""
    return torch.arange(length)[None].split([first, length - first], dim=1)


def _units(
        name: str,
        dim: int,
        teacher_name: str,
        teacher_length: int,
        student: ModelLayout,
        teacher: ModelLayout,
) -> List[_Unit]:
    """The units of an axis, in any order; one of all entries where it has no structure."""
    length = student.shapes[name][dim]
    glu = _GLU.match(name)
    hidden, teacher_hidden = _HIDDEN.match(name), _HIDDEN.match(teacher_name)
    groups, teacher_groups = student.groups(name, dim), teacher.groups(teacher_name, dim)
    of_attention = _attention_units(name, dim, teacher_name, teacher_length, student, teacher)
    if of_attention:
        return of_attention
    if dim == 0 and glu:
        output = student.shapes.get((glu[1] or '') + {'fc1': 'fc2', 'w12': 'w3'}[glu[2]] + '.weight')
        if output and 2 * output[1] == length:
            halves = zip(_parts(length, length // 2), _parts(teacher_length, teacher_length // 2))
            return [_Unit(*half) for half in halves]
    if hidden and teacher_hidden and dim == (hidden[2] == 'fc2.weight'):
        active, teacher_active = student.active.get(hidden[1]), teacher.active.get(teacher_hidden[1])
        if active is not None and teacher_active is not None:
            parts = zip(_parts(length, active), _parts(teacher_length, teacher_active))
            return [_Unit(*part, f'{kind} hidden channels') for part, kind in zip(parts, ('activated', 'idle'))]
    if max(groups, teacher_groups) > 1:
        ours, theirs = torch.arange(length), torch.arange(teacher_length)
        return [_Unit(ours.reshape(groups, -1), theirs.reshape(teacher_groups, -1), 'groups')]
    return [_Unit(torch.arange(length)[None], torch.arange(teacher_length)[None])]


def _attention_units(
        name: str,
        dim: int,
        teacher_name: str,
        teacher_length: int,
        student: ModelLayout,
        teacher: ModelLayout,
) -> List[_Unit]:
    """The heads of each projection along an axis; none for other axes."""
    attention, parts = student.attention_of(name)
    if attention is None:
        if dim == 0 and student.known and fused_projections(name) > 1 and student.shapes[name][0] != teacher_length:
            raise Unselectable(
                "of an attention whose heads are unknown; exclude it, or use element_selection='uniform'")
        return []
    if _BIAS_TABLE.search(name):
        attention = attention._replace(widths=None)
        projections = '' if dim in _position_axes(name, student.shapes[name]) else 'o'  # one number a head
    else:
        projections = attention.projections(parts, dim)
    length = student.shapes[name][dim]
    ours = attention.positions(projections, length) if projections else None
    if ours is None:
        return []
    larger, larger_parts = teacher.attention_of(teacher_name)
    if larger is None:  # a state dict
        queries = _queries(teacher_name, parts, teacher.shapes) or attention.queries
        larger = attention.scaled(projections, length, teacher_length, queries)
    elif _BIAS_TABLE.search(name):
        larger = larger._replace(widths=None)
    elif larger.projections(larger_parts, dim) != projections:
        raise Unselectable(f'with projections other than {projections}')
    theirs = larger.positions(projections, teacher_length)
    if theirs is None:
        raise Unselectable(f'which does not split into {larger.heads} heads of equal width')
    return [_Unit(*pair, 'heads') for pair in zip(ours, theirs)]


def _queries(name: str, parts: List[str], shapes: Mapping[str, Shape]) -> int:
    """Heads of queries that share a head of keys and values, from the shapes of a state dict; 0 if it does not show.

    Args:
        name: Name of a tensor of the attention.
        parts: Its name within the attention, split at the dots.
        shapes: Shapes by tensor.
    """
    within = '.'.join(['', *parts[1:-1], 'weight'])
    prefix = name[:-len('.'.join(parts))]
    for layers in ('q_proj', 'k_proj'), ('query', 'key'):
        q, k = (shapes.get(f'{prefix}{layer}{within}', (0,))[0] for layer in layers)
        if k:
            return q // k
    return 0


def head_aware_indices(
        name: str,
        teacher_name: str,
        teacher_shape: Shape,
        student: ModelLayout,
        teacher: ModelLayout,
        heads: str = 'whole',
) -> Indices:
    """Evenly spaced positions within each unit of the axes of a tensor, from names and shapes.

    - A ``qkv``, ``kv`` or ``q`` (ViT, Swin, PVT, TinyViT), in either order of heads and projections: for each
      projection, evenly spaced heads and evenly spaced channels within each head; with ``heads='within'``, evenly
      spaced channels across all heads.
    - Grouped-query attention (``num_kv_heads``): evenly spaced heads of keys and values, and evenly spaced heads of
      queries of each of them.
    - The inputs of an attention's ``proj``, its ``norm`` and its ``gate``: the same channels as its values, or, where
      several heads share these, as its queries.
    - ``relative_position_bias_table`` (Swin, BEiT, MaxViT): the selected heads; :func:`interpolate_positions` fits the
      window.
    - ``pos_embed`` (ViT): :func:`interpolate_positions` fits the grid.
    - The first layer of a GLU: gates and values separately.
    - The hidden channels of a RePaFormer's FFN from another RePaFormer's: activated and idle ones separately.
    - The channels of the grouped convolution in a bottleneck (ResNeXt, RegNet, RegNetZ), in all of its layers: evenly
      spaced groups, and evenly spaced channels within each group.
    - Every other axis, such as the residual stream and plain hidden layers: evenly spaced (algorithm 1).

    Args:
        name: Name of the student's tensor.
        teacher_name: Name of the teacher's tensor.
        teacher_shape: Shape of the teacher's tensor, with as many axes as the student's.
        student: Layout of the student.
        teacher: Layout of the teacher. Unknown heads are assumed to be as wide as the student's.
        heads: 'whole' or 'within'.

    Returns:
        The positions along each axis, None where the axis is kept whole or interpolated.
    """
    shape = student.shapes[name]
    interpolated = interpolated_axes(name, shape, teacher_shape, student.grid, teacher.grid)
    indices: Indices = []
    for dim, (length, teacher_length) in enumerate(zip(shape, teacher_shape)):
        if dim in interpolated:
            indices.append(None)
            continue
        positions = torch.empty(length, dtype=torch.long)
        for unit in _units(name, dim, teacher_name, teacher_length, student, teacher):
            positions[unit.ours.flatten()] = unit.select(heads)
        indices.append(None if torch.equal(positions, torch.arange(teacher_length)) else positions)
    return indices


def _position_axes(name: str, shape: Shape) -> Tuple[int, ...]:
    """The axes of positions, which are interpolated instead of selected."""
    if name == 'pos_embed' and len(shape) == 3:
        return (1,)
    if not _BIAS_TABLE.search(name):
        return ()
    return (0,) if len(shape) == 2 else (1, 2)  # (positions, heads), in MaxViT also (heads, height, width)


def interpolated_axes(
        name: str, shape: Shape, teacher_shape: Shape, grid: Optional[Grid] = None, teacher_grid: Optional[Grid] = None,
) -> Tuple[int, ...]:
    """The axes that :func:`interpolate_positions` fits, with its arguments; none if the positions are the same.

    Raises:
        Unselectable: The positions differ and are not those of grids.
    """
    axes = _position_axes(name, shape)
    lengths = [(teacher_shape[axis], shape[axis]) for axis in axes]
    if all(old == new for old, new in lengths) and not (axes == (1,) and _differ(grid, teacher_grid)):
        return ()
    (old, new), *others = lengths
    if not others and not (_window(new) if axes == (0,) else _grids(old, new, teacher_grid, grid)):
        raise Unselectable(f'{old} positions cannot be interpolated to {new}: expected grids')
    return axes


def interpolate_positions(
        tensor: torch.Tensor, name: str, shape: Shape, grid: Optional[Grid] = None, teacher_grid: Optional[Grid] = None,
) -> torch.Tensor:
    """Resize a teacher's position embedding or table of relative positions to the student's grid or window.

    Class and register tokens of a position embedding are copied, the first ones if the teacher has more.

    Args:
        tensor: The teacher's tensor.
        name: Name of the student's tensor; others than these are returned as they are.
        shape: Shape of the student's tensor.
        grid: Rows and columns of the student's position embedding; None for a square.
        teacher_grid: Those of the teacher's; None for the student's if both are as long, otherwise for a square.

    Returns:
        The tensor with the student's number of positions and the teacher's number of channels or heads.

    Raises:
        Unselectable: The positions differ and are not those of grids.
    """
    axes = interpolated_axes(name, shape, tuple(tensor.shape), grid, teacher_grid)
    if not axes:
        return tensor
    if axes == (1, 2):
        window, table = [(length + 1) // 2 for length in shape[1:]], (tensor.shape[0], *shape[1:])
        # timm 1.0.26 returns (heads * height, width)
        return resize_rel_pos_bias_table(tensor, window, table).reshape(table)
    if axes == (0,):
        return resize_rel_pos_bias_table(tensor, (_window(shape[0]),) * 2, (shape[0], tensor.shape[1]))
    grids = _grids(tensor.shape[1], shape[1], teacher_grid, grid)
    (prefix, old), (kept, new) = grids  # type: ignore[misc]  # axes are () if it is None
    tensor = torch.cat([tensor[:, :kept], tensor[:, prefix:]], dim=1)
    return resample_abs_pos_embed(tensor, list(new), list(old), num_prefix_tokens=kept)


def _differ(grid: Optional[Grid], teacher_grid: Optional[Grid]) -> bool:
    """Whether two grids are known and differ."""
    return None not in (grid, teacher_grid) and grid != teacher_grid


def _grids(
        old: int, new: int, old_grid: Optional[Grid], new_grid: Optional[Grid],
) -> Optional[Tuple[Tuple[int, Grid], Tuple[int, Grid]]]:
    """Prefix tokens and grids of position embeddings of two lengths, with as few prefix tokens as possible.

    An unknown grid is a square. None unless there are grids with at most 9 prefix tokens, and the old one has at least
    as many prefix tokens.
    """
    found = []
    for length, grid in ((old, old_grid), (new, new_grid)):
        prefixes = range(min(length, 10))
        squares = ((prefix, (math.isqrt(length - prefix),) * 2) for prefix in prefixes)
        given = squares if grid is None else ((prefix, grid) for prefix in prefixes)
        found.append([(prefix, sides) for prefix, sides in given if math.prod(sides) == length - prefix])
    pairs = [(a, b) for b in found[1] for a in found[0] if a[0] >= b[0]]
    # prefer equal prefixes, or else equal grids
    return min(pairs, default=None, key=lambda pair: (
        pair[0][0] != pair[1][0] and pair[0][1] != pair[1][1], pair[1], pair[0]))


def _window(length: int) -> Optional[int]:
    """Side of the window whose table of relative positions has this length (BEiT's have 3 extra), None if none has."""
    for extra in (0, 3):
        side = math.isqrt(max(length - extra, 0))
        if side ** 2 == length - extra:
            return (side + 1) // 2
    return None
