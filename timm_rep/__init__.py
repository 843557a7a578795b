"""Structural and gradient re-parameterization for timm.

Importing this package registers its models with timm and does nothing else.
"""
from .convert import load_released
from .scales import Scales, attach_grad_mults
from .version import __version__

__all__ = ['Scales', '__version__', 'attach_grad_mults', 'load_released']
