"""Scales: the constants of a RepOptimizer, found by Hyper-Search. They determine a model's GradMults.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.3.
"""
import json
import os
from types import MappingProxyType
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn

from timm_rep.layers import CslaBlock, csla_layers
from timm_rep.utils.files import StrPath, parse_json

from .files import ORDER, locate, read, write

_HISTORY = 'history'  # metadata key of the history, as JSON


class BranchComparison(NamedTuple):
    """Comparison of one branch of two sets of scales.

    Attributes:
        correlation: Pearson correlation of the layers' means over depth.
        stage_means: Means over each stage, of the first and of the second set.
        relative_change: ``|first / second - 1|``, mean over the channels and the layers: with the initial scales as the
            second set, how far a search has moved them. NaN if their widths differ.
    """
    correlation: float
    stage_means: Dict[str, Tuple[float, float]]
    relative_change: float


def _relative_change(scale: torch.Tensor, other: torch.Tensor) -> float:
    return (scale / other - 1).abs().mean().item() if scale.shape == other.shape else float('nan')


def stage_of(layer: str) -> str:
    """The stage in the name of a layer: ``stages.2`` in ``stages.2.5.conv.0``, ``stem`` in ``stem.conv.0``."""
    parts = layer.split('.')
    return '.'.join(parts[:2] if len(parts) > 1 and parts[1].isdigit() else parts[:1])


