"""Checkpoints that the papers' authors released: the RePaFormer repository on the Hub, and layouts of keys."""
import os
import re
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn
from huggingface_hub import HfApi, constants

from timm_rep.layers import holds_structure, is_reparameterized
from timm_rep.utils.checkpoints import read_state_dict, state_dict_of
from timm_rep.utils.files import StrPath
from timm_rep.utils.network import hub_download, hub_errors, is_reachable

from ._repository import check_sha256

RELEASED_REPO_ID = 'Ackesnal/RePaViT'
DEFAULT_IDLE_RATIO = 0.75

# the released models, and the beginning of the names of their files
_RELEASED = {
    'repa_deit_tiny': r'(vit|deit)[-_](tiny|ti|t)',
    'repa_deit_small': r'(vit|deit)[-_](small|s)',
    'repa_deit_base': r'(vit|deit)[-_](base|b)',
    'repa_vit_large': r'(vit|deit)[-_](large|l)',
    'repa_vit_huge': r'(vit|deit)[-_](huge|h)',
    'repa_swin_tiny': r'swin[-_](tiny|ti|t)',
    'repa_swin_small': r'swin[-_](small|s)',
    'repa_swin_base': r'swin[-_](base|b)',
}
_SUFFIXES = ('.safetensors', '.pth', '.pt', '.bin', '.pth.tar')
# as 0.75, 0_75 or 0p75, or in percent after the size
_RATIO = re.compile(r'(?<!\d)0[._p](?P<decimals>\d+)|[-_](?:[a-z]+)[-_]r?(?P<percent>25|50|75|90)(?!\d)')

# for each model class: (pattern, replacement) from a key here to the released key
ReleasedKeys = Sequence[Tuple[str, Union[str, Callable[['re.Match[str]'], str]]]]
_RELEASED_KEYS: Dict[Type[nn.Module], ReleasedKeys] = {}
# buffers that the configuration determines
_RELEASED_BUFFERS = re.compile(r'\.(attn_mask|relative_position_index)$')


def has_release(variant: str) -> bool:
    """Whether the authors have published weights of the model."""
    return variant in _RELEASED


def _ratio(file: str, default: float) -> float:
    found = _RATIO.search(file.lower())
    if not found:
        return default
    return float(f'0.{found["decimals"]}') if found['decimals'] else int(found['percent']) / 100


def match_released(files: Sequence[str], variant: str, idle_ratio: float) -> str:
    """Select the file of the release that holds the weights of a model.

    A file without an idle ratio in its name has 0.75, as in the paper.

    Args:
        files: Names of the files of the release.
        variant: Name of the model.
        idle_ratio: Idle ratio of the weights.

    Returns:
        The name of the file.

    Raises:
        FileNotFoundError: No file matches.
        ValueError: Several files match.
    """
    if not has_release(variant):
        raise FileNotFoundError(
            f'Expected a model of {RELEASED_REPO_ID}, one of {", ".join(_RELEASED)}, but got {variant}.')
    weights = [file for file in files if file.endswith(_SUFFIXES)]
    pattern = re.compile(rf'(?:^|/)repa[-_]?{_RELEASED[variant]}(?![a-z])')
    found = [
        file for file in weights
        if pattern.search(file.lower()) and _ratio(file, DEFAULT_IDLE_RATIO) == idle_ratio
    ]
    if not found:
        raise FileNotFoundError(
            f'Expected weights of {variant} with idle_ratio={idle_ratio} in {RELEASED_REPO_ID}, but it has '
            f'{", ".join(weights) or "no weights at all"}.')
    if len(found) > 1:
        raise ValueError(
            f'Expected one file of {variant} with idle_ratio={idle_ratio} in {RELEASED_REPO_ID}, but it has '
            f'{", ".join(found)}: choose one, pretrained_cfg_overlay=dict(hf_hub_filename={found[0]!r}).')
    return found[0]


