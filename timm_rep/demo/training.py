"""Data and training of the demo: 1,797 handwritten digits of 8 x 8 pixels from scikit-learn."""
from typing import Any, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from PIL import Image
from timm.data import create_loader, resolve_model_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from torch.utils.data import DataLoader, Dataset, TensorDataset

from timm_rep.utils.training import fit

DATA = dict(tag='digits', input_size=(1, 16, 16), num_classes=10, mean=(0.5,), std=(0.5,), crop_pct=1.0)
_VAL_BATCH_SIZE = 256
_TRAIN_BATCH_SIZE = 32


class Images(Dataset):
    """Grayscale images and their classes."""

    def __init__(self, images: Sequence[Any], targets: Sequence[int]) -> None:
        self.images = [Image.fromarray(image) for image in images]
        self.targets = targets
        self.transform: Any = None  # set by timm's create_loader

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), int(self.targets[index])


def load_split(seed: int) -> Tuple[Images, Images]:
    """Training and validation images: 80% and 20% of each class."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype('uint8')
    parts = train_test_split(images, digits.target, test_size=0.2, stratify=digits.target, random_state=seed)
    return Images(parts[0], parts[2]), Images(parts[1], parts[3])


def create_loader_for(dataset: Images, model: nn.Module, is_training: bool) -> DataLoader:
    """timm's loader for the input size and normalization of a model; for training shuffled, without augmentation."""
    data_config = resolve_model_data_config(model)
    loader = create_loader(
        dataset,
        input_size=data_config['input_size'],
        interpolation=data_config['interpolation'],
        mean=data_config['mean'],
        std=data_config['std'],
        crop_pct=data_config['crop_pct'],
        batch_size=_VAL_BATCH_SIZE,
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
    )
    if not is_training:
        return loader
    # resized once: random crops every epoch took about a fifth of the time of the second part
    images, targets = (torch.cat(batches) for batches in zip(*loader))
    return DataLoader(TensorDataset(images, targets), batch_size=_TRAIN_BATCH_SIZE, shuffle=True, drop_last=True)


def create_model(name: str, seed: int, device: torch.device, **kwargs: Any) -> nn.Module:
    """A timm model for the digits, initialized with a seed."""
    random_seed(seed)
    return timm.create_model(name, pretrained_cfg_overlay=DATA, in_chans=1, **kwargs).to(device)


def train(
        name: str,
        model: nn.Module,
        loader: DataLoader,
        epochs: int,
        device: torch.device,
        **optimizer_args: Any,
) -> None:
    """Train a model in place, with a cosine schedule and one warm-up epoch."""
    optimizer = create_optimizer_v2(model, **optimizer_args)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched='cosine',
        num_epochs=epochs,
        warmup_epochs=1,
        warmup_lr=1e-5,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    fit(model, optimizer, scheduler, loader, epochs, device=device, description=f'training {name}')
