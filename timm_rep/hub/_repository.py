"""Model repositories: a folder with timm's config.json, local or on the Hub, and the files that it names."""
import hashlib
import os
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional

from timm_rep.scales.files import SCALES_NAME
from timm_rep.utils.atomic import recover
from timm_rep.utils.files import StrPath, read_config
from timm_rep.utils.network import hub_download
from timm_rep.utils.preprocessing import check_preprocessing

CONFIG_NAME = 'config.json'
CARD_NAME = 'README.md'
WEIGHTS_NAME = 'model.safetensors'


def sha256(path: StrPath) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sha256(path: StrPath, expected: str, source: str, own: bool = False) -> None:
    """Raise RuntimeError unless a file has the SHA-256 that ``source``, a folder or repository, published.

    Args:
        path: The file.
        expected: The SHA-256, as hexadecimal digits.
        source: Name for the message.
        own: The file is in a folder of the user, who may have changed it: the message says what to do then.
    """
    found = sha256(path)
    if found != expected:
        real = os.path.realpath(path)
        write = 'write the model again with timm_rep.export(model, folder)'
        if os.path.basename(path) not in (WEIGHTS_NAME, SCALES_NAME):
            write = 'run timm-rep card on the folder'
        delete = f'If you changed it, {write}; otherwise delete' if own else 'Delete'
        raise RuntimeError(
            f'{os.fspath(path)!r} is not the file that {source} published, or is damaged: expected sha256 {expected}, '
            f'found {found} ({os.path.getsize(path)} bytes). Nothing was loaded. {delete} {real!r} and get it again.')


class ModelRepository(NamedTuple):
    """A model repository: a local folder, or a repository of the Hub at one commit.

    Attributes:
        folder: The folder; for a repository, the folder of the commit in the Hub's cache.
        config: Contents of config.json: the fields of timm's ``save_for_hf``, and ``sha256``, a mapping from file to
            hash.
        repo_id: 'owner/name' on the Hub; '' for a local folder.
        cache_dir: Folder of the Hub's cache; None for the default one.
    """
    folder: Path
    config: Mapping[str, Any]
    repo_id: str = ''
    cache_dir: Optional[StrPath] = None

    @property
    def where(self) -> str:
        """The folder, or 'owner/name@commit'."""
        return f'{self.repo_id}@{self.folder.name}' if self.repo_id else os.fspath(self.folder)

    @property
    def model_args(self) -> Mapping[str, Any]:
        """Arguments of ``create_model``."""
        return self.config.get('model_args', {})

    @property
    def hashes(self) -> Mapping[str, str]:
        """SHA-256 of the published files, by name; empty if another package wrote the folder."""
        return self.config.get('sha256', {})

    def file(self, name: str) -> str:
        """Path of a file, downloaded if necessary, and checked if config.json has its hash.

        Raises:
            OSError: The file does not exist, or the Hub cannot be reached or failed.
            RuntimeError: The file is not the published one.
        """
        path = self.folder / name
        if self.repo_id:
            path = Path(hub_download(self.repo_id, name, self.folder.name, self.cache_dir))
        elif not path.is_file():
            kind = 'is not a regular file' if os.path.lexists(path) else 'does not exist'
            raise FileNotFoundError(f'Expected {name} in {self.where!r}, but it {kind}.')
        if name in self.hashes:
            check_sha256(path, self.hashes[name], self.where, own=not self.repo_id)
        return os.fspath(path)


def read_folder(folder: StrPath) -> ModelRepository:
    """Complete any interrupted write of a local folder, then read its config.json.

    Raises:
        FileNotFoundError: The folder has no config.json.
        RuntimeError: The config.json cannot be read.
    """
    path = Path(folder) / CONFIG_NAME
    recover(path.parent)
    if not path.is_file():
        raise FileNotFoundError(
            f'Expected a folder of a model, but {os.fspath(folder)!r} has no {CONFIG_NAME}: write it with '
            'timm_rep.export(model, folder).')
    return ModelRepository(path.parent, _read_config(path))


def read_repository(repo_id: str, cache_dir: Optional[StrPath] = None) -> ModelRepository:
    """Read the config.json of a repository on the Hub; its other files come from the same commit.

    Args:
        repo_id: 'owner/name' or 'owner/name@revision'.
        cache_dir: Folder of the Hub's cache; None for the default one.

    Raises:
        OSError: The repository, revision or file does not exist, or the Hub cannot be reached or failed.
        RuntimeError: The config.json cannot be read.
    """
    name, _, revision = repo_id.partition('@')
    path = Path(hub_download(name, CONFIG_NAME, revision or None, cache_dir))
    return ModelRepository(path.parent, _read_config(path), name, cache_dir)


def _read_config(path: Path) -> Dict[str, Any]:
    config, source = read_config(path), repr(str(path))
    check_preprocessing(config.get('pretrained_cfg', {}), f'{source}: pretrained_cfg')
    for name in config.get('sha256', {}):
        if Path(name).name != name:
            raise RuntimeError(f'{source}: sha256 must name files in this folder, got {name!r}.')
    if 'transformers_version' in config:  # its save_pretrained() copies the hashes of the files that it read
        config.pop('sha256', None)
    return config
