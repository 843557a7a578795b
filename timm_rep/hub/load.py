"""Building the models of this package, and loading what is published of them."""
import functools
import inspect
from dataclasses import fields
from typing import Any, Callable, Dict, Mapping, Optional, Set, Type, Union

import torch
import torch.nn as nn
from timm.models import PretrainedCfg, build_model_with_cfg

from timm_rep.init import weight_select_init

from .files import SCALES, WEIGHTS, Published
from .release import DEFAULT_IDLE_RATIO, RELEASE, fetch_released, has_release
from .sources import find_weights, local_tags, organization

__all__ = ['build_model', 'published_cfgs', 'with_published']

StateDict = Dict[str, torch.Tensor]

# the default tag of the released weights, and of what has no other
_TAG = 'in1k'
# the repositories of the registered tags, which nobody has named
_REGISTERED: Set[str] = set()


def build_model(
        cls: Type[nn.Module],
        variant: str,
        pretrained: bool,
        weight_select: Optional[Any] = None,
        fold_pretrained: Optional[Callable[[StateDict], StateDict]] = None,
        trained_with: Optional[Mapping[str, Any]] = None,
        pretrained_filter_fn: Optional[Callable[[StateDict, nn.Module], StateDict]] = None,
        **kwargs,
) -> nn.Module:
    """timm's ``build_model_with_cfg``, and weight selection.

    Args:
        weight_select: A teacher of :func:`timm_rep.weight_select_init`; None for the model's own initialization.
        fold_pretrained: Makes weights of the deploy structure of the pretrained ones, before the filter.
        trained_with: The arguments of the model that the pretrained weights are of.
        kwargs: Of build_model_with_cfg.

    Raises:
        ValueError: As :func:`timm_rep.weight_select_init` does; or the pretrained weights are of another idle ratio.
    """
    if trained_with is not None:
        _check_idle_channels(cls, kwargs, trained_with)

    def folded_and_filtered(state_dict: StateDict, model: nn.Module) -> StateDict:
        state_dict = fold_pretrained(state_dict)
        return pretrained_filter_fn(state_dict, model) if pretrained_filter_fn else state_dict

    model = build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=folded_and_filtered if fold_pretrained else pretrained_filter_fn,
        **kwargs,
    )
    if weight_select is not None:
        weight_select_init(model, weight_select)
    return model


def _check_idle_channels(cls: Type[nn.Module], args: Mapping[str, Any], trained_with: Mapping[str, Any]) -> None:
    """No shape of the training structure tells which channels are idle."""
    defaults = {
        name: parameter.default for base in reversed(cls.__mro__)
        for name, parameter in inspect.signature(base.__init__).parameters.items()
    }
    for name in [name for name in ('idle_ratio', 'idle_schedule') if name in defaults]:
        ours, theirs = (of.get(name, defaults[name]) for of in (args, trained_with))
        if ours != theirs:
            raise ValueError(
                f'The weights were trained with {name}={theirs!r}, and compute something else with {name}={ours!r}: '
                'leave it out, or start from them with timm_rep.weight_select_init(model, path).')


