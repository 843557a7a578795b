"""Making a folder to publish, and its folded form, from a checkpoint."""
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

import torch
from timm.layers import get_spatial_dim

from timm_rep.deploy import load_quantized, quantized_files
from timm_rep.hub import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    load_folder,
    read_folder,
    scales_of,
    sha256,
    split_name,
    write_model,
)
from timm_rep.utils.checkpoints import load_checkpoint
from timm_rep.utils.compare import name_of_not_finite
from timm_rep.utils.data import ImageFolder
from timm_rep.utils.files import StrPath, read_text
from timm_rep.utils.labels import labels_by_index
from timm_rep.utils.profiling import model_input_size

from ._card import RECIPE_NAME
from ._draft import draft_of, drop_measured, drop_weights, write_documents
from ._metrics import PREDICTIONS_NAME, Metrics, measure_accuracy, measure_cost, read_metrics, write_predictions
from ._recipe import create_trained, model_arguments, public_recipe, read_recipe


def prepare_folder(
        folder: StrPath,
        checkpoint: Optional[StrPath] = None,
        recipe: Optional[StrPath] = None,
        data_dir: Optional[str] = None,
        split: str = 'val',
        dataset: Optional[str] = None,
        half: bool = False,
        use_ema: bool = False,
        device: Union[str, torch.device] = 'cpu',
        batch_size: Optional[int] = None,
        measure: bool = False,
        org: Optional[str] = None,
) -> None:
    """Bring a folder up to date: weights from a checkpoint, measured figures, model card, hashes.

    Measurements and the int8 model added by ``timm-rep quantize -o FOLDER`` are kept as long as the weights do not
    change. The throughput of the int8 model is measured only with ``device='cpu'``. If an error is raised, the folder
    stays as it was.

    Args:
        folder: Folder named MODEL.TAG, for instance ``hub/repa_any.cifar10``.
        checkpoint: Checkpoint of a training run with the recipe. Default: the weights of the folder stay.
        recipe: File for ``train.py --config`` in the folder of the checkpoint. Default: train.yaml of the folder. The
            model is created with its model_kwargs, num_classes, in_chans, gp, bn_eps and img_size, and its
            pretrained_cfg gets input_size, mean, std, interpolation, crop_pct and crop_mode.
        data_dir: Folder of images to measure the accuracy on, with a sample of the predictions. Default: both stay.
        split: Name of the folder in it.
        dataset: Name of the images, for the card.
        half: Write parameters as float16; without a checkpoint, convert the weights of the folder.
        use_ema: Use the moving average of the weights in the checkpoint.
        device: Device to measure on.
        batch_size: Batch size to measure the throughput with. Default: that of the known speed, or 8.
        measure: Measure size and speed even if they are known with this batch size.
        org: User or organization on the Hub, for the names in the card. Default: TIMM_REP_ORG, or 'timm-rep'.

    Raises:
        FileNotFoundError: Weights, recipe or checkpoint do not exist; or the released scales of the training cannot be
            downloaded.
        OverflowError: A weight is outside of the range of float16, with ``half``.
        RuntimeError: The checkpoint does not fit the recipe, or a file cannot be read.
        ValueError: The folder is not named after a model; the recipe is not one of this model, or is elsewhere; the
            images have other classes or cannot be decoded; the checkpoint has no moving average, or a weight that is
            not finite; or recipe or use_ema are given without a checkpoint.
    """
    folder, device = Path(folder).resolve(), torch.device(device)
    _, tag = split_name(folder)
    if checkpoint is None and (use_ema or recipe is not None):
        raise ValueError(f'checkpoint must be given with {"use_ema" if use_ema else "recipe"}, got None.')
    with draft_of(folder) as draft:
        published = _config(draft).get('sha256', {})
        if checkpoint is not None:
            _write_trained(draft, folder, Path(checkpoint), recipe, data_dir, split, half, use_ema)
        for name in CONFIG_NAME, WEIGHTS_NAME:
            if not (draft / name).is_file():
                raise FileNotFoundError(f'Expected {name} in {str(folder)!r}, but there is none: pass a checkpoint.')
        if checkpoint is None and half:
            model, config, before = load_folder(draft), read_folder(draft).config, sha256(draft / WEIGHTS_NAME)
            _set_pool_size(model)
            write_model(
                model, draft, model_args=config.get('model_args'), scales=scales_of(model), tag=tag, half=True)
            if sha256(draft / WEIGHTS_NAME) != before:
                drop_measured(draft)
        model, weights, metrics = load_folder(draft), sha256(draft / WEIGHTS_NAME), read_metrics(draft)
        if dataset is not None:
            metrics = replace(metrics, dataset=dataset)
        if data_dir is not None:
            accuracy, predictions = measure_accuracy(model, data_dir, split, device, weights)
            metrics = replace(metrics, accuracy=accuracy)
            write_predictions(draft / PREDICTIONS_NAME, predictions)
        metrics = _without_another_int8(metrics, draft, published)
        measured, on_cpu = metrics.cost.forms if metrics.cost else {}, device.type == 'cpu'
        known = metrics.cost.batch_size if metrics.cost else None
        batch_size = batch_size or known or 8
        has_int8 = on_cpu and bool(quantized_files(draft))
        if measure or batch_size != known or (on_cpu and ('int8' in measured) != has_int8):
            int8 = load_quantized(draft) if has_int8 else None
            metrics = replace(metrics, cost=measure_cost(model, device, weights, batch_size, int8))
        write_documents(draft, metrics, org)


