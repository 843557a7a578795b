"""Convert a pretrained timm model to a faster one from unlabelled images, distil it, measure both, write a folder."""
import copy
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn

from timm_rep.convert import ConversionReport, convert_to_repa, folded_copy
from timm_rep.convert.linearize import DEFAULT_IDLE_RATIO, check_convertible, check_size
from timm_rep.convert.record import recorded_base
from timm_rep.deploy import quantized_files
from timm_rep.hub import CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, check_saveable, read_folder, save_folder
from timm_rep.publish import PICTURE_NAME, REPORT_NAME, AccelerationReport, accelerated_card, figures_table
from timm_rep.utils.atomic import recover
from timm_rep.utils.batches import batch_images
from timm_rep.utils.compare import check_finite, compare
from timm_rep.utils.data import Images
from timm_rep.utils.distributed import world_size_and_rank
from timm_rep.utils.files import StrPath
from timm_rep.utils.labels import recorded_labels
from timm_rep.utils.preprocessing import PREPROCESSING, TEST_PREPROCESSING
from timm_rep.utils.profiling import count_macs, count_params, device_name, measure_throughput, versions
from timm_rep.utils.training import check_distillation, distil, evaluate

__all__ = ['Accelerated', 'accelerate', 'check_output', 'figures_table', 'measure', 'write_model']

# state of an unfinished distillation in the folder of the result
STATE = 'distillation.pth'


@torch.inference_mode()
def measure(
        models: Mapping[str, nn.Module],
        images: Images,
        batch_sizes: Sequence[int] = (1, 8),
) -> Dict[str, Dict[str, Any]]:
    """Measure accuracy, size and throughput of a model and of models converted from it.

    Args:
        models: Models by name, the original first. They are moved to ``images.device`` and left in eval mode.
        images: Images whose validation split the accuracy is measured on, see :class:`timm_rep.utils.data.Images`.
        batch_sizes: Batch sizes to measure the throughput with.

    Returns:
        By name of the model: 'top1' in percent, and 'agreement', the percentage of images with the same prediction as
        the original, both rounded to two decimals; 'params', the number of parameters; 'gmacs', the
        multiply-accumulates per image in 1e9; 'images_per_second' by batch size, which is a string, as in JSON.
    """
    size = images.config['input_size']
    figures, original = {}, None
    for name, model in models.items():
        logits, top1 = evaluate(model.to(images.device), images.validation(), images.device)
        predicted = logits.argmax(1)
        original = predicted if original is None else original
        figures[name] = dict(
            top1=round(top1, 2),
            agreement=round((predicted == original).double().mean().item() * 100, 2),
            params=count_params(model),
            gmacs=count_macs(model, size).total / 1e9,
            images_per_second={},
        )
    for batch_size in batch_sizes:
        rates = measure_throughput(models, torch.randn(batch_size, *size, device=images.device))
        for name, rate in rates.items():
            figures[name]['images_per_second'][str(batch_size)] = float(f'{rate:.4g}')
    return figures


class Accelerated(NamedTuple):
    """Result of :func:`accelerate`.

    Attributes:
        model: The converted model, a ``repa_any``, folded.
        report: Report of the conversion.
        figures: Result of :func:`measure`, with the keys 'original', 'converted', 'distilled' (if distilled) and 'idle
            ratio R' for each ratio of a sweep. Empty on ranks other than 0.
    """
    model: nn.Module
    report: ConversionReport
    figures: Dict[str, Dict[str, Any]]


