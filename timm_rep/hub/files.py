"""A published model: a folder here, or a repository of the Hub, with timm's config.json and the files that it names."""
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Union

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from timm_rep.utils.network import hub_errors

__all__ = ['CONFIG', 'SCALES', 'WEIGHTS', 'Published', 'check_sha256', 'sha256']

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
SCALES = 'scales.safetensors'

# in config.json, beside what timm has there
_HASHES = 'sha256'


def sha256(path: Union[str, os.PathLike]) -> str:
    """The hash of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sha256(path: Union[str, os.PathLike], expected: str, source: str) -> None:
    """
    Args:
        source: What says what is expected.

    Raises:
        RuntimeError: It is another file; the message says what was expected and found, and which file to delete.
    """
    found = sha256(path)
    if found != expected:
        real = os.path.realpath(path)
        raise RuntimeError(
            f'{os.fspath(path)!r} is not the file that {source} published, or is damaged: expected sha256 {expected}, '
            f'found {found} ({os.path.getsize(path)} bytes). Nothing was loaded. Delete {real!r} to get it again.')


class Published:
    """What a published model's config.json says, and its files, checked against it.

    Attributes:
        where: The folder, or the repository and the commit.
        config: Of timm's ``save_for_hf``, and ``sha256``, by file.
    """

    def __init__(self, where: str, path_of: Callable[[str], str]):
        """
        Args:
            path_of: The path of a file by its name; raises FileNotFoundError or EntryNotFoundError if there is none.
        """
        self.where, self._path_of = where, path_of
        path = path_of(CONFIG)
        try:
            with open(path, encoding='utf-8') as file:
                self.config: Dict[str, Any] = json.load(file)
            if not isinstance(self.config, dict):
                raise TypeError('it is no mapping')
            kinds = {'architecture': str, 'pretrained_cfg': dict, 'model_args': dict, _HASHES: dict}
            for name, kind in kinds.items():
                if not isinstance(self.config.get(name, kind()), kind):
                    raise TypeError(f'{name} is {self.config[name]!r}')
            self.config['architecture']
        except (ValueError, KeyError, TypeError) as e:
            raise RuntimeError(f'{path!r} is no config.json of a timm model: {type(e).__name__}: {e}') from e

    @classmethod
    def in_folder(cls, folder: Union[str, os.PathLike]) -> 'Published':
        """
        Raises:
            FileNotFoundError: There is no config.json in it.
            RuntimeError: That cannot be read.
        """

        def path_of(name):
            path = Path(folder) / name
            if not path.is_file():
                raise FileNotFoundError(f'no {name} in {os.fspath(folder)!r}')
            return os.fspath(path)

        return cls(os.fspath(folder), path_of)

    @classmethod
    def on_hub(cls, repository: str, cache_dir: Optional[Union[str, os.PathLike]] = None) -> 'Published':
        """
        Args:
            repository: 'owner/name' or 'owner/name@revision'.
            cache_dir: Instead of the Hub's own.

        Raises:
            OSError: The Hub has no such repository, revision or file, cannot be reached, or failed.
            RuntimeError: The config.json cannot be read.
        """
        name, _, revision = repository.partition('@')
        # all files are of one commit, the one that config.json came from
        with hub_errors():
            config = hf_hub_download(name, CONFIG, revision=revision or None, cache_dir=cache_dir)
        commit = Path(config).parent.name

        def path_of(file):
            if file == CONFIG:
                return config
            with hub_errors():
                return hf_hub_download(name, file, revision=commit, cache_dir=cache_dir)

        return cls(f'{name}@{commit}', path_of)

    @property
    def model_args(self) -> Mapping[str, Any]:
        """The arguments that the model was created with."""
        return self.config.get('model_args', {})

    @property
    def hashes(self) -> Mapping[str, str]:
        """The sha256 of the published files, where the config.json has them."""
        return self.config.get(_HASHES, {})

    def file(self, name: str) -> str:
        """The path of a file of it, downloaded if need be.

        Raises:
            OSError: There is none, or the Hub cannot be reached or failed.
            RuntimeError: It is not the file that was published.
        """
        path = self._path_of(name)
        if name in self.hashes:
            check_sha256(path, self.hashes[name], self.where)
        return path

    def has(self, name: str) -> bool:
        """Whether it has such a file; that of a repository is downloaded."""
        if name in self.hashes:
            return True
        try:
            self._path_of(name)
        except LocalEntryNotFoundError:  # the Hub cannot be reached: nobody knows
            raise
        except (FileNotFoundError, EntryNotFoundError):
            return False
        return True
