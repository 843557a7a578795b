"""Reading checkpoints without executing pickled code."""
import argparse
import contextlib
import copy
import os
import re
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Union

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models import clean_state_dict, load_state_dict

from .atomic import replacing_files

__all__ = [
    'contiguous_copy',
    'has_moving_average',
    'load_checkpoint',
    'read_state_dict',
    'read_training_state',
    'state_dict_of',
    'write_checkpoint',
    'write_safetensors',
    'write_training_state',
]

# most keys of each kind that a message about a checkpoint names
_NAMED = 5


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    if not os.path.exists(path):
        raise FileNotFoundError(f'No checkpoint at {path!r}: there is no such file.')
    try:
        yield
    except Exception as e:  # torch and safetensors raise many types for damaged files
        reason = ' '.join(str(e.__cause__ or e).split())
        # torch explains over many lines how to load the file unsafely
        found = re.search(r'WeightsUnpickler error: (.*?)(?= Please use | Check the documentation|$)', reason)
        raise RuntimeError(
            f'Cannot read {path!r} as a checkpoint, a .safetensors file or a torch.save() file that loads with '
            f'weights_only=True: {type(e.__cause__ or e).__name__}: {found[1] if found else reason}') from e


def read_state_dict(
        path: Union[str, os.PathLike],
        use_ema: bool = True,
        wrappers: Sequence[str] = ('state_dict', 'model'),
) -> Dict[str, torch.Tensor]:
    """Read the state dict of a ``.safetensors`` file or of a torch.save() file, with ``weights_only=True``.

    Args:
        path: Path of the file.
        use_ema: Prefer the moving average of the weights, if the checkpoint has one.
        wrappers: Further keys of the state dict in the checkpoint, as for :func:`state_dict_of`.

    Raises:
        FileNotFoundError: There is no such file.
        RuntimeError: The file cannot be read.
        TypeError: It does not hold a state dict.
    """
    path = os.fspath(path)
    with _reading(path):
        checkpoint = load_state_dict(path, use_ema=use_ema, weights_only=True)
    try:
        return state_dict_of(checkpoint, wrappers)
    except TypeError as e:
        raise TypeError(f'{path!r}: {e}') from e


def load_checkpoint(model: nn.Module, path: Union[str, os.PathLike], use_ema: bool = False) -> None:
    """Load a checkpoint into a model, strictly.

    Args:
        model: The model.
        path: Path of the file.
        use_ema: Prefer the moving average of the weights, if the checkpoint has one.

    Raises:
        FileNotFoundError: There is no such file.
        RuntimeError: The file cannot be read, or does not fit the model.
        TypeError: It does not hold a state dict.
    """
    state_dict = read_state_dict(path, use_ema)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as e:
        raise RuntimeError(f'{os.fspath(path)!r} does not fit the model. {_shorten(str(e))}') from e


def _shorten(message: str) -> str:
    """An error of load_state_dict, whose lists name every key, with the first keys of each."""
    lines = []
    for line in message.splitlines():
        names = re.findall('"[^"]*"', line)
        if len(names) > _NAMED:
            line = f'{line.partition(":")[0]}: {", ".join(names[:_NAMED])} and {len(names) - _NAMED} more. '
        lines.append(line)
    misshapen = [line for line in lines if line.startswith('\tsize mismatch')]
    if len(misshapen) > _NAMED:
        lines = [line for line in lines if line not in misshapen[_NAMED:]]
        lines.append(f'\tand {len(misshapen) - _NAMED} more of another size')
    return '\n'.join(lines)


def has_moving_average(path: Union[str, os.PathLike]) -> bool:
    """Whether a checkpoint of timm's train.py holds a moving average of the weights.

    Raises:
        FileNotFoundError: There is no such file.
        RuntimeError: The file cannot be read.
    """
    path = os.fspath(path)
    if path.endswith('.safetensors'):
        return False
    with _reading(path), torch.serialization.safe_globals([argparse.Namespace]):  # train.py saves its arguments
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    return isinstance(checkpoint, dict) and any(
        checkpoint.get(name) is not None for name in ('state_dict_ema', 'model_ema'))


def state_dict_of(
        checkpoint: Mapping[str, Any],
        wrappers: Sequence[str] = ('state_dict', 'model'),
) -> Dict[str, torch.Tensor]:
    """Extract the state dict from a checkpoint, without the prefixes of wrapped models.

    Args:
        checkpoint: A state dict, or a mapping that holds one.
        wrappers: Keys of the state dict in the checkpoint, in order of preference.

    Raises:
        TypeError: The state dict is empty or has values that are not tensors.
    """
    state_dict = next(
        (checkpoint[wrapper] for wrapper in wrappers if isinstance(checkpoint.get(wrapper), Mapping)), checkpoint)
    others = [repr(k) for k, v in state_dict.items() if not isinstance(k, str) or not isinstance(v, torch.Tensor)]
    if others or not state_dict:
        raise TypeError(
            f'A checkpoint is a state dict of tensors, or holds one under {" or ".join(map(repr, wrappers))}; this one '
            + (f'has values that are not tensors: {", ".join(others[:5])}.' if others else 'is empty.'))
    return clean_state_dict(state_dict)


def contiguous_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with contiguous tensors, which safetensors, and so timm's ``save_for_hf``, asks for.

    A model in another memory format, such as channels-last, stays as it is.
    """
    model = copy.deepcopy(model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()
    return model


def write_safetensors(
        tensors: Mapping[str, torch.Tensor],
        path: Union[str, os.PathLike],
        metadata: Optional[Mapping[str, str]] = None,
) -> None:
    """``safetensors.torch.save_file`` of contiguous copies.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=dict(metadata or {}))
    except SafetensorError as e:  # not an OSError
        raise OSError(f'cannot write {os.path.basename(path)!r}: {e}') from e


def write_checkpoint(state: Mapping[str, Any], path: Union[str, os.PathLike]) -> None:
    """``torch.save``.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    try:
        torch.save(state, path)
    except RuntimeError as e:  # torch reports a full disk as an unexpected position in the file
        raise OSError(f'cannot write {os.path.basename(path)!r}, is the disk full? {e}') from e


def write_training_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a training to resume from, replacing that of an earlier epoch in one step.

    Args:
        path: File to write.
        state: Values that ``torch.load(weights_only=True)`` reads; under 'settings' those that must not change.

    Raises:
        OSError: The file cannot be written.
    """
    with replacing_files(path.parent) as temporary:
        write_checkpoint(state, temporary / path.name)


def read_training_state(path: Path, settings: Mapping[str, Any], training: str) -> Dict[str, Any]:
    """Read what :func:`write_training_state` wrote.

    Args:
        path: The file.
        settings: Settings of this training.
        training: What the training is, for messages.

    Raises:
        ValueError: The file cannot be read, or is of a training with other settings.
    """
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # torch raises many types for damaged files
        raise ValueError(
            f'{str(path)!r} cannot be read as the checkpoint of a {training}: {type(e).__name__}: {e}') from e
    found = state.get('settings', {}) if isinstance(state, dict) else {}
    others = [f'{k} is {found.get(k)!r} there and {v!r} here' for k, v in settings.items() if found.get(k) != v]
    if others:
        raise ValueError(
            f'{str(path)!r} is the checkpoint of another {training}: {", ".join(others)}. Resume with the settings '
            'there, or delete the file to start anew.')
    return state
