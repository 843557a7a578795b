"""Any multi-branch network of timm as a plain one with the structural prior in the optimizer.

`Re-parameterizing Your Optimizers rather than Architectures` - https://arxiv.org/abs/2205.15242
"""
from typing import Any, Dict, Optional

import timm
import torch.nn as nn
from timm.models import generate_default_cfgs, register_model

from timm_rep.convert.record import make_foldable
from timm_rep.convert.repopt import refuse_branches, set_scales, use_repopt_convs
from timm_rep.scales import ScalesLike

from ._from_base import base_cfg, create_from_base
from ._repopt import check_structure

__all__ = []

_DEFAULT_BASE = 'mobileone_s0'


def _build(
        base: str = _DEFAULT_BASE,
        structure: str = 'target',
        scales: Optional[ScalesLike] = 'init',
        reinit: bool = True,
        reparameterized: bool = False,
        **kwargs: Any,
) -> nn.Module:
    """The timm model ``base`` with CSLA layers; see :func:`repopt_any`."""
    check_structure(structure)
    if isinstance(scales, str) and scales == 'default':  # as for the other RepOpt models
        scales = 'init'
    model = timm.create_model(base, **kwargs)
    model._model_args = dict(base=base)  # create_model adds the others
    names = list(model.state_dict())
    use_repopt_convs(model, structure, reparameterized, reinit)
    if not reparameterized:
        set_scales(model, scales, reinit)
    refuse_branches(model, names)  # registered first, because a RepGhostNet checkpoint also contains plain names
    make_foldable(model)
    return model


model_cfgs: Dict[str, Dict[str, Any]] = {
    'repopt_any': dict(base=_DEFAULT_BASE),
}


def _create_repopt_any(variant: str, /, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    # branches that are trained or have constant scales are newly initialized
    start_from_base = dict(reinit=False) if kwargs.get('structure', 'target') == 'target' else None
    if pretrained and start_from_base and kwargs.get('reinit') and not kwargs.get('pretrained_cfg'):
        raise ValueError('reinit must be False with pretrained=True, whose weights it would discard, got True.')
    return create_from_base(
        _build, variant, model_cfgs, pretrained, start_from_base,
        "structure='target' starts from the weights of the base.", **kwargs)


default_cfgs = generate_default_cfgs({
    'repopt_any.untrained*': base_cfg('repopt_any', _DEFAULT_BASE),
})


@register_model
def repopt_any(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Any multi-branch network of timm as a plain one: ``create_model('repopt_any', base='mobileone_s0')``.

    With ``pretrained=True``, the target structure starts from the published weights of the base, folded.

    Args (in addition to the base model's):
        base: Name of a model of timm with blocks that are sums of linear branches, without tag.
        structure: 'target', a plain network; 'search', the network that Hyper-Search trains; 'csla', with the branches
            and constant scales.
        scales: Constants of the branches, which determine the GradMults and initial kernels of the target structure:
            Scales, a path, a Hub repository, 'ones', or 'init', the values that a search starts from. False for none.
        reinit: Reinitialize BatchNorms, and kernels by the rule of initialization. Not with ``pretrained=True``.
        reparameterized: Build the deploy structure, timm's folded model of the base.
    """
    return _create_repopt_any('repopt_any', pretrained=pretrained, **kwargs)
