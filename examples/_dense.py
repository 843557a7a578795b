"""Shared by the dense examples: datasets, training, and arguments for a backbone."""
import argparse
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
from PIL import Image
from timm.optim import create_optimizer_v2
from timm.utils import ParseKwargs, random_seed
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

from timm_rep.deploy import check_quantization, check_target
from timm_rep.layers.grad_mult import get_grad_mult
from timm_rep.utils.atomic import check_writable

__all__ = ['Folder', 'Shapes', 'add_arguments', 'backbone_args', 'create_loaders', 'prepare', 'train']


# learning rate and weight decay by optimizer
_HYPERPARAMETERS = {'adamw': (3e-4, .05), 'repsgd': (.01, 1e-4)}


def backbone_args(backbone: str, checkpoint: Optional[str] = None, **kwargs) -> Dict[str, Any]:
    """Arguments of ``timm.create_model`` for a backbone that takes images of any size.

    Args:
        backbone: Name of the backbone.
        checkpoint: Checkpoint of a classifier of the same name to start from.
        kwargs: Further arguments, which take precedence.
    """
    if checkpoint:
        kwargs.update(pretrained=True, pretrained_cfg_overlay=dict(file=str(checkpoint)))
    if re.match('(repa_)?swin', backbone):
        # without always_partition the last stage, one window large at 224 x 224 pixels, would not shift its windows
        kwargs = {'strict_img_size': False, 'always_partition': True, **kwargs}
    return kwargs


class Shapes(Dataset):
    """Reddish discs, greenish squares and bluish diamonds: one to five in an image, possibly overlapping.

    Items: image (3, H, W), uint8; number of the object of each pixel (1, H, W), from 1, 0 for background; class of each
    object (N,), from 1. H and W are drawn from ``size`` to ``1.5 * size``.
    """
    orders = (2, float('inf'), 1)  # the shapes are balls in the norms of these orders

    def __init__(self, length: int, size: int, seed: int):
        self.length = length
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + index)  # at most 32 bits are used

        def uniform(*shape):
            return torch.rand(*shape, generator=g)

        height, width = (self.size * (1 + .5 * uniform(2))).int().tolist()
        points = torch.cartesian_prod(torch.arange(height), torch.arange(width)).view(height, width, 2)
        image = uniform(3, 1, 1) + torch.randn(3, height, width, generator=g) / 8
        numbers = torch.zeros(1, height, width, dtype=torch.uint8)
        labels = torch.randint(1, 1 + len(self.orders), (1 + int(5 * uniform(1)),), generator=g)
        for number, label in enumerate(labels.tolist(), start=1):
            center = uniform(2) * torch.tensor([height, width])
            radius = self.size * (.12 + .18 * uniform(1))
            inside = torch.linalg.vector_norm(points - center, self.orders[label - 1], dim=-1) <= radius
            color = uniform(3, 1, 1) / 2
            color[label - 1] += .5
            image = torch.where(inside, color, image)
            numbers[:, inside] = number
        return tv_tensors.Image((255 * image.clamp(0, 1)).byte()), tv_tensors.Mask(numbers), labels


class Folder(Dataset):
    """Images, and masks of one channel with the same names or NAME_mask.

    Items: image (3, H, W), uint8; mask (1, H, W); None, in place of classes of objects.
    """

    def __init__(self, images: Path, masks: Path):
        """
        Raises:
            ValueError: There are no images, or an image has no mask.
        """
        known = Image.registered_extensions()
        self.images = [path for path in sorted(images.iterdir()) if path.suffix.lower() in known]
        if not self.images:
            raise ValueError(f'Expected images in {images}, but found none.')
        found = {path.stem.removesuffix('_mask'): path for path in masks.iterdir() if path.suffix.lower() in known}
        missing = [path.name for path in self.images if path.stem not in found]
        if missing:
            raise ValueError(f'{len(missing)} images have no mask in {masks}, the first is {missing[0]}.')
        self.masks = [found[path.stem] for path in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor, None]:
        with Image.open(self.images[index]) as image, Image.open(self.masks[index]) as mask:
            image, mask = pil_to_tensor(image.convert('RGB')), pil_to_tensor(mask)
        if mask.shape != (1, *image.shape[1:]):
            raise ValueError(
                f'{self.masks[index]} is of shape {tuple(mask.shape)}, expected one channel and the size of its image, '
                f'{(1, *image.shape[1:])}.')
        return tv_tensors.Image(image), tv_tensors.Mask(mask), None


