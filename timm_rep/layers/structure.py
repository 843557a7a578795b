"""Layers with several structures, and the structures that a state dict holds.

A RePa layer has the structure 'training' or 'deploy', a RepOpt layer 'target', 'search', 'csla' or 'deploy'.
"""
from typing import Any, Iterator, Mapping, Tuple

import torch.nn as nn

__all__ = ['foldable_layers', 'holds_structure', 'is_reparameterized']


def foldable_layers(module: nn.Module, prefix: str = '') -> Iterator[Tuple[str, nn.Module]]:
    """The layers of a model that can be folded or are, by name.

    They have an attribute ``structure`` and a method ``structures_in(state_dict, prefix)``: the structures that the
    entries of a state dict under the prefix belong to, none if there are no such entries.
    """
    for name, layer in module.named_modules(prefix=prefix):
        if hasattr(layer, 'structures_in'):
            yield name, layer


def holds_structure(model: nn.Module, state_dict: Mapping[str, Any], structure: str) -> bool:
    """Whether a state dict in the key layout of this package holds a layer of the model in this structure."""
    return any(structure in layer.structures_in(state_dict, f'{name}.') for name, layer in foldable_layers(model))


def is_reparameterized(model: nn.Module) -> bool:
    """Whether a model has foldable layers and all of them have the deploy structure."""
    return {layer.structure for _, layer in foldable_layers(model)} == {'deploy'}