def accelerate(
        model: nn.Module,
        images: Images,
        idle_ratio: Optional[float] = None,
        macs: Optional[float] = None,
        calibration_images: int = 2048,
        distil_epochs: int = 0,
        lr: float = 1e-5,
        sweep: Sequence[float] = (),
        checkpoint: Optional[StrPath] = None,
        resume: bool = False,
) -> Accelerated:
    """Convert a copy of a pretrained model from data, distil it if asked to, and measure both.

    A distillation seeds the global random number generators of torch, NumPy and Python. In a process group, the ranks
    split the images of conversion and distillation and end up with the same model; rank 0 measures.

    Args:
        model: timm model; unchanged.
        images: Images to calibrate, distil and measure with, see :class:`timm_rep.utils.data.Images`.
        idle_ratio: Fraction of the hidden channels of every FFN that become linear, 0 to 1. Default: 0.75, without
            macs.
        macs: Fraction of the model's multiply-accumulates to keep, instead of idle_ratio.
        calibration_images: Largest number of images to fit to.
        distil_epochs: Epochs of distillation from the original; 0 for none.
        lr: Learning rate of the distillation.
        sweep: Distinct idle ratios to convert with and measure too, without distillation.
        checkpoint: File for the state of the distillation, written after each epoch. Default: none.
        resume: Continue the distillation from that file, if it exists.

    Returns:
        The folded model, distilled if asked for, the report of the conversion, and the measurements.

    Raises:
        ValueError: A setting is invalid; the model is not a timm model, was changed after its creation, does not take
            images of this size, or cannot be converted; or the checkpoint belongs to a different distillation. Except
            for the checkpoint, it is raised before any image is read.
        RuntimeError: The distillation diverged, or the folded model gives different outputs than the unfolded one.
    """
    check_size(idle_ratio, macs)
    if idle_ratio is None and macs is None:
        idle_ratio = DEFAULT_IDLE_RATIO
    labels = [f'idle ratio {ratio:g}' for ratio in sweep]
    if len({*labels}) < len(labels) or not all(0 <= ratio <= 1 for ratio in sweep):
        raise ValueError(f'sweep must hold distinct numbers from 0 to 1, got {list(sweep)}.')
    if resume and checkpoint is None:
        raise ValueError('checkpoint must be given with resume=True, got None.')
    if not isinstance(calibration_images, int) or isinstance(calibration_images, bool) or calibration_images < 1:
        raise ValueError(f'calibration_images must be an integer >= 1, got {calibration_images!r}.')
    check_distillation(distil_epochs, lr)
    checkpoint = None if checkpoint is None else Path(checkpoint)
    original = copy.deepcopy(model).eval().to(images.device)
    if not hasattr(original, '_model_args'):  # timm records them since 1.0.31
        original._model_args = {}
    check_convertible(original)
    if recorded_base(original) is None:
        raise ValueError(f'Expected a timm model, but got {type(model).__name__}: create it with timm.create_model().')
    with torch.inference_mode():
        check_finite(original, torch.zeros(1, *images.config['input_size'], device=images.device))
    check_saveable(original)
    folded = {'original': folded_copy(original)}  # refuses hooks that folding would drop
    rank = world_size_and_rank()[1]
    loader = list(images.calibration(calibration_images))  # decoded once for all ratios

    def convert(**kwargs: Any) -> Tuple[nn.Module, ConversionReport]:
        converted = copy.deepcopy(original)
        report = convert_to_repa(
            converted, calibration=loader, max_images=calibration_images, progress=not rank, **kwargs)
        # timm's validate.py prefers the test settings, with which nothing is measured here
        converted.pretrained_cfg.update(
            {**{name: images.config[name] for name in PREPROCESSING}, **dict.fromkeys(TEST_PREPROCESSING)})
        if recorded_labels(converted) is None:
            converted.pretrained_cfg['label_names'] = list(images.classes)
        # a fully frozen model was frozen for inference; the converted one must be trainable
        if not any(p.requires_grad for p in converted.parameters()):
            converted.requires_grad_()
        return converted, report

    result, report = convert(idle_ratio=idle_ratio, macs=macs)
    folded['converted'] = folded_copy(result)
    for label, ratio in zip(labels, sweep):
        if ratio != idle_ratio:
            folded[label] = folded_copy(convert(idle_ratio=ratio)[0])
    if distil_epochs:
        settings = dict(idle_ratio=idle_ratio, macs=macs, calibration_images=calibration_images)
        distil(result, original, images, distil_epochs, lr, checkpoint=checkpoint, resume=resume, settings=settings)
        folded['distilled'] = folded_copy(result)
    last = 'distilled' if distil_epochs else 'converted'
    _check_folded(result, folded[last], loader[0])
    if rank:
        return Accelerated(folded[last], report, {})
    figures = measure(folded, images)
    names = ['original', 'converted', *labels, *folded]  # labels without a model mean the converted one
    return Accelerated(folded[last], report, {name: figures.get(name, figures['converted']) for name in names})


