"""The papers' released checkpoints, read into this package's models."""
import os
import re
from typing import Callable, Dict, List, Mapping, Tuple, Union

import torch
import torch.nn as nn

from timm_rep.checkpoints import read_checkpoint, state_dict_of
from timm_rep.models import (
    LvVit,
    RePaMlpMixer,
    RePaPoolFormer,
    RePaSwinTransformer,
    RePaVisionTransformer,
    RepOptGhostNet,
    RepOptVgg,
)
from timm_rep.models._reparameterize import holds_structure

__all__ = ['load_released']

# For each model class: (pattern, replacement) from a key here to the released key.
_RELEASED_KEYS: Dict[type, List[Tuple[str, Union[str, Callable[[re.Match], str]]]]] = {
    RePaVisionTransformer: [(r'^(blocks\.\d+)\.norm1\.', r'\1.attn.norm.')],
    RePaSwinTransformer: [
        # a stage here begins with its downsampling, there it ends with the next one's
        (r'^layers\.(\d+)\.downsample\.', lambda match: f'layers.{int(match[1]) - 1}.downsample.'),
        (r'^head\.fc\.', 'head.'),
    ],
    RePaPoolFormer: [
        (r'^stem\.conv\.', 'patch_embed.proj.'),
        # there stages and downsamplings take turns in one list
        (r'^stages\.(\d+)\.downsample\.conv\.', lambda match: f'network.{2 * int(match[1]) - 1}.proj.'),
        (r'^stages\.(\d+)\.blocks\.', lambda match: f'network.{2 * int(match[1])}.'),
        (r'\.layer_scale1\.scale$', '.layer_scale_1'),
        (r'\.mlp\.ls\.gamma$', '.mlp.ls'),
        (r'^head\.norm\.', 'norm.'),
        (r'^head\.fc\.', 'head.'),
    ],
    RePaMlpMixer: [(r'^(blocks\.\d+)\.norm1\.', r'\1.mlp_tokens.norm.')],
    LvVit: [(r'^patch_embed\.proj\.', 'patch_embed.')],
    RepOptVgg: [
        (r'^stem\.', 'stage0.'),
        (r'^stages\.(\d)\.', lambda match: f'stage{int(match[1]) + 1}.'),
        (r'\.conv\.weights\.conv3x3$', '.conv.weight'),
        (r'\.conv\.scales\.conv3x3$', '.scale_conv.weight'),
        (r'\.conv\.weights\.conv1x1$', '.conv_1x1.weight'),
        (r'\.conv\.scales\.conv1x1$', '.scale_1x1.weight'),
        (r'\.conv\.weights\.identity$', '.scale_identity.weight'),
        (r'\.attn\.fc1\.', '.post_se.down.'),
        (r'\.attn\.fc2\.', '.post_se.up.'),
        (r'^head\.fc\.', 'linear.'),
    ],
    RepOptGhostNet: [
        (r'\.cheap_operation\.1\.', '.final_bn.'),
        (r'\.cheap_operation\.0\.weights\.conv3x3$', '.cheap_operation.0.weight'),
        (r'\.cheap_operation\.0\.scales\.conv3x3$', '.cheap_operation.1.weight'),
        (r'\.cheap_operation\.0\.weights\.identity$', '.fusion_scale.weight'),
    ],
}

# what follows from the configuration, and is no weight here
_RELEASED_BUFFERS = re.compile(r'\.(attn_mask|relative_position_index)$')


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
