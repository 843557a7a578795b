"""Hyper-Search for the constants of RepOptimizers, and its datasets."""
from ._hyper_search import hyper_search, parameter_groups
from .data import DeviceLoader, create_search_dataset, create_search_loader

__all__ = [
    'DeviceLoader', 'create_search_dataset', 'create_search_loader', 'hyper_search',
    'parameter_groups',
]
