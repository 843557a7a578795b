"""Model repositories: a folder with timm's config.json, here or on the Hub, and the files that it names."""
import hashlib
import os
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Union

from huggingface_hub import hf_hub_download

from timm_rep.utils.files import (
    COUNT,
    NUMBER,
    POSITIVE,
    STRING,
    Kind,
    check_fields,
    check_model_args,
    list_of,
    one_of,
    read_json,
)
from timm_rep.utils.network import hub_errors

__all__ = [
    'CARD', 'CONFIG', 'IMAGES', 'SCALES', 'WEIGHTS', 'ModelRepository', 'check_sha256', 'read_folder',
    'read_repository', 'sha256',
]

PathLike = Union[str, os.PathLike]

CONFIG = 'config.json'
CARD = 'README.md'
WEIGHTS = 'model.safetensors'
SCALES = 'scales.safetensors'

_SIZE = Kind(
    'a list of 3 integers from 1 to 10,000',
    lambda value: isinstance(value, (list, tuple)) and len(value) == 3
    and all(COUNT.test(size) and 1 <= size <= 10_000 for size in value))
# how images are preprocessed, in a pretrained_cfg as in a recipe for train.py
IMAGES = {
    'input_size': _SIZE,
    'mean': list_of(NUMBER),
    'std': list_of(POSITIVE),
    'interpolation': one_of('nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos', 'random'),
    'crop_pct': POSITIVE,
    'num_classes': COUNT,
}
_FIELDS = {
    'num_classes': COUNT, 'num_features': COUNT, 'global_pool': STRING,
    'label_names': Kind('a list or a mapping', lambda value: isinstance(value, (list, dict))),
}
_LAYERS = Kind('a name, or a list of names', lambda value: STRING.test(value) or list_of(STRING).test(value))
_CFG_FIELDS = {
    **IMAGES, 'crop_mode': one_of('center', 'squash', 'border'), 'license': STRING, 'tag': STRING,
    'first_conv': _LAYERS, 'classifier': _LAYERS,
}


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


class ModelRepository(NamedTuple):
    """A model repository: a local folder, or a repository of the Hub at one commit.

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


def read_folder(folder: PathLike) -> ModelRepository:
    """Read the config.json of a local folder.

    Raises:
        FileNotFoundError: There is none.
        RuntimeError: It cannot be read.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f'no {CONFIG} in {os.fspath(folder)!r}')
    return ModelRepository(path.parent, _read_config(path))


def read_repository(repository: str, cache_dir: Optional[PathLike] = None) -> ModelRepository:
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
    return ModelRepository(path.parent, _read_config(path), name, cache_dir)


def _read_config(path: Path) -> Dict[str, Any]:
    config, source = read_json(path), repr(str(path))
    check_fields(config, source, {'architecture': STRING}, _FIELDS)
    cfg, model_args, hashes = (config.get(name, {}) for name in ('pretrained_cfg', 'model_args', 'sha256'))
    check_fields(cfg, f'{source}: pretrained_cfg', {}, _CFG_FIELDS)
    check_model_args(model_args, f'{source}: model_args')
    check_fields(hashes, f'{source}: sha256', dict.fromkeys(hashes, STRING))
    for name in hashes:
        if Path(name).name != name:
            raise RuntimeError(f'{source}: sha256 has {name!r}, which is not the name of a file in this folder.')
    if 'transformers_version' in config:
        # save_pretrained() of transformers copies the hashes of the files that it read, and no file of scales
        if SCALES in config.pop('sha256', {}):
            config['model_args'] = {**model_args, 'scales': False}
    return config
