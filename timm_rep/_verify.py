"""Numerical check that folding keeps the outputs of a model."""
import copy
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten

from timm_rep.convert import folded_copy
from timm_rep.utils.profiling import model_input_size

from ._causes import find_causes

# largest folded error that passes, in multiples of the rounding error of the unfolded model
_FACTOR = 16
# largest batch of images in memory with the outputs of a layer
_MAX_IMAGES = 64


@dataclass(frozen=True)
class Difference:
    """Difference of the outputs of two models on the same images.

    Attributes:
        images: Number of images.
        max_difference: Largest absolute difference.
        relative_rms: Root mean square of the difference, divided by the root mean square of the expected outputs.
    """
    images: int
    max_difference: float
    relative_rms: float


def compare(expected: Any, outputs: Any, images: int) -> Difference:
    """Compare the outputs of two models, tensors or nestings of tensors in the same order, for a number of images."""
    expected, outputs = _flat(expected), _flat(outputs)
    if expected.shape != outputs.shape:
        raise ValueError(f'Expected outputs of {len(expected)} values, but got {len(outputs)}.')
    difference = outputs - expected
    return Difference(
        images=images,
        max_difference=difference.abs().max().item(),
        relative_rms=_ratio(difference.square().sum(), expected.square().sum()),
    )


@dataclass(frozen=True)
class Verification:
    """Comparison of a folded and an unfolded model, in eval mode on the same images.

    Errors are root mean squares of the difference from the unfolded model in float64, relative to its values.

    Attributes:
        images: Number of images.
        max_difference: Largest absolute difference of the outputs, folded and unfolded in float32.
        relative_rms: Root mean square of that difference, relative to the unfolded outputs.
        same_top1: Share of the images with the same largest output, 0 to 1.
        unfolded_error: Error of the unfolded outputs in float32, due to rounding alone.
        folded_error: Error of the folded outputs in float32.
        folded: Number of folded layers, 0 if the model has nothing to fold.
        layers: Errors (unfolded, folded) of the outputs of each folded layer by name, in the order of execution.
        tolerance: Largest folded error that passes, for outputs and layers. None: 16 times the unfolded error of the
            same outputs, at least 16 * 2 ** -23. Folding rounds each weight once more and sums in another order, so
            its error is of the size of rounding, which the unfolded error measures for this model and these images.
        causes: Conditions under which the folded model differs from the given one, with remedies: 'train mode',
            'BatchNorm statistics' (only with real images), 'float16 overflow', 'TF32'. The comparison itself
            excludes them.
    """
    images: int
    max_difference: float = 0.
    relative_rms: float = 0.
    same_top1: float = 1.
    unfolded_error: float = 0.
    folded_error: float = 0.
    folded: int = 0
    layers: Dict[str, Tuple[float, float]] = field(default_factory=dict)
    tolerance: Optional[float] = None
    causes: Dict[str, str] = field(default_factory=dict)

    def _limit(self, unfolded_error: float) -> float:
        if self.tolerance is not None:
            return self.tolerance
        return _FACTOR * max(torch.finfo(torch.float32).eps, unfolded_error)

    @property
    def first_difference(self) -> Optional[str]:
        """Name of the first folded layer in the order of execution whose error exceeds the tolerance, or None."""
        return next((
            name for name, (unfolded, folded) in self.layers.items() if not folded <= self._limit(unfolded)), None)

    @property
    def passed(self) -> bool:
        """Whether the errors of the outputs and of all folded layers are at most the tolerance, and not NaN."""
        return self.folded_error <= self._limit(self.unfolded_error) and self.first_difference is None

    def __str__(self) -> str:
        if not self.folded:
            return 'nothing to fold'
        lines = [
            f'{self.folded} folded layers, {self.images} images',
            f'folded - unfolded: at most {self.max_difference:.2g}, relative rms {self.relative_rms:.2g}, '
            f'top-1 equal for {self.same_top1:.1%}',
            f'error against float64: unfolded {self.unfolded_error:.2g}, folded {self.folded_error:.2g}, '
            f'tolerance {self._limit(self.unfolded_error):.2g}',
        ]
        first = self.first_difference
        if first is not None:
            unfolded, folded = self.layers[first]
            lines.append(
                f'first layer that differs: {first or "the model"}, error against float64: unfolded {unfolded:.2g}, '
                f'folded {folded:.2g}, tolerance {self._limit(unfolded):.2g}')
        lines += [f'{name}: {text}' for name, text in self.causes.items()]
        return '\n'.join([*lines, 'passed' if self.passed else 'FAILED'])


