"""Interface of the int8 backends."""
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

__all__ = ['Program', 'QuantizationSettings', 'module_name', 'output_structure', 'restore_structure']


class QuantizationSettings(NamedTuple):
    """Rounding of weights and activations.

    Attributes:
        per_channel: One scale for each output channel of a weight, instead of one for the weight.
        calibrator: Key of ``ACTIVATION_OBSERVERS``.
        percentile: Percentage of values covered by the calibrator 'percentile'.
    """
    per_channel: bool
    calibrator: str
    percentile: float


class Program(ABC):
    """A quantized model compiled by a backend; called like the model."""

    @abstractmethod
    def __call__(self, images: torch.Tensor) -> Any:
        """Compute the outputs for images (N, channels, height, width), float32, on the CPU."""

    @classmethod
    @abstractmethod
    def quantize(
            cls,
            model: nn.Module,
            batches: Sequence[torch.Tensor],
            settings: QuantizationSettings,
            keep_float: Sequence[str] = (),
    ) -> 'Program':
        """Post-training quantization.

        Args:
            model: Folded model in eval mode on the CPU.
            batches: Calibration batches of images (N, channels, height, width), float32.
            settings: Rounding of weights and activations.
            keep_float: Names of layers that are not quantized.
        """

    @abstractmethod
    def layers(self, images: torch.Tensor) -> Tuple[List[str], Dict[str, str]]:
        """Layers by precision, read from the program compiled for a batch.

        Returns:
            Names of the layers computed in int8, and operators of the other products by name of their module.
        """

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write a file for :meth:`read`, without pickled values, and a second one for weights it cannot hold."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> 'Program':
        """Read what :meth:`write` wrote.

        Raises:
            OSError: The file does not exist.
            RuntimeError: The file cannot be read, or holds pickled values.
        """


@torch.no_grad()
def output_structure(model: nn.Module, images: torch.Tensor) -> str:
    """Structure of the outputs for the first image, as JSON for :func:`restore_structure`; '' for a single tensor."""
    outputs = model(images[:1])
    leaves, structure = tree_flatten(outputs)
    others = {type(x).__name__ for x in leaves if not isinstance(x, torch.Tensor)}
    if others:
        raise TypeError(
            f'Expected a model whose outputs are tensors in lists, tuples and dicts, but got {", ".join(others)}.')
    return '' if isinstance(outputs, torch.Tensor) else treespec_dumps(structure)


def restore_structure(outputs: Any, structure: str) -> Any:
    """Outputs of a runtime, a tensor or a list of tensors, in the structure of :func:`output_structure`."""
    if not structure:
        return outputs
    return tree_unflatten(outputs if isinstance(outputs, list) else [outputs], treespec_loads(structure))


def module_name(node: torch.fx.Node) -> str:
    """Name of the innermost module that a node was traced in, '' outside of modules."""
    return next((path for path, _ in reversed(node.meta.get('nn_module_stack', {}).values())), '')
