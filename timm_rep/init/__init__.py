"""Initialization of models from larger ones."""
from .calibrate import calibrate_batchnorm
from .depth import map_names, select_blocks
from .elements import evenly_spaced, select_elements
from .meaning import select_by_meaning
from .mimetic import attention_products, attentions, mimetic_init_
from .plan import Selection
from .select import SelectionReport, weight_select_init
from .teachers import open_teacher

__all__ = [
    'Selection',
    'SelectionReport',
    'attention_products',
    'attentions',
    'calibrate_batchnorm',
    'evenly_spaced',
    'map_names',
    'mimetic_init_',
    'open_teacher',
    'select_blocks',
    'select_by_meaning',
    'select_elements',
    'weight_select_init',
]
