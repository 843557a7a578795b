"""Where a teacher's tensors come from: a model, a state dict, or a file that is read tensor by tensor."""
import os
import re
from typing import Dict, List, Mapping, Optional, Protocol, Union

import timm
import torch
import torch.nn as nn
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from timm.utils import unwrap_model

from timm_rep.utils.checkpoints import read_checkpoint, state_dict_of
from timm_rep.utils.network import hub_errors

from .matching import Shape

__all__ = ['Teacher', 'TeacherSource', 'open_teacher']

TeacherSource = Union[str, os.PathLike, nn.Module, Mapping[str, torch.Tensor]]


class Teacher(Protocol):
    """Tensors by name, of which the shapes are known before they are read, and their model, if that is here."""
    shapes: Dict[str, Shape]
    model: Optional[nn.Module]

    def read(self, name: str) -> torch.Tensor: ...


class _StateDict:
    def __init__(self, state_dict: Mapping[str, torch.Tensor], model: Optional[nn.Module] = None):
        self.state_dict, self.model = state_dict, model
        self.shapes = {name: tuple(value.shape) for name, value in state_dict.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.state_dict[name].detach()


class _Safetensors:
    """One tensor in memory at a time."""

    def __init__(self, path: str, model: Optional[nn.Module] = None):
        self.path, self.model = path, model
        try:
            with safe_open(path, 'pt') as file:
                self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (SafetensorError, OSError) as e:
            raise RuntimeError(f'Cannot read {path!r} as safetensors: {e}') from e

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.path, 'pt') as file:
            return file.get_tensor(name)


class _Renamed:
    model = None

    def __init__(self, teacher: Teacher, names: Mapping[str, str]):
        self.teacher, self.names = teacher, names
        self.shapes = {new: teacher.shapes[old] for new, old in names.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.teacher.read(self.names[name])


# the vision tower of CLIP, as OpenAI and OpenCLIP name it, in timm's names
_CLIP = [
    (r'^visual\.class_embedding$', 'cls_token'),
    (r'^visual\.positional_embedding$', 'pos_embed'),
    (r'^visual\.conv1\.', 'patch_embed.proj.'),
    (r'^visual\.ln_pre\.', 'norm_pre.'),
    (r'^visual\.ln_post\.', 'norm.'),
    (r'^visual\.transformer\.resblocks\.(\d+)\.ln_([12])\.', r'blocks.\1.norm\2.'),
    (r'^visual\.transformer\.resblocks\.(\d+)\.attn\.in_proj_', r'blocks.\1.attn.qkv.'),
    (r'^visual\.transformer\.resblocks\.(\d+)\.attn\.out_proj\.', r'blocks.\1.attn.proj.'),
    (r'^visual\.transformer\.resblocks\.(\d+)\.mlp\.c_fc\.', r'blocks.\1.mlp.fc1.'),
    (r'^visual\.transformer\.resblocks\.(\d+)\.mlp\.c_proj\.', r'blocks.\1.mlp.fc2.'),
]
# what wrappers put before the names of the model in them: DDP, DINO's multi-crop wrapper, torch.compile
_PREFIXES = ('module.', 'backbone.', '_orig_mod.')
# what a checkpoint has a state dict under: DINO, timm and others, MAE and others; a moving average goes first
_WRAPPERS = ('teacher', 'state_dict_ema', 'model_ema', 'state_dict', 'model')


def _timm_names(names: List[str]) -> Dict[str, str]:
    """The names that timm has for what DINO, MAE and CLIP call otherwise, and the names they are from."""
    found = {}
    for name in names:
        new = name
        while new.startswith(_PREFIXES):
            new = new.split('.', 1)[1]
        for pattern, replacement in _CLIP:
            new = re.sub(pattern, replacement, new)
        found[new] = name
    return found


def open_teacher(source: TeacherSource) -> Teacher:
    """Open a teacher; of a ``.safetensors`` file, here or in the Hub's cache, only the names and shapes are read.

    Args:
        source: A model, a state dict, the path of a checkpoint, or the name of a timm model with pretrained weights.
            Checkpoints of DINO, MAE and CLIP (its vision tower) are understood; of one that has a moving average of the
            weights that is taken.

    Raises:
        FileNotFoundError: There is neither such a file nor such a model.
        RuntimeError: The file cannot be read.
        TypeError: It, or the mapping, holds no state dict.
        ValueError: timm has no weights for the model.
    """
    if isinstance(source, nn.Module):
        source = unwrap_model(source)
        return _StateDict(source.state_dict(), source)
    if isinstance(source, Mapping):
        return _renamed(_StateDict(state_dict_of(source, _WRAPPERS)))
    path = os.fspath(source)
    if os.path.isfile(path):
        if path.endswith('.safetensors'):
            return _renamed(_Safetensors(path))
        return _renamed(_StateDict(state_dict_of(read_checkpoint(path), _WRAPPERS)))
    if not timm.is_model(path):
        raise FileNotFoundError(f'There is neither a file nor a timm model {path!r} to be a teacher.')
    if not timm.get_pretrained_cfg(path).has_weights:
        raise ValueError(
            f'timm has no pretrained weights for {path!r}: name one of its tags, timm.list_pretrained({path!r}), or '
            'give a model or a checkpoint.')
    return _read_lazily(path) or open_teacher(timm.create_model(path, pretrained=True))


def _read_lazily(name: str) -> Optional[Teacher]:
    """The weights of a model of timm's in the Hub's cache, if they are safetensors in the layout of the model."""
    cfg = timm.get_pretrained_cfg(name)
    if not cfg.hf_hub_id or cfg.hf_hub_filename:
        return None
    try:
        model = timm.create_model(name, device='meta')
        if hasattr(model, 'reparameterize'):
            return None  # this package's own: they check what they read
        repository, _, revision = cfg.hf_hub_id.partition('@')
        with hub_errors():
            path = hf_hub_download(repository, 'model.safetensors', revision=revision or None)
        teacher = _Safetensors(path, model)
    except (TypeError, OSError, RuntimeError):
        return None  # timm knows of other places and layouts, and what to say if there is nothing
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    return teacher if shapes.items() <= teacher.shapes.items() else None


def _renamed(teacher: Teacher) -> Teacher:
    return _Renamed(teacher, _timm_names(list(teacher.shapes)))
