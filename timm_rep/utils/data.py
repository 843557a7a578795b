"""Datasets, loaders and batch helpers. Unlike timm's, the datasets raise instead of falling back to other images."""
import hashlib
import os
from typing import Any, Dict, Iterable, Iterator, List, Literal, Mapping, Optional, Protocol, Sequence, Tuple, Union

import torch
import torch.nn as nn
from PIL import Image
from timm.data import create_dataset, create_loader, create_transform, resolve_data_config
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch.utils.data import Dataset
from torchvision.datasets import DatasetFolder

from .files import parse
from .profiling import model_img_size, model_input_size

# fields of a pretrained_cfg, and of a recipe for train.py, that describe how images are preprocessed
PREPROCESSING = {
    'input_size': Tuple[int, int, int],
    'interpolation': Literal['nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos'],
    'mean': Sequence[float],
    'std': Sequence[float],
    'crop_pct': float,
    'crop_mode': Literal['center', 'squash', 'border'],
}
# other values of these for validation, which timm's validate.py prefers
TEST_PREPROCESSING = ('test_input_size', 'test_pool_size', 'test_crop_pct')
_POSITIVE = ('input_size', 'std', 'crop_pct')
# prefixes of timm's datasets; it takes names with others as folders of images
_DATASETS = ('torch', 'hfds', 'hfids', 'tfds', 'wds')
# timm's names of the training and the validation images of a dataset of torchvision; it takes others as the latter
_SPLITS = ('train', 'training', 'val', 'valid', 'validation', 'eval', 'evaluation', 'test')
# Pillow's mode of an image, timm's input_img_mode, by number of channels
_MODES = {1: 'L', 3: 'RGB'}


def check_preprocessing(values: Mapping[str, Any], source: str = '') -> None:
    """Raise RuntimeError if a setting of :data:`PREPROCESSING` in a mapping is invalid; ``source`` is its file."""
    for name, kind in PREPROCESSING.items():
        value = values.get(name)
        if value is None:
            continue
        where = f'{source}: {name}' if source else name
        parse(kind, value, where)
        if value in ([], ()):
            raise RuntimeError(f'{where} must have one value, or one for each channel, got {value!r}.')
        if name in _POSITIVE and min(value if isinstance(value, (list, tuple)) else [value]) <= 0:
            raise RuntimeError(f'{where} must be positive, got {value!r}.')


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
    dataset = create_dataset(name, root=root, split=split, **kwargs)
    if hasattr(dataset, 'train') and split not in _SPLITS:  # a dataset of torchvision with two splits
        raise ValueError(f'The split of {name!r} must be one of {", ".join(_SPLITS)}, got {split!r}.')
    folder = getattr(dataset, 'reader', dataset)
    if isinstance(folder, (ReaderImageFolder, DatasetFolder)) and root and os.path.samefile(folder.root, root):
        raise FileNotFoundError(
            f'Expected images in {root}/{split}/CLASS/IMAGE, but {root!r} has no folder for the split {split!r}.')
    return dataset


def class_names(dataset: Dataset) -> Optional[Sequence[Any]]:
    """The classes of a dataset, by index; None if unknown."""
    indices = getattr(getattr(dataset, 'reader', None), 'class_to_idx', None)
    return sorted(indices, key=indices.get) if indices else getattr(dataset, 'classes', None)


