"""Reading checkpoints without executing pickled code."""
import argparse
import os
from typing import Any, Dict, Mapping, Optional, Sequence, Union

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models import clean_state_dict, load_state_dict

__all__ = ['has_moving_average', 'read_checkpoint', 'state_dict_of', 'write_checkpoint', 'write_safetensors']


def read_checkpoint(path: Union[str, os.PathLike], use_ema: bool = True) -> Dict[str, Any]:
    """Read the state dict of a ``.safetensors`` file or of a torch.save() file, with ``weights_only=True``.

    Args:
        path: Path of the file.
        use_ema: Prefer the moving average of the weights, if the checkpoint has one.

    Raises:
        RuntimeError: The file cannot be read.
    """
    path = os.fspath(path)
    try:
        return load_state_dict(path, use_ema=use_ema, weights_only=True)
    except Exception as e:  # both libraries raise many types for damaged files
        raise RuntimeError(
            f'Cannot read {path!r} as a checkpoint, a .safetensors file or a torch.save() file that loads with '
            f'weights_only=True: {type(e).__name__}: {e}') from e


def has_moving_average(path: Union[str, os.PathLike]) -> bool:
    """Whether a checkpoint of timm's train.py holds a moving average of the weights.

    Raises:
        RuntimeError: The file cannot be read.
    """
    path = os.fspath(path)
    if path.endswith('.safetensors'):
        return False
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # train.py saves its arguments
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # torch raises many types for damaged files
        raise RuntimeError(f'Cannot read {path!r} as a checkpoint: {type(e).__name__}: {e}') from e
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
    state_dict = clean_state_dict(next(
        (checkpoint[wrapper] for wrapper in wrappers if isinstance(checkpoint.get(wrapper), Mapping)), checkpoint))
    others = [repr(k) for k, v in state_dict.items() if not isinstance(v, torch.Tensor)]
    if others or not state_dict:
        raise TypeError(
            f'A checkpoint is a state dict of tensors, or holds one under {" or ".join(map(repr, wrappers))}; this one '
            + (f'has values that are not tensors: {", ".join(others[:5])}.' if others else 'is empty.'))
    return state_dict


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
