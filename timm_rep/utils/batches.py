"""Batches of loaders: their images and labels."""
from typing import Any, Iterable, Iterator, List, Mapping, Protocol, Tuple

import torch


class Loader(Protocol):
    """Batches, and their number: a DataLoader or a list."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


def batches_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the batches of a loader; TypeError for a path, a tensor or anything else without batches."""
    if isinstance(loader, (str, bytes, torch.Tensor)) or not hasattr(loader, '__iter__'):
        found = f'a tensor {tuple(loader.shape)}' if isinstance(loader, torch.Tensor) else f'{loader!r:.100}'
        raise TypeError(
            'Expected an iterable of batches of images (N, C, H, W), such as a DataLoader or a list of tensors, but '
            f'got {found}.')
    return iter(loader)


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
