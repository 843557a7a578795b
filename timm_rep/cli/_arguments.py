"""Types of command-line arguments, and models created with them."""
import argparse
import os
from contextlib import nullcontext
from typing import Any, Mapping

import timm
import torch
import torch.nn as nn
from timm.models import is_model
from timm.utils import ParseKwargs

from timm_rep.utils.files import argument_errors, config_errors

__all__ = [
    'ModelKwargs', 'add_images', 'add_model', 'count', 'create_from', 'create_model', 'default_device', 'device',
    'folder', 'names_weights', 'note_random_weights', 'positive_int', 'ratio', 'seed', 'share',
]


def default_device() -> torch.device:
    """Device of a command without ``--device``: the GPU if torch finds one, otherwise the CPU."""
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f'expected an integer of at least 1, got {text!r}')
    return value


def count(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'expected an integer of at least 0, got {text!r}')
    return int(text)


def ratio(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f'expected a number from 0 to 1, got {text!r}')
    return value


def share(text: str) -> float:
    """A number above 0, up to 1."""
    value = ratio(text)
    if not value:
        raise argparse.ArgumentTypeError(f'expected a number above 0, up to 1, got {text!r}')
    return value


def seed(text: str) -> int:
    """A seed of the generators of torch, NumPy and Python."""
    if not text.isdecimal() or int(text) >= 2 ** 31:
        raise argparse.ArgumentTypeError(f'expected an integer from 0 to 2 ** 31 - 1, got {text!r}')
    return int(text)


def folder(text: str) -> str:
    """A folder that is there; checked before weights are downloaded."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f'there is no folder {text!r}')
    return text


def device(text: str) -> torch.device:
    """A device that tensors can be created on."""
    try:
        found = torch.device(text)
        torch.zeros(1, device=found).item()
    except (AssertionError, NotImplementedError, RuntimeError) as e:  # AssertionError: torch without CUDA
        raise argparse.ArgumentTypeError(f'cannot use the device {text!r}: {" ".join(str(e).split())}') from e
    return found


def create_model(name: str, model_kwargs: Mapping[str, Any], **kwargs) -> nn.Module:
    """``timm.create_model``, with errors that name --model-kwargs.

    Args:
        name: Name of a model.
        model_kwargs: Arguments given as --model-kwargs.
        kwargs: Other arguments of ``create_model``.

    Raises:
        ValueError: The name is that of a folder; its config.json is of another library; or the model cannot be created
            with ``model_kwargs``.
    """
    if not is_model(name) and os.path.isdir(name):
        raise ValueError(f'{name!r} is a folder: the model in it is named local-dir:{name}.')
    errors = argument_errors(f'{name} with --model-kwargs {model_kwargs}') if model_kwargs else nullcontext()
    with errors, config_errors(name):
        return timm.create_model(name, **kwargs, **model_kwargs)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --checkpoint and --model-kwargs."""
    parser.add_argument('model', metavar='MODEL', help='timm model, initialized (name) or pretrained (name.tag)')
    parser.add_argument('--checkpoint', metavar='FILE', help='checkpoint of the unfolded model')
    parser.add_argument(
        '--model-kwargs', nargs='*', default={}, action=ModelKwargs, metavar='K=V',
        help='arguments of the model, e.g. num_classes=10 img_size=32')


def names_weights(model: str) -> bool:
    """Whether a name is that of pretrained weights: 'name.tag', or 'local-dir:FOLDER' and 'hf-hub:ID'."""
    return '.' in model or ':' in model


def create_from(args: argparse.Namespace) -> nn.Module:
    """The model of the arguments of :func:`add_model`; its checkpoint is not loaded yet."""
    return create_model(
        args.model, args.model_kwargs, pretrained=not args.checkpoint and names_weights(args.model))


def note_random_weights(args: argparse.Namespace, model: nn.Module) -> None:
    """Say so if the model of :func:`create_from`, or its classifier, has no pretrained weights and no checkpoint."""
    if args.checkpoint:
        return
    if not names_weights(args.model):
        print('The weights are random: name trained ones, as in repa_deit_base.in1k, or pass --checkpoint.')
    elif args.model_kwargs.get('num_classes') not in (None, 0, model.pretrained_cfg.get('num_classes')):
        print(f'The classifier is random: {args.model} has {model.pretrained_cfg.get("num_classes")} classes.')


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add --data-dir and --split, a folder of images to compare on."""
    parser.add_argument(
        '--data-dir', type=folder, metavar='DIR', help='also compare on images of DIR/SPLIT/CLASS/IMAGE')
    parser.add_argument('--split', default='val', metavar='NAME', help='folder of --data-dir (%(default)s)')


class ModelKwargs(ParseKwargs):
    """timm's action for NAME=VALUE pairs, whose values are read as Python; other words are an error."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            name, equals, _ = value.partition('=')
            if not equals or not name.isidentifier():
                parser.error(f'argument {option_string}: expected NAME=VALUE, got {value!r}')
        super().__call__(parser, namespace, values, option_string)
