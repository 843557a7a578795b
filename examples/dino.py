#!/usr/bin/env python3
"""Self-supervision (table 5 of the RePaFormer paper): DINO with lightly, k-NN and linear evaluation, folding.

Without --data-dir, trains a small model on scikit-learn's digits in minutes on a CPU. On CIFAR-10 as folders of images:

  dino.py --data-dir DIR --model-kwargs img_size=32 patch_size=4 --transform-kwargs "gaussian_blur=(0,0,0)" \\
      --epochs 100 --batch-size 256 --lr 5e-4 --momentum 0.996 --warmup-epochs 10 --device cuda -j 8

Needs lightly and scikit-learn (pip install -e '.[ssl]').
"""
import argparse
import copy
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, List, Tuple

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightly.loss.dino_loss import DINOLoss
from lightly.models.modules.heads import DINOProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms.dino_transform import DINOTransform
from lightly.utils.benchmarking.knn import knn_predict
from lightly.utils.scheduler import cosine_schedule
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ParseKwargs, random_seed, reparameterize_model
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset

import timm_rep  # noqa: F401
from timm_rep.demo.training import load_split
from timm_rep.search import create_search_dataset
from timm_rep.utils.atomic import check_writable, replacing_files
from timm_rep.utils.profiling import count_params

# defaults of --model-kwargs and --transform-kwargs for the digits, 8 x 8 pixels: no color, no mirroring, large crops;
# the mean over all tokens learns faster on few images than a class token
DIGITS_MODEL = dict(img_size=16, patch_size=4, embed_dim=64, depth=2, num_heads=4, global_pool='avg')
DIGITS_VIEWS = dict(
    global_crop_scale=(0.7, 1.), local_crop_scale=(0.4, 0.8), local_crop_size=12, n_local_views=1,
    hf_prob=0., cj_prob=0., random_gray_scale=0., gaussian_blur=(0., 0., 0.), solarization_prob=0.)
# DINO on ImageNet: 2048, 256, 65536, no BatchNorm; on little data BatchNorm keeps the outputs from becoming uniform
HEAD = dict(hidden_dim=256, bottleneck_dim=64, output_dim=256, batch_norm=True, freeze_last_layer=1)


def create_datasets(args) -> List[Dataset]:
    """RGB training and validation images."""
    if args.data_dir:
        # replaced by the transform of each loader
        return [create_search_dataset('', args.data_dir, split, 32, is_training=False) for split in ('train', 'val')]
    datasets = load_split(args.seed)
    for dataset in datasets:
        dataset.images = [image.convert('RGB') for image in dataset.images]
    return list(datasets)


def create_loader(dataset: Dataset, transform, args, is_training: bool) -> DataLoader:
    dataset = copy.copy(dataset)  # the same images with another transform
    dataset.transform = transform
    return DataLoader(
        dataset, args.batch_size, shuffle=is_training, drop_last=is_training, num_workers=args.workers,
        persistent_workers=is_training and args.workers > 0)


def create_network(args, model_args: Dict[str, Any]) -> nn.Sequential:
    backbone = timm.create_model(args.model, num_classes=0, **model_args)
    head = DINOProjectionHead(backbone.head_hidden_size, **{**HEAD, **args.head_kwargs})
    return nn.Sequential(OrderedDict(backbone=backbone, head=head)).to(args.device)


def create_networks(args, model_args: Dict[str, Any]) -> Tuple[nn.Sequential, nn.Sequential]:
    """Student and teacher with equal weights: backbones without classifier, and DINO's heads."""
    student = create_network(args, model_args)
    # no dropout in the teacher, which is in train mode, see train()
    teacher = create_network(args, {k: v for k, v in model_args.items() if not k.endswith(('drop_rate', 'path_rate'))})
    teacher.load_state_dict(student.state_dict())
    deactivate_requires_grad(teacher)
    return student, teacher


def forward(network: nn.Module, views: List[torch.Tensor]) -> List[torch.Tensor]:
    """Outputs of views of one size, computed in one pass: BatchNorm normalizes them together."""
    return list(network(torch.cat(views)).chunk(len(views))) if views else []


