"""Parts shared by the models that RepOptimizers train: structures, scales, folding."""
import logging
from typing import Any, Dict, Mapping, Optional, Union

from timm_rep.convert import ReparameterizeMixin
from timm_rep.scales import ScalesLike, packaged_scales, recorded_scales

__all__ = ['RepOptMixin', 'check_structure', 'choose_scales']


_logger = logging.getLogger(__name__)


def check_structure(structure: str) -> None:
    """
    Raises:
        ValueError: The structure is unknown.
    """
    if structure not in ('target', 'search', 'csla'):
        raise ValueError(f"structure is 'target', 'search' or 'csla', got {structure!r}.")


def choose_scales(
        variant: str,
        args: Mapping[str, Any],
        architecture: Mapping[str, Any],
) -> Union[ScalesLike, bool, None]:
    """Resolve ``scales='default'``: the packaged scales of the variant where there are any, otherwise 'init'.

    Scales are specific to an architecture (section 4.3), so packaged ones are used only if no argument changes it. A
    search structure starts from 'init'.

    Args:
        variant: Name of the model.
        args: Arguments of create_model.
        architecture: Arguments that define the architecture of the variant.

    Returns:
        The argument ``scales`` for the model class.
    """
    scales = args.get('scales', 'default')
    if not isinstance(scales, str) or scales != 'default':
        return scales
    changed = any(_as_lists(args.get(name, value)) != _as_lists(value) for name, value in architecture.items())
    if args.get('structure') == 'search':
        return 'init'
    if changed or variant not in packaged_scales():
        _logger.info("%s: timm-rep has no searched scales of this architecture, using scales='init'.", variant)
        return 'init'
    return variant


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


class RepOptMixin(ReparameterizeMixin):
    """Adds scales and ``reparameterize()`` to a timm model with CSLA layers.

    Attributes:
        scales_source: Origin of the attached scales if it was a string: 'ones', 'init', a path, a name; None otherwise.
    """
    scales_source: Optional[str] = None

    @property
    def _model_args(self) -> Dict[str, Any]:
        args = ReparameterizeMixin._model_args.fget(self)
        args.pop('scales', None)
        if not self.reparameterized:
            args['scales'] = recorded_scales(self.scales_source, args.get('structure', 'target'))
        return args

    @_model_args.setter
    def _model_args(self, args: Mapping[str, Any]) -> None:
        ReparameterizeMixin._model_args.fset(self, args)