@torch.no_grad()
def verify(
        model: nn.Module,
        images: Optional[torch.Tensor] = None,
        tolerance: Optional[float] = None,
) -> Verification:
    """Compare a model with its folded form, in eval mode and float32 on the CPU, and both with float64.

    Folds a copy by :func:`timm_rep.convert.folded_copy`: models of this package,
    of :func:`timm_rep.convert_to_repa`, and timm's own (RepVGG, MobileOne, FastViT, RepViT, ...). Also looks for
    conditions under which the folded model differs from the given one elsewhere.

    Args:
        model: Unfolded model. Not modified.
        images: Images (N, channels, height, width), normalized as the model expects. Default: 8 images of normally
            distributed values, of the model's input size.
        tolerance: Largest relative error that passes, see :class:`Verification`. Default: a multiple of the rounding
            error of the unfolded model.

    Returns:
        The result; ``print(result)`` shows it, ``result.passed`` and ``result.first_difference`` are the verdict.

    Raises:
        ValueError: The images are not finite or not (N, channels, height, width), the tolerance is negative, the
            outputs of a layer of the unfolded model are not finite, or a layer cannot be folded.
    """
    if tolerance is not None:
        check_tolerance(tolerance)
    are_real = images is not None
    if images is None:
        if getattr(model, 'pretrained_cfg', None) is None:
            raise ValueError(
                f'Expected a pretrained_cfg with an input size, but {type(model).__name__} has none: pass images.')
        images = torch.randn(8, *model_input_size(model), generator=torch.Generator().manual_seed(0))
    check_images(images)
    images = images.detach().cpu()
    unfolded = copy.deepcopy(model).cpu().float().eval()
    check_finite(unfolded, images[:1].float())
    folded = folded_copy(unfolded)
    names = _folded_layers(unfolded, folded)
    if not names:
        return Verification(len(images))

    reference = copy.deepcopy(unfolded).double()
    sums: Dict[Optional[str], torch.Tensor] = {}  # sums of squares of each layer and, under None, of the outputs
    largest, same_top1 = torch.zeros((), dtype=torch.float64), 0
    for image in images.split(1):  # one at a time, since the outputs of all layers are held
        expected = _record(reference, names, image.double())
        before, after = (_record(net, names, image.float()) for net in (unfolded, folded))
        for name, y in expected.items():
            u, f = before[name], after[name]
            squares = torch.stack([x.square().sum() for x in (y, u, u - y, f - y, f - u)])
            sums[name] = sums[name] + squares if name in sums else squares
        u, f = before[None], after[None]
        largest = torch.maximum(largest, (f - u).abs().max())
        same_top1 += int(u.argmax() == f.argmax())
    outputs = sums.pop(None)
    return Verification(
        images=len(images),
        max_difference=largest.item(),
        relative_rms=_ratio(outputs[4], outputs[1]),
        same_top1=same_top1 / len(images),
        unfolded_error=_ratio(outputs[2], outputs[0]),
        folded_error=_ratio(outputs[3], outputs[0]),
        folded=len(names),
        layers={name: (_ratio(x[2], x[0]), _ratio(x[3], x[0])) for name, x in sums.items() if name is not None},
        tolerance=tolerance,
        causes=find_causes(model, unfolded, folded, images[:_MAX_IMAGES].float(), are_real),
    )


def _ratio(squares: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative root mean square from two sums of squares, 0 if both are 0."""
    return (squares / reference.clamp(min=torch.finfo(torch.float64).tiny)).sqrt().item()


def _flat(outputs: Any) -> torch.Tensor:
    """All values of a nesting of tensors as a new float64 vector."""
    tensors = [x for x in tree_flatten(outputs)[0] if isinstance(x, torch.Tensor)]
    vectors = [x.flatten().to(torch.float64, copy=True) for x in tensors]  # later layers may work in place
    return torch.cat(vectors) if vectors else torch.empty(0)


def _record(model: nn.Module, names: List[str], x: torch.Tensor) -> Dict[Optional[str], torch.Tensor]:
    """Outputs of some modules in the order of execution and, under None, of the model, as vectors."""
    found: Dict[Optional[str], List[torch.Tensor]] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, y, name=name: found.setdefault(name, []).append(_flat(y)))
        for name in names
    ]
    try:
        found[None] = [_flat(model(x))]
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(outputs) for name, outputs in found.items()}


def check_finite(model: nn.Module, x: torch.Tensor) -> None:
    """Raise ValueError, with the name of the first such module, if outputs of a model in eval mode are not finite."""
    try:
        outputs = model(x)
    except (AssertionError, RuntimeError) as e:
        reason = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise ValueError(
            f'Expected images that {type(model).__name__} takes, but got size {tuple(x.shape[1:])}: {reason}') from e
    if _flat(outputs).isfinite().all():
        return
    for name, y in _record(model, [name for name, _ in model.named_modules() if name], x).items():
        if not y.isfinite().all():
            raise ValueError(
                f'The outputs of {name} must be finite, but hold NaN or infinite values before any folding: check the '
                'images, and the weights up to it.')


def check_images(images: Any) -> None:
    """Raise ValueError unless images are a finite tensor (N, channels, height, width) with N >= 1."""
    if not isinstance(images, torch.Tensor):
        raise ValueError(f'images must be a tensor (N, channels, height, width), got {type(images).__name__}.')
    if images.ndim != 4 or not len(images) or not images.isfinite().all():
        raise ValueError(f'images must be finite, (N, channels, height, width), got {tuple(images.shape)}.')


def check_tolerance(tolerance: Any) -> None:
    """Raise ValueError unless a tolerance is a number >= 0."""
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f'tolerance must be a number >= 0, got {tolerance!r}.')


def _folded_layers(unfolded: nn.Module, folded: nn.Module) -> List[str]:
    """Names of the outermost modules that folding replaced or changed."""
    def parts(module: nn.Module) -> Any:
        tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
        return type(module), [(name, x.shape) for name, x in tensors], [name for name, _ in module.named_children()]

    after = dict(folded.named_modules())
    names: List[str] = []
    for name, module in unfolded.named_modules():
        inside = any(not outer or name.startswith(f'{outer}.') for outer in names)
        if not inside and parts(module) != parts(after[name]):
            names.append(name)
    return names
