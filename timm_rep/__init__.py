"""Structural and gradient re-parameterization for timm.

Importing this package registers its models with timm and does nothing else.
"""
from .convert import load_released
from .scales import Scales, attach_grad_mults
from .search import hyper_search
from .version import __version__

__all__ = ['Scales', '__version__', 'attach_grad_mults', 'hyper_search', 'load_released']
