"""``timm-rep export``: a model as a file or folder for inference."""
import argparse

from timm_rep.deploy import FORMATS, check_target, export

from ._arguments import (
    Commands,
    add_images,
    add_model,
    create_from,
    images_from,
    load_from,
    note_random_weights,
    output,
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('export', help=f'write a model for inference: {", ".join(FORMATS)}')
    add_model(parser)
    folders = ' or '.join(name for name, format in FORMATS.items() if format.suffix is None)
    parser.add_argument(
        '-o', '--output', type=output, required=True, metavar='PATH',
        help=f'file to write; with {folders}, a new folder')
    parser.add_argument(
        '--format', choices=FORMATS, default='safetensors',
        help='; '.join(f'{name}: {format.description}' for name, format in FORMATS.items()) + ' (%(default)s)')
    parser.add_argument('--no-reparam', action='store_true', help='do not fold the model first')
    add_images(parser)
    parser.add_argument(
        '--tolerance', type=float, default=1e-4, metavar='X',
        help='largest relative rms difference from the model (%(default)s)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_target(args.output, args.format)
    model = create_from(args)
    load_from(args, model)
    print(export(
        model, args.output, args.format, reparameterize=not args.no_reparam, images=images_from(args, model),
        tolerance=args.tolerance))
    note_random_weights(args, model)
