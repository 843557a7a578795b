"""Published weights: loading them. Writing and publishing is in ``publish``, which is not imported here."""
from ._repository import (
    CARD_NAME,
    CONFIG_NAME,
    SCALES_NAME,
    WEIGHTS_NAME,
    ModelRepository,
    read_folder,
    read_repository,
    sha256,
)
from ._resolve import build_model, find_weights, organization, resolve_pretrained
from .released import load_released, register_released_keys

__all__ = [
    'CARD_NAME',
    'CONFIG_NAME',
    'SCALES_NAME',
    'WEIGHTS_NAME',
    'ModelRepository',
    'build_model',
    'find_weights',
    'load_released',
    'organization',
    'read_folder',
    'read_repository',
    'register_released_keys',
    'resolve_pretrained',
    'sha256',
]
