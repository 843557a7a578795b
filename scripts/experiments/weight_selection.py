#!/usr/bin/env python3
"""Ablations of weight selection: initializations of a small Vision Transformer, each trained from several seeds.

The teacher is a larger model trained first on the same images: scikit-learn's digits (a quarter of an hour on one CPU
core), or with --data-dir folders of images such as CIFAR-10.
"""
import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ParseKwargs, random_seed

from timm_rep import calibrate_batchnorm, mimetic_init_, weight_select_init
from timm_rep.demo.training import DATA, create_loader_for, load_split
from timm_rep.search import DeviceLoader, create_search_dataset
from timm_rep.utils.training import evaluate, fit

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import report

# name of a row in the paper, and arguments of weight_select_init
SELECTIONS = {
    'uniform': ('uniform, first N layers', dict()),
    'consecutive': ('consecutive', dict(element_selection='consecutive')),
    'random-consistent': ('random with consistency', dict(element_selection='random')),
    'random-inconsistent': ('random without consistency', dict(element_selection='random_inconsistent')),
    'uniform-heads': ('uniform, heads and projections apart', dict(element_selection='uniform_heads')),
    'l1': ('L1 pruning', dict(element_selection='l1')),
    'magnitude': ('magnitude pruning', dict(element_selection='magnitude')),
    'uniform-layers': ('uniform layers', dict(layer_selection='uniform')),
    'mid-layers': ('mid N layers', dict(layer_selection='mid')),
    'last-layers': ('last N layers', dict(layer_selection='last')),
}
ROWS = {
    'random': 'random initialization, timm default',
    'mimetic': 'mimetic initialization',
    **{row: f'weight selection, {what}' for row, (what, _) in SELECTIONS.items()},
    'repa-random': "a RePaFormer of the teacher's size, random initialization",
    'repa-plain': "a RePaFormer of the teacher's size, from the teacher, which is a plain model",
}


_NO_SETTINGS = ('rows', 'device', 'data_dir', 'workers', 'repa_model')


def initialize(row: str, student: nn.Module, teacher: nn.Module, loader: Iterable, seed: int) -> None:
    if row == 'mimetic':
        mimetic_init_(student)
    elif row in SELECTIONS:
        weight_select_init(student, teacher, seed=seed, **SELECTIONS[row][1])
    elif row == 'repa-plain':
        weight_select_init(student, teacher, include_head=True)
        calibrate_batchnorm(student, loader, identity_norms=['*.mlp.norm2'])


def build(args, size: Dict[str, Any], seed: int) -> nn.Module:
    random_seed(seed)
    args_of_data = dict(img_size=32, num_classes=args.num_classes) if args.data_dir else dict(
        img_size=16, in_chans=1, pretrained_cfg_overlay=DATA, num_classes=10)
    return timm.create_model(**{'model_name': args.model, **args_of_data, **size}).to(args.device)


def build_student(args, row: str, seed: int) -> nn.Module:
    if row.startswith('repa-'):
        return build(args, dict(args.teacher, model_name=args.repa_model, pre_norm=False), seed)
    return build(args, args.student, seed)


def create_loaders(args, model: nn.Module) -> Tuple:
    if args.data_dir:
        return tuple(
            DeviceLoader(
                create_search_dataset('', args.data_dir, split, 32, is_training, raw=True), args.batch_size,
                is_training, args.device, args.workers)
            for split, is_training in (('train', True), (args.val_split, False)))
    train, val = load_split(seed=0)
    return create_loader_for(train, model, is_training=True), create_loader_for(val, model, is_training=False)


