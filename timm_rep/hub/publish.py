"""From a checkpoint to a folder that can be published, to its folded form, and to the Hub."""
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import timm
import torch
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash
from timm.layers import get_spatial_dim

from timm_rep.convert.record import is_timm_model
from timm_rep.deploy import load_quantized, quantized_files
from timm_rep.scales import resolve_scales
from timm_rep.utils.atomic import replacing_folder
from timm_rep.utils.checkpoints import has_moving_average, load_checkpoint
from timm_rep.utils.data import ImageFolder
from timm_rep.utils.files import COUNT, MAPPING, STRING, argument_errors, check_fields, check_model_args, read_text
from timm_rep.utils.network import hub_errors
from timm_rep.utils.profiling import model_input_size

from .card import TRAIN, write_card
from .folder import check_folder, drop_weights, load_folder, split_name, write_folder, write_hashes
from .load import organization
from .metrics import (
    METRICS,
    PREDICTIONS,
    drop_predictions,
    measure_accuracy,
    measure_cost,
    read_metrics,
    write_metrics,
    write_predictions,
)
from .repository import CONFIG, IMAGES, WEIGHTS, read_folder, sha256

__all__ = ['Change', 'prepare_folder', 'push_folder', 'write_folded']

# settings of a recipe that are named alike in timm's train.py and pretrained_cfg
_DATA = ('input_size', 'mean', 'std', 'interpolation', 'crop_pct', 'num_classes')
_MAX_RECIPE = 1 << 15  # bytes; the time that YAML takes can grow with the square of the length
_RECIPE = {**IMAGES, 'img_size': COUNT, 'in_chans': COUNT, 'global_pool': STRING, 'model_kwargs': MAPPING}


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
    """Bring a folder up to date: weights from a checkpoint, measured figures, model card, hashes.

    Figures stay as long as their weights do, and so does the int8 form that ``timm-rep quantize -o FOLDER`` added; its
    speed is measured on a CPU only. Whatever is raised, the folder is as it was.

    Args:
        folder: Folder named MODEL.TAG, for instance ``hub/repa_lvvit_s.cifar10``.
        checkpoint: Checkpoint of a training run with the recipe; None to keep the weights of the folder.
        recipe: File for ``train.py --config``; None for train.yaml of the folder. The model is created with its
            model_kwargs, num_classes, in_chans and img_size, and its pretrained_cfg gets input_size, mean, std,
            interpolation and crop_pct.
        data_dir: Folder of images to measure the accuracy on, with a sample of the predictions; None to keep both.
        split: Name of the folder in it.
        dataset: Name of the images, for the card.
        half: Write parameters as float16, also those of weights that the folder has.
        use_ema: Use the moving average of the weights in the checkpoint.
        device: Device to measure on.
        batch_size: Batch size of the throughput.
        measure: Measure size and speed even if they are known.

    Raises:
        FileNotFoundError: There are no weights, no recipe, or no such checkpoint.
        RuntimeError: The checkpoint does not fit the recipe, or a file cannot be read.
        ValueError: The folder is not named after a model, the recipe is of another one, the images are of other
            classes or cannot be decoded, or the checkpoint has no moving average.
        BlockingIOError: Another process is writing to the folder.
    """
    folder, device = Path(folder).resolve(), torch.device(device)
    variant, _ = split_name(folder)
    recipe = Path(recipe) if recipe is not None else folder / TRAIN
    with replacing_folder(folder) as draft:
        if recipe.is_file() and recipe.resolve() != (folder / TRAIN).resolve():
            shutil.copyfile(recipe, draft / TRAIN)
        if checkpoint is not None:
            if data_dir is not None:
                classes = ImageFolder(data_dir, split).classes
            else:
                classes = _previous_classes(folder, recipe)
            _write_trained(draft, variant, recipe, checkpoint, classes, half, use_ema)
        elif half and (draft / WEIGHTS).is_file():
            model, repo = load_folder(draft), read_folder(draft)
            _write_model(draft, model, repo.model_args, half, repo.config.get('label_names'))
        if not (draft / CONFIG).is_file():
            raise FileNotFoundError(f'There is no {CONFIG} in {str(folder)!r}: give a checkpoint.')
        metrics = read_metrics(draft)
        if dataset is not None:
            metrics['dataset'] = dataset
        if (draft / WEIGHTS).is_file():
            model, weights = load_folder(draft), {'weights': sha256(draft / WEIGHTS)}
            if data_dir is not None:
                accuracy, predictions = measure_accuracy(model, data_dir, split, device)
                metrics['accuracy'] = {**accuracy, **weights}
                write_predictions(draft / PREDICTIONS, predictions)
            measured, on_cpu = metrics.get('cost', {}).get('forms', {}), device.type == 'cpu'
            has_int8 = on_cpu and bool(quantized_files(draft))
            if measure or not measured or (on_cpu and ('int8' in measured) != has_int8):
                int8 = load_quantized(draft) if has_int8 else None
                metrics['cost'] = {**measure_cost(model, device, batch_size, int8), **weights}
        elif data_dir is not None:
            raise FileNotFoundError(f'There is no {WEIGHTS} to measure: give a checkpoint.')
        write_metrics(draft / METRICS, metrics)
        drop_predictions(draft)
        write_card(draft)
        write_hashes(draft)


