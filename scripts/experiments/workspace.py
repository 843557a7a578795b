"""Folders of trainings and their images, shared by the procedures of an experiment."""
import copy
import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Tuple, Union

import torch
import torch.nn.functional as F

from timm_rep.demo.training import load_split
from timm_rep.hub import sha256
from timm_rep.search import DeviceLoader, create_search_dataset
from timm_rep.utils.atomic import locking_folder
from timm_rep.utils.labels import check_same_classes
from timm_rep.utils.profiling import device_name, versions

__all__ = ['Images', 'OutOfTime', 'Workspace', 'digest', 'files_digest', 'num_classes', 'weight_files']


class OutOfTime(Exception):
    """The time limit of this run has passed; finished epochs are kept."""


def digest(settings: Any) -> str:
    """Hash of settings, including the trainings that they refer to."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def files_digest(root: str, datasets: Iterable[Any]) -> str:
    """Hash of the names, relative to a folder, and the sizes of the images of datasets."""
    return digest(sorted(
        [os.path.relpath(path, root), os.path.getsize(path)] for dataset in datasets for path, _ in dataset.samples))


def weight_files(settings: Mapping[str, Any]) -> List[str]:
    """Names of the pretrained weights that settings refer to."""
    nested = [name for value in settings.values() if isinstance(value, Mapping) for name in weight_files(value)]
    return [settings['file'], *nested] if 'file' in settings else nested


@dataclass
class Workspace:
    """Output folder, images and device of a run.

    Attributes:
        output: Folder of the trainings. Each has a folder by its settings, images, machine and versions, so that
            experiments share them.
        data_dir: Folders of images by split and class.
        weights_dir: Folder of pretrained weights.
        device: Device to train on.
        val_split: Name of the validation folder.
        deadline: Time, as of ``time.monotonic()``, after which no epoch begins.
        wait: Wait for a training that another process runs instead of raising BlockingIOError.
        images: Number of images in each split and a digest of their names and sizes, set by :meth:`check_images`.
        weights: SHA-256 of files of pretrained weights, by name, as :meth:`hashes` needs them.
    """
    output: Path
    data_dir: str
    device: torch.device
    val_split: str = 'val'
    weights_dir: Path = Path('data/weights')
    deadline: float = float('inf')
    wait: bool = True
    images: Dict[str, Union[int, str]] = field(default_factory=dict)
    weights: Dict[str, str] = field(default_factory=dict)
    _loaders: Dict[Tuple, DeviceLoader] = field(default_factory=dict)

    def training_folder(self, settings: Mapping[str, Any]):
        """Context manager of the folder of a training, locked for other processes."""
        images = None if settings.get('data') == 'digits' else self.images
        key = [settings, images, self.val_split, device_name(self.device), versions(), *self.hashes(settings).values()]
        return locking_folder(self.output / f'{settings.get("model", "model")}-{digest(key)}', self.wait)

    def hashes(self, settings: Mapping[str, Any]) -> Dict[str, str]:
        """Digests of the pretrained weights that settings refer to, by name of the file."""
        for name in weight_files(settings):
            if name not in self.weights:
                self.weights[name] = sha256(self.weights_dir / name)[:10]
        return {name: self.weights[name] for name in sorted(weight_files(settings))}

    def check_time(self) -> None:
        """
        Raises:
            OutOfTime: The deadline has passed.
        """
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def loader(
            self,
            settings: Mapping[str, Any],
            is_training: bool,
            device: torch.device,
            held_out: bool = False,
    ) -> DeviceLoader:
        """Batches of a split, which is read once.

        Args:
            settings: Settings of the training.
            is_training: Training split with augmentation, otherwise the validation split.
            device: Device of the batches.
            held_out: The images of the training split that are held out, without augmentation.

        Raises:
            ValueError: There are no images.
        """
        count, holdout = settings['train_images'] if is_training else None, settings['holdout']
        key = (
            settings['data'], settings['img_size'], str(settings['classes']), count, holdout, held_out, is_training,
            device)
        if key not in self._loaders:
            read = _digits if settings['data'] == 'digits' else self._folders
            dataset = read(settings, is_training or held_out)
            if holdout and (is_training or held_out):
                chosen = {i * len(dataset) // holdout for i in range(holdout)}
                dataset = torch.utils.data.Subset(
                    dataset, [i for i in range(len(dataset)) if (i in chosen) == held_out])
            if count is not None:
                dataset = _evenly_spaced(dataset, count)
            self._loaders[key] = DeviceLoader(
                dataset, settings['batch_size'], is_training, device, flip=settings['data'] != 'digits')
        loader = copy.copy(self._loaders[key])
        loader.batch_size = min(settings['batch_size'], len(loader.targets))
        return loader

    def check_images(self, settings: Mapping[str, Any]) -> None:
        """Check the folders of images of a training, before anything is written.

        Raises:
            ValueError: There are no images, more classes than ``num_classes``, or the classes of the splits differ.
        """
        if settings['data'] == 'digits':
            return
        datasets, classes = [], {}
        for is_training in (True, False):
            dataset = self._folders({**settings, 'classes': None}, is_training)
            split = 'train' if is_training else self.val_split
            self.images[split], classes[os.path.join(self.data_dir, split)] = len(dataset), dataset.classes
            datasets.append(dataset)
            found = len(dataset.classes)
            if found > settings['num_classes']:
                raise ValueError(
                    f'Expected at most {settings["num_classes"]} classes, but got {found} in {self.data_dir!r}: pass '
                    f'another --data-dir or --set num_classes={found}.')
        check_same_classes(classes)
        self.images['digest'] = files_digest(self.data_dir, datasets)

    def _folders(self, settings: Mapping[str, Any], is_training: bool):
        split = 'train' if is_training else self.val_split
        dataset = create_search_dataset('', self.data_dir, split, settings['img_size'], is_training, raw=True)
        if settings['classes'] is not None:
            new = {label: i for i, label in enumerate(settings['classes'])}
            dataset.samples = [(path, new[label]) for path, label in dataset.samples if label in new]
        return dataset


def num_classes(settings: Mapping[str, Any]) -> int:
    if settings['data'] == 'digits':
        return 10
    return settings['num_classes'] if settings['classes'] is None else len(settings['classes'])


def _evenly_spaced(dataset, count: int):
    """Evenly spaced images: the datasets are sorted by class or shuffled once."""
    count = min(count, len(dataset))
    return torch.utils.data.Subset(dataset, [i * len(dataset) // count for i in range(count)])


def _digits(settings: Mapping[str, Any], is_training: bool) -> List[Tuple[torch.Tensor, int]]:
    """Scikit-learn's handwritten digits, 1,437 and 360 images of 8 x 8 pixels, resized."""
    part = load_split(seed=0)[0 if is_training else 1]
    pixels = torch.stack([
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(1, *image.size)
        for image in part.images])
    pixels = F.interpolate(pixels.float(), size=settings['img_size'], mode='bilinear').round().byte()
    return [(image.expand(3, -1, -1), int(target)) for image, target in zip(pixels, part.targets)]


