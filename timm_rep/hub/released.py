"""The papers' released checkpoints, read into this package's models."""
import os
import re
from typing import Callable, Dict, Mapping, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn

from timm_rep.layers import holds_structure
from timm_rep.utils.checkpoints import read_checkpoint, state_dict_of

__all__ = ['ReleasedKeys', 'load_released', 'register_released_keys']

# for each model class: (pattern, replacement) from a key here to the released key
ReleasedKeys = Sequence[Tuple[str, Union[str, Callable[[re.Match], str]]]]
_RELEASED_KEYS: Dict[Type[nn.Module], ReleasedKeys] = {}

# what follows from the configuration, and is no weight here
_RELEASED_BUFFERS = re.compile(r'\.(attn_mask|relative_position_index)$')


def register_released_keys(cls: Type[nn.Module], keys: ReleasedKeys) -> None:
    """Say how the released checkpoints of a class of models name what it names otherwise.

    Args:
        cls: The class itself; its subclasses have none of it.
        keys: (pattern, replacement) of ``re.sub``, applied in this order, from a key of the class to the released key.
    """
    _RELEASED_KEYS[cls] = keys


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
    (``blocks.0.0.ghost1.final_bn``) of the target, Hyper-Search and CSLA structures. Of a
    training run's file it takes the model the authors evaluate, not its moving average.

    Args:
        model: A model in its training structure, with the checkpoint's configuration.
        path_or_state_dict: A ``.safetensors`` or pickled file (read with ``weights_only=True``), or a state dict.

    Returns:
        The model.

    Raises:
        FileNotFoundError: There is no file at the path.
        TypeError: There is no released layout for this class of model, or the checkpoint holds no state dict.
        RuntimeError: The file cannot be read, or the checkpoint does not fit: every missing, unexpected and misshapen
            key is named, by its released name, and nothing is loaded.
    """
    renames = _RELEASED_KEYS.get(type(model))
    if renames is None:
        raise TypeError(
            f'{type(model).__name__} has no released layout; there is one for '
            f'{", ".join(k.__name__ for k in _RELEASED_KEYS)}.')
    if getattr(model, 'reparameterized', False):
        raise RuntimeError(
            'Released checkpoints hold the training structure, the model has the deploy structure: load into a model '
            'created without reparameterized=True, then call its reparameterize().')
    released = {
        name: value for name, value in _read_state_dict(path_or_state_dict).items()
        if not _RELEASED_BUFFERS.search(name)
    }
    if holds_structure(model, released, 'deploy'):
        raise RuntimeError(
            "The checkpoint holds this package's deploy structure, not a released layout: create the model with "
            'reparameterized=True and use its load_state_dict().')

    own = model.state_dict()
    if released.keys() == own.keys():
        raise RuntimeError("The checkpoint has this package's own key layout: use the model's load_state_dict().")
    names = {}  # released key -> key here
    for key in own:
        name = key
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        names[name] = key
    problems = [f'missing: {name} {tuple(own[key].shape)}' for name, key in names.items() if name not in released]
    problems += [f'unexpected: {name} {tuple(value.shape)}' for name, value in released.items() if name not in names]
    problems += [
        f'misshapen: {name} is {tuple(released[name].shape)}, the model has {tuple(own[key].shape)}'
        for name, key in names.items()
        if name in released and released[name].shape != own[key].shape
    ]
    if problems:
        raise RuntimeError(
            f'The checkpoint does not fit {type(model).__name__}, nothing was loaded. Create the model with the '
            'configuration it was trained with (structure, widths, depth, num_classes, img_size, ...).\n  '
            + '\n  '.join(problems))

    # a model on 'meta' has no memory to copy into
    assign = any(value.is_meta for value in own.values())
    model.load_state_dict({key: released[name] for name, key in names.items()}, assign=assign)
    return model


def _read_state_dict(
        path_or_state_dict: Union[str, os.PathLike, Mapping[str, torch.Tensor]],
) -> Dict[str, torch.Tensor]:
    if isinstance(path_or_state_dict, Mapping):
        return state_dict_of(path_or_state_dict)
    path = os.fspath(path_or_state_dict)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'No released checkpoint at {path!r}.')
    return state_dict_of(read_checkpoint(path, use_ema=False))
