"""Int8 inference on the CPU: post-training quantization and quantization-aware training.

RepOptimizers, section 4.4 and appendix C.
"""
import contextlib
import copy
import importlib
import statistics
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn

from timm_rep.convert import folded_copy
from timm_rep.utils.atomic import check_writable, recover, replacing_files
from timm_rep.utils.compare import check_finite, compare
from timm_rep.utils.data import Images
from timm_rep.utils.files import StrPath
from timm_rep.utils.profiling import device_name, time_calls
from timm_rep.utils.training import check_distillation, distil, evaluate

from ._checks import check_float_model, check_keep_float, check_layers, float_accuracy, read_images
from ._export import VERIFICATION_NAME, Exported
from .equalize import equalize_ranges
from .formats import BACKENDS, check_packages, package_versions
from .program import Program, QuantizationSettings, layers_with_weights, trace
from .report import REPORT_NAME, Accuracy, QuantizationReport, read_report


class Quantized(nn.Module):
    """A model with int8 weights and activations, for inference on the CPU.

    Call it like the original model. With the backend 'inductor', the first call compiles for its batch size, and the
    first call with a different batch size compiles once more, for any batch size.

    Attributes:
        report: Settings, layers in int8 and in float, and errors; ``print(model.report)`` shows a summary.
    """

    def __init__(self, program: Program, report: QuantizationReport):
        super().__init__()
        self.program, self.report = program, report
        self.eval()

    def forward(self, images: torch.Tensor) -> Any:
        """Compute the outputs.

        Args:
            images: Images (N, channels, height, width) of the calibrated size, float32, on the CPU.

        Raises:
            ValueError: The images have the wrong size, dtype or device, or there are none.
        """
        size = self.report.input_size
        if images.ndim == 4 and not len(images):
            raise ValueError('Expected at least one image, but got an empty batch.')
        if images.ndim != 4 or tuple(images.shape[1:]) != size:
            raise ValueError(
                f'Expected images of size (N, {", ".join(map(str, size))}), but got {tuple(images.shape)}: quantize '
                'the model with images of that size.')
        if images.device.type != 'cpu' or images.dtype != torch.float32:
            raise ValueError(f'Expected float32 images on the CPU, but got {images.dtype} on {images.device}.')
        return self.program(images)

    def train(self, mode: bool = True) -> 'Quantized':
        """Raise ValueError if ``mode`` is True."""
        if mode:
            raise ValueError('A quantized model must stay in eval mode: train the float model, or use quantize_qat.')
        return super().train(mode)

    def save(self, folder: StrPath) -> None:
        """Write the files of the backend and quantization.json, for :func:`load_quantized`.

        Existing files of these names are replaced, and the reports of :func:`timm_rep.export` on them removed. If the
        folder has a report, the files of its backend are removed.

        Raises:
            OSError: The folder cannot be written.
        """
        folder, files = Path(folder), BACKENDS[self.report.backend].files
        recover(folder)
        outdated = [folder / f'{name}.{VERIFICATION_NAME}' for name in files]  # of exported files that are replaced
        with contextlib.suppress(OSError, RuntimeError):  # it is missing or damaged
            outdated += [folder / name for name in BACKENDS[read_report(folder).backend].files]
        with contextlib.suppress(OSError, RuntimeError):
            if Exported.from_json(folder / VERIFICATION_NAME).format == self.report.backend:  # OpenVINO writes a folder
                outdated.append(folder / VERIFICATION_NAME)
        with replacing_files(folder, outdated=outdated) as draft:
            self.program.write(draft / files[0])
            self.report.to_json(draft / REPORT_NAME)


def load_quantized(folder: StrPath) -> Quantized:
    """Load a folder written by :meth:`Quantized.save`.

    Nothing is unpickled, and files with pickled values are refused. A graph is a program nevertheless: load only files
    from sources that you trust. Warns if the program was quantized on a CPU with VNNI and this one has none.

    Raises:
        ModuleNotFoundError: The backend requires a package that is not installed.
        OSError: A file is missing.
        RuntimeError: A file cannot be read.
    """
    recover(folder)
    if not (Path(folder) / REPORT_NAME).is_file():
        raise FileNotFoundError(f'Expected the folder of a quantized model, but {str(folder)!r} has no {REPORT_NAME}.')
    report = read_report(Path(folder))
    backend = BACKENDS[report.backend]
    check_packages(f'backend={report.backend!r}', backend)
    return Quantized(_program(report.backend).read(Path(folder) / backend.files[0]), report)


