"""Shared command-line arguments: types, groups, and helpers that create models from them."""
import argparse
import os
from contextlib import nullcontext
from typing import Any, Callable, Mapping, Optional, Sequence, TypeAlias

import timm
import torch
import torch.nn as nn
from timm.models import is_model
from timm.utils import ParseKwargs

from timm_rep.utils.atomic import check_writable
from timm_rep.utils.checkpoints import has_moving_average, load_checkpoint
from timm_rep.utils.data import read_images
from timm_rep.utils.files import argument_errors, config_errors

# result of ArgumentParser.add_subparsers(); argparse has no public name for its type
Commands: TypeAlias = 'argparse._SubParsersAction[argparse.ArgumentParser]'


def default_device() -> torch.device:
    """The GPU if torch finds one, otherwise the CPU."""
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def _number(kind: type, is_valid: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """Argument type of numbers that satisfy a condition."""
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f'expected {expected}, got {text!r}')
        return value

    return parse


positive_int = _number(int, lambda x: x >= 1, 'an integer >= 1')
count = _number(int, lambda x: x >= 0, 'an integer >= 0')
ratio = _number(float, lambda x: 0 <= x <= 1, 'a number from 0 to 1')
fraction = _number(float, lambda x: 0 < x < 1, 'a number > 0 and < 1')
share = _number(float, lambda x: 0 < x <= 1, 'a number > 0 and <= 1')
seed = _number(int, lambda x: 0 <= x < 2 ** 31, 'an integer from 0 to 2 ** 31 - 1')


def folder(text: str) -> str:
    """Existing folder; checked before weights are downloaded."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f'expected an existing folder, got {text!r}')
    return text


def output(text: str) -> str:
    """Path of a file or folder to write; rejects the empty string and the root of a file system."""
    if not text or os.path.dirname(os.path.abspath(text)) == os.path.abspath(text):
        raise argparse.ArgumentTypeError(f'expected a path with a name, got {text!r}')
    return text


def device(text: str) -> torch.device:
    """Device that tensors can be created on."""
    try:
        found = torch.device(text)
        torch.zeros(1, device=found).item()
    # AssertionError: torch without CUDA; ImportError: without the package of the device
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as e:
        raise argparse.ArgumentTypeError(
            f'expected a device that torch can use, got {text!r}: {" ".join(str(e).split())}') from e
    return found


class ModelKwargs(ParseKwargs):
    """timm's action for NAME=VALUE pairs, whose values are Python literals; other words are an error."""

    def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Sequence[str],
            option_string: Optional[str] = None,
    ) -> None:
        for value in values:
            name, equals, _ = value.partition('=')
            if not equals or not name.isidentifier():
                parser.error(f'argument {option_string}: expected NAME=VALUE, got {value!r}')
        super().__call__(parser, namespace, values, option_string)


def not_empty(text: str) -> str:
    """A name that is not empty, as that of a variable of the shell that is not set."""
    if not text:
        raise argparse.ArgumentTypeError('it must not be empty')
    return text


def add_model_kwargs(parser: argparse.ArgumentParser, of: str = 'the model', example: str = 'num_classes=10') -> None:
    """Add --model-kwargs; ``of`` and ``example`` are for the help text."""
    parser.add_argument(
        '--model-kwargs', nargs='*', default={}, action=ModelKwargs, metavar='K=V',
        help=f'arguments of {of}, e.g. {example}')


