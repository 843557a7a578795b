"""Datasets and loaders for Hyper-Search: images of any dataset that timm opens, with random crops and flips."""
from typing import Iterator, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from timm_rep.utils.data import ImageFolder, open_dataset

# pixels of black padding before a random crop, as in the authors' code
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
    """Open a dataset with the transforms of the paper: random crops with 4 pixels of padding, and flips (section 4.1).

    Args:
        name: Name for timm's ``create_dataset``: '' for folders of images, 'torch/cifar100', 'hfds/...'.
        root: Folder of the dataset; for 'hfds/...' the cache folder.
        split: Name of the split.
        img_size: Height and width of the images in pixels, to which they are resized.
        is_training: Crop and flip the images.
        raw: Only resize, to images of bytes (3, H, W), for a :class:`DeviceLoader`.
        download: Download the dataset, if timm can.

    Returns:
        A dataset of images (3, H, W), float32 and normalized, and integer targets.

    Raises:
        ValueError: The dataset cannot be opened, is empty, or its images do not have 3 channels.
    """
    from torchvision import transforms

    crop_and_flip = [transforms.RandomCrop(img_size, padding=_BORDER), transforms.RandomHorizontalFlip()]
    normalize = [transforms.ToTensor(), transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)]
    try:
        if name:
            dataset = open_dataset(name, root, split, is_training=is_training, download=download)
        else:
            dataset = ImageFolder(str(root), split)
        dataset.transform = transforms.Compose([
            transforms.Resize((img_size, img_size)),
            *(crop_and_flip if is_training and not raw else []),
            *([transforms.PILToTensor()] if raw else normalize),
        ])
        if isinstance(dataset, IterableDataset):
            raise TypeError('it is read as a stream, but a search needs the images by index')
        image, _ = dataset[0]
    except Exception as e:  # every kind of dataset has errors of its own
        raise ValueError(
            f'Cannot open the split {split!r} of the dataset {name!r} in {root!r}: {type(e).__name__}: {e}') from e
    if image.shape[0] != 3:
        raise ValueError(f'Expected images of 3 channels, but {name!r} in {root!r} has images of {image.shape[0]}.')
    return dataset


def _sampler(dataset: Dataset, is_training: bool) -> Sampler:
    """Sampler of a dataset; in training in a process group, of this rank's part of it."""
    if not is_training:
        return SequentialSampler(dataset)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return DistributedSampler(dataset, drop_last=True)
    return RandomSampler(dataset)


def create_search_loader(dataset: Dataset, batch_size: int, is_training: bool, workers: int = 0) -> DataLoader:
    """Create a loader for :func:`hyper_search`, with new random numbers in every epoch.

    Args:
        dataset: Dataset from :func:`create_search_dataset`.
        batch_size: Images in a batch of each process.
        is_training: Shuffle, and drop the last incomplete batch.
        workers: Number of processes that load images; 0 loads them in this process.
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
    """Loader of a small dataset in the memory of a device, with random crops and flips there.

    Yields images (N, 3, H, W), float32, normalized, in channels-last memory format, and targets (N,), with the
    distribution of :func:`create_search_loader`. Decoding each image once lets a small net on 32 x 32 images keep a GPU
    busy. Random numbers come from torch's CPU generator, so that they are the same on every device.
    """

    def __init__(
            self,
            dataset: Dataset,
            batch_size: int,
            is_training: bool,
            device: Union[str, torch.device] = 'cpu',
            workers: int = 0,
            flip: bool = True,
            crop: bool = True,
    ):
        """
        Args:
            dataset: Dataset from ``create_search_dataset(raw=True)``.
            batch_size: Images in a batch of each process.
            is_training: Shuffle, crop and flip, and drop the last incomplete batch.
            device: Device of the images.
            workers: Number of processes that read the images once; 0 reads them in this process.
            flip: Random flips; disable for text or digits.
            crop: Random crops; without, images are whole.
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
        self.flip, self.crop = flip, crop
        self.mean, self.std = (
            torch.tensor(x, device=device) * 255 for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole if self.is_training else whole + bool(rest)

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        n, device = len(self.targets), self.targets.device
        order = torch.tensor(list(self.sampler), device=device)
        # top edge, left edge and flip of each image
        draws = [torch.full((n,), _BORDER), torch.full((n,), _BORDER), torch.zeros(n, dtype=torch.long)]
        if self.is_training:
            draws = [torch.randint(high, (n,)) for high in (2 * _BORDER + 1, 2 * _BORDER + 1, 2)]
        if not self.crop:
            draws[0].fill_(_BORDER)
            draws[1].fill_(_BORDER)
        if not self.flip:
            draws[2].zero_()
        draws = [draw.to(device) for draw in draws]
        rows, columns = (torch.arange(size, device=device) for size in self.size)
        for i in range(len(self)):
            chosen = order[i * self.batch_size:(i + 1) * self.batch_size]
            top, left, flip = (draw[chosen, None] for draw in draws)
            y = top + rows
            x = left + torch.where(flip > 0, columns.flip(0), columns)
            images = self.images[chosen[:, None, None], y[:, :, None], x[:, None, :]]
            yield ((images - self.mean) / self.std).permute(0, 3, 1, 2), self.targets[chosen]
