"""Finding published weights, checking them, and building models with them."""
import functools
import inspect
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Type, Union

import timm
import torch
import torch.nn as nn
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from timm.models import PretrainedCfg, build_model_with_cfg, load_pretrained, resolve_pretrained_cfg

from timm_rep.convert.record import FACTORY_ARGS, input_layers
from timm_rep.init import weight_select_init
from timm_rep.scales import packaged_scales
from timm_rep.utils.checkpoints import read_state_dict
from timm_rep.utils.files import argument_errors

from .released import DEFAULT_IDLE_RATIO, RELEASE, fetch_released, has_release, rename_released
from .repository import CONFIG, SCALES, WEIGHTS, ModelRepository, check_sha256, read_folder, read_repository

__all__ = ['Weights', 'build_model', 'find_weights', 'local_folder', 'organization', 'resolve_pretrained']

FilterFn = Callable[[Dict[str, torch.Tensor], nn.Module], Dict[str, torch.Tensor]]

_ORGANIZATION = 'timm-rep'
# tag of the weights to load where none is named
_DEFAULT_TAG = 'in1k'
# keys of a config.json that describe images and classes, none that locate weights
_CFG = (
    'input_size', 'test_input_size', 'min_input_size', 'fixed_input_size', 'interpolation', 'crop_pct', 'test_crop_pct',
    'crop_mode', 'mean', 'std', 'num_classes', 'label_names', 'label_descriptions', 'pool_size', 'test_pool_size',
    'first_conv', 'classifier', 'tag', 'license', 'description', 'origin_url', 'paper_name', 'paper_ids', 'notes')


class Weights(NamedTuple):
    """What a model was published with.

    Attributes:
        path: Checked file of weights; None if timm finds them, or none are asked for.
        model_args: Arguments that the weights were trained with.
        released: Whether the file has the layout of the authors' release.
        source: Folder, repository or release that published the model, for error messages.
    """
    path: Optional[str]
    model_args: Mapping[str, Any]
    released: bool = False
    source: str = ''


def build_model(
        cls: Type[nn.Module],
        variant: str,
        pretrained: bool,
        weights: Optional[Weights] = None,
        weight_select: Optional[Any] = None,
        pretrained_filter_fn: Optional[FilterFn] = None,
        **kwargs,
) -> nn.Module:
    """timm's ``build_model_with_cfg``, with checked weights, folding, and weight selection.

    With ``reparameterized=True`` and weights of the training structure, the model is built in the training structure,
    loaded by timm's ``load_pretrained``, and folded in place.

    Args:
        cls: Class of the model.
        variant: Name of the model.
        pretrained: Whether to load weights.
        weights: File that :func:`resolve_pretrained` found; None if timm finds the weights.
        weight_select: Teacher for :func:`timm_rep.weight_select_init`; None for the model's own initialization.
        pretrained_filter_fn: timm's ``checkpoint_filter_fn`` of the family.
        kwargs: Other arguments of ``build_model_with_cfg``, and those of the class.

    Raises:
        ValueError: As :func:`timm_rep.weight_select_init`; the weights are of another idle ratio; or the published
            arguments, with those given, cannot be used.
        RuntimeError: The weights do not fit the model.
        TypeError: An argument given is unknown.
    """
    if weights is None or weights.path is None:
        build = cls if weights is None else functools.partial(_create, cls, weights)
        model = build_model_with_cfg(build, variant, pretrained, pretrained_filter_fn=pretrained_filter_fn, **kwargs)
    else:
        _check_idle_channels(cls, kwargs, weights.model_args)
        cfg = resolve_pretrained_cfg(
            variant, kwargs.pop('pretrained_cfg', None), kwargs.pop('pretrained_cfg_overlay', None)).to_dict()
        strict = kwargs.get('pretrained_strict', True)
        load = functools.partial(_create_with_weights, cls, weights, cfg, pretrained_filter_fn, strict)
        # it loads and folds before timm wraps the model of features_only=True
        model = build_model_with_cfg(load, variant, pretrained=False, pretrained_cfg=cfg, **kwargs)
    if weight_select is not None:
        weight_select_init(model, weight_select)
    if weights is not None and not isinstance(model, nn.ModuleDict):  # of features_only timm records no arguments
        model._model_args = {**weights.model_args, **getattr(model, '_model_args', {})}
    return model


