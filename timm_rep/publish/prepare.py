"""From a checkpoint, or a released file, to a folder that can be published, and to its folded form."""
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ContextManager, Dict, Mapping, Optional, Sequence, Union

import timm
import torch
import yaml
from timm.layers import get_spatial_dim

from timm_rep.convert.record import is_timm_model
from timm_rep.deploy import VERIFICATION_NAME, load_quantized, quantized_files
from timm_rep.hub import (
    CARD_NAME,
    CONFIG_NAME,
    SCALES_NAME,
    WEIGHTS_NAME,
    load_folder,
    load_released,
    organization,
    published_files,
    read_folder,
    scales_of,
    sha256,
    split_name,
    write_hashes,
    write_model,
)
from timm_rep.scales import RELEASED, RELEASED_PREFIX, Scales, attach_grad_mults
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.checkpoints import load_checkpoint, read_state_dict
from timm_rep.utils.compare import name_of_not_finite
from timm_rep.utils.data import PREPROCESSING, TEST_PREPROCESSING, ImageFolder, check_preprocessing, labels_by_index
from timm_rep.utils.files import StrPath, argument_errors, parse, read_text
from timm_rep.utils.profiling import model_input_size

from ._card import RECIPE_NAME, write_card
from ._metrics import (
    METRICS_NAME,
    PICTURE_NAME,
    PREDICTIONS_NAME,
    REPORT_NAME,
    Metrics,
    measure_accuracy,
    measure_cost,
    read_metrics,
    write_predictions,
)

# settings of a recipe with which the model is created
_RECIPE = {
    'num_classes': Optional[int], 'img_size': Optional[int], 'in_chans': Optional[int], 'gp': Optional[str],
    'bn_eps': Optional[float], 'model_kwargs': Optional[Dict[str, Any]],
}
# arguments of timm's train.py; any other file, which may hold secrets, must not be published by mistake
_TRAIN_ARGS = set('''
    aa amp amp_dtype amp_impl attn_pool aug_repeats aug_splits batch_size bce_loss bce_pos_weight bce_sum
    bce_target_thresh bn_eps bn_momentum channels_last checkpoint_hist class_map clip_grad clip_mode color_jitter
    color_jitter_prob cooldown_epochs crop_mode crop_pct cutmix cutmix_minmax data data_dir dataset dataset_download
    dataset_trust_remote_code decay_epochs decay_milestones decay_rate device device_modules dist_bn distill_alpha
    distill_loss_weight drop drop_block drop_connect drop_path epoch_repeats epochs eval_metric experiment fast_norm
    fuser gaussian_blur_prob gp grad_accum_steps grad_checkpointing grayscale_prob head_init_bias head_init_scale
    hflip img_size in_chans initial_checkpoint input_img_mode input_key input_size interpolation jsd_loss
    kd_distill_type kd_loss_type kd_model_name kd_student_feature_dim kd_teacher_feature_dim kd_temperature
    kd_token_distill_type layer_decay layer_decay_min_scale layer_decay_no_opt_scale local_rank log_interval
    log_wandb lr lr_base lr_base_scale lr_base_size lr_cycle_decay lr_cycle_limit lr_cycle_mul lr_k_decay lr_noise
    lr_noise_pct lr_noise_std mean min_lr mixup mixup_mode mixup_off_epoch mixup_prob mixup_switch_prob model
    model_dtype model_ema model_ema_decay model_ema_force_cpu model_ema_warmup model_kwargs momentum naflex_loader
    naflex_loss_scale naflex_max_seq_len naflex_patch_size_probs naflex_patch_sizes naflex_patchify_channels_first
    naflex_train_seq_lens no_aug no_ddp_bb no_prefetcher no_resume_opt num_classes opt opt_betas opt_eps opt_kwargs
    output patience_epochs pin_mem pretrained pretrained_path ratio recount recovery_interval remode reprob resplit
    resume save_images scale sched sched_on_updates seed simsiam smoothing split_bn start_epoch std sync_bn
    synchronize_step target_key task_loss_weight torchcompile torchcompile_mode torchscript train_batch_sizes
    train_batches_per_epoch train_crop_mode train_img_sizes train_interpolation train_num_samples train_size_probs
    train_size_random_mix train_size_schedule train_size_schedule_spread train_split tta use_multi_epochs_loader
    val_interval val_num_samples val_split validation_batch_size variable_batch_loss_scale vflip wandb_project
    wandb_resume_id wandb_tags warmup_epochs warmup_lr warmup_prefix wd_exclude weight_decay worker_seeding workers
'''.split())


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
    with _draft(folder) as draft:
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
                _drop_measured(draft)
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
        _write_documents(draft, metrics, org)


def _draft(folder: Path) -> ContextManager[Path]:
    if folder.is_dir():
        published_files(folder)  # refuses links and subfolders
    return replacing_files(folder, copy=True)


