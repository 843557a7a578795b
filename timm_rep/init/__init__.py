"""Initialization of a model from a larger one."""
from .calibrate import calibrate_batchnorm
from .elements import evenly_spaced, select_elements
from .matching import map_names, select_blocks
from .mimetic import attention_products, attentions, mimetic_init_
from .teachers import open_teacher
from .weight_select import SelectionReport, TensorSelection, weight_select_init

__all__ = [
    'SelectionReport',
    'TensorSelection',
    'attention_products',
    'attentions',
    'calibrate_batchnorm',
    'evenly_spaced',
    'map_names',
    'mimetic_init_',
    'open_teacher',
    'select_blocks',
    'select_elements',
    'weight_select_init',
]
