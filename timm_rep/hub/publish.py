"""From a checkpoint to a folder that can be published, and from that to its folded form."""
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

import timm
import torch
import yaml
from timm.layers import get_spatial_dim
from timm.models import load_checkpoint

from timm_rep.scales import resolve_scales
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.profiling import model_input_size

from .card import TRAIN, write_card
from .files import CONFIG, SCALES, WEIGHTS, Published, sha256
from .folder import load_folder, split_name, staged_folder, write_folder, write_hashes
from .metrics import (
    METRICS,
    PREDICTIONS,
    class_names,
    measure_accuracy,
    measure_cost,
    read_metrics,
    write_metrics,
    write_predictions,
)

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
        measure: bool = False,
) -> None:
    """Bring a folder up to date: weights from a checkpoint, figures by measuring, the card and the hashes from those.

    Without a checkpoint the weights stay; figures stay with the weights that they are of.

    Args:
        folder: Named MODEL.TAG, for instance ``hub/repa_deit_tiny.cifar10``.
        checkpoint: Of a training run with the recipe.
        recipe: ``train.py --config`` of it; the folder's own train.yaml if None. The model is created with its
            model_kwargs, num_classes, in_chans and img_size, and is for images as it says (input_size, mean, std,
            interpolation, crop_pct).
        data_dir: Measure the accuracy on these folders of images, and record a sample of the predictions.
        split: The folder in it.
        dataset: Its name, for the card.
        half: Write parameters as float16.
        use_ema: Of the checkpoint take the moving average.
        device: To measure on.
        batch_size: To measure the throughput with.
        measure: Measure size and speed again, on this machine.

    Raises:
        FileNotFoundError: There are no weights, no recipe, or no such checkpoint.
        RuntimeError: The checkpoint does not fit the recipe, or a file cannot be read.
        ValueError: The folder is not named after a model, the recipe is of another one, or the images are of other
            classes. Whatever is raised, the folder is as it was.
    """
    folder, device = Path(folder).resolve(), torch.device(device)
    variant, _ = split_name(folder)
    recipe = Path(recipe) if recipe is not None else folder / TRAIN
    # all of it is made beside the folder, and moves there when nothing can fail any more
    with staged_folder(folder) as draft:
        for path in folder.iterdir():
            if path.is_file():
                shutil.copyfile(path, draft / path.name)
        if recipe.is_file() and recipe.resolve() != (folder / TRAIN).resolve():
            shutil.copyfile(recipe, draft / TRAIN)
        if checkpoint is not None:
            names = class_names(data_dir, split) if data_dir is not None else _names_before(folder, recipe)
            _write_trained(draft, variant, _read_recipe(recipe, variant), checkpoint, names, half, use_ema)
        if not (draft / CONFIG).is_file():
            raise FileNotFoundError(f'There is no {CONFIG} in {str(folder)!r}: give a checkpoint.')
        _measure(draft, data_dir, split, dataset, device, batch_size, measure)
        write_card(draft)
        write_hashes(draft)
    published = Published.in_folder(folder).hashes
    for name in (SCALES, PREDICTIONS):  # what belonged to the weights before
        if name not in published:
            (folder / name).unlink(missing_ok=True)


def _measure(
        folder: Path,
        data_dir: Optional[str],
        split: str,
        dataset: Optional[str],
        device: torch.device,
        batch_size: int,
        measure: bool,
) -> None:
    metrics = read_metrics(folder)
    if dataset is not None:
        metrics['dataset'] = dataset
    if (folder / WEIGHTS).is_file():
        model, of = load_folder(folder), {'weights': sha256(folder / WEIGHTS)}
        if data_dir is not None:
            accuracy, predictions = measure_accuracy(model, data_dir, split, device)
            metrics['accuracy'] = {**accuracy, **of}
            write_predictions(folder / PREDICTIONS, predictions)
        if measure or 'cost' not in metrics:
            metrics['cost'] = {**measure_cost(model, device, batch_size), **of}
    elif data_dir is not None:
        raise FileNotFoundError(f'There is no {WEIGHTS} to measure: give a checkpoint.')
    if 'accuracy' not in metrics:
        (folder / PREDICTIONS).unlink(missing_ok=True)
    write_metrics(folder / METRICS, metrics)


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
    write_folder(
        target, model, {k: v for k, v in published.model_args.items() if k != 'scales'},
        label_names=published.config.get('label_names'))
    metrics, of = read_metrics(folder), {'weights': sha256(target / WEIGHTS)}
    if 'accuracy' in metrics:
        metrics['accuracy'].update(of, of=f'{folder.name}, which computes the same')
    if 'cost' in metrics:
        metrics['cost'].update(of, forms={'folded': metrics['cost']['forms']['folded']})
    with replacing_files(target) as temporary:
        write_metrics(temporary / METRICS, metrics)
        if (folder / TRAIN).is_file():
            shutil.copyfile(folder / TRAIN, temporary / TRAIN)
    write_card(target)
    write_hashes(target)
    return target


def _read_recipe(path: Path, variant: str) -> Dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f'There is no recipe at {str(path)!r}: the train.py --config that the weights are of.')
    try:
        settings = yaml.safe_load(path.read_text(encoding='utf-8'))
    except yaml.YAMLError as e:
        raise RuntimeError(f'{str(path)!r} is no YAML: {e}') from e
    if not isinstance(settings, dict) or settings.get('model') != variant:
        raise ValueError(f'{str(path)!r} is no recipe of {variant}.')
    return settings


def _names_before(folder: Path, recipe: Path) -> Optional[List[str]]:
    """Of the classes, if the recipe is the one that the folder has: another one may be of other classes."""
    own = folder / TRAIN
    if not (own.is_file() and recipe.is_file() and recipe.read_bytes() == own.read_bytes()):
        return None
    try:
        return Published.in_folder(folder).config.get('label_names')
    except (FileNotFoundError, RuntimeError):  # which is what is to be written anew
        return None


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
    model_args.update({name: settings[name] for name in ('in_chans', 'global_pool') if settings.get(name) is not None})
    overlay = {key: settings[key] for key in _DATA if settings.get(key) is not None}
    size = settings.get('img_size')
    if size is not None:
        overlay.setdefault('input_size', [settings.get('in_chans', 3), size, size])
        if timm.get_pretrained_cfg(variant).fixed_input_size:
            model_args.setdefault('img_size', size)
    model = timm.create_model(variant, pretrained_cfg_overlay=overlay, **model_args)
    if classes is not None and len(classes) != model.num_classes:
        raise ValueError(f'The images are of {len(classes)} classes, the model of the recipe has {model.num_classes}.')
    load_checkpoint(model, os.fspath(checkpoint), use_ema=use_ema)
    _set_pool_size(model)
    scales = resolve_scales(model, getattr(model, 'scales_source', None))
    if scales is None:
        (folder / SCALES).unlink(missing_ok=True)  # of the weights before
    write_folder(folder, model, model_args, scales=scales, half=half, label_names=classes)


@torch.no_grad()
def _set_pool_size(model: torch.nn.Module) -> None:
    """Make the cfg of a model that has one say what is pooled of images of its size: that depends on the arguments."""
    cfg = model.pretrained_cfg
    if cfg.get('pool_size') is not None:
        features = model.eval().forward_features(torch.zeros(1, *model_input_size(model)))
        dims = get_spatial_dim(getattr(model, 'output_fmt', 'NCHW'))
        cfg['pool_size'] = tuple(features.shape[dim] for dim in dims)
