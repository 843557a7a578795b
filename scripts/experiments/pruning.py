"""Other ways to shrink the FFNs of a pretrained model without training, written from their papers, for comparison.

Each function removes hidden channels of every FFN of a plain ``VisionTransformer``, in place.
"""
import warnings
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_pruning as tp
from timm.layers import Mlp
from timm.models import VisionTransformer

__all__ = ['METHODS']


class _Moments(NamedTuple):
    """Moments of the hidden features of an FFN, in float64.

    Attributes:
        count: Number of tokens.
        mean: Mean, (hidden,).
        covariance: Covariance, (hidden, hidden).
        active: Share of tokens at which a feature exceeds 1% of the layer's root mean square, (hidden,).
    """
    count: int
    mean: torch.Tensor
    covariance: torch.Tensor
    active: torch.Tensor


def _ffns(model: nn.Module) -> List[Mlp]:
    return [module for module in model.modules() if type(module) is Mlp]


def _sums(g: torch.Tensor) -> Tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    is_active = g.abs() > 0.01 * g.square().mean().sqrt()
    return len(g), g.double().sum(0), (g.T @ g).double(), is_active.double().sum(0)


@torch.no_grad()
def _by_block(
        model: VisionTransformer,
        batches: Sequence[torch.Tensor],
        prune: Optional[Callable[[Mlp, _Moments], None]] = None,
) -> Dict[Mlp, _Moments]:
    """Moments of the hidden features of all FFNs; ``prune`` changes an FFN before the images pass it."""
    streams = [model.norm_pre(model._pos_embed(model.patch_embed(images))) for images in batches]
    moments = {}
    for block in model.blocks:
        seen: List = []
        hook = block.mlp.fc2.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, -2)))
        outputs = [block(x) for x in streams]
        hook.remove()
        count, total, square, active = (sum(parts) for parts in zip(*map(_sums, seen)))
        mean = total / count
        moments[block.mlp] = _Moments(count, mean, square / count - mean[:, None] * mean, active / count)
        if prune is not None:
            prune(block.mlp, moments[block.mlp])
            outputs = [block(x) for x in streams]
        streams = outputs
    return moments


def _count(ffn: Mlp, keep: float) -> int:
    return max(1, round(keep * ffn.fc1.out_features))


@torch.no_grad()
def _shrink(
        ffn: Mlp,
        kept: torch.Tensor,
        weight: Optional[torch.Tensor] = None,
        bias: Optional[torch.Tensor] = None,
) -> None:
    """Keep hidden channels; the second layer keeps its weights and bias where there are no new ones."""
    weight = ffn.fc2.weight[:, kept] if weight is None else weight
    bias = ffn.fc2.bias if bias is None else bias
    for name, new_weight, new_bias in (
            ('fc1', ffn.fc1.weight[kept], ffn.fc1.bias[kept]), ('fc2', weight, bias)):
        layer = nn.Linear(*reversed(new_weight.shape)).to(ffn.fc1.weight)
        layer.weight.copy_(new_weight)
        layer.bias.copy_(new_bias)
        setattr(ffn, name, layer)


@torch.no_grad()
def _refit(ffn: Mlp, moments: _Moments, kept: torch.Tensor, damping: torch.Tensor) -> None:
    """Replace the removed channels by the affine function of the kept ones that ridge regression gives."""
    weight = ffn.fc2.weight.double()
    is_removed = torch.ones(len(moments.mean), dtype=torch.bool)
    is_removed[kept] = False
    inside = moments.covariance[kept][:, kept] + torch.diag(damping)
    predicted = torch.linalg.solve(inside, moments.covariance[kept][:, is_removed]).T
    shift = moments.mean[is_removed] - predicted @ moments.mean[kept]
    _shrink(
        ffn, kept, weight[:, kept] + weight[:, is_removed] @ predicted,
        ffn.fc2.bias.double() + weight[:, is_removed] @ shift)


