"""What the dense examples share: images to train on, the training, and timm's arguments for a Swin under a head."""
import argparse
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
from PIL import Image
from timm.optim import create_optimizer_v2
from timm.utils import ParseKwargs
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

import timm_rep  # noqa: F401, registers the models

__all__ = ['Folder', 'Shapes', 'add_arguments', 'backbone_args', 'create_loaders', 'train']


def backbone_args(checkpoint: Optional[str] = None, **kwargs) -> Dict[str, Any]:
    """Arguments of ``timm.create_model`` for a Swin that takes images of any size.

    Args:
        checkpoint: Of the classifier of the same name, to start from.
        kwargs: Other arguments; they win.
    """
    if checkpoint:
        kwargs.update(pretrained=True, pretrained_cfg_overlay=dict(file=str(checkpoint)))
    # without always_partition no window shifts in the last stage, whose map is one window large at 224 x 224 pixels
    return {'strict_img_size': False, 'always_partition': True, **kwargs}


class Shapes(Dataset):
    """Reddish discs, greenish squares and bluish diamonds, up to five an image, some hidden in part by others.

    Items: the image (3, H, W); which object a pixel belongs to (1, H, W), counted from 1, 0 for none; the class of each
    object, counted from 1. The sides of an image are of the given size, or up to half as long again.
    """
    orders = (2, float('inf'), 1)  # of the norm whose ball is the shape

    def __init__(self, length: int, size: int, seed: int):
        self.length = length
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + index)  # it looks at 32 bits

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
    """Images, and masks of one channel named as they are, or NAME_mask.

    Items: the image (3, H, W); the mask (1, H, W); None, for the classes of the objects, which nothing tells.
    """

    def __init__(self, images: Path, masks: Path):
        """
        Raises:
            ValueError: There are no images, or one has no mask.
        """
        known = Image.registered_extensions()
        self.images = [path for path in sorted(images.iterdir()) if path.suffix.lower() in known]
        if not self.images:
            raise ValueError(f'There are no images in {images}.')
        of = {path.stem.removesuffix('_mask'): path for path in masks.iterdir() if path.suffix.lower() in known}
        missing = [path.name for path in self.images if path.stem not in of]
        if missing:
            raise ValueError(f'{len(missing)} images have no mask in {masks}, the first is {missing[0]}.')
        self.masks = [of[path.stem] for path in self.images]

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
    parser.add_argument('--backbone', default='repa_swin_tiny', metavar='NAME', help='a Swin of timm (%(default)s)')
    parser.add_argument(
        '--backbone-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='KEY=VALUE', help='its arguments')
    parser.add_argument('--checkpoint', metavar='FILE', help='of the classifier of that name, to start from')
    parser.add_argument('--images', type=Path, metavar='DIR', help='every fifth is to validate on')
    parser.add_argument('--masks', type=Path, metavar='DIR', help=f'of the same names, or NAME_mask: {pixels}')
    parser.add_argument('--steps', type=int, default=200, help='(%(default)s)')
    parser.add_argument('--batch-size', type=int, default=4, help='(%(default)s)')
    parser.add_argument('--lr', type=float, default=3e-4, help='of AdamW (%(default)s)')
    parser.add_argument('--val-shapes', type=int, default=50, help='images of shapes to validate on (%(default)s)')
    parser.add_argument('--workers', '-j', type=int, default=0, help='(%(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='(%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'), help='(%(default)s)')


def create_loaders(args, collate_train: Callable, collate_val: Callable) -> Tuple[DataLoader, DataLoader]:
    """Random batches for all the steps, and the images to validate on, of the arguments."""
    if (args.images is None) != (args.masks is None):
        raise SystemExit('--images and --masks belong together, one of them is missing.')
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


def train(model: nn.Module, loader: DataLoader, loss_of: Callable, args) -> List[float]:
    """Train a model in place.

    Args:
        model: A model on the device of the arguments.
        loader: Of the batches of all steps.
        loss_of: The loss of the model on a batch.
        args: Those of the command.

    Returns:
        The loss of every step.
    """
    optimizer = create_optimizer_v2(model, opt='adamw', lr=args.lr, weight_decay=.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=len(loader))
    losses = []
    model.train()
    for step, batch in enumerate(loader, start=1):
        loss = loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == len(loader):
            print(f'step {step}: loss {losses[-1]:.3f}', flush=True)
    return losses