def _write_trained(
        draft: Path,
        folder: Path,
        checkpoint: Path,
        recipe: Optional[StrPath],
        data_dir: Optional[str],
        split: str,
        half: bool,
        use_ema: bool,
) -> None:
    """Write the model of a checkpoint, in place of the weights that were there and the files made from them."""
    if not checkpoint.is_file():
        raise FileNotFoundError(f'Expected a checkpoint, but {str(checkpoint)!r} does not exist.')
    variant, tag = split_name(folder)
    recipe, own = Path(recipe) if recipe is not None else folder / RECIPE_NAME, folder / RECIPE_NAME
    settings = read_recipe(recipe, variant)
    if settings.get('class_map'):
        raise ValueError(
            f'{str(recipe)!r}: class_map must not be set: here the folders of images, in their order in timm, '
            'are the classes.')
    if recipe.resolve().parent not in (folder, checkpoint.resolve().parent):
        raise ValueError(f'The recipe must be in the folder of the checkpoint, got {str(recipe)!r}: copy it there.')
    published = read_text(recipe) if recipe.resolve() == own.resolve() else public_recipe(recipe)
    classes: Optional[Sequence[str]] = None
    if data_dir is not None:
        classes = ImageFolder(data_dir, split).classes
    elif own.is_file() and read_text(own) == published:  # a different recipe may have different classes
        classes = labels_by_index(_config(folder).get('label_names'))
    model = create_trained(settings, recipe, f'{variant}.{tag}')
    if classes is not None and len(classes) != model.num_classes:
        raise ValueError(
            f'Expected images of {model.num_classes} classes, for the model of the recipe, but got {len(classes)}: set '
            'its num_classes.')
    load_checkpoint(model, checkpoint, use_ema)
    _check_finite(model, checkpoint)
    drop_weights(draft)
    (draft / RECIPE_NAME).write_text(published, encoding='utf-8')
    _set_pool_size(model)
    write_model(
        model, draft, model_args=model_arguments(settings), scales=scales_of(model), label_names=classes, tag=tag,
        half=half)


def _check_finite(model: torch.nn.Module, source: StrPath) -> None:
    """Raise ValueError if a weight or a running statistic is not finite."""
    name = name_of_not_finite(model)
    if name is not None:
        raise ValueError(f'The weights must be finite, but {name} of {str(source)!r} is not: pass another file.')


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        return read_folder(folder).config
    except (FileNotFoundError, RuntimeError):  # it is about to be replaced
        return {}


def _without_another_int8(metrics: Metrics, folder: Path, published: Mapping[str, str]) -> Metrics:
    """Figures without the speed of an int8 model whose files are no longer those published."""
    files = quantized_files(folder)
    if metrics.cost is None or (files and all(published.get(path.name) == sha256(path) for path in files)):
        return metrics
    forms = {name: form for name, form in metrics.cost.forms.items() if name != 'int8'}
    return replace(metrics, cost=replace(metrics.cost, forms=forms))


@torch.no_grad()
def _set_pool_size(model: torch.nn.Module) -> None:
    """Set pool_size of the pretrained_cfg, if it has one: the features' size, which depends on the arguments."""
    cfg = model.pretrained_cfg
    if cfg.get('pool_size') is not None:
        features = model.eval().forward_features(torch.zeros(1, *model_input_size(model)))
        dims = get_spatial_dim(getattr(model, 'output_fmt', 'NCHW'))
        cfg['pool_size'] = tuple(features.shape[dim] for dim in dims)


def write_folded(folder: StrPath, parent: StrPath, org: Optional[str] = None) -> Path:
    """Write the folded form of a published model, which is smaller and cannot be trained further.

    Args:
        folder: Folder of the published model.
        parent: Folder to write ``<name of the folder>_folded`` into.
        org: As in :func:`prepare_folder`.

    Returns:
        The folder that was written.

    Raises:
        FileNotFoundError, RuntimeError: A file is missing or damaged.
        ValueError: It is folded already, or has no folded form, or the folder is not named after a model.
    """
    folder = Path(folder).resolve()
    _, tag = split_name(folder)
    repo = read_folder(folder)
    if repo.model_args.get('reparameterized'):
        raise ValueError(f'Expected an unfolded model, but {str(folder)!r} is folded already.')
    if not hasattr(load_folder(folder), 'reparameterize'):
        raise ValueError(f'Expected a model with a folded form, but {repo.config["architecture"]} has none.')
    model = load_folder(folder, reparameterized=True)
    target = Path(parent).resolve() / f'{folder.name}_folded'
    with draft_of(target) as draft:
        for name in RECIPE_NAME, PREDICTIONS_NAME:  # of earlier weights
            (draft / name).unlink(missing_ok=True)
        drop_weights(draft)
        args = {name: value for name, value in repo.model_args.items() if name != 'scales'}
        write_model(model, draft, model_args=args, tag=f'{tag}_folded')
        metrics, weights = read_metrics(folder), sha256(draft / WEIGHTS_NAME)
        if metrics.accuracy is not None:
            of = f'{folder.name}, which computes the same'
            metrics = replace(metrics, accuracy=replace(metrics.accuracy, weights=weights, of=of))
        if metrics.cost is not None:
            forms = {'folded': metrics.cost.forms['folded']}
            metrics = replace(metrics, cost=replace(metrics.cost, weights=weights, forms=forms))
        if (folder / RECIPE_NAME).is_file():
            shutil.copyfile(folder / RECIPE_NAME, draft / RECIPE_NAME)
        write_documents(draft, metrics, org)
    return target
