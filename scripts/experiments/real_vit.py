#!/usr/bin/env python3
"""A real pretrained ViT-S/14 on CIFAR-10, converted and pruned at equal multiply-accumulates without training.

    python scripts/experiments/real_vit.py finetune WEIGHTS.safetensors --data-dir CIFAR10 -o classifier.pth
    python scripts/experiments/real_vit.py compare WEIGHTS.safetensors --data-dir CIFAR10 --classifier classifier.pth
    python scripts/experiments/real_vit.py speed WEIGHTS.safetensors --data-dir CIFAR10 --img-size 224

WEIGHTS is a state dict of timm's vit_small_patch14_dinov2. ``finetune`` makes a classifier for 56 x 56 pixels.
``compare`` writes a row for each method, idle ratio, number and sample of calibration images to scripts/results,
optionally after a distillation from the original; without ``--classifier`` of the features at 112 pixels: with a linear
probe and, where WEIGHTS holds ``decoder.*``, with the maps that the decoder makes of the patch tokens.
Run these two again after a stop: a training continues after its last quarter of an epoch, finished rows are skipped.
``speed`` measures the network, converted and pruned, on this machine.
"""
import argparse
import copy
import itertools
import sys
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import random_seed
from torch.utils.data import RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.inference import in_mode
from benchmarks.timing import speedup, timing_columns
from experiments import report as results
from experiments.convert import refusing
from experiments.pruning import METHODS
from experiments.workspace import files_digest

import timm_rep
from timm_rep.hub import sha256
from timm_rep.search import DeviceLoader, create_search_dataset
from timm_rep.utils.checkpoints import write_training_state
from timm_rep.utils.profiling import count_macs, time_passes
from timm_rep.utils.training import evaluate, fit, load_training_state

# conversions: whether FFNs with a linear path are refused, and whether the residual stream is corrected
_FORMS = {
    'timm-rep': (None, True), 'timm-rep, two matrices': (True, True), 'timm-rep, no correction': (None, False),
    'timm-rep, two matrices, no correction': (True, False)}
_PARTS = 4  # checkpoints in an epoch
_EVERY = 5  # of the validation batches, maps are made of one
_WHAT = """
    A pretrained ViT-S/14 on CIFAR-10 with cheaper FFNs. images: for calibration; seed: of their sample; agreement: with
    the predictions of the original; error: of the outputs, relative to their deviation over the images; correlation: of
    the decoder's maps with the original's, mean over images; macs: share of the original's; minutes: CPU time of the
    conversion; distil_epochs: epochs done of a distillation that takes as many as 'schedule'."""
_SPEED = """
    Speedup over a pretrained ViT-S/14 by idle ratio, as converted from images, and pruned to the same
    multiply-accumulates. images: batch size; mode: eager, compile, or onnx for ONNX Runtime; two matrices: number of
    FFNs, of twelve, that the conversion left without a linear path."""
_LINEAR_PATH = 0.125  # multiply-accumulates of the linear path, as a share of an FFN's of ratio 4


def create(weights: str, img_size: int, num_classes: int) -> nn.Module:
    """The pretrained network; without classes it returns the features of the class token."""
    model = timm.create_model('vit_small_patch14_dinov2', img_size=img_size, num_classes=num_classes)
    state = {k: v for k, v in load_file(weights).items() if not k.startswith('decoder.')}
    wrong = model.load_state_dict(checkpoint_filter_fn(state, model), strict=False)
    if wrong.unexpected_keys or any(not key.startswith('head.') for key in wrong.missing_keys):
        raise ValueError(f'{weights} is not a state dict of vit_small_patch14_dinov2: {wrong}')
    return model


