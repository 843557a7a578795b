"""Hyper-Search for the constants of RepOptimizers, and its data sets."""
from .data import DeviceLoader, count_classes, create_search_dataset, create_search_loader
from .hyper_search import hyper_search, parameter_groups

__all__ = [
    'DeviceLoader', 'count_classes', 'create_search_dataset', 'create_search_loader', 'hyper_search',
    'parameter_groups',
]
