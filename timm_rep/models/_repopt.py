"""Parts shared by the models that RepOptimizers train: structures, scales, folding."""
import logging
from typing import Any, Dict, Mapping

from timm_rep.convert import ReparameterizeMixin
from timm_rep.scales import RELEASED, RELEASED_PREFIX, Scales, ScalesLike, packaged_scales, recorded_scales
from timm_rep.utils.distributed import world_size_and_rank

_logger = logging.getLogger(__name__)


def check_structure(structure: str) -> None:
    """Raise ValueError if the structure is unknown."""
    if structure not in ('target', 'search', 'csla'):
        raise ValueError(f"structure must be 'target', 'search' or 'csla', got {structure!r}.")


def choose_scales(variant: str, args: Mapping[str, Any], architecture: Mapping[str, Any]) -> ScalesLike:
    """Resolve ``scales='default'`` and ``'released'`` in arguments of create_model.

    The default is the first of: the packaged scales of the variant; those that the authors of RepOptimizers released
    for it, if they are in the cache or can be downloaded; 'init'. Scales are specific to an architecture (section 4.3),
    so where an argument changes it, the default is 'init'. A search structure starts from 'init'.

    Raises:
        FileNotFoundError: The released scales are asked for, or are the default in a training of several processes, and
            cannot be downloaded.
    """
    scales = args.get('scales', 'default')
    if isinstance(scales, str) and scales == 'released':
        return Scales.load(RELEASED_PREFIX + variant)
    if not isinstance(scales, str) or scales != 'default':
        return scales
    if args.get('structure') == 'search' or args.get('reparameterized'):
        return 'init'
    if any(_as_lists(args.get(name, value)) != _as_lists(value) for name, value in architecture.items()):
        searched = variant in RELEASED or variant in packaged_scales()
        _logger.log(
            logging.WARNING if searched else logging.INFO,
            "%s: the searched scales are of another architecture, using scales='init'.", variant)
        return 'init'
    if variant in packaged_scales():
        return variant
    if variant in RELEASED:
        try:
            return Scales.load(RELEASED_PREFIX + variant)
        except FileNotFoundError as e:
            if world_size_and_rank()[0] > 1:  # others may have them, and multipliers are not synchronized
                raise FileNotFoundError(
                    f"{e} Or pass scales='init': all processes of a training need the same scales.") from e
            _logger.warning("Using scales='init' for %s. %s", variant, e)
    else:
        _logger.info("%s: no scales were searched for this model, using scales='init'.", variant)
    return 'init'


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


class RepOptMixin(ReparameterizeMixin):
    """Adds scales and ``reparameterize()`` to a timm model with CSLA layers."""

    # a property with the inherited setter; only the getter differs
    @ReparameterizeMixin._model_args.getter  # type: ignore[attr-defined]
    def _model_args(self) -> Dict[str, Any]:
        args = ReparameterizeMixin._model_args.__get__(self)
        args.pop('scales', None)
        if not self.reparameterized:
            args['scales'] = recorded_scales(self)
        return args
