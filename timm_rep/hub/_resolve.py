"""Finding published weights, checking them, and building models with them."""
import contextlib
import functools
import inspect
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple, cast

import timm
import torch
import torch.nn as nn
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from timm.models import PretrainedCfg, build_model_with_cfg, load_pretrained, resolve_pretrained_cfg

from timm_rep.convert.record import FACTORY_ARGS, WEIGHT_SOURCE, adapted_layers
from timm_rep.init import weight_select_init
from timm_rep.scales import RELEASED_PREFIX, Scales, has_name
from timm_rep.scales._transformers import extend_timm_wrapper
from timm_rep.scales.files import SCALES_IN_FOLDER, SCALES_NAME
from timm_rep.utils.atomic import recover
from timm_rep.utils.checkpoints import read_state_dict
from timm_rep.utils.files import StrPath, argument_errors

from ._repository import CONFIG_NAME, WEIGHTS_NAME, ModelRepository, read_folder, read_repository
from ._script_args import separate_overlay
from .released import DEFAULT_IDLE_RATIO, RELEASED_REPO_ID, fetch_released, has_release, rename_released

_logger = logging.getLogger(__name__)

FilterFn = Callable[[Dict[str, torch.Tensor], nn.Module], Dict[str, torch.Tensor]]

ORGANIZATION = 'timm-rep'
# tag of the weights to load if none is named
_DEFAULT_TAG = 'in1k'


class Weights(NamedTuple):
    """Resolved weights and the arguments of the published model."""
    path: Optional[str]  # checked; None if timm finds the weights, or none are asked for
    model_args: Mapping[str, Any]
    released: bool = False  # in the layout of the authors' release
    source: str = ''  # folder, repository, release or name of the model, for error messages


def build_model(
        cls: Callable[..., nn.Module],
        variant: str,
        /,
        pretrained: bool,
        model_cfgs: Mapping[str, Mapping[str, Any]],
        complete: Optional[Callable[[Dict[str, Any]], Dict[str, Any]]] = None,
        **kwargs: Any,
) -> nn.Module:
    """timm's ``build_model_with_cfg``, with published arguments, checked weights, folding, and weight selection.

    The arguments of the class come from the variant, then from its published model or tag, then from the caller; later
    ones override earlier ones. With ``reparameterized=True`` and published weights of the training structure, the model
    is built in the training structure, loaded by timm's ``load_pretrained``, and folded in place; a file that the
    caller names must have the structure that is asked for.

    Args:
        cls: Class of the model, or a function that builds it.
        variant: Name of the model.
        pretrained: Whether to load weights.
        model_cfgs: Arguments of the class for each variant, and further ones for a tag under 'variant.tag'.
        complete: Function that completes the resolved arguments.
        kwargs: Arguments of ``create_model``, of the class, and of ``build_model_with_cfg``; ``weight_select``, a
            teacher for :func:`timm_rep.weight_select_init`.

    Raises:
        ValueError: As :func:`timm_rep.weight_select_init`; the weights were trained with a different idle ratio;
            several files of the authors' release match; or the published arguments, with the given ones, cannot be
            used.
        RuntimeError: The weights are not found, are damaged, are for a different model, or do not fit.
        OSError: A folder, repository or file of the authors' release that the caller names does not exist, or the Hub
            cannot be reached.
        TypeError: A given argument is unknown.
    """
    kwargs = separate_overlay(variant, kwargs)
    kwargs = {**model_cfgs[variant], **_resolve(cls, variant, pretrained, model_cfgs, kwargs)}
    if complete is not None:
        kwargs = complete(kwargs)
    weights, weight_select = kwargs.pop('weights', None), kwargs.pop('weight_select', None)
    if 'out_indices' in kwargs:  # without features_only, timm's classes do not take it
        kwargs['feature_cfg'] = dict(kwargs.get('feature_cfg') or {}, out_indices=kwargs.pop('out_indices'))
    if weights is None or weights.path is None:
        build = cls if weights is None else functools.partial(_create, cls, weights)
        model = build_model_with_cfg(build, variant, pretrained, **kwargs)
    else:
        _check_idle_channels(cls, kwargs, weights.model_args)
        cfg = resolve_pretrained_cfg(
            variant, kwargs.pop('pretrained_cfg', None), kwargs.pop('pretrained_cfg_overlay', None)).to_dict()
        filter_fn, strict = kwargs.pop('pretrained_filter_fn', None), kwargs.get('pretrained_strict', True)
        load = functools.partial(_create_with_weights, cls, weights, cfg, filter_fn, strict)
        # it loads and folds before timm wraps the model of features_only=True
        model = build_model_with_cfg(load, variant, pretrained=False, pretrained_cfg=cfg, **kwargs)
    if weight_select is not None:
        weight_select_init(model, weight_select)
    if weights is not None and not isinstance(model, nn.ModuleDict):  # timm records none with features_only
        model._model_args = {**weights.model_args, **getattr(model, '_model_args', {})}
    return model


