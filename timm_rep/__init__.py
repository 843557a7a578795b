"""Structural and gradient re-parameterization for timm.

Importing this package registers its models with timm and does nothing else.
"""
from .convert import load_released
from .version import __version__

__all__ = ['__version__', 'load_released']