def create_decoder(weights: str) -> Optional[nn.Module]:
    """The decoder that makes maps (N, 1, 8H, 8W) of patch tokens (N, C, H, W), if the file has one."""
    state = {k[len('decoder.'):]: v for k, v in load_file(weights).items() if k.startswith('decoder.')}
    if not state:
        return None
    layers = []
    for i in itertools.takewhile(lambda i: f'upconv{i}.weight' in state, itertools.count(1)):
        in_chs, out_chs = state[f'upconv{i}.weight'].shape[:2]
        layers += [
            (f'upconv{i}', nn.ConvTranspose2d(in_chs, out_chs, 4, stride=2, padding=1)),
            (f'bn{i}', nn.BatchNorm2d(out_chs)), (f'relu{i}', nn.ReLU())]
    decoder = nn.Sequential(OrderedDict([*layers, ('final_conv', nn.Conv2d(out_chs, 1, 1)), ('sigmoid', nn.Sigmoid())]))
    decoder.load_state_dict({**{k: v for k, v in decoder.state_dict().items() if 'num_batches' in k}, **state})
    return decoder.eval()


@torch.inference_mode()
def maps(model: nn.Module, decoder: nn.Module, batches: Sequence[Tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Centered maps of unit norm, one row an image."""
    tokens = [model.forward_features(images)[:, model.num_prefix_tokens:].mT for images, _ in batches]
    found = torch.cat([decoder(x.unflatten(2, model.patch_embed.grid_size)).flatten(1) for x in tokens])
    return F.normalize(found - found.mean(1, keepdim=True))


def read(args: argparse.Namespace, split: str, img_size: int) -> DeviceLoader:
    dataset = create_search_dataset('', args.data_dir, split, img_size, split == 'train', raw=True)
    return DeviceLoader(dataset, args.batch_size, split == 'train')


def conditions(args: argparse.Namespace, *loaders: DeviceLoader) -> Dict[str, Any]:
    """What all results of a command depend on: hashes of the network and the images, and the batch size."""
    images = files_digest(args.data_dir, (loader.dataset for loader in loaders))
    return dict(weights=sha256(args.weights)[:10], images=images, batch_size=args.batch_size)


def train_parts(
        model: nn.Module,
        train: DeviceLoader,
        args: argparse.Namespace,
        epochs: int,
        path: Path,
        after_epoch: Callable[[int], None],
        known: Mapping[str, Any],
        teacher: Optional[nn.Module] = None,
        layer_decay: Optional[float] = None,
        **kwargs,
) -> None:
    """Train in quarters of an epoch, each of a random quarter of the images, after which the state is written.

    ``known`` are conditions that must not change if the training is resumed.
    """
    train = copy.copy(train)
    train.sampler = RandomSampler(train.dataset, num_samples=len(train.targets) // _PARTS)
    train.crop = teacher is None  # a distillation sees whole images, as a calibration: crops have black borders
    optimizer = create_optimizer_v2(model, opt='adamw', lr=args.lr, weight_decay=0.05, layer_decay=layer_decay)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=epochs * _PARTS * len(train), warmup_t=len(train) * (teacher is None),
        warmup_lr_init=1e-6, t_in_epochs=False)
    settings, start = dict(known, epochs=epochs, lr=args.lr), 0
    if path.is_file():
        start = load_training_state(path, settings, 'training', model, optimizer, epochs * _PARTS)['epoch']

    def after_part(part: int) -> None:
        if part % _PARTS == 0:
            after_epoch(part // _PARTS)
            model.train()
        write_training_state(
            path, dict(settings=settings, model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=part))

    fast = torch.cpu._is_avx512_bf16_supported()  # elsewhere a ninth of the speed of float32
    fit(model, optimizer, scheduler, train, epochs * _PARTS, device=torch.device('cpu'), start=start, teacher=teacher,
        amp_dtype=torch.bfloat16 if fast else None, clip_grad=1., seed=0, after_epoch=after_part, progress=False,
        **kwargs)


def finetune(args: argparse.Namespace) -> None:
    random_seed(0)
    model = create(args.weights, 56, 10)
    train, val = (read(args, split, 56) for split in ('train', 'val'))

    def print_accuracy(epoch: int) -> None:
        print(f'epoch {epoch}: {evaluate(model, val, torch.device("cpu"))[1]:.2f}%', flush=True)

    train_parts(
        model, train, args, args.epochs, args.output, print_accuracy, conditions(args, train, val), layer_decay=0.75,
        smoothing=0.1)


@torch.inference_mode()
def outputs(model: nn.Module, batches: Sequence[Tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([model(images) for images, _ in batches])


def fit_probe(features: torch.Tensor, targets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multinomial logistic regression on standardized features, by L-BFGS."""
    mean, std = features.mean(0), features.std(0)
    head = nn.Linear(features.shape[1], 10)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn='strong_wolfe')

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(head((features - mean) / std), targets) + 1e-3 * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    head.requires_grad_(False)
    return lambda x: head((x - mean) / std)


def percentage(hits: torch.Tensor) -> float:
    return round(100 * hits.float().mean().item(), 2)


def chosen(loader: DeviceLoader, indices: List[int]) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Batches of some images of a loader, as for validation."""
    part = copy.copy(loader)
    part.is_training, part.sampler = False, indices
    return list(part)


def sample(train: DeviceLoader, count: int, seed: int) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Batches of random training images."""
    order = torch.randperm(len(train.targets), generator=torch.Generator().manual_seed(seed))
    return chosen(train, order[:count].tolist())


def compare(args: argparse.Namespace) -> None:
    img_size = 56 if args.classifier else 112
    model = create(args.weights, img_size, 10 if args.classifier else 0).eval()
    train, val = (read(args, split, img_size) for split in ('train', 'val'))
    n = len(val.targets)
    val_batches = chosen(val, [i * n // args.val_images for i in range(args.val_images)])
    targets = torch.cat([labels for _, labels in val_batches])

    if args.classifier:
        model.load_state_dict(torch.load(args.classifier, weights_only=True)['model'])
        head, decoder = nn.Identity(), None
    else:
        decoder = create_decoder(args.weights)
        batches = sample(train, 5000, 1234)
        head = fit_probe(outputs(model, batches), torch.cat([labels for _, labels in batches]))
    original = outputs(model, val_batches)
    predicted = head(original).argmax(1)
    if decoder is not None:
        map_batches = val_batches[::_EVERY]
        original_maps = maps(model, decoder, map_batches)
    macs = count_macs(model, (3, img_size, img_size)).total
    print(f'original: {percentage(predicted == targets)}%, {macs / 1e6:.0f} M MACs', flush=True)
    kind = 'distilled' if args.distil_epochs else 'classifier' if args.classifier else 'probe'
    section, device = f'real-vit-{kind}', torch.device('cpu')
    settings = dict(conditions(args, train, val), img_size=img_size, val_images=args.val_images)
    if args.classifier:
        settings['classifier'] = sha256(args.classifier)[:10]
    done = results.rows_measured(section, device, settings)

    def measure(smaller: nn.Module, key: Dict[str, Any], minutes: float, distil_epochs: int) -> None:
        found = outputs(smaller.eval(), val_batches)
        now = head(found).argmax(1)
        error = (found - original).norm() / (original - original.mean(0)).norm()
        row = {
            **key, 'distil_epochs': distil_epochs, 'top-1': percentage(now == targets),
            'original': percentage(predicted == targets), 'agreement': percentage(now == predicted),
            'error': round(error.item(), 4),
            'macs': round(count_macs(smaller, (3, img_size, img_size)).total / macs, 4), 'minutes': round(minutes, 2)}
        row['top-1 change'] = round(row['top-1'] - row['original'], 2)
        if decoder is not None:
            row['correlation'] = round((maps(smaller, decoder, map_batches) * original_maps).sum(1).mean().item(), 4)
        results.report(section, _WHAT, [row], device, settings, list(key))

    for seed, count, idle_ratio, method in itertools.product(args.samples, args.images, args.idle_ratios, args.methods):
        key = dict(method=method, idle_ratio=idle_ratio, images=count, seed=seed, distil_epochs=args.distil_epochs)
        if args.distil_epochs:
            key.update(lr=args.lr, schedule=args.distil_epochs)
        if any(key.items() <= row.items() for row in done):
            continue
        smaller, begun = copy.deepcopy(model), time.process_time()
        calibration = [images for images, _ in sample(train, count, seed)]
        if method in _FORMS:
            refused, compensate = _FORMS[method]
            with refusing(refused):
                timm_rep.convert_to_repa(
                    smaller, idle_ratio=idle_ratio, calibration=calibration, max_images=count, compensate=compensate)
        else:
            METHODS[method](smaller, calibration, 1 - idle_ratio + _LINEAR_PATH)
        after_epoch = partial(measure, smaller, key, (time.process_time() - begun) / 60)
        after_epoch(0)
        if args.distil_epochs:
            state = '-'.join(map(str, key.values())).replace(' ', '-')
            train_parts(
                smaller, train, args, args.distil_epochs, args.states / f'{state}.pth', after_epoch, settings,
                teacher=copy.deepcopy(model))


def speed(args: argparse.Namespace) -> None:
    model = create(args.weights, args.img_size, 0).eval()
    train = read(args, 'train', args.img_size)
    calibration = [images for images, _ in sample(train, args.images, args.samples[0])]
    models, without_path = {'original': model}, {}
    for ratio in args.idle_ratios:
        converted, pruned = copy.deepcopy(model), copy.deepcopy(model)
        report = timm_rep.convert_to_repa(converted, idle_ratio=ratio, calibration=calibration, max_images=args.images)
        without_path[str(ratio)] = sum(not ffn.linear_path for ffn in report.ffns)
        METHODS['refitted pruning'](pruned, calibration, 1 - ratio + _LINEAR_PATH)
        models.update({f'timm-rep {ratio}': converted.reparameterize(), f'pruned {ratio}': pruned})
    size = (3, args.img_size, args.img_size)
    for module in models.values():
        module.pretrained_cfg['input_size'] = size  # of an export
    device, settings = torch.device('cpu'), dict(calibration_images=args.images, threads=torch.get_num_threads())
    for mode, images in itertools.product(args.modes, args.batch_sizes):
        times = time_passes(in_mode(models, mode), torch.randn(images, *size), rounds=args.rounds)
        speedups = {
            method: {str(ratio): speedup(times[f'{method} {ratio}'], times['original']) for ratio in args.idle_ratios}
            for method in ('timm-rep', 'pruned')}
        row = dict(img_size=args.img_size, mode=mode, images=images, **speedups, **timing_columns(times))
        row['two matrices'] = without_path
        results.report('real-vit-speed', _SPEED, [row], device, settings, ['img_size', 'mode', 'images'])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True, metavar='finetune | compare | speed')
    for name, run in ('finetune', finetune), ('compare', compare), ('speed', speed):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument('weights', metavar='WEIGHTS')
        command.add_argument('--data-dir', default='data/cifar10', metavar='DIR', help='(%(default)s)')
        command.add_argument('--batch-size', type=int, default=64, help='(%(default)s)')
        if run is finetune:
            command.add_argument('-o', '--output', type=Path, required=True, metavar='FILE')
            command.add_argument('--epochs', type=int, default=3, help='(%(default)s)')
            command.add_argument('--lr', type=float, default=5e-4, help='(%(default)s)')
            continue
        command.add_argument('--idle-ratios', nargs='+', type=float, default=[0.25, 0.5, 0.75, 0.9, 1.0])
        command.add_argument('--samples', nargs='+', type=int, default=[10, 11, 12], help='seeds (%(default)s)')
        if run is speed:
            command.add_argument('--images', type=int, default=1024, help='of calibration (%(default)s)')
            command.add_argument('--img-size', type=int, default=56, help='(%(default)s)')
            command.add_argument('--modes', nargs='+', default=['eager', 'compile', 'onnx'], help='(%(default)s)')
            command.add_argument('--batch-sizes', nargs='+', type=int, default=[1, 16], help='(%(default)s)')
            command.add_argument('--rounds', type=int, default=15, help='(%(default)s)')
        else:
            command.add_argument('--classifier', metavar='FILE', help='of finetune (a linear probe)')
            command.add_argument('--methods', nargs='+', default=['timm-rep', *METHODS], help='(all)')
            command.add_argument('--images', nargs='+', type=int, default=[1024], help='of calibration (%(default)s)')
            command.add_argument('--val-images', type=int, default=2500, help='(%(default)s)')
            command.add_argument('--distil-epochs', type=int, default=0, help='(%(default)s)')
            command.add_argument('--lr', type=float, default=1e-5, help='of the distillation (%(default)s)')
            command.add_argument('--states', type=Path, default=Path('output/experiments'), metavar='DIR',
                                 help='folder of unfinished distillations (%(default)s)')
    args = parser.parse_args()
    args.run(args)


if __name__ == '__main__':
    main()
