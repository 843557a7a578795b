"""Making a folder to publish from a file that the authors released."""
import os
from pathlib import Path
from typing import Any, Dict

import timm
import torch

from timm_rep.hub import (
    CONFIG_NAME,
    SCALES_NAME,
    WEIGHTS_NAME,
    load_folder,
    load_released,
    split_name,
    write_hashes,
    write_model,
)
from timm_rep.scales import Scales, attach_grad_mults
from timm_rep.utils.checkpoints import read_state_dict
from timm_rep.utils.files import StrPath, argument_errors
from timm_rep.utils.profiling import model_input_size

from ._draft import draft_of, drop_weights
from ._metrics import PREDICTIONS_NAME, read_metrics
from ._recipe import check_default_scales


def convert_released(path: StrPath, model_name: str, folder: StrPath, model_args: Dict[str, Any]) -> Path:
    """Convert a released checkpoint or file of scales into a folder, and check the folder by loading it.

    Args:
        path: File of a layout that :func:`timm_rep.load_released` or :class:`timm_rep.Scales` reads; a pickled one is
            read with ``weights_only=True``.
        model_name: Name of the model, without a tag.
        folder: Folder named MODEL.TAG, to write config.json and model.safetensors, or scales.safetensors, into. If
            weights are replaced, scales, int8 form, card and predictions of the previous ones are removed.
        model_args: Arguments of ``create_model`` of the released model.

    Returns:
        Path of the file of weights or scales.

    Raises:
        FileNotFoundError, RuntimeError, ValueError: The file does not exist, cannot be read, or does not fit the
            model; or the folder is not named after the model. Nothing is written.
    """
    path, folder = os.fspath(path), Path(folder).resolve()
    if not os.path.isfile(path):
        raise FileNotFoundError(f'Expected a released file, but {path!r} does not exist.')
    if split_name(folder)[0] != model_name:
        raise ValueError(f'The name of the folder must be {model_name}.TAG, got {str(folder)!r}.')
    plain_args = {**model_args, 'scales': None} if 'scales' in model_args else dict(model_args)
    # a file of vectors and no kernels is a file of scales
    tensors = read_state_dict(path, use_ema=False)
    if tensors and all(tensor.ndim < 2 for tensor in tensors.values()):
        scales = Scales.load(path)
        with argument_errors(f'{model_name} with {dict(model_args)}'):
            model = timm.create_model(model_name, device='meta', **plain_args)
        attach_grad_mults(model, scales)
        scales = Scales(scales, {**scales.metadata, 'model': model_name}, scales.history)
        with draft_of(folder) as draft:
            scales.save(draft / SCALES_NAME)
            if Scales.load(draft / SCALES_NAME) != scales:
                raise RuntimeError(f'The scales in {SCALES_NAME} must equal those read from {path!r}, but differ.')
            if (draft / CONFIG_NAME).is_file():
                write_hashes(draft)
        return folder / SCALES_NAME
    if not (folder / SCALES_NAME).is_file():
        check_default_scales(model_name, model_args)
    with argument_errors(f'{model_name} with {dict(model_args)}'):
        model = timm.create_model(model_name, **model_args)
    load_released(model, path).eval()
    images = torch.randn(2, *model_input_size(model), generator=torch.Generator().manual_seed(0), device='cpu')
    with draft_of(folder) as draft:
        if (draft / WEIGHTS_NAME).is_file():  # else scales that are there were converted for these weights
            drop_weights(draft)
        stored = Scales.load(draft / SCALES_NAME) if (draft / SCALES_NAME).is_file() else None
        write_model(model, draft, model_args=plain_args, scales=stored, tag=split_name(folder)[1])
        if read_metrics(draft).accuracy is None:
            (draft / PREDICTIONS_NAME).unlink(missing_ok=True)
        with torch.inference_mode():
            expected, found = model(images), load_folder(draft)(images)
        if not torch.equal(expected, found):
            raise RuntimeError(
                f'The folder must give the logits of {path!r}, but differs by {(expected - found).abs().max():g}.')
        write_hashes(draft)
    return folder / WEIGHTS_NAME
