"""Int8 for inference on the CPU: post-training quantization and quantization-aware training.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 4.4 and appendix C.
"""
import contextlib
import copy
import importlib
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Optional, Union

import torch
import torch.nn as nn

from timm_rep.convert import folded_copy
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.data import Images, batch_images
from timm_rep.utils.training import distil, evaluate
from timm_rep.verify import check_finite, compare

from .export import check_model
from .report import BACKENDS, CALIBRATORS, REPORT, Accuracy, QuantizationReport, read_report, write_report

# modules of the backends, which import their packages
_MODULES = {'inductor': 'inductor', 'onnxruntime': 'ort'}

__all__ = ['Quantized', 'check_quantization', 'load_quantized', 'quantize_ptq', 'quantize_qat']


class Quantized(nn.Module):
    """A model with int8 weights and activations, for inference on the CPU.

    It is called as the model that it was made of. The first batch of a new size takes longer with the backend
    'inductor', which then generates code, once for the first size and once for all others.

    Attributes:
        report: What runs in int8 and what does not; ``print(model.report)`` shows it.
    """

    def __init__(self, program, report: QuantizationReport):
        """
        Args:
            program: The compiled model of a backend.
            report: The report.
        """
        super().__init__()
        self.program, self.report = program, report
        self.eval()

    def forward(self, images: torch.Tensor) -> Any:
        """Compute the outputs.

        Args:
            images: Images (N, channels, height, width) of the size that was calibrated, float32, on the CPU.

        Raises:
            ValueError: They are not.
        """
        size = self.report.input_size
        if images.ndim != 4 or tuple(images.shape[1:]) != size or not len(images):
            raise ValueError(
                f'The model is quantized for images of size (N, {", ".join(map(str, size))}), got '
                f'{tuple(images.shape)}: quantize it with images of that size.')
        if images.device.type != 'cpu' or images.dtype != torch.float32:
            raise ValueError(
                f'A quantized model takes float32 images on the CPU, got {images.dtype} on {images.device}.')
        return self.program(images)

    def train(self, mode: bool = True) -> 'Quantized':
        """
        Raises:
            ValueError: mode is True.
        """
        if mode:
            raise ValueError('A quantized model cannot be trained: train the float model, or use quantize_qat.')
        return super().train(mode)

    def save(self, folder: Union[str, os.PathLike]) -> None:
        """Write model.pt2 (inductor) or model.onnx (onnxruntime), and quantization.json, for :func:`load_quantized`.

        Files of these names are replaced.

        Raises:
            OSError: They cannot be written.
        """
        with replacing_files(folder) as draft:
            self.program.write(draft / f'model{self.program.suffix}')
            write_report(draft, self.report)


def load_quantized(folder: Union[str, os.PathLike]) -> Quantized:
    """Load what :meth:`Quantized.save` wrote.

    Nothing is unpickled: a file with pickled values is refused. A graph is a program all the same, so load only files
    from sources that you trust.

    Raises:
        ModuleNotFoundError: The backend needs a package that is not installed.
        OSError: A file is missing.
        RuntimeError: A file cannot be read.
    """
    folder = Path(folder)
    if not (folder / REPORT).is_file():
        raise FileNotFoundError(f'{str(folder)!r} holds no {REPORT}, expected a folder of a quantized model.')
    report = read_report(folder)
    program = _backend(report.backend).Program
    return Quantized(program.read(folder / f'model{program.suffix}'), report)


