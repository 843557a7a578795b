"""Reading checkpoints that others wrote, without running what is in them."""
import os
from typing import Any, Dict, Mapping, Sequence, Union

import torch
from timm.models import clean_state_dict, load_state_dict

__all__ = ['read_checkpoint', 'state_dict_of']


def read_checkpoint(path: Union[str, os.PathLike], use_ema: bool = True) -> Dict[str, Any]:
    """The state dict of a ``.safetensors`` file, or of one of torch.save(), which is read with ``weights_only=True``.

    Args:
        path: Of the file.
        use_ema: Of a training run's file take the moving average of the weights, where there is one.

    Raises:
        RuntimeError: It cannot be read.
    """
    path = os.fspath(path)
    try:
        return load_state_dict(path, use_ema=use_ema, weights_only=True)
    except Exception as e:  # whatever the two libraries make of a damaged file
        raise RuntimeError(
            f'Cannot read {path!r} as a checkpoint, which is a .safetensors file or one of torch.save() that loads '
            f'with weights_only=True: {type(e).__name__}: {e}') from e


def state_dict_of(
        checkpoint: Mapping[str, Any],
        wrappers: Sequence[str] = ('state_dict', 'model'),
) -> Dict[str, torch.Tensor]:
    """The state dict that a checkpoint is or has under one of these names, without the prefixes of wrapped models.

    Raises:
        TypeError: It holds other things than tensors, or nothing.
    """
    state_dict = clean_state_dict(next(
        (checkpoint[wrapper] for wrapper in wrappers if isinstance(checkpoint.get(wrapper), Mapping)), checkpoint))
    strangers = [repr(k) for k, v in state_dict.items() if not isinstance(v, torch.Tensor)]
    if strangers or not state_dict:
        raise TypeError(
            f'A checkpoint is a state dict of tensors, or holds one under {" or ".join(map(repr, wrappers))}; this one '
            + (f'has other things under {", ".join(strangers[:5])}.' if strangers else 'is empty.'))
    return state_dict