def first_channels(model: nn.Module, batches: Sequence[torch.Tensor], keep: float) -> None:
    """The first channels; nothing is compensated."""
    for ffn in _ffns(model):
        _shrink(ffn, torch.arange(_count(ffn, keep)))


@torch.no_grad()
def vbp(model: nn.Module, batches: Sequence[torch.Tensor], keep: float) -> None:
    """Variance-Based Pruning: the channels of the largest variance in the whole network, the others at their mean."""
    ffns = _ffns(model)
    moments = _by_block(model, batches)
    variances = torch.cat([moments[ffn].covariance.diagonal() for ffn in ffns])
    threshold = variances.topk(sum(_count(ffn, keep) for ffn in ffns)).values[-1]
    for ffn in ffns:
        variance = moments[ffn].covariance.diagonal()
        is_kept = variance >= threshold
        is_kept[variance.argmax()] = True
        shift = ffn.fc2.weight.double()[:, ~is_kept] @ moments[ffn].mean[~is_kept]
        _shrink(ffn, is_kept.nonzero().squeeze(1), bias=ffn.fc2.bias + shift)


def corp(model: nn.Module, batches: Sequence[torch.Tensor], keep: float) -> None:
    """CORP's FFN part, FFN after FFN: channels of the largest energy times active rate, then ridge regression.

    The damping is the oracle approximating shrinkage of the covariance (Chen et al., 2010), at least 1e-3.
    """
    def prune(ffn: Mlp, found: _Moments) -> None:
        energy = found.covariance.diagonal() + found.mean.square()
        kept = (energy * found.active).topk(_count(ffn, keep)).indices.sort().values
        covariance, p = found.covariance[kept][:, kept], len(kept)
        trace, square = covariance.trace(), covariance.square().sum()
        shrinkage = ((1 - 2 / p) * square + trace ** 2) / ((found.count + 1 - 2 / p) * (square - trace ** 2 / p))
        damping = (shrinkage.clamp(max=1) * trace / p).clamp(min=1e-3)
        _refit(ffn, found, kept, damping.expand(p))

    _by_block(model, batches, prune)


def refitted_pruning(
        model: nn.Module,
        batches: Sequence[torch.Tensor],
        keep: float,
        damping: float = 1e-3,
) -> None:
    """Channels by their diagonal second-order cost, variance times squared weights, then ridge regression (OB2C).

    ``damping`` is relative to the variance of each channel.
    """
    def prune(ffn: Mlp, found: _Moments) -> None:
        cost = found.covariance.diagonal() * ffn.fc2.weight.double().square().sum(0)
        kept = cost.topk(_count(ffn, keep)).indices.sort().values
        _refit(ffn, found, kept, damping * found.covariance.diagonal()[kept].clamp(min=1e-12))

    _by_block(model, batches, prune)


def torch_pruning(model: nn.Module, batches: Sequence[torch.Tensor], keep: float) -> None:
    """Torch-Pruning's global pruning by first-order Taylor importance; nothing is compensated.

    The loss is the cross-entropy to the predicted class, without classes half the squared norm of the features.
    """
    first = [ffn.fc1 for ffn in _ffns(model)]
    others = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and m not in first]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # parameters outside of layers, which stay as they are
        pruner = tp.pruner.BasePruner(
            model, batches[0][:1], importance=tp.importance.GroupTaylorImportance(), pruning_ratio=1 - keep,
            global_pruning=True, ignored_layers=others, root_module_types=[nn.Linear])
    for images in batches:
        output = model(images)
        if model.num_classes:
            loss = F.cross_entropy(output, output.argmax(1), reduction='sum')
        else:
            loss = output.square().sum() / 2
        loss.backward()
    pruner.step()
    model.zero_grad()


METHODS: Dict[str, Callable[[nn.Module, Sequence[torch.Tensor], float], None]] = {
    'refitted pruning': refitted_pruning, 'refitted pruning, 0.01': partial(refitted_pruning, damping=1e-2),
    'CORP': corp, 'VBP': vbp, 'Torch-Pruning': torch_pruning, 'first channels': first_channels}
