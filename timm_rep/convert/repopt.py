"""Multi-branch timm networks as plain ones: one convolution for each sum of linear branches.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), section 3.
"""
import copy
import dataclasses
from collections import Counter
from functools import partial
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Tuple

import torch
import torch.nn as nn

from timm_rep.layers import Affine, Csla, RepOptConv, RepOptConvDeploy, csla_layers
from timm_rep.layers.fold import to_float64
from timm_rep.scales import ScalesLike, attach_grad_mults, resolve_scales, stage_of

from ._reparameterize import check_unconverted, reparameterize, replace_modules
from .linear_sums import LinearSum, find_linear_sums
from .record import make_foldable, record_conversion


@dataclasses.dataclass(frozen=True)
class ConvertedSum:
    """A converted sum of linear branches.

    Attributes:
        name: Name of the CSLA layer.
        block: Class of timm's block.
        branches: Names of the branches.
    """
    name: str
    block: str
    branches: Tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RepOptReport:
    """Report of :func:`timm_rep.convert_to_repopt`; ``print`` shows it as a table.

    Attributes:
        layers: The converted sums.
        kept: Names of the blocks that were not converted, with the reason.
    """
    layers: List[ConvertedSum]
    kept: Dict[str, str]

    def as_dict(self) -> Dict[str, Any]:
        """The report as JSON-serializable data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        rows = [f'{layer.name:{width}}  {layer.block}: {" + ".join(layer.branches)}' for layer in self.layers]
        return '\n'.join([*rows, *(f'kept {name}: {reason}' for name, reason in self.kept.items())])


def use_repopt_convs(
        model: nn.Module,
        structure: str = 'target',
        reparameterized: bool = False,
        reinit: bool = False,
) -> RepOptReport:
    """Replace the sums of linear branches in a timm model by CSLA layers followed by a BatchNorm, in place.

    The target structure computes the sum as in eval mode: its kernel is the sum of the folded kernels, and the
    BatchNorm adds their bias. A new BatchNorm has the mean and an estimate of the variance of the sum. The other
    structures are newly initialized. GradMults are not attached.

    Args:
        model: timm model with its multi-branch blocks.
        structure: 'target', 'search' or 'csla'.
        reparameterized: Use the deploy structure, with new weights, for checkpoints of a folded model.
        reinit: Initialize the target structure too.

    Returns:
        The report.

    Raises:
        ValueError: The model has no such sum, or one with stochastic depth over its branches, or is wrapped, compiled
            or converted; or the weights are not finite. The model is unchanged.
        OverflowError: The sum of the kernels exceeds the range of the model's dtype. The model is unchanged.
    """
    check_unconverted(model)
    sums, kept = find_linear_sums(model)
    if not sums:
        reasons = ', '.join(f'{name} {reason}' for name, reason in list(kept.items())[:3])
        raise ValueError(
            f'Expected an unfolded model with sums of linear branches, but {type(model).__name__} has none'
            f'{f" ({reasons})" if reasons else ""}.')
    dropping = next((linear_sum for linear_sum in sums if linear_sum.drop_rate), None)
    if dropping is not None:
        raise ValueError(
            f'Expected branches without stochastic depth, but {dropping.name} drops them at a rate of '
            f'{dropping.drop_rate:g}, which a single convolution cannot do: create the model with drop_path_rate=0.')
    layers, cslas = [], []
    depths: Dict[str, int] = Counter()
    for linear_sum in sums:
        stage = stage_of(linear_sum.name)
        depths[stage] += 1
        # the initial scales of Hyper-Search, in layer l of a stage
        cslas.append(linear_sum.csla(initial_scale=(2 / depths[stage]) ** .5))
    synchronized = next((m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)), None)
    has_values = not any(conv.weight.is_meta for linear_sum in sums for conv in linear_sum.convs)
    take_function = structure == 'target' and not reparameterized and not reinit and has_values
    kernels = [_kernel(*pair) for pair in zip(sums, cslas)] if take_function else None
    for i, (linear_sum, csla) in enumerate(zip(sums, cslas)):
        weight = linear_sum.convs[0].weight
        dd = {'device': weight.device, 'dtype': weight.dtype}
        if reparameterized:
            layers.append(RepOptConvDeploy(csla, **dd))
            continue
        layer = RepOptConv(csla, structure, linear_sum.norm, **dd)
        norms = [term.norm for term in linear_sum.terms if term.norm is not None]
        if linear_sum.norm is None and norms:
            layer[1].eps, layer[1].momentum = norms[0].eps, norms[0].momentum
        if linear_sum.norm is None and synchronized is not None:
            layer[1] = nn.SyncBatchNorm.convert_sync_batchnorm(layer[1], synchronized.process_group)
        if kernels:
            _take_function(layer, linear_sum, kernels[i])
        for part, old in zip(layer, (linear_sum.convs, norms if linear_sum.norm is None else [])):
            if old and not any(p.requires_grad for m in old for p in m.parameters()):
                part.requires_grad_(False)
        old_norms = norms if linear_sum.norm is None else [linear_sum.norm]
        is_training = any(norm.training for norm in old_norms)  # before the module's mode is set
        layer.train(linear_sum.module.training)
        if old_norms:
            layer[1].train(is_training)
        layers.append(layer)
    converted = []
    for linear_sum, layer in zip(sums, layers):
        _install(model, linear_sum, layer)
        name = next(name for name, module in model.named_modules() if module is layer)
        branches = tuple(branch.name for branch in linear_sum.branches)
        converted.append(ConvertedSum(
            name if reparameterized else f'{name}.0', type(linear_sum.module).__name__, branches))
    if reparameterized:
        reparameterize(model)  # the layers that timm folds
    return RepOptReport(converted, kept)


def refuse_branches(model: nn.Module, names: Iterable[str]) -> None:
    """Make a converted model refuse checkpoints of the multi-branch network, with advice."""
    before, after = frozenset(names), frozenset(model.state_dict())
    model.register_load_state_dict_pre_hook(partial(_check_branches, before - after, after - before))


def _check_branches(
        branches: FrozenSet[str],
        own: FrozenSet[str],
        model: nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        *args: Any,
) -> None:
    found = next((name for name in state_dict if name.removeprefix(prefix) in branches), None)
    if found is not None and not any(prefix + name in state_dict for name in own):
        raise RuntimeError(
            f'Expected a checkpoint of the converted {type(model).__name__}, but it has the branches of the '
            f'multi-branch network ({found!r}): load it into the timm model, then call convert_to_repopt(model).')


@torch.no_grad()
def _kernel(linear_sum: LinearSum, csla: Csla) -> Affine:
    try:
        kernel = linear_sum.kernel(csla)
    except ValueError as e:  # from a BatchNorm
        raise ValueError(f'{linear_sum.name}: {e}') from e
    if not all(x.isfinite().all() for x in kernel):
        raise ValueError(f'The weights of {linear_sum.name} must be finite: load a different checkpoint.')
    dtype = linear_sum.convs[0].weight.dtype
    if not all(x.to(dtype).isfinite().all() for x in kernel):
        raise OverflowError(
            f'The sum of the kernels of {linear_sum.name} must be in the range of {dtype}, up to '
            f'{torch.finfo(dtype).max:.3g}: convert the model to float32 or bfloat16 first.')
    return kernel


@torch.no_grad()
def _take_function(layer: RepOptConv, linear_sum: LinearSum, affine: Affine) -> None:
    """Set a target structure to the kernel and bias of a sum.

    The running statistics of a new BatchNorm are those of the sum, since in training it divides by them: the first
    steps from a pretrained network would otherwise meet another function, at another scale in each layer.
    """
    conv, norm = layer
    kernel, bias = affine
    conv.weight.copy_(kernel.reshape(conv.weight.shape))
    if linear_sum.norm is None:
        mean, variance = linear_sum.output_statistics()
        norm.running_var.copy_(variance.clamp(max=torch.finfo(norm.running_var.dtype).max))
        norm.running_mean.copy_(mean - bias)
        norm.weight.copy_((to_float64(norm.running_var) + norm.eps).sqrt())  # of what was rounded
        norm.bias.copy_(to_float64(norm.running_mean) + bias)
    else:
        norm.running_mean = (to_float64(norm.running_mean) - bias).to(norm.running_mean)


def _install(model: nn.Module, linear_sum: LinearSum, layer: nn.Module) -> None:
    module = linear_sum.module
    if not linear_sum.slot:
        replace_modules(model, {module: layer})
        return
    setattr(module, linear_sum.slot, nn.Sequential(layer, linear_sum.act) if linear_sum.act is not None else layer)
    for name, value in linear_sum.replaced.items():
        if hasattr(module, name):
            setattr(module, name, value)


def set_scales(model: nn.Module, scales: Optional[ScalesLike], reinit: bool) -> None:
    """Attach GradMults to the target operators of a model, or set the scales of its search or CSLA layers.

    Args:
        model: Model with CSLA layers.
        scales: As for :func:`timm_rep.attach_grad_mults`; False for none.
        reinit: Whether to initialize the kernels of target operators by the rule of initialization.
    """
    resolved = resolve_scales(model, scales)
    layers = csla_layers(model)
    others = {name: layer for name, layer in layers.items() if layer.structure != 'target'}
    if others and resolved is None:
        raise ValueError(
            f"scales must be Scales, 'ones' or 'init' with structure={next(iter(others.values())).structure!r}, got "
            "False: use structure='target' for a plain network.")
    if resolved is not None:
        for name, layer in others.items():
            layer.set_scales(resolved[name])
    targets = {name: layer for name, layer in layers.items() if name not in others}
    if targets:
        attach_grad_mults(model, resolved)
    if reinit and resolved is not None:
        for name, layer in targets.items():
            layer.reset_kernel(resolved[name])


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, without copying its weights."""
    memo = {id(p): nn.Parameter(p.to('meta'), p.requires_grad) for p in model.parameters()}
    memo.update({id(b): b.to('meta') for b in model.buffers()})
    return copy.deepcopy(model, memo)


