"""What part of a model a tensor belongs to, by its name."""
import fnmatch
import re
from typing import Optional, Sequence, Tuple, Union

import torch.nn as nn

__all__ = ['ROLES', 'Wanted', 'classifier_names', 'fused_parts', 'in_classifier', 'matches', 'role_of', 'words']

# roles, patterns of names, or None for none of either
Wanted = Optional[Union[str, Sequence[str]]]

# the components of the paper's table 10, the head, and what remains: convolutions, downsampling, layer scales
ROLES = ('patch_embed', 'pos_embed', 'attention', 'norm', 'mlp', 'head', 'other')

# the first that is found in a name
_PATTERNS: Tuple[Tuple[str, str], ...] = (
    ('pos_embed', r'(^|\.)(pos_embed\w*|cls_token|dist_token|reg_token|rel_pos\w*|relative_position_bias_table)(\.|$)'),
    ('norm', r'(^|\.)(norm\w*|\w+_norm|bn\d*|ln_\w+)(\.|$)'),
    ('patch_embed', r'^(patch_embed|stem|conv1)\w*\.'),
    ('norm', r'(^|\.)stem\.\d+\.(weight|bias)$'),
    ('attention', r'(^|\.)attn\w*\.'),
    ('mlp', r'(^|\.)mlp\w*\.'),
)
# projections that lie one behind the other along the first axis
_FUSED = ((r'(^|\.)(qkv|in_proj_weight|in_proj_bias)(\.|$)', 3), (r'(^|\.)kv(\.|$)', 2))


def classifier_names(model: nn.Module) -> Tuple[str, ...]:
    """The names of a timm model's classifiers, none where it does not say."""
    names = (getattr(model, 'pretrained_cfg', None) or {}).get('classifier') or ()
    return (names,) if isinstance(names, str) else tuple(names)


def in_classifier(name: str, classifiers: Sequence[str]) -> bool:
    return any(name.startswith(f'{classifier}.') for classifier in classifiers)


def role_of(name: str, classifiers: Sequence[str] = ()) -> str:
    """The role of a tensor: one of ROLES."""
    if in_classifier(name, classifiers):
        return 'head'
    return next((role for role, pattern in _PATTERNS if re.search(pattern, name)), 'other')


def fused_parts(name: str) -> int:
    """How many projections a tensor holds along its first axis: 3 in a qkv, 2 in a kv."""
    return next((parts for pattern, parts in _FUSED if re.search(pattern, name)), 1)


def words(wanted: Wanted) -> Sequence[str]:
    """The roles and patterns that are wanted, however they are given."""
    return [wanted] if isinstance(wanted, str) else wanted or ()


def matches(name: str, role: str, wanted: Wanted) -> bool:
    """Whether one of these is the role, or a pattern of the name."""
    return any(w == role or fnmatch.fnmatch(name, w) for w in words(wanted))
