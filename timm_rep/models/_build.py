"""Building the models of this package."""
from typing import Any, Optional, Type

import torch.nn as nn
from timm.models import build_model_with_cfg

from timm_rep.init import weight_select_init

__all__ = ['build_model']


def build_model(
        cls: Type[nn.Module],
        variant: str,
        pretrained: bool,
        weight_select: Optional[Any] = None,
        **kwargs,
) -> nn.Module:
    """timm's ``build_model_with_cfg``, of a class with ReparameterizeMixin, and weight selection.

    Args:
        weight_select: A teacher of :func:`timm_rep.weight_select_init`; None for the model's own initialization.
        kwargs: Of build_model_with_cfg.

    Raises:
        ValueError: weight_select is given for a model that has weights already, or whose tensors have other names; or
            as :func:`timm_rep.weight_select_init` does.
    """
    if weight_select is not None:
        for name, given in (('pretrained', pretrained), ('features_only', kwargs.get('features_only'))):
            if given:
                raise ValueError(
                    f'weight_select is for models that start from it, not with {name}=True: use '
                    'timm_rep.weight_select_init(student, teacher).')
    model = build_model_with_cfg(cls, variant, pretrained, **kwargs)
    if weight_select is not None:
        weight_select_init(model, weight_select)
    return model