def add_checkpoint(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --checkpoint, with a help text, and --use-ema; see :func:`load_from`."""
    parser.add_argument('--checkpoint', type=not_empty, metavar='FILE', help=text)
    parser.add_argument(
        '--use-ema', action='store_true', help='use the moving average of the weights in the checkpoint')


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --checkpoint, --use-ema and --model-kwargs."""
    parser.add_argument('model', metavar='MODEL', help='timm model, initialized (name) or pretrained (name.tag)')
    add_checkpoint(parser, 'checkpoint of the unfolded model')
    add_model_kwargs(parser, example='num_classes=10 img_size=32')


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add --data-dir, --val-split and --images, real images to compare on; see :func:`images_from`."""
    parser.add_argument(
        '--data-dir', type=folder, metavar='DIR', help='also compare on images of DIR/SPLIT/CLASS/IMAGE')
    parser.add_argument('--val-split', default='val', metavar='SPLIT', help='folder in DIR (%(default)s)')
    parser.add_argument(
        '--images', type=positive_int, default=8, metavar='N', help='number of images (%(default)s)')


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Add --train-split, --val-split, --batch-size and --workers, for folders of images."""
    parser.add_argument(
        '--train-split', default='train', metavar='SPLIT',
        help='folder for calibration and training; labels are not used (%(default)s)')
    parser.add_argument(
        '--val-split', default='val', metavar='SPLIT', help='labelled folder for the accuracy (%(default)s)')
    parser.add_argument(
        '--batch-size', type=positive_int, default=64, metavar='N', help='images per step and process (%(default)s)')
    parser.add_argument(
        '--workers', type=count, default=0, metavar='N', help='processes that load images (%(default)s)')


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device, whose default is None; see :func:`default_device`."""
    parser.add_argument('--device', type=device, help='device (default: the GPU if there is one, otherwise the CPU)')


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add --seed."""
    parser.add_argument('--seed', type=seed, default=0, metavar='N', help='random seed (%(default)s)')


def check_output_file(output: str, *suffixes: str) -> None:
    """Check, before any work, that ``--output`` is a file with one of the suffixes, in a writable folder."""
    folder, name = os.path.split(output)
    if os.path.splitext(name)[1] not in suffixes or os.path.isdir(output):
        raise ValueError(f'--output must be a {" or ".join(suffixes)} file, got {output!r}.')
    check_writable(folder or '.')


def check_name(name: str) -> None:
    """Raise ValueError unless this is the name of a timm model, with or without a tag."""
    if not is_model(name):
        raise ValueError(f'Expected the name of a timm model, but got {name!r}: see timm.list_models().')


def create_model(name: str, model_kwargs: Mapping[str, Any], **kwargs: Any) -> nn.Module:
    """``timm.create_model``, with errors that name the argument at fault."""
    if not is_model(name) and os.path.isdir(name):
        raise ValueError(f'Expected a model, but got the folder {name!r}: to load it, pass local-dir:{name}.')
    errors = argument_errors(f'{name} with --model-kwargs {model_kwargs}') if model_kwargs else nullcontext()
    with errors, config_errors(name):
        return timm.create_model(name, **kwargs, **model_kwargs)


def names_weights(model: str) -> bool:
    """Whether a name includes pretrained weights: 'name.tag', 'local-dir:FOLDER' or 'hf-hub:ID'."""
    return '.' in model or ':' in model


def create_from(args: argparse.Namespace) -> nn.Module:
    """Model of the arguments of :func:`add_model`, without the checkpoint; see :func:`load_from`."""
    return create_model(
        args.model, args.model_kwargs, pretrained=not args.checkpoint and names_weights(args.model))


def load_from(args: argparse.Namespace, model: nn.Module) -> None:
    """Load --checkpoint, if given; print a note if it has a moving average that is not used."""
    if args.checkpoint:
        load_checkpoint(model, args.checkpoint, args.use_ema)
        model.pretrained_cfg.pop('label_names', None)  # another training may have other classes
        if not names_weights(args.model):
            model.pretrained_cfg['license'] = None  # timm's entry is of its own weights
        note_moving_average(args)
    elif args.use_ema:
        raise ValueError('--checkpoint must be given with --use-ema.')


def note_moving_average(args: argparse.Namespace) -> None:
    """Print a note if --checkpoint has a moving average of the weights that is not used."""
    if args.checkpoint and not args.use_ema and has_moving_average(args.checkpoint):
        print(f'{args.checkpoint} also has a moving average of the weights: --use-ema loads it.')


def images_from(args: argparse.Namespace, model: nn.Module) -> Optional[torch.Tensor]:
    """Images of the arguments of :func:`add_images`, None without --data-dir."""
    return read_images(model, args.data_dir, args.val_split, args.images) if args.data_dir else None


def note_random_weights(args: argparse.Namespace, model: nn.Module) -> None:
    """Print a note if the model of :func:`create_from`, or its classifier, has random weights."""
    if args.checkpoint or names_weights(args.model):
        note_random_classifier(args, model)
    else:
        print('The weights are random. Name a pretrained model, e.g. repa_deit_base.in1k, or pass --checkpoint.')


def note_random_classifier(args: argparse.Namespace, model: nn.Module) -> None:
    """Print a note if --model-kwargs ask a pretrained model for another number of classes."""
    pretrained = model.pretrained_cfg.get('num_classes')
    if not args.checkpoint and args.model_kwargs.get('num_classes') not in (None, 0, pretrained):
        print(f'The classifier is random: {args.model} has {pretrained} classes.')
