"""What a quantization did, as data and as text, and the file that keeps it beside the quantized model."""
import importlib.metadata
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import torch

from timm_rep.utils.files import COUNT, MAPPING, NUMBER, STRING, Kind, check_fields, list_of, one_of, read_json
from timm_rep.utils.profiling import device_name, versions

__all__ = [
    'BACKENDS', 'CALIBRATORS', 'MODEL_FILENAMES', 'REPORT_NAME', 'Accuracy', 'QuantizationReport', 'model_files', 'quantized_files',
    'read_report', 'write_report',
]

REPORT_NAME = 'quantization.json'
# packages that a backend needs beside torch; the calibrators are torchao's
BACKENDS = {'inductor': ('torchao',), 'onnxruntime': ('onnx', 'onnxscript', 'onnxruntime', 'torchao')}
# file of the quantized model, beside that of its report
MODEL_FILENAMES = {'inductor': 'model.pt2', 'onnxruntime': 'model.onnx'}
CALIBRATORS = ('minmax', 'entropy', 'percentile')

_BOOL = Kind('true or false', lambda value: isinstance(value, bool))


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy in percent on the same images.

    Attributes:
        float: That of the model before.
        int8: That of the quantized model.
        images: Number of images.
    """
    float: float
    int8: float
    images: int


@dataclass(frozen=True)
class QuantizationReport:
    """What a quantization did.

    Attributes:
        backend: 'inductor' or 'onnxruntime'.
        per_channel: Whether each output channel of a weight has its own scale, or the weight has one.
        calibrator: Choice of the ranges of activations; that of training is a moving average of 'minmax'.
        percentile: Share of the values that the calibrator 'percentile' covers, in percent.
        images: Number of calibration images.
        qat_epochs: Epochs of quantization-aware training, 0 for none.
        input_size: (channels, height, width) of the images that the quantized model takes.
        int8: Names of the layers that the compiled graph computes in int8, in the order of execution.
        float: Operators of the products that it computes in float, by name of the layer or of the module around it.
        relative_rms: Root mean square of the difference of the outputs from the float model's, divided by that of the
            float outputs, for the first batch of calibration images.
        accuracy: Accuracy before and after, where it was measured.
    """
    backend: str
    per_channel: bool
    calibrator: str
    percentile: float
    images: int
    qat_epochs: int
    input_size: Tuple[int, int, int]
    int8: List[str]
    float: Dict[str, str]
    relative_rms: float
    accuracy: Optional[Accuracy] = None

    def __str__(self) -> str:
        calibrator = f'percentile {self.percentile:g}' if self.calibrator == 'percentile' else self.calibrator
        training = f', {self.qat_epochs} epochs of training' if self.qat_epochs else ''
        lines = [
            f'{self.backend}, weights per {"channel" if self.per_channel else "tensor"}, {calibrator}, '
            f'{self.images} calibration images{training}',
            f'int8: {len(self.int8)} convolutions and linear layers',
            f'float: {len(self.float) or "no"} products',
            *(f'  {name}: {operator}' for name, operator in self.float.items()),
            f'relative rms difference of the outputs: {self.relative_rms:.2g}',
        ]
        if self.accuracy:
            before, after = self.accuracy.float, self.accuracy.int8
            lines.append(
                f'top-1 accuracy: {before:.2f}% before, {after:.2f}% after ({after - before:+.2f}), '
                f'{self.accuracy.images} images')
        return '\n'.join(lines)


def model_files(folder: Path, backend: str) -> List[Path]:
    """The file of a backend's model in a folder, and that of its weights, which exists only if they are large."""
    return [folder / MODEL_FILENAMES[backend], folder / f'{MODEL_FILENAMES[backend]}.data']


def quantized_files(folder: Path) -> List[Path]:
    """The files of the quantized model in a folder, none if there is none; with it those of another backend.

    Raises:
        RuntimeError: The report cannot be read.
    """
    if not (folder / REPORT_NAME).is_file():
        return []
    model, *_ = model_files(folder, read_report(folder).backend)
    others = [path for backend in MODEL_FILENAMES for path in model_files(folder, backend) if path.is_file()]
    return list(dict.fromkeys([folder / REPORT_NAME, model, *others]))


def write_report(folder: Path, report: QuantizationReport) -> None:
    """Write quantization.json, with machine and versions."""
    packages = {name: importlib.metadata.version(name) for name in BACKENDS[report.backend]}
    content = dict(asdict(report), machine=device_name(torch.device('cpu')), versions={**versions(), **packages})
    (folder / REPORT_NAME).write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def read_report(folder: Path) -> QuantizationReport:
    """Read quantization.json of a folder.

    Raises:
        OSError: There is no such file.
        RuntimeError: It is not a file of :func:`write_report`.
    """
    source = repr(str(folder / REPORT_NAME))
    content = dict(check_fields(read_json(folder / REPORT_NAME), source, {
        'backend': one_of(*BACKENDS), 'per_channel': _BOOL, 'calibrator': one_of(*CALIBRATORS), 'percentile': NUMBER,
        'images': COUNT, 'qat_epochs': COUNT, 'input_size': list_of(COUNT, 3), 'int8': list_of(STRING),
        'float': MAPPING, 'relative_rms': NUMBER,
    }, {'accuracy': MAPPING}))
    if content.get('accuracy'):
        accuracy = check_fields(
            content['accuracy'], f'{source}: accuracy', {'float': NUMBER, 'int8': NUMBER, 'images': COUNT})
        content['accuracy'] = Accuracy(**{field.name: accuracy[field.name] for field in fields(Accuracy)})
    content['input_size'] = tuple(content['input_size'])
    return QuantizationReport(**{field.name: content.get(field.name) for field in fields(QuantizationReport)})
