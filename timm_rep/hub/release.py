"""The RePaFormer authors' own weights on the Hub, converted and kept in its cache."""
import os
import re
from pathlib import Path
from typing import List, Optional, Tuple, Union

import torch.nn as nn
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.file_download import repo_folder_name
from safetensors.torch import save_file

from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.network import hub_errors

from .files import check_sha256, sha256
from .released import load_released

__all__ = ['DEFAULT_IDLE_RATIO', 'RELEASE', 'fetch_released', 'has_release', 'match_released']

RELEASE = 'Ackesnal/RePaViT'

# the models of the release: the words in the name of a file, of which a DeiT's is RePaViT-Base or RePaDeiT-Base
_RELEASED = {
    'repa_deit_tiny': ('vit', 'tiny'),
    'repa_deit_small': ('vit', 'small'),
    'repa_deit_base': ('vit', 'base'),
    'repa_vit_large': ('vit', 'large'),
    'repa_vit_huge': ('vit', 'huge'),
    'repa_swin_tiny': ('swin', 'tiny'),
    'repa_swin_small': ('swin', 'small'),
    'repa_swin_base': ('swin', 'base'),
}
_SUFFIXES = ('.safetensors', '.pth', '.pt', '.bin', '.pth.tar')
_SIZES = {'t': 'tiny', 'ti': 'tiny', 's': 'small', 'b': 'base', 'l': 'large', 'h': 'huge'}
_OTHERS = ('mixer', 'poolformer', 'lvvit', 'retinanet', 'maskrcnn', 'upernet', 'dino')
# 0.75, 0_75 or 0p75; or in percent, after the size or a word for it
_RATIO = re.compile(
    r'(?<!\d)0[._p](\d+)|(?:tiny|small|base|large|huge|[-_](?:ti|[tsblhr])|ratio|idle)[-_]?r?(25|50|75|90)(?!\d)')
DEFAULT_IDLE_RATIO = 0.75
# beside the files of a commit in the Hub's cache
_FOLDER = 'timm-rep'


def has_release(variant: str) -> bool:
    """Whether the authors have published weights of the model."""
    return variant in _RELEASED


def _family_and_size(file: str) -> Optional[Tuple[str, ...]]:
    name = re.sub(r'([a-z])(?=[A-Z][a-z])', r'\1_', file).lower()
    if any(other in re.sub('[^a-z]', '', name) for other in _OTHERS):
        return None
    family = 'swin' if 'swin' in name else 'vit' if re.search('vit|deit', name) else None
    words = re.split(r'[^a-z]+', name)
    sizes = {_SIZES.get(word, word) for word in words} & set(_SIZES.values())
    return (family, *sizes) if family and len(sizes) == 1 else None


def _ratio(file: str) -> Optional[float]:
    found = _RATIO.search(file.lower())
    if not found:
        return None
    return float(f'0.{found[1]}') if found[1] else int(found[2]) / 100


def _is_ratio(named: float, wanted: float) -> bool:
    return abs(named - wanted) < 1e-6


def match_released(files: List[str], variant: str, idle_ratio: float) -> str:
    """Which of the files of the release holds the weights of a model.

    Args:
        files: Their names in the repository.
        variant: The model's name here.
        idle_ratio: One that a file does not name is 0.75, the paper's.

    Raises:
        FileNotFoundError: None of them.
        ValueError: Several may.
    """
    if variant not in _RELEASED:
        raise FileNotFoundError(f'{RELEASE} has no weights of {variant}, but of {", ".join(_RELEASED)}.')
    weights = [file for file in files if file.endswith(_SUFFIXES)]
    found = [
        file for file in weights
        if _family_and_size(file) == _RELEASED[variant] and _is_ratio(_ratio(file) or DEFAULT_IDLE_RATIO, idle_ratio)
    ]
    if not found:
        raise FileNotFoundError(
            f'{RELEASE} has no weights of {variant} with idle_ratio={idle_ratio}, it has '
            f'{", ".join(weights) or "no weights at all"}.')
    if len(found) > 1:
        raise ValueError(
            f'{RELEASE} has several files that may be {variant} with idle_ratio={idle_ratio}: {", ".join(found)}. '
            f'Choose one: pretrained_cfg_overlay=dict(hf_hub_filename={found[0]!r}).')
    return found[0]


def fetch_released(
        model: nn.Module,
        variant: str,
        idle_ratio: float = DEFAULT_IDLE_RATIO,
        filename: Optional[str] = None,
        revision: Optional[str] = None,
        cache_dir: Optional[Union[str, os.PathLike]] = None,
) -> str:
    """The path of the authors' weights of a model, as a safetensors file of this package's layout.

    It is converted once, and kept in the Hub's cache with the commit that it came from, where it is found offline.

    Args:
        model: The model in the configuration of the release; it may be on 'meta', and is not usable afterwards.
        variant: Its name.
        idle_ratio: Of the weights.
        filename: In the repository, if the name and the ratio do not tell.
        revision: Of the repository; its main branch by default.
        cache_dir: Instead of the Hub's own.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Several files may be it, or the file's name says another ratio.
        OSError: The Hub cannot be reached, or failed, and none has been converted before.
        RuntimeError: The file is damaged, is no checkpoint that loads with ``weights_only=True``, or does not fit.
    """
    cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser() / repo_folder_name(
        repo_id=RELEASE, repo_type='model')
    name = f'{variant}-{re.sub("[^A-Za-z0-9.]+", "-", filename) if filename else idle_ratio}.safetensors'
    # which commit a revision was when it was last seen
    seen = cache / _FOLDER / (revision or 'main')
    try:
        with hub_errors():
            info = HfApi().model_info(RELEASE, revision=revision, files_metadata=True)
    except OSError as e:
        commit = seen.read_text() if seen.is_file() else revision
        converted = cache / 'snapshots' / (commit or 'none') / _FOLDER / name
        if not converted.is_file():
            raise OSError(f'{e} And none was converted before.') from e
        return _checked(converted)
    files = {file.rfilename: file for file in info.siblings}
    file = filename or match_released(sorted(files), variant, idle_ratio)
    if file not in files:
        raise FileNotFoundError(f'{RELEASE} has no {file!r}, it has {", ".join(files)}.')
    if not _is_ratio(_ratio(file) or idle_ratio, idle_ratio):
        raise ValueError(f'{file!r} says idle_ratio={_ratio(file)}, the model has {idle_ratio}: create it with that.')
    converted = cache / 'snapshots' / info.sha / _FOLDER / name
    if not converted.is_file():
        with hub_errors():
            path = hf_hub_download(RELEASE, file, revision=info.sha, cache_dir=cache_dir)
        if files[file].lfs:
            check_sha256(path, files[file].lfs.sha256, f'{RELEASE}@{info.sha}')
        state_dict = load_released(model, path).state_dict()
        with replacing_files(converted.parent) as temporary:
            save_file(
                {key: value.contiguous() for key, value in state_dict.items()}, temporary / name,
                metadata=dict(source=f'{RELEASE}@{info.sha}', file=file))
            (temporary / f'{name}.sha256').write_text(sha256(temporary / name))
    if not seen.is_file() or seen.read_text() != info.sha:
        with replacing_files(seen.parent) as temporary:
            (temporary / seen.name).write_text(info.sha)
    return _checked(converted)


def _checked(converted: Path) -> str:
    check_sha256(converted, Path(f'{converted}.sha256').read_text(), 'the conversion')
    return os.fspath(converted)