def add_arguments(parser: argparse.ArgumentParser, pixels: str) -> None:
    parser.add_argument(
        '--backbone', default='repa_swin_tiny', metavar='NAME',
        help='a Swin, PoolFormer or CNN of timm or this package (%(default)s)')
    parser.add_argument(
        '--backbone-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='KEY=VALUE', help='its arguments')
    parser.add_argument('--checkpoint', metavar='FILE', help='checkpoint of a classifier of that name to start from')
    parser.add_argument('--images', type=Path, metavar='DIR', help='every fifth is a validation image')
    parser.add_argument('--masks', type=Path, metavar='DIR', help=f'named as the images or NAME_mask: {pixels}')
    parser.add_argument('--steps', type=int, default=200, help='(%(default)s)')
    parser.add_argument('--batch-size', type=int, default=4, help='(%(default)s)')
    parser.add_argument(
        '--opt', choices=_HYPERPARAMETERS, help='(repsgd if the backbone has gradient multipliers, otherwise adamw)')
    parser.add_argument(
        '--lr', type=float,
        help=f'learning rate ({", ".join(f"{opt}: {lr:g}" for opt, (lr, _) in _HYPERPARAMETERS.items())})')
    parser.add_argument('--val-shapes', type=int, default=50, help='validation images of shapes (%(default)s)')
    parser.add_argument('--workers', '-j', type=int, default=0, help='(%(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='(%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'), help='(%(default)s)')


def prepare(args: argparse.Namespace) -> None:
    """Check that ``--onnx`` and ``--int8`` can be written, before the training, and seed it."""
    if args.onnx:
        check_target(args.onnx, 'onnx')
    if args.int8:
        check_quantization('inductor', 'minmax')
        check_writable(args.int8)
    random_seed(args.seed)


def create_loaders(args, collate_train: Callable, collate_val: Callable) -> Tuple[DataLoader, DataLoader]:
    """Loaders of the training batches of all steps and of the validation images."""
    if (args.images is None) != (args.masks is None):
        raise SystemExit('--images and --masks belong together: pass both or none.')
    if args.images:
        folder = Folder(args.images, args.masks)
        held_out = range(0, len(folder), 5)
        train_set = Subset(folder, [i for i in range(len(folder)) if i not in held_out])
        val_set = Subset(folder, held_out)
    else:
        train_set = Shapes(args.steps * args.batch_size, args.img_size, seed=2 * args.seed)
        val_set = Shapes(args.val_shapes, args.img_size, seed=2 * args.seed + 1)
    sampler = RandomSampler(train_set, num_samples=args.steps * args.batch_size)
    common = dict(batch_size=args.batch_size, num_workers=args.workers)
    return (
        DataLoader(train_set, sampler=sampler, collate_fn=collate_train, **common),
        DataLoader(val_set, collate_fn=collate_val, **common))


def train(model: nn.Module, loader: DataLoader, loss_fn: Callable, args) -> List[float]:
    """Train a model in place: with RepSGD if it has GradMults, otherwise with AdamW and clipped gradients.

    Args:
        model: Model on the device of the arguments.
        loader: Loader of the batches of all steps.
        loss_fn: Called with the model and the parts of a batch; returns the loss.
        args: Arguments of the command line.

    Returns:
        Loss of every step.
    """
    has_grad_mults = any(get_grad_mult(p) is not None for p in model.parameters())
    opt = args.opt or ('repsgd' if has_grad_mults else 'adamw')
    default_lr, weight_decay = _HYPERPARAMETERS[opt]
    lr = default_lr if args.lr is None else args.lr
    optimizer = create_optimizer_v2(model, opt=opt, lr=lr, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=len(loader))
    losses = []
    model.train()
    for step, batch in enumerate(loader, start=1):
        loss = loss_fn(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        if opt != 'repsgd':  # clipping would break the equivalence with the multi-branch network
            nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == len(loader):
            print(f'step {step}: loss {losses[-1]:.3f}', flush=True)
    return losses
