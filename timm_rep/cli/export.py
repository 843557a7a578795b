"""``timm-rep export``: a model as a file or folder for inference."""
from timm_rep.deploy import FORMATS, check_target, export

from ._arguments import add_images, add_model, create_from, note_random_weights, positive_int


def add_parser(commands) -> None:
    parser = commands.add_parser('export', help='write a model as safetensors, ONNX, .pt2 or an AOTInductor package')
    add_model(parser)
    parser.add_argument(
        '-o', '--output', required=True, metavar='PATH', help='file to write; with safetensors, a new folder')
    parser.add_argument(
        '--format', choices=FORMATS, default='safetensors', help='pt2: torch.export; aoti: compiled (%(default)s)')
    parser.add_argument('--no-reparam', action='store_true', help='do not fold the model first')
    add_images(parser)
    parser.add_argument(
        '--num-images', type=positive_int, default=8, metavar='N', help='images of --data-dir (%(default)s)')
    parser.add_argument(
        '--tolerance', type=float, default=1e-4, metavar='X',
        help='largest relative rms difference from the model (%(default)s)')
    parser.set_defaults(run=run)


def run(args) -> int:
    from timm_rep.utils.checkpoints import load_checkpoint
    from timm_rep.utils.data import read_images

    check_target(args.output, args.format)
    model = create_from(args)
    if args.checkpoint:
        load_checkpoint(model, args.checkpoint)
    images = read_images(model, args.data_dir, args.split, args.num_images) if args.data_dir else None
    print(export(
        model, args.output, args.format, reparameterize=not args.no_reparam, images=images, tolerance=args.tolerance))
    note_random_weights(args, model)
    return 0