class Scales(Mapping[str, Mapping[str, torch.Tensor]]):
    """A read-only mapping from CSLA layers to branches to vectors (channels,), float32 on the CPU.

    The layers of RepOpt-VGG are ``stem.conv.0``, ``stages.0.0.conv.0`` and so on, with the branches ``conv3x3``,
    ``conv1x1`` and, after a search, ``identity``, which no GradMult uses. The layers of RepOpt-GhostNet are
    ``blocks.0.0.ghost1.cheap_operation.0`` and so on, with ``conv3x3`` and ``identity``.

    Attributes:
        source: Argument of :meth:`load`, or 'ones' or 'init', of attached scales; None for others.
        metadata: Origin of the scales, strings by name.
        history: Nested mapping from layers to branches to lists of means, one per epoch of a search, for the last
            layer of each stage (figure 6).
    """

    source: Optional[str] = None

    def __init__(
            self,
            layers: Mapping[str, Mapping[str, torch.Tensor]],
            metadata: Optional[Mapping[str, str]] = None,
            history: Optional[Mapping[str, Mapping[str, List[float]]]] = None,
    ):
        """
        Args:
            layers: Nested mapping from layers, in the order from input to output, to branches to vectors (channels,).
            metadata: Strings by name.
            history: Nested mapping from layers to branches to lists of means, one per epoch.

        Raises:
            ValueError: A scale is not a finite vector, the name of a branch has a dot, or the metadata cannot be saved.
        """
        self._layers: Dict[str, Dict[str, torch.Tensor]] = {}
        for layer, branches in layers.items():
            if not isinstance(branches, Mapping):
                raise ValueError(f'Scales must be vectors by branch by layer, got {branches!r:.100} for {layer!r}.')
            self._layers[layer] = {branch: _constant(layer, branch, scale) for branch, scale in branches.items()}
        self.metadata = dict(metadata or {})
        check_metadata(self.metadata)
        self.history = {
            layer: {branch: list(means) for branch, means in branches.items()}
            for layer, branches in (history or {}).items()
        }

    def __getitem__(self, layer: str) -> Mapping[str, torch.Tensor]:
        return MappingProxyType(self._layers[layer])

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __eq__(self, other: object) -> bool:
        """Whether layers, branches and all numbers are equal, regardless of metadata and history."""
        if not isinstance(other, Scales):
            return NotImplemented
        return self.keys() == other.keys() and all(
            self[n].keys() == other[n].keys() and all(torch.equal(x, other[n][b]) for b, x in self[n].items())
            for n in self)

    def __repr__(self) -> str:
        origin = ''.join(f', {key}={value!r}' for key, value in sorted(self.metadata.items()))
        return f'{type(self).__name__}({len(self)} layers{origin})'

    @classmethod
    def from_model(cls, model: nn.Module) -> 'Scales':
        """Copy the scales of a model in the search or CSLA structure.

        Raises:
            ValueError: The model is in a different structure.
        """
        layers = {name: layer for name, layer in csla_layers(model).items() if isinstance(layer, CslaBlock)}
        if not layers:
            raise ValueError(
                f"Expected a model with scales, but {type(model).__name__} has none: create it with structure='search' "
                "or 'csla'.")
        return cls({
            name: {**layer.scales, **{k: w for k, w in layer.weights.items() if k not in layer.scales}}
            for name, layer in layers.items()
        })

    @classmethod
    def initial(cls, model: nn.Module) -> 'Scales':
        """The scales that a search of this model starts from (appendix B).

        In RepOpt-VGG, 1 in the first layer of a stage and ``sqrt(2 / l)`` in the l-th after it.

        Raises:
            ValueError: The model has no CSLA layers.
        """
        layers = csla_layers(model)
        if not layers:
            raise ValueError(
                f'Expected a model with CSLA layers, but {type(model).__name__} has none: scales are for RepOpt models '
                'before reparameterize(), for models of convert_to_repopt(), and for those built with '
                'timm_rep.layers.Csla.')
        return cls({name: layer.csla.initial_scales('cpu', torch.float32) for name, layer in layers.items()})

    @classmethod
    def ones(cls, model: nn.Module) -> 'Scales':
        """All ones for the layers of a model, the row `All 1` of table 4.

        Raises:
            ValueError: The model has no CSLA layers.
        """
        return cls.initial(model).ones_like()

    def ones_like(self) -> 'Scales':
        """All ones for the same layers and branches, without metadata."""
        return self._mapped(torch.ones_like, {})

    def mean_over_channels(self) -> 'Scales':
        """Each scale replaced by its mean over the channels, the row `Average across channels` of table 4."""
        return self._mapped(lambda scale: scale.mean().expand_as(scale), {**self.metadata, 'averaged': 'over channels'})

    def summary(self) -> str:
        """A table of the mean and standard deviation of each branch, one line for each layer."""
        names = self.branches()
        rows = [('layer', *names)]
        for layer, branches in self.items():
            cells = (branches.get(name) for name in names)
            rows.append((layer, *(
                '' if s is None else f'{s.mean():+.3f} ({s.std(correction=0):.3f})' for s in cells)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join('  '.join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)

    def branches(self) -> List[str]:
        """The names of all branches, in the order in which they first appear."""
        return list(dict.fromkeys(branch for branches in self.values() for branch in branches))

    def stages(self) -> Dict[str, List[str]]:
        """The layers of each stage, by the name of the stage, see :func:`stage_of`."""
        stages: Dict[str, List[str]] = {}
        for layer in self:
            stages.setdefault(stage_of(layer), []).append(layer)
        return stages

    def compare(self, other: 'Scales') -> Dict[str, 'BranchComparison']:
        """Compare with other scales of the same model (figures 6 and 7).

        Returns:
            Correlation, means and relative change of the common layers, by branch.

        Raises:
            ValueError: The two have no common layers.
        """
        if not self.keys() & other.keys():
            raise ValueError(f'Expected scales of one model, but {self!r} and {other!r} have no layers in common.')
        comparisons = {}
        for branch in self.branches():
            layers = [n for n in self if branch in self[n] and branch in other.get(n, {})]
            means = torch.tensor([[s[n][branch].mean().item() for n in layers] for s in (self, other)])
            where = {layer: i for i, layer in enumerate(layers)}
            stages = {
                stage: [where[layer] for layer in members if layer in where]
                for stage, members in self.stages().items() if not where.keys().isdisjoint(members)
            }
            comparisons[branch] = BranchComparison(
                correlation=torch.corrcoef(means)[0, 1].item() if len(layers) > 1 else float('nan'),
                stage_means={stage: tuple(means[:, i].mean(1).tolist()) for stage, i in stages.items()},
                relative_change=torch.tensor(
                    [_relative_change(self[n][branch], other[n][branch]) for n in layers]).mean().item(),
            )
        return comparisons

    def _mapped(self, fn: Callable[[torch.Tensor], torch.Tensor], metadata: Mapping[str, str]) -> 'Scales':
        return Scales({
            layer: {branch: fn(scale) for branch, scale in branches.items()} for layer, branches in self.items()
        }, metadata)

    def save(self, path: StrPath) -> None:
        """Write a safetensors file; a failure leaves an existing one intact.

        Raises:
            OSError: The file cannot be written.
            ValueError: The path does not end in .safetensors, or the metadata are not strings or use a reserved key.
        """
        check_metadata(self.metadata)
        history = {_HISTORY: json.dumps(self.history)} if self.history else {}
        write(self._layers, {**self.metadata, **history}, path)

    @classmethod
    def load(cls, source: StrPath) -> 'Scales':
        """Read scales from a file or the Hub.

        Args:
            source: A file that :meth:`save` wrote; a file of the authors' released code, that is their searched scales
                or a whole Hyper-Search checkpoint of RepOpt-VGG or RepOpt-GhostNet (``.pth``, read with
                ``weights_only=True``); the name of a model with packaged scales; or a Hub repository with a file named
                scales.safetensors: ``owner/name`` or ``owner/name@revision``.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The file does not hold scales.
        """
        path = locate(source)
        layers, metadata = read(path)
        metadata = dict(metadata)
        try:
            history = parse_json(metadata.pop(_HISTORY, '{}'))
            scales = cls(layers, metadata, history)
        except (ValueError, AttributeError, TypeError) as e:
            raise ValueError(f'{path!r} must hold scales: {e}') from e
        scales.source = os.fspath(source)
        return scales


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise ValueError for metadata that cannot be saved."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f'metadata must be strings by name, got {key!r}: {value!r:.100}.')
        if key in (_HISTORY, ORDER):
            raise ValueError(f'metadata must not have the key {key!r}, which the file uses: choose another name.')


def _constant(layer: str, branch: str, scale: torch.Tensor) -> torch.Tensor:
    where = f'The scale of the branch {branch!r} of {layer!r}'
    if '.' in branch:
        raise ValueError(f"{where}: branch names must not contain '.'.")
    if not isinstance(scale, torch.Tensor) or scale.ndim != 1 or scale.is_complex():
        found = f'a tensor of shape {tuple(scale.shape)}' if isinstance(scale, torch.Tensor) else f'{scale!r:.100}'
        raise ValueError(f'{where} must be a tensor of one real number for each channel, got {found}.')
    if scale.is_meta or scale.layout != torch.strided:
        raise ValueError(f"{where} must be a dense tensor with data, got one on '{scale.device}' of {scale.layout}.")
    constant = scale.detach().to('cpu', torch.float32, copy=True)
    if not constant.isfinite().all():
        raise ValueError(f'{where} must be finite in float32.')
    return constant