def train(student: nn.Sequential, teacher: nn.Sequential, loader: DataLoader, args) -> List[float]:
    """Train both in place.

    The EMA averages parameters only: running statistics of the student belong to other weights, and to global and local
    views alternately. As in DINO's code the teacher is in train mode, too: it normalizes by its batches of global
    views, and its running statistics, which eval mode and folding use, come from these batches.

    Returns:
        Mean loss of every epoch.
    """
    criterion = DINOLoss(student.head.last_layer.out_features, teacher_temp=args.teacher_temp).to(args.device)
    optimizer = create_optimizer_v2(student, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay)
    steps = args.epochs * len(loader)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched='cosine', num_epochs=args.epochs, warmup_epochs=min(args.warmup_epochs, args.epochs - 1),
        warmup_lr=0., min_lr=1e-6, step_on_epochs=False, updates_per_epoch=len(loader))
    student.train()
    teacher.train()
    losses = []
    for epoch in range(args.epochs):
        average = AverageMeter()
        for step, (views, _) in enumerate(loader, epoch * len(loader)):
            scheduler.step_update(step)
            views = [view.to(args.device, non_blocking=True) for view in views]
            with torch.no_grad():
                targets = forward(teacher, views[:2])
            loss = criterion(targets, forward(student, views[:2]) + forward(student, views[2:]))
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f'The loss of step {step} is {loss.item()}: a lower --lr may help.')
            optimizer.zero_grad()
            loss.backward()
            student.head.cancel_last_layer_gradients(epoch)
            nn.utils.clip_grad_norm_(student.parameters(), args.clip_grad)
            optimizer.step()
            update_momentum(student, teacher, cosine_schedule(step, steps, args.momentum, 1.))
            average.update(loss.item())
        losses.append(average.avg)
        print(f'epoch {epoch + 1} of {args.epochs}: loss {average.avg:.3f}', flush=True)
    return losses


