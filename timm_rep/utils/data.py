"""Datasets and loaders. Unlike timm's, the datasets raise instead of falling back to other images."""
import copy
import hashlib
import os
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from PIL import Image
from timm.data import create_dataset, create_loader, create_transform, get_img_extensions
from timm.data.readers.reader_image_folder import ReaderImageFolder, find_images_and_targets
from torch.utils.data import Dataset
from torchvision.datasets import DatasetFolder

from .batches import Loader
from .distributed import world_size_and_rank
from .labels import check_same_classes, class_names, recorded_labels
from .preprocessing import IMAGE_MODES, PREPROCESSING, image_config

# prefixes of timm's datasets; it takes names with others as folders of images
_DATASETS = ('torch', 'hfds', 'hfids', 'tfds', 'wds')
# timm's names of the training and the validation images of a dataset of torchvision; it takes others as the latter
_SPLITS = ('train', 'training', 'val', 'valid', 'validation', 'eval', 'evaluation', 'test')


def open_dataset(name: str, root: Optional[str], split: str, **kwargs: Any) -> Dataset:
    """timm's ``create_dataset``, with an error where timm would take the images of another split, or of every one.

    The name is '' for folders of images, otherwise it has a prefix: 'torch/cifar100', 'hfds/...'.
    """
    prefix, slash, _ = name.partition('/')
    if name and not (slash and prefix.lower() in _DATASETS):
        raise ValueError(
            f'The name of a dataset must have one of the prefixes {", ".join(_DATASETS)}, as in torch/cifar10 or '
            f"hfds/owner/name, got {name!r}: for folders of images it is ''.")
    if not name and not os.path.exists(root or ''):
        raise FileNotFoundError(f'Expected images in {root}/{split}/CLASS/IMAGE, but {root!r} does not exist.')
    if '[' in split and prefix.lower() in ('', 'torch'):
        raise ValueError(f'A split of this dataset must be its name, without a slice, got {split!r}.')
    try:
        dataset = create_dataset(name, root=root, split=split, **kwargs)
    except RuntimeError as e:
        if not name and str(e).startswith('Found 0 images'):
            raise FileNotFoundError(f'Expected images in {root}/{split}/CLASS/IMAGE: {e}') from e
        raise
    if hasattr(dataset, 'train') and split not in _SPLITS:  # a dataset of torchvision with two splits
        raise ValueError(f'The split of {name!r} must be one of {", ".join(_SPLITS)}, got {split!r}.')
    folder = getattr(dataset, 'reader', dataset)
    if isinstance(folder, (ReaderImageFolder, DatasetFolder)) and root and os.path.samefile(folder.root, root):
        raise FileNotFoundError(
            f'Expected images in {root}/{split}/CLASS/IMAGE, but {root!r} has no folder for the split {split!r}.')
    return dataset


def _check_types(folder: str) -> None:
    """Raise ValueError if a folder has images of types that timm skips."""
    types = get_img_extensions(as_set=True)
    readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    skipped, _ = find_images_and_targets(folder, types=readable - types, sort=False)
    if skipped:
        path = min(path for path, _ in skipped)
        raise ValueError(
            f'Expected images of the types {", ".join(sorted(types))}, but {folder!r} has {len(skipped)} of others, '
            f'such as {path!r}, which timm skips: convert or remove them, or in Python call '
            'timm.data.add_img_extensions() before.')


class ImageFolder(Dataset):
    """Images in folders by class, in the order of their paths; an image that cannot be decoded is an error.

    So are images of other types, which timm's ImageDataset skips, and of more than 8 bits a channel, of which most
    values become white. In place of a damaged image, it returns the next one and its target.

    Attributes:
        classes: Names of the classes, by index: of the folders in timm's order (1, 2, 10), or ``labels``.
        samples: (path, class) of the images.
        filename: timm's function from an index to the path of the image, relative to the folder of the split.
        transform: Transform of the PIL images, set by timm's ``create_loader``.
    """

    def __init__(self, root: str, split: str, channels: int = 3, labels: Optional[Sequence[str]] = None):
        """
        Args:
            root: Folder that holds the split.
            split: Name of a folder in it, with a folder of images for every class.
            channels: 3 for RGB, 1 for grey.
            labels: Names of the classes by index, of a model; ignored unless they are the names of the folders.

        Raises:
            FileNotFoundError: The folder does not exist, or has no images.
            ValueError: It has images of types that timm does not read.
        """
        self.mode = IMAGE_MODES[channels]
        dataset = open_dataset('', root, split)
        _check_types(dataset.reader.root)
        self.classes: List[str] = list(class_names(dataset) or ())
        self.filename = dataset.reader.filename
        self.samples = dataset.reader.samples
        if labels and len(labels) == len(self.classes) and {*labels} == {*self.classes}:
            self.samples = [(path, labels.index(self.classes[target])) for path, target in self.samples]
            self.classes = list(labels)
        self.transform = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tuple[object, int]:
        """An image and its class."""
        path, target = self.samples[index]
        try:
            with Image.open(path) as file:
                if file.mode.startswith(('I', 'F')):  # Pillow clips them
                    raise ValueError(f'its mode is {file.mode}, not of 8 bits a channel')
                image = file.convert(self.mode)
        except Exception as e:  # decoders raise many types for damaged files
            raise ValueError(f'Expected an image, but decoding {path!r} failed: {type(e).__name__}: {e}') from e
        return (image if self.transform is None else self.transform(image)), target