def fetch_released(
        variant: str,
        idle_ratio: float = DEFAULT_IDLE_RATIO,
        filename: Optional[str] = None,
        revision: Optional[str] = None,
        cache_dir: Optional[StrPath] = None,
) -> str:
    """Path of the authors' file of a model's weights in the Hub's cache, downloaded if necessary, and checked.

    If the Hub cannot be reached, the file of the revision as it was last seen is used.

    Args:
        variant: Name of the model.
        idle_ratio: Idle ratio of the weights.
        filename: Name of the file. Default: the one that :func:`match_released` selects.
        revision: Branch, tag or commit of the release. Default: its main branch.
        cache_dir: Folder of the Hub's cache. Default: the client's.

    Raises:
        FileNotFoundError: The release has no such file.
        ConnectionError: The Hub cannot be reached, and the file is not in its cache.
        RuntimeError: The file is damaged.
        ValueError: Several files match, or the name of ``filename`` has a different idle ratio.
    """
    path = _fetch(variant, idle_ratio, filename, revision, cache_dir)
    digest = Path(os.path.realpath(path)).name  # the Hub's cache names large files by their sha256
    if len(digest) == 64:
        check_sha256(path, digest, RELEASED_REPO_ID)
    return path


def _fetch(
        variant: str,
        idle_ratio: float,
        filename: Optional[str],
        revision: Optional[str],
        cache_dir: Optional[StrPath],
) -> str:
    try:
        with hub_errors():
            if not is_reachable(constants.ENDPOINT):
                raise ConnectionError(f'{constants.ENDPOINT} cannot be reached.')
            files = HfApi().list_repo_files(RELEASED_REPO_ID, revision=revision)
        file = _choose(files, variant, idle_ratio, filename)
        return hub_download(RELEASED_REPO_ID, file, revision, cache_dir)
    except FileNotFoundError:
        raise
    except OSError as e:  # the Hub did not answer
        try:
            folder = Path(HfApi().snapshot_download(
                RELEASED_REPO_ID, revision=revision, cache_dir=cache_dir, local_files_only=True))
            files = [path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()]
            return os.fspath(folder / _choose(files, variant, idle_ratio, filename))
        except FileNotFoundError:
            raise ConnectionError(f"{e} And it is not in the Hub's cache.") from e


def _choose(files: List[str], variant: str, idle_ratio: float, filename: Optional[str]) -> str:
    file = filename or match_released(sorted(files), variant, idle_ratio)
    if file not in files:
        raise FileNotFoundError(f'Expected {file!r} in {RELEASED_REPO_ID}, but it has {", ".join(files)}.')
    ratio = _ratio(file, default=idle_ratio)
    if ratio != idle_ratio:
        raise ValueError(f'Expected idle_ratio={ratio}, as in the name of {file!r}, but the model has {idle_ratio}.')
    return file


def register_released_keys(cls: Type[nn.Module], keys: ReleasedKeys) -> None:
    """Register how the released checkpoints of a class of models name their tensors.

    Args:
        cls: The class; its subclasses are not included.
        keys: (pattern, replacement) of ``re.sub``, applied in this order, from a key of the class to the released key.
    """
    _RELEASED_KEYS[cls] = keys