def _create(cls: Callable[..., nn.Module], weights: Weights, /, **model_args: Any) -> nn.Module:
    given = [name for name in model_args if name not in weights.model_args]
    error: Exception
    try:
        return cls(**model_args)
    except TypeError as e:
        if any(repr(name) in str(e) for name in given):  # an unknown argument, a TypeError for any timm model
            raise
        error = e
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as e:
        error = e
    with argument_errors(f'The model_args of {weights.source} (with the arguments given)'):
        raise error


def _create_with_weights(
        cls: Callable[..., nn.Module],
        weights: Weights,
        cfg: Dict[str, Any],
        filter_fn: Optional[FilterFn],
        strict: bool,
        reparameterized: bool = False,
        **model_args: Any,
) -> nn.Module:
    fold = reparameterized and not weights.model_args.get('reparameterized', False)
    if reparameterized and not fold:
        model_args['reparameterized'] = True
    model, path = _create(cls, weights, **model_args), cast(str, weights.path)
    if weights.released:
        classifier = cfg['classifier']
        state_dict = rename_released(
            model, path, (classifier,) if isinstance(classifier, str) else classifier)
    else:
        state_dict = read_state_dict(path)
    own = model.state_dict()
    others = [f'{name} is {value.dtype}' for name, value in state_dict.items()
              if name in own and value.is_floating_point() != own[name].is_floating_point()]
    if others:
        raise RuntimeError(f'Expected floating-point weights in {weights.path!r}, but {", ".join(others[:5])}.')
    try:
        load_pretrained(
            model,
            dict(cfg, source='', state_dict=state_dict, **adapted_layers(model, cfg)),
            num_classes=model.num_classes,
            in_chans=model_args.get('in_chans', 3),
            filter_fn=filter_fn,
            strict=strict,
        )
    except (AttributeError, LookupError, RuntimeError) as e:  # the first two: classifier or first_conv of the cfg
        raise RuntimeError(
            f'Expected weights that fit the model, but got {weights.path!r} of {weights.source}. {e}') from e
    return model.reparameterize() if fold else model


def _parameters(cls: Callable[..., nn.Module]) -> Dict[str, Any]:
    """Arguments of a class and its bases, or of a function, with their defaults."""
    functions = [base.__init__ for base in reversed(cls.__mro__)] if isinstance(cls, type) else [cls]  # type: ignore[misc]
    return {
        name: parameter.default for function in functions
        for name, parameter in inspect.signature(function).parameters.items()}


def _check_idle_channels(
        cls: Callable[..., nn.Module], args: Mapping[str, Any], trained_with: Mapping[str, Any],
) -> None:
    # no shape of the training structure depends on which channels are idle, or on how they become so
    defaults = _parameters(cls)
    trained_by = ('idle_ratio', 'idle_schedule', 'anneal_steps', 'anneal_schedule')
    for name in [name for name in trained_by if name in defaults]:
        value, trained = (mapping.get(name, defaults[name]) for mapping in (args, trained_with))
        if (list(value) if isinstance(value, tuple) else value) != trained:  # config.json has lists
            raise ValueError(
                f'{name} must be {trained!r}, with which the weights were trained, got {value!r}: leave it out, or '
                'start from them with timm_rep.weight_select_init(model, path).')


