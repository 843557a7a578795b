"""``timm-rep verify``: numeric self-test of folding a model."""
from ._arguments import ModelKwargs, create_model, positive_int


def add_parser(commands) -> None:
    parser = commands.add_parser('verify', help='compare a model with its folded form on random and real images')
    parser.add_argument('model', metavar='MODEL', help='timm model, initialized (name) or pretrained (name.tag)')
    parser.add_argument('--checkpoint', metavar='FILE', help='checkpoint of the unfolded model')
    parser.add_argument(
        '--model-kwargs', nargs='*', default={}, action=ModelKwargs, metavar='K=V',
        help='arguments of the model, e.g. num_classes=10 img_size=32')
    parser.add_argument(
        '--convert-to-repa', nargs='*', action=ModelKwargs, metavar='K=V',
        help='convert another timm model with convert_to_repa() before the checkpoint is loaded, e.g. idle_ratio=0.5')
    parser.add_argument('--data-dir', metavar='DIR', help='also compare on images of DIR/SPLIT/CLASS/IMAGE')
    parser.add_argument('--split', default='val', metavar='NAME', help='folder of --data-dir (%(default)s)')
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
    from timm_rep.utils.profiling import model_input_size
    from timm_rep.verify import verify

    torch.manual_seed(0)
    pretrained = not args.checkpoint and ('.' in args.model or ':' in args.model)
    model = create_model(args.model, args.model_kwargs, pretrained=pretrained)
    if args.convert_to_repa is not None:
        model = convert_to_repa(model, **args.convert_to_repa)
    if args.checkpoint:
        load_checkpoint(model, args.checkpoint)
    images = {'random': torch.randn(args.num_images, *model_input_size(model))}
    if args.data_dir:
        images['real'] = _read_images(model, args)
    passed = True
    for kind, batch in images.items():
        result = verify(model, batch, args.tolerance)
        print(f'{args.model}, {kind} images: {result}')
        if not result.folded:
            break
        passed &= result.passed
    return 0 if passed else 1


def _read_images(model, args):
    """Evenly spaced images of a split, preprocessed for the model, (N, 3, height, width)."""
    import torch
    from timm.data import create_transform, resolve_data_config

    from timm_rep.utils.data import ImageFolder
    from timm_rep.utils.profiling import model_input_size

    dataset = ImageFolder(args.data_dir, args.split)
    dataset.transform = create_transform(
        **resolve_data_config({'input_size': model_input_size(model)}, model=model))
    step = max(1, len(dataset) // args.num_images)
    return torch.stack([dataset[i][0] for i in range(0, len(dataset), step)][:args.num_images])
