"""Layers with several structures, and the structures that a state dict holds.

A RePa layer has the structure 'training' or 'deploy', a RepOpt layer 'target', 'search', 'csla' or 'deploy'. Such a
layer has an attribute ``structure``, and a table ``structure_keys``: keys of its state dict, or beginnings of them that
end in a dot, with the structures that have such a key.
"""
from typing import Any, Iterator, Mapping, Tuple

import torch.nn as nn

__all__ = ['foldable_layers', 'holds_structure', 'is_reparameterized', 'structures_in']


def foldable_layers(module: nn.Module, prefix: str = '') -> Iterator[Tuple[str, nn.Module]]:
    """Yield foldable and folded layers by name."""
    for name, layer in module.named_modules(prefix=prefix):
        if hasattr(layer, 'structure_keys'):
            yield name, layer


def structures_in(layer: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Tuple[str, ...]:
    """Structures of a layer that the entries of a state dict under a prefix belong to, none without such entries."""
    for key, structures in layer.structure_keys.items():
        key = prefix + key
        if key in state_dict or (key.endswith('.') and any(name.startswith(key) for name in state_dict)):
            return structures
    return ()


def holds_structure(model: nn.Module, state_dict: Mapping[str, Any], structure: str) -> bool:
    """Whether a state dict in the key layout of this package holds a layer of the model in this structure."""
    return any(structure in structures_in(layer, state_dict, f'{name}.') for name, layer in foldable_layers(model))


def is_reparameterized(model: nn.Module) -> bool:
    """Whether a model has foldable layers and all of them have the deploy structure."""
    return {layer.structure for _, layer in foldable_layers(model)} == {'deploy'}
