"""The constants of a RepOptimizer: what Hyper-Search finds and a model's GradMults are made of.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.3.
"""
import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Union

import torch
import torch.nn as nn
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from timm_rep.atomic import replacing_files
from timm_rep.layers import CslaBlock, CslaConv2d

__all__ = ['Scales', 'ScalesLike', 'attach_grad_mults', 'csla_layers', 'resolve_scales']

_HUB_FILE = 'scales.safetensors'
_HUB_ID = re.compile(r'(?:hf-hub:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?')
# what torch's wrappers put between the names of modules
_WRAPPERS = {'module', '_orig_mod', '_checkpoint_wrapped_module', '_fsdp_wrapped_module'}


class Scales(Mapping[str, Mapping[str, torch.Tensor]]):
    """For each CSLA layer of a model, by its name, a vector (channels,) for each branch, by its name.

    The layers of RepOpt-VGG are ``stem.conv``, ``stages.0.0.conv`` and so on, their branches ``conv3x3``, ``conv1x1``
    and, where Hyper-Search trained it, ``identity``, which no GradMult uses.

    Attributes:
        metadata: What is known about their origin, strings by name.
    """

    def __init__(
            self,
            layers: Mapping[str, Mapping[str, torch.Tensor]],
            metadata: Optional[Mapping[str, str]] = None,
    ):
        """
        Args:
            layers: Vectors by branch, by layer.
            metadata: Strings by name.

        Raises:
            ValueError: A scale is no finite vector.
        """
        self._layers: Dict[str, Dict[str, torch.Tensor]] = {}
        for layer, branches in layers.items():
            if not isinstance(branches, Mapping):
                raise ValueError(f'Scales hold, for each layer, vectors by branch; {layer!r} has {branches!r:.100}.')
            self._layers[layer] = {branch: _constant(layer, branch, scale) for branch, scale in branches.items()}
        self.metadata = dict(metadata or {})

    def __getitem__(self, layer: str) -> Mapping[str, torch.Tensor]:
        return MappingProxyType(self._layers[layer])

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __eq__(self, other) -> bool:
        """Whether the layers, their branches and all numbers are the same; their origin does not matter."""
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
        """The scales that a model in the search or CSLA structure has now.

        Raises:
            ValueError: The model has no such structure.
        """
        layers = {name: layer for name, layer in csla_layers(model).items() if isinstance(layer, CslaBlock)}
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no scales to read: create it with structure='search' or 'csla'.")
        return cls({
            name: {**layer.scales, **{k: w for k, w in layer.weights.items() if k not in layer.scales}}
            for name, layer in layers.items()
        })

    @classmethod
    def initial(cls, model: nn.Module) -> 'Scales':
        """What the search structure of this model starts from, ``sqrt(2 / l)`` in RepOpt-VGG (appendix B)."""
        return cls({name: layer.csla.initial_scales(device='cpu') for name, layer in csla_layers(model).items()})

    @classmethod
    def ones(cls, model: nn.Module) -> 'Scales':
        """All ones, the row `All 1` of table 4."""
        return cls.initial(model)._mapped(torch.ones_like)

    def mean_over_channels(self) -> 'Scales':
        """Each scale replaced by its mean over the channels, the row `Average across channels` of table 4."""
        return self._mapped(lambda scale: scale.mean().expand_as(scale))

    def _mapped(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> 'Scales':
        return Scales({
            layer: {branch: fn(scale) for branch, scale in branches.items()} for layer, branches in self.items()
        }, self.metadata)

    def save(self, path: Union[str, os.PathLike]) -> None:
        """Write a safetensors file; a failure leaves the old one intact.

        Raises:
            OSError: The file cannot be written.
        """
        path = Path(path)
        tensors = {f'{layer}.{branch}': scale for layer, branches in self.items() for branch, scale in branches.items()}
        with replacing_files(path.parent) as temporary:
            save_file(tensors, temporary / path.name, metadata=self.metadata)

    @classmethod
    def load(cls, source: Union[str, os.PathLike]) -> 'Scales':
        """Read scales.

        Args:
            source: A file that save() wrote, or a Hub repository with one named scales.safetensors: ``owner/name``, a
                revision after ``@``.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds no scales.
        """
        path = os.fspath(source)
        hub_id = _HUB_ID.fullmatch(path)
        if not os.path.isfile(path):
            if not hub_id or os.path.exists(path) or path.endswith(('.safetensors', '.pth', '.pt')):
                raise FileNotFoundError(
                    f'No scales at {path!r}: expected a .safetensors file, a Hub repository (owner/name), '
                    "'ones', 'init' or 'none'.")
            try:
                path = hf_hub_download(hub_id['repo'], _HUB_FILE, revision=hub_id['revision'])
            except (OSError, ValueError) as e:
                raise FileNotFoundError(
                    f'No scales at {path!r}: there is no such file here, and the Hub has no {_HUB_FILE} in a '
                    f'repository of that name, or cannot be reached: {e}') from e
        layers: Dict[str, Dict[str, torch.Tensor]] = {}
        try:
            with safe_open(path, 'pt') as file:
                metadata = file.metadata()
                for key in file.keys():
                    layer, _, branch = key.rpartition('.')
                    layers.setdefault(layer, {})[branch] = file.get_tensor(key)
        except SafetensorError as e:
            raise ValueError(f'{path!r} is no safetensors file of scales: {e}') from e
        try:
            return cls(layers, metadata)
        except ValueError as e:
            raise ValueError(f'{path!r} holds no scales. {e}') from e


def _constant(layer: str, branch: str, scale: torch.Tensor) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor) or scale.ndim != 1 or scale.is_complex():
        shape = f'a tensor of shape {tuple(scale.shape)}' if isinstance(scale, torch.Tensor) else f'{scale!r:.100}'
        raise ValueError(
            f'The scale of the branch {branch!r} of {layer!r} is a tensor of one real number for each channel, got '
            f'{shape}.')
    constant = scale.detach().to('cpu', torch.float32, copy=True)
    if not constant.isfinite().all():
        raise ValueError(f'The scale of the branch {branch!r} of {layer!r} is not finite in float32.')
    return constant


