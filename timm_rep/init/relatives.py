"""The names that a RePaFormer's tensors have in the plain model that it is made of."""
import re
from typing import Dict, Mapping, Optional

from .matching import Shape, without_ones

__all__ = ['absent_in_plain', 'to_plain_names']

_MLP = r'\.(mlp|mlp_channels)'
_PLAIN = [
    (_MLP + r'\.norm1\.(weight|bias)$', r'.norm2.\2'),
    (_MLP + r'\.act\.act\.', r'.\1.act.'),
    (r'^(stages\..*)\.mlp\.ls\.gamma$', r'\1.layer_scale2.scale'),
    (r'\.mlp\.ls\.gamma$', '.ls2.gamma'),
]
_STATISTICS = re.compile(_MLP + r'\.(norm1\.(running_mean|running_var|num_batches_tracked)|norm2\.\w+)$')
_SHIFT = re.compile(_MLP + r'\.norm1\.bias$')
_TOKEN_NORM = re.compile(r'^(blocks\.\d+)\.norm1\.')


def _is_repa(names: Mapping[str, Shape]) -> bool:
    return any(name.endswith(('.mlp.norm1.running_mean', '.mlp_channels.norm1.running_mean')) for name in names)


def to_plain_names(model: Mapping[str, Shape], other: Mapping[str, Shape]) -> Dict[str, Optional[str]]:
    """For each tensor of a model its name in one of the other's kind: another one if only the former is RePa.

    None for what a plain model has nothing of: the statistics and the second norm of an FFN.
    """
    if not _is_repa(model) or _is_repa(other):
        return {name: name for name in model}
    affine = any(name.endswith('.norm2.alpha') for name in other)  # ResMLP's norm
    found: Dict[str, Optional[str]] = {}
    for name, shape in model.items():
        new = name
        for pattern, replacement in _PLAIN:
            new = re.sub(pattern, replacement, new)
        if affine:
            new = re.sub(r'\.norm2\.weight$', '.norm2.alpha', re.sub(r'\.norm2\.bias$', '.norm2.beta', new))
        # a released RePa-MLPMixer's norm of the tokens is over another axis than that of the plain one
        block = _TOKEN_NORM.match(name)
        if block and without_ones(shape) != model.get(f'{block[1]}.mlp_channels.norm1.weight', without_ones(shape)):
            new = f'{block[1]}.norm_tokens.{name.rsplit(".", 1)[1]}'
        found[name] = None if _STATISTICS.search(name) else new
    return found


def absent_in_plain(name: str) -> str:
    """Why a tensor of a RePaFormer has no counterpart in a plain model, '' if that is no matter of course."""
    if _STATISTICS.search(name):
        return 'a BatchNorm that the teacher has none of, see calibrate_batchnorm()'
    return 'the norm of the teacher has no shift' if _SHIFT.search(name) else ''