def _resolve(
        cls: Callable[..., nn.Module],
        variant: str,
        pretrained: bool,
        model_cfgs: Mapping[str, Mapping[str, Any]],
        kwargs: Dict[str, Any],
) -> Dict[str, Any]:
    """Add the published arguments of a model, and its weights as ``weights``, to the arguments of create_model.

    The model is read from 'hf-hub:' or 'local-dir:'; with ``pretrained=True``, it is found by :func:`find_weights`;
    else it is read from TIMM_REP_HUB, if the name of the model has a tag.
    """
    extend_timm_wrapper()
    for name, given in (('pretrained', pretrained), ('features_only', kwargs.get('features_only'))):
        if given and kwargs.get('weight_select') is not None:
            raise ValueError(
                f'{name} must be False with weight_select, got True: use '
                'timm_rep.weight_select_init(student, teacher).')
    cfg = kwargs.get('pretrained_cfg')
    cfg = {'tag': cfg} if isinstance(cfg, str) else cfg.to_dict() if isinstance(cfg, PretrainedCfg) else dict(cfg or {})
    overlay, cache_dir = dict(kwargs.get('pretrained_cfg_overlay') or {}), kwargs.get('cache_dir')
    tag, repo_id, path, repo = cfg.get('tag'), None, None, None
    if cfg.get('source') in ('hf-hub', 'local-dir'):
        repo_id = cfg['hf_hub_id'] if cfg['source'] == 'hf-hub' else None
        if repo_id is None and recover(cfg['file']):  # timm has read the config.json before
            raise RuntimeError(f'{cfg["file"]!r} had an interrupted write, which is finished now: load it again.')
        repo = read_repository(repo_id, cache_dir) if repo_id else read_folder(cfg['file'])
        if pretrained:
            path = _path_if_there(repo)
    elif any(overlay.get(key) or cfg.get(key) for key in ('file', 'url', 'state_dict')):
        pass  # the caller says where the weights are
    elif not pretrained:
        folder = local_folder()
        if tag and folder and (folder / f'{variant}.{tag}' / CONFIG_NAME).is_file():
            repo = read_folder(folder / f'{variant}.{tag}')
    else:
        tag = _DEFAULT_TAG if tag in (None, 'untrained') else tag
        repo_id = cfg.get('hf_hub_id')
        repo_id, file = overlay.get('hf_hub_id') or repo_id, overlay.get('hf_hub_filename')
        if file and not repo_id and has_release(variant):
            repo_id = RELEASED_REPO_ID
        if not file or (repo_id or '').partition('@')[0] == RELEASED_REPO_ID:  # else timm loads it
            ratio = kwargs.get('idle_ratio', DEFAULT_IDLE_RATIO)
            path, repo = find_weights(variant, tag, repo_id, file, ratio, cache_dir)
            if repo is None:
                return {**kwargs, 'weights': Weights(path, {'idle_ratio': ratio}, True, RELEASED_REPO_ID)}
    if repo is None:
        name = f'{variant}.{tag}'
        if name in model_cfgs:
            kwargs = {**model_cfgs[name], **kwargs, 'weights': Weights(None, model_cfgs[name], source=name)}
        if kwargs.get('scales') == SCALES_IN_FOLDER:  # model_args of a config.json, without its folder
            kwargs = {**kwargs, 'scales': False}
        return kwargs

    if repo.config['architecture'] != variant:
        raise RuntimeError(f'Expected a {variant} in {repo.where}, but got a {repo.config["architecture"]}.')
    args = _model_args(cls, repo)
    resolved = {**args, **kwargs, 'weights': Weights(path, args, source=repo.where)}
    scales = resolved.get('scales')
    if scales == SCALES_IN_FOLDER:
        has_scales = SCALES_NAME in repo.hashes or (repo.folder / SCALES_NAME).is_file()
        resolved['scales'] = repo.file(SCALES_NAME) if has_scales else False
    elif (isinstance(scales, str) and scales.startswith(RELEASED_PREFIX) and scales == args.get('scales')
            and not resolved.get('reparameterized')):
        try:
            resolved['scales'] = Scales.load(scales)
        except FileNotFoundError as e:  # only RepSGD needs them, and it refuses a model without scales
            _logger.warning('%s is loaded without its scales. %s', repo.where, e)
            resolved['scales'] = False
    if path or not cfg.get('source'):
        on_hub = repo_id if cfg.get('source') else repo_id or f'{organization()}/{variant}.{tag}'
        resolved['pretrained_cfg'] = _pretrained_cfg(repo, architecture=variant, tag=tag, hf_hub_id=on_hub)
    return resolved