ScalesLike = Union[Scales, Mapping[str, Mapping[str, torch.Tensor]], str, os.PathLike]


def csla_layers(model: nn.Module) -> Dict[str, nn.Module]:
    """The layers of a model that a CSLA declaration stands behind, by their names without those of torch's wrappers."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (CslaBlock, CslaConv2d))}
    names = ['.'.join(part for part in name.split('.') if part not in _WRAPPERS) for name in layers]
    # a model may have a part of such a name itself
    return dict(zip(names, layers.values())) if len(set(names)) == len(names) else layers


def resolve_scales(model: nn.Module, scales: Optional[ScalesLike]) -> Optional[Scales]:
    """Scales for a model, checked to fit it.

    Args:
        model: A model with CSLA layers.
        scales: Scales, a mapping like theirs, what :meth:`Scales.load` takes, ``'ones'`` or ``'init'``; None, or
            ``'none'``, since timm's create_model drops arguments that are None, for no scales.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The model has no CSLA layers, or the scales do not fit it; every misfit is named.
    """
    if scales is None or scales in ('none', 'None'):
        return None
    layers = csla_layers(model)
    if not layers:
        raise ValueError(
            f'{type(model).__name__} has no CSLA layers: scales are for RepOpt models in their training structure, and '
            'for models built with timm_rep.layers.Csla.')
    if isinstance(scales, Mapping):
        scales = scales if isinstance(scales, Scales) else Scales(scales)
    elif scales in ('ones', 'init'):
        scales = Scales.ones(model) if scales == 'ones' else Scales.initial(model)
    elif isinstance(scales, (str, os.PathLike)):
        scales = Scales.load(scales)
    else:
        raise ValueError(
            f"scales are Scales, a mapping like theirs, a path, a Hub repository, 'ones', 'init' or 'none', got "
            f'{scales!r}.')
    problems: List[str] = [f'{name}: not a layer of the model' for name in scales if name not in layers]
    for name, layer in layers.items():
        try:
            layer.csla.check_scales(scales.get(name, {}))
        except ValueError as e:
            problems.append(f'{name}: {e}')
    if problems:
        raise ValueError(f'{scales!r} do not fit {type(model).__name__}.\n  ' + '\n  '.join(problems))
    return scales


def attach_grad_mults(model: nn.Module, scales: Optional[ScalesLike]) -> nn.Module:
    """Attach a GradMult to the kernel of every target operator of a model, where RepSGD and RepAdamW find it.

    ``create_model`` does it for the models of this package. Again it is needed for other scales, and after a wrapper
    that replaces the parameters (FSDP): a shard on dim 0 gets the multiplier of its rows. An optimizer that has the
    parameters already takes the new multipliers from its next step on.

    Args:
        model: A model with target operators (:meth:`Csla.target`), wrapped or not.
        scales: Scales, a mapping like theirs, a path, a Hub repository, ``'ones'`` or ``'init'``. None or ``'none'``
            takes the GradMults off.

    Returns:
        The model.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The model has no target operator, the scales do not fit it, a weight is no parameter (a
            parametrization computes it), or one is sharded on another dim; nothing has changed but in the last case.
    """
    targets = {name: layer for name, layer in csla_layers(model).items() if isinstance(layer, CslaConv2d)}
    if not targets:
        raise ValueError(
            f"{type(model).__name__} has no target operator to attach a GradMult to: create a RepOpt model with "
            "structure='target' (the default), and do not reparameterize it before training; in a model of your own "
            'use the convolution that Csla.target() makes.')
    scales = resolve_scales(model, scales)
    for name, layer in targets.items():
        try:
            layer.check_weight()
        except ValueError as e:
            raise ValueError(f'{name}: {e}') from None
    for name, layer in targets.items():
        layer.set_scales(None if scales is None else scales[name])
    return model
