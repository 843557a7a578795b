"""A faster model from a pretrained one: conversion from data, distillation, measurements, a folder to load it from."""
import copy
import json
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import timm
import torch
import torch.nn as nn
from timm.data import resolve_data_config
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from timm_rep.convert import ConversionReport, find_pointwise_ffns, linearize_ffns
from timm_rep.layers import active_channels
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.checkpoints import read_training_state, write_training_state
from timm_rep.utils.data import PREPROCESSING, ImageFolder, load_images
from timm_rep.utils.profiling import (
    count_macs,
    count_params,
    device_name,
    measure_throughput,
    model_input_size,
    versions,
)
from timm_rep.utils.training import evaluate, fit

__all__ = ['Accelerated', 'Images', 'accelerate', 'as_repa_any', 'distil', 'measure', 'table', 'write_model']

# arguments of create_model that are not those of the architecture
_NO_ARCHITECTURE = ('num_classes', 'features_only', 'pretrained_cfg', 'pretrained_cfg_overlay', 'cache_dir')
# state of an unfinished distillation in the folder of the result
STATE = 'distillation.pth'


class Images:
    """Folders of images for a model: for calibration and distillation, and for measuring the accuracy."""

    def __init__(
            self,
            model: nn.Module,
            root: str,
            train_split: str = 'train',
            val_split: str = 'val',
            batch_size: int = 64,
            workers: int = 0,
            device: Union[str, torch.device] = 'cpu',
            seed: int = 0,
            **data_config,
    ):
        """
        Args:
            model: Model whose input size and pretrained_cfg say how images are preprocessed.
            root: Folder that holds the splits.
            train_split: Name of the folder with the images for calibration and distillation.
            val_split: Name of the folder with the images to measure the accuracy on.
            batch_size: Images in a batch.
            workers: Number of processes that load images; 0 loads them in this process.
            device: Device of the batches.
            seed: Seed of the choice of calibration images.
            data_config: Preprocessing instead of the model's, as for timm's ``resolve_data_config``: 'img_size',
                'mean', 'std', 'interpolation', 'crop_pct'; None for the model's.

        Raises:
            FileNotFoundError: A split has no folder, or no images.
            ValueError: The images to measure the accuracy on have another number of classes than the model.
        """
        self.root, self.splits = root, (train_split, val_split)
        given = {name: value for name, value in data_config.items() if value is not None}
        size = {} if 'img_size' in given else {'input_size': model_input_size(model)}
        self.config = resolve_data_config({**size, **given}, model=model)
        self.workers, self.device, self.seed = workers, torch.device(device), seed
        for split in self.splits:
            dataset = ImageFolder(root, split)
            classes = len(dataset.classes)
            if split == train_split:
                self.batch_size = min(batch_size, len(dataset))  # timm's loader drops an incomplete batch
            if split == val_split and classes != model.num_classes:
                raise ValueError(
                    f'{root!r} has {classes} classes in {split!r}, the model has {model.num_classes}: the accuracy is '
                    'measured on images with the labels of the model.')

    def _loader(self, dataset: ImageFolder, **kwargs):
        return load_images(dataset, self.config, self.batch_size, self.workers, **kwargs)

    def calibration(self, count: int):
        """Loader of ``count`` random images of the training split, preprocessed as for validation."""
        dataset = ImageFolder(self.root, self.splits[0])
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(self.seed))
        dataset.samples = [dataset.samples[i] for i in order[:count].tolist()]
        return self._loader(dataset)

    def training(self):
        """Loader of the training split, with random crops and flips."""
        return self._loader(
            ImageFolder(self.root, self.splits[0]), is_training=True, scale=(0.7, 1.), color_jitter=None)

    def validation(self):
        """Loader of the validation split."""
        return self._loader(ImageFolder(self.root, self.splits[1]))


def distil(
        model: nn.Module,
        teacher: nn.Module,
        images: Images,
        epochs: int,
        lr: float = 5e-4,
        weight_decay: float = 0.05,
        checkpoint: Optional[Path] = None,
        resume: bool = False,
) -> None:
    """Train a converted model on the outputs of the original one, without labels; in place.

    AdamW with a cosine schedule; the loss is the Kullback-Leibler divergence of the two outputs.

    Args:
        model: Converted model.
        teacher: Original model.
        images: Images to train on.
        epochs: Number of epochs.
        lr: Learning rate of the first step.
        weight_decay: Weight decay of the weight matrices.
        checkpoint: File that the state is written to after every epoch, to resume from.
        resume: Continue from that file.

    Raises:
        ValueError: The file cannot be read, or is of a distillation with other settings.
        OSError: The file cannot be written.
    """
    device = images.device
    model.to(device)
    teacher.to(device).eval()
    loader = images.training()
    optimizer = create_optimizer_v2(model, opt='adamw', lr=lr, weight_decay=weight_decay)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs * len(loader), t_in_epochs=False)
    settings = dict(epochs=epochs, lr=lr, weight_decay=weight_decay, steps=len(loader), seed=images.seed)
    start = 0
    if resume and checkpoint.is_file():
        state = read_training_state(checkpoint, settings, 'distillation')
        model.load_state_dict(state['model'])
        optimizer.load_state_dict(state['optimizer'])
        start = state['epoch']

    def save(epoch: int) -> None:
        write_training_state(checkpoint, dict(
            settings=settings, model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch))

    fit(
        model, optimizer, scheduler, loader, epochs, device=device, start=start, teacher=teacher, clip_grad=1.,
        seed=images.seed, after_epoch=save if checkpoint else None, description='distillation')
    model.eval()


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