def _create(cls: Type[nn.Module], weights: Weights, **model_args) -> nn.Module:
    try:
        with argument_errors(f'The model_args of {weights.source} (with the arguments given)'):
            return cls(**model_args)
    except ValueError as e:
        given = [name for name in model_args if name not in weights.model_args]
        if isinstance(e.__cause__, TypeError) and any(repr(name) in str(e.__cause__) for name in given):
            raise e.__cause__ from None  # an unknown argument that was given, for any model of timm a TypeError
        raise


def _create_with_weights(
        cls: Type[nn.Module],
        weights: Weights,
        cfg: Dict[str, Any],
        filter_fn: Optional[FilterFn],
        strict: bool,
        reparameterized: bool = False,
        **model_args,
) -> nn.Module:
    fold = reparameterized and not weights.model_args.get('reparameterized', False)
    if reparameterized and not fold:
        model_args['reparameterized'] = True
    model = _create(cls, weights, **model_args)
    if weights.released:
        classifier = cfg['classifier']
        state_dict = rename_released(
            model, weights.path, (classifier,) if isinstance(classifier, str) else classifier)
    else:
        state_dict = read_state_dict(weights.path)
    try:
        load_pretrained(
            model,
            # a folded model has another first layer
            dict(cfg, source='', state_dict=state_dict, first_conv=input_layers(model, cfg.get('first_conv'))),
            num_classes=model.num_classes,
            in_chans=model_args.get('in_chans', 3),
            filter_fn=filter_fn,
            strict=strict,
        )
    except (AttributeError, LookupError, RuntimeError) as e:  # the first two: classifier or first_conv of the cfg
        raise RuntimeError(f'{weights.path!r} of {weights.source} does not fit the model. {e}') from e
    return model.reparameterize() if fold else model


def _parameters(cls: Union[Type[nn.Module], Callable[..., nn.Module]]) -> Dict[str, Any]:
    """Arguments of a class and its bases, or of a function, with their defaults."""
    if not isinstance(cls, type):
        return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
    return {
        name: parameter.default for base in reversed(cls.__mro__)
        for name, parameter in inspect.signature(base.__init__).parameters.items()
    }


def _check_idle_channels(cls: Type[nn.Module], args: Mapping[str, Any], trained_with: Mapping[str, Any]) -> None:
    # no shape of the training structure depends on which channels are idle
    defaults = _parameters(cls)
    for name in [name for name in ('idle_ratio', 'idle_schedule') if name in defaults]:
        value, trained = (mapping.get(name, defaults[name]) for mapping in (args, trained_with))
        if value != trained:
            raise ValueError(
                f'The weights were trained with {name}={trained!r}, and compute something else with {name}={value!r}: '
                'leave it out, or start from them with timm_rep.weight_select_init(model, path).')