def quantize_ptq(
        model: nn.Module,
        calibration_loader: Iterable[Any],
        backend: str = 'inductor',
        per_channel: bool = True,
        calibrator: str = 'minmax',
        percentile: float = 99.99,
        max_images: int = 512,
        validation_loader: Optional[Iterable[Any]] = None,
        keep_float: Union[str, Sequence[str]] = (),
        max_error: Optional[float] = None,
        max_accuracy_loss: Optional[float] = None,
        diagnose: bool = False,
        equalize: bool = False,
) -> Quantized:
    """Post-training quantization of a model to int8.

    A copy is folded first, because int8 kernels exist for plain convolutions and linear layers only. Their inputs (8
    bits, one range per tensor) and weights (8 bits, symmetric) are quantized; everything else, such as attention, norms
    and shortcuts, stays in float. The report lists the layers that the compiled program computes in int8.

    Quantize on a machine like the one that will run the model. x86 CPUs without VNNI or AMX add pairs of products in
    16 bits, which saturate: there, 'inductor' rounds inputs to 7 bits, and 'onnxruntime' runs slower kernels (session
    option ``session.x64quantprecision``, to be set where you load the file yourself). A program of 'inductor' that was
    quantized on a CPU with VNNI loses accuracy on a CPU without, and :func:`load_quantized` warns about it.

    Args:
        model: Float32 model in eval mode on the CPU: of this package, of timm, or a network around one. Its input is
            one tensor (N, channels, height, width), its output a nesting of tensors. Not modified.
        calibration_loader: A few hundred training images, preprocessed as for validation: batches of images
            (N, channels, height, width) of one size, or with the images first.
        backend: Key of ``timm_rep.deploy.BACKENDS``: 'inductor' (torchao and ``torch.compile``), 'onnxruntime' (static
            quantization, QDQ format), 'openvino' (NNCF, with bias correction) or 'executorch' (XNNPACK, one image at a
            time).
        per_channel: One scale for each output channel of a weight, instead of one for the weight.
        calibrator: Choice of the range of an activation: 'minmax', all values; 'entropy', the range with the smallest
            Kullback-Leibler divergence of the quantized distribution; 'percentile', a percentage of the values.
        percentile: Percentage of values covered by the calibrator 'percentile'.
        max_images: Largest number of calibration images; they are held in memory.
        validation_loader: Batches of images and labels (N,) to measure the accuracy on, before and after. Default: it
            is not measured.
        keep_float: Names of convolutions and linear layers of the folded model that stay in float, as in the report; or
            'auto': keep as few of the most sensitive layers in float as are needed to meet ``max_error`` or
            ``max_accuracy_loss``. The number is first estimated by simulation; if the quantized model misses the limit,
            more layers are kept, with a few more quantizations of the model.
        max_error: Largest relative root mean square of the difference of the outputs, on the first calibration batch,
            for ``keep_float='auto'``.
        max_accuracy_loss: Largest loss of top-1 accuracy on ``validation_loader`` in percentage points, for
            ``keep_float='auto'``.
        diagnose: Measure the error that each layer adds alone, on the first calibration batch, as ``report.layers``.
        equalize: Equalize the ranges of weights between consecutive layers of the folded copy first, without a change
            of its function (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias
            Correction"). Channel i of the first layer is divided, and of the second multiplied, by ``s_i = sqrt(r1_i /
            r2_i)``, with r the largest absolute weight of the channel. Pairs are convolutions and linear layers with
            only ReLU, LeakyReLU and pooling in between.

    Returns:
        The quantized model, with a report. Warns if it is slower than the folded float model on this machine, or if
        ``keep_float='auto'`` does not reach its limits.

    Raises:
        ImportError: The backend requires a package that is not installed, or does not fit this torch.
        RuntimeError: The backend cannot compute the model.
        TypeError: ``model`` is not a module, a batch has no images, ``validation_loader`` is an iterator, which can be
            read only once, or a batch of it has no labels.
        ValueError: An argument is invalid, a loader is empty, batches differ in size, images are not finite, labels
            have no class, or the model is in training mode, not yet annealed, not on the CPU, not in float32, quantized
            or wrapped.
    """
    check_quantization(backend, calibrator, percentile)
    check_keep_float(keep_float, max_error, max_accuracy_loss, validation_loader)
    keep_float = keep_float if isinstance(keep_float, str) else [*keep_float]
    check_float_model(model)
    program = _program(backend)
    batches = read_images(calibration_loader, max_images)
    check_finite(model, batches[0][:1])
    folded = folded_copy(model)
    if keep_float and keep_float != 'auto':
        with _errors(model, backend):
            layers = list(layers_with_weights(trace(folded, batches[0]).module()).values())
        check_layers(keep_float, layers)
    accuracy = float_accuracy(model, validation_loader, batches[0].shape[1:])
    equalized = None
    if equalize:
        with _errors(model, backend):
            equalized = equalize_ranges(folded, batches[0])
    settings = QuantizationSettings(per_channel, calibrator, percentile)
    errors: Optional[Dict[str, float]] = None
    if diagnose or keep_float == 'auto':
        from .diagnosis import RoundedModel, layer_errors, simulation_passes

        with torch.no_grad():
            simulation = RoundedModel(folded, batches, settings)
            errors = layer_errors(simulation, batches[0])

    def quantize(kept: Sequence[str]) -> Quantized:
        return _finish(
            lambda: program.quantize(folded, batches, settings, keep_float=kept), model, folded, batches,
            validation_loader, accuracy, backend=backend, **settings._asdict(), qat_epochs=0, layers=errors,
            equalized=equalized)

    if keep_float != 'auto' or errors is None:
        return _warn_if_slow(quantize(keep_float))
    limits = max_error, max_accuracy_loss
    with torch.no_grad():
        expected = model(batches[0])
    quantized, passed = _fewest_in_float(
        list(errors), partial(simulation_passes, simulation, expected, batches[0], validation_loader, accuracy, limits),
        quantize, lambda report: _passes(report, *limits))
    if not passed:
        found = quantized.report
        loss = f', the loss of accuracy {found.accuracy.loss:g} points' if found.accuracy else ''
        warnings.warn(
            f"keep_float='auto' does not reach max_error={max_error}, max_accuracy_loss={max_accuracy_loss}: with all "
            f'{len(errors)} convolutions and linear layers in float, the relative error is {found.relative_rms:.2g}'
            f'{loss}.', stacklevel=2)
    return _warn_if_slow(quantized)