def _write_documents(folder: Path, metrics: Metrics, org: Optional[str]) -> None:
    metrics.to_json(folder / METRICS_NAME)
    if metrics.accuracy is None:
        (folder / PREDICTIONS_NAME).unlink(missing_ok=True)
    write_card(folder, org or organization())
    write_hashes(folder)


def _read_recipe(path: Path, variant: str) -> Dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f'Expected a recipe, but {str(path)!r} does not exist: pass the train.py --config of the training run.')
    source = repr(str(path))
    try:
        settings = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as e:  # ValueError: an impossible date
        raise RuntimeError(f'{source} must be valid YAML: {" ".join(str(e).split())}') from e
    if not isinstance(settings, dict) or settings.get('model') != variant:
        raise ValueError(f'Expected a recipe of {variant}, but got {source}.')
    unknown = [str(name) for name in settings if name not in _TRAIN_ARGS]
    if unknown:
        raise ValueError(f'{source} must have arguments of train.py only, got {", ".join(unknown[:5])}.')
    settings = {name: value for name, value in settings.items() if value != ''}  # train.py's defaults, in its args.yaml
    for name, kind in _RECIPE.items():
        parse(kind, settings.get(name), f'{source}: {name}')
    check_preprocessing(settings, source)
    return settings


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
    settings = _read_recipe(recipe, variant)
    if settings.get('class_map'):
        raise ValueError(
            f'{str(recipe)!r}: class_map must not be set: here the folders of images, in their order in timm, '
            'are the classes.')
    if recipe.resolve().parent not in (folder, checkpoint.resolve().parent):
        raise ValueError(f'The recipe must be in the folder of the checkpoint, got {str(recipe)!r}: copy it there.')
    classes: Optional[Sequence[str]] = None
    if data_dir is not None:
        classes = ImageFolder(data_dir, split).classes
    elif own.is_file() and recipe.read_bytes() == own.read_bytes():  # a different recipe may have different classes
        classes = labels_by_index(_config(folder).get('label_names'))
    model = _create_trained(settings, recipe, f'{variant}.{tag}')
    if classes is not None and len(classes) != model.num_classes:
        raise ValueError(
            f'Expected images of {model.num_classes} classes, for the model of the recipe, but got {len(classes)}: set '
            'its num_classes.')
    load_checkpoint(model, checkpoint, use_ema)
    _check_finite(model, checkpoint)
    _drop_weights(draft)
    if recipe.resolve() != own.resolve():
        shutil.copyfile(recipe, draft / RECIPE_NAME)
    _set_pool_size(model)
    write_model(
        model, draft, model_args=_model_args(settings), scales=scales_of(model), label_names=classes, tag=tag,
        half=half)


def _model_args(settings: Dict[str, Any]) -> Dict[str, Any]:
    args = dict(settings.get('model_kwargs') or {})
    given = {'in_chans': settings.get('in_chans'), 'global_pool': settings.get('gp'), 'bn_eps': settings.get('bn_eps')}
    args.update({name: value for name, value in given.items() if value is not None})
    size = settings.get('img_size')
    base = args.get('base')  # a converted model: the config of repa_any belongs to the default base
    cfg = timm.get_pretrained_cfg(base if is_timm_model(base) else settings['model'])
    if size is not None and cfg.fixed_input_size:
        args.setdefault('img_size', size)
    return args


def _create_trained(settings: Dict[str, Any], recipe: Path, name: str) -> torch.nn.Module:
    overlay = {key: settings[key] for key in (*PREPROCESSING, 'num_classes') if settings.get(key) is not None}
    size = settings.get('img_size')
    if size is not None:
        overlay.setdefault('input_size', [settings.get('in_chans') or 3, size, size])
    # as timm's save_config_for_hf(data_config=...): the values for validation go with those that the recipe replaces
    for key in TEST_PREPROCESSING:
        if ('crop_pct' if key == 'test_crop_pct' else 'input_size') in overlay:
            overlay[key] = None
    # the untagged cfg has the licence of other weights
    is_registered = name in timm.list_pretrained(f'{settings["model"]}.*')
    overlay['license'] = timm.get_pretrained_cfg(name).license if is_registered else None
    _check_default_scales(settings['model'], settings.get('model_kwargs') or {})
    with argument_errors(f'{str(recipe)!r}: model_kwargs'):
        return timm.create_model(settings['model'], pretrained_cfg_overlay=overlay, **_model_args(settings))


def _check_finite(model: torch.nn.Module, source: StrPath) -> None:
    """Raise ValueError if a weight or a running statistic is not finite."""
    name = name_of_not_finite(model)
    if name is not None:
        raise ValueError(f'The weights must be finite, but {name} of {str(source)!r} is not: pass another file.')


def _check_default_scales(variant: str, model_args: Mapping[str, Any]) -> None:
    """Raise FileNotFoundError if the scales are released ones by default, and cannot be had.

    ``create_model`` would take the initial scales in their place.
    """
    if 'scales' not in model_args and variant in RELEASED:
        try:
            Scales.load(RELEASED_PREFIX + variant)
        except FileNotFoundError as e:
            raise FileNotFoundError(
                f'{e} They are the default of {variant}: if the training had others, name them in the model_kwargs, as '
                'in scales=init.') from e


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


