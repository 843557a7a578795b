"""A faster model from a pretrained one: conversion from data, distillation, measurements, a folder to load it from."""
import copy
import json
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from timm.models import save_for_hf

from timm_rep.convert import ConversionReport, convert_to_repa, folded_copy
from timm_rep.convert.record import recorded_base
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.checkpoints import contiguous_copy
from timm_rep.utils.data import PREPROCESSING, Images, batch_images
from timm_rep.utils.profiling import (
    count_macs,
    count_params,
    device_name,
    measure_throughput,
    versions,
)
from timm_rep.utils.training import distil, evaluate
from timm_rep._verify import check_finite, compare

__all__ = ['Accelerated', 'accelerate', 'check_output', 'measure', 'table', 'write_model']

# state of an unfinished distillation in the folder of the result
STATE = 'distillation.pth'
_REPORT = 'report.json'
_PICTURE = 'accuracy.png'
_FILES = ('model.safetensors', 'config.json', 'README.md', _PICTURE)


@torch.inference_mode()
def measure(
        models: Mapping[str, nn.Module],
        images: Images,
        batch_sizes: Sequence[int] = (1, 8),
) -> Dict[str, Dict[str, Any]]:
    """Measure accuracy, size and speed of a model and of converted ones.

    Args:
        models: Models by name; the first is the original.
        images: Images to measure the accuracy on.
        batch_sizes: Batch sizes of the throughput.

    Returns:
        By name: 'top1' in percent; 'agreement', the percentage of images with the prediction of the original; 'params';
        'gmacs' of one image; 'images_per_second' by batch size.
    """
    size = images.config['input_size']
    figures, predictions = {}, None
    for name, model in models.items():
        logits, top1 = evaluate(model.to(images.device), images.validation(), images.device)
        predicted = logits.argmax(1)
        predictions = predicted if predictions is None else predictions
        figures[name] = dict(
            top1=round(top1, 2),
            agreement=round((predicted == predictions).double().mean().item() * 100, 2),
            params=count_params(model),
            gmacs=round(count_macs(model, size).total / 1e9, 5),
            images_per_second={},
        )
    for batch_size in batch_sizes:
        rates = measure_throughput(models, torch.randn(batch_size, *size, device=images.device))
        for name, rate in rates.items():
            figures[name]['images_per_second'][str(batch_size)] = round(rate, 1)
    return figures


class Accelerated(NamedTuple):
    """Result of :func:`accelerate`.

    Attributes:
        model: The converted model, a ``repa_any``.
        report: What the conversion did.
        figures: What :func:`measure` gives, by 'original', 'converted', 'distilled' and, of a sweep, idle ratios.
    """
    model: nn.Module
    report: ConversionReport
    figures: Dict[str, Dict[str, Any]]


def accelerate(
        model: nn.Module,
        images: Images,
        idle_ratio: Optional[float] = None,
        macs: Optional[float] = None,
        calibration_images: int = 512,
        distil_epochs: int = 0,
        lr: float = 1e-4,
        sweep: Sequence[float] = (),
        checkpoint: Optional[Path] = None,
        resume: bool = False,
) -> Accelerated:
    """Convert a copy of a pretrained model from data, distil it if asked to, and measure both.

    A distillation seeds the generators of torch, NumPy and Python.

    Args:
        model: timm model, left as it is.
        images: Images to calibrate, distil and measure with.
        idle_ratio: Share of the hidden channels of every FFN that become linear (default: 0.75, without macs).
        macs: Share of the model's multiply-accumulates to keep, instead of idle_ratio.
        calibration_images: Number of images to fit to.
        distil_epochs: Epochs of distillation from the original; 0 for none.
        lr: Learning rate of the distillation.
        sweep: Further idle ratios to convert and measure, without distillation.
        checkpoint: File for the state of the distillation.
        resume: Continue the distillation from that file.

    Raises:
        ValueError: As :func:`timm_rep.convert.linearize_ffns` and :func:`distil`; the model is none of timm; or it does
            not take images of this size.
    """
    if idle_ratio is not None and macs is not None:
        raise ValueError(f'Expected either idle_ratio or macs, but got idle_ratio={idle_ratio!r} and macs={macs!r}.')
    original = copy.deepcopy(model).eval().to(images.device)
    if not hasattr(original, '_model_args'):  # timm records them since 1.0.31; write_model() checks them
        original._model_args = {}
    if recorded_base(original) is None:
        raise ValueError(f'{type(model).__name__} is no model of timm: create it with timm.create_model().')
    with torch.inference_mode():
        check_finite(original, torch.zeros(1, *images.config['input_size'], device=images.device))
    loader = list(images.calibration(calibration_images))  # decoded once for all ratios

    def convert(**kwargs) -> Tuple[nn.Module, ConversionReport]:
        converted = copy.deepcopy(original)
        report = convert_to_repa(
            converted, calibration=loader, max_images=calibration_images, progress=True, **kwargs)
        converted.pretrained_cfg.update({name: images.config[name] for name in PREPROCESSING})
        if not any(p.requires_grad for p in converted.parameters()):  # frozen for inference
            converted.requires_grad_()
        return converted, report

    result, report = convert(idle_ratio=idle_ratio, macs=macs)
    folded = {'original': folded_copy(original), 'converted': folded_copy(result)}
    for ratio in sweep:
        folded[f'idle ratio {ratio:g}'] = folded_copy(convert(idle_ratio=ratio)[0])
    if distil_epochs:
        distil(result, original, images, distil_epochs, lr, checkpoint=checkpoint, resume=resume)
        folded['distilled'] = folded_copy(result)
    last = 'distilled' if distil_epochs else 'converted'
    _check_folded(result, folded[last], loader[0])
    return Accelerated(folded[last], report, measure(folded, images))


