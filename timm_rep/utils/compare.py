"""Comparison of the outputs of models."""
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves  # torch has no public function for nested outputs


@dataclass(frozen=True)
class Difference:
    """Difference of the outputs of two models on the same images.

    Attributes:
        max_difference: Largest absolute difference.
        relative_rms: Root mean square of the difference, divided by the root mean square of the expected outputs.
    """
    max_difference: float
    relative_rms: float


def compare(expected: Any, outputs: Any) -> Difference:
    """Compare the outputs of two models, tensors or nested tensors in the same order.

    Raises ValueError if the numbers of values differ.
    """
    expected, outputs = values_of(expected), values_of(outputs)
    if expected.shape != outputs.shape:
        raise ValueError(f'Expected outputs of {len(expected)} values, but got {len(outputs)}.')
    difference = outputs - expected
    return Difference(
        max_difference=difference.abs().max().item() if len(expected) else 0.,
        relative_rms=relative_rms(difference.square().sum(), expected.square().sum()),
    )


def relative_rms(squares: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative root mean square from two sums of squares, 0 if both are 0."""
    return (squares / reference.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().item()


def values_of(outputs: Any) -> torch.Tensor:
    """All values of nested tensors as a new float64 vector."""
    tensors = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    vectors = [x.flatten().to(torch.float64, copy=True) for x in tensors]  # later layers may work in place
    return torch.cat(vectors) if vectors else torch.empty(0, dtype=torch.float64)


def record_outputs(model: nn.Module, names: Sequence[str], x: torch.Tensor) -> Dict[Optional[str], torch.Tensor]:
    """Outputs of some modules in the order of execution and, under None, of the model, as vectors."""
    found: Dict[Optional[str], List[torch.Tensor]] = {}
    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(
                lambda module, args, y, name=name: found.setdefault(name, []).append(values_of(y))))
        found[None] = [values_of(model(x))]
    return {name: torch.cat(outputs) for name, outputs in found.items()}


def name_of_not_finite(model: nn.Module) -> Optional[str]:
    """Name of the first weight or running statistic of a model that is not finite, None if there is none."""
    return next((name for name, value in model.state_dict().items() if not value.isfinite().all()), None)


def check_finite(model: nn.Module, x: torch.Tensor) -> None:
    """Raise ValueError, with the name of the first such module, if outputs of a model in eval mode are not finite."""
    try:
        outputs = model(x)
    except OSError:
        raise
    except Exception as e:  # models raise many types
        reason = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise ValueError(
            f'{type(model).__name__} cannot process images of size {tuple(x.shape[1:])}: {reason}') from e
    if values_of(outputs).isfinite().all():
        return
    for name, y in record_outputs(model, [name for name, _ in model.named_modules() if name], x).items():
        if not y.isfinite().all():
            raise ValueError(
                f'The outputs of {name} must be finite, but hold NaN or infinite values before any folding: check the '
                'images, and the weights up to it.')


def check_images(images: Any) -> None:
    """Raise TypeError or ValueError unless images are a finite tensor (N, channels, height, width) with N >= 1."""
    if not isinstance(images, torch.Tensor):
        raise TypeError(f'images must be a tensor (N, channels, height, width), got {type(images).__name__}.')
    if not images.is_floating_point():
        raise TypeError(
            f'images must be floating-point, got {images.dtype}: normalize them as the model expects, with '
            'timm.data.create_transform.')
    if images.ndim != 4 or not len(images):
        raise ValueError(f'images must be (N, channels, height, width), N >= 1, got {tuple(images.shape)}.')
    if not images.isfinite().all():
        raise ValueError('images must be finite, got NaN or infinite values: check how they are read and normalized.')


def check_tolerance(tolerance: Any) -> None:
    """Raise ValueError unless a tolerance is a finite number >= 0."""
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        raise ValueError(f'tolerance must be a finite number >= 0, got {tolerance!r}.')