def _path_if_there(repo: ModelRepository) -> Optional[str]:
    """Path of the checked weights; None if a model that another package published has no such file."""
    try:
        return repo.file(WEIGHTS_NAME)
    except LocalEntryNotFoundError:  # the Hub cannot be reached
        raise
    except (FileNotFoundError, EntryNotFoundError):
        if WEIGHTS_NAME in repo.hashes or os.path.lexists(repo.folder / WEIGHTS_NAME):
            raise
        return None


def _model_args(cls: Callable[..., nn.Module], repo: ModelRepository) -> Dict[str, Any]:
    """The model_args of a config.json, limited to constructor arguments that read no files."""
    args = dict(repo.model_args)
    _check_depth(args, repo)
    others = args.keys() - (_parameters(cls).keys() - {'self', 'args', 'kwargs', 'device', 'dtype'})
    if not isinstance(cls, type):  # it passes arguments on to a timm model, whose constructor reads no files
        others &= FACTORY_ARGS
    scales = args.get('scales')
    if scales is False:
        args['scales'] = None
    elif scales not in (None, SCALES_IN_FOLDER) and not (isinstance(scales, str) and has_name(scales)):
        others.add('scales')
    if others:
        raise RuntimeError(
            f'{repo.where}: the model_args of config.json must be arguments of {cls.__name__} that name no file; not '
            f'allowed: {", ".join(f"{name}={args[name]!r}" for name in sorted(others))}.')
    return args


def _check_depth(args: Mapping[str, Any], repo: ModelRepository) -> None:
    """Refuse more blocks than the file of weights has tensors, which would take minutes to build."""
    if not (repo.folder / WEIGHTS_NAME).is_file():
        return
    with contextlib.suppress(SafetensorError), safe_open(repo.folder / WEIGHTS_NAME, 'pt') as file:
        tensors = len(file.keys())
        for name in [name for name in args if name.startswith(('depth', 'num_block', 'layers'))]:
            depths = args[name] if isinstance(args[name], (list, tuple)) else [args[name]]
            depth = sum(value for value in depths if isinstance(value, (int, float)))
            if not depth <= tensors:
                raise RuntimeError(
                    f'{repo.where}: {name} in model_args must be at most {tensors}, the number of tensors in '
                    f'{WEIGHTS_NAME}, got {args[name]!r:.100}.')


def _pretrained_cfg(repo: ModelRepository, **kwargs: Any) -> Dict[str, Any]:
    """pretrained_cfg of a config.json as timm reads it, without the location of weights."""
    config = {**repo.config.get('pretrained_cfg', {}), **repo.config}
    names = {field.name for field in fields(PretrainedCfg)} - set(WEIGHT_SOURCE) | {'tag'}
    cfg = {name: tuple(config[name]) if isinstance(config[name], list) else config[name]
           for name in names if name in config}
    return {**cfg, **{name: value for name, value in kwargs.items() if value is not None}}


def local_folder() -> Optional[Path]:
    """The folder of published models on this machine, TIMM_REP_HUB; None if it is not set."""
    folder = os.environ.get('TIMM_REP_HUB')
    return Path(os.path.expanduser(folder)) if folder else None


