"""Searched scales that come with this package, one file a model; README.md says what each was searched on."""
from pathlib import Path
from typing import List

__all__ = ['locate_packaged', 'packaged_scales']

_FOLDER = Path(__file__).parent
_SUFFIX = '.safetensors'


def packaged_scales() -> List[str]:
    """The names of the models whose searched scales come with this package."""
    return sorted(path.stem for path in _FOLDER.glob(f'*{_SUFFIX}'))


def locate_packaged(name: str) -> str:
    """The path of one of packaged_scales()."""
    return str(_FOLDER / f'{name}{_SUFFIX}')
