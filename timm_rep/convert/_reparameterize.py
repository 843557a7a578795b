"""Fold a model into its deploy structure, and refuse checkpoints of a different structure."""
import contextlib
import copy
import inspect
from functools import partial
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Set, Tuple

import torch
import torch.nn as nn
import torchvision
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d, SyncBatchNormAct
from timm.models.fastvit import ReparamLargeKernelConv, RepConditionalPosEnc, RepMixer
from timm.utils import unwrap_model
from torch.nn.utils.parametrize import is_parametrized

from timm_rep.layers import (
    foldable_layers,
    has_other_hooks,
    is_reparameterized,
    remove_annealing_hooks,
    structures_in,
)
from timm_rep.layers.fold import batch_norm_scale_shift
from timm_rep.utils.modes import default_dtype, keeping_modes

try:
    from timm.models import reparameterize_model
except ImportError:  # timm < 1.0.31
    from timm.utils import reparameterize_model

# methods of a module that timm's reparameterize_model() calls
_FOLDING = ('fuse', 'reparameterize', 'switch_to_deploy')
# packages whose convolutions and linear layers compute what their weights say
_PACKAGES = ('timm', 'timm_rep', 'torch', 'torchvision')
# blocks of FastViT that cannot be folded twice
_FASTVIT = (ReparamLargeKernelConv, RepConditionalPosEnc, RepMixer)
# norms that compute what these classes do in eval mode; some blocks of timm fold only these
_FOLDED_AS = {
    nn.SyncBatchNorm: nn.BatchNorm2d,
    SyncBatchNormAct: BatchNormAct2d,
    FrozenBatchNormAct2d: BatchNormAct2d,
    torchvision.ops.FrozenBatchNorm2d: nn.BatchNorm2d,
}
# dtypes in which folded weights do not overflow
_WIDE = (torch.float32, torch.float64)


def check_module(model: nn.Module) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f'Expected a timm model, but got {model!r}: create it with timm.create_model().')


def check_unconverted(model: nn.Module) -> None:
    """Raise TypeError for anything but a module, ValueError for a wrapped, converted or compiled model."""
    check_module(model)
    kind = type(model).__name__
    if any(True for _ in foldable_layers(model)):
        raise ValueError(f'Expected an unconverted timm model, but {kind} has foldable layers already.')
    if unwrap_model(model) is not model or isinstance(model, nn.ModuleDict):  # the latter from features_only
        raise ValueError(f'Expected a timm model, but {kind} wraps another model: convert it before wrapping it.')
    for name, module in model.named_modules():
        if hasattr(module, '_orig_mod') or module._compiled_call_impl is not None:
            raise ValueError(f'Expected a model before compilation, but {name or kind} is compiled: convert it first.')


@torch.inference_mode(False)  # inference tensors cannot be trained
@torch.no_grad()
def reparameterize(model: nn.Module) -> nn.Module:
    """Fold a model into its deploy structure, in place: the layers of this package, then the layers that timm folds.

    Either all layers are folded or none. ``timm.models.reparameterize_model``, by contrast, replaces layers one at a
    time and silently drops their hooks.

    Args:
        model: Model of this package or of timm.

    Returns:
        The model.

    Raises:
        TypeError: model is not a module.
        ValueError: A BatchNorm has no running statistics, annealing is not finished, or a layer that folding removes
            has hooks or was replaced by an adapter; the message names the layer. Or timm cannot fold frozen BatchNorms
            in this place, or the model is one layer. The model is unchanged.
        OverflowError: A folded weight exceeds the range of the model's dtype. The model is unchanged.
    """
    check_module(model)
    if _fuses(model):
        kind = type(model).__name__
        raise ValueError(f'Expected a model, but {kind} is one layer, which is not folded in place: use its fuse().')
    before = {*model.modules()}
    with keeping_modes(model), as_batch_norms(model), _all_or_none(model):
        folded = _fold(model.eval())
    for parent in folded.modules():  # parents before their children
        for layer in parent.children():
            if layer not in before:
                layer.training = parent.training
    remove_annealing_hooks(folded)
    return folded


