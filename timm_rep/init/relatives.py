"""The names that a RePaFormer's tensors have in the plain model that it is made of."""
import re
from typing import Dict, Mapping

from .depth import Shape

__all__ = ['plain_names', 'waits_for_statistics']

_PLAIN = [
    (r'\.(mlp|mlp_channels)\.norm1\.(weight|bias)$', r'.norm2.\2'),
    (r'^(stages\..*)\.mlp\.ls\.gamma$', r'\1.layer_scale2.scale'),
    (r'\.mlp\.ls\.gamma$', '.ls2.gamma'),
]
# an MLP-Mixer's norm of the tokens is over another axis than that of the plain one
_TOKEN_NORM = re.compile(r'^(blocks\.\d+)\.norm1\.')
_STATISTICS = re.compile(r'\.(mlp|mlp_channels)\.(norm1\.(running_mean|running_var|num_batches_tracked)|norm2\.\w+)$')


def _is_repa(names: Mapping[str, Shape]) -> bool:
    return any(name.endswith(('.mlp.norm1.running_mean', '.mlp_channels.norm1.running_mean')) for name in names)


def plain_names(student: Mapping[str, Shape], teacher: Mapping[str, Shape]) -> Dict[str, str]:
    """For each tensor of a student its name in a teacher of that kind: another one if only the student is RePa."""
    if not _is_repa(student) or _is_repa(teacher):
        return {name: name for name in student}
    mixer = any('.mlp_tokens.' in name for name in student)
    found = {}
    for name in student:
        new = name
        for pattern, replacement in _PLAIN:
            new = re.sub(pattern, replacement, new)
        if mixer and new == name:
            new = _TOKEN_NORM.sub(r'\1.norm_tokens.', name)
        found[name] = new
    return found


def waits_for_statistics(name: str) -> bool:
    """Whether a tensor of a RePaFormer has nothing to be selected from in a plain model."""
    return _STATISTICS.search(name) is not None
