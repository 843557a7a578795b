"""Hugging Face transformers, whose ``AutoModel`` wraps timm models: scales, and the structure of a model."""
import functools
import os
import sys
from typing import Any, Iterable

import torch.nn as nn

from timm_rep.layers import foldable_layers
from timm_rep.utils.network import hub_download

from .attach import attach_grad_mults
from .files import SCALES_IN_FOLDER, SCALES_NAME

_WRAPPER = 'transformers.models.timm_wrapper.modeling_timm_wrapper'


def extend_timm_wrapper() -> None:
    """Make transformers attach the scales of a folder, save a model's structure, and refuse weights of a different one.

    Without this, transformers' ``save_pretrained`` writes the arguments that the model was created with, even if it has
    since been folded or converted, and ``from_pretrained`` only warns about missing and unexpected keys. Does nothing
    until transformers has loaded its wrapper of timm models.
    """
    cls = getattr(sys.modules.get(_WRAPPER), 'TimmWrapperPreTrainedModel', None)
    if cls is None or hasattr(cls.save_pretrained, 'extended'):
        return
    inherited_save, inherited_init = cls.save_pretrained, cls.post_init
    inherited_adjust: Any = getattr(cls, '_adjust_missing_and_unexpected_keys', None)  # transformers >= 5

    @functools.wraps(inherited_save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.timm_model
        if hasattr(model, 'reparameterize'):  # a model of this package
            model.state_dict()  # converted models bring their arguments up to date
            self.config.architecture = model.pretrained_cfg['architecture']
            self.config.model_args = {k: v for k, v in model._model_args.items() if k != 'num_classes'}
        return inherited_save(self, *args, **kwargs)

    @functools.wraps(inherited_init)
    def post_init(self: Any) -> None:
        inherited_init(self)
        if (self.config.model_args or {}).get('scales') == SCALES_IN_FOLDER:
            _attach(self)

    def _adjust_missing_and_unexpected_keys(self: Any, loading_info: Any, *args: Any, **kwargs: Any) -> Any:
        result = inherited_adjust(self, loading_info, *args, **kwargs)
        _check_keys(self.timm_model, [
            *getattr(loading_info, 'missing_keys', ()), *getattr(loading_info, 'unexpected_keys', ())])
        return result

    save_pretrained.extended = True  # type: ignore[attr-defined]
    cls.save_pretrained, cls.post_init = save_pretrained, post_init
    if inherited_adjust is not None:
        cls._adjust_missing_and_unexpected_keys = _adjust_missing_and_unexpected_keys


def _check_keys(model: nn.Module, keys: Iterable[str]) -> None:
    """Raise if keys that only the model or only the file of weights has are of a layer of this package."""
    layers = tuple(f'{name}.' for name, _ in foldable_layers(model))
    others = sorted(key for key in (key.removeprefix('timm_model.') for key in keys) if key.startswith(layers))
    if others:
        raise RuntimeError(
            f'Expected weights with the structure of {type(model).__name__}, but {others[0]} is missing, or has no '
            'layer: model_args in config.json must have reparameterized=True if, and only if, the weights are folded.')


def _attach(wrapper: Any) -> None:
    """Attach the scales of the folder or repository of a model, if it has any; RepSGD refuses a model without."""
    source = wrapper.config._name_or_path
    path = os.path.join(source, SCALES_NAME)
    if not os.path.isdir(source):
        try:
            path = hub_download(source, SCALES_NAME, getattr(wrapper.config, '_commit_hash', None))
        except (OSError, ValueError):  # ValueError: not the name of a repository
            return
    if os.path.isfile(path):
        attach_grad_mults(wrapper.timm_model, path)
