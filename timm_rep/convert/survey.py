"""Which of timm's architectures have FFNs and sums of linear branches that this package converts."""
import fnmatch
import re
from collections import Counter
from typing import Dict, Iterator, List, NamedTuple, Tuple

import timm
import torch

from .linear_sums import find_linear_sums
from .pointwise import find_pointwise_ffns

__all__ = ['Convertibility', 'survey_convertible']

# words for the size of a model in timm's names, ascending
_SIZES = (
    'zepto', 'atto', 'femto', 'pico', 'nano', 'xxs', 'xx', 'xs', 'x', 't0', 's0', 'm0', 'b0', 'ti', 'tiny', 'mini', 't',
    's', 'small', 'b1', 'm1', 'm', 'medium', 'b', 'base')


class Convertibility(NamedTuple):
    """What can be converted in a model.

    Attributes:
        family: File of ``timm.models``.
        models: Number of models of this family that match.
        model: The model that was looked at.
        classes: Pointwise FFNs by class.
        others: FFNs that are not pointwise, by reason.
        sums: Sums of linear branches by class of their block.
        branches: Number of branches of all sums.
    """
    family: str
    models: int
    model: str
    classes: Dict[str, int]
    others: Dict[str, int]
    sums: Dict[str, int]
    branches: int


def _size(name: str) -> Tuple:
    ranks = [_SIZES.index(word) for word in name.split('_') if word in _SIZES]
    numbers = tuple(map(int, re.findall(r'\d+', name)))
    return name.startswith('test_'), min(ranks, default=len(_SIZES)), numbers, len(name), name


def survey_convertible(pattern: str = '*') -> Iterator[Convertibility]:
    """Look for pointwise FFNs and sums of linear branches in timm's architectures, built on the meta device.

    Args:
        pattern: Pattern of model names. '*' takes one model of every family, the smallest by its name, since building
            all takes minutes; any other pattern takes every model that matches.

    Yields:
        One item for every model that was looked at, by family.
    """
    families: Dict[str, List[str]] = {}
    for name in timm.list_models():
        package, _, family = timm.models.model_entrypoint(name).__module__.rpartition('.')
        if package == 'timm.models' and fnmatch.fnmatch(name, pattern):
            families.setdefault(family, []).append(name)
    for family in sorted(families):
        names = sorted(families[family], key=_size)
        for name in names[:1] if pattern == '*' else names:
            with torch.device('meta'):
                model = timm.create_model(name)
            ffns, others = find_pointwise_ffns(model)
            classes = Counter(ffn.class_name for ffn in ffns)
            sums, _ = find_linear_sums(model)
            yield Convertibility(
                family, len(names), name, dict(classes), dict(Counter(others.values())),
                dict(Counter(type(s.module).__name__ for s in sums)), sum(len(s.branches) for s in sums))
