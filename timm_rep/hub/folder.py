"""Folders of published models: timm's config.json, the weights, and what belongs to them, each with its hash."""
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import timm
import torch
import torch.nn as nn
from safetensors.torch import save_file
from timm.models import save_for_hf

from timm_rep.scales import Scales
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.profiling import model_input_size

from .files import CONFIG, SCALES, WEIGHTS, Published, sha256

__all__ = ['check_folder', 'load_folder', 'split_name', 'staged_folder', 'write_folder', 'write_hashes']


def split_name(folder: Union[str, os.PathLike]) -> Tuple[str, str]:
    """The model and the tag of a folder that is named after them, ``repa_deit_tiny.cifar10``.

    Raises:
        ValueError: It is not, or there is no such model.
    """
    variant, _, tag = Path(folder).resolve().name.partition('.')
    if not tag or not timm.is_model(variant):
        raise ValueError(
            f'The folder of a published model is named MODEL.TAG, as in repa_deit_tiny.cifar10, got {str(folder)!r}'
            + (f': there is no model {variant!r}.' if tag else '.'))
    return variant, tag


@contextlib.contextmanager
def staged_folder(folder: Union[str, os.PathLike]) -> Iterator[Path]:
    """An empty folder of the same name, whose files move into this one at the end; if the body raises, none does."""
    with replacing_files(folder) as temporary:
        draft = temporary / Path(folder).name
        draft.mkdir()
        yield draft
        for path in draft.iterdir():
            path.rename(temporary / path.name)
        draft.rmdir()


def write_folder(
        folder: Union[str, os.PathLike],
        model: nn.Module,
        model_args: Mapping[str, Any],
        scales: Optional[Scales] = None,
        half: bool = False,
        label_names: Optional[Sequence[str]] = None,
) -> None:
    """Write what ``timm.create_model`` loads a model from: config.json, model.safetensors, and scales.safetensors.

    Other files of the folder stay. The model's pretrained_cfg says what its images are like.

    Args:
        folder: Named after the model and the tag.
        model: Of this package, or of timm.
        model_args: What ``create_model`` was called with, as far as it makes the structure.
        scales: What the model's GradMults are made of, for those who train it further.
        half: Write parameters as float16, in half the space; statistics of a BatchNorm stay float32.
        label_names: Of the classes, by index.

    Raises:
        OverflowError: A parameter is too large for float16; nothing is written.
        ValueError: The folder is not named after a model, or an argument cannot be written as JSON.
    """
    _, tag = split_name(folder)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if half:
        tensors.update(_halved(model))
    args = dict(model_args)
    if scales is not None:
        args['scales'] = 'published'
    if getattr(model, 'reparameterized', False):
        args['reparameterized'] = True
    for name, value in args.items():
        try:
            json.dumps(value)
        except TypeError as e:
            raise ValueError(f'The argument {name}={value!r} cannot be written into config.json.') from e
    with replacing_files(folder) as temporary:
        save_for_hf(
            model, temporary, model_args=args, safe_serialization=True,
            model_config={'label_names': list(label_names)} if label_names else None)
        config = json.loads((temporary / CONFIG).read_text(encoding='utf-8'))
        config['pretrained_cfg'].update(tag=tag, input_size=list(model_input_size(model)))
        config['model_args'] = {**config.get('model_args', {}), **args}
        save_file(tensors, temporary / WEIGHTS, metadata={'format': 'pt'})
        written = [WEIGHTS]
        if scales is not None:
            scales.save(temporary / SCALES)
            written.append(SCALES)
        config['sha256'] = {name: sha256(temporary / name) for name in written}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')


def _halved(model: nn.Module) -> Dict[str, torch.Tensor]:
    halved = {name: value.detach().half().contiguous() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        if not torch.isfinite(halved[name]).all() and torch.isfinite(value).all():
            raise OverflowError(f'{name} holds {value.abs().max().item():g}, which float16 cannot: write float32.')
    return halved


def load_folder(folder: Union[str, os.PathLike], **kwargs) -> nn.Module:
    """The model of a folder, with its weights, in eval mode.

    Args:
        kwargs: Further arguments of ``timm.create_model``.
    """
    return timm.create_model(f'local-dir:{os.fspath(folder)}', pretrained=True, **kwargs).eval()


def write_hashes(folder: Union[str, os.PathLike]) -> None:
    """Write the sha256 of every file of the folder, but hidden ones, into its config.json."""
    folder = Path(folder)
    config = Published.in_folder(folder).config
    config['sha256'] = {name: sha256(folder / name) for name in _files(folder)}
    with replacing_files(folder) as temporary:
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')


def _files(folder: Path) -> List[str]:
    """What is published beside config.json: all but hidden files, which programs leave behind."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob('*')) if path.is_file())
    return [name.as_posix() for name in names if name != Path(CONFIG) and not any(p[0] == '.' for p in name.parts)]


def check_folder(folder: Union[str, os.PathLike]) -> Published:
    """
    Raises:
        FileNotFoundError: There is no config.json, or a file that it names is missing.
        RuntimeError: A file is another than the config.json names, or is not named there.
        ValueError: The folder is not named after the model in it.
    """
    folder = Path(folder)
    variant, _ = split_name(folder)
    published = Published.in_folder(folder)
    if published.config['architecture'] != variant:
        raise ValueError(f'{os.fspath(folder)!r} holds a {published.config["architecture"]}, no {variant}.')
    for name in published.hashes:
        published.file(name)
    strangers = [name for name in _files(folder) if name not in published.hashes]
    if strangers:
        raise RuntimeError(
            f'{CONFIG} in {os.fspath(folder)!r} has no sha256 of {", ".join(strangers)}: run timm-rep card on it.')
    return published
