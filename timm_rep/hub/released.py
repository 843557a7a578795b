"""The papers' released checkpoints: the RePaFormer authors' repository on the Hub, and the layouts of the files."""
import os
import re
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn
from huggingface_hub import HfApi, hf_hub_download

from timm_rep.layers import holds_structure, is_reparameterized
from timm_rep.utils.checkpoints import read_state_dict, state_dict_of
from timm_rep.utils.network import hub_errors

__all__ = [
    'DEFAULT_IDLE_RATIO',
    'RELEASE',
    'fetch_released',
    'has_release',
    'load_released',
    'match_released',
    'register_released_keys',
    'rename_released',
]

RELEASE = 'Ackesnal/RePaViT'
DEFAULT_IDLE_RATIO = 0.75

# the released models: family and size in the name of a file, of which a DeiT's is RePaViT-Base or RePaDeiT-Base
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
_OTHER_FAMILIES = ('mixer', 'poolformer', 'lvvit', 'retinanet', 'maskrcnn', 'upernet', 'dino')
# 0.75, 0_75 or 0p75; or in percent, after the size or 'ratio' or 'idle'
_RATIO = re.compile(
    r'(?<!\d)0[._p](\d+)|(?:tiny|small|base|large|huge|[-_](?:ti|[tsblhr])|ratio|idle)[-_]?r?(25|50|75|90)(?!\d)')

# for each model class: (pattern, replacement) from a key here to the released key
ReleasedKeys = Sequence[Tuple[str, Union[str, Callable[[re.Match], str]]]]
_RELEASED_KEYS: Dict[Type[nn.Module], ReleasedKeys] = {}
# determined by the configuration, and no weights here
_RELEASED_BUFFERS = re.compile(r'\.(attn_mask|relative_position_index)$')


def has_release(variant: str) -> bool:
    """Whether the authors have published weights of the model."""
    return variant in _RELEASED


def _family_and_size(file: str) -> Optional[Tuple[str, ...]]:
    name = re.sub(r'([a-z])(?=[A-Z][a-z])', r'\1_', file).lower()
    if any(other in re.sub('[^a-z]', '', name) for other in _OTHER_FAMILIES):
        return None
    family = 'swin' if 'swin' in name else 'vit' if re.search('vit|deit', name) else None
    words = re.split(r'[^a-z]+', name)
    sizes = {_SIZES.get(word, word) for word in words} & set(_SIZES.values())
    return (family, *sizes) if family and len(sizes) == 1 else None


def _ratio(file: str, default: float) -> float:
    """Idle ratio in the name of a file, the default if there is none."""
    found = _RATIO.search(file.lower())
    return default if not found else float(f'0.{found[1]}') if found[1] else int(found[2]) / 100


def match_released(files: Sequence[str], variant: str, idle_ratio: float) -> str:
    """Select the file of the release that holds the weights of a model.

    Args:
        files: Names of the files in the repository.
        variant: Name of the model here.
        idle_ratio: Idle ratio of the weights; a file whose name says none has 0.75, the paper's.

    Raises:
        FileNotFoundError: There is none.
        ValueError: There are several.
    """
    if not has_release(variant):
        raise FileNotFoundError(f'{RELEASE} has no weights of {variant}, but of {", ".join(_RELEASED)}.')
    weights = [file for file in files if file.endswith(_SUFFIXES)]
    found = [
        file for file in weights
        if _family_and_size(file) == _RELEASED[variant] and _ratio(file, DEFAULT_IDLE_RATIO) == idle_ratio
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
        variant: str,
        idle_ratio: float = DEFAULT_IDLE_RATIO,
        filename: Optional[str] = None,
        revision: Optional[str] = None,
        cache_dir: Optional[Union[str, os.PathLike]] = None,
) -> str:
    """Path of the authors' file of a model's weights in the Hub's cache, downloaded if necessary.

    If the Hub cannot be reached, the file of the revision as it was last seen.

    Args:
        variant: Name of the model here.
        idle_ratio: Idle ratio of the weights.
        filename: Name of the file, if model and idle ratio do not determine it.
        revision: Branch, tag or commit of the repository; None for its main branch.
        cache_dir: Folder of the Hub's cache; None for the default one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Several files match, or the file's name says another idle ratio.
        OSError: The Hub cannot be reached, or failed, and the file is not in its cache.
    """
    try:
        with hub_errors():
            files = HfApi().list_repo_files(RELEASE, revision=revision)
        file = _choose(files, variant, idle_ratio, filename)
        with hub_errors():
            return hf_hub_download(RELEASE, file, revision=revision, cache_dir=cache_dir)
    except FileNotFoundError:
        raise
    except OSError as e:  # the Hub did not answer
        try:
            folder = Path(HfApi().snapshot_download(
                RELEASE, revision=revision, cache_dir=cache_dir, local_files_only=True))
            files = [path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()]
            return os.fspath(folder / _choose(files, variant, idle_ratio, filename))
        except FileNotFoundError:
            raise ConnectionError(f"{e} And it is not in the Hub's cache.") from e


