"""``timm-rep accelerate``: a faster model from a pretrained one.

``torchrun --no-python timm-rep accelerate ...`` converts and distils with several processes.
"""
import argparse
import contextlib
from pathlib import Path

import torch
from timm.utils import init_distributed_device, is_primary

from timm_rep.accelerate import STATE, accelerate, check_output, figures_table, write_model
from timm_rep.utils.atomic import check_writable, locking_folder
from timm_rep.utils.data import Images
from timm_rep.utils.training import check_distillation

from ._arguments import (
    Commands,
    add_checkpoint,
    add_device,
    add_loading,
    add_model_kwargs,
    add_seed,
    count,
    create_model,
    default_device,
    folder,
    fraction,
    load_from,
    note_random_classifier,
    output,
    positive_int,
    ratio,
    share,
)
from ._picture import check_matplotlib

_SWEEP = (0.25, 0.5, 0.75, 0.9, 1.)
# interpolation modes of timm's transforms
_INTERPOLATIONS = ('nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos')


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        'accelerate', help='convert the FFNs of a pretrained model from unlabelled images; measure, distil, save')
    parser.add_argument('model', metavar='MODEL', help="timm model; pretrained, unless --checkpoint is given")
    parser.add_argument(
        '--data-dir', type=folder, required=True, metavar='DIR',
        help='folder of images: DIR/train/IMAGE, or in folders by class, and DIR/val/CLASS/IMAGE for the accuracy')
    parser.add_argument('-o', '--output', type=output, required=True, metavar='DIR', help='folder to write')
    add_checkpoint(parser, 'checkpoint of the model (default: pretrained weights)')
    add_model_kwargs(parser, example='num_classes=10 img_size=32')
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        '--idle-ratio', type=ratio, metavar='R',
        help='fraction of the hidden channels that become linear, 0 to 1 (default: 0.75)')
    size.add_argument(
        '--macs', type=fraction, metavar='R',
        help='fraction of the multiply-accumulates to keep, instead of --idle-ratio; chooses a ratio for each FFN')
    parser.add_argument(
        '--sweep', action='store_true', help=f'also measure the idle ratios {", ".join(map(str, _SWEEP))}')
    parser.add_argument(
        '--images', type=positive_int, default=2048, metavar='N',
        help='largest number of calibration images (default: %(default)s)')
    parser.add_argument(
        '--distil-epochs', type=count, default=0, metavar='N', help='epochs of distillation from MODEL (default: none)')
    parser.add_argument('--lr', type=float, metavar='X', help='learning rate of the distillation (1e-05)')
    parser.add_argument('--resume', action='store_true', help='continue an interrupted distillation')
    add_loading(parser)
    parser.add_argument('--img-size', type=positive_int, metavar='N', help="image size in pixels (the model's)")
    parser.add_argument('--mean', type=float, nargs='+', metavar='X', help="mean of the channels (the model's)")
    parser.add_argument(
        '--std', type=float, nargs='+', metavar='X', help="standard deviation of the channels (the model's)")
    parser.add_argument('--interpolation', choices=_INTERPOLATIONS, help="mode for resizing images (the model's)")
    parser.add_argument('--crop-pct', type=share, metavar='X', help="fraction of the image to keep (the model's)")
    add_seed(parser)
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    lr = {} if args.lr is None else {'lr': args.lr}
    check_distillation(args.distil_epochs, **lr)
    if args.resume and not args.distil_epochs:
        raise ValueError('--distil-epochs must be given with --resume: pass the value of the interrupted distillation.')
    if lr and not args.distil_epochs:
        raise ValueError('--distil-epochs must be given with --lr, which is the learning rate of the distillation.')
    if args.sweep:
        check_matplotlib('accelerate --sweep')
    args.device = str(args.device or default_device())
    device = init_distributed_device(args)
    primary = is_primary(args)  # rank 0, which measures and writes
    output = check_output(args.output) if primary else Path(args.output)
    model = create_model(args.model, args.model_kwargs, pretrained=args.checkpoint is None)
    if not hasattr(model, '_model_args'):  # timm records them since 1.0.31
        model._model_args = dict(args.model_kwargs)
    load_from(args, model)
    note_random_classifier(args, model)
    images = Images(
        model, args.data_dir, args.train_split, args.val_split, args.batch_size, args.workers,
        device, args.seed,
        **{name: getattr(args, name) for name in ('img_size', 'mean', 'std', 'interpolation', 'crop_pct')})
    check_writable(output)
    with locking_folder(output, wait=False) if primary else contextlib.nullcontext():
        state = output / STATE
        if args.distil_epochs and state.exists() and not args.resume:
            raise FileExistsError(
                f'{str(state)!r} of an interrupted distillation exists: --resume continues it; delete it to start '
                'again.')
        try:
            result = accelerate(
                model,
                images,
                idle_ratio=args.idle_ratio,
                macs=args.macs,
                calibration_images=args.images,
                distil_epochs=args.distil_epochs,
                sweep=_SWEEP if args.sweep else (),
                checkpoint=state if args.distil_epochs else None,
                resume=args.resume,
                **lr,
            )
        except KeyboardInterrupt:
            if state.exists():
                args.interrupt_hint = '--resume continues the distillation.'
            raise
        if args.distributed:
            torch.distributed.destroy_process_group()
        if not primary:
            return 0
        write_model(output, result, args.command)
    print(f'{result.report}\n\n{figures_table(result.figures)}\n\nWritten: {output.resolve()}')
    print(f"\nmodel = timm.create_model('local-dir:{output}', pretrained=True)   # after import timm_rep")
    return 0