def check_same_classes(classes: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError unless the splits, by name, have the same classes in the same order."""
    (first, expected), *others = classes.items()
    for split, found in others:
        if list(found) != list(expected):
            differing = sorted({*expected} ^ {*found}, key=str) or expected
            raise ValueError(
                f'Expected the same classes in {first!r} and {split!r}, but they differ in '
                f'{", ".join(str(name) or repr(name) for name in differing[:5])}. The order of the classes defines the '
                'labels.')


class ImageFolder(Dataset):
    """Images in folders by class, in the order of their paths; an image that cannot be decoded is an error.

    timm's ImageDataset silently returns the next image and its target instead.

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
            FileNotFoundError: The folder does not exist.
        """
        self.mode = _MODES[channels]
        dataset = open_dataset('', root, split)
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
                image = file.convert(self.mode)
        except Exception as e:  # decoders raise many types for damaged files
            raise ValueError(f'Expected an image, but decoding {path!r} failed: {type(e).__name__}: {e}') from e
        return (image if self.transform is None else self.transform(image)), target


def recorded_labels(model: nn.Module) -> Optional[Sequence[str]]:
    """Names of the classes by index that a model was trained with, if its pretrained_cfg lists one for each."""
    names = labels_by_index(model.pretrained_cfg.get('label_names'))
    return names if names is not None and len(names) == model.num_classes else None


def labels_by_index(names: Union[Sequence[str], Mapping[Any, str], None]) -> Optional[Sequence[str]]:
    """timm's label_names as a list; None if they are a mapping from numbers that has gaps."""
    if not isinstance(names, Mapping):
        return names if isinstance(names, (list, tuple)) else None
    by_number, numbers = {str(index): name for index, name in names.items()}, [str(i) for i in range(len(names))]
    return [by_number[i] for i in numbers] if by_number.keys() == {*numbers} else None


def image_config(
        model: nn.Module,
        img_size: Optional[int] = None,
        mean: Optional[Sequence[float]] = None,
        std: Optional[Sequence[float]] = None,
        interpolation: Optional[str] = None,
        crop_pct: Optional[float] = None,
) -> Dict[str, Any]:
    """timm's ``resolve_data_config`` for the size and the number of channels that a model takes.

    If mean or standard deviation in the pretrained_cfg have a different number of channels, each channel gets their
    average, as in timm's scripts.

    Args:
        model: timm model.
        img_size: Height and width, of a model that takes any. Default: the model's, as for the following.
        mean: Mean of each channel, or of all.
        std: Standard deviation of each channel, or of all.
        interpolation: Interpolation of resized images.
        crop_pct: Fraction of the image that is kept.
    """
    input_size = model_input_size(model)
    channels = input_size[0]
    if channels not in _MODES:
        raise ValueError(
            f'Expected a model of images with 3 channels (RGB) or 1 (grayscale), as files are read, but '
            f'{type(model).__name__} takes {channels}: use the Python API with your own tensors.')
    given: Dict[str, Any] = {'mean': mean, 'std': std, 'interpolation': interpolation, 'crop_pct': crop_pct}
    given = {name: value for name, value in given.items() if value is not None}
    given['input_size'] = input_size if img_size is None else (channels, img_size, img_size)
    try:
        own = getattr(model, 'pretrained_cfg', None) or {}
        check_preprocessing(own, f'The pretrained_cfg of {type(model).__name__}')
        check_preprocessing(given)
    except RuntimeError as e:
        raise ValueError(str(e)) from None
    built = model_img_size(model)
    if img_size is not None and built not in (None, (img_size, img_size)):
        raise ValueError(
            f'img_size must be that of the model, {built[0]} x {built[1]}, got {img_size}: create it with '
            f'img_size={img_size}.')
    for name in ('mean', 'std'):
        if name in given and len(given[name]) not in (1, channels):
            raise ValueError(
                f'{name} must have 1 or {channels} values for images of {channels} channels, got {given[name]!r}.')
    config = resolve_data_config({'in_chans': channels, **given}, model=model)
    for name in ('mean', 'std'):
        if len(config[name]) != channels:
            config[name] = (sum(config[name]) / len(config[name]),) * channels
    return config


def load_images(
        dataset: Dataset, config: Mapping[str, Any], batch_size: int, workers: int = 0, **kwargs: Any,
) -> 'Loader':
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


def batches_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the batches of a loader; TypeError for a path, a tensor or anything else without batches."""
    if isinstance(loader, (str, bytes, torch.Tensor)) or not hasattr(loader, '__iter__'):
        found = f'a tensor {tuple(loader.shape)}' if isinstance(loader, torch.Tensor) else f'{loader!r:.100}'
        raise TypeError(
            'Expected an iterable of batches of images (N, C, H, W), such as a DataLoader or a list of tensors, but '
            f'got {found}.')
    return iter(loader)


def world_size_and_rank() -> Tuple[int, int]:
    """Number of processes in the default process group and index of this one, (1, 0) without a group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def batch_images(batch: Any) -> torch.Tensor:
    """The images (N, C, H, W) of a batch: a tensor, a tuple or list with it first, or a dict with one such tensor."""
    images = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(batch, Mapping):
        images = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.ndim == 4]
        images = images[0] if len(images) == 1 else batch
    if not isinstance(images, torch.Tensor):
        raise TypeError(
            'Expected a batch that is a tensor of images, has one as its first item, or is a dict with one, but got '
            f'{images!r:.100}.')
    if not images.is_floating_point():
        raise TypeError(
            f'The images of a batch must be floating-point numbers, got {images.dtype}: normalize them as for the '
            'model, see timm.data.create_transform.')
    return images


