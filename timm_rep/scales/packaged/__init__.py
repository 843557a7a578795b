"""Searched scales in this package, one file for each model; README.md lists the dataset of each search."""
from pathlib import Path
from typing import List

__all__ = ['locate_packaged', 'packaged_scales']

_FOLDER = Path(__file__).parent
_SUFFIX = '.safetensors'


def packaged_scales() -> List[str]:
    """Names of the models with packaged scales."""
    return sorted(path.stem for path in _FOLDER.glob(f'*{_SUFFIX}'))


def locate_packaged(name: str) -> str:
    """Path of the packaged scales of a model, one of :func:`packaged_scales`."""
    return str(_FOLDER / f'{name}{_SUFFIX}')