@torch.inference_mode()
def extract(backbone: nn.Module, loader: DataLoader, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    """Features (N, C) in eval mode and targets (N,), on the CPU."""
    backbone.eval()
    features, targets = zip(*((backbone(images.to(device)).cpu(), targets) for images, targets in loader))
    return torch.cat(features), torch.cat(targets)


def predict_knn(features: torch.Tensor, bank: torch.Tensor, bank_targets: torch.Tensor, k: int) -> torch.Tensor:
    """Classes (N,) predicted from features (N, C) by DINO's weighted k-NN on features of training images (M, C)."""
    # in float64: float32 could not distinguish cosines near 1
    bank, classes = F.normalize(bank.double()).T, int(bank_targets.max()) + 1
    return torch.cat([
        knn_predict(part, bank, bank_targets, classes, knn_k=k, knn_t=0.07)[:, 0]
        for part in F.normalize(features.double()).split(256)])


def predict_linear(features: torch.Tensor, bank: torch.Tensor, bank_targets: torch.Tensor) -> torch.Tensor:
    """Classes (N,) predicted by a linear classifier trained on the features of the training images."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return torch.from_numpy(classifier.fit(bank.numpy(), bank_targets.numpy()).predict(features.numpy()))


def evaluate(label: str, backbone: nn.Module, loaders, args, linear: bool = True) -> torch.Tensor:
    """Print the accuracies; returns the features of the validation images."""
    (bank, bank_targets), (features, targets) = (extract(backbone, loader, args.device) for loader in loaders)
    predictions = {'k-NN': predict_knn(features, bank, bank_targets, args.knn_k)}
    if linear:
        predictions['linear'] = predict_linear(features, bank, bank_targets)
    accuracy = ', '.join(f'{k} {(p == targets).float().mean() * 100:.2f}%' for k, p in predictions.items())
    print(f'{label}, {count_params(backbone) / 1e6:.2f} M parameters: {accuracy}', flush=True)
    return features


def save(backbone: nn.Module, path: Path) -> None:
    with replacing_files(path.parent) as temporary:
        save_file({k: v.cpu().contiguous() for k, v in backbone.state_dict().items()}, temporary / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', metavar='DIR', help='images in train/CLASS and val/CLASS (the digits)')
    parser.add_argument('--model', default='repa_vit_small', help='of timm (%(default)s)')
    parser.add_argument(
        '--model-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='K=V',
        help='drop rates apply to the student; dynamic_img_size=None for models other than ViTs (digits: '
             f'{DIGITS_MODEL})')
    parser.add_argument(
        '--head-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='K=V',
        help=f'arguments of DINOProjectionHead ({HEAD})')
    parser.add_argument(
        '--transform-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='K=V',
        help=f'arguments of DINOTransform; local_crop_size is half of img_size by default (digits: {DIGITS_VIEWS})')
    parser.add_argument('--output', metavar='FILE', help="write the teacher's backbone, .safetensors")
    parser.add_argument('--epochs', type=int, default=32, help='(%(default)s)')
    parser.add_argument('--warmup-epochs', type=int, default=2, help='(%(default)s)')
    parser.add_argument('--batch-size', type=int, default=64, help='(%(default)s)')
    parser.add_argument('--opt', default='adamw', help="optimizer of timm; the paper uses lamb (%(default)s)")
    parser.add_argument('--lr', type=float, default=2e-3, help='DINO on ImageNet: 0.0005 for 256 images (%(default)s)')
    parser.add_argument('--weight-decay', type=float, default=0.04, help='(%(default)s)')
    parser.add_argument('--clip-grad', type=float, default=3., help='largest norm of all gradients (%(default)s)')
    parser.add_argument(
        '--momentum', type=float, default=0.99,
        help='initial momentum of the EMA, which rises to 1; DINO on ImageNet: 0.996 (%(default)s)')
    parser.add_argument('--teacher-temp', type=float, default=0.03, help='DINO on ImageNet: 0.04 (%(default)s)')
    parser.add_argument('--knn-k', type=int, default=20, help='(%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'), help='(%(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='(%(default)s)')
    parser.add_argument('-j', '--workers', type=int, default=1, help='data loading processes (%(default)s)')
    args = parser.parse_args()
    if not timm.is_model(args.model):
        parser.error(f'--model: timm and timm_rep have no {args.model!r}.')
    if args.epochs < 1:
        parser.error(f'--epochs is at least 1, got {args.epochs}.')
    output = Path(args.output) if args.output else None
    try:
        if output:
            if output.suffix != '.safetensors' or output.is_dir():
                raise ValueError(f'--output is a .safetensors file to write, got {args.output!r}.')
            check_writable(output.parent)
        train_set, val_set = create_datasets(args)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    for name, value in (('--batch-size', args.batch_size), ('--knn-k', args.knn_k)):
        if not 1 <= value <= len(train_set):
            parser.error(f'{name} is from 1 to the number of training images, {len(train_set)}, got {value}.')

    random_seed(args.seed)
    # local views are smaller than img_size
    model_args = {'dynamic_img_size': True, **({} if args.data_dir else DIGITS_MODEL), **args.model_kwargs}
    student, teacher = create_networks(args, model_args)
    backbone = teacher.backbone
    img_size = {k: v for k, v in model_args.items() if k == 'img_size' and v is not None}
    data_config = resolve_data_config({**img_size, 'crop_pct': 1.}, model=backbone)
    size = data_config['input_size'][-1]
    views = DINOTransform(**{
        'global_crop_size': size,
        'local_crop_size': size // 2,
        'normalize': {k: data_config[k] for k in ('mean', 'std')},
        **({} if args.data_dir else DIGITS_VIEWS),
        **args.transform_kwargs,
    })
    transform = create_transform(**data_config)
    loaders = [create_loader(dataset, transform, args, is_training=False) for dataset in (train_set, val_set)]
    print(f'{args.model}, {size} x {size} pixels: {len(train_set)} images to train on, {len(val_set)} to validate on')

    update_bn(loaders[0], backbone, args.device)  # else the untrained model has no running statistics
    evaluate('untrained', backbone, loaders, args)
    train(student, teacher, create_loader(train_set, views, args, is_training=True), args)
    features = evaluate('trained', backbone, loaders, args)
    # no linear classifier: its fit depends on the last bits of the features
    folded = evaluate('folded', reparameterize_model(backbone), loaders, args, linear=False)
    difference = (folded - features).abs().max() / features.abs().max()
    print(f'features differ by {difference:.1e} of the largest, before against after folding')
    if output:
        save(backbone, output)
        options = ''.join(f', {k}={v!r}' for k, v in model_args.items() if v is not None)
        print(f'timm.create_model({args.model!r}, checkpoint_path={str(output)!r}, num_classes=0{options})')


if __name__ == '__main__':
    main()
