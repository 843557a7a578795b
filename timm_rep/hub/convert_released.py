"""Downloaded files of the papers' authors, made into folders that load and can be published."""
import os
from pathlib import Path
from typing import Any, Mapping, Optional, Union

import timm
import torch

from timm_rep.scales import Scales, attach_grad_mults
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.checkpoints import read_checkpoint, state_dict_of
from timm_rep.utils.profiling import model_input_size

from .files import SCALES, WEIGHTS
from .folder import load_folder, split_name, staged_folder, write_folder
from .released import load_released

__all__ = ['convert_released']


def convert_released(
        path: Union[str, os.PathLike],
        model_name: str,
        folder: Union[str, os.PathLike],
        model_args: Mapping[str, Any],
) -> Path:
    """Convert a released checkpoint of weights, or file of scales, and check what was written by loading it.

    Args:
        path: The file, of a layout that :func:`timm_rep.load_released` or :class:`timm_rep.Scales` reads; a pickled one
            is read with ``weights_only=True``.
        model_name: What it is of.
        folder: Where to write config.json and model.safetensors, or scales.safetensors; named MODEL.TAG.
        model_args: Of ``create_model``, as the released model was trained.

    Returns:
        The file of weights or scales.

    Raises:
        FileNotFoundError, RuntimeError, ValueError: The file is not there, cannot be read, or does not fit the model;
            or the folder is not named after it. Nothing is written.
    """
    path, folder = os.fspath(path), Path(folder)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'There is no file {path!r}.')
    variant, _ = split_name(folder)
    if variant != model_name:
        raise ValueError(f'The folder of a {model_name} is named {model_name}.TAG, got {str(folder)!r}.')
    scales = _scales_in(path)
    if scales is not None:
        return _convert_scales(scales, model_name, folder, model_args)
    model = load_released(timm.create_model(model_name, **model_args), path).eval()
    images = torch.randn(2, *model_input_size(model), generator=torch.Generator().manual_seed(0))
    with staged_folder(folder) as draft:
        write_folder(draft, model, _plain(model_args))
        with torch.inference_mode():
            expected, found = model(images), load_folder(draft)(images)
        if not torch.equal(expected, found):
            raise RuntimeError(
                f'What was written does not give the logits of {path!r}, by up to {(expected - found).abs().max():g}.')
    return folder / WEIGHTS


def _scales_in(path: str) -> Optional[Scales]:
    """The scales of a file that holds nothing else: vectors, and no kernels."""
    if path.endswith('.safetensors'):
        return None
    tensors = state_dict_of(read_checkpoint(path, use_ema=False))
    return Scales.load(path) if all(tensor.ndim < 2 for tensor in tensors.values()) else None


def _convert_scales(scales: Scales, model_name: str, folder: Path, model_args: Mapping[str, Any]) -> Path:
    attach_grad_mults(timm.create_model(model_name, device='meta', **{**model_args, 'scales': False}), scales)
    scales = Scales(scales, {**scales.metadata, 'model': model_name}, scales.history)
    with replacing_files(folder) as temporary:
        scales.save(temporary / SCALES)
        if Scales.load(temporary / SCALES) != scales:
            raise RuntimeError('The scales that were written are not those that were read.')
    return folder / SCALES


def _plain(model_args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the scales of the training, which the weights do not need."""
    return {**model_args, 'scales': False} if 'scales' in model_args else model_args
