"""Images for Hyper-Search: any data set that timm opens, flipped and cropped."""
import os
from typing import Optional

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset
from torch.utils.data import DataLoader, Dataset

__all__ = ['count_classes', 'create_search_dataset', 'create_search_loader']


def create_search_dataset(name: str, root: Optional[str], split: str, img_size: int, is_training: bool) -> Dataset:
    """A data set with the transforms of the paper: random crops out of a border of 4 pixels, and flips (section 4.1).

    Args:
        name: Of timm's ``create_dataset``: '' for folders of images, 'torch/cifar100', 'hfds/...'.
        root: Where it is.
        split: Which part of it.
        img_size: Height and width of the images, pixels; others are resized.
        is_training: Whether to crop and flip.

    Raises:
        ValueError: It cannot be opened, or is empty; the message says which and why.
    """
    from torchvision import transforms

    try:
        dataset = create_dataset(name, root=root, split=split, is_training=is_training, download=False)
        dataset.transform = transforms.Compose([
            transforms.Resize((img_size, img_size)),
            *([transforms.RandomCrop(img_size, padding=4), transforms.RandomHorizontalFlip()] if is_training else []),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        ])
        if _is_whole_root(dataset, root):
            raise FileNotFoundError(f'there is no folder of that name, expected {root}/{split}/CLASS/IMAGE')
        image, _ = dataset[0]
    except Exception as e:  # every kind of data set has errors of its own
        raise ValueError(
            f'Cannot open the split {split!r} of the data set {name!r} in {root!r}: {type(e).__name__}: {e}') from e
    if image.shape[0] != 3:
        raise ValueError(f'The images of {name!r} in {root!r} have {image.shape[0]} channels, expected 3.')
    return dataset


def _is_whole_root(dataset: Dataset, root: Optional[str]) -> bool:
    """Whether timm, finding no folder for the split, has taken all images below the root, those of any split."""
    taken = getattr(getattr(dataset, 'reader', None), 'root', None)
    return taken is not None and root is not None and os.path.isdir(taken) and os.path.samefile(taken, root)


def create_search_loader(dataset: Dataset, batch_size: int, is_training: bool, workers: int = 0) -> DataLoader:
    """Batches whose randomness starts anew with every epoch, as hyper_search() needs it."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=is_training,
        drop_last=is_training,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
    )


def count_classes(dataset: Dataset) -> Optional[int]:
    """How many classes a data set says that it has, or None."""
    for names in (getattr(dataset, 'classes', None), getattr(getattr(dataset, 'reader', None), 'class_to_idx', None)):
        if names:
            return len(names)
    return None
