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
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn

from timm_rep.convert import folded_copy
from timm_rep.utils.atomic import check_writable, replacing_files
from timm_rep.utils.data import Images, batch_images, batches_of, take_images
from timm_rep.utils.training import distil, evaluate
from timm_rep._verify import check_finite, compare

from ._export import check_model
from .program import Program
from .report import (
    BACKENDS,
    CALIBRATORS,
    MODEL_FILENAMES,
    REPORT_NAME,
    Accuracy,
    QuantizationReport,
    model_files,
    read_report,
    write_report,
)

# modules of the backends, which import their packages, and their classes
_PROGRAMS = {'inductor': ('inductor', 'InductorProgram'), 'onnxruntime': ('ort', 'OnnxProgram')}

__all__ = ['Quantized', 'check_quantization', 'check_settings', 'load_quantized', 'quantize_ptq', 'quantize_qat']


class Quantized(nn.Module):
    """A model with int8 weights and activations, for inference on the CPU.

    It is called as the model that it was made of. The first batch of a new size takes longer with the backend
    'inductor', which then generates code, once for the first size and once for all others.

    Attributes:
        report: What runs in int8 and what does not; ``print(model.report)`` shows it.
    """

    def __init__(self, program: Program, report: QuantizationReport):
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

        Files of these names are replaced, and the model of another backend that the folder has a report of is removed.

        Raises:
            OSError: They cannot be written.
        """
        folder, previous = Path(folder), []
        with contextlib.suppress(OSError, RuntimeError):  # there is no report, or it is damaged
            previous = model_files(folder, read_report(folder).backend)
        with replacing_files(folder) as draft:
            self.program.write(draft / MODEL_FILENAMES[self.report.backend])
            write_report(draft, self.report)
            written = {path.name for path in draft.iterdir()}
        for path in previous:
            if path.name not in written:
                path.unlink(missing_ok=True)


def load_quantized(folder: Union[str, os.PathLike]) -> Quantized:
    """Load what :meth:`Quantized.save` wrote.

    Nothing is unpickled: a file with pickled values is refused. A graph is a program all the same, so load only files
    from sources that you trust. Warns of a program that was quantized on a CPU with VNNI, if this one has none.

    Raises:
        ModuleNotFoundError: The backend needs a package that is not installed.
        OSError: A file is missing.
        RuntimeError: A file cannot be read.
    """
    folder = Path(folder)
    if not (folder / REPORT_NAME).is_file():
        raise FileNotFoundError(f'{str(folder)!r} holds no {REPORT_NAME}, expected a folder of a quantized model.')
    report = read_report(folder)
    _check_packages(report.backend)
    return Quantized(_program(report.backend).read(folder / MODEL_FILENAMES[report.backend]), report)


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
    else, such as attention, norms and shortcuts, stays float. Which layers run in int8 is read from the
    compiled program.

    Quantize on a machine like the one that is to run the model. x86 CPUs without VNNI or AMX add pairs of products in
    16 bits, which saturate: there 'inductor' rounds inputs to 7 bits (torchao's ``reduce_range``), and 'onnxruntime'
    runs slower kernels (its session option ``session.x64quantprecision``, for you to set where you load the file
    yourself). A program of 'inductor' that was quantized on a CPU with VNNI loses accuracy on one without;
    :func:`load_quantized` warns of it.

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
        validation_loader: Batches of images and labels (N,) to measure the accuracy on, before and after. Default: it
            is not measured.

    Returns:
        The quantized model, with a report.

    Raises:
        ModuleNotFoundError: The backend needs a package that is not installed (extra ``deploy``).
        RuntimeError: The backend cannot compute the model; the message has the reason.
        TypeError: model is not a module, a batch has no images, or one of the validation_loader no labels.
        ValueError: An argument is invalid, a loader is empty, batches differ in size, or the model is in training
            mode, in the middle of an annealing, on another device, of another dtype, quantized or wrapped.
    """
    program = check_quantization(backend, calibrator, percentile)
    _check_model(model)
    batches = _read_images(calibration_loader, max_images)
    check_finite(model, batches[0][:1])
    folded = folded_copy(model)
    accuracy = _accuracy(model, validation_loader, batches[0].shape[1:])
    with _errors(model, backend):
        quantized = _finish(
            program.quantize(folded, batches, per_channel, calibrator, percentile), model, batches, backend=backend,
            per_channel=per_channel, calibrator=calibrator, percentile=percentile, qat_epochs=0)
    return _measured(quantized, validation_loader, accuracy)