def organization() -> str:
    """The organization on the Hub that publishes the models: TIMM_REP_ORG, or this package's."""
    return os.environ.get('TIMM_REP_ORG') or ORGANIZATION


def published_architecture(repo_id: str, cache_dir: Optional[StrPath] = None) -> Optional[str]:
    """The architecture in the config.json of a repository on the Hub, None if there is none.

    Raises:
        OSError: The Hub cannot be reached.
        RuntimeError: The config.json cannot be read.
    """
    try:
        return read_repository(repo_id, cache_dir).config.get('architecture')
    except OSError as e:
        if not _is_absent(e):
            raise
        return None


def find_weights(
        variant: str,
        tag: str,
        repo_id: Optional[str] = None,
        file: Optional[str] = None,
        idle_ratio: float = DEFAULT_IDLE_RATIO,
        cache_dir: Optional[StrPath] = None,
) -> Tuple[str, Optional[ModelRepository]]:
    """Find published weights: in TIMM_REP_HUB, on the Hub, in the authors' release, in this order.

    Args:
        variant: Name of the model.
        tag: Tag of the weights.
        repo_id: 'owner/name' or 'owner/name@revision' on the Hub, the only place to look in. Default: all places.
        file: File of the authors' release.
        idle_ratio: Idle ratio of the authors' weights.
        cache_dir: Folder of the Hub's cache. Default: the client's.

    Returns:
        Path of the checked file, and the published model, None for the authors' release.

    Raises:
        RuntimeError: The weights are not found, or the Hub cannot be reached; the message has every place and its
            reason. Or the file is damaged.
        OSError: ``repo_id`` is the authors' release, and it has no such file or cannot be reached.
        ValueError: Several files of the release match, or the name of ``file`` has a different idle ratio.
    """
    name, reasons = f'{variant}.{tag}', []
    owner, _, revision = (repo_id or '').partition('@')
    if owner == RELEASED_REPO_ID:
        return fetch_released(variant, idle_ratio, file, revision or None, cache_dir), None

    folder = local_folder()
    if repo_id is None and folder is not None:
        try:
            repo = read_folder(folder / name)
            return repo.file(WEIGHTS_NAME), repo
        except OSError as e:
            reasons.append(f'the folder {str(folder / name)!r}: {" ".join(str(e).split())}')
    elif repo_id is None:
        reasons.append('TIMM_REP_HUB: not set')

    on_hub, reachable = repo_id or f'{organization()}/{name}', True
    try:
        repo = read_repository(on_hub, cache_dir)
        return repo.file(WEIGHTS_NAME), repo
    except OSError as e:
        reachable = _is_absent(e)
        reasons.append(f'the Hub repository {on_hub}: {" ".join(str(e).split())}')

    if repo_id is None and tag == _DEFAULT_TAG and has_release(variant):
        where = f"the authors' release, {RELEASED_REPO_ID}"
        try:
            if reachable:  # a short failure of the Hub must not lead to other weights than usual
                return fetch_released(variant, idle_ratio, cache_dir=cache_dir), None
            reasons.append(f'{where}: not tried')
        except OSError as e:
            reasons.append(f'{where}: {" ".join(str(e).split())}')
    published = [other for other in timm.list_pretrained(f'{variant}.*') if other != name]
    raise RuntimeError('\n  '.join([
        f'Cannot find weights of {name}:',
        *(f'{i}. {reason}' for i, reason in enumerate(reasons, 1)),
        *([f'Other weights of {variant}: {", ".join(published)}.'] if published else []),
    ]))


def _is_absent(e: OSError) -> bool:
    """Whether the Hub answered that a file, revision or repository does not exist."""
    if isinstance(e, LocalEntryNotFoundError):
        return constants.HF_HUB_OFFLINE
    if isinstance(e, GatedRepoError):  # a RepositoryNotFoundError of a repository that exists
        return False
    return isinstance(e, (FileNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError))