def quantize_qat(
        model: nn.Module,
        images: Images,
        epochs: int = 10,
        lr: float = 1e-4,
        max_images: int = 512,
        checkpoint: Optional[StrPath] = None,
        resume: bool = False,
        validation_loader: Optional[Iterable[Any]] = None,
) -> Quantized:
    """Quantization-aware training, distilled from the float model.

    Weights are rounded per channel; the ranges of activations are moving averages. A copy is folded first and trained
    in eval mode: without BatchNorm, dropout and stochastic depth. The backend is 'inductor'. The random number
    generators of torch, NumPy and Python are seeded.

    The paper trains RepOpt-VGG with its BatchNorms, whose kernels torch.quantization rounds after folding. Function and
    rounding are the same here; batch statistics and a learnable scale for each kernel are left out. In exchange, the
    trained graph is the deployed one, and networks whose norms do not follow a convolution are trained in the same way.

    Args:
        model: As for :func:`quantize_ptq`.
        images: Training images, see :class:`timm_rep.utils.data.Images`; ``images.device`` must be the CPU. Labels are
            not used.
        epochs: Number of epochs; 10 in the paper.
        lr: Initial learning rate of AdamW, with a cosine schedule.
        max_images: Largest number of images for the comparison in the report.
        checkpoint: File to write the training state to after each epoch.
        resume: Continue from ``checkpoint``, if it exists.
        validation_loader: As for :func:`quantize_ptq`.

    Returns:
        The quantized model, with a report.

    Raises:
        ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError: As :func:`quantize_ptq` and
            :func:`timm_rep.utils.training.distil`.
    """
    check_quantization('inductor', 'minmax')
    check_float_model(model)
    check_distillation(epochs, lr)
    if epochs < 1:
        raise ValueError(f'epochs must be an integer >= 1, got {epochs!r}.')
    if images.device.type != 'cpu':
        raise ValueError(f'Expected images on the CPU for quantization-aware training, but got {images.device}.')
    if checkpoint is not None:
        checkpoint = Path(checkpoint)
        check_writable(checkpoint.parent)
    elif resume:
        raise ValueError('checkpoint must be given with resume=True, got None.')
    from .inductor import finish_training, prepare_training

    batches = read_images(images.calibration(max_images), max_images)
    check_finite(model, batches[0][:1])
    folded = folded_copy(model)
    if not any(p.requires_grad for p in model.parameters()):  # frozen for inference, but folding makes new parameters
        folded.requires_grad_()
    accuracy = float_accuracy(model, validation_loader, batches[0].shape[1:])
    with _errors(model, 'inductor'):
        prepared = prepare_training(folded, batches[0])
    distil(
        prepared, copy.deepcopy(model), images, epochs, lr, weight_decay=0., checkpoint=checkpoint, resume=resume)
    return _warn_if_slow(_finish(
        lambda: finish_training(prepared, batches[0].shape[1:]), model, folded, batches, validation_loader, accuracy,
        backend='inductor', per_channel=True, calibrator='minmax', percentile=100., qat_epochs=epochs))


