"""Initialization of models from larger ones."""
from .calibrate import calibrate_batchnorm
from .elements import evenly_spaced, select_elements
from .head_aware import select_head_aware
from .matching import map_names, select_blocks
from .mimetic import attention_products, attentions, mimetic_init_
from .plan import Selection
from .teachers import open_teacher
from .weight_select import SelectionReport, weight_select_init

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
    'select_elements',
    'select_head_aware',
    'weight_select_init',
]