def _read_recipe(path: Path, variant: str) -> Dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f'There is no recipe at {str(path)!r}: pass the train.py --config of the training run.')
    text, source = read_text(path, _MAX_RECIPE), repr(str(path))
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as e:  # ValueError: of a date
        raise RuntimeError(f'{source} is not valid YAML: {" ".join(str(e).split())}') from e
    if not isinstance(settings, dict) or settings.get('model') != variant:
        raise ValueError(f'{source} is not a recipe of {variant}.')
    check_fields(settings, source, {}, _RECIPE)
    check_model_args(settings.get('model_kwargs') or {}, f'{source}: model_kwargs')
    return settings


def _previous_classes(folder: Path, recipe: Path) -> Optional[List[str]]:
    """Names of the classes, if the recipe is the one that the folder has: another one may be of other classes."""
    own = folder / TRAIN
    if not (own.is_file() and recipe.is_file() and recipe.read_bytes() == own.read_bytes()):
        return None
    try:
        return read_folder(folder).config.get('label_names')
    except (FileNotFoundError, RuntimeError):  # it is about to be written anew
        return None


def _write_trained(
        folder: Path,
        variant: str,
        recipe: Path,
        checkpoint: Union[str, os.PathLike],
        classes: Optional[List[str]],
        half: bool,
        use_ema: bool,
) -> None:
    if not os.path.isfile(checkpoint):
        raise FileNotFoundError(f'There is no checkpoint {os.fspath(checkpoint)!r}.')
    settings = _read_recipe(recipe, variant)
    model_args = dict(settings.get('model_kwargs') or {})
    model_args.update({name: settings[name] for name in ('in_chans', 'global_pool') if settings.get(name) is not None})
    overlay = {key: settings[key] for key in _DATA if settings.get(key) is not None}
    name = '.'.join(split_name(folder))
    if name in timm.list_pretrained(f'{variant}.*'):
        overlay['license'] = timm.get_pretrained_cfg(name).license  # without a tag it is that of other weights
    size = settings.get('img_size')
    if size is not None:
        overlay.setdefault('input_size', [settings.get('in_chans', 3), size, size])
        base = model_args.get('base')  # of a converted model of timm, whose own config is that of the default base
        if timm.get_pretrained_cfg(base if is_timm_model(base) else variant).fixed_input_size:
            model_args.setdefault('img_size', size)
    with argument_errors(f'{str(recipe)!r}: model_kwargs'):
        model = timm.create_model(variant, pretrained_cfg_overlay=overlay, **model_args)
    if classes is not None and len(classes) != model.num_classes:
        raise ValueError(f'The images are of {len(classes)} classes, the model of the recipe has {model.num_classes}.')
    if use_ema and not has_moving_average(checkpoint):
        raise ValueError(
            f'{os.fspath(checkpoint)!r} has no moving average of the weights: train with --model-ema, or leave out '
            '--use-ema.')
    load_checkpoint(model, checkpoint, use_ema)
    drop_weights(folder)
    _write_model(folder, model, model_args, half, classes)


def _write_model(
        folder: Path,
        model: torch.nn.Module,
        model_args: Mapping[str, Any],
        half: bool,
        label_names: Optional[Sequence[str]],
) -> None:
    _set_pool_size(model)
    scales = resolve_scales(model, getattr(model, 'scales_source', None))
    write_folder(folder, model, model_args, scales=scales, half=half, label_names=label_names)


@torch.no_grad()
def _set_pool_size(model: torch.nn.Module) -> None:
    """Set pool_size of the pretrained_cfg, where it has one: the features' size, which depends on the arguments."""
    cfg = model.pretrained_cfg
    if cfg.get('pool_size') is not None:
        features = model.eval().forward_features(torch.zeros(1, *model_input_size(model)))
        dims = get_spatial_dim(getattr(model, 'output_fmt', 'NCHW'))
        cfg['pool_size'] = tuple(features.shape[dim] for dim in dims)


