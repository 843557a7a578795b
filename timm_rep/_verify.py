"""Numerical check that folding keeps the outputs of a model."""
import copy
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
from timm.utils import unwrap_model

from timm_rep.convert import folded_copy
from timm_rep.convert._reparameterize import folds_itself
from timm_rep.utils.compare import check_finite, check_images, check_tolerance, record_outputs, relative_rms
from timm_rep.utils.profiling import model_input_size

from ._causes import find_causes

# largest folded error that passes, in multiples of the rounding error of the unfolded model
_FACTOR = 16
# most images that find_causes() runs as one batch
_MAX_IMAGES = 64


@dataclass(frozen=True)
class Verification:
    """Comparison of a folded and an unfolded model, in eval mode on the same images.

    Errors are root mean squares of the difference from the unfolded model in float64, relative to its values.

    Attributes:
        images: Number of images.
        max_difference: Largest absolute difference of the outputs, folded and unfolded in float32.
        relative_rms: Root mean square of that difference, relative to the unfolded outputs.
        top1_agreement: Fraction of the images with equal top-1 predictions, 0 to 1.
        unfolded_error: Error of the unfolded outputs in float32, due to rounding alone.
        folded_error: Error of the folded outputs in float32.
        folded: Number of folded layers, 0 if the model has nothing to fold.
        layers: Errors (unfolded, folded) of the outputs of each folded layer by name, in the order of execution.
        tolerance: Largest folded error that passes, for outputs and layers. None: 16 times the unfolded error of the
            same outputs, at least 16 * 2 ** -23. Folding rounds each weight once more and sums in a different order, so
            its error should be comparable to the rounding error, which ``unfolded_error`` measures for this model and
            these images.
        causes: Conditions that make the folded model differ from the given one, with remedies, by name: 'train mode',
            'BatchNorm statistics' (only with real images), 'float16 overflow', 'TF32'. The comparison itself
            excludes them.
    """
    images: int
    max_difference: float = 0.
    relative_rms: float = 0.
    top1_agreement: float = 1.
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
            f'top-1 equal for {self.top1_agreement:.1%}',
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
    conditions that make the folded model differ from the given one elsewhere.

    Args:
        model: Unfolded model, also compiled. Not modified.
        images: Images (N, channels, height, width) of a floating-point dtype, normalized as the model expects; compared
            in float32. Default: 8 images of normally distributed values, of the model's input size.
        tolerance: Largest relative error that passes, see :class:`Verification`. Default: a multiple of the rounding
            error of the unfolded model.

    Returns:
        The result; ``print(result)`` shows it, ``result.passed`` and ``result.first_difference`` are the verdict.

    Raises:
        TypeError: images is not a tensor.
        ValueError: The images are not finite or not (N, channels, height, width), or not given for a model without a
            pretrained_cfg; the model is on the meta device; the tolerance is negative; the outputs of a layer of the
            unfolded model are not finite; or a layer cannot be folded.
    """
    if tolerance is not None:
        check_tolerance(tolerance)
    model = unwrap_model(model)
    has_real_images = images is not None
    if images is None:
        if getattr(model, 'pretrained_cfg', None) is None:
            raise ValueError(
                f'Expected a pretrained_cfg with an input size, but {type(model).__name__} has none: pass images.')
        images = torch.randn(8, *model_input_size(model), generator=torch.Generator().manual_seed(0), device='cpu')
    check_images(images)
    images = images.detach().cpu()
    if any(x.is_meta for x in model.state_dict().values()):
        raise ValueError(f'Expected weights, but {type(model).__name__} is on the meta device: load them first.')
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
        expected = record_outputs(reference, names, image.double())
        before, after = (record_outputs(net, names, image.float()) for net in (unfolded, folded))
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
        relative_rms=relative_rms(outputs[4], outputs[1]),
        top1_agreement=same_top1 / len(images),
        unfolded_error=relative_rms(outputs[2], outputs[0]),
        folded_error=relative_rms(outputs[3], outputs[0]),
        folded=len(names),
        layers={
            name: (relative_rms(x[2], x[0]), relative_rms(x[3], x[0])) for name, x in sums.items() if name is not None},
        tolerance=tolerance,
        causes=find_causes(model, unfolded, folded, images[:_MAX_IMAGES].float(), has_real_images),
    )


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
            names.append(_folding_module(unfolded, name))
    return names


def _folding_module(model: nn.Module, name: str) -> str:
    """Name of the outermost block around a module that folds itself, maybe a norm into other layers; or its own."""
    parts = name.split('.')
    for outer in ('.'.join(parts[:n]) for n in range(1, len(parts))):
        block = model.get_submodule(outer)
        is_model = hasattr(block, 'pretrained_cfg')
        if not is_model and folds_itself(block):
            return outer
    return name
