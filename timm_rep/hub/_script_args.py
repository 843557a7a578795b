"""What timm's scripts pass to ``create_model``, as a user would pass it."""
from dataclasses import fields
from typing import Any, Dict, Mapping

from timm.models import PretrainedCfg, get_pretrained_cfg


def separate_overlay(variant: str, kwargs: Mapping[str, Any]) -> Dict[str, Any]:
    """Arguments of ``create_model`` with the tag of a registered pretrained_cfg in its place.

    timm's scripts pass all fields of it, with pretrained_cfg_overlay merged into them
    (``timm.models.resolve_model_input_args``, since 1.0.31). The fields that differ from the registered ones become
    pretrained_cfg_overlay again, and the tag 'untrained' becomes None. Any other pretrained_cfg stays as it is.

    Args:
        variant: Name of the model, without tag.
        kwargs: Arguments of ``create_model``.
    """
    given, names = kwargs.get('pretrained_cfg'), {field.name for field in fields(PretrainedCfg)}
    if isinstance(given, Mapping) and given.keys() <= names:  # else of another version of timm
        given = PretrainedCfg(**given)
    if not isinstance(given, PretrainedCfg) or given.source or given.architecture != variant or not given.tag:
        return dict(kwargs)
    try:
        registered = get_pretrained_cfg(f'{variant}.{given.tag}')
    except RuntimeError:  # another tag
        return dict(kwargs)
    overlay = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(registered, name)}
    return {
        **kwargs,
        'pretrained_cfg': None if given.tag == 'untrained' else given.tag,
        'pretrained_cfg_overlay': {**overlay, **dict(kwargs.get('pretrained_cfg_overlay') or {})} or None}
