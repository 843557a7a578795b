"""``timm-rep verify``: compare a model with its folded form."""
import argparse

import torch

from timm_rep._verify import verify
from timm_rep.convert import convert_to_repa
from timm_rep.utils.profiling import model_input_size

from ._arguments import Commands, ModelKwargs, add_images, add_model, create_from, images_from, load_from


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('verify', help='compare a model with its folded form on random and real images')
    add_model(parser)
    parser.add_argument(
        '--convert-to-repa', nargs='*', action=ModelKwargs, metavar='K=V',
        help='convert the model with convert_to_repa() before the checkpoint is loaded, e.g. idle_ratio=0.5')
    add_images(parser)
    parser.add_argument(
        '--tolerance', type=float, metavar='X',
        help='largest relative rms error of outputs and layers (16 times the float32 rounding error of the unfolded '
             'model)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    torch.manual_seed(0)
    model = create_from(args)
    if args.convert_to_repa is not None:
        convert_to_repa(model, **args.convert_to_repa)
    load_from(args, model)
    model.eval()
    images = {'random': torch.randn(args.images, *model_input_size(model)), 'real': images_from(args, model)}
    passed = True
    for kind, batch in images.items():
        if batch is None:
            continue
        result = verify(model, batch, args.tolerance)
        if kind == 'random':  # whose statistics say nothing about the model
            result.causes.pop('BatchNorm statistics', None)
        print(f'{args.model}, {kind} images: {result}')
        if not result.folded:
            break
        passed &= result.passed
    return 0 if passed else 1
