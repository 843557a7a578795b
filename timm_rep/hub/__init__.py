"""Loading published weights; publishing is in ``folder``, ``card`` and ``publish``, which are not imported here."""
from .load import build_model, find_weights, organization, resolve_pretrained
from .published import CONFIG, SCALES, WEIGHTS, Published, read_folder, read_repository, sha256
from .released import load_released, register_released_keys

__all__ = [
    'CONFIG',
    'SCALES',
    'WEIGHTS',
    'Published',
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