def resolve_pretrained(cls: Type[nn.Module], variant: str, pretrained: bool, kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Add the published arguments of a model, and its weights, to the arguments of create_model.

    The model is that of 'hf-hub:' or 'local-dir:'; with ``pretrained=True``, that of :func:`find_weights`; else the one
    in the local folder, if the name of the model has a tag.

    Args:
        cls: Class of the model.
        variant: Name of the model.
        pretrained: Whether weights are to be loaded.
        kwargs: Arguments of ``create_model``, which go before the published ones.

    Returns:
        Arguments for :func:`build_model`.

    Raises:
        RuntimeError: There are no weights, they are damaged, or of another model.
        ValueError: Several files of the authors' release match; or weight_select is given for a model that has weights.
    """
    for name, given in (('pretrained', pretrained), ('features_only', kwargs.get('features_only'))):
        if given and kwargs.get('weight_select') is not None:
            raise ValueError(
                f'weight_select is for models that start from it, not with {name}=True: use '
                'timm_rep.weight_select_init(student, teacher).')
    cfg = kwargs.get('pretrained_cfg')
    cfg = {'tag': cfg} if isinstance(cfg, str) else cfg.to_dict() if isinstance(cfg, PretrainedCfg) else dict(cfg or {})
    overlay, cache_dir = dict(kwargs.get('pretrained_cfg_overlay') or {}), kwargs.get('cache_dir')
    tag, repository, path = cfg.get('tag'), None, None
    if cfg.get('source') in ('hf-hub', 'local-dir'):
        repository = cfg['hf_hub_id'] if cfg['source'] == 'hf-hub' else None
        repo = read_repository(repository, cache_dir) if repository else read_folder(cfg['file'])
        if pretrained:
            path = _path_if_there(repo)
    elif any(overlay.get(key) or cfg.get(key) for key in ('file', 'url', 'state_dict')):
        return kwargs  # the caller says where the weights are
    elif not pretrained:
        folder = local_folder()
        if not tag or not folder or not (folder / f'{variant}.{tag}' / CONFIG).is_file():
            return kwargs
        repo = read_folder(folder / f'{variant}.{tag}')
    else:
        tag = _DEFAULT_TAG if tag in (None, 'untrained') else tag
        repository = cfg.get('hf_hub_id')
        if repository == f'{_ORGANIZATION}/{variant}.{tag}':  # of the registered cfg, as timm's scripts pass it
            repository = None
        repository, file = overlay.get('hf_hub_id') or repository, overlay.get('hf_hub_filename')
        if file and not repository and has_release(variant):
            repository = RELEASE
        if file and (not repository or repository.partition('@')[0] != RELEASE):
            return kwargs  # timm loads files that this package did not publish
        ratio = kwargs.get('idle_ratio', DEFAULT_IDLE_RATIO)
        path, repo = find_weights(variant, tag, repository, file, ratio, cache_dir)
        if repo is None:
            return {**kwargs, 'weights': Weights(path, {'idle_ratio': ratio}, True, RELEASE)}

    if repo.config['architecture'] != variant:
        raise RuntimeError(f'{repo.where} holds a {repo.config["architecture"]}, no {variant}.')
    args = _model_args(cls, repo)
    resolved = {**args, **kwargs, 'weights': Weights(path, args, source=repo.where)}
    if SCALES in repo.hashes and 'scales' not in kwargs:
        resolved['scales'] = repo.file(SCALES)
    if path or not cfg.get('source'):
        on_hub = repository if cfg.get('source') else repository or f'{organization()}/{variant}.{tag}'
        resolved['pretrained_cfg'] = _pretrained_cfg(repo, architecture=variant, tag=tag, hf_hub_id=on_hub)
    return resolved


def _path_if_there(repo: ModelRepository) -> Optional[str]:
    """Path of the checked weights; None if a model that this package did not publish has no such file."""
    try:
        return repo.file(WEIGHTS)
    except LocalEntryNotFoundError:  # the Hub cannot be reached
        raise
    except (FileNotFoundError, EntryNotFoundError):
        if WEIGHTS in repo.hashes:
            raise
        return None


def _model_args(cls: Type[nn.Module], repo: ModelRepository) -> Dict[str, Any]:
    """The model_args of a config.json, limited to constructor arguments that read no files.

    Raises:
        RuntimeError: There are others.
    """
    args = dict(repo.model_args)
    others = args.keys() - (_parameters(cls).keys() - {'self', 'args', 'kwargs', 'device', 'dtype'})
    if not isinstance(cls, type):  # it passes arguments on to a model of timm, whose constructor reads no files
        others &= FACTORY_ARGS
    if args.get('scales') is False:
        args['scales'] = None
    if args.get('scales') not in (None, 'ones', 'init', *packaged_scales()):
        others.add('scales')
    if others:
        raise RuntimeError(
            f'{repo.where}: the model_args of config.json are arguments of {cls.__name__} and name no file; not '
            f'allowed: {", ".join(f"{name}={args[name]!r}" for name in sorted(others))}.')
    return args


def _pretrained_cfg(repo: ModelRepository, **kwargs) -> Dict[str, Any]:
    """pretrained_cfg of a config.json as timm reads it, without what says where weights are."""
    config = {**repo.config.get('pretrained_cfg', {}), **repo.config}
    cfg = {name: tuple(config[name]) if isinstance(config[name], list) else config[name]
           for name in _CFG if name in config}
    return {**cfg, **{name: value for name, value in kwargs.items() if value is not None}}


def local_folder() -> Optional[Path]:
    """The folder of published models on this machine: TIMM_REP_HUB, or ``hub/`` of a checkout of this package."""
    if os.environ.get('TIMM_REP_HUB'):
        return Path(os.path.expanduser(os.environ['TIMM_REP_HUB']))
    checkout = Path(__file__).parents[2]
    folder = checkout / 'hub'
    return folder if folder.is_dir() and (checkout / 'pyproject.toml').is_file() else None


def organization() -> str:
    """The organization on the Hub that publishes the models: TIMM_REP_ORG, or this package's."""
    return os.environ.get('TIMM_REP_ORG') or _ORGANIZATION


def find_weights(
        variant: str,
        tag: str,
        repository: Optional[str] = None,
        file: Optional[str] = None,
        idle_ratio: float = DEFAULT_IDLE_RATIO,
        cache_dir: Optional[Union[str, os.PathLike]] = None,
) -> Tuple[str, Optional[ModelRepository]]:
    """Find published weights: in the local folder, on the Hub, in the authors' release, in this order.

    Args:
        variant: Name of the model.
        tag: Tag of the weights.
        repository: 'owner/name' or 'owner/name@revision' on the Hub, the only place to look in; None for all places.
        file: Name of a file of the authors' release.
        idle_ratio: Idle ratio of the authors' weights.
        cache_dir: Folder of the Hub's cache; None for the default one.

    Returns:
        Path of the checked file, and the published model, None for the authors' release.

    Raises:
        RuntimeError: There are no weights, or the Hub cannot be reached; the message has every place and its reason. Or
            what was found is damaged.
        ValueError: Several files of the release match.
    """
    name = f'{variant}.{tag}'
    owner, _, revision = (repository or '').partition('@')
    if owner == RELEASE:
        return _find_released(variant, idle_ratio, file, revision, cache_dir), None

    def in_folder() -> ModelRepository:
        if folder is None:
            raise FileNotFoundError('there is none')
        return read_folder(folder / name)

    folder = local_folder()
    on_hub = repository or f'{organization()}/{name}'
    places: List[Tuple[str, Callable[[], Optional[ModelRepository]]]] = [
        (f'the folder {str(folder / name)!r}' if folder else "a 'hub' folder (TIMM_REP_HUB is not set)", in_folder),
        (f'the Hub repository {on_hub}', lambda: read_repository(on_hub, cache_dir)),
        (f"the authors' release, {RELEASE}", lambda: None),
    ]
    if repository:
        places = places[1:2]
    elif tag != _DEFAULT_TAG or not has_release(variant):
        places = places[:2]
    reasons: List[str] = []
    out_of_reach = False
    for where, read in places:
        if out_of_reach:
            # a short failure of the Hub must not lead to other weights than usual
            reasons.append(f'{where}: not tried')
            continue
        try:
            repo = read()
            path = repo.file(WEIGHTS) if repo else _find_released(
                variant, idle_ratio, None, None, cache_dir)
            return path, repo
        except OSError as e:
            out_of_reach = not _is_absent(e)
            reasons.append(f'{where}: {" ".join(str(e).split())}')
    published = [other for other in timm.list_pretrained(f'{variant}.*') if other != name]
    raise RuntimeError('\n  '.join([
        f'There are no weights of {name}:',
        *(f'{i}. {reason}' for i, reason in enumerate(reasons, 1)),
        *([f'Other weights of {variant}: {", ".join(published)}.'] if published else []),
    ]))


def _find_released(variant: str, idle_ratio: float, file: Optional[str], revision: Optional[str], cache_dir) -> str:
    path = fetch_released(variant, idle_ratio, file, revision or None, cache_dir)
    digest = Path(os.path.realpath(path)).name  # the Hub's cache names large files by their sha256
    if len(digest) == 64:
        check_sha256(path, digest, RELEASE)
    return path


def _is_absent(e: OSError) -> bool:
    """Whether the error says that there is no such thing, and not that the Hub did not answer."""
    if isinstance(e, LocalEntryNotFoundError):
        return constants.HF_HUB_OFFLINE
    return isinstance(e, (FileNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError))