class Timed:
    """Loader that raises OutOfTime at the first epoch after the deadline."""

    def __init__(self, loader: DeviceLoader, workspace: Workspace):
        self.loader, self.sampler, self.workspace = loader, loader.sampler, workspace

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        self.workspace.check_time()
        return iter(self.loader)


class Images:
    """Images of a training, with the methods of :class:`timm_rep.utils.data.Images`.

    Args:
        workspace: Workspace with the folders of images.
        settings: Settings of the training.
        device: Device of the batches.
    """

    def __init__(self, workspace: Workspace, settings: Mapping[str, Any], device: torch.device):
        self.device, self.seed, self._workspace = device, settings['seed'], workspace
        self._settings = settings
        self._train = workspace.loader(settings, True, device)
        self._val = workspace.loader(settings, False, device)

    def training(self) -> Timed:
        """Loader of the training split with random crops and flips, until the deadline."""
        return Timed(self._train, self._workspace)

    def validation(self) -> DeviceLoader:
        """Loader of the validation split."""
        return self._val

    def held_out(self) -> DeviceLoader:
        """Loader of the held-out images of the training split."""
        return self._workspace.loader(self._settings, False, self.device, held_out=True)

    def calibration(self, count: int) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        """Batches of ``count`` random images of the training split, without augmentation."""
        order = torch.randperm(len(self._train.targets), generator=torch.Generator().manual_seed(self.seed))
        loader = copy.copy(self._train)
        loader.is_training = False
        loader.sampler = order[:count].tolist()
        return list(loader)