@contextlib.contextmanager
def as_batch_norms(model: nn.Module) -> Iterator[None]:
    """Give the norms of ``_FOLDED_AS`` the class that timm tests for."""
    others = {module: type(module) for module in model.modules() if type(module) in _FOLDED_AS}
    try:
        for module, kind in others.items():
            module.__class__ = _FOLDED_AS[kind]
        yield
    finally:
        for module, kind in others.items():
            module.__class__ = kind


@contextlib.contextmanager
def _all_or_none(model: nn.Module) -> Iterator[None]:
    """Undo all changes of a model's structure, hooks and weights if an error is raised."""
    # the same dicts with what was in them, since handles of hooks refer to them
    contents = [
        (attributes, copy.copy(attributes)) for module in model.modules()
        for attributes in (
            module._modules, module._parameters, module._buffers, module._non_persistent_buffers_set,
            module._forward_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, module.__dict__)]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    # the blocks of NextViT are folded within their parameters
    weights = [
        (parameter, parameter.detach().clone()) for module in model.modules() if hasattr(module, 'is_fused')
        for parameter in module.parameters()]
    try:
        yield
    except BaseException:
        for parameter, weight in weights:
            if not weight.is_meta and not torch.equal(parameter, weight):
                parameter.copy_(weight)
        for now, before in contents:
            now.clear()
            now.update(before)
        for parameter, requires_grad in trainable:
            _set_requires_grad(parameter, requires_grad)
        raise


def folds_itself(module: nn.Module) -> bool:
    """Whether timm's ``reparameterize_model`` calls a method of the module to fold it."""
    return any(hasattr(module, method) for method in _FOLDING)


def _fuses(module: nn.Module) -> bool:
    """Whether a module is a foldable layer that is not folded."""
    return hasattr(module, 'structure_keys') and hasattr(module, 'fuse')


def _fold(model: nn.Module) -> nn.Module:
    """:func:`reparameterize` of a model in eval mode, which may be half folded after an error."""
    _keep_folded(model)
    _check_methods(model)
    _check_blocks(model)
    fused: Dict[nn.Module, nn.Module] = {}
    for path, layer in model.named_modules():
        if _fuses(layer):
            try:
                fused[layer] = layer.fuse()
            except (ValueError, OverflowError) as e:
                raise type(e)(f'{path} cannot be folded: {e}') from e
    hooked, kinds = _hooked(model), _kinds(model)
    replace_modules(model, fused)
    # timm writes the kernels that it folds into new layers of the default dtype
    wide = torch.float64 if any(kind.dtype == torch.float64 for kind in kinds.values()) else torch.float32
    try:
        is_meta = any(p.is_meta for p in model.parameters())
        with default_dtype(wide), torch.device('meta') if is_meta else contextlib.nullcontext():
            folded = reparameterize_model(model, inplace=True)
    except (AssertionError, AttributeError) as e:
        raise ValueError(f'timm cannot fold this {type(model).__name__}: {type(e).__name__}: {e}') from e
    lost = sorted(hooked - _hooked(folded))
    if lost:
        raise ValueError(
            f'{lost[0]} must have no hooks, and the forward() of its class, since folding would drop its own: remove '
            'hooks by handle.remove(), and merge adapters into the weights.')
    _restore_kinds(folded, kinds)
    _keep_folded(folded)
    return folded


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> Set[nn.Module]:
    """Replace modules wherever they occur, since several parents may share one; the result is their parents."""
    parents = set()
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
                parents.add(parent)
    return parents


class _Kind(NamedTuple):
    """Properties of a parameter, or of the parameters of a module: the dtype of the first, whether any is trainable."""
    dtype: torch.dtype
    requires_grad: bool


def _kinds(model: nn.Module) -> Dict[str, _Kind]:
    """Kinds of the parameters and modules of a model by name."""
    kinds: Dict[str, _Kind] = {}
    # matrices and kernels first: norms may be in float32 beside them
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False), key=lambda item: item[1].ndim < 2):
        kinds[name] = _Kind(parameter.dtype, parameter.requires_grad)
        while name:
            name = name.rpartition('.')[0]
            known = kinds.get(name, _Kind(parameter.dtype, False))
            kinds[name] = known._replace(requires_grad=known.requires_grad or parameter.requires_grad)
    return kinds


