"""Writing folders of published models: timm's config.json, with the sha256 of every other file."""
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from timm.models import save_for_hf

from timm_rep.convert.record import is_folded
from timm_rep.deploy import quantized_files
from timm_rep.scales import Scales, attach_grad_mults
from timm_rep.utils.atomic import replacing_files, replacing_folder
from timm_rep.utils.checkpoints import contiguous_copy, read_state_dict, write_safetensors
from timm_rep.utils.files import argument_errors
from timm_rep.utils.profiling import model_input_size

from .metrics import drop_predictions
from .released import load_released
from .repository import CARD, CONFIG, SCALES, WEIGHTS, ModelRepository, PathLike, read_folder, sha256

__all__ = [
    'check_folder', 'convert_released', 'drop_weights', 'load_folder', 'split_name', 'write_folder', 'write_hashes',
]


def split_name(folder: PathLike) -> Tuple[str, str]:
    """Split the name of a folder, ``repa_lvvit_s.cifar10``, into model and tag.

    Raises:
        ValueError: It has no tag, or there is no such model.
    """
    variant, _, tag = Path(folder).resolve().name.partition('.')
    if not tag or not timm.is_model(variant):
        raise ValueError(
            f'The folder of a published model is named MODEL.TAG, as in repa_lvvit_s.cifar10, got {str(folder)!r}'
            + (f': there is no model {variant!r}.' if tag else '.'))
    return variant, tag


def write_folder(
        folder: PathLike,
        model: nn.Module,
        model_args: Mapping[str, Any],
        scales: Optional[Scales] = None,
        half: bool = False,
        label_names: Optional[Sequence[str]] = None,
) -> None:
    """Write config.json, model.safetensors and scales.safetensors, from which ``timm.create_model`` loads the model.

    Other files of the folder stay.

    Args:
        folder: Folder, named MODEL.TAG.
        model: Model of this package or of timm; its pretrained_cfg describes its images.
        model_args: Arguments of ``create_model`` that determine the structure.
        scales: Scales of the model's GradMults, for training it further; None for a model without.
        half: Write parameters as float16, in half the space; statistics of a BatchNorm stay float32.
        label_names: Names of the classes, by index.

    Raises:
        OverflowError: A parameter is too large for float16; nothing is written.
        ValueError: The folder is not named after a model, or an argument cannot be written as JSON.
    """
    _, tag = split_name(folder)
    tensors = dict(model.state_dict())
    if half:
        tensors.update(_halved(model))
    args = dict(model_args)
    if is_folded(model):
        args['reparameterized'] = True
    for name, value in args.items():
        try:
            json.dumps(value)
        except TypeError as e:
            raise ValueError(f'The argument {name}={value!r} cannot be written into config.json.') from e
    with replacing_folder(folder) as draft:
        save_for_hf(
            contiguous_copy(model), draft, model_args=args, safe_serialization=True,
            model_config={'label_names': list(label_names)} if label_names else None)
        write_safetensors(tensors, draft / WEIGHTS, metadata={'format': 'pt'})  # which transformers asks for
        config = dict(read_folder(draft).config)
        config['pretrained_cfg'].update(tag=tag, input_size=list(model_input_size(model)))
        args = {**config.get('model_args', {}), **args}
        args.pop('num_classes', None)  # beside model_args, where transformers looks for it
        written = [WEIGHTS]
        if scales is not None:
            args.pop('scales', None)
            scales.save(draft / SCALES)
            written.append(SCALES)
        config['model_args'] = args
        config['sha256'] = {name: sha256(draft / name) for name in written}
        _write_config(draft, config)


def drop_weights(folder: Path) -> None:
    """Remove the weights of a folder that is about to get others, with what is of them: scales, int8 form and card.

    Raises:
        RuntimeError: The report of the int8 form cannot be read.
    """
    for path in (folder / WEIGHTS, folder / SCALES, folder / CARD, *quantized_files(folder)):
        path.unlink(missing_ok=True)