def quantize_ptq(
        model: nn.Module,
        calibration_loader: Iterable,
        backend: str = 'inductor',
        per_channel: bool = True,
        calibrator: str = 'minmax',
        percentile: float = 99.99,
        max_images: int = 512,
        validation_loader: Optional[Iterable] = None,
) -> Quantized:
    """Quantize a trained model to int8, with 'post-training quantization'.

    A copy is folded, since int8 kernels exist for plain convolutions and linear layers only. Inputs (8 bits, one range
    for the tensor) and weights (8 bits, symmetric) of all convolutions and linear layers are quantized; everything
    else, such as attention, norms and shortcuts, stays float. That what was compiled runs in int8 is read from it.

    Args:
        model: Model in eval mode, in float32 on the CPU: of this package, of timm, or a network that has one inside.
            Its input is one tensor (N, channels, height, width), its output a nesting of tensors. Unchanged.
        calibration_loader: Some hundred images of the training set, preprocessed as for validation: batches of images
            (N, channels, height, width), all of one size, or with the images first.
        backend: 'inductor' (torchao, ``torch.compile``) or 'onnxruntime' (static quantization, QDQ format).
        per_channel: A scale for each output channel of a weight, else one for the weight.
        calibrator: Choice of the range of an activation: 'minmax', all values; 'entropy', the range with the smallest
            Kullback-Leibler divergence of the quantized distribution; 'percentile', the range that covers a share.
        percentile: That share in percent.
        max_images: Largest number of images to calibrate with; they are held in memory.
        validation_loader: Batches of images and targets to measure the accuracy on, before and after. Default: it is
            not measured.

    Returns:
        The quantized model, with a report.

    Raises:
        ModuleNotFoundError: The backend needs a package that is not installed (``pip install 'timm-rep[deploy]'``).
        RuntimeError: The backend cannot compute the model; the message has the reason.
        TypeError: model is not a module, or a batch has no images.
        ValueError: An argument is invalid, the loader is empty, batches differ in size, or the model is in training
            mode, in the middle of an annealing, on another device, of another dtype, quantized or wrapped.
    """
    module = check_quantization(backend, calibrator, percentile)
    _check_model(model)
    batches = _read_images(calibration_loader, max_images)
    check_finite(model, batches[0][:1])
    folded = folded_copy(model)
    with _errors(model, backend):
        program = module.quantize(folded, batches, per_channel, calibrator, percentile)
        return _finish(
            program, model, batches, validation_loader, backend=backend, per_channel=per_channel,
            calibrator=calibrator, percentile=percentile, qat_epochs=0)


def quantize_qat(
        model: nn.Module,
        images: Images,
        epochs: int = 10,
        lr: float = 1e-4,
        max_images: int = 512,
        checkpoint: Optional[Path] = None,
        resume: bool = False,
        validation_loader: Optional[Iterable] = None,
) -> Quantized:
    """Quantize a model and train it with rounded weights and activations, distilled from the float model.

    Weights per channel; the ranges of the activations are moving averages. A copy is folded first, and trains in eval
    mode: without BatchNorm, dropout and stochastic depth. The backend is 'inductor'.

    Args:
        model: As for :func:`quantize_ptq`.
        images: Images to train on, without labels; on the CPU.
        epochs: Number of epochs; 10 in the paper.
        lr: Learning rate of the first step, of AdamW with a cosine schedule.
        max_images: Largest number of images of the comparison in the report.
        checkpoint: File that the state is written to after every epoch, to resume from.
        resume: Continue from that file.
        validation_loader: As for :func:`quantize_ptq`.

    Returns:
        The quantized model, with a report.

    Raises:
        ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError: As :func:`quantize_ptq` and
            :func:`timm_rep.utils.training.distil`.
    """
    module = check_quantization('inductor', 'minmax', 100.)
    _check_model(model)
    if epochs < 1:
        raise ValueError(f'epochs is a number of epochs, at least 1, got {epochs!r}.')
    if images.device.type != 'cpu':
        raise ValueError(f'Quantization-aware training runs on the CPU, the images are for {images.device}.')
    batches = _read_images(images.calibration(max_images), max_images)
    check_finite(model, batches[0][:1])
    folded = folded_copy(model)
    with _errors(model, 'inductor'):
        prepared = module.prepare_training(folded, batches[0])
    distil(
        prepared, copy.deepcopy(model), images, epochs, lr, weight_decay=0., checkpoint=checkpoint, resume=resume)
    with _errors(model, 'inductor'):
        program = module.finish_training(prepared, batches[0].shape[1:])
        return _finish(
            program, model, batches, validation_loader, backend='inductor', per_channel=True, calibrator='minmax',
            percentile=100., qat_epochs=epochs)