def labelled_images(batch: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """The images (N, C, H, W) and labels (N,) of a batch, which is a tuple or list of both."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(x, torch.Tensor) for x in batch):
        images, labels = batch_images(batch), batch[1]
        if images.ndim == 4 and labels.shape == images.shape[:1]:
            return images, labels
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    found = ', '.join(str(tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__ for x in parts)
    raise TypeError(
        'Expected a batch of images (N, C, H, W) and labels (N,), to train or to measure the accuracy, but got '
        f'{found}.')


def take_images(loader: Iterable[Any], max_images: int, naflex: bool = False) -> List[Any]:
    """List the first batches of a loader, to pass them more than once.

    Args:
        loader: Batches as for :func:`batch_images`.
        max_images: Largest number of images.
        naflex: Whether a batch may also be, or have as its first item, a dict of timm's NaFlex loader with 'patches',
            'patch_coord' and 'patch_valid'.

    Returns:
        The images of the batches, at most ``max_images`` in all: tensors (N, C, H, W), or dicts with these three keys.

    Raises:
        TypeError: The loader has no batches, or a batch has no floating-point images.
        ValueError: ``max_images`` is not an integer >= 1, images are not (N, C, H, W), or there are none.
    """
    if not isinstance(max_images, int) or max_images < 1:
        raise ValueError(f'max_images must be an integer >= 1, got {max_images!r}.')
    batches: List[Any] = []
    for batch in batches_of(loader):
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if naflex and isinstance(first, Mapping) and 'patch_valid' in first:
            images = {name: first[name][:max_images].detach() for name in ('patches', 'patch_coord', 'patch_valid')}
            count = len(images['patches'])
        else:
            images = batch_images(batch)[:max_images].detach()
            count = len(images)
            if images.ndim != 4:
                raise ValueError(f'The images of a batch must have the shape (N, C, H, W), got {tuple(images.shape)}.')
        if count:
            batches.append(images)
        max_images -= count
        if max_images <= 0:
            break
    if not batches:
        raise ValueError(
            'Expected a calibration loader with images, but got none: pass some of the training set.')
    return batches


class Loader(Protocol):
    """Batches, and their number: a DataLoader or a list."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


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
        self.root, self.splits, self.labels = root, (train_split, val_split), recorded_labels(model)
        self.config = image_config(model, **data_config)
        self.workers, self.device, self.seed = workers, torch.device(device), seed
        train, val = (self._folder(split) for split in self.splits)
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

    def _folder(self, split: str) -> ImageFolder:
        return ImageFolder(self.root, split, self.config['input_size'][0], self.labels)

    def _loader(self, dataset: ImageFolder, **kwargs: Any) -> Loader:
        return load_images(dataset, self.config, self.batch_size, self.workers, **kwargs)

    @property
    def digest(self) -> str:
        """A digest of the names of the images for calibration and distillation."""
        names = sorted(os.path.relpath(path, self.root) for path, _ in self._folder(self.splits[0]).samples)
        return f'sha256:{hashlib.sha256(os.fsencode(chr(0).join(names))).hexdigest()[:12]}'

    def calibration(self, count: int) -> Loader:
        """Loader of ``count`` random images of the training split, preprocessed as for validation."""
        dataset = self._folder(self.splits[0])
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(self.seed), device='cpu')
        dataset.samples = [dataset.samples[i] for i in order[:count].tolist()]
        return self._loader(dataset)

    def training(self) -> Loader:
        """Loader of the training split, of this rank's part in a process group, with random crops and flips."""
        return self._loader(
            self._folder(self.splits[0]), is_training=True, scale=(0.7, 1.), color_jitter=None,
            distributed=world_size_and_rank()[0] > 1)

    def validation(self) -> Loader:
        """Loader of the validation split."""
        return self._loader(self._folder(self.splits[1]))
