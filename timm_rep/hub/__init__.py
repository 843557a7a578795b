from .card import CARD, TRAIN, card_text, write_card
from .folder import check_folder, load_folder, seal_folder, split_name, write_folder
from .metrics import (
    METRICS,
    PREDICTIONS,
    measure_accuracy,
    measure_cost,
    read_metrics,
    read_predictions,
    write_predictions,
)
from .prepare import prepare_folder, write_folded
from .push import Change, push_folder
from .release import convert_released

__all__ = [
    'CARD',
    'METRICS',
    'PREDICTIONS',
    'TRAIN',
    'Change',
    'card_text',
    'check_folder',
    'convert_released',
    'load_folder',
    'measure_accuracy',
    'measure_cost',
    'prepare_folder',
    'push_folder',
    'read_metrics',
    'read_predictions',
    'seal_folder',
    'split_name',
    'write_card',
    'write_folded',
    'write_folder',
    'write_predictions',
]