def _halved(model: nn.Module) -> Dict[str, torch.Tensor]:
    halved = {name: value.detach().half().contiguous() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        if not torch.isfinite(halved[name]).all() and torch.isfinite(value).all():
            raise OverflowError(f'{name} holds {value.abs().max().item():g}, which float16 cannot: write float32.')
    return halved


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    with replacing_files(folder) as temporary:
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')


def load_folder(folder: PathLike, **kwargs) -> nn.Module:
    """Create the model of a folder with its weights, in eval mode.

    Args:
        folder: Folder with config.json and weights.
        kwargs: Further arguments of ``timm.create_model``.

    Raises:
        FileNotFoundError, RuntimeError: There is no config.json or no file of weights, or one cannot be read.
    """
    architecture = read_folder(folder).config['architecture']  # timm's errors do not name the file
    if not timm.is_model(architecture):
        raise RuntimeError(f'{str(Path(folder) / CONFIG)!r}: there is no model {architecture!r}.')
    return timm.create_model(f'local-dir:{os.fspath(folder)}', pretrained=True, **kwargs).eval()


def write_hashes(folder: PathLike) -> None:
    """Write the sha256 of every file of the folder, except hidden ones, into its config.json.

    Raises:
        FileNotFoundError, RuntimeError: There is no config.json, or it cannot be read.
        ValueError: The folder has subfolders, or links to files elsewhere.
    """
    repo = read_folder(folder)
    hashes = {name: sha256(repo.folder / name) for name in _files(repo.folder)}
    _write_config(repo.folder, {**repo.config, 'sha256': hashes})


def _files(folder: Path) -> List[str]:
    """Names of the files published beside config.json: all but hidden ones, which programs leave behind."""
    paths = sorted(path for path in folder.iterdir() if path.name != CONFIG and not path.name.startswith('.'))
    for path in paths:
        if not path.is_file() or path.resolve().parent != folder.resolve():
            raise ValueError(
                f'{os.fspath(path)!r} cannot be published: a published folder holds files only, and no links to files '
                'elsewhere. Remove it, or replace the link by the file.')
    return [path.name for path in paths]


def check_folder(folder: PathLike) -> ModelRepository:
    """Check that a folder is complete and unchanged since ``timm-rep card`` wrote it.

    Raises:
        FileNotFoundError: There is no config.json, or a file that it names is missing.
        RuntimeError: A file differs from its hash in config.json, or has none there.
        ValueError: The folder is not named after the model in it, or has subfolders or links to files elsewhere.
    """
    variant, _ = split_name(folder)
    repo = read_folder(folder)
    if repo.config['architecture'] != variant:
        raise ValueError(f'{os.fspath(folder)!r} holds a {repo.config["architecture"]}, no {variant}.')
    for name in repo.hashes:
        repo.file(name)
    missing = [name for name in _files(repo.folder) if name not in repo.hashes]
    if missing:
        raise RuntimeError(
            f'{CONFIG} in {os.fspath(folder)!r} has no sha256 of {", ".join(missing)}: run timm-rep card on it.')
    return repo


def convert_released(path: PathLike, model_name: str, folder: PathLike, model_args: Mapping[str, Any]) -> Path:
    """Convert a released checkpoint or file of scales into a folder, and check what was written by loading it.

    Args:
        path: File of a layout that :func:`timm_rep.load_released` or :class:`timm_rep.Scales` reads; a pickled one is
            read with ``weights_only=True``.
        model_name: Name of the model, without a tag.
        folder: Folder named MODEL.TAG, to write config.json and model.safetensors, or scales.safetensors, into. Where
            weights are replaced, the scales, int8 form, card and predictions of the previous ones are removed.
        model_args: Arguments of ``create_model`` that the released model was trained with.

    Returns:
        Path of the file of weights or scales.

    Raises:
        FileNotFoundError, RuntimeError, ValueError: The file is not there, cannot be read, or does not fit the model;
            or the folder is not named after it. Nothing is written.
    """
    path, folder = os.fspath(path), Path(folder)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'There is no file {path!r}.')
    if split_name(folder)[0] != model_name:
        raise ValueError(f'The folder of a {model_name} is named {model_name}.TAG, got {str(folder)!r}.')
    plain_args = {**model_args, 'scales': None} if 'scales' in model_args else dict(model_args)
    # a file of vectors and no kernels is one of scales
    tensors = {} if path.endswith('.safetensors') else read_state_dict(path, use_ema=False)
    if tensors and all(tensor.ndim < 2 for tensor in tensors.values()):
        scales = Scales.load(path)
        with argument_errors(f'{model_name} with {dict(model_args)}'):
            model = timm.create_model(model_name, device='meta', **plain_args)
        attach_grad_mults(model, scales)
        scales = Scales(scales, {**scales.metadata, 'model': model_name}, scales.history)
        with replacing_files(folder) as temporary:
            scales.save(temporary / SCALES)
            if Scales.load(temporary / SCALES) != scales:
                raise RuntimeError('The scales that were written are not those that were read.')
        return folder / SCALES
    with argument_errors(f'{model_name} with {dict(model_args)}'):
        model = timm.create_model(model_name, **model_args)
    load_released(model, path).eval()
    images = torch.randn(2, *model_input_size(model), generator=torch.Generator().manual_seed(0))
    with replacing_folder(folder) as draft:
        if (draft / WEIGHTS).is_file():  # else scales that are there were converted for these weights
            drop_weights(draft)
        write_folder(draft, model, plain_args)
        drop_predictions(draft)
        with torch.inference_mode():
            expected, found = model(images), load_folder(draft)(images)
        if not torch.equal(expected, found):
            raise RuntimeError(
                f'What was written does not give the logits of {path!r}, by up to {(expected - found).abs().max():g}.')
    return folder / WEIGHTS