def _choose(files: List[str], variant: str, idle_ratio: float, filename: Optional[str]) -> str:
    file = filename or match_released(sorted(files), variant, idle_ratio)
    if file not in files:
        raise FileNotFoundError(f'{RELEASE} has no {file!r}, it has {", ".join(files)}.')
    ratio = _ratio(file, default=idle_ratio)
    if ratio != idle_ratio:
        raise ValueError(f'{file!r} says idle_ratio={ratio}, the model has {idle_ratio}: create it with that.')
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
        path_or_state_dict: Union[str, os.PathLike, Mapping[str, torch.Tensor]],
        classifier: Optional[Sequence[str]] = None,
) -> Dict[str, torch.Tensor]:
    """Read a checkpoint of the papers' released implementations under the keys of a model of this package.

    Args:
        model: Model in its training structure.
        path_or_state_dict: As for :func:`load_released`.
        classifier: Names of the model's classifier layers, if the tensors are to be adapted to other classes, channels
            or image sizes: then shapes are not compared, and the model may lack these layers.

    Raises:
        FileNotFoundError, TypeError, RuntimeError: As for :func:`load_released`.
    """
    keys = _RELEASED_KEYS.get(type(model))
    if keys is None:
        raise TypeError(
            f'{type(model).__name__} has no released layout; there is one for '
            f'{", ".join(k.__name__ for k in _RELEASED_KEYS)}.')
    if is_reparameterized(model):
        raise RuntimeError(
            'Released checkpoints hold the training structure, the model has the deploy structure: load into a model '
            'created without reparameterized=True, then call its reparameterize().')
    if isinstance(path_or_state_dict, Mapping):
        checkpoint, state_dict = 'The checkpoint', state_dict_of(path_or_state_dict)
    else:
        path = os.fspath(path_or_state_dict)
        if not os.path.isfile(path):
            raise FileNotFoundError(f'No released checkpoint at {path!r}.')
        checkpoint, state_dict = f'The checkpoint {path!r}', read_state_dict(path, use_ema=False)
    released = {name: value for name, value in state_dict.items() if not _RELEASED_BUFFERS.search(name)}
    if holds_structure(model, released, 'deploy'):
        raise RuntimeError(
            f"{checkpoint} holds this package's deploy structure, not a released layout: create the model with "
            'reparameterized=True and use its load_state_dict().')
    own = model.state_dict()
    if released.keys() == own.keys():
        raise RuntimeError(f"{checkpoint} has this package's own key layout: use the model's load_state_dict().")

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
            f'{checkpoint} does not fit {type(model).__name__}, nothing was loaded. Create the model with the '
            'configuration it was trained with (structure, widths, depth, num_classes, img_size, ...).\n  '
            + '\n  '.join(problems))
    return {key: released[name] for name, key in names.items() if name in released}


def load_released(
        model: nn.Module,
        path_or_state_dict: Union[str, os.PathLike, Mapping[str, torch.Tensor]],
) -> nn.Module:
    """Load a checkpoint of the papers' released implementations into a model of this package, strictly.

    Reads the layouts of training checkpoints of RePaViT (``blocks.i.attn.norm``,
    ``blocks.i.mlp.norm1/fc1/norm2/fc2``), RePa-Swin (``layers.i.blocks.j.mlp.norm1``, ``layers.i.downsample``,
    ``head``), RePa-PoolFormer (``network.i.j.mlp.norm1``, ``layer_scale_1``, ``mlp.ls``), RePa-MLPMixer
    (``blocks.i.mlp_tokens.norm``, ``blocks.i.mlp_channels.norm1``) and LV-ViT (``patch_embed.conv1``, ``aux_head``),
    and those of RepOpt-VGG (``stage0.conv``, ``stage1.0.conv``, ``linear``) and RepOpt-GhostNet
    (``blocks.0.0.ghost1.final_bn``) of the target, Hyper-Search and CSLA structures. From the
    file of a training run it takes the weights that the authors evaluate, not their moving average.

    Args:
        model: Model in its training structure, with the checkpoint's configuration.
        path_or_state_dict: ``.safetensors`` or pickled file (read with ``weights_only=True``), or a state dict.

    Returns:
        The model.

    Raises:
        FileNotFoundError: There is no file at the path.
        TypeError: There is no released layout for this class of model, or the checkpoint holds no state dict.
        RuntimeError: The file cannot be read, or the checkpoint does not fit: every missing, unexpected and misshapen
            key is named, by its released name, and nothing is loaded.
    """
    state_dict = rename_released(model, path_or_state_dict)
    # a model on 'meta' has no memory to copy into
    model.load_state_dict(state_dict, assign=any(value.is_meta for value in model.state_dict().values()))
    return model
