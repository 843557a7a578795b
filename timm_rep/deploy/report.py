"""Report of a quantization, and the file that stores it with the quantized model."""
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from timm_rep.utils.files import Sidecar

from .formats import BACKENDS

REPORT_NAME = 'quantization.json'
CALIBRATORS = tuple(dict.fromkeys(name for backend in BACKENDS.values() for name in backend.calibrators))


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy of the float and the quantized model, in percent, and the number of images."""
    fp32: float
    int8: float
    images: int

    @property
    def loss(self) -> float:
        """Loss of accuracy in percentage points."""
        return round(self.fp32 - self.int8, 2)


@dataclass(frozen=True)
class QuantizationReport(Sidecar):
    """Settings and outcome of a quantization.

    Attributes:
        backend: Key of ``timm_rep.deploy.BACKENDS``.
        per_channel: Whether each output channel of a weight has its own scale.
        calibrator: Method that chose the ranges of activations; quantization-aware training takes moving averages of
            'minmax'.
        percentile: Percentage of values covered by the calibrator 'percentile'.
        images: Number of calibration images.
        qat_epochs: Epochs of quantization-aware training, 0 for none.
        input_size: (channels, height, width) of the images that the quantized model takes.
        int8_layers: Names of the layers that the compiled graph computes in int8, in the order of execution.
        float_layers: Operators of the convolutions and matrix products computed in float, by name of the layer or of
            the module around them.
        relative_rms: Root mean square of the difference between quantized and float outputs, relative to the float
            outputs' own, on the first batch of calibration images.
        accuracy: Accuracy before and after, if measured.
        layers: Error that each layer adds alone, as ``relative_rms``, by name, the most sensitive first; if diagnosed.
        equalized: Number of pairs of consecutive layers whose ranges of weights were equalized, None if not asked for.
        milliseconds: Time of the first batch with the folded float model, in eager mode, and with the quantized model,
            by 'fp32' and 'int8'.
        machine: Processor.
        versions: Versions of the packages.
    """
    backend: str
    per_channel: bool
    calibrator: str
    percentile: float
    images: int
    qat_epochs: int
    input_size: Tuple[int, int, int]
    int8_layers: List[str]
    float_layers: Dict[str, str]
    relative_rms: float
    accuracy: Optional[Accuracy] = None
    layers: Optional[Dict[str, float]] = None
    equalized: Optional[int] = None
    milliseconds: Optional[Dict[str, float]] = None
    machine: str = ''
    versions: Dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in ('backend', BACKENDS), ('calibrator', CALIBRATORS):
            if getattr(self, name) not in known:
                raise ValueError(f'{name} must be one of {", ".join(known)}, got {getattr(self, name)!r}.')

    def __str__(self) -> str:
        calibrator = f'percentile {self.percentile:g}' if self.calibrator == 'percentile' else self.calibrator
        training = f', {self.qat_epochs} epochs of training' if self.qat_epochs else ''
        lines = [
            f'{self.backend}, weights per {"channel" if self.per_channel else "tensor"}, {calibrator}, '
            f'{self.images} calibration images{training}',
            *([f'ranges equalized: {self.equalized} pairs of layers'] if self.equalized is not None else []),
            f'int8: {len(self.int8_layers)} convolutions and linear layers',
            f'float32: {len(self.float_layers) or "no"} convolutions and matrix products',
            *(f'  {name}: {operator}' for name, operator in self.float_layers.items()),
            f'relative rms difference of the outputs: {self.relative_rms:.2g}',
        ]
        if self.accuracy:
            before, after = self.accuracy.fp32, self.accuracy.int8
            lines.append(
                f'top-1 accuracy: {before:.2f}% before, {after:.2f}% after ({after - before:+.2f}), '
                f'{self.accuracy.images} images')
        if self.layers:
            lines.append('most sensitive layers (relative rms difference with only this layer in int8):')
            lines += [f'  {name}: {error:.2g}' for name, error in list(self.layers.items())[:5]]
        return '\n'.join(lines)


def is_quantized_file(path: Path) -> bool:
    """Whether a file is the program of the quantized model of its folder."""
    try:
        return path.name in BACKENDS[read_report(path.parent).backend].files
    except (OSError, RuntimeError):  # there is no report, or it is damaged
        return False


def quantized_files(folder: Path) -> List[Path]:
    """Files of the quantized model in a folder, of every backend; none without a report.

    Raises:
        RuntimeError: The report cannot be read.
    """
    if not (folder / REPORT_NAME).is_file():
        return []
    model = folder / BACKENDS[read_report(folder).backend].files[0]
    others = [folder / name for backend in BACKENDS.values() for name in backend.files]
    return list(dict.fromkeys([folder / REPORT_NAME, model, *(path for path in others if path.is_file())]))


def read_report(folder: Path) -> QuantizationReport:
    """Read quantization.json from a folder.

    Raises:
        OSError: The file does not exist.
        RuntimeError: It was not written by :meth:`Quantized.save`.
    """
    return QuantizationReport.from_json(folder / REPORT_NAME)
