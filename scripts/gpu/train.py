#!/usr/bin/env python3
"""Train with the recipes of hub/ on one GPU, in runs of a few minutes.

Implements the parts of timm's train.py that the recipes use, for machines with timm from PyPI only. Run it again until
it reports that nothing is left: trainings resume from their last epoch, finished ones are skipped. OUTPUT/<recipe>/ has
last.pth and train.yaml, the recipe with the changes of the command line, for

    timm-rep card hub/<recipe> --checkpoint OUTPUT/<recipe>/last.pth --recipe OUTPUT/<recipe>/train.yaml ...
"""
import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Dict

import timm
import torch
import yaml
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed

import timm_rep  # noqa: F401, registers the models
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.training import evaluate, fit

HUB = Path(__file__).parents[2] / 'hub'
# defaults of train.py
DEFAULTS = dict(
    model_kwargs={}, val_split='val', cooldown_epochs=0, momentum=0.9, clip_grad=None,
    channels_last=False, color_jitter=0.4, crop_pct=None, ratio=None, train_interpolation='random', amp=False,
)
CHECKPOINT, RECIPE = 'last.pth', 'train.yaml'


class OutOfTime(Exception):
    pass


def loaders(recipe: Dict[str, Any], args):
    """Loaders of timm for training and validation."""
    common = dict(
        input_size=tuple(recipe['input_size']), batch_size=recipe['batch_size'], mean=recipe['mean'],
        std=recipe['std'], num_workers=args.workers, persistent_workers=args.workers > 0, device=args.device)
    dataset = partial(create_dataset, '', root=args.data_dir)
    train = create_loader(
        dataset(split='train', is_training=True), is_training=True, scale=recipe['scale'], ratio=recipe['ratio'],
        color_jitter=recipe['color_jitter'], interpolation=recipe['train_interpolation'], **common)
    val = create_loader(
        dataset(split=recipe['val_split']), is_training=False, crop_pct=recipe['crop_pct'],
        interpolation=recipe['interpolation'], **common)
    return train, val


def train(recipe: Dict[str, Any], folder: Path, args, deadline: float) -> float:
    """Train to the end, from the last checkpoint in the folder if there is one; returns the accuracy in percent.

    Raises:
        OutOfTime: The deadline has passed; the checkpoint is of the last epoch.
    """
    train_loader, val_loader = loaders(recipe, args)
    random_seed(recipe['seed'])
    model = timm.create_model(recipe['model'], num_classes=recipe['num_classes'], **recipe['model_kwargs'])
    memory_format = torch.channels_last if recipe['channels_last'] else torch.contiguous_format
    model = model.to(args.device, memory_format=memory_format)
    optimizer = create_optimizer_v2(
        model, opt=recipe['opt'], lr=recipe['lr'], weight_decay=recipe['weight_decay'], momentum=recipe['momentum'])
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched=recipe['sched'], num_epochs=recipe['epochs'], cooldown_epochs=recipe['cooldown_epochs'],
        warmup_epochs=recipe['warmup_epochs'], warmup_lr=recipe['warmup_lr'], min_lr=recipe['min_lr'],
        step_on_epochs=False, updates_per_epoch=len(train_loader))
    start, path = 0, folder / CHECKPOINT
    if path.is_file():
        state = torch.load(path, map_location='cpu', weights_only=True)
        model.load_state_dict(state['state_dict'])
        optimizer.load_state_dict(state['optimizer'])
        start = state['epoch']

    def save(done: int) -> None:
        state = dict(
            epoch=done, arch=recipe['model'], state_dict=model.state_dict(), optimizer=optimizer.state_dict())
        with replacing_files(folder) as temporary:
            torch.save(state, temporary / CHECKPOINT)
        if done < epochs and time.monotonic() > deadline:
            raise OutOfTime

    fit(
        model, optimizer, scheduler, train_loader, epochs, start=start, device=args.device,
        smoothing=recipe['smoothing'], clip_grad=recipe['clip_grad'], channels_last=recipe['channels_last'],
        amp_dtype=torch.bfloat16 if recipe['amp'] else None, seed=recipe['seed'], after_epoch=save,
        description=folder.name)
    return evaluate(model, val_loader, args.device)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('recipes', nargs='*', metavar='RECIPE', help='folders of hub/ (all with a recipe)')
    parser.add_argument('--output', type=Path, default=Path('output/train'), help='folder (%(default)s)')
    parser.add_argument('--data-dir', default='data/cifar10', metavar='DIR', help='(%(default)s)')
    parser.add_argument('--val-split', help='(from the recipe)')
    parser.add_argument('--epochs', type=int, help='(from the recipe)')
    parser.add_argument('--batch-size', type=int, help='(from the recipe)')
    parser.add_argument('--minutes', type=float, default=8, help='time limit of this run (%(default)s)')
    parser.add_argument('--workers', type=int, default=12, help='data loading processes (%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cuda'), help='(%(default)s)')
    parser.add_argument('--amp', action='store_true', help='autocast to bfloat16')
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    left = []
    for name in args.recipes or sorted(path.parent.name for path in HUB.glob(f'*/{RECIPE}')):
        folder = args.output / name
        done = folder / 'accuracy.txt'
        recipe = {**DEFAULTS, **yaml.safe_load((HUB / name / RECIPE).read_text())}
        changed = {k: getattr(args, k) for k in ('epochs', 'batch_size', 'val_split')}
        recipe.update({k: v for k, v in changed.items() if v is not None})
        if args.amp:
            recipe.update(amp=True, amp_dtype='bfloat16')
        if (folder / RECIPE).exists() and yaml.safe_load((folder / RECIPE).read_text()) != recipe:
            parser.error(f'{folder} has a training with other settings, in its {RECIPE}: name another --output.')
        if not done.exists() and time.monotonic() < deadline:
            with replacing_files(folder) as temporary:
                (temporary / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False))
            try:
                accuracy = train(recipe, folder, args, deadline)
                done.write_text(f'{accuracy:.2f}\n')
            except OutOfTime:
                pass
        if done.exists():
            print(f'{name}: {done.read_text().strip()}%', flush=True)
        else:
            left.append(name)
    print(f'left: {", ".join(left)}; run this again' if left else 'nothing is left')
    return 75 if left else 0  # EX_TEMPFAIL


if __name__ == '__main__':
    sys.exit(main())
