"""Layer selection and component mapping: the teacher's tensor for each tensor of a student.

`Initializing Models with Larger Ones` - https://arxiv.org/abs/2311.18823, "Layer Selection" and "Component Mapping"
"""
import fnmatch
import re
from itertools import chain
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

import torch.nn as nn

from .elements import evenly_spaced

LAYER_SELECTIONS = ('first', 'uniform', 'mid', 'last')

# the components of the paper's table 10, the head, and the rest: convolutions, downsampling, layer scales
COMPONENTS = ('patch_embed', 'pos_embed', 'attention', 'norm', 'mlp', 'head', 'other')

Shape = Tuple[int, ...]
_Groups = List[Tuple[FrozenSet[Any], List[str]]]  # kinds and numbers of blocks

# the first match gives the component
_PATTERNS = (
    ('pos_embed', r'(^|\.)(pos_embed\w*|cls_token|dist_token|reg_token|rel_pos\w*|relative_position_bias_table)(\.|$)'),
    ('norm', r'(^|\.)(norm\w*|\w+_norm|bn\d*|ln_\w+)(\.|$)'),
    ('patch_embed', r'^(patch_embed|stem|conv_stem|conv1)\w*\.'),
    ('norm', r'(^|\.)stem\.\d+\.(weight|bias)$'),
    ('mlp', r'(^|\.)mlp\w*\.'),  # in MaxViT, below attn_block and attn_grid
    ('attention', r'(^|\.)attn\w*\.'),
)
# names of a RePaFormer's tensors, and of the same tensors in the plain model
_MLP = r'\.(mlp|mlp_channels)'
_REPA_TO_PLAIN = (
    (_MLP + r'\.norm1\.(weight|bias)$', r'.norm2.\2'),
    (_MLP + r'\.act\.act\.', r'.\1.act.'),
    (r'^(stages\..*)\.mlp\.ls\.gamma$', r'\1.layer_scale2.scale'),
    (r'\.mlp\.ls\.gamma$', '.ls2.gamma'),
)
# names of blocks in a stage: 3, b3 (RegNet), denselayer3 (DenseNet), conv4_3 (DPN)
_BLOCK = re.compile(r'(|b|denselayer|conv\d+_)(\d+)')
_REPA_ONLY = re.compile(_MLP + r'\.(norm1\.(running_mean|running_var|num_batches_tracked)|norm2\.\w+)$')


def classifier_names(model: nn.Module) -> Tuple[str, ...]:
    """Names of the classifiers of a timm model, by its ``pretrained_cfg`` or, if it has none, by ``get_classifier()``;
    empty for other models.
    """
    names = (getattr(model, 'pretrained_cfg', None) or {}).get('classifier') or ()
    if not names and hasattr(model, 'get_classifier'):
        found = model.get_classifier()
        heads = {*found} if isinstance(found, (tuple, list)) else {found}
        names = [name for name, module in model.named_modules() if name and module in heads]
    return (names,) if isinstance(names, str) else tuple(names)


def component_of(name: str, classifiers: Sequence[str] = ()) -> str:
    """The component that a tensor belongs to by its name, one of ``COMPONENTS``."""
    if name.startswith(tuple(f'{classifier}.' for classifier in classifiers)):
        return 'head'
    return next((component for component, pattern in _PATTERNS if re.search(pattern, name)), 'other')


