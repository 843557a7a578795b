"""Structural and gradient re-parameterization for timm.

Importing this package registers its models and optimizers with timm and does nothing else.
"""
from . import models as models
from . import optim as optim
from ._verify import verify
from .convert import convert_to_repa, convert_to_repopt
from .deploy import export, quantize_ptq
from .hub import load_released
from .init import calibrate_batchnorm, mimetic_init_, weight_select_init
from .scales import Scales, attach_grad_mults
from .search import hyper_search
from .version import __version__

__all__ = [
    'Scales',
    '__version__',
    'attach_grad_mults',
    'calibrate_batchnorm',
    'convert_to_repa',
    'convert_to_repopt',
    'export',
    'hyper_search',
    'load_released',
    'mimetic_init_',
    'quantize_ptq',
    'verify',
    'weight_select_init',
]
