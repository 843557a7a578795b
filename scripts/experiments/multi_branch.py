#!/usr/bin/env python3
"""A multi-branch network of timm trained as a plain one: accuracy by epoch and by time.

A small MobileOne of timm (four convolutions a layer) for images of 32 x 32 pixels. ``branches``: as timm has it, with
SGD. The others have one convolution and one BatchNorm a layer: ``init`` and ``searched`` with RepSGD, with the scales
that a search starts from, and with those that one Hyper-Search of as many epochs, from the first seed, found; ``plain``
with SGD. All rows of a seed train on the same batches. 'minutes': CPU time of the one thread in training, the
wall-clock time of a core with nothing else to do. 'curve': top-1 accuracy after each epoch.

    OMP_NUM_THREADS=1 python scripts/experiments/multi_branch.py --data-dir CIFAR10
"""
import argparse
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
import torch.nn as nn
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed

from timm_rep import Scales, hyper_search
from timm_rep.convert import set_scales, use_repopt_convs
from timm_rep.layers import csla_layers
from timm_rep.plotting import plot_curves
from timm_rep.search import DeviceLoader, create_search_dataset
from timm_rep.utils.profiling import count_macs, count_params
from timm_rep.utils.training import evaluate, fit

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_table, rows_measured, save

SECTION = 'multi-branch'
ROWS = ('branches', 'init', 'searched', 'plain')


def build(args, num_classes: int, seed: int) -> nn.Module:
    """A MobileOne with depthwise and pointwise blocks in turn and a stride in the first of each stage but one."""
    random_seed(seed)
    before, stages = args.widths[0], []
    for i, (width, depth) in enumerate(zip(args.widths, args.depths)):
        branches = dict(num_conv_branches=args.branches)
        stages.append([
            block for j in range(depth) for block in (
                ByoBlockCfg(type='one', d=1, c=before if j == 0 else width, s=2 if i and j == 0 else 1, gs=1,
                            block_kwargs=branches),
                ByoBlockCfg(type='one', d=1, c=width, s=1, gs=0, block_kwargs=dict(kernel_size=1, **branches)))])
        before = width
    config = ByoModelCfg(
        blocks=tuple(map(tuple, stages)), stem_type='one', stem_chs=args.widths[0], stem_pool='', num_features=0)
    return ByobNet(config, num_classes=num_classes)


_found: List[Tuple[Scales, float]] = []


def search(args, loaders, num_classes: int) -> Tuple[Scales, float]:
    """Scales searched from the first seed, once, and the minutes that it took."""
    if not _found:
        seed, start = args.seeds[0], time.process_time()
        model = build(args, num_classes, seed)
        use_repopt_convs(model, 'search')
        set_scales(model, 'init', reinit=False)
        scales = hyper_search(
            model, *loaders, epochs=args.epochs, lr=args.lr, warmup_epochs=args.warmup_epochs,
            weight_decay=args.weight_decay, seed=seed)
        _found.append((scales, round((time.process_time() - start) / 60, 1)))
    return _found[0]


def train(row: str, args, loaders, num_classes: int, seed: int) -> Dict[str, Any]:
    extra = {}
    scales = 'init'
    if row == 'searched':
        scales, minutes = search(args, loaders, num_classes)
        extra = {'search (minutes)': minutes, 'search (top-1)': float(scales.metadata['accuracy'])}
    model = build(args, num_classes, seed)
    if row != 'branches':
        use_repopt_convs(model)
        set_scales(model, scales, reinit=True)
        if row == 'plain':  # from the same kernels
            for layer in csla_layers(model).values():
                layer.set_scales(None)
    optimizer = create_optimizer_v2(
        model, opt='repsgd' if row in ('init', 'searched') else 'sgd', lr=args.lr, momentum=0.9,
        weight_decay=args.weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched='cosine', num_epochs=args.epochs, warmup_epochs=args.warmup_epochs, warmup_lr=0.,
        step_on_epochs=False, updates_per_epoch=len(loaders[0]))
    top1: List[float] = []
    seconds = 0.
    start = time.process_time()

    def measure(epoch: int) -> None:
        nonlocal seconds, start
        seconds += time.process_time() - start
        top1.append(round(evaluate(model, loaders[1], torch.device('cpu'))[1], 2))
        model.train()
        start = time.process_time()

    fit(
        model, optimizer, scheduler, loaders[0], args.epochs, device=torch.device('cpu'), seed=seed,
        after_epoch=measure, description=f'{row}, seed {seed}')
    return {
        'row': row, 'seed': seed, 'top-1': top1[-1], 'minutes': round(seconds / 60, 2), **extra,
        'params (M)': round(count_params(model) / 1e6, 3),
        'MACs (M)': round(count_macs(model, (3, 32, 32)).total / 1e6, 2), 'curve': top1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', required=True)
    parser.add_argument('--train-split', default='train')
    parser.add_argument('--val-split', default='val')
    parser.add_argument('--rows', nargs='+', choices=ROWS, default=list(ROWS))
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2])
    parser.add_argument('--widths', nargs='+', type=int, default=[32, 64, 128], help='channels by stage')
    parser.add_argument('--depths', nargs='+', type=int, default=[1, 2, 2], help='pairs of blocks by stage')
    parser.add_argument('--branches', type=int, default=4, help='convolutions of the same size in a block')
    parser.add_argument('--epochs', type=int, default=8)
    parser.add_argument('--warmup-epochs', type=int, default=1)
    parser.add_argument('--batch-size', type=int, default=128)
    parser.add_argument('--lr', type=float, default=0.1)
    parser.add_argument('--weight-decay', type=float, default=4e-5)
    args = parser.parse_args()
    loaders = [
        DeviceLoader(create_search_dataset('', args.data_dir, split, 32, is_training, raw=True), args.batch_size,
                     is_training)
        for split, is_training in ((args.train_split, True), (args.val_split, False))]
    num_classes = len(loaders[0].targets.unique())
    device = torch.device('cpu')
    settings = {name: value for name, value in vars(args).items() if name not in ('data_dir', 'rows', 'seeds')}
    settings = dict(data=Path(args.data_dir).name, settings={k: str(v) for k, v in settings.items()})
    rows = rows_measured(SECTION, device, settings)
    done = {(row['row'], row['seed']) for row in rows}
    for seed in args.seeds:
        for name in args.rows:
            if (name, seed) in done:
                continue
            rows.append(train(name, args, loaders, num_classes, seed))
            path = save(SECTION, __doc__.partition('\n    OMP')[0], rows, device, settings, ('row', 'seed'))
            print_table(rows[-1:])
            plot_curves({
                name: [(row['minutes'], row['curve']) for row in rows if row['row'] == name]
                for name in dict.fromkeys(row['row'] for row in rows)}).savefig(path.with_suffix('.png'), dpi=120)


if __name__ == '__main__':
    main()
