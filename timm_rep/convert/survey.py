"""Survey of the timm architectures that this package can convert."""
import fnmatch
from collections import Counter
from typing import Dict, Iterator, NamedTuple, Optional

import timm
import torch

from timm_rep.utils.profiling import count_macs

from .ffn import find_ffns
from .linear_sums import find_linear_sums
from .repopt import use_repopt_convs


class Convertibility(NamedTuple):
    """Convertible FFNs and sums of linear branches of a timm model.

    Attributes:
        family: File of ``timm.models``.
        model: Name of the model.
        classes: Number of pointwise FFNs by class.
        others: Number of FFNs that are not pointwise, by reason.
        sums: Number of sums of linear branches by class of their block.
        branches: Number of branches of all sums.
        macs_ratio: Multiply-accumulates of the model, divided by the plain network's; None without sums.
    """
    family: str
    model: str
    classes: Dict[str, int]
    others: Dict[str, int]
    sums: Dict[str, int]
    branches: int
    macs_ratio: Optional[float] = None


def survey_convertible(pattern: str) -> Iterator[Convertibility]:
    """Look for pointwise FFNs and sums of linear branches in timm's architectures, built on the meta device.

    Args:
        pattern: Pattern of model names; '*' for all of them takes minutes.

    Yields:
        One item per model that matches, by family.
    """
    found = []
    for name in fnmatch.filter(timm.list_models(), pattern):
        package, _, family = timm.models.model_entrypoint(name).__module__.rpartition('.')
        if package == 'timm.models':
            found.append((family, name))
    for family, name in sorted(found):
        with torch.device('meta'):
            model = timm.create_model(name)
        ffns, others = find_ffns(model)
        sums, _ = find_linear_sums(model)
        row = Convertibility(
            family, name, dict(Counter(ffn.class_name for ffn in ffns)), dict(Counter(others.values())),
            dict(Counter(type(s.module).__name__ for s in sums)), sum(len(s.branches) for s in sums))
        if sums:
            macs = count_macs(model).total
            use_repopt_convs(model)
            row = row._replace(macs_ratio=macs / count_macs(model).total)
        yield row