def published_cfgs(variants: Mapping[str, Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """What timm's ``generate_default_cfgs`` takes: for each model the tags that there are weights of.

    Args:
        variants: The pretrained_cfg of the models as such.
    """
    cfgs = {}
    for variant, cfg in variants.items():
        for tag, published in local_tags(variant):
            if tag != _TAG or not has_release(variant):
                cfgs[f'{variant}.{tag}'] = dict(_cfg_of(published), hf_hub_id=_default_repository(variant, tag))
        # last, and '*', make it the default: what is published for other data does not change the model as such
        if has_release(variant):
            cfgs[f'{variant}.{_TAG}*'] = dict(cfg, hf_hub_id=_default_repository(variant, _TAG))
        else:
            cfgs[f'{variant}.untrained*'] = cfg
    return cfgs


def _default_repository(variant: str, tag: str) -> str:
    repository = f'{organization()}/{variant}.{tag}'
    _REGISTERED.add(repository)
    return repository


def _cfg_of(published: Published) -> Dict[str, Any]:
    """The pretrained_cfg of a published model, as timm reads it from a config.json."""
    config = published.config
    cfg = dict(config.get('pretrained_cfg', {}))
    cfg.update({key: config[key] for key in ('num_classes', 'label_names', 'label_descriptions') if key in config})
    known = {field.name for field in fields(PretrainedCfg)}  # a later timm may have written others
    return {key: value for key, value in cfg.items() if key in known}


def with_published(create: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Gives ``_create_family(variant, pretrained, **kwargs)`` the arguments and the weights of what is published.

    Raises:
        RuntimeError: There are no weights, they are damaged, or are of another model.
        ValueError: Several files of the release may be it; or weight_select is given for a model that has weights
            already, or whose tensors have other names.
    """

    @functools.wraps(create)
    def wrapper(variant: str, pretrained: bool = False, **kwargs) -> nn.Module:
        for name, given in (('pretrained', pretrained), ('features_only', kwargs.get('features_only'))):
            if given and kwargs.get('weight_select') is not None:
                raise ValueError(
                    f'weight_select is for models that start from it, not with {name}=True: use '
                    'timm_rep.weight_select_init(student, teacher).')
        request = _Request(create, variant, pretrained, kwargs)
        model = create(variant, pretrained=pretrained, **request.resolved())
        if request.published_args and not isinstance(model, nn.ModuleDict):  # of a features_only model timm keeps none
            # what timm writes into the config.json of the model, if it is saved again
            model._model_args = {**request.published_args, **getattr(model, '_model_args', {})}
        return model

    return wrapper


class _Request:
    """What ``create_model`` was asked for."""

    def __init__(self, create: Callable[..., nn.Module], variant: str, pretrained: bool, kwargs: Dict[str, Any]):
        self.create, self.variant, self.pretrained, self.kwargs = create, variant, pretrained, kwargs
        self.cache_dir = kwargs.get('cache_dir')
        self.overlay = dict(kwargs.get('pretrained_cfg_overlay') or {})
        # timm passes the tag of the name, its scripts the registered cfg of it, and of 'hf-hub:' and 'local-dir:' the
        # cfg that was read
        cfg: Union[str, Mapping[str, Any], PretrainedCfg, None] = kwargs.get('pretrained_cfg')
        self.cfg = cfg.to_dict() if isinstance(cfg, PretrainedCfg) else dict(cfg) if isinstance(cfg, Mapping) else {}
        self.tag = cfg if isinstance(cfg, str) else self.cfg.get('tag')
        self.published_args: Dict[str, Any] = {}

    def resolved(self) -> Dict[str, Any]:
        """The arguments for ``create``."""
        source = self.cfg.get('source')
        if source in ('hf-hub', 'local-dir'):
            if source == 'hf-hub':
                published = Published.on_hub(self.cfg['hf_hub_id'], self.cache_dir)
            else:
                published = Published.in_folder(self.cfg['file'])
            if self.pretrained and published.has(WEIGHTS):
                return self._with(published, published.file(WEIGHTS), dict(self.cfg, source=None))
            return self._with(published, None, {})  # timm knows what else to look for
        if any(self.overlay.get(key) or self.cfg.get(key) for key in ('file', 'url', 'state_dict')):
            return self.kwargs  # the caller says where the weights are
        if not self.pretrained:
            published = dict(local_tags(self.variant)).get(self.tag)
            return self._with(published, None, self._cfg(published)) if published else self.kwargs
        repository, _, revision = self._repository().partition('@')
        file = self.overlay.get('hf_hub_filename')
        if repository == RELEASE or (file and not repository and has_release(self.variant)):
            return self._with(None, self._released(revision), {})
        if file:
            return self.kwargs  # timm loads what is no published model
        tag = _TAG if self.tag in (None, '', 'untrained') else self.tag
        found = find_weights(
            f'{self.variant}.{tag}',
            self._repository(),
            self._released if tag == _TAG and has_release(self.variant) else None,
            self.cache_dir,
        )
        return self._with(found.published, found.path, self._cfg(found.published, tag))

    def _repository(self) -> str:
        """The one on the Hub that the caller names, '' if none."""
        of_cfg = self.cfg.get('hf_hub_id')
        return self.overlay.get('hf_hub_id') or (of_cfg if of_cfg and of_cfg not in _REGISTERED else '')

    def _released(self, revision: str = '') -> str:
        ratio = self.kwargs.get('idle_ratio', DEFAULT_IDLE_RATIO)
        if not has_release(self.variant):
            raise RuntimeError(f'{RELEASE} has no weights of {self.variant}.')
        model = self.create(self.variant, idle_ratio=ratio, device='meta')
        return fetch_released(
            model, self.variant, ratio, self.overlay.get('hf_hub_filename'), revision or None, self.cache_dir)

    def _cfg(self, published: Optional[Published], tag: Optional[str] = None) -> Dict[str, Any]:
        if published is None:
            return {}
        tag = tag or self.tag
        return dict(
            _cfg_of(published), architecture=self.variant, tag=tag,
            hf_hub_id=self._repository() or _default_repository(self.variant, tag))

    def _with(self, published: Optional[Published], path: Optional[str], cfg: Dict[str, Any]) -> Dict[str, Any]:
        """The arguments, with those of the published model where the caller gives no others.

        Args:
            path: Of the weights to load, None if timm shall look for them.
            cfg: The pretrained_cfg; empty for the registered one.
        """
        if published and published.config['architecture'] != self.variant:
            raise RuntimeError(f'{published.where} holds a {published.config["architecture"]}, no {self.variant}.')
        if published:
            args = self.published_args = dict(published.model_args)
        else:  # of the release the file was chosen by it
            args = {'idle_ratio': self.kwargs.get('idle_ratio', DEFAULT_IDLE_RATIO)}
        kwargs = {**args, **self.kwargs}
        if cfg:
            kwargs['pretrained_cfg'] = cfg
        if kwargs.get('scales') == 'published' and published:
            kwargs['scales'] = False if kwargs.get('reparameterized') else published.file(SCALES)
        if path:
            kwargs['pretrained_cfg_overlay'] = dict(self.overlay, file=path)
            kwargs['trained_with'] = args
            if kwargs.get('reparameterized') and not args.get('reparameterized'):
                kwargs['fold_pretrained'] = functools.partial(self._folded, args, cfg)
        return kwargs

    def _folded(self, args: Mapping[str, Any], cfg: Dict[str, Any], state_dict: StateDict) -> StateDict:
        args = {name: False if name == 'scales' else value for name, value in args.items()}
        model = self.create(self.variant, pretrained_cfg=cfg or self.tag, **args)
        model.load_state_dict(state_dict)
        return model.reparameterize().state_dict()