def check_quantization(backend: str, calibrator: str, percentile: float = 99.99) -> None:
    """Check settings of a quantization, and that its packages are installed, without importing them.

    Raises:
        ModuleNotFoundError: A package is not installed.
        ValueError: The backend or the calibrator is unknown, or the percentile is not in (50, 100].
    """
    if backend not in BACKENDS:
        raise ValueError(f'backend must be one of {", ".join(map(repr, BACKENDS))}, got {backend!r}.')
    calibrators = BACKENDS[backend].calibrators
    if calibrator not in calibrators:
        raise ValueError(
            f'calibrator must be one of {", ".join(map(repr, calibrators))} for backend={backend!r}, got '
            f'{calibrator!r}.')
    if not isinstance(percentile, (int, float)) or not 50 < percentile <= 100:
        raise ValueError(f'percentile must be a number > 50 and <= 100, got {percentile!r}.')
    check_packages(f'backend={backend!r}', BACKENDS[backend])


def _program(name: str) -> Type[Program]:
    module, program = BACKENDS[name].program
    try:
        return getattr(importlib.import_module(f'timm_rep.deploy.{module}'), program)
    except (AttributeError, ImportError) as e:  # packages do not say which torch they require
        raise ImportError(
            f'backend={name!r} requires other releases of torch (found {torch.__version__}) or of '
            f'{", ".join(BACKENDS[name].packages)}: {e}.') from e


@contextlib.contextmanager
def _errors(model: nn.Module, backend: str) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # backends raise many types
        raise RuntimeError(
            f'Cannot quantize {type(model).__name__} with {backend!r}: {type(e).__name__}: {str(e).strip()}') from e


@torch.no_grad()
def _finish(
        quantize: Callable[[], Program],
        model: nn.Module,
        folded: nn.Module,
        batches: List[torch.Tensor],
        validation_loader: Optional[Iterable[Any]],
        accuracy: Optional[Tuple[float, int]],
        backend: str,
        **settings: Any,
) -> Quantized:
    """Quantize, and measure what the report holds: layers in int8, difference of the outputs, time, accuracy."""
    first = batches[0]
    with _errors(model, backend):
        program = quantize()
        int8, other = program.layers(first)
        seconds = time_calls(
            {'fp32': lambda: folded(first), 'int8': lambda: program(first)}, torch.device('cpu'), rounds=3)
        error = compare(model(first), program(first)).relative_rms
    milliseconds = {name: round(1e3 * statistics.median(values), 3) for name, values in seconds.items()}
    report = QuantizationReport(
        backend, **settings, images=sum(map(len, batches)), input_size=tuple(first.shape[1:]), int8_layers=int8,
        float_layers=other, relative_rms=error, milliseconds=milliseconds, machine=device_name(torch.device('cpu')),
        versions=package_versions(BACKENDS[backend]))
    quantized = Quantized(program, report)
    if accuracy is not None:
        before, images = accuracy
        with _errors(model, backend):
            after = evaluate(quantized, validation_loader, torch.device('cpu'))[1]
        quantized.report = replace(report, accuracy=Accuracy(round(before, 2), round(after, 2), images))
    return quantized


def _fewest_in_float(
        names: Sequence[str],
        simulation_passes: Callable[[List[str]], bool],
        quantize: Callable[[List[str]], Quantized],
        passes: Callable[[QuantizationReport], bool],
) -> Tuple[Quantized, bool]:
    """Quantize with the fewest of the first layers in float, and whether that passes.

    The simulation says where to begin; more layers are added by quantizing, since the backend's error may be larger.
    """
    from .diagnosis import fewest_to_keep

    kept = fewest_to_keep(names, simulation_passes)
    best = quantize(kept)
    if passes(best.report):
        return best, True
    found: Optional[Quantized] = None

    def quantized_passes(kept: List[str]) -> bool:
        nonlocal found
        candidate = quantize(kept)
        passed = passes(candidate.report)
        if passed:  # each one that passes keeps fewer layers than the one before
            found = candidate
        return passed

    if len(kept) < len(names):
        kept = fewest_to_keep(names, quantized_passes, least=len(kept) + 1)
        best = found or quantize(kept)
    return best, passes(best.report)


def _warn_if_slow(quantized: Quantized) -> Quantized:
    """Warn, at the caller of a public function, if int8 is slower than the folded model."""
    times = quantized.report.milliseconds
    if times and times['int8'] > times['fp32']:
        warnings.warn(
            f"int8 is slower than float32 on this machine: {times['int8']:.1f} ms for the first batch, the folded "
            f"model {times['fp32']:.1f} ms.", stacklevel=3)
    return quantized


def _passes(report: QuantizationReport, max_error: Optional[float], max_accuracy_loss: Optional[float]) -> bool:
    return (max_error is None or report.relative_rms <= max_error) and (
        max_accuracy_loss is None or (report.accuracy is not None and report.accuracy.loss <= max_accuracy_loss))