def check_quantization(backend: str, calibrator: str, percentile: float):
    """Check settings of a quantization and that its packages are installed; before a model is loaded.

    Returns:
        The module of the backend.

    Raises:
        ModuleNotFoundError: A package is missing.
        ValueError: There is no such backend or calibrator, or the percentile is not in (50, 100].
    """
    if backend not in BACKENDS:
        raise ValueError(f'backend is one of {", ".join(map(repr, BACKENDS))}, got {backend!r}.')
    if calibrator not in CALIBRATORS:
        raise ValueError(f'calibrator is one of {", ".join(map(repr, CALIBRATORS))}, got {calibrator!r}.')
    if not 50 < percentile <= 100:
        raise ValueError(f'percentile is above 50 and at most 100, got {percentile!r}.')
    return _backend(backend)


def _backend(name: str):
    missing = [package for package in BACKENDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(f"The backend {name!r} needs {', '.join(missing)}: pip install 'timm-rep[deploy]'.")
    try:
        return importlib.import_module(f'timm_rep.deploy.{_MODULES[name]}')
    except (AttributeError, ImportError) as e:  # they do not say which torch they need
        raise ImportError(
            f'The backend {name!r} needs other releases of torch, {torch.__version__} is installed, or of '
            f'{", ".join(BACKENDS[name])}: {e}.') from e


def _check_model(model: nn.Module) -> None:
    check_model(model)
    name = type(model).__name__
    if any(module.training for module in model.modules()):
        raise ValueError(f'{name} is in training mode: call model.eval() first.')
    devices = {str(x.device) for x in model.state_dict().values()} - {'cpu'}
    if devices:
        raise ValueError(f'{name} is on {", ".join(sorted(devices))}, int8 kernels run on the CPU: call model.cpu().')


def _read_images(loader: Iterable, count: int) -> List[torch.Tensor]:
    """The first images of a loader, in batches of float32 on the CPU.

    Raises:
        TypeError: A batch has no images.
        ValueError: The count is less than 1, the loader is empty, or the batches are not of one size and finite.
    """
    if count < 1:
        raise ValueError(f'max_images is a number of images, at least 1, got {count!r}.')
    batches: List[torch.Tensor] = []
    for batch in loader:
        images = batch_images(batch)[:count].detach().float().cpu()
        size = batches[0].shape[1:] if batches else images.shape[1:]
        if images.ndim != 4 or images.shape[1:] != size or not images.isfinite().all():
            raise ValueError(
                'Calibration images are finite and of one size, of shape (N, channels, height, width), got '
                f'{tuple(images.shape)}' + (f' after {tuple(batches[0].shape)}.' if batches else '.'))
        if len(images):
            batches.append(images)
        count -= len(images)
        if count <= 0:
            break
    if not batches:
        raise ValueError('calibration_loader is empty: pass some hundred images of the training set.')
    return batches


@contextlib.contextmanager
def _errors(model: nn.Module, backend: str) -> Iterator[None]:
    """Raise what a backend raises, of many types and over many lines, as a RuntimeError of one line."""
    try:
        yield
    except Exception as e:
        reason = next(iter(str(e).strip().splitlines()), '')
        raise RuntimeError(
            f'{type(model).__name__} cannot be quantized with {backend!r}: {type(e).__name__}: {reason}') from e


@torch.no_grad()
def _finish(program, model: nn.Module, batches: List[torch.Tensor], validation_loader, **settings) -> Quantized:
    """The quantized model with its report."""
    first = batches[0]
    int8, other = program.layers(first)
    report = QuantizationReport(
        **settings, images=sum(map(len, batches)), input_size=tuple(first.shape[1:]), int8=int8, float=other,
        relative_rms=compare(model(first), program(first), len(first)).relative_rms)
    quantized = Quantized(program, report)
    if validation_loader is not None:
        logits, before = evaluate(model, validation_loader, torch.device('cpu'))
        _, after = evaluate(quantized, validation_loader, torch.device('cpu'))
        quantized.report = replace(report, accuracy=Accuracy(round(before, 2), round(after, 2), len(logits)))
    return quantized