def load_images(
        dataset: Dataset, config: Mapping[str, Any], batch_size: int, workers: int = 0, **kwargs: Any,
) -> Loader:
    """timm's ``create_loader`` with the preprocessing of :func:`image_config`, and further arguments of it."""
    return create_loader(
        dataset, batch_size=batch_size, num_workers=workers, persistent_workers=False, use_prefetcher=False,
        device=torch.device('cpu'), **{name: config[name] for name in PREPROCESSING}, **kwargs)


def read_images(model: nn.Module, root: str, split: str, count: int) -> torch.Tensor:
    """At most ``count`` evenly spaced images of a split, preprocessed for a model, (N, channels, height, width)."""
    config = image_config(model)
    dataset = ImageFolder(root, split, config['input_size'][0])
    dataset.transform = create_transform(**config)
    count = min(count, len(dataset))
    return torch.stack([dataset[i * len(dataset) // count][0] for i in range(count)])


class Images:
    """Folders of images for a model: for calibration and distillation, and for measuring the accuracy.

    Attributes:
        classes: Names of the classes, by index.
    """

    def __init__(
            self,
            model: nn.Module,
            root: str,
            train_split: str = 'train',
            val_split: str = 'val',
            batch_size: int = 64,
            workers: int = 0,
            device: Union[str, torch.device] = 'cpu',
            seed: int = 0,
            **data_config: Any,
    ):
        """
        Args:
            model: Model whose input size and pretrained_cfg say how images are preprocessed.
            root: Folder that holds the splits.
            train_split: Name of the folder with the images for calibration and distillation, labelled or not.
            val_split: Name of the folder with the images to measure the accuracy on, in folders by class.
            batch_size: Images in a batch, of each process.
            workers: Number of processes that load images; 0 loads them in this process.
            device: Device of the batches.
            seed: Seed of the choice of calibration images.
            data_config: Preprocessing in place of the model's, as for :func:`image_config`.

        Raises:
            FileNotFoundError: A split has no folder, or no images.
            TypeError: Unknown preprocessing.
            ValueError: The model is not a classifier of timm; the images to measure the accuracy on have other classes
                than the model or than the images for calibration, which are in folders by class; or as
                :func:`image_config`.
        """
        classes = getattr(model, 'num_classes', None)
        if not isinstance(classes, int) or classes < 1:
            raise ValueError(
                f'Expected a classifier, but {type(model).__name__} has no classes: create it with num_classes, and '
                'without features_only.')
        if not hasattr(model, 'pretrained_cfg'):
            raise ValueError(
                f'Expected a model of timm, with a pretrained_cfg that says how to prepare images, but '
                f'{type(model).__name__} has none.')
        self.root = root
        self.config = image_config(model, **data_config)
        self.workers, self.device, self.seed = workers, torch.device(device), seed
        channels, labels = self.config['input_size'][0], recorded_labels(model)
        # read once; loaders get copies, whose samples and transforms are their own
        self._train, self._val = (ImageFolder(root, split, channels, labels) for split in (train_split, val_split))
        train, val = self._train, self._val
        world_size = world_size_and_rank()[0]
        self.batch_size = min(batch_size, -(-len(train) // world_size))  # timm's loader drops an incomplete batch
        if len(val.classes) != classes or val.classes == ['']:
            found = 'no folders of classes' if val.classes == [''] else f'{len(val.classes)} classes'
            raise ValueError(
                f'Expected images of the {classes} classes of the model in {val_split}/CLASS/IMAGE, for the '
                f'accuracy, but {root!r} has {found} in {val_split!r}.')
        if train.classes != ['']:  # one folder without classes
            check_same_classes({train_split: train.classes, val_split: val.classes})
        self.classes: Sequence[str] = val.classes

    def _loader(self, dataset: ImageFolder, **kwargs: Any) -> Loader:
        return load_images(dataset, self.config, self.batch_size, self.workers, **kwargs)

    @property
    def digest(self) -> str:
        """A digest of the names of the images for calibration and distillation."""
        names = sorted(os.path.relpath(path, self.root) for path, _ in self._train.samples)
        return f'sha256:{hashlib.sha256(os.fsencode(chr(0).join(names))).hexdigest()[:12]}'

    def calibration(self, count: int) -> Loader:
        """Loader of ``count`` random images of the training split, preprocessed as for validation."""
        dataset = copy.copy(self._train)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(self.seed), device='cpu')
        dataset.samples = [dataset.samples[i] for i in order[:count].tolist()]
        return self._loader(dataset)

    def training(self) -> Loader:
        """Loader of the training split, of this rank's part in a process group, with random crops and flips."""
        return self._loader(
            copy.copy(self._train), is_training=True, scale=(0.7, 1.), color_jitter=None,
            distributed=world_size_and_rank()[0] > 1)

    def validation(self) -> Loader:
        """Loader of the validation split."""
        return self._loader(copy.copy(self._val))
