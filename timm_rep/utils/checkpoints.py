"""Checkpoints, read without executing pickled code."""
import argparse
import contextlib
import os
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models import clean_state_dict, load_state_dict

from .atomic import replacing_files
from .files import StrPath


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    if not os.path.isfile(path):
        kind = 'is not a regular file' if os.path.lexists(path) else 'does not exist'
        raise FileNotFoundError(f'Expected a checkpoint, but {path!r} {kind}.')
    try:
        yield
    except Exception as e:  # torch and safetensors raise many types for damaged files
        # torch's message advises weights_only=False; before 2.6 it loads the program, which has no items
        if 'TorchScript' in str(e) or 'ScriptModule' in str(e):
            raise RuntimeError(
                f'Expected a checkpoint, but {path!r} is a TorchScript program: write the state_dict() of '
                'torch.jit.load() to a file of its own, or use another file of these weights.') from e
        raise RuntimeError(
            'Expected a checkpoint (.safetensors, or torch.save() loaded with weights_only=True), but reading '
            f'{path!r} failed: {type(e.__cause__ or e).__name__}: {" ".join(str(e.__cause__ or e).split())}') from e


def read_state_dict(
        path: StrPath,
        use_ema: bool = True,
        wrappers: Sequence[str] = ('state_dict', 'model'),
) -> Dict[str, torch.Tensor]:
    """Read the state dict of a ``.safetensors`` file or of a torch.save() file, with ``weights_only=True``.

    Args:
        path: Path of the file.
        use_ema: Prefer the moving average of the weights, if the checkpoint has one.
        wrappers: Further keys of the state dict in the checkpoint, as for :func:`state_dict_of`.
    """
    path = os.fspath(path)
    with _reading(path):
        checkpoint = load_state_dict(path, use_ema=use_ema, weights_only=True)
    try:
        return state_dict_of(checkpoint, wrappers)
    except TypeError as e:
        raise TypeError(f'{path!r}: {e}') from e


def load_checkpoint(model: nn.Module, path: StrPath, use_ema: bool = False) -> None:
    """Load a checkpoint, or with use_ema its moving average of the weights, into a model, strictly.

    Raises:
        FileNotFoundError, RuntimeError, TypeError: It does not exist, cannot be read or does not fit the model.
        ValueError: It has no moving average.
    """
    if use_ema and not has_moving_average(path):
        raise ValueError(
            f'Expected a moving average of the weights, but {os.fspath(path)!r} has none: train with --model-ema, or '
            'leave out --use-ema.')
    state_dict = read_state_dict(path, use_ema)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as e:
        if not str(e).startswith('Error(s) in loading state_dict'):  # a hook refuses it, and says what to do
            raise RuntimeError(f'{os.fspath(path)!r}: {e}') from e
        differences = _differences(model.state_dict(), state_dict)
        raise RuntimeError(
            f'Expected a checkpoint that fits the model, but got {os.fspath(path)!r}: {differences or e}. Create the '
            'model with the arguments that it was trained with.') from e


def _differences(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str:
    """Numbers and first names of the tensors by which two state dicts differ."""
    common = [name for name in expected if name in found]
    kinds = {
        'missing': [name for name in expected if name not in found],
        'unexpected': [name for name in found if name not in expected],
        'of another shape': [name for name in common if expected[name].shape != found[name].shape],
    }
    return '; '.join(
        f'{kind}: {len(names)} ({", ".join(names[:3])}{", ..." if len(names) > 3 else ""})'
        for kind, names in kinds.items() if names)


def has_moving_average(path: StrPath) -> bool:
    """Whether a checkpoint of timm's train.py has a moving average of the weights."""
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
    """
    state_dict = next(
        (checkpoint[wrapper] for wrapper in wrappers if isinstance(checkpoint.get(wrapper), Mapping)), checkpoint)
    others = [repr(k) for k, v in state_dict.items() if not isinstance(k, str) or not isinstance(v, torch.Tensor)]
    if others or not state_dict:
        raise TypeError(
            f'Expected a state dict of tensors, or one under {" or ".join(map(repr, wrappers))}, but got '
            + (f'values that are not tensors: {", ".join(others[:5])}.' if others else 'an empty one.'))
    return clean_state_dict(state_dict)


def write_safetensors(
        tensors: Mapping[str, torch.Tensor],
        path: StrPath,
        metadata: Optional[Mapping[str, str]] = None,
) -> None:
    """``save_file`` of safetensors, for tensors of any layout that may share memory, with an OSError if it fails."""
    storages, separate = set(), {}
    for name, tensor in tensors.items():
        separate[name] = tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() > tensor.nbytes:
            separate[name] = tensor.clone()
        storages.add(storage.data_ptr())
    try:
        save_file(separate, path, metadata=dict(metadata or {}))
    except SafetensorError as e:  # not an OSError
        raise OSError(f'cannot write {os.path.basename(path)!r}: {e}') from e


def write_checkpoint(state: Mapping[str, Any], path: StrPath) -> None:
    """``torch.save``, with an OSError if the disk is full."""
    try:
        torch.save(state, path)
    except RuntimeError as e:  # torch reports a full disk as an unexpected position in the file
        raise OSError(f'cannot write {os.path.basename(path)!r}, is the disk full? {e}') from e


def write_training_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a training run, with its settings under 'settings', and replace an earlier file."""
    with replacing_files(path.parent) as temporary:
        write_checkpoint(state, temporary / path.name)


def read_training_state(path: Path, settings: Mapping[str, Any], training: str) -> Dict[str, Any]:
    """Read the file of :func:`write_training_state`; ValueError if it is damaged or its run had other settings.

    ``training`` names the kind of training in messages, such as 'distillation'.
    """
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # torch raises many types for damaged files
        raise ValueError(
            f'Expected the checkpoint of a {training}, but reading {str(path)!r} failed: {type(e).__name__}: '
            f'{" ".join(str(e).split())}') from e
    found = state.get('settings') if isinstance(state, dict) else None
    found = found if isinstance(found, dict) else {}
    others = [f'{k} is {found.get(k)!r} there and {v!r} here' for k, v in settings.items() if found.get(k) != v]
    if others:
        raise ValueError(
            f'Expected the checkpoint of this {training}, but {str(path)!r} is of another one: {", ".join(others)}. '
            'Resume with the settings there, or delete the file to start again.')
    return state
