"""Reading published models: a folder with timm's config.json, here or on the Hub, and the files that it names."""
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Union

from huggingface_hub import hf_hub_download

from timm_rep.utils.network import hub_errors

__all__ = ['CONFIG', 'SCALES', 'WEIGHTS', 'Published', 'check_sha256', 'read_folder', 'read_repository', 'sha256']

PathLike = Union[str, os.PathLike]

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
SCALES = 'scales.safetensors'


def sha256(path: PathLike) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sha256(path: PathLike, expected: str, source: str) -> None:
    """Compare the hash of a file with the published one.

    Args:
        path: File to check.
        expected: SHA-256, as hexadecimal digits.
        source: Name of the folder or repository that published the hash, for the message.

    Raises:
        RuntimeError: The hashes differ.
    """
    found = sha256(path)
    if found != expected:
        real = os.path.realpath(path)
        raise RuntimeError(
            f'{os.fspath(path)!r} is not the file that {source} published, or is damaged: expected sha256 {expected}, '
            f'found {found} ({os.path.getsize(path)} bytes). Nothing was loaded. Delete {real!r} and get it again.')


class Published(NamedTuple):
    """A published model: a local folder, or a repository of the Hub at one commit.

    Attributes:
        folder: The folder; for a repository, the folder of the commit in the Hub's cache.
        config: Contents of config.json: that of timm's ``save_for_hf``, and ``sha256``, a mapping from file to hash.
        repository: 'owner/name' on the Hub; '' for a local folder.
        cache_dir: Folder of the Hub's cache; None for the default one.
    """
    folder: Path
    config: Mapping[str, Any]
    repository: str = ''
    cache_dir: Optional[PathLike] = None

    @property
    def where(self) -> str:
        """The folder, or 'owner/name@commit'."""
        return f'{self.repository}@{self.folder.name}' if self.repository else os.fspath(self.folder)

    @property
    def model_args(self) -> Mapping[str, Any]:
        """Arguments of ``create_model`` that the model was created with."""
        return self.config.get('model_args', {})

    @property
    def hashes(self) -> Mapping[str, str]:
        """SHA-256 of the published files, by name; empty if it was not published by this package."""
        return self.config.get('sha256', {})

    def file(self, name: str) -> str:
        """Path of a file, downloaded if necessary, and checked if config.json has its hash.

        Raises:
            OSError: There is no such file, or the Hub cannot be reached or failed.
            RuntimeError: The file is not the published one.
        """
        path = self.folder / name
        if self.repository:
            with hub_errors():
                path = hf_hub_download(self.repository, name, revision=self.folder.name, cache_dir=self.cache_dir)
        elif not path.is_file():
            raise FileNotFoundError(f'no {name} in {self.where!r}')
        if name in self.hashes:
            check_sha256(path, self.hashes[name], self.where)
        return os.fspath(path)


def read_folder(folder: PathLike) -> Published:
    """Read the config.json of a local folder.

    Raises:
        FileNotFoundError: There is none.
        RuntimeError: It cannot be read.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f'no {CONFIG} in {os.fspath(folder)!r}')
    return Published(path.parent, _read_config(path))


def read_repository(repository: str, cache_dir: Optional[PathLike] = None) -> Published:
    """Read the config.json of a repository on the Hub; its other files come from the same commit.

    Args:
        repository: 'owner/name' or 'owner/name@revision'.
        cache_dir: Folder of the Hub's cache; None for the default one.

    Raises:
        OSError: There is no such repository, revision or file, or the Hub cannot be reached or failed.
        RuntimeError: The config.json cannot be read.
    """
    name, _, revision = repository.partition('@')
    with hub_errors():
        path = Path(hf_hub_download(name, CONFIG, revision=revision or None, cache_dir=cache_dir))
    return Published(path.parent, _read_config(path), name, cache_dir)


def _read_config(path: Path) -> Dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding='utf-8'))
        if not isinstance(config, dict):
            raise TypeError('it is not a mapping')
        config['architecture']
        for name, kind in {'architecture': str, 'pretrained_cfg': dict, 'model_args': dict, 'sha256': dict}.items():
            if not isinstance(config.get(name, kind()), kind):
                raise TypeError(f'{name} is {config[name]!r}')
        for name in config.get('sha256', {}):
            if Path(name).name != name:
                raise ValueError(f'sha256 has {name!r}, which is not the name of a file in this folder')
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise RuntimeError(f'{str(path)!r} is not the config.json of a timm model: {type(e).__name__}: {e}') from e
    return config
