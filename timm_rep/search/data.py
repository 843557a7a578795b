"""Images for Hyper-Search: any data set that timm opens, flipped and cropped."""
import os
from typing import Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler

__all__ = ['DeviceLoader', 'count_classes', 'create_search_dataset', 'create_search_loader']

# the crops are out of a border of this many black pixels, as in the authors' code
_BORDER = 4


def create_search_dataset(
        name: str,
        root: Optional[str],
        split: str,
        img_size: int,
        is_training: bool,
        raw: bool = False,
        download: bool = False,
) -> Dataset:
    """A data set with the transforms of the paper: random crops out of a border of 4 pixels, and flips (section 4.1).

    Args:
        name: Of timm's ``create_dataset``: '' for folders of images, 'torch/cifar100', 'hfds/...'.
        root: Where it is.
        split: Which part of it.
        img_size: Height and width of the images, pixels; others are resized.
        is_training: Whether to crop and flip.
        download: Let the data set download itself, if it can.
        raw: Only resize, and leave the images as bytes: for a DeviceLoader, which does the rest.

    Raises:
        ValueError: It cannot be opened, or is empty; the message says which and why.
    """
    from torchvision import transforms

    crop_and_flip = [transforms.RandomCrop(img_size, padding=_BORDER), transforms.RandomHorizontalFlip()]
    normalize = [transforms.ToTensor(), transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)]
    try:
        dataset = create_dataset(name, root=root, split=split, is_training=is_training, download=download)
        dataset.transform = transforms.Compose([
            transforms.Resize((img_size, img_size)),
            *(crop_and_flip if is_training and not raw else []),
            *([transforms.PILToTensor()] if raw else normalize),
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
    reader = getattr(dataset, 'reader', None)
    return isinstance(reader, ReaderImageFolder) and root is not None and os.path.samefile(reader.root, root)


def _sampler(dataset: Dataset, is_training: bool) -> Sampler:
    """Which images this process sees, and in which order: in training, of a process group, its share."""
    if not is_training:
        return SequentialSampler(dataset)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return DistributedSampler(dataset, drop_last=True)
    return RandomSampler(dataset)


def create_search_loader(dataset: Dataset, batch_size: int, is_training: bool, workers: int = 0) -> DataLoader:
    """Batches whose randomness starts anew with every epoch, as hyper_search() needs it.

    In a process group, of batch_size images for each process.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=_sampler(dataset, is_training),
        drop_last=is_training,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
    )


class DeviceLoader:
    """Batches of a small data set that is held in memory, on the device; cropped and flipped there.

    Yields images (N, 3, H, W), float32, normalized, in channels-last memory, and targets (N,). The same distribution as
    that of create_search_loader(), without its decoding: on a GPU nothing else keeps up with a net on 32 x 32 images.
    Its randomness comes from torch's CPU generator, so that it is the same on every device.
    """

    def __init__(self, dataset: Dataset, batch_size: int, is_training: bool, device='cpu', workers: int = 0):
        """
        Args:
            dataset: Of create_search_dataset(raw=True): images (3, H, W) of bytes, all of one size, and targets.
            batch_size: Images of a batch, for each process; in training the last ones, fewer, are left out.
            is_training: Whether to shuffle, crop and flip.
            device: Where the images are.
            workers: Processes that read the images, once.
        """
        batches = list(DataLoader(dataset, batch_size=512, num_workers=workers))
        images = torch.cat([images for images, _ in batches]).permute(0, 2, 3, 1)
        self.size = tuple(images.shape[1:3])
        self.images = F.pad(images, (0, 0, _BORDER, _BORDER, _BORDER, _BORDER)).contiguous().to(device)
        self.targets = torch.cat([targets for _, targets in batches]).to(device)
        self.dataset = dataset
        self.sampler = _sampler(dataset, is_training)
        self.batch_size = batch_size
        self.is_training = is_training
        self.mean, self.std = (
            torch.tensor(x, device=device) * 255 for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole if self.is_training else whole + bool(rest)

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        n, device = len(self.targets), self.targets.device
        order = torch.tensor(list(self.sampler), device=device)
        # top and left corner, whether to flip
        draws = [torch.full((n,), _BORDER), torch.full((n,), _BORDER), torch.zeros(n, dtype=torch.long)]
        if self.is_training:
            draws = [torch.randint(high, (n,)) for high in (2 * _BORDER + 1, 2 * _BORDER + 1, 2)]
        draws = [draw.to(device) for draw in draws]
        rows, columns = (torch.arange(size, device=device) for size in self.size)
        for i in range(len(self)):
            chosen = order[i * self.batch_size:(i + 1) * self.batch_size]
            top, left, flip = (draw[chosen, None] for draw in draws)
            y = top + rows
            x = left + torch.where(flip > 0, columns.flip(0), columns)
            images = self.images[chosen[:, None, None], y[:, :, None], x[:, None, :]]
            yield ((images - self.mean) / self.std).permute(0, 3, 1, 2), self.targets[chosen]


def count_classes(dataset: Dataset) -> Optional[int]:
    """How many classes a data set says that it has, or None."""
    for names in (getattr(dataset, 'classes', None), getattr(getattr(dataset, 'reader', None), 'class_to_idx', None)):
        if names:
            return len(names)
    return None
