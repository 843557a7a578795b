"""Teachers of weight selection: models, state dicts, and files that are read tensor by tensor."""
import os
import re
from dataclasses import dataclass
from typing import Callable, Collection, Dict, Mapping, Optional, Union

import timm
import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg, adapt_input_conv
from timm.utils import unwrap_model

from timm_rep.utils.checkpoints import read_state_dict, state_dict_of
from timm_rep.utils.files import StrPath, config_errors
from timm_rep.utils.network import hub_download

from .matching import Shape

TeacherSource = Union[StrPath, nn.Module, Mapping[str, torch.Tensor]]


@dataclass
class Teacher:
    """The tensors of a teacher, which are read one at a time.

    Attributes:
        shapes: Shapes by name, known before anything is read.
        read: Returns the tensor of a name.
        model: The model, if the teacher is one or timm can build it.
    """
    shapes: Dict[str, Shape]
    read: Callable[[str], torch.Tensor]
    model: Optional[nn.Module] = None


def _from_state_dict(state_dict: Mapping[str, torch.Tensor], model: Optional[nn.Module] = None) -> Teacher:
    shapes = {name: tuple(value.shape) for name, value in state_dict.items()}
    if any(value.is_meta for value in state_dict.values()):
        raise ValueError("Expected a teacher with weights, but it is on 'meta': load them, on another device.")
    return Teacher(shapes, lambda name: state_dict[name].detach(), model)


def _from_safetensors(path: str, model: Optional[nn.Module] = None) -> Teacher:
    def read(name: str) -> torch.Tensor:
        with safe_open(path, 'pt') as file:
            return file.get_tensor(name)

    try:
        with safe_open(path, 'pt') as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError) as e:
        raise RuntimeError(f'Expected a safetensors file, but reading {path!r} failed: {e}') from e
    return Teacher(shapes, read, model)


# names of CLIP's vision tower by OpenAI and OpenCLIP, and timm's names
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
# prefixes of wrappers: DDP, DINO's multi-crop wrapper, torch.compile
_PREFIXES = ('module.', 'backbone.', '_orig_mod.')
# schemes of the names of models that timm does not register
_SOURCES = ('local-dir:', 'hf-hub:', 'hf_hub:')
# keys of the state dict in a checkpoint, in order of preference: DINO, timm's moving average, timm, MAE
_WRAPPERS = ('teacher', 'state_dict_ema', 'model_ema', 'state_dict', 'model')


def _with_timm_names(teacher: Teacher, student: Collection[str]) -> Teacher:
    """Rename the tensors of DINO, MAE and CLIP checkpoints as timm's models, or the student, name them."""
    names: Dict[str, str] = {}
    prefixes = tuple(prefix for prefix in _PREFIXES if not any(name.startswith(prefix) for name in student))
    for name in teacher.shapes:
        new = name
        while new.startswith(prefixes):
            new = new.split('.', 1)[1]
        for pattern, replacement in _CLIP:
            new = re.sub(pattern, replacement, new)
        names[new] = name
    return Teacher({new: teacher.shapes[name] for new, name in names.items()}, lambda new: teacher.read(names[new]))


def for_input_of(teacher: Teacher, student: nn.Module) -> Teacher:
    """The teacher for the input channels of a student: convolutions of RGB images are adapted as timm does.

    The student's ``pretrained_cfg`` names these convolutions, as 'first_conv'.
    """
    names = (getattr(student, 'pretrained_cfg', None) or {}).get('first_conv') or ()
    weights = [f'{name}.weight' for name in ((names,) if isinstance(names, str) else names)]
    state_dict = student.state_dict()
    channels = {
        name: state_dict[name].shape[1] for name in weights
        if name in state_dict and state_dict[name].ndim == len(teacher.shapes.get(name, ())) == 4
        and teacher.shapes[name][1] == 3 != state_dict[name].shape[1]}
    shapes = dict(teacher.shapes)
    for name, in_chans in channels.items():
        shapes[name] = (shapes[name][0], in_chans, *shapes[name][2:])

    def read(name: str) -> torch.Tensor:
        tensor = teacher.read(name)
        return adapt_input_conv(channels[name], tensor) if name in channels else tensor

    return Teacher(shapes, read, teacher.model)


def open_teacher(source: TeacherSource, student: Collection[str] = ()) -> Teacher:
    """Open a teacher. Of a ``.safetensors`` file, local or in the Hub's cache, only names and shapes are read.

    Args:
        source: A model, a state dict, the path of a checkpoint, or the name of a timm model with pretrained weights, as
            for ``create_model`` ('local-dir:' and 'hf-hub:' included). Checkpoints may be of DINO, MAE and CLIP (its
            vision tower); a moving average of the weights is preferred.
        student: Names of the tensors of the student. The prefixes of wrappers are removed from the names of a
            checkpoint, unless the student has them.

    Raises:
        FileNotFoundError: The source is neither a file nor a timm model.
        RuntimeError: The file cannot be read.
        TypeError: The file or mapping does not hold a state dict.
        ValueError: timm has no pretrained weights for the model, its config.json is of a different library, or the
            path is a folder.
    """
    if isinstance(source, nn.Module):
        source = unwrap_model(source)
        return _from_state_dict(source.state_dict(), source)
    if isinstance(source, Mapping):
        return _with_timm_names(_from_state_dict(state_dict_of(source, _WRAPPERS)), student)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f'teacher must be a model, a state dict, a path or the name of a timm model, got {source!r:.100}.')
    path = os.fspath(source)
    if os.path.isfile(path):
        if path.endswith('.safetensors'):
            return _with_timm_names(_from_safetensors(path), student)
        return _with_timm_names(_from_state_dict(read_state_dict(path, wrappers=_WRAPPERS)), student)
    if path.startswith(_SOURCES):
        with config_errors(path):
            return open_teacher(timm.create_model(path, pretrained=True))
    if os.path.isdir(path) and not timm.is_model(path):
        raise ValueError(
            f'teacher must be a file or a timm model, got the folder {path!r}: pass local-dir:{path} for its model.')
    if not timm.is_model(path):
        raise FileNotFoundError(f'teacher must be a file or a timm model, got {path!r}.')
    cfg = _registered_cfg(path)
    if cfg is not None and not cfg.has_weights:
        raise ValueError(
            f'teacher must have pretrained weights in timm, got {path!r}: name one of its tags, '
            f'timm.list_pretrained({path!r}), or give a model or a checkpoint.')
    return _open_cached(path) or open_teacher(timm.create_model(path, pretrained=True))


def _registered_cfg(name: str) -> Optional[PretrainedCfg]:
    """timm's pretrained_cfg of a model; None for a tag that only TIMM_REP_HUB or the Hub knows."""
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:
        return None


def _open_cached(name: str) -> Optional[Teacher]:
    """The safetensors of a timm model in the Hub's cache; None if there are none in the layout of the model."""
    cfg = _registered_cfg(name)
    if cfg is None or not cfg.hf_hub_id or cfg.hf_hub_filename:
        return None
    try:
        model = timm.create_model(name, device='meta')
        if hasattr(model, 'reparameterize'):
            return None  # this package's create_model() verifies the weights it loads
        repository, _, revision = cfg.hf_hub_id.partition('@')
        teacher = _from_safetensors(hub_download(repository, 'model.safetensors', revision or None), model)
    except (TypeError, OSError, RuntimeError):
        return None  # create_model() looks in other places and raises the error
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    return teacher if shapes.items() <= teacher.shapes.items() else None
