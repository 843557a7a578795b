"""The figures of a model card: accuracy, size, speed; measuring them, and the JSON files that hold them."""
import csv
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn

from timm_rep.convert import folded_copy
from timm_rep.convert.record import is_folded
from timm_rep.hub import WEIGHTS_NAME, sha256
from timm_rep.utils.data import ImageFolder, load_images
from timm_rep.utils.files import Sidecar
from timm_rep.utils.labels import recorded_labels
from timm_rep.utils.preprocessing import image_config
from timm_rep.utils.profiling import (
    count_macs,
    count_params,
    device_name,
    measure_throughput,
    model_input_size,
    versions,
)
from timm_rep.utils.training import evaluate

METRICS_NAME = 'metrics.json'
PREDICTIONS_NAME = 'predictions.csv'
REPORT_NAME = 'report.json'
PICTURE_NAME = 'accuracy.png'

Prediction = Tuple[str, int, int]  # file, class, predicted class


@dataclass(frozen=True)
class Accuracy:
    """Measured accuracy.

    Attributes:
        top1: Top-1 accuracy in percent.
        top5: Top-5 accuracy in percent.
        images: Number of images.
        split: Name of the folder of the images.
        machine: GPU, or CPU and number of threads.
        date: Date in ISO format.
        versions: Versions of the software.
        weights: SHA-256 of the weights.
        of: Folder whose model was measured, as text for the card, if it is not this one.
    """
    top1: float
    top5: float
    images: int
    split: str
    machine: str
    date: str
    versions: Dict[str, str]
    weights: str = ''
    of: Optional[str] = None


@dataclass(frozen=True)
class Form:
    """Parameters, multiply-accumulates of one image in 1e9, and throughput of a model, unfolded, folded or in int8."""
    params: int
    gmacs: float
    images_per_second: float

    def __post_init__(self) -> None:
        if self.images_per_second <= 0:
            raise ValueError(f'images_per_second must be positive, got {self.images_per_second!r}.')


@dataclass(frozen=True)
class Cost:
    """Measured size and speed.

    Attributes:
        forms: Measurements by form: 'folded', and where measured 'unfolded' and 'int8'.
        batch_size: Images per batch.
        img_size: Height and width of the images.
        dtype: Dtype of the images, without 'torch.'.
        machine: GPU, or CPU and number of threads.
        date: Date in ISO format.
        versions: Versions of the software, including 'torch'.
        weights: SHA-256 of the weights.
    """
    forms: Dict[str, Form]
    batch_size: int
    img_size: Sequence[int]
    dtype: str
    machine: str
    date: str
    versions: Dict[str, str]
    weights: str = ''

    def __post_init__(self) -> None:
        for name, key in ('forms', 'folded'), ('versions', 'torch'):
            if key not in getattr(self, name):
                raise ValueError(f'{name} must have {key!r}, got {list(getattr(self, name))}.')


@dataclass(frozen=True)
class Cited:
    """A figure from another source."""
    what: str
    value: Union[float, str]
    source: str


@dataclass(frozen=True)
class Metrics(Sidecar):
    """Figures of a model card; ``dataset`` is the name of the images."""
    dataset: Optional[str] = None
    accuracy: Optional[Accuracy] = None
    cost: Optional[Cost] = None
    cited: Optional[List[Cited]] = None


def read_metrics(folder: Path) -> Metrics:
    """Figures in metrics.json of a folder, without those measured with other weights than the present ones.

    Raises:
        RuntimeError: The file cannot be read, or a field is missing or of the wrong type.
    """
    path = folder / METRICS_NAME
    if not path.is_file():
        return Metrics()
    metrics = Metrics.from_json(path)
    weights = sha256(folder / WEIGHTS_NAME) if (folder / WEIGHTS_NAME).is_file() else None
    stale = {name: None for name in ('accuracy', 'cost')
             if getattr(metrics, name) is not None and getattr(metrics, name).weights != weights}
    return replace(metrics, **stale)


@dataclass(frozen=True)
class AccelerationReport(Sidecar):
    """Results of ``timm-rep accelerate``.

    Attributes:
        figures: Accuracy, size and speed by model, see :func:`timm_rep.accelerate.measure`.
        conversion: Report of the conversion, as a mapping.
        command: Command that repeats it.
        machine: GPU, or CPU and number of threads.
        versions: Versions of the software.
    """
    figures: Dict[str, Dict[str, Any]]
    conversion: Dict[str, Any]
    command: str
    machine: str
    versions: Mapping[str, str]


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
    dataset = ImageFolder(data_dir, split, config['input_size'][0], recorded_labels(model))
    classes = len(dataset.classes)
    if classes != model.num_classes:
        raise ValueError(
            f'Expected images of {model.num_classes} classes, as the model has, but {data_dir!r} has {classes} in '
            f'{split!r}.')
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
    if is_folded(model) or not hasattr(model, 'reparameterize'):  # a model of timm has no other form
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
    with path.open('w', encoding='utf-8', newline='') as file:
        csv.writer(file, lineterminator='\n').writerows([('file', 'class', 'predicted'), *predictions])
