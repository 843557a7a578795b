"""``timm-rep hyper-search``: search the scales of a RepOpt model.

``torchrun --no-python timm-rep hyper-search ...`` searches with several processes.
"""
import argparse
from pathlib import Path

import timm
import torch
from timm.utils import init_distributed_device, is_primary

from timm_rep.search import DeviceLoader, create_search_dataset, create_search_loader, hyper_search
from timm_rep.utils.labels import check_same_classes, class_names

from ._arguments import Commands, add_model_kwargs, add_seed, check_output_file, count, default_device, positive_int


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('hyper-search', help='find the scales of a RepOpt model on a small dataset')
    parser.add_argument('model', help='name of a RepOpt model, e.g. repopt_vgg_b1')
    add_model_kwargs(parser, example='base=mobileone_s0 for repopt_any')
    parser.add_argument('-o', '--output', required=True, metavar='FILE', help='.safetensors file of scales to write')
    parser.add_argument(
        '--dataset', default='torch/cifar100',
        help="name of the dataset in timm, '' for folders of images, --data-dir/SPLIT/CLASS/IMAGE (%(default)s)")
    parser.add_argument('--data-dir', metavar='DIR', help='folder of the dataset')
    parser.add_argument('--dataset-download', action='store_true', help='download the dataset, if timm can')
    parser.add_argument(
        '--train-split', default='train', metavar='SPLIT', help='name of the training split (%(default)s)')
    parser.add_argument(
        '--val-split', default='validation', metavar='SPLIT',
        help="name of the validation split, '' for none (%(default)s)")
    parser.add_argument(
        '--num-classes', type=positive_int, help='number of classes, if the dataset does not report it')
    parser.add_argument('--img-size', type=positive_int, default=32, help='image size in pixels (%(default)s)')
    parser.add_argument('--epochs', type=positive_int, default=240, help='number of epochs (%(default)s)')
    parser.add_argument('--warmup-epochs', type=count, default=5, help='epochs of warm-up (%(default)s)')
    parser.add_argument('--batch-size', type=positive_int, default=256, help='batch size of each process (%(default)s)')
    parser.add_argument('--lr', type=float, default=0.1, help='learning rate after the warm-up (%(default)s)')
    parser.add_argument('--weight-decay', type=float, default=4e-5, help='weight decay (%(default)s)')
    add_seed(parser)
    parser.add_argument('--device', help='device (default: the GPU if there is one, otherwise the CPU)')
    parser.add_argument('--amp', action='store_true', help='autocast to bfloat16')
    parser.add_argument('--channels-last', action='store_true', help='train in channels-last memory')
    parser.add_argument(
        '--preload', action='store_true', help='hold all images on the device and augment them there')
    parser.add_argument('-j', '--workers', type=count, default=2, help='processes that load images (%(default)s)')
    parser.add_argument(
        '--checkpoint-epochs', type=positive_int, default=1, metavar='N',
        help='epochs between two checkpoints (%(default)s)')
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument('--resume', action='store_true', help='continue from FILE.checkpoint, if it exists')
    existing.add_argument('--overwrite', action='store_true', help='start over even if FILE.checkpoint exists')
    parser.set_defaults(run=run, interrupt_hint='--resume continues from the last checkpoint, if there is one.')


def run(args: argparse.Namespace) -> None:
    if not timm.is_model(args.model):
        raise ValueError(f'Expected a RepOpt model, but got {args.model!r}: see timm-rep models "repopt_*".')
    own = {'num_classes', 'structure', 'scales', 'features_only'} & args.model_kwargs.keys()
    if own:
        raise ValueError(
            f'--model-kwargs must not have {", ".join(sorted(own))}: the search sets structure and scales, and '
            'needs a classifier, whose classes --num-classes sets.')
    if not args.data_dir and args.dataset.partition('/')[0] in ('', 'torch'):
        raise ValueError(f'--data-dir must be given for the dataset {args.dataset!r}.')
    if args.model_kwargs.get('in_chans', 3) != 3:
        raise ValueError(
            f'in_chans must be 3 in --model-kwargs, got {args.model_kwargs["in_chans"]!r}: images are read in colour.')
    check_output_file(args.output, '.safetensors')
    args.device = args.device or str(default_device())
    try:
        device = init_distributed_device(args)
    except (AssertionError, RuntimeError) as e:  # timm: missing device; torch: unknown device
        raise RuntimeError(f'--device must be one that torch can use, got {args.device!r}: {e}') from e
    if args.dataset_download and args.distributed:
        raise ValueError('--dataset-download must be used in one process: download the dataset before the search.')
    loaders = []
    for split, is_training in ((args.train_split, True), (args.val_split, False)):
        if split:
            try:
                dataset = create_search_dataset(
                    args.dataset, args.data_dir, split, args.img_size, is_training, raw=args.preload,
                    download=args.dataset_download)
            except ValueError as e:
                hint = '--dataset-download downloads it, if timm can; ' if not args.dataset_download else ''
                raise ValueError(
                    f"{e}. {hint}--dataset '' reads folders of images, --data-dir/SPLIT/CLASS/IMAGE."
                    if args.dataset else str(e)) from e
            if args.preload:
                loader = DeviceLoader(dataset, args.batch_size, is_training, device, args.workers)
            else:
                loader = create_search_loader(dataset, args.batch_size, is_training, args.workers)
            loaders.append(loader)
    names = [class_names(loader.dataset) or [] for loader in loaders]
    if all(names):
        check_same_classes(dict(zip((args.train_split, args.val_split), names)))
    known = len(names[0])
    classes = args.num_classes or known
    if classes < known:
        raise ValueError(f'--num-classes must be >= {known}, the classes of {args.dataset!r}, got {classes}.')
    if not classes:
        raise ValueError(f'--num-classes must be given for {args.dataset!r}, which does not report it.')
    if not len(loaders[0]):
        raise ValueError(
            f'--batch-size must be <= {len(loaders[0].dataset)}, the number of images in {args.train_split!r} of '
            f'{args.dataset or args.data_dir!r}, got {args.batch_size} in each process.')
    scales = hyper_search(
        args.model,
        loaders[0],
        loaders[1] if len(loaders) > 1 else None,
        epochs=args.epochs,
        warmup_epochs=args.warmup_epochs,
        lr=args.lr,
        seed=args.seed,
        weight_decay=args.weight_decay,
        device=device,
        amp_dtype=torch.bfloat16 if args.amp else None,
        channels_last=args.channels_last,
        checkpoint=f'{args.output}.checkpoint',
        checkpoint_epochs=args.checkpoint_epochs,
        resume=args.resume,
        overwrite=args.overwrite,
        metadata={
            'dataset': args.dataset or Path(args.data_dir).resolve().name,
            'batch_size': str(args.batch_size * args.world_size),
            'img_size': str(args.img_size),
        },
        num_classes=classes,
        **args.model_kwargs,
    )
    if args.distributed:
        torch.distributed.destroy_process_group()
    if is_primary(args):
        scales.save(args.output)
        print(f'{scales.summary()}\n\n{scales!r}\nWritten: {args.output}')
