from .hyper_search import hyper_search, parameter_groups

__all__ = ['hyper_search', 'parameter_groups']
