from .card import CARD, TRAIN, card_text, write_card
from .convert_released import convert_released
from .files import CONFIG, SCALES, WEIGHTS, Published, sha256
from .folder import check_folder, load_folder, split_name, write_folder, write_hashes
from .load import build_model, published_cfgs, with_published
from .metrics import (
    METRICS,
    PREDICTIONS,
    measure_accuracy,
    measure_cost,
    read_metrics,
    read_predictions,
    write_predictions,
)
from .publish import prepare_folder, write_folded
from .push import Change, push_folder
from .release import DEFAULT_IDLE_RATIO, RELEASE, fetch_released, has_release
from .released import load_released, register_released_keys
from .sources import find_weights, local_tags, organization

__all__ = [
    'CARD',
    'CONFIG',
    'DEFAULT_IDLE_RATIO',
    'METRICS',
    'PREDICTIONS',
    'RELEASE',
    'SCALES',
    'TRAIN',
    'WEIGHTS',
    'Change',
    'Published',
    'build_model',
    'card_text',
    'check_folder',
    'convert_released',
    'fetch_released',
    'find_weights',
    'has_release',
    'load_folder',
    'load_released',
    'local_tags',
    'measure_accuracy',
    'measure_cost',
    'organization',
    'prepare_folder',
    'published_cfgs',
    'push_folder',
    'read_metrics',
    'read_predictions',
    'register_released_keys',
    'sha256',
    'split_name',
    'with_published',
    'write_card',
    'write_folded',
    'write_folder',
    'write_hashes',
    'write_predictions',
]