def as_repa_any(
        model: nn.Module,
        original: nn.Module,
        report: ConversionReport,
        data_config: Mapping[str, Any],
) -> nn.Module:
    """A converted model as the registered architecture ``repa_any``, which config.json and the Hub know.

    Args:
        model: Model that :func:`timm_rep.convert.linearize_ffns` converted.
        original: The same model before the conversion.
        report: The report of the conversion.
        data_config: Preprocessing of the images, for its pretrained_cfg.

    Returns:
        A new model with the weights of ``model``.
    """
    converted = {ffn.name: ffn for ffn in report.ffns}
    found = [(ffn, converted.get(ffn.name)) for ffn in find_pointwise_ffns(original)[0]]
    ratios = [new and _ratio(new.active_features, ffn.hidden_features) for ffn, new in found]
    paths = [new is None or new.linear_path for _, new in found]
    args = {k: v for k, v in getattr(original, '_model_args', {}).items() if k not in _NO_ARCHITECTURE}
    result = timm.create_model(
        'repa_any',
        base=original.pretrained_cfg['architecture'],
        idle_ratio=ratios[0] if len(set(ratios)) == 1 else ratios,
        linear_path=paths[0] if len(set(paths)) == 1 else paths,
        reparameterized=True,
        num_classes=original.num_classes,
        **args,
    )
    result.load_state_dict(model.state_dict())
    result.pretrained_cfg.update({
        name: original.pretrained_cfg[name] for name in ('label_names', 'license') if name in original.pretrained_cfg})
    result.pretrained_cfg.update({name: data_config[name] for name in PREPROCESSING})
    return result.eval()


def _ratio(active: int, hidden: int) -> float:
    """An idle ratio of few digits that gives this number of active channels."""
    digits = range(1, 17)
    return next(
        ratio for ratio in [*(round(1 - active / hidden, n) for n in digits), 1 - (active - 0.5) / hidden]
        if active_channels(hidden, ratio) == active)


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
        idle_ratio: float = 0.75,
        macs: Optional[float] = None,
        calibration_images: int = 512,
        distil_epochs: int = 0,
        lr: float = 5e-4,
        sweep: Sequence[float] = (),
        checkpoint: Optional[Path] = None,
        resume: bool = False,
) -> Accelerated:
    """Convert a copy of a pretrained model from data, distil it if asked to, and measure both.

    Args:
        model: timm model, left as it is.
        images: Images to calibrate, distil and measure with.
        idle_ratio: Share of the hidden channels of every FFN that become linear.
        macs: Share of the model's multiply-accumulates to keep, instead of idle_ratio.
        calibration_images: Number of images to fit to.
        distil_epochs: Epochs of distillation from the original; 0 for none.
        lr: Learning rate of the distillation.
        sweep: Further idle ratios to convert and measure, without distillation.
        checkpoint: File for the state of the distillation.
        resume: Continue the distillation from that file.

    Raises:
        ValueError: As :func:`timm_rep.convert.linearize_ffns` and :func:`distil`.
    """
    original = model.eval().to(images.device)
    loader = list(images.calibration(calibration_images))  # decoded once for all ratios

    def convert(**kwargs) -> Tuple[nn.Module, ConversionReport]:
        converted = copy.deepcopy(original)
        report = linearize_ffns(converted, loader, max_images=calibration_images, progress=True, **kwargs)
        return as_repa_any(converted, original, report, images.config).to(images.device), report

    result, report = convert(**(dict(macs=macs) if macs is not None else dict(idle_ratio=idle_ratio)))
    models = {'original': original, 'converted': result}
    for ratio in sweep:
        models[f'idle ratio {ratio:g}'] = convert(idle_ratio=ratio)[0]
    if distil_epochs:
        result = copy.deepcopy(result)
        distil(result, original, images, distil_epochs, lr, checkpoint=checkpoint, resume=resume)
        models['distilled'] = result
    return Accelerated(result, report, measure(models, images))


def write_model(folder: Path, result: Accelerated, command: str = '') -> None:
    """Write a folder that ``timm.create_model('local-dir:FOLDER', pretrained=True)`` loads, with every figure.

    Files: model.safetensors, config.json, report.json, README.md, and accuracy.png if there are several idle ratios.
    The state of a finished distillation is removed.

    Args:
        folder: Folder, which is created or whose files are replaced.
        result: What :func:`accelerate` made.
        command: Command that repeats it, for README.md.

    Raises:
        RuntimeError: The model loaded from the folder computes something else.
    """
    machine = device_name(next(result.model.parameters()).device)  # that of the measurements
    with replacing_files(folder) as draft:
        model = result.model.cpu()
        save_for_hf(model, str(draft), safe_serialization=True)
        loaded = timm.create_model(f'local-dir:{draft}', pretrained=True).eval()
        images = torch.randn(2, *model.pretrained_cfg['input_size'])
        with torch.inference_mode():
            if not torch.equal(loaded(images), model(images)):
                raise RuntimeError(
                    f'The model loaded from its new folder computes something else; {str(folder)!r} is as it was.')
        data = dict(
            figures=result.figures, conversion=result.report.as_dict(), command=command,
            machine=machine, versions=versions())
        (draft / 'report.json').write_text(json.dumps(data, indent=2) + '\n', encoding='utf-8')
        if any(name.startswith('idle ratio') for name in result.figures):
            from timm_rep.plotting import plot_accuracy  # matplotlib is an extra

            plot_accuracy(result.figures).savefig(draft / 'accuracy.png', dpi=120)
        (draft / 'README.md').write_text(_card(folder, result, command, data), encoding='utf-8')
    (folder / STATE).unlink(missing_ok=True)


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as a Markdown table."""
    sizes = list(next(iter(figures.values()))['images_per_second'])
    header = ['', 'top-1', 'as original', 'params', 'MACs', *(f'images/s, batch {size}' for size in sizes)]
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