def _restore_kinds(folded: nn.Module, kinds: Mapping[str, _Kind]) -> None:
    """Give the parameters that timm creates, trainable and in float32, the kind of what they replace."""
    for name, parameter in folded.named_parameters():
        where = name
        while where not in kinds:
            where = where.rpartition('.')[0]
        dtype, requires_grad = kinds[where]
        if parameter.dtype != dtype:
            parameter.data = parameter.detach().to(dtype)
        if dtype not in _WIDE and not parameter.isfinite().all():
            raise OverflowError(f'{name} of the folded model must be in the range of {dtype}.')
        _set_requires_grad(parameter, requires_grad)


def _set_requires_grad(parameter: nn.Parameter, requires_grad: bool) -> None:
    if parameter.requires_grad != requires_grad:  # an inference tensor refuses the value that it has
        parameter.requires_grad_(requires_grad)


def _check_methods(model: nn.Module) -> None:
    """Raise ValueError if what timm would call to fold a module is a layer, or requires arguments."""
    for name, module in model.named_modules():
        method = next((method for method in _FOLDING if hasattr(module, method)), '')
        if name and method:
            try:
                if isinstance(getattr(module, method), nn.Module):
                    raise TypeError('it is a layer')
                inspect.signature(getattr(module, method)).bind()
            except TypeError as e:
                raise ValueError(
                    f"{name}.{method} must be a method that folds the module, since timm's reparameterize_model() "
                    f'calls it, without arguments ({e}): rename it, or fold the modules around it.') from e


def _check_blocks(model: nn.Module) -> None:
    """Raise ValueError if a block that timm folds has a BatchNorm without statistics or weights, or an adapter."""
    for name, block in model.named_modules():
        if name and folds_itself(block) and not hasattr(block, 'structure_keys'):
            for path, layer in block.named_modules(prefix=name):
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    if layer.weight is None:
                        raise ValueError(f'{path} cannot be folded: timm requires a BatchNorm with affine=True.')
                    try:
                        batch_norm_scale_shift(layer)
                    except ValueError as e:
                        raise ValueError(f'{path} cannot be folded: {e}') from e
                elif _is_adapter(layer):
                    raise ValueError(
                        f'{path} cannot be folded: timm would fold its weight only, and a {type(layer).__name__} '
                        'computes more than that. Merge adapters into the weights.')


def _is_adapter(layer: nn.Module) -> bool:
    """Whether a layer shows the weight of another one, or is a convolution or linear layer with another forward()."""
    weight = getattr(layer, 'weight', None)
    own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    is_own = is_parametrized(layer, 'weight') or any(weight is tensor for tensor in own)
    package = type(layer).forward.__module__.partition('.')[0]
    is_known = not isinstance(layer, (nn.Conv2d, nn.Linear)) or package in _PACKAGES
    return isinstance(weight, torch.Tensor) and not (is_own and is_known)


def _keep_folded(model: nn.Module) -> None:
    """Let modules of FastViT that are folded stay as they are: timm would fold them again, and fail.

    It visits them after the converted model that has them, in a model around it.
    """
    for module in model.modules():
        if isinstance(module, _FASTVIT) and module.reparam_conv is not None:
            module.reparameterize = _stay_folded


def _stay_folded() -> None:
    """``reparameterize()`` of a module of FastViT that is folded."""


def add_reparameterize(model: nn.Module) -> None:
    """Add the method ``reparameterize()`` to a model, unless its class has it."""
    if not hasattr(model, 'reparameterize'):
        model.reparameterize = partial(reparameterize, model)  # a partial is copied and pickled with the model


def _hooked(model: nn.Module) -> Set[str]:
    """Names of parts of a model with forward hooks, but for those of annealing, or a replaced ``forward()``."""
    return {
        name for name, module in model.named_modules()
        if name and (has_other_hooks(module) or 'forward' in module.__dict__)}


