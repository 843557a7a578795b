"""Error that int8 adds in each layer, and the layers to keep in float. Imported only with torchao installed."""
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
import torch.nn as nn

from timm_rep.utils.compare import compare
from timm_rep.utils.training import evaluate

from .observers import create_observer
from .program import QuantizationSettings, layers_with_weights, operator_name, trace

_LAYERS = ('conv1d', 'conv2d', 'linear')


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph with another function in place of the operators of some nodes, which it gets as first argument."""

    def __init__(self, graph: torch.fx.GraphModule, nodes: Iterable[torch.fx.Node], function: Callable[..., Any]):
        super().__init__(graph)
        self.nodes, self.function = {*nodes}, function

    def run_node(self, n: torch.fx.Node) -> Any:
        if n not in self.nodes:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.function(n, *args, **kwargs)


class RoundedModel(nn.Module):
    """A folded model with inputs and weights of some layers rounded to int8 values.

    Attributes:
        names: Names of the convolutions and linear layers, in the order of execution.
        rounded: Names of the layers that are rounded; to be set.
    """

    def __init__(self, model: nn.Module, batches: Sequence[torch.Tensor], settings: QuantizationSettings):
        super().__init__()
        graph = trace(model, batches[0]).module()
        self._layers = {
            node: name for node, name in layers_with_weights(graph).items() if operator_name(node) in _LAYERS}
        self.names: List[str] = list(dict.fromkeys(self._layers.values()))
        self.rounded: Set[str] = set()
        self._per_channel = settings.per_channel
        self._interpreter = _Interpreter(graph, self._layers, self._layer)
        self._observers = {name: create_observer(settings.calibrator, settings.percentile) for name in self.names}
        for images in batches:
            self(images)
        self._inputs = {name: observer.calculate_qparams() for name, observer in self._observers.items()}
        self._observers = {}

    def forward(self, images: torch.Tensor) -> Any:
        return self._interpreter.run(images)

    def _layer(
            self, node: torch.fx.Node, x: torch.Tensor, weight: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        name = self._layers[node]
        if name in self._observers:
            self._observers[name](x)
        if name in self.rounded:
            scale, zero = self._inputs[name]
            x = ((x * (1 / scale)).round() + zero).clamp(0, 255).sub(zero).mul(scale)
            weight = self._round_weight(weight)
        return node.target(x, weight, *others, **kwargs)

    def _round_weight(self, weight: torch.Tensor) -> torch.Tensor:
        largest = (
            weight.flatten(1).abs().amax(1) if self._per_channel else weight.abs().max().expand(len(weight)))
        steps = (largest / 127.5).clamp(min=torch.finfo(torch.float32).tiny)
        steps = steps.unflatten(0, (-1, *[1] * (weight.ndim - 1)))
        # torch multiplies by the inverse, and the largest weight of a channel is a tie
        return (weight * (1 / steps)).round().clamp(-128, 127) * steps


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