def _drop_weights(folder: Path) -> None:
    """Remove weights, and what was made from them: scales, int8 form, comparison, report of a conversion, and card."""
    for name in WEIGHTS_NAME, SCALES_NAME, REPORT_NAME, PICTURE_NAME, CARD_NAME:
        (folder / name).unlink(missing_ok=True)
    _drop_measured(folder)


def _drop_measured(folder: Path) -> None:
    """Remove the int8 form, and the comparison of an export."""
    for path in quantized_files(folder):
        path.unlink()
    (folder / VERIFICATION_NAME).unlink(missing_ok=True)


@torch.no_grad()
def _set_pool_size(model: torch.nn.Module) -> None:
    """Set pool_size of the pretrained_cfg, if it has one: the features' size, which depends on the arguments."""
    cfg = model.pretrained_cfg
    if cfg.get('pool_size') is not None:
        features = model.eval().forward_features(torch.zeros(1, *model_input_size(model)))
        dims = get_spatial_dim(getattr(model, 'output_fmt', 'NCHW'))
        cfg['pool_size'] = tuple(features.shape[dim] for dim in dims)


def convert_released(path: StrPath, model_name: str, folder: StrPath, model_args: Dict[str, Any]) -> Path:
    """Convert a released checkpoint or file of scales into a folder, and check the folder by loading it.

    Args:
        path: File of a layout that :func:`timm_rep.load_released` or :class:`timm_rep.Scales` reads; a pickled one is
            read with ``weights_only=True``.
        model_name: Name of the model, without a tag.
        folder: Folder named MODEL.TAG, to write config.json and model.safetensors, or scales.safetensors, into. If
            weights are replaced, scales, int8 form, card and predictions of the previous ones are removed.
        model_args: Arguments of ``create_model`` of the released model.

    Returns:
        Path of the file of weights or scales.

    Raises:
        FileNotFoundError, RuntimeError, ValueError: The file does not exist, cannot be read, or does not fit the
            model; or the folder is not named after the model. Nothing is written.
    """
    path, folder = os.fspath(path), Path(folder).resolve()
    if not os.path.isfile(path):
        raise FileNotFoundError(f'Expected a released file, but {path!r} does not exist.')
    if split_name(folder)[0] != model_name:
        raise ValueError(f'The name of the folder must be {model_name}.TAG, got {str(folder)!r}.')
    plain_args = {**model_args, 'scales': None} if 'scales' in model_args else dict(model_args)
    # a file of vectors and no kernels is a file of scales
    tensors = read_state_dict(path, use_ema=False)
    if tensors and all(tensor.ndim < 2 for tensor in tensors.values()):
        scales = Scales.load(path)
        with argument_errors(f'{model_name} with {dict(model_args)}'):
            model = timm.create_model(model_name, device='meta', **plain_args)
        attach_grad_mults(model, scales)
        scales = Scales(scales, {**scales.metadata, 'model': model_name}, scales.history)
        with _draft(folder) as draft:
            scales.save(draft / SCALES_NAME)
            if Scales.load(draft / SCALES_NAME) != scales:
                raise RuntimeError(f'The scales in {SCALES_NAME} must equal those read from {path!r}, but differ.')
            if (draft / CONFIG_NAME).is_file():
                write_hashes(draft)
        return folder / SCALES_NAME
    if not (folder / SCALES_NAME).is_file():
        _check_default_scales(model_name, model_args)
    with argument_errors(f'{model_name} with {dict(model_args)}'):
        model = timm.create_model(model_name, **model_args)
    load_released(model, path).eval()
    images = torch.randn(2, *model_input_size(model), generator=torch.Generator().manual_seed(0), device='cpu')
    with _draft(folder) as draft:
        if (draft / WEIGHTS_NAME).is_file():  # else scales that are there were converted for these weights
            _drop_weights(draft)
        stored = Scales.load(draft / SCALES_NAME) if (draft / SCALES_NAME).is_file() else None
        write_model(model, draft, model_args=plain_args, scales=stored, tag=split_name(folder)[1])
        if read_metrics(draft).accuracy is None:
            (draft / PREDICTIONS_NAME).unlink(missing_ok=True)
        with torch.inference_mode():
            expected, found = model(images), load_folder(draft)(images)
        if not torch.equal(expected, found):
            raise RuntimeError(
                f'The folder must give the logits of {path!r}, but differs by {(expected - found).abs().max():g}.')
        write_hashes(draft)
    return folder / WEIGHTS_NAME


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
    with _draft(target) as draft:
        for name in RECIPE_NAME, PREDICTIONS_NAME:  # of earlier weights
            (draft / name).unlink(missing_ok=True)
        _drop_weights(draft)
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
        _write_documents(draft, metrics, org)
    return target
