"""The recipe of a training, which is the args.yaml of timm's train.py, and the model that it trains."""
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import timm
import torch
import yaml

from timm_rep.convert.record import is_timm_model
from timm_rep.scales import RELEASED, RELEASED_PREFIX, Scales
from timm_rep.utils.files import argument_errors, parse, read_text
from timm_rep.utils.preprocessing import PREPROCESSING, TEST_PREPROCESSING, check_preprocessing

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


# those that name folders, files and accounts of their author
_PRIVATE_ARGS = (
    'data', 'data_dir', 'experiment', 'initial_checkpoint', 'output', 'pretrained_path', 'resume', 'wandb_project',
    'wandb_resume_id', 'wandb_tags')


def public_recipe(path: Path) -> str:
    """The text of a recipe without arguments that name folders, files and accounts; as it is if it has none."""
    text = read_text(path)
    settings = yaml.safe_load(text)
    private = [name for name in _PRIVATE_ARGS if settings.get(name)]
    return yaml.safe_dump({k: v for k, v in settings.items() if k not in _PRIVATE_ARGS}) if private else text


def read_recipe(path: Path, variant: str) -> Dict[str, Any]:
    """Arguments of timm's train.py by name; raises an error that names the file if it is not a recipe of the model."""
    if not path.is_file():
        raise FileNotFoundError(
            f'Expected a recipe, but {str(path)!r} does not exist: pass the train.py --config of the training run.')
    source = repr(str(path))
    try:
        settings = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as e:  # ValueError: an impossible date
        raise RuntimeError(f'{source} must be valid YAML: {" ".join(str(e).split())}') from e
    model = settings.get('model') if isinstance(settings, dict) else None
    if str(model).partition('.')[0] != variant:
        raise ValueError(f'Expected a recipe of {variant}, with or without a tag, but {source} is of {model!r}.')
    unknown = [str(name) for name in settings if name not in _TRAIN_ARGS]
    if unknown:
        raise ValueError(f'{source} must have arguments of train.py only, got {", ".join(unknown[:5])}.')
    settings = {name: value for name, value in settings.items() if value != ''}  # train.py's defaults, in its args.yaml
    for name, kind in _RECIPE.items():
        parse(kind, settings.get(name), f'{source}: {name}')
    check_preprocessing(settings, source)
    return settings


def model_arguments(settings: Dict[str, Any]) -> Dict[str, Any]:
    """Arguments of ``create_model`` in a recipe, without the number of classes."""
    args = dict(settings.get('model_kwargs') or {})
    given = {'in_chans': settings.get('in_chans'), 'global_pool': settings.get('gp'), 'bn_eps': settings.get('bn_eps')}
    args.update({name: value for name, value in given.items() if value is not None})
    size = settings.get('img_size')
    base = args.get('base')  # a converted model: the config of repa_any belongs to the default base
    cfg = timm.get_pretrained_cfg(base if is_timm_model(base) else settings['model'])
    if size is not None and cfg.fixed_input_size:
        args.setdefault('img_size', size)
    return args


def create_trained(settings: Dict[str, Any], recipe: Path, name: str) -> torch.nn.Module:
    """Model of a recipe, with its preprocessing, and the licence of the registered name."""
    overlay = {key: settings[key] for key in (*PREPROCESSING, 'num_classes') if settings.get(key) is not None}
    size = settings.get('img_size')
    if size is not None:
        overlay.setdefault('input_size', [settings.get('in_chans') or 3, size, size])
    # as timm's save_config_for_hf(data_config=...): the values for validation go with those that the recipe replaces
    for key in TEST_PREPROCESSING:
        if ('crop_pct' if key == 'test_crop_pct' else 'input_size') in overlay:
            overlay[key] = None
    # the untagged cfg has the licence of other weights
    variant = settings['model'].partition('.')[0]
    is_registered = name in timm.list_pretrained(f'{variant}.*')
    overlay['license'] = timm.get_pretrained_cfg(name).license if is_registered else None
    check_default_scales(variant, settings.get('model_kwargs') or {})
    with argument_errors(f'{str(recipe)!r}: model_kwargs'):
        return timm.create_model(settings['model'], pretrained_cfg_overlay=overlay, **model_arguments(settings))


def check_default_scales(variant: str, model_args: Mapping[str, Any]) -> None:
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
