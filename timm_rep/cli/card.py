"""``timm-rep card``: prepare a folder for publishing: weights, measured figures, model card, hashes."""
import argparse

from timm_rep.hub import CARD_NAME, split_name
from timm_rep.publish import prepare_folder
from timm_rep.utils.atomic import check_writable

from ._arguments import (
    Commands,
    add_checkpoint,
    add_device,
    default_device,
    not_empty,
    note_moving_average,
    positive_int,
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('card', help='prepare a folder for publishing: weights, figures, card, hashes')
    parser.add_argument('folder', metavar='DIR', help='folder named MODEL.TAG, e.g. hub/repa_any.cifar10')
    add_checkpoint(parser, 'checkpoint of a training run (default: keep the weights)')
    parser.add_argument(
        '--recipe', type=not_empty, metavar='FILE',
        help='file for train.py --config, in the folder of the checkpoint (default: train.yaml of DIR)')
    parser.add_argument(
        '--half', action='store_true',
        help='write parameters as float16, in half the space; this removes accuracy and int8 form of the old weights')
    parser.add_argument('--data-dir', metavar='DIR', help='measure the accuracy on these images')
    parser.add_argument(
        '--val-split', default='val', metavar='SPLIT', help='folder in DIR (%(default)s)')
    parser.add_argument('--dataset', metavar='NAME', help='name of the dataset, for the card, e.g. CIFAR-10')
    add_device(parser)
    parser.add_argument(
        '--batch-size', type=positive_int, metavar='N',
        help='batch size to measure the throughput with (that of the known figures, or 8)')
    parser.add_argument(
        '--measure', action='store_true', help='measure size and speed even if they are known with this batch size')
    parser.add_argument(
        '--org', metavar='NAME', help='user or organization that will publish it (default: TIMM_REP_ORG, or timm-rep)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    split_name(args.folder)
    folder = check_writable(args.folder)
    before = {file.name for file in folder.glob('*')}
    prepare_folder(
        folder,
        args.checkpoint,
        args.recipe,
        data_dir=args.data_dir,
        split=args.val_split,
        dataset=args.dataset,
        half=args.half,
        use_ema=args.use_ema,
        device=args.device or default_device(),
        batch_size=args.batch_size,
        measure=args.measure,
        org=args.org,
    )
    note_moving_average(args)
    removed = before - {file.name for file in folder.glob('*')}
    if removed:
        print(f'Removed, since the weights have changed: {", ".join(sorted(removed))}')
    print(f'Written: {(folder / CARD_NAME).resolve()}')
