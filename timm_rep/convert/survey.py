"""Which of timm's architectures have FFNs and sums of linear branches that this package converts."""
import fnmatch
import itertools
import re
import statistics
from collections import Counter
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2

from timm_rep.utils.profiling import count_macs, model_input_size, time_calls

from .linear_sums import find_linear_sums
from .pointwise import find_pointwise_ffns
from .repopt import convert_to_repopt, use_repopt_convs

__all__ = ['Convertibility', 'measure_step_ratio', 'survey_convertible']

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
        macs_ratio: Multiply-accumulates of the model over those of the plain network; None without sums.
        step_ratio: Time of a training step of the model over that of the plain network; None if not measured.
    """
    family: str
    models: int
    model: str
    classes: Dict[str, int]
    others: Dict[str, int]
    sums: Dict[str, int]
    branches: int
    macs_ratio: Optional[float] = None
    step_ratio: Optional[float] = None


def _size(name: str) -> Tuple:
    ranks = [_SIZES.index(word) for word in name.split('_') if word in _SIZES]
    numbers = tuple(map(int, re.findall(r'\d+', name)))
    return name.startswith('test_'), min(ranks, default=len(_SIZES)), numbers, len(name), name


def _series(name: str) -> str:
    """The series that a model belongs to within its family: the first word of its name, with a version."""
    return re.match(r'[a-z]+(?<=v)\d|[a-z]+', name).group()


def _look_at(family: str, models: int, name: str) -> Convertibility:
    with torch.device('meta'):
        model = timm.create_model(name)
    ffns, others = find_pointwise_ffns(model)
    sums, _ = find_linear_sums(model)
    row = Convertibility(
        family, models, name, dict(Counter(ffn.class_name for ffn in ffns)), dict(Counter(others.values())),
        dict(Counter(type(s.module).__name__ for s in sums)), sum(len(s.branches) for s in sums))
    if not sums:
        return row
    macs = count_macs(model).total
    use_repopt_convs(model)
    return row._replace(macs_ratio=macs / count_macs(model).total)


def _training_step(model: nn.Module, opt: str, images: torch.Tensor) -> Callable[[], None]:
    optimizer = create_optimizer_v2(model.train(), opt=opt, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        out = model(images)
        (out if isinstance(out, torch.Tensor) else out[0]).square().mean().backward()  # others distil
        optimizer.step()

    return step


def measure_step_ratio(name: str, batch_size: int = 8, rounds: int = 3) -> float:
    """Time of a training step of a multi-branch network, with SGD, over that of the plain network, with RepSGD.

    Args:
        name: Name of a model of timm with blocks that are sums of linear branches.
        batch_size: Images of a step, of the size that the model has by default.
        rounds: Timed steps of each; the ratio is the median.
    """
    model, plain = timm.create_model(name), timm.create_model(name)
    convert_to_repopt(plain)
    images = torch.randn(batch_size, *model_input_size(model))
    times = time_calls(
        {'model': _training_step(model, 'sgd', images), 'plain': _training_step(plain, 'repsgd', images)},
        images.device, rounds, warmup=1)
    return statistics.median(a / b for a, b in zip(times['model'], times['plain']))


def survey_convertible(pattern: str = '*', time_steps: bool = False) -> Iterator[Convertibility]:
    """Look for pointwise FFNs and sums of linear branches in timm's architectures, built on the meta device.

    Args:
        pattern: Pattern of model names. '*' takes one model of every family, the smallest by its name, and of every
            other series in it that has other blocks, since building all takes minutes; any other pattern takes every
            model that matches.
        time_steps: Whether to measure the training step of multi-branch networks, on the CPU.

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
        every = pattern != '*'
        if not every:
            series = itertools.groupby(sorted(names, key=lambda name: (_series(name), _size(name))), _series)
            names = sorted((next(group) for _, group in series), key=_size)
        seen: Set[str] = set()
        for i, name in enumerate(names):
            row = _look_at(family, len(families[family]), name)
            blocks = {*row.classes, *row.sums}
            if every or i == 0 or not blocks <= seen:
                timed = time_steps and row.branches
                yield row._replace(step_ratio=measure_step_ratio(name)) if timed else row
            seen |= blocks