def train(model: nn.Module, loaders: Tuple, epochs: int, seed: int, args, description: str) -> List[float]:
    """Train a model in place, and return the accuracy after every epoch."""
    random_seed(seed)
    optimizer = create_optimizer_v2(model, opt='adamw', lr=args.lr, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched='cosine', num_epochs=epochs, warmup_epochs=min(args.warmup_epochs, epochs - 1),
        warmup_lr=1e-6, step_on_epochs=False, updates_per_epoch=len(loaders[0]))
    accuracies = []

    def after_epoch(epoch):
        accuracies.append(evaluate(model, loaders[1], args.device)[1])
        model.train()

    fit(model, optimizer, scheduler, loaders[0], epochs, device=args.device, seed=seed, after_epoch=after_epoch,
        description=description, progress=False)
    print(f'{description}: {accuracies[-1]:.2f}%', flush=True)
    return accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rows', nargs='*', metavar='ROW', help=f'all, or some of {", ".join(ROWS)}')
    parser.add_argument('--model', default='vit_tiny_patch16_224', help='of timm, a ViT (%(default)s)')
    parser.add_argument(
        '--student', nargs='*', action=ParseKwargs, metavar='K=V',
        default=dict(patch_size=4, embed_dim=48, depth=4, num_heads=3), help='its size (%(default)s)')
    parser.add_argument(
        '--teacher', nargs='*', action=ParseKwargs, metavar='K=V',
        default=dict(patch_size=4, embed_dim=96, depth=8, num_heads=6), help='its size (%(default)s)')
    parser.add_argument(
        '--repa-model', default='repa_deit_tiny', help="a RePaFormer of such a ViT, for the rows of the teacher's size")
    parser.add_argument('--data-dir', metavar='DIR', help='folders of images by split and class')
    parser.add_argument('--val-split', default='val', help='(%(default)s)')
    parser.add_argument('--num-classes', type=int, default=10, help='of these folders (%(default)s)')
    parser.add_argument('--epochs', type=int, default=20, help='of a student (%(default)s)')
    parser.add_argument('--teacher-epochs', type=int, default=60, help='(%(default)s)')
    parser.add_argument('--warmup-epochs', type=int, default=2, help='(%(default)s)')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='(%(default)s)')
    parser.add_argument('--batch-size', type=int, default=128, help='of folders (%(default)s)')
    parser.add_argument('--lr', type=float, default=1e-3, help='(%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'), help='(%(default)s)')
    parser.add_argument('-j', '--workers', type=int, default=2, help='processes that read folders, once (%(default)s)')
    args = parser.parse_args()
    names = args.rows or list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f'there are no rows {", ".join(unknown)}.')
    for reference in ('repa-random', 'random'):  # what the others are measured by
        if reference not in names and any(name.startswith('repa-') == (reference != 'random') for name in names):
            names = [reference, *names]

    teacher = build(args, args.teacher, seed=0)
    loaders = create_loaders(args, teacher)
    teacher_accuracy = train(teacher, loaders, args.teacher_epochs, 0, args, 'teacher')[-1]
    courses = {name: [] for name in names}
    for name in names:
        for seed in args.seeds:
            student = build_student(args, name, seed)
            initialize(name, student, teacher, loaders[0], seed)
            courses[name].append(train(student, loaders, args.epochs, seed, args, f'{name}, seed {seed}'))
    final = {name: statistics.mean(course[-1] for course in runs) for name, runs in courses.items()}
    rows = []
    for name, runs in courses.items():
        random = final['repa-random' if name.startswith('repa-') else 'random']
        mean = [statistics.mean(epoch) for epoch in zip(*runs)]
        rows.append(dict(
            row=name,
            what=ROWS[name],
            accuracy=round(mean[-1], 2),
            deviation=round(statistics.stdev(run[-1] for run in runs), 2) if len(runs) > 1 else None,
            first_epoch=round(mean[0], 2),
            epochs_to_random=next((i + 1 for i, accuracy in enumerate(mean) if accuracy >= random), None),
        ))
    data = 'folders' if args.data_dir else 'digits'
    settings = {k: str(v) for k, v in vars(args).items() if k not in _NO_SETTINGS}
    report(
        f'weight-selection-{data}',
        'Accuracy of a student in percent of the validation images: mean over the seeds and its standard deviation, '
        'mean after the first epoch, and number of epochs until the mean reaches the final one of random '
        'initialization at the same size.',
        rows,
        args.device,
        {'teacher_accuracy': round(teacher_accuracy, 2), 'settings': settings},
        keys=['row'],
    )


if __name__ == '__main__':
    main()