def write_folded(folder: Union[str, os.PathLike], parent: Union[str, os.PathLike]) -> Path:
    """Write the folded form of a published model, which is smaller and cannot be trained further.

    Args:
        folder: Folder of the published model.
        parent: Folder to write ``<name of the folder>_folded`` into.

    Returns:
        The folder that was written.

    Raises:
        FileNotFoundError, RuntimeError: There is no published model, or a file is damaged.
        ValueError: It is folded already, or the folder is not named after a model.
    """
    folder = Path(folder).resolve()
    split_name(folder)
    repo = read_folder(folder)
    if repo.model_args.get('reparameterized'):
        raise ValueError(f'{str(folder)!r} is folded already.')
    model = load_folder(folder, reparameterized=True)
    target = Path(parent) / f'{folder.name}_folded'
    with replacing_folder(target) as draft:
        args = {name: value for name, value in repo.model_args.items() if name != 'scales'}
        write_folder(draft, model, args, label_names=repo.config.get('label_names'))
        metrics, weights = read_metrics(folder), {'weights': sha256(draft / WEIGHTS)}
        if 'accuracy' in metrics:
            metrics['accuracy'].update(weights, of=f'{folder.name}, which computes the same')
        if 'cost' in metrics:
            metrics['cost'].update(weights, forms={'folded': metrics['cost']['forms']['folded']})
        write_metrics(draft / METRICS, metrics)
        if (folder / TRAIN).is_file():
            shutil.copyfile(folder / TRAIN, draft / TRAIN)
        write_card(draft)
        write_hashes(draft)
    return target


class Change(NamedTuple):
    """What a push does to a file of the repository.

    Attributes:
        file: Name of the file.
        what: 'add', 'change', 'delete' or 'same'.
        size: Size in bytes of what is published; 0 for a deleted file.
    """
    file: str
    what: str
    size: int


def push_folder(
        folder: Union[str, os.PathLike],
        org: Optional[str] = None,
        revision: str = 'main',
        private: bool = False,
        dry_run: bool = False,
        token: Optional[str] = None,
        message: Optional[str] = None,
) -> List[Change]:
    """Make the repository ``<org>/<name of the folder>`` on the Hub equal to the folder, in one commit.

    Unchanged files are not sent again; if none has changed there is no commit. A commit by someone else in the meantime
    is not overwritten: the push fails.

    Args:
        folder: Folder written by ``timm-rep card``: config.json has the sha256 of every file.
        org: User or organization on the Hub; None for TIMM_REP_ORG or 'timm-rep'.
        revision: Branch to commit to.
        private: Make the repository private if it does not exist yet.
        dry_run: Only return what would change.
        token: Access token; None for the one of ``hf auth login`` or HF_TOKEN.
        message: Message of the commit.

    Returns:
        The change of every file.

    Raises:
        FileNotFoundError, RuntimeError: A file is missing, or is not the one of config.json; nothing is sent.
        ValueError: The folder is not named after the model in it, or has subfolders or links to files elsewhere.
        OSError: The Hub cannot be reached, or refuses.
    """
    folder = Path(folder).resolve()
    names = sorted({CONFIG, *check_folder(folder).hashes})
    repository = f'{org or organization()}/{folder.name}'
    api = HfApi(token=token)
    with hub_errors():
        info, is_new = _branch(api, repository, revision)
    published = {file.rfilename: file for file in info.siblings} if info else {}
    changes = [_change(folder / name, name, published.get(name)) for name in names]
    changes += [Change(name, 'delete', 0) for name in sorted(published) if name not in [*names, '.gitattributes']]
    # upload_folder() may split its work into several commits
    operations = [
        CommitOperationDelete(change.file) if change.what == 'delete' else
        CommitOperationAdd(change.file, folder / change.file)
        for change in changes if change.what != 'same'
    ]
    if operations and not dry_run:
        with hub_errors():
            api.create_repo(repository, private=private, exist_ok=True)
            if is_new and revision != 'main':
                api.create_branch(repository, branch=revision, exist_ok=True)
            api.create_commit(
                repository, operations, commit_message=message or f'{folder.name}, by timm-rep', revision=revision,
                parent_commit=info.sha if info else None)
    return changes


def _branch(api: HfApi, repository: str, revision: str) -> Tuple[Optional[ModelInfo], bool]:
    """What a branch holds, or would start with, and whether it is new; None if there is no repository."""
    try:
        return api.model_info(repository, revision=revision, files_metadata=True), False
    except RepositoryNotFoundError:
        return None, True
    except RevisionNotFoundError:
        return api.model_info(repository, files_metadata=True), True


def _change(path: Path, name: str, published: Optional[RepoSibling]) -> Change:
    if published is None:
        return Change(name, 'add', path.stat().st_size)
    same = (published.lfs.sha256 == sha256(path) if published.lfs else
            published.blob_id == git_hash(path.read_bytes()))
    return Change(name, 'same' if same else 'change', path.stat().st_size)