@torch.inference_mode()
def _check_folded(unfolded: nn.Module, folded: nn.Module, batch: Any) -> None:
    # on the CPU, since a GPU may round the inputs of convolutions to TF32
    images = batch_images(batch)[:8].cpu()
    expected, found = (copy.deepcopy(model).cpu()(images) for model in (unfolded, folded))
    if not expected.isfinite().all():
        raise RuntimeError('The distillation diverged, the outputs are not finite: choose a smaller lr.')
    error = compare(expected, found).relative_rms
    if not error < 1e-3:
        raise RuntimeError(
            f'Folding must keep the outputs, but changes them by {error:.2g} (relative rms): timm_rep.verify(model) '
            'finds the layer.')


def check_output(folder: StrPath) -> Path:
    """Raise if a folder holds model files that :func:`write_model` did not write. Completes an interrupted write first.

    Raises:
        FileExistsError: The folder holds a file that would be replaced, and no report.json.
        RuntimeError: Its quantization.json cannot be read.
    """
    path = Path(folder)
    recover(path)
    quantized = [file.name for file in quantized_files(path)]
    names = (WEIGHTS_NAME, CONFIG_NAME, CARD_NAME, PICTURE_NAME, *quantized)
    found = [name for name in names if (path / name).exists()]
    if found and not (path / REPORT_NAME).is_file():
        raise FileExistsError(f'The folder {str(path)!r} holds {found[0]} of another model: choose a new folder.')
    return path


def write_model(folder: Path, result: Accelerated, command: str = '') -> None:
    """Write a folder that ``timm.create_model('local-dir:FOLDER', pretrained=True)`` loads, with all measurements.

    Files: model.safetensors, config.json, report.json, README.md, and accuracy.png if there are several idle ratios.
    The int8 model and the plot of a previous model are removed and, if ``result`` is distilled, the state of its
    distillation. The state of an unfinished distillation is kept.

    Args:
        folder: Folder, which is created or whose files are replaced.
        result: Result of :func:`accelerate`.
        command: Command that repeats it, for README.md.

    Raises:
        OSError, ValueError: As :func:`timm_rep.hub.save_folder`.
    """
    machine = device_name(next(result.model.parameters()).device)  # before the model moves to the CPU
    report = AccelerationReport(
        figures=result.figures, conversion=result.report.as_dict(), command=command, machine=machine,
        versions=versions())
    swept = any(name.startswith('idle ratio') for name in result.figures)

    def write_documents(draft: Path) -> None:
        report.to_json(draft / REPORT_NAME)
        name, config = folder.resolve().name, read_folder(draft).config
        (draft / CARD_NAME).write_text(accelerated_card(name, config, report, str(result.report)), encoding='utf-8')
        if swept:
            from timm_rep.plotting import plot_accuracy  # matplotlib is an extra

            plot_accuracy(result.figures).savefig(draft / PICTURE_NAME, dpi=120)

    outdated = [folder / PICTURE_NAME, *quantized_files(folder)]
    if 'distilled' in result.figures:
        outdated.append(folder / STATE)
    save_folder(copy.deepcopy(result.model).cpu(), folder, extra=write_documents, outdated=outdated)
