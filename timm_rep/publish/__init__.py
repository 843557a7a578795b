"""Prepare model folders (weights, measurements, model card, hashes) and push them to the Hub."""
from ._card import accelerated_card, card_text, figures_table
from ._metrics import (
    METRICS_NAME,
    PICTURE_NAME,
    PREDICTIONS_NAME,
    REPORT_NAME,
    AccelerationReport,
    Metrics,
    read_metrics,
)
from ._released import convert_released
from .prepare import prepare_folder, write_folded
from .push import Change, push_folder

__all__ = [
    'METRICS_NAME',
    'PICTURE_NAME',
    'PREDICTIONS_NAME',
    'REPORT_NAME',
    'AccelerationReport',
    'Change',
    'Metrics',
    'accelerated_card',
    'card_text',
    'convert_released',
    'figures_table',
    'prepare_folder',
    'push_folder',
    'read_metrics',
    'write_folded',
]
