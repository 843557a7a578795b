"""The structures of a model: which of its layers have several, and which a state dict holds."""
from typing import Any, Iterator, Mapping, Tuple

import torch.nn as nn

__all__ = ['foldable_layers', 'holds_structure']


def foldable_layers(module: nn.Module, prefix: str = '') -> Iterator[Tuple[str, nn.Module]]:
    """The layers that have several structures and know them: ``structure``, ``structure_in(state_dict, prefix)``."""
    for name, layer in module.named_modules(prefix=prefix):
        if hasattr(layer, 'structure_in'):
            yield name, layer


def holds_structure(model: nn.Module, state_dict: Mapping[str, Any], structure: str) -> bool:
    """Whether a state dict, of this package's layout, holds a layer of the model in this structure."""
    return any(layer.structure_in(state_dict, f'{name}.') == structure for name, layer in foldable_layers(model))
