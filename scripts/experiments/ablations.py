#!/usr/bin/env python3
"""Ablations of the RepOptimizers paper, tables 4 and 6.

All rows train the same network from the same seed on the same batches and differ only as named. Rows of table 6 search
scales with the strides of the row first, and train the network with its own strides.
"""
import argparse
import sys
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ParseKwargs, random_seed

from timm_rep import hyper_search
from timm_rep.scales import Scales, packaged_scales
from timm_rep.search import DeviceLoader, count_classes, create_search_dataset
from timm_rep.utils.training import evaluate, fit

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import report


class Row(NamedTuple):
    """
    Attributes:
        what: The row of the paper's table.
        paper: Its accuracy on ImageNet, RepOpt-VGG-B1.
        opt: Name of an optimizer for timm's factory.
        scales: 'searched', 'ones', 'init', 'mean', or False for no scales.
        reinit: Whether to start by the rule of initialization.
        strides: Strides of the searched network, those of the model if None.
    """
    what: str
    paper: Optional[float]
    opt: str = 'repsgd'
    scales: Union[str, bool] = 'searched'
    reinit: bool = True
    strides: Optional[Tuple[int, ...]] = None


ROWS = {
    'sgd': Row('table 4: SGD', 76.91, opt='sgd', scales=False),
    'adamw': Row('table 4: AdamW', 75.03, opt='adamw', scales=False),
    'repsgd': Row('table 4: Hyper-Search, initialization and gradients', 78.47),
    'no-init': Row('table 4: Hyper-Search, gradients only', 77.42, reinit=False),
    'no-gradients': Row('table 4: Hyper-Search, initialization only', 77.07, opt='sgd'),
    'ones': Row('table 4: all 1', 77.59, scales='ones'),
    'init': Row('table 4: same as HS initialization', 77.71, scales='init'),
    'mean': Row('table 4: average across channels', 77.40, scales='mean'),
    'repadamw': Row('section 4.2: AdamW as a RepOptimizer', None, opt='repadamw'),
    'strides-22222': Row('table 6: strides 2, 2, 2, 2, 2', 78.47, strides=(2, 2, 2, 2, 2)),
    'strides-22121': Row('table 6: strides 2, 2, 1, 2, 1', 77.81, strides=(2, 2, 1, 2, 1)),
    'strides-21211': Row('table 6: strides 2, 1, 2, 1, 1', 77.88, strides=(2, 1, 2, 1, 1)),
}


def searched(row: Row, args, loaders, model_args: Dict[str, Any]) -> Scales:
    """Scales of a row: searched with its strides, or those of the command line."""
    if row.strides is None:
        return Scales.load(args.scales or args.model)
    return hyper_search(
        args.model, *loaders, epochs=args.search_epochs, warmup_epochs=min(5, args.search_epochs - 1),
        device=args.device, amp_dtype=torch.bfloat16 if args.amp else None, channels_last=True, seed=args.seed,
        **dict(model_args, strides=row.strides))


