"""Range equalization between consecutive layers, before int8 (Nagel et al. 2019, section 4.1)."""
from collections import Counter
from typing import List, Optional, Tuple

import torch
import torch.fx
import torch.nn as nn

from .formats import export_program, tracing_batch

_aten = torch.ops.aten
_CONVS = (_aten.conv2d.default, _aten.conv2d.padding)
_RELUS = (_aten.relu.default, _aten.relu_.default)
# functions f of single values with f(s * x) = s * f(x) for s > 0
_ELEMENTWISE = (
    *_RELUS, _aten.leaky_relu.default, _aten.leaky_relu_.default, _aten.clone.default, _aten.contiguous.default)
# the same for channels (N, channels, height, width)
_POOLING = (_aten.max_pool2d.default, _aten.avg_pool2d.default, _aten.adaptive_avg_pool2d.default)
_FLATTEN = (_aten.flatten.using_ints, _aten.view.default, _aten.reshape.default)


class _Layer:
    """Convolution or linear layer, and the factors of its output channels (rows) and input channels (columns)."""

    def __init__(self, name: str, weight: nn.Parameter, bias: Optional[nn.Parameter], groups: int):
        self.name, self.weight, self.bias, self.groups = name, weight, bias, groups
        # largest entries of the kernels (groups, outputs of a group, inputs of a group)
        self.size = weight.detach().double().abs().flatten(1 if weight.ndim < 3 else 2)
        self.size = (self.size if weight.ndim < 3 else self.size.amax(2)).unflatten(0, (groups, -1))
        outputs, inputs = self.size.shape[1:]
        self.rows = self.size.new_ones(groups, outputs, 1)
        self.columns = self.size.new_ones(groups, 1, inputs)

    def output_ranges(self) -> torch.Tensor:
        return (self.size * self.rows * self.columns).amax(2).flatten()

    def input_ranges(self) -> torch.Tensor:
        return (self.size * self.rows * self.columns).amax(1).flatten()

    def biases(self) -> torch.Tensor:
        rows = self.rows.flatten()
        return torch.zeros_like(rows) if self.bias is None else self.bias.detach() * rows

    def scale(self) -> None:
        """Multiply the parameters by the factors."""
        factors = (self.rows * self.columns).flatten(0, 1)
        self.weight.copy_(self.weight * factors.view(*factors.shape, *[1] * (self.weight.ndim - 2)))
        if self.bias is not None:
            self.bias.copy_(self.biases())


@torch.no_grad()
def equalize_ranges(model: nn.Module, images: torch.Tensor) -> int:
    r"""Equalize the weights of consecutive layers in place, without a change of the function.

    Output channel i of the first layer of a pair, with its bias, is divided by :math:`s_i`, and input channel i of the
    second multiplied:

    .. math:: s_i = \sqrt{r^{(1)}_i / r^{(2)}_i}

    :math:`r^{(1)}_i` and :math:`r^{(2)}_i`, the largest absolute weights of the two channels, become equal. This is
    repeated over all pairs. A factor is limited where a bias would otherwise become larger than the largest one of its
    layer, as ranges of activations are per tensor. Channels that are always zero or never used get zero weights.

    Pairs are two-dimensional convolutions and linear layers with nothing but ReLU, LeakyReLU and pooling in between.

    Args:
        model: Folded model in eval mode on the CPU.
        images: Images (N, channels, height, width) to trace the model with.

    Returns:
        Number of pairs.
    """
    pairs = _find_pairs(model, images)
    for first, second, has_relu in pairs:  # always zero
        biases = first.biases()
        is_zero = (first.output_ranges() == 0) & ((biases <= 0) if has_relu else (biases == 0))
        second.columns[is_zero.view_as(second.columns)] = 0
    for first, second, _ in reversed(pairs):  # never used
        first.rows[(second.input_ranges() == 0).view_as(first.rows)] = 0

    def constants(layer: _Layer, has_relu: bool) -> torch.Tensor:
        return layer.biases().clamp(min=0) if has_relu else layer.biases().abs()

    limits = [constants(first, has_relu).max().clamp(min=1e-30) for first, _, has_relu in pairs]
    for _ in range(50):
        change = 0.
        for (first, second, has_relu), limit in zip(pairs, limits):
            r1, r2 = first.output_ranges(), second.input_ranges()
            s = torch.where((r1 > 0) & (r2 > 0), (r1 / r2).sqrt(), 1.)
            s = torch.where(s < 1, s.maximum((constants(first, has_relu) / limit).clamp(max=1)), s)
            first.rows /= s.view_as(first.rows)
            second.columns *= s.view_as(second.columns)
            change = max(change, s.log().abs().max().item())
        if change < 1e-3:
            break
    for layer in dict.fromkeys(layer for pair in pairs for layer in pair[:2]):
        layer.scale()
    return len(pairs)


def _find_pairs(model: nn.Module, images: torch.Tensor) -> List[Tuple[_Layer, _Layer, bool]]:
    """Pairs of consecutive layers, in the order of execution, and whether a ReLU is between them."""
    program = export_program(model, tracing_batch(images[:2]))
    names = program.graph_signature.inputs_to_parameters
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(map(id, parameters.values()))
    layers = {}
    for node in program.graph.nodes:
        if (node.target in _CONVS or node.target == _aten.linear.default) and not node.kwargs:
            tensors = [x for x in node.args[1:3] if x is not None]
            found = [parameters.get(names.get(x.name)) for x in tensors]
            # a parameter with several uses cannot be scaled for one of them
            if all(p is not None and uses[id(p)] == 1 and len(x.users) == 1 for p, x in zip(found, tensors)):
                groups = node.args[6] if node.target in _CONVS and len(node.args) > 6 else 1
                name = names[tensors[0].name].rpartition('.')[0]
                layers[node] = _Layer(name, found[0], found[1] if len(found) > 1 else None, groups)
    pairs = []
    for node, first in layers.items():
        channels, has_relu = 1 if node.target in _CONVS else node.meta['val'].ndim - 1, False  # dimension
        while len(node.users) == 1:
            user = next(iter(node.users))
            if user in layers:
                expected = 1 if user.target in _CONVS else node.meta['val'].ndim - 1
                if channels == expected and user.args[0] is node:
                    pairs.append((first, layers[user], has_relu))
                break
            if not _keeps_scales(user, node, channels):
                break
            has_relu |= user.target in _RELUS
            node = user
    return pairs


def _keeps_scales(user: torch.fx.Node, node: torch.fx.Node, channels: int) -> bool:
    """Whether a factor > 0 of a channel of ``node`` becomes a factor of the same channel of ``user``."""
    if user.target in _ELEMENTWISE:
        return True
    if user.target == _aten.dropout.default:
        return not user.args[2]
    if channels != 1 or node.meta['val'].ndim != 4:
        return False
    if user.target == _aten.mean.dim:
        return {axis % 4 for axis in user.args[1]} <= {2, 3}
    if user.target == _aten.pad.default:  # with zeros
        return len(user.args[1]) <= 4 and user.args[2:] in ((), ('constant',), ('constant', 0), ('constant', None))
    if user.target in _FLATTEN:
        return tuple(node.meta['val'].shape[2:]) == (1, 1) and user.meta['val'].ndim == 2
    return user.target in _POOLING
