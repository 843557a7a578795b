"""Measured figures of a model card: accuracy, size, speed."""
import json
from datetime import date
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

import torch
import torch.nn as nn
from timm.utils import reparameterize_model

from timm_rep.convert.record import is_folded
from timm_rep.utils.data import ImageFolder, image_config, load_images
from timm_rep.utils.files import COUNT, MAPPING, NUMBER, POSITIVE, STRING, TEXT, check_fields, list_of, read_json
from timm_rep.utils.profiling import (
    count_macs,
    count_params,
    device_name,
    measure_throughput,
    model_input_size,
    versions,
)
from timm_rep.utils.training import evaluate

from .repository import WEIGHTS, sha256

__all__ = [
    'METRICS',
    'PREDICTIONS',
    'Prediction',
    'drop_predictions',
    'measure_accuracy',
    'measure_cost',
    'read_metrics',
    'write_metrics',
    'write_predictions',
]

METRICS = 'metrics.json'
PREDICTIONS = 'predictions.csv'

Prediction = Tuple[str, int, int]  # file, class, predicted class

_FIELDS = {'dataset': STRING, 'accuracy': MAPPING, 'cost': MAPPING, 'cited': list_of(MAPPING)}
_ACCURACY = {'top1': NUMBER, 'top5': NUMBER, 'images': COUNT, 'split': STRING, 'date': STRING}
_COST = {
    'forms': MAPPING, 'batch_size': COUNT, 'dtype': STRING, 'machine': STRING, 'date': STRING, 'versions': MAPPING}
_FORM = {'params': NUMBER, 'gmacs': NUMBER, 'images_per_second': POSITIVE}


def read_metrics(folder: Path) -> Dict[str, Any]:
    """metrics.json of a folder, without the figures of other weights than the present ones; {} if there is none.

    Raises:
        RuntimeError: The file cannot be read, or a field is missing or of the wrong type.
    """
    path = folder / METRICS
    if not path.is_file():
        return {}
    source = repr(str(path))
    metrics = check_fields(read_json(path), source, {}, _FIELDS)
    weights = sha256(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else None
    metrics = {
        name: value for name, value in metrics.items()
        if name not in ('accuracy', 'cost') or (value is not None and value.get('weights') == weights)
    }
    if 'accuracy' in metrics:
        check_fields(metrics['accuracy'], f'{source}: accuracy', _ACCURACY, {'of': STRING})
    if 'cost' in metrics:
        cost = check_fields(metrics['cost'], f'{source}: cost', _COST)
        check_fields(cost['versions'], f'{source}: versions', {'torch': STRING})
        for name, form in check_fields(cost['forms'], f'{source}: forms', {'folded': MAPPING}).items():
            check_fields(form, f'{source}: {name}', _FORM)
    for figure in metrics.get('cited') or ():
        check_fields(figure, f'{source}: cited', dict.fromkeys(('what', 'value', 'source'), TEXT))
    return metrics


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write metrics.json."""
    path.write_text(json.dumps(metrics, indent=2) + '\n', encoding='utf-8')


def measure_accuracy(
        model: nn.Module,
        data_dir: str,
        split: str,
        device: torch.device,
        batch_size: int = 256,
        every: int = 20,
) -> Tuple[Dict[str, Any], List[Prediction]]:
    """Measure the accuracy on folders of images, preprocessed as the model's pretrained_cfg says.

    Args:
        model: Model in eval mode.
        data_dir: Folder that holds ``split``, with a folder of images for every class.
        split: Name of that folder.
        device: Device to evaluate on.
        batch_size: Images per batch.
        every: Step of the sample of predictions, in the order of the images' paths.

    Returns:
        Figures for metrics.json, accuracies in percent; predictions of every ``every``-th image.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: The number of classes or the size is not the model's, an image cannot be decoded, or the model takes
            images of neither 1 nor 3 channels.
    """
    config = image_config(model)
    dataset = ImageFolder(data_dir, split, config['input_size'][0])
    classes = len(dataset.classes)
    if classes != model.num_classes:
        raise ValueError(f'{data_dir!r} has {classes} classes in {split!r}, the model has {model.num_classes}.')
    recorded = tuple(model.pretrained_cfg['input_size'])
    if recorded != config['input_size']:
        raise ValueError(
            f"The model is for images of {config['input_size']}, the input_size of its pretrained_cfg is {recorded}: "
            'correct it in config.json.')
    loader = load_images(dataset, config, batch_size)
    logits, top1 = evaluate(model.to(device), loader, device)
    targets = torch.tensor([target for _, target in dataset.samples])
    top5 = (logits.topk(min(5, classes)).indices == targets[:, None]).any(1).double().mean().item() * 100
    metrics = dict(
        top1=round(top1, 2), top5=round(top5, 2), images=len(dataset), split=split,
        machine=device_name(device), date=date.today().isoformat(), versions=versions())
    sample = [
        (dataset.filename(i), targets[i].item(), logits[i].argmax().item()) for i in range(0, len(dataset), every)
    ]
    return metrics, sample


def measure_cost(
        model: nn.Module,
        device: torch.device,
        batch_size: int = 8,
        int8: Optional[nn.Module] = None,
) -> Dict[str, Any]:
    """Measure parameters, multiply-accumulates and throughput of a model, unfolded, folded and in int8.

    Args:
        model: Model in eval mode, in its training structure or folded.
        device: Device to measure on.
        batch_size: Images per batch.
        int8: The quantized model, which runs on the CPU; its numbers of parameters and multiply-accumulates are those
            of the folded one.

    Returns:
        Figures for metrics.json.
    """
    model = model.to(device)
    if is_folded(model):
        forms = {'folded': model}
    else:
        forms = {'unfolded': model, 'folded': reparameterize_model(model)}
    images = torch.randn(batch_size, *model_input_size(model), device=device)
    counted = {**forms, 'int8': forms['folded']}
    if int8 is not None:
        forms['int8'] = int8
    with torch.inference_mode():
        throughput = measure_throughput(forms, images)
    return dict(
        forms={
            name: dict(
                params=count_params(counted[name]), gmacs=round(count_macs(counted[name]).total / 1e9, 4),
                images_per_second=round(throughput[name], 1))
            for name in forms
        },
        batch_size=batch_size, img_size=list(images.shape[-2:]), dtype=str(images.dtype).removeprefix('torch.'),
        machine=device_name(device), date=date.today().isoformat(), versions=versions())


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write predictions as comma separated values, one image per line."""
    lines = ['file,class,predicted', *(f'{file},{target},{predicted}' for file, target, predicted in predictions)]
    path.write_text('\n'.join(lines) + '\n', encoding='utf-8')


def drop_predictions(folder: Path) -> None:
    """Remove predictions.csv of a folder whose metrics.json has no accuracy of its present weights.

    Raises:
        RuntimeError: As :func:`read_metrics`.
    """
    if 'accuracy' not in read_metrics(folder):
        (folder / PREDICTIONS).unlink(missing_ok=True)
