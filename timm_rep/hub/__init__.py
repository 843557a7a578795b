"""Loading published weights; publishing is in ``folder``, ``card`` and ``publish``, which are not imported here."""
from .load import build_model, find_weights, organization, resolve_pretrained
from .released import load_released, register_released_keys
from .repository import CONFIG, SCALES, WEIGHTS, ModelRepository, read_folder, read_repository, sha256

__all__ = [
    'CONFIG',
    'SCALES',
    'WEIGHTS',
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
