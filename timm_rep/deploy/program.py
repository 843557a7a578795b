"""What the backends of the quantization have in common."""
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.nn as nn

__all__ = ['Program']


class Program(ABC):
    """A quantized model, compiled by a backend; called as the model."""

    @abstractmethod
    def __call__(self, images: torch.Tensor) -> Any:
        """Compute the outputs for images (N, channels, height, width), float32, on the CPU."""

    @classmethod
    @abstractmethod
    def quantize(
            cls,
            model: nn.Module,
            batches: Sequence[torch.Tensor],
            per_channel: bool,
            calibrator: str,
            percentile: float,
    ) -> 'Program':
        """Quantize a model after its training.

        Args:
            model: Model in eval mode, on the CPU, folded.
            batches: Batches of images (N, channels, height, width), float32, to calibrate with.
            per_channel: A scale for each output channel of a weight, else one for the weight.
            calibrator: Name in ``ACTIVATION_OBSERVERS``.
            percentile: Share of the values that the calibrator 'percentile' covers, in percent.
        """

    @abstractmethod
    def layers(self, images: torch.Tensor) -> Tuple[List[str], Dict[str, str]]:
        """Compile for a batch, and look at what was compiled.

        Returns:
            Names of the layers that run in int8; operators of the other products by name of their module.
        """

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write a file that :meth:`read` reads, without pickled values; beside it, weights that it cannot hold."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> 'Program':
        """Read what :meth:`write` wrote.

        Raises:
            OSError: There is no such file.
            RuntimeError: The file cannot be read, or holds pickled values.
        """