@torch.inference_mode()
def _check_folded(unfolded: nn.Module, folded: nn.Module, batch: Any) -> None:
    images = batch_images(batch).to(next(folded.parameters()).device)
    error = compare(unfolded(images), folded(images), len(images)).relative_rms
    if not error < 1e-3:
        raise RuntimeError(f'The folded model computes something else: relative rms {error:.2g}.')


def check_output(folder: Path) -> None:
    """Refuse a folder whose files :func:`write_model` would replace, if it did not write them.

    Raises:
        FileExistsError: It holds such a file, and no report.json.
    """
    found = [name for name in _FILES if (folder / name).exists()]
    if found and not (folder / _REPORT).is_file():
        raise FileExistsError(f'The folder {str(folder)!r} holds {found[0]}, which would be replaced: name a new one.')


def write_model(folder: Path, result: Accelerated, command: str = '') -> None:
    """Write a folder that ``timm.create_model('local-dir:FOLDER', pretrained=True)`` loads, with every figure.

    Files: model.safetensors, config.json, report.json, README.md, and accuracy.png if there are several idle ratios.
    The state of the distillation that made the model is removed; that of another one stays, to be resumed.

    Args:
        folder: Folder, which is created or whose files are replaced.
        result: What :func:`accelerate` made.
        command: Command that repeats it, for README.md.

    Raises:
        RuntimeError: The model loaded from the folder computes something else.
    """
    machine = device_name(next(result.model.parameters()).device)  # that of the measurements
    swept = any(name.startswith('idle ratio') for name in result.figures)
    with replacing_files(folder) as draft:
        model = contiguous_copy(result.model).cpu()
        # timm before 1.0.31 does not record the arguments itself
        save_for_hf(model, str(draft), model_args=model._model_args, safe_serialization=True)
        loaded = timm.create_model(f'local-dir:{draft}', pretrained=True).eval()
        images = torch.randn(2, *model.pretrained_cfg['input_size'])
        with torch.inference_mode():
            if not torch.equal(loaded(images), model(images)):
                raise RuntimeError(
                    f'The model loaded from its new folder computes something else; {str(folder)!r} is as it was.')
        data = dict(
            figures=result.figures, conversion=result.report.as_dict(), command=command,
            machine=machine, versions=versions())
        (draft / _REPORT).write_text(json.dumps(data, indent=2) + '\n', encoding='utf-8')
        if swept:
            from timm_rep.plotting import plot_accuracy  # matplotlib is an extra

            plot_accuracy(result.figures).savefig(draft / _PICTURE, dpi=120)
        (draft / 'README.md').write_text(_card(folder, result, command, data), encoding='utf-8')
    if not swept:
        (folder / _PICTURE).unlink(missing_ok=True)  # of earlier figures
    if 'distilled' in result.figures:
        (folder / STATE).unlink(missing_ok=True)


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as a Markdown table."""
    sizes = list(next(iter(figures.values()))['images_per_second'])
    header = ['', 'top-1', 'same class as original', 'params', 'MACs', *(f'images/s, batch {size}' for size in sizes)]
    rows = [header, ['---', *['---:'] * (len(header) - 1)]]
    original = next(iter(figures.values()))
    for name, row in figures.items():
        rates = [
            f'{rate:.1f} ({rate / original["images_per_second"][size]:.2f}x)'
            for size, rate in row['images_per_second'].items()]
        rows.append([
            name, f'{row["top1"]:.2f}%', f'{row["agreement"]:.1f}%', f'{row["params"] / 1e6:.2f} M',
            f'{row["gmacs"] * 1e3:.1f} M', *rates])
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in rows)


def _card(folder: Path, result: Accelerated, command: str, data: Mapping[str, Any]) -> str:
    base = result.model._model_args['base']
    license_ = result.model.pretrained_cfg.get('license') or 'other'
    machine = f'Machine: {data["machine"]}. ' + ', '.join(f'{k} {v}' for k, v in data['versions'].items()) + '.'
    repeat = f'```sh\n{command}\n```\n\n' if command else ''
    return f"""---
library_name: timm
tags:
- image-classification
- timm
- timm-rep
license: {license_}
---
# {folder.resolve().name}

`{base}` with its FFNs converted from data by [timm-rep](https://github.com/timm-rep/timm-rep): a part of the hidden
channels of each FFN became linear, fitted to {result.report.images} unlabelled images.

```python
import timm, timm_rep

model = timm.create_model('local-dir:{folder.resolve().name}', pretrained=True).eval()
```

{table(result.figures)}

{machine}

{repeat}```text
{result.report}
```
"""