@torch.inference_mode(False)
@torch.no_grad()
def folded_copy(model: nn.Module) -> nn.Module:
    """Fold a copy of a model; the model itself is unchanged.

    Args:
        model: Model of this package or of timm, or a converted one.

    Returns:
        The folded copy, in the mode of the model.

    Raises:
        ValueError: A layer cannot be folded, see :func:`timm_rep.convert.reparameterize`, or a folded weight exceeds
            the range of the model's dtype; the message names the layer.

    Examples:
        >>> model = timm.create_model('repa_deit_tiny').eval()
        >>> folded = folded_copy(model)
        >>> model.reparameterized, folded.reparameterized
        (False, True)
    """
    folded = copy.deepcopy(model)
    try:
        if hasattr(folded, 'reparameterize'):
            folded.reparameterize()
        else:
            reparameterize(folded)
    except OverflowError as e:  # one exception type for a model that cannot be folded
        raise ValueError(str(e)) from e
    return folded


def check_loaded_structure(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
    """Refuse a state dict of a different structure; a load_state_dict pre-hook, so nothing has been loaded yet."""
    for name, layer in foldable_layers(model, prefix.rstrip('.')):
        found = structures_in(layer, state_dict, f'{name}.')
        if found and layer.structure not in found:
            key = next(k for k in state_dict if k.startswith(f'{name}.'))
            raise RuntimeError(
                f'Expected a checkpoint of {type(model).__name__} with the {layer.structure} structure, but it has the '
                f'{" or ".join(found)} structure ({key!r}). '
                + _advice(found, layer.structure, model))


def _advice(found: Tuple[str, ...], own: str, model: nn.Module) -> str:
    if own == 'deploy':
        created = f'structure={found[0]!r}' if found != ('training',) else 'its training structure'
        return f'Load it into a model created with {created}, then call its reparameterize().'
    if found == ('deploy',):
        how = 'convert a model with the same arguments, call its reparameterize(), then load it.'
        if hasattr(type(model), 'reparameterized'):
            how = 'create the model with reparameterized=True to load it.'
        elif 'base' in getattr(model, '_model_args', {}):  # converted, with any number of steps left to anneal
            name = 'repopt_any' if own in ('target', 'search', 'csla') else 'repa_any'
            base = model._model_args['base']
            how = f'create it as {name!r} with base={base!r}, the same arguments and reparameterized=True to load it.'
        return f'A folded checkpoint cannot be unfolded: {how}'
    if own == 'target':
        return (
            f'Load it into a model created with structure={found[0]!r}; a target model takes only its scales, '
            'timm_rep.Scales.from_model(model).')
    return f'Load it into a model created with structure={found[0]!r}.'


class ReparameterizeMixin:
    """Adds ``reparameterize()`` to a timm model with foldable layers; refuses checkpoints of a different structure."""

    __jit_unused_properties__ = ('reparameterized', '_model_args')

    @property
    def reparameterized(self) -> bool:
        """Whether the model has the deploy structure."""
        return is_reparameterized(self)

    @torch.jit.ignore
    def reparameterize(self) -> nn.Module:
        """Fold the model into its deploy structure, in place; the function in eval mode is unchanged.

        Running statistics are folded in either mode, in float64 (RePaFormer, eq. 4-7). A folded model is left as it is.
        ``timm.utils.reparameterize_model(model)`` does the same to a copy.

        Returns:
            The model.

        Raises:
            ValueError: A BatchNorm has no running statistics, or a layer has hooks or was replaced by an adapter; the
                message names the layer. The model is unchanged.
            OverflowError: A folded weight exceeds the range of the model's dtype. The model is unchanged.
        """
        return reparameterize(self)

    # timm's save_for_hf() and push_to_hf_hub() write these arguments into config.json for create_model(). They are a
    # property, since timm's reparameterize_model() folds the layers without calling the model.
    @property
    def _model_args(self) -> Dict[str, Any]:
        args = dict(self.__dict__.get('_creation_args', {}))
        if self.reparameterized:
            args['reparameterized'] = True
        return args

    @_model_args.setter
    def _model_args(self, args: Mapping[str, Any]) -> None:
        # the teacher of the initialization does not describe the model
        self._creation_args = {name: value for name, value in args.items() if name != 'weight_select'}

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        check_loaded_structure(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]