def run(name: str, args, loaders, model_args: Dict[str, Any]) -> Dict[str, Any]:
    row = ROWS[name]
    scales, search_accuracy = row.scales, None
    if scales in ('searched', 'mean'):
        scales = searched(row, args, loaders, model_args)
        search_accuracy = scales.metadata.get('accuracy')
        scales = scales.mean_over_channels() if row.scales == 'mean' else scales
    random_seed(args.seed)
    model = timm.create_model(args.model, scales=scales, reinit=row.reinit, **model_args)
    model = model.to(args.device, memory_format=torch.channels_last)
    adaptive = row.opt.endswith('adamw')
    optimizer = create_optimizer_v2(
        model, opt=row.opt, lr=args.adamw_lr if adaptive else args.lr,
        weight_decay=args.adamw_weight_decay if adaptive else args.weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched='cosine', num_epochs=args.epochs, warmup_epochs=min(args.warmup_epochs, args.epochs - 1),
        warmup_lr=0., step_on_epochs=False, updates_per_epoch=len(loaders[0]))
    fit(
        model, optimizer, scheduler, loaders[0], args.epochs, device=args.device, seed=args.seed, channels_last=True,
        amp_dtype=torch.bfloat16 if args.amp else None, description=name)
    return dict(
        row=name, what=row.what, accuracy=round(evaluate(model, loaders[1], args.device)[1], 2),
        search_accuracy=search_accuracy, paper=row.paper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rows', nargs='+', metavar='ROW', choices=[*ROWS, 'all'], help=f'all, or {", ".join(ROWS)}')
    parser.add_argument('--model', default='repopt_vgg_b1', help='(%(default)s)')
    parser.add_argument('--model-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='K=V')
    parser.add_argument('--scales', help='searched scales: a file, a Hub repository; by default those of the package')
    parser.add_argument('--dataset', default='torch/cifar100', help="as timm names them, '' for folders (%(default)s)")
    parser.add_argument('--data-dir', metavar='DIR')
    parser.add_argument('--train-split', default='train', help='(%(default)s)')
    parser.add_argument('--val-split', default='validation', help='(%(default)s)')
    parser.add_argument('--img-size', type=int, default=32, help='pixels (%(default)s)')
    parser.add_argument('--batch-size', type=int, default=256, help='(%(default)s)')
    parser.add_argument('--epochs', type=int, default=120, help='(%(default)s)')
    parser.add_argument('--warmup-epochs', type=int, default=5, help='(%(default)s)')
    parser.add_argument('--search-epochs', type=int, default=240, help='of table 6 (%(default)s)')
    parser.add_argument('--lr', type=float, default=0.1, help='of SGD (%(default)s)')
    parser.add_argument('--weight-decay', type=float, default=4e-5, help='of SGD (%(default)s)')
    parser.add_argument('--adamw-lr', type=float, default=1e-3, help='(%(default)s)')
    parser.add_argument('--adamw-weight-decay', type=float, default=0.05, help='(%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'), help='(%(default)s)')
    parser.add_argument('--amp', action='store_true', help='autocast to bfloat16')
    parser.add_argument('--seed', type=int, default=0, help='(%(default)s)')
    parser.add_argument('-j', '--workers', type=int, default=2, help='processes that read images, once (%(default)s)')
    args = parser.parse_args()
    rows = list(ROWS) if 'all' in args.rows else args.rows
    if 'vgg' not in args.model and any(ROWS[row].strides for row in rows):
        parser.error(f'{args.model} has no strides to change: the rows of table 6 are for RepOpt-VGG.')
    if args.scales is None and any(ROWS[r].scales in ('searched', 'mean') and not ROWS[r].strides for r in rows):
        if args.model not in packaged_scales():
            parser.error(
                f'{args.model} has no searched scales in this package, only {", ".join(packaged_scales()) or "none"} '
                'has: search them with timm-rep hyper-search and pass --scales.')
    loaders = [
        DeviceLoader(
            create_search_dataset(args.dataset, args.data_dir, split, args.img_size, is_training, raw=True),
            args.batch_size, is_training, args.device, args.workers)
        for split, is_training in ((args.train_split, True), (args.val_split, False))
    ]
    model_args = dict(args.model_kwargs, num_classes=count_classes(loaders[0].dataset))
    data = args.dataset or Path(args.data_dir).resolve().name
    unnamed = ('rows', 'device', 'data_dir', 'dataset', 'workers', 'scales')
    for name in rows:
        report(
            f'ablations-{args.model}',
            f'Accuracy of {args.model} on {data}, percent of the validation images; search_accuracy is that of the '
            'search structure, paper that of RepOpt-VGG-B1 on ImageNet.',
            [run(name, args, loaders, model_args)],
            args.device,
            {'data': data, 'settings': {k: str(v) for k, v in vars(args).items() if k not in unnamed}},
            keys=('row',),
        )


if __name__ == '__main__':
    main()
