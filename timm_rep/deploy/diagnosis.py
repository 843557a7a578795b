"""Error that int8 adds in each layer, and the layers to keep in float. Imported only with torchao installed."""
import copy
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
import torch.nn as nn

from timm_rep.utils.compare import compare
from timm_rep.utils.training import evaluate

from .observers import create_observer
from .program import QuantizationSettings

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear)


class RoundedModel(nn.Module):
    """A copy of a folded model with inputs and weights of some layers rounded to int8 values.

    Attributes:
        names: Names of the convolutions and linear layers, in the order of execution.
        rounded: Names of the layers that are rounded; to be set.
    """

    def __init__(self, model: nn.Module, batches: Sequence[torch.Tensor], settings: QuantizationSettings):
        super().__init__()
        self.model = copy.deepcopy(model)
        self.rounded: Set[str] = set()
        layers = {name: module for name, module in self.model.named_modules() if isinstance(module, _LAYERS)}
        observers: Dict[str, nn.Module] = {}

        def observe(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any) -> None:
                if name not in observers:  # in the order of execution
                    observers[name] = create_observer(settings.calibrator, settings.percentile)
                observers[name](args[0])
            return hook

        handles = [layer.register_forward_pre_hook(observe(name)) for name, layer in layers.items()]
        for images in batches:
            self.model(images)
        for handle in handles:
            handle.remove()
        self.names: List[str] = list(observers)
        for name, observer in observers.items():
            scale, zero = observer.calculate_qparams()
            self._round_inputs_and_weight(name, layers[name], scale, zero, settings.per_channel)

    def _round_inputs_and_weight(
            self, name: str, layer: nn.Module, scale: torch.Tensor, zero: torch.Tensor, per_channel: bool) -> None:
        weight = layer.weight.detach()
        largest = weight.flatten(1).abs().amax(1) if per_channel else weight.abs().max().expand(len(weight))
        steps = (largest / 127.5).clamp(min=torch.finfo(torch.float32).tiny)
        steps = steps.unflatten(0, (-1, *[1] * (weight.ndim - 1)))
        # torch multiplies by the inverse, and the largest weight of a channel is a tie
        rounded = (weight * (1 / steps)).round().clamp(-128, 127) * steps

        def before(layer: nn.Module, args: Any) -> Any:
            layer.weight.data = rounded if name in self.rounded else weight
            if name in self.rounded:
                return ((args[0] * (1 / scale)).round() + zero).clamp(0, 255).sub(zero).mul(scale), *args[1:]
            return None

        layer.register_forward_pre_hook(before)

    def forward(self, images: torch.Tensor) -> Any:
        return self.model(images)


def layer_errors(model: RoundedModel, images: torch.Tensor) -> Dict[str, float]:
    """Relative root mean square of the difference that each layer adds alone, by name, the largest first."""
    model.rounded = set()
    expected = model(images)
    errors = {}
    for name in model.names:
        model.rounded = {name}
        errors[name] = compare(expected, model(images)).relative_rms
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


@torch.no_grad()
def simulation_passes(
        simulation: RoundedModel,
        expected: Any,
        images: torch.Tensor,
        validation_loader: Optional[Iterable[Any]],
        accuracy: Optional[Tuple[float, int]],
        limits: Tuple[Optional[float], Optional[float]],
        kept: Sequence[str],
) -> bool:
    """Whether a simulation keeps the limits of the error and of the loss of accuracy with these layers in float."""
    max_error, max_accuracy_loss = limits
    simulation.rounded = {*simulation.names}.difference(kept)
    if max_error is not None and not compare(expected, simulation(images)).relative_rms <= max_error:
        return False
    return max_accuracy_loss is None or accuracy is None or validation_loader is None or (
        evaluate(simulation, validation_loader, torch.device('cpu'))[1] >= accuracy[0] - max_accuracy_loss)


def fewest_to_keep(names: Sequence[str], passes: Callable[[List[str]], bool], least: int = 0) -> List[str]:
    """The shortest prefix of ``names``, of at least ``least`` names, that passes; found by bisection.

    ``passes`` is assumed to become true, and stay so, as more layers stay in float; if it never does, all are returned.
    """
    low, high = least, len(names)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(list(names[:middle])) else (middle + 1, high)
    return list(names[:low])
