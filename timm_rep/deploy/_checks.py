"""Checks of the arguments of a quantization."""
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn

from timm_rep.utils.batches import batches_of, labelled_images, take_images
from timm_rep.utils.training import evaluate

from ._export import check_model


def check_float_model(model: nn.Module) -> None:
    """Raise TypeError or ValueError unless a model is in float32, in eval mode and on the CPU."""
    check_model(model)
    name = type(model).__name__
    if any(module.training for module in model.modules()):
        raise ValueError(f'{name} must be in eval mode: call model.eval() first.')
    devices = {str(x.device) for x in model.state_dict().values()} - {'cpu'}
    if devices:
        raise ValueError(f'{name} must be on the CPU, got {", ".join(sorted(devices))}: call model.cpu().')


def read_images(loader: Iterable[Any], count: int) -> List[torch.Tensor]:
    """Calibration batches of images, float32; ValueError unless they are finite and of one size."""
    batches = [images.detach().float().cpu() for images in take_images(loader, count)]
    for images in batches:
        if images.shape[1:] != batches[0].shape[1:]:
            raise ValueError(
                f'Calibration images must be of one size, got {tuple(images.shape)} and, in the first batch, '
                f'{tuple(batches[0].shape)}.')
        if not images.isfinite().all():
            raise ValueError('Calibration images must be finite, got NaN or infinity.')
    return batches


def check_keep_float(
        keep_float: Any,
        max_error: Optional[float],
        max_accuracy_loss: Optional[float],
        validation_loader: Optional[Iterable[Any]],
) -> None:
    """Raise ValueError unless the layers that stay in float and the limits of errors fit together."""
    limits = {'max_error': max_error, 'max_accuracy_loss': max_accuracy_loss}
    if not isinstance(keep_float, Iterable) or (isinstance(keep_float, str) and keep_float != 'auto'):
        raise ValueError(f"keep_float must be a list of names of layers, or 'auto', got {keep_float!r}.")
    if (keep_float == 'auto') != any(x is not None for x in limits.values()):
        raise ValueError(
            "keep_float='auto' and one of max_error and max_accuracy_loss must be given together, got "
            f'keep_float={keep_float!r}, {", ".join(f"{name}={x!r}" for name, x in limits.items())}.')
    for name, x in limits.items():
        if x is not None and (not isinstance(x, (int, float)) or not x >= 0):
            raise ValueError(f'{name} must be a number >= 0, got {x!r}.')
    if max_accuracy_loss is not None and validation_loader is None:
        raise ValueError('validation_loader must be given with max_accuracy_loss, got None.')


def check_layers(keep_float: Iterable[str], layers: Sequence[str]) -> None:
    """Raise ValueError unless names are among those of convolutions and linear layers."""
    for name in keep_float:
        if name not in layers:
            inside = [layer for layer in layers if layer.startswith(f'{name}.' if name else '')]
            raise ValueError(
                f'keep_float must be names of convolutions and linear layers of the folded model, got {name!r}'
                + (f', which has {", ".join(inside)}.' if inside else '.'))


def float_accuracy(
        model: nn.Module,
        loader: Optional[Iterable[Any]],
        size: Sequence[int],
) -> Optional[Tuple[float, int]]:
    """Accuracy of the float model in percent, and number of images; measured before any work."""
    if loader is None:
        return None
    if isinstance(loader, Iterator):
        raise TypeError('validation_loader must be iterable twice, before and after, got an iterator: pass a loader.')
    found = []

    def batches() -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in map(labelled_images, batches_of(loader)):
            if images.shape[1:] != size or images.dtype != torch.float32 or not images.isfinite().all():
                raise ValueError(
                    f'validation_loader must have finite images in float32 of the calibrated size {tuple(size)}, got '
                    f'{tuple(images.shape[1:])} in {images.dtype}.')
            found.append(labels)
            yield images, labels

    logits, top1 = evaluate(model, batches(), torch.device('cpu'))
    labels, classes = torch.cat(found), logits.shape[1]
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f'validation_loader must have labels from 0 to {classes - 1}, got {labels.min().item()} to '
            f'{labels.max().item()}: labels are indices of the classes of the model.')
    return top1, len(logits)