def quantize_qat(
        model: nn.Module,
        images: Images,
        epochs: int = 10,
        lr: float = 1e-4,
        max_images: int = 512,
        checkpoint: Optional[Union[str, os.PathLike]] = None,
        resume: bool = False,
        validation_loader: Optional[Iterable] = None,
) -> Quantized:
    """Quantize a model and train it with rounded weights and activations, distilled from the float model.

    Weights per channel; the ranges of the activations are moving averages. A copy is folded first, and trains in eval
    mode: without BatchNorm, dropout and stochastic depth. The backend is 'inductor'. The generators of torch, NumPy and
    Python are seeded.

    The paper trains RepOpt-VGG with its BatchNorms, by torch.quantization, which rounds each kernel times the scale of
    its norm. With the running statistics that is the folded kernel: the same function and rounding, so what is left
    out are the statistics of the batches and a learnable scale beside each kernel. In exchange, the teacher and the
    student start from the same statistics, the graph that trains is the one that is shipped, and networks whose norms
    do not follow a convolution, as a RePaFormer's, train alike.

    Args:
        model: As for :func:`quantize_ptq`.
        images: Images to train on, without labels; on the CPU.
        epochs: Number of epochs; 10 in the paper.
        lr: Learning rate of the first step, of AdamW with a cosine schedule.
        max_images: Largest number of images of the comparison in the report.
        checkpoint: File that the state is written to after every epoch, to resume from.
        resume: Continue from that file, if it exists.
        validation_loader: As for :func:`quantize_ptq`.

    Returns:
        The quantized model, with a report.

    Raises:
        ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError: As :func:`quantize_ptq` and
            :func:`timm_rep.utils.training.distil`.
    """
    check_quantization('inductor', 'minmax')
    _check_model(model)
    if epochs < 1:
        raise ValueError(f'epochs is a number of epochs, at least 1, got {epochs!r}.')
    if images.device.type != 'cpu':
        raise ValueError(f'Quantization-aware training runs on the CPU, the images are for {images.device}.')
    if checkpoint is not None:
        checkpoint = Path(checkpoint)
        check_writable(checkpoint.parent)
    elif resume:
        raise ValueError('resume continues from the file checkpoint: pass it.')
    from .inductor import finish_training, prepare_training

    batches = _read_images(images.calibration(max_images), max_images)
    check_finite(model, batches[0][:1])
    folded = folded_copy(model)
    if not any(p.requires_grad for p in model.parameters()):  # frozen for inference; layers that timm folds are not
        folded.requires_grad_()
    accuracy = _accuracy(model, validation_loader, batches[0].shape[1:])
    with _errors(model, 'inductor'):
        prepared = prepare_training(folded, batches[0])
    distil(
        prepared, copy.deepcopy(model), images, epochs, lr, weight_decay=0., checkpoint=checkpoint, resume=resume)
    with _errors(model, 'inductor'):
        quantized = _finish(
            finish_training(prepared, batches[0].shape[1:]), model, batches, backend='inductor', per_channel=True,
            calibrator='minmax', percentile=100., qat_epochs=epochs)
    return _measured(quantized, validation_loader, accuracy)


def check_quantization(backend: str, calibrator: str, percentile: float = 99.99) -> Type[Program]:
    """Check settings of a quantization and import its packages; before a model is trained.

    Returns:
        The class of the backend's programs.

    Raises:
        ImportError: The packages are of other releases than this one needs.
        ModuleNotFoundError, ValueError: As :func:`check_settings`.
    """
    check_settings(backend, calibrator, percentile)
    return _program(backend)


def check_settings(backend: str, calibrator: str, percentile: float) -> None:
    """Check settings of a quantization and that its packages are installed, without the seconds of importing them.

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
    _check_packages(backend)


def _check_packages(backend: str) -> None:
    missing = [package for package in BACKENDS[backend] if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(
            f"The backend {backend!r} needs {', '.join(missing)}: pip install {' '.join(missing)}.")


def _program(name: str) -> Type[Program]:
    module, program = _PROGRAMS[name]
    try:
        return getattr(importlib.import_module(f'timm_rep.deploy.{module}'), program)
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
        TypeError, ValueError: As :func:`take_images`; or the images are not finite, or not of one size.
    """
    batches = [images.detach().float().cpu() for images in take_images(loader, count)]
    for images in batches:
        if images.shape[1:] != batches[0].shape[1:] or not images.isfinite().all():
            raise ValueError(
                f'Calibration images are finite and of one size, got {tuple(images.shape)} and, in the first batch, '
                f'{tuple(batches[0].shape)}.')
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
def _finish(program: Program, model: nn.Module, batches: List[torch.Tensor], **settings) -> Quantized:
    """The quantized model with its report."""
    first = batches[0]
    int8, other = program.layers(first)
    return Quantized(program, QuantizationReport(
        **settings, images=sum(map(len, batches)), input_size=tuple(first.shape[1:]), int8=int8, float=other,
        relative_rms=compare(model(first), program(first), len(first)).relative_rms))


def _accuracy(model: nn.Module, loader: Optional[Iterable], size: Sequence[int]) -> Optional[Tuple[float, int]]:
    """Accuracy of the float model in percent, and number of images; before any work, which wrong batches would waste.

    Raises:
        TypeError, ValueError: As :func:`evaluate`; or the loader can be read only once, or its images are not of the
            size that is calibrated.
    """
    if loader is None:
        return None
    if isinstance(loader, Iterator):
        raise TypeError('validation_loader is read before and after, got an iterator, which ends: pass a loader.')

    def batches():
        for batch in batches_of(loader):
            found = batch_images(batch).shape[1:]
            if found != size:
                raise ValueError(
                    f'The model is quantized for images of size {tuple(size)}, validation_loader has {tuple(found)}.')
            yield batch

    logits, top1 = evaluate(model, batches(), torch.device('cpu'))
    return top1, len(logits)


def _measured(quantized: Quantized, loader: Optional[Iterable], accuracy: Optional[Tuple[float, int]]) -> Quantized:
    """With the accuracy in the report, if :func:`_accuracy` measured that of the float model."""
    if accuracy is not None:
        before, images = accuracy
        after = evaluate(quantized, loader, torch.device('cpu'))[1]
        quantized.report = replace(
            quantized.report, accuracy=Accuracy(round(before, 2), round(after, 2), images))
    return quantized