def rename_released(
        model: nn.Module,
        path_or_state_dict: Union[StrPath, Mapping[str, torch.Tensor]],
        classifier: Optional[Sequence[str]] = None,
) -> Dict[str, torch.Tensor]:
    """Read a checkpoint as :func:`load_released`, under the keys of the model.

    With ``classifier``, names of the model's classifier layers, the tensors may be adapted to other classes, channels
    or image sizes: shapes are not compared, and the model may lack these layers.
    """
    keys = _RELEASED_KEYS.get(type(model))
    if keys is None:
        raise TypeError(
            f'model must be a {", ".join(k.__name__ for k in _RELEASED_KEYS)}, whose layouts were released, got '
            f'{type(model).__name__}: load checkpoints of other models with their load_state_dict().')
    if is_reparameterized(model):
        raise RuntimeError(
            'Expected a model in the training structure of released checkpoints, but it has the deploy structure: load '
            'into a model created without reparameterized=True, then call its reparameterize().')
    if isinstance(path_or_state_dict, Mapping):
        checkpoint, state_dict = 'the checkpoint', state_dict_of(path_or_state_dict)
    else:
        path = os.fspath(path_or_state_dict)
        if not os.path.isfile(path):
            raise FileNotFoundError(f'Expected a released checkpoint, but {path!r} does not exist.')
        checkpoint, state_dict = f'the checkpoint {path!r}', read_state_dict(path, use_ema=False)
    released = {name: value for name, value in state_dict.items() if not _RELEASED_BUFFERS.search(name)}
    if holds_structure(model, released, 'deploy'):
        raise RuntimeError(
            f"Expected a released layout, but {checkpoint} has this package's deploy structure: create the model with "
            'reparameterized=True and use its load_state_dict().')
    own = model.state_dict()
    if released.keys() == own.keys():
        raise RuntimeError(
            f"Expected a released layout, but {checkpoint} has this package's own: use the model's load_state_dict().")

    names = {}  # released key -> key here
    for key in [*own, *(f'{layer}.{kind}' for layer in classifier or () for kind in ('weight', 'bias'))]:
        name = key
        for pattern, replacement in keys:
            name = re.sub(pattern, replacement, name)
        names[name] = key
    problems = [
        f'missing: {name} {tuple(own[key].shape)}' for name, key in names.items() if key in own and name not in released
    ]
    problems += [f'unexpected: {name} {tuple(value.shape)}' for name, value in released.items() if name not in names]
    problems += [
        f'misshapen: {name} is {tuple(released[name].shape)}, the model has {tuple(own[key].shape)}'
        for name, key in names.items()
        if classifier is None and name in released and released[name].shape != own[key].shape
    ]
    if problems:
        raise RuntimeError(
            f'Expected a checkpoint that fits {type(model).__name__}, but {checkpoint} does not; nothing was loaded. '
            'Create the model with the configuration it was trained with (structure, widths, depth, num_classes, '
            'img_size, ...).\n  '
            + '\n  '.join(problems))
    return {key: released[name] for name, key in names.items() if name in released}


def load_released(
        model: nn.Module,
        path_or_state_dict: Union[StrPath, Mapping[str, torch.Tensor]],
) -> nn.Module:
    """Load a checkpoint of the papers' released implementations into a model of this package, strictly.

    Reads the layouts of training checkpoints of RePaViT (``blocks.i.attn.norm``,
    ``blocks.i.mlp.norm1/fc1/norm2/fc2``), RePa-Swin (``layers.i.blocks.j.mlp.norm1``, ``layers.i.downsample``,
    ``head``), RePa-PoolFormer (``network.i.j.mlp.norm1``, ``layer_scale_1``, ``mlp.ls``), RePa-MLPMixer
    (``blocks.i.mlp_tokens.norm``, ``blocks.i.mlp_channels.norm1``) and LV-ViT (``patch_embed.conv1``, ``aux_head``),
    and of RepOpt-VGG (``stage0.conv``, ``stage1.0.conv``, ``linear``) and RepOpt-GhostNet
    (``blocks.0.0.ghost1.final_bn``) of the target, Hyper-Search and CSLA structures. From the
    file of a training run it takes the weights that the authors evaluate, not their moving average.

    Args:
        model: Model in its training structure, with the checkpoint's configuration.
        path_or_state_dict: ``.safetensors`` or pickled file (read with ``weights_only=True``), or a state dict.

    Returns:
        The model.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: This class of model has no released layout, or the checkpoint holds no state dict.
        RuntimeError: The file cannot be read, or the checkpoint does not fit: every missing, unexpected and misshapen
            key is named, by its released name, and nothing is loaded.
    """
    state_dict = rename_released(model, path_or_state_dict)
    # a model on 'meta' has no memory to copy into
    model.load_state_dict(state_dict, assign=any(value.is_meta for value in model.state_dict().values()))
    return model