def matches(name: str, component: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is the component or matches the name of the tensor."""
    return any(p == component or fnmatch.fnmatch(name, p) for p in patterns)


def without_ones(shape: Shape) -> Shape:
    """A shape without leading and trailing ones: a linear layer and a 1 x 1 convolution are the same map."""
    inner = [i for i, length in enumerate(shape) if length != 1]
    return shape[inner[0]:inner[-1] + 1] if inner else ()


def match_outer_ones(shape: Shape, like: Shape) -> Shape:
    """A shape with the leading and trailing ones of ``like`` instead of its own.

    With equal rank but different inner axes, return ``shape`` unchanged: the table of one head, for example, has an
    axis of length 1 that counts.
    """
    if len(shape) == len(like) and len(without_ones(shape)) != len(without_ones(like)):
        return shape
    inner = [i for i, length in enumerate(like) if length != 1] or [len(like), len(like) - 1]
    return (1,) * inner[0] + without_ones(shape) + (1,) * (len(like) - 1 - inner[-1])


def select_blocks(length: int, count: int, layer_selection: str = 'first') -> List[int]:
    """Indices of ``count`` out of ``length`` blocks, ascending.

    Args:
        length: Blocks of the teacher, at least ``count``.
        count: Blocks of the student, at least 1.
        layer_selection: The 'first', 'mid'dle or 'last' blocks, or 'uniform'ly spaced ones.

    Raises:
        ValueError: ``layer_selection`` is unknown.
    """
    if layer_selection not in LAYER_SELECTIONS:
        raise ValueError(f'layer_selection must be one of {", ".join(LAYER_SELECTIONS)}, got {layer_selection!r}.')
    if layer_selection == 'uniform':
        return evenly_spaced(length, count).tolist()
    start = {'first': 0, 'mid': (length - count) // 2, 'last': length - count}[layer_selection]
    return list(range(start, start + count))


def _is_repa(names: Mapping[str, Shape]) -> bool:
    return any(name.endswith(('.mlp.norm1.running_mean', '.mlp_channels.norm1.running_mean')) for name in names)


def _plain_names(shapes: Mapping[str, Shape], other: Mapping[str, Shape]) -> Dict[str, str]:
    """Names by the names that the tensors have in a plain model, if only this model and not the other is RePa.

    BatchNorm statistics and the second norm of an FFN, which a plain model does not have, are left out.
    """
    if not _is_repa(shapes) or _is_repa(other):
        return {name: name for name in shapes}
    affine = any(name.endswith('.norm2.alpha') for name in other)  # ResMLP's norm
    norm = 'norm2' if any('.norm2.' in name for name in other) else 'norm'  # ConvNeXt's blocks have one
    names: Dict[str, str] = {}
    for name, shape in shapes.items():
        if _REPA_ONLY.search(name):
            continue
        plain = name
        for pattern, replacement in _REPA_TO_PLAIN:
            plain = re.sub(pattern, replacement, plain)
        plain = re.sub(r'\.norm2\.(weight|bias)$', rf'.{norm}.\1', plain)
        if affine:
            plain = re.sub(r'\.norm2\.weight$', '.norm2.alpha', re.sub(r'\.norm2\.bias$', '.norm2.beta', plain))
        # in a released RePa-MLPMixer norm1 normalizes the tokens, in the plain model the channels
        block, _, parameter = name.rpartition('.norm1.')
        channels = shapes.get(f'{block}.mlp_channels.norm1.weight', shape)
        if re.fullmatch(r'blocks\.\d+', block) and without_ones(shape) != without_ones(channels):
            plain = f'{block}.norm_tokens.{parameter}'
        names[plain] = name
    return names


def absent_in_plain(name: str, found: Mapping[str, Optional[str]]) -> str:
    """Reason why a tensor of a RePaFormer has no counterpart in a plain model; '' if it should have one.

    ``found`` is the result of :func:`map_names`.
    """
    if _REPA_ONLY.search(name):
        return 'a BatchNorm that the teacher does not have, see calibrate_batchnorm()'
    scale, is_shift = re.subn('(' + _MLP + r'\.norm1)\.bias$', r'\1.weight', name)
    return 'the norm of the teacher has no shift' if is_shift and found.get(scale) else ''


def _children(shapes: Mapping[str, Shape]) -> Dict[str, Dict[str, Shape]]:
    """Shapes by name within each child of a module; a tensor of the module itself is a child with the name ''."""
    children: Dict[str, Dict[str, Shape]] = {}
    for name, shape in shapes.items():
        part, _, rest = name.partition('.')
        children.setdefault(part, {})[rest] = shape
    return children


def _group_blocks(blocks: Mapping[str, Mapping[str, Shape]]) -> _Groups:
    """Numbers of blocks in groups of equal names and shapes, each with its kind: the names and numbers of axes.

    The first block of a stage that changes stride or width is a group of its own.
    """
    groups: Dict[FrozenSet[Any], List[str]] = {}
    for number in sorted(blocks, key=int):
        groups.setdefault(frozenset(blocks[number].items()), []).append(number)
    return [
        (frozenset((name, len(without_ones(shape))) for name, shape in block), numbers)
        for block, numbers in groups.items()
    ]


def _match_kinds(student: _Groups, teacher: _Groups) -> Dict[FrozenSet[Any], FrozenSet[Any]]:
    """The kind of the teacher's blocks for each of the student's: the same, or else the most similar of the others.

    Blocks of similar kinds have, for example, layer scales or biases in one of the two models only.
    """
    kinds, left = (list(dict.fromkeys(kind for kind, _ in groups)) for groups in (student, teacher))
    found = {kind: kind for kind in kinds if kind in left}
    left = [kind for kind in left if kind not in found]
    for kind in kinds:
        similar = [other for other in left if kind & other] if kind not in found else []
        if similar:
            found[kind] = min(similar, key=lambda other: len(kind ^ other))
            left.remove(found[kind])
    return found


def _match_numbers(
        student: Mapping[str, Mapping[str, Shape]],
        teacher: Mapping[str, Mapping[str, Shape]],
        layer_selection: str,
) -> Dict[str, str]:
    """Number of the teacher's block by number of the student's block, without blocks that have no counterpart."""
    if student.keys() == teacher.keys():
        return {number: number for number in student}
    groups, teacher_groups = _group_blocks(student), _group_blocks(teacher)
    numbers: Dict[str, str] = {}
    for kind, teacher_kind in _match_kinds(groups, teacher_groups).items():
        ours = [members for other, members in groups if other == kind]
        theirs = [members for other, members in teacher_groups if other == teacher_kind]
        if len(ours) != len(theirs):
            # only one of the two changes the width in its first block: match the first, and the others
            flat = [sorted(chain.from_iterable(members), key=int) for members in (ours, theirs)]
            ours, theirs = ([members[:1], members[1:]] for members in flat)
        for members, teacher_members in zip(ours, theirs):
            count = min(len(members), len(teacher_members))
            selected = select_blocks(len(teacher_members), count, layer_selection) if count else []
            numbers.update(zip(members, (teacher_members[i] for i in selected)))
    return numbers


def _match_blocks(
        student: Mapping[str, Mapping[str, Shape]],
        teacher: Mapping[str, Mapping[str, Shape]],
        layer_selection: str,
) -> Dict[str, str]:
    """Name of the teacher's block by name of the student's block, without blocks that have no counterpart."""
    ours, theirs = _by_prefix(student), _by_prefix(teacher)
    return {
        prefix + number: prefix + other for prefix, blocks in ours.items()
        for number, other in _match_numbers(blocks, theirs.get(prefix, {}), layer_selection).items()}


def _by_prefix(children: Mapping[str, Mapping[str, Shape]]) -> Dict[str, Dict[str, Mapping[str, Shape]]]:
    """The blocks of a module by their numbers, by what their names begin with."""
    blocks: Dict[str, Dict[str, Mapping[str, Shape]]] = {}
    for name, child in children.items():
        match = _BLOCK.fullmatch(name)
        if match:
            blocks.setdefault(match[1], {})[match[2]] = child
    return blocks


def _map_names(student: Mapping[str, Shape], teacher: Mapping[str, Shape], layer_selection: str) -> Dict[str, str]:
    """:func:`map_names` for two plain models or two RePaFormers, without the names that have no counterpart."""
    found: Dict[str, str] = {}
    children, teacher_children = _children(student), _children(teacher)
    blocks = _match_blocks(children, teacher_children, layer_selection)
    for part, child in children.items():
        teacher_part = blocks.get(part) if _BLOCK.fullmatch(part) else part
        if teacher_part is None:
            continue
        teacher_child = teacher_children.get(teacher_part, {})
        if '' in child and '' in teacher_child:
            found[part] = teacher_part
        elif teacher_child:
            names = _map_names(child, teacher_child, layer_selection)
            found.update((f'{part}.{name}', f'{teacher_part}.{other}') for name, other in names.items())
    return found


def map_names(
        student: Mapping[str, Shape],
        teacher: Mapping[str, Shape],
        layer_selection: str = 'first',
) -> Dict[str, Optional[str]]:
    """Map the tensors of a student to the tensors of a teacher by their names.

    Names are equal except for the numbers of blocks. Where the two models have different numbers of blocks, in each
    stage of a hierarchical model separately, the teacher's blocks are chosen by ``layer_selection``. Blocks that differ
    from their neighbours, such as the first of a ResNet's stage with its stride, are chosen among the teacher's blocks
    of that kind, or of the most similar one. Between a RePaFormer and a plain model the norms and layer scales of the
    FFNs are mapped too.

    Args:
        student: Shapes of the student's tensors by name.
        teacher: Shapes of the teacher's tensors by name.
        layer_selection: 'first', 'uniform', 'mid' or 'last', see :func:`select_blocks`.

    Returns:
        For each name of the student the teacher's name, None if the teacher has no such tensor.

    Raises:
        ValueError: ``layer_selection`` is unknown.
    """
    names, teacher_names = _plain_names(student, teacher), _plain_names(teacher, student)
    found = _map_names(
        {plain: student[name] for plain, name in names.items()},
        {plain: teacher[name] for plain, name in teacher_names.items()},
        layer_selection,
    )
    found = {names[plain]: teacher_names[other] for plain, other in found.items()}
    return {name: found.get(name) for name in student}
