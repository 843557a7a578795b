"""From a checkpoint to a folder that can be published, and from that to its folded form."""
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

import timm
import torch
import torch.nn as nn
import yaml
from timm.models import load_checkpoint

from timm_rep.atomic import replacing_files
from timm_rep.scales import Scales
from timm_rep.weights import WEIGHTS, Published

from .card import TRAIN, write_card
from .folder import load_folder, seal_folder, split_name, write_folder
from .metrics import METRICS, PREDICTIONS, measure_accuracy, measure_cost, read_metrics, write_predictions

__all__ = ['prepare_folder', 'write_folded']

# what a recipe says about the images that a model is for, in the words of timm's train.py and pretrained_cfg alike
_DATA = ('input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'num_classes')


def prepare_folder(
        folder: Union[str, os.PathLike],
        checkpoint: Optional[Union[str, os.PathLike]] = None,
        recipe: Optional[Union[str, os.PathLike]] = None,
        data_dir: Optional[str] = None,
        split: str = 'val',
        dataset: Optional[str] = None,
        half: bool = False,
        use_ema: bool = False,
        device: Union[str, torch.device] = 'cpu',
        batch_size: int = 8,
) -> None:
    """Bring a folder up to date: weights from a checkpoint, figures by measuring, the card and the hashes from those.

    Without a checkpoint the weights stay, without data_dir the accuracy, if it is of these weights.

    Args:
        folder: Named MODEL.TAG, for instance ``hub/repa_deit_tiny.cifar10``.
        checkpoint: Of a training run with the recipe.
        recipe: ``train.py --config`` of it; the folder's own train.yaml if None. The model is created with its
            model_kwargs, and is for images as it says (input_size, mean, std, interpolation, crop_pct).
        data_dir: Measure the accuracy on these folders of images, and record a sample of the predictions.
        split: The folder in it.
        dataset: Its name, for the card.
        half: Write parameters as float16.
        use_ema: Of the checkpoint take the moving average.
        device: To measure on.
        batch_size: To measure the throughput with.

    Raises:
        FileNotFoundError: There are no weights, no recipe, or no such checkpoint.
        RuntimeError: The checkpoint does not fit the recipe, or a file cannot be read.
        ValueError: The folder is not named after a model, or the recipe is of another one.
    """
    folder, device = Path(folder), torch.device(device)
    variant, _ = split_name(folder)
    metrics = read_metrics(folder)
    if checkpoint is not None:
        settings = _read_recipe(Path(recipe or folder / TRAIN), variant)
        classes = _class_names(data_dir, split)
        _write_trained(folder, variant, settings, checkpoint, classes, half, use_ema)
        metrics.pop('accuracy', None)
        metrics.pop('cost', None)
        (folder / PREDICTIONS).unlink(missing_ok=True)
    if recipe is not None and Path(recipe).resolve() != (folder / TRAIN).resolve():
        _copy(Path(recipe), folder / TRAIN)
    if dataset is not None:
        metrics['dataset'] = dataset
    if (folder / WEIGHTS).is_file():
        model = load_folder(folder)
        if data_dir is not None:
            metrics['accuracy'], predictions = measure_accuracy(model, data_dir, split, device)
            with replacing_files(folder) as temporary:
                write_predictions(temporary / PREDICTIONS, predictions)
        if 'cost' not in metrics:
            metrics['cost'] = measure_cost(model, device, batch_size)
    elif data_dir is not None:
        raise FileNotFoundError(f'There is no {WEIGHTS} in {str(folder)!r} to measure: give a checkpoint.')
    with replacing_files(folder) as temporary:
        (temporary / METRICS).write_text(json.dumps(metrics, indent=2) + '\n')
    write_card(folder)
    seal_folder(folder)


def write_folded(folder: Union[str, os.PathLike], parent: Union[str, os.PathLike]) -> Path:
    """Write the folded form of a published model into ``parent/<name of the folder>_folded``, and return that.

    It is smaller, and for those who do not train the model further.

    Raises:
        FileNotFoundError, RuntimeError: There is no published model, or a file is damaged.
        ValueError: It is folded already, or the folder is not named after a model.
    """
    folder = Path(folder).resolve()
    split_name(folder)
    published = Published.in_folder(folder)
    if published.model_args.get('reparameterized'):
        raise ValueError(f'{str(folder)!r} is folded already.')
    model = load_folder(folder, reparameterized=True)
    target = Path(parent) / f'{folder.name}_folded'
    write_folder(target, model, {k: v for k, v in published.model_args.items() if k != 'scales'})
    metrics = read_metrics(folder)
    if 'accuracy' in metrics:
        metrics['accuracy']['of'] = f'{folder.name}, which computes the same'
    if 'cost' in metrics:
        metrics['cost']['forms'] = {'folded': metrics['cost']['forms']['folded']}
    with replacing_files(target) as temporary:
        (temporary / METRICS).write_text(json.dumps(metrics, indent=2) + '\n')
        if (folder / TRAIN).is_file():
            shutil.copyfile(folder / TRAIN, temporary / TRAIN)
    write_card(target)
    seal_folder(target)
    return target


def _read_recipe(path: Path, variant: str) -> Dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f'There is no recipe at {str(path)!r}: the train.py --config that the weights are of.')
    try:
        settings = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise RuntimeError(f'{str(path)!r} is no YAML: {e}') from e
    if not isinstance(settings, dict) or settings.get('model') != variant:
        raise ValueError(f'{str(path)!r} is no recipe of {variant}.')
    return settings


def _class_names(data_dir: Optional[str], split: str) -> Optional[List[str]]:
    return sorted(path.name for path in (Path(data_dir) / split).iterdir() if path.is_dir()) if data_dir else None


def _write_trained(
        folder: Path,
        variant: str,
        settings: Mapping[str, Any],
        checkpoint: Union[str, os.PathLike],
        classes: Optional[List[str]],
        half: bool,
        use_ema: bool,
) -> None:
    if not os.path.isfile(checkpoint):
        raise FileNotFoundError(f'There is no checkpoint {os.fspath(checkpoint)!r}.')
    model_args = dict(settings.get('model_kwargs') or {})
    overlay = {key: settings[key] for key in _DATA if key in settings}
    model: nn.Module = timm.create_model(
        variant, pretrained_cfg_overlay=overlay, **({'scales': 'none'} if 'scales' in model_args else {}), **{
            key: value for key, value in model_args.items() if key != 'scales'})
    load_checkpoint(model, os.fspath(checkpoint), use_ema=use_ema)
    scales = Scales.load(model_args.pop('scales')) if 'scales' in model_args else None
    write_folder(folder, model, model_args, scales=scales, half=half, label_names=classes)


def _copy(source: Path, target: Path) -> None:
    with replacing_files(target.parent) as temporary:
        shutil.copyfile(source, temporary / target.name)
