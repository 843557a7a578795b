"""``timm-rep verify``: numeric self-test of folding a model."""
from ._arguments import ModelKwargs, add_images, add_model, create_from, positive_int


def add_parser(commands) -> None:
    parser = commands.add_parser('verify', help='compare a model with its folded form on random and real images')
    add_model(parser)
    parser.add_argument(
        '--convert-to-repa', nargs='*', action=ModelKwargs, metavar='K=V',
        help='convert another timm model with convert_to_repa() before the checkpoint is loaded, e.g. idle_ratio=0.5')
    add_images(parser)
    parser.add_argument(
        '--num-images', type=positive_int, default=8, metavar='N', help='random, and real, images (%(default)s)')
    parser.add_argument(
        '--tolerance', type=float, metavar='X',
        help='largest relative rms error of outputs and layers (16 times the float32 rounding error of the unfolded '
             'model)')
    parser.set_defaults(run=run)


def run(args) -> int:
    import torch

    from timm_rep.convert import convert_to_repa
    from timm_rep.utils.checkpoints import load_checkpoint
    from timm_rep.utils.data import read_images
    from timm_rep.utils.profiling import model_input_size
    from timm_rep._verify import verify

    torch.manual_seed(0)
    model = create_from(args)
    if args.convert_to_repa is not None:
        convert_to_repa(model, **args.convert_to_repa)
    if args.checkpoint:
        load_checkpoint(model, args.checkpoint)
    images = {'random': torch.randn(args.num_images, *model_input_size(model))}
    if args.data_dir:
        images['real'] = read_images(model, args.data_dir, args.split, args.num_images)
    passed = True
    for kind, batch in images.items():
        result = verify(model, batch, args.tolerance)
        print(f'{args.model}, {kind} images: {result}')
        if not result.folded:
            break
        passed &= result.passed
    return 0 if passed else 1
