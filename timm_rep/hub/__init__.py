"""Model folders, local or on the Hub: writing, reading and checking them; and models built from published weights."""
from timm_rep.scales.files import SCALES_NAME

from ._folder import (
    check_saveable,
    check_timm_model,
    load_folder,
    published_files,
    save_folder,
    scales_of,
    split_name,
    verify_folder,
    write_hashes,
    write_model,
)
from ._repository import (
    CARD_NAME,
    CONFIG_NAME,
    WEIGHTS_NAME,
    ModelRepository,
    read_folder,
    read_repository,
    sha256,
)
from ._resolve import ORGANIZATION, build_model, find_weights, organization, published_architecture
from ._script_args import separate_overlay
from .released import load_released, register_released_keys

__all__ = [
    'CARD_NAME',
    'CONFIG_NAME',
    'ORGANIZATION',
    'SCALES_NAME',
    'WEIGHTS_NAME',
    'ModelRepository',
    'build_model',
    'check_saveable',
    'check_timm_model',
    'find_weights',
    'load_folder',
    'load_released',
    'organization',
    'published_architecture',
    'published_files',
    'read_folder',
    'read_repository',
    'register_released_keys',
    'save_folder',
    'scales_of',
    'separate_overlay',
    'sha256',
    'split_name',
    'verify_folder',
    'write_hashes',
    'write_model',
]
