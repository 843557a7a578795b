"""What the models that RepOptimizers train share."""
import logging
from typing import Any, Mapping, Optional

import torch
import torch.nn as nn

from timm_rep.convert import ReparameterizeMixin
from timm_rep.layers import Affine, Csla, CslaBlock, SearchBlock, csla_layers
from timm_rep.scales import ScalesLike, packaged_scales, resolve_scales

__all__ = ['RepOptMixin', 'build_csla_layer', 'check_structure', 'choose_scales', 'fold_norm']


_logger = logging.getLogger(__name__)


def check_structure(structure: str) -> None:
    """
    Raises:
        ValueError: There is no such structure.
    """
    if structure not in ('target', 'search', 'csla'):
        raise ValueError(f"structure is 'target', 'search' or 'csla', got {structure!r}.")


def choose_scales(variant: str, args: Mapping[str, Any], defaults: Mapping[str, Any]) -> ScalesLike:
    """What ``scales='default'`` stands for: the packaged scales of the variant, where there are any, else 'init'.

    Scales are specific to the architecture (section 4.3), so they are the packaged ones only where it is the variant's
    own; and a search starts from where searches start.

    Args:
        variant: Name of the model.
        args: What create_model was called with.
        defaults: The arguments that make the variant's architecture.
    """
    if args.get('scales', 'default') != 'default':
        return args['scales']
    changed = any(_plain(args.get(name, value)) != _plain(value) for name, value in defaults.items())
    if args.get('structure') == 'search':
        return 'init'
    if changed or variant not in packaged_scales():
        _logger.info("%s: no searched scales of this architecture come with timm-rep, scales='init'.", variant)
        return 'init'
    return variant


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def build_csla_layer(csla: Csla, structure: str, device=None, dtype=None) -> nn.Module:
    """What stands for a CSLA declaration in this structure: one convolution, or its branches."""
    if structure == 'target':
        return csla.build_conv(device=device, dtype=dtype)
    return {'search': SearchBlock, 'csla': CslaBlock}[structure](csla, device=device, dtype=dtype)


def fold_norm(conv: nn.Module, norm: nn.modules.batchnorm._BatchNorm, deploy: nn.Conv2d) -> None:
    """Write a CSLA operator and the norm behind it into one convolution with a bias.

    Raises:
        ValueError: The BatchNorm has no running statistics.
        OverflowError: A folded weight does not fit the dtype of the operator.
    """
    kernel = conv.equivalent_kernel(dtype=torch.float64)
    like = next(p for p in conv.parameters() if p.ndim == 4)
    Affine.from_kernel(kernel).before_norm(norm).write_to(deploy, like=like)


class RepOptMixin(ReparameterizeMixin):
    """Adds scales to a timm model with CSLA operators, and ``reparameterize()``.

    Attributes:
        scales_source: What its scales came from: a word, a path, a name; None of tensors, or if it has none.
    """
    scales_source: Optional[str] = None

    def _set_scales(self, structure: str, scales: Optional[ScalesLike], reinit: bool) -> None:
        """Give a target net its GradMults and initial kernels, another structure its scales.

        Raises:
            FileNotFoundError: There is no such file of scales.
            ValueError: The scales do not fit, or a structure that has scales gets none.
        """
        self.scales_source = scales if isinstance(scales, str) else None
        scales = resolve_scales(self, scales)
        if scales is None:
            if structure != 'target':
                raise ValueError(
                    f"The {structure} structure has scales: pass them, or 'ones' or 'init'; without any there is only "
                    "the plain net, structure='target'.")
            return
        for name, layer in csla_layers(self).items():
            layer.set_scales(scales[name])
            if structure == 'target' and reinit:
                layer.reset_kernel(scales[name])

    # Who loads a published config.json has neither the tensors nor the file that the scales came from, and shall not
    # train with others unawares: RepSGD asks for them then. Nor shall the default of a later version take their place.
    @ReparameterizeMixin._model_args.setter
    def _model_args(self, args: Mapping[str, Any]) -> None:
        args = dict(args)
        if args.get('scales', 'default') == 'default' and not self.reparameterized:
            args['scales'] = self.scales_source
        if args.get('scales') not in (None, 'ones', 'init', *packaged_scales()):
            args['scales'] = False
        ReparameterizeMixin._model_args.fset(self, args)