@torch.inference_mode(False)  # inference tensors cannot be trained
def convert_to_repopt(model: nn.Module, scales: ScalesLike = 'init') -> RepOptReport:
    """Convert a multi-branch timm model to a single-branch one, in place; the structural prior moves to the optimizer.

    Each sum of linear branches (MobileOne, RepVGG, FastViT, RepViT, RepGhostNet, GhostNetV3, LCNetV2, iFormer) becomes
    one convolution with a GradMult, followed by one BatchNorm; everything else stays timm's, and the function in eval
    mode is unchanged. In train mode it is close to that of the branches, since the running statistics of the new
    BatchNorms come from theirs; not where these tell nothing of a shortcut, in the position encodings of iFormer and
    FastViT. Train it with ``RepSGD`` or ``RepAdamW`` (``--opt repsgd``), created after the conversion;
    ``model.reparameterize()`` then folds it into timm's own folded model. timm's save_for_hf() and
    ``timm_rep.export(model, 'folder')`` write the result as a ``repopt_any``, folded or not, if the model was created
    with ``timm.create_model`` of timm 1.0.31 or newer.

    Args:
        model: timm model with its multi-branch blocks, not wrapped.
        scales: Constants of the branches, as for :func:`timm_rep.attach_grad_mults`; the default 'init' are the initial
            values of Hyper-Search. False for a plain network without GradMults, for plain optimizers.

    Returns:
        The report.

    Raises:
        TypeError: model is not a module.
        FileNotFoundError: The file of scales does not exist.
        ValueError: The model has no such sum, or one with stochastic depth over its branches, or is wrapped, compiled
            or converted; or the weights are not finite, or the scales do not fit. The model is unchanged.
        OverflowError: The sum of the kernels exceeds the range of the model's dtype. The model is unchanged.
    """
    check_unconverted(model)
    converted = _meta_copy(model)
    use_repopt_convs(converted)
    resolve_scales(converted, scales)  # before anything is changed
    names = list(model.state_dict())
    report = use_repopt_convs(model)
    set_scales(model, scales, reinit=False)
    record_conversion(model, 'repopt_any')
    refuse_branches(model, names)  # registered first, because a RepGhostNet checkpoint also contains plain names
    make_foldable(model)
    return report
