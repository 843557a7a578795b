"""Measuring the figures of a model card: accuracy, size, speed."""
from datetime import date
from pathlib import Path
from typing import Iterable, List, Optional, Tuple

import torch
import torch.nn as nn

from timm_rep.convert import folded_copy
from timm_rep.convert.record import is_folded
from timm_rep.utils.data import ImageFolder, image_config, load_images
from timm_rep.utils.profiling import (
    count_macs,
    count_params,
    device_name,
    measure_throughput,
    model_input_size,
    versions,
)
from timm_rep.utils.training import evaluate

from ._sidecar import Accuracy, Cost, Form

__all__ = ['Prediction', 'measure_accuracy', 'measure_cost', 'write_predictions']

Prediction = Tuple[str, int, int]  # file, class, predicted class


def measure_accuracy(
        model: nn.Module,
        data_dir: str,
        split: str,
        device: torch.device,
        weights: str = '',
        batch_size: int = 256,
        every: int = 20,
) -> Tuple[Accuracy, List[Prediction]]:
    """Measure the accuracy on folders of images, preprocessed as in the model's pretrained_cfg.

    Args:
        model: Model in eval mode.
        data_dir: Folder that holds ``split``, with a folder of images for every class.
        split: Name of that folder.
        device: Device to evaluate on.
        weights: SHA-256 of the weights, to record.
        batch_size: Images per batch.
        every: Step of the sample of predictions, in the order of the images' paths.

    Returns:
        The accuracy, and predictions of every ``every``-th image.
    """
    config = image_config(model)
    dataset = ImageFolder(data_dir, split, config['input_size'][0])
    classes = len(dataset.classes)
    if classes != model.num_classes:
        raise ValueError(f'{data_dir!r} has {classes} classes in {split!r}, the model has {model.num_classes}.')
    recorded = tuple(model.pretrained_cfg['input_size'])
    if recorded != config['input_size']:
        raise ValueError(
            f"input_size in the model's pretrained_cfg must be {config['input_size']}, got {recorded}: correct it in "
            'config.json.')
    loader = load_images(dataset, config, batch_size)
    logits, top1 = evaluate(model.to(device), loader, device)
    targets = torch.tensor([target for _, target in dataset.samples])
    top5 = (logits.topk(min(5, classes)).indices == targets[:, None]).any(1).double().mean().item() * 100
    accuracy = Accuracy(
        top1=round(top1, 2), top5=round(top5, 2), images=len(dataset), split=split, machine=device_name(device),
        date=date.today().isoformat(), versions=versions(), weights=weights)
    sample = [
        (dataset.filename(i), targets[i].item(), logits[i].argmax().item()) for i in range(0, len(dataset), every)
    ]
    return accuracy, sample


def measure_cost(
        model: nn.Module,
        device: torch.device,
        weights: str = '',
        batch_size: int = 8,
        int8: Optional[nn.Module] = None,
) -> Cost:
    """Measure parameters, multiply-accumulates and throughput of a model, unfolded, folded and in int8.

    Args:
        model: Model in eval mode, in its training structure or folded.
        device: Device to measure on.
        weights: SHA-256 of the weights, to record.
        batch_size: Images per batch.
        int8: Quantized model, which runs on the CPU, and has the parameters and multiply-accumulates of the folded one.
    """
    model = model.to(device)
    if is_folded(model):
        forms = {'folded': model}
    else:
        forms = {'unfolded': model, 'folded': folded_copy(model)}
    images = torch.randn(batch_size, *model_input_size(model), device=device)
    counted = {**forms, 'int8': forms['folded']}
    if int8 is not None:
        forms['int8'] = int8
    with torch.inference_mode():
        throughput = measure_throughput(forms, images)
    return Cost(
        forms={
            name: Form(
                params=count_params(counted[name]), gmacs=round(count_macs(counted[name]).total / 1e9, 4),
                images_per_second=round(throughput[name], 1))
            for name in forms
        },
        batch_size=batch_size, img_size=list(images.shape[-2:]), dtype=str(images.dtype).removeprefix('torch.'),
        machine=device_name(device), date=date.today().isoformat(), versions=versions(), weights=weights)


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write predictions as comma separated values, one image per line."""
    lines = ['file,class,predicted', *(f'{file},{target},{predicted}' for file, target, predicted in predictions)]
    path.write_text('\n'.join(lines) + '\n', encoding='utf-8')
