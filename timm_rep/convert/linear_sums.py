"""Find the blocks of timm models that are sums of linear branches, and the place of the equivalent convolution.

A sum consists of terms ``gain * norm(conv(x))``. The equivalent convolution goes where timm's own deploy structure has
it, so that the rest of the block's forward pass stays timm's.
"""
import dataclasses
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F

from timm_rep.layers import Affine, ConvBranch, Csla, IdentityBranch, unfoldable_reason
from timm_rep.layers.fold import batch_norm_scale_shift, to_float64


class Term(NamedTuple):
    """A linear branch ``gain * norm(conv(x))``.

    Attributes:
        conv: Convolution; None for the identity.
        norm: BatchNorm of its output, None without.
        gain: Factor of every output channel, of shape (channels,) after flattening; None for 1.
    """
    conv: Optional[nn.Conv2d]
    norm: Optional[nn.modules.batchnorm._BatchNorm] = None
    gain: Optional[torch.Tensor] = None


@dataclasses.dataclass(frozen=True)
class LinearSum:
    """A sum of linear branches in a model.

    Attributes:
        name: Name of the module that computes it.
        module: The module.
        terms: The branches.
        slot: Attribute of the module for timm's folded convolution; '' if the convolution replaces the module.
        replaced: New values of the module's attributes that the convolution makes redundant.
        norm: BatchNorm applied to the sum, None without.
        act: Activation that timm's deploy structure puts after the convolution in the slot, None without.
    """
    name: str
    module: nn.Module
    terms: Sequence[Term]
    slot: str
    replaced: Dict[str, Any]
    norm: Optional[nn.modules.batchnorm._BatchNorm] = None
    act: Optional[nn.Module] = None

    @property
    def convs(self) -> List[nn.Conv2d]:
        """Convolutions of the branches, which identities do not have."""
        return [term.conv for term in self.terms if term.conv is not None]

    @property
    def drop_rate(self) -> float:
        """Rate of the stochastic depth that drops all branches of a sample at once."""
        drop_path = getattr(self.module, 'drop_path', None) if 'drop_path' in self.replaced else None
        return getattr(drop_path, 'drop_prob', 0.)

    @property
    def branches(self) -> Tuple[Union[ConvBranch, IdentityBranch], ...]:
        """One branch for each convolution, numbered if several have one kernel size, and one for all identities."""
        sizes = [conv.kernel_size for conv in self.convs]
        branches: List[Union[ConvBranch, IdentityBranch]] = []
        for i, size in enumerate(sizes):
            name = '' if sizes.count(size) == 1 else f'conv{size[0]}x{size[1]}_{sizes[:i].count(size)}'
            branches.append(ConvBranch(size, name))
        if len(sizes) < len(self.terms):
            branches.append(IdentityBranch())
        return tuple(branches)

    def csla(self, initial_scale: float) -> Csla:
        """The declaration of the block."""
        conv = max(self.convs, key=lambda conv: conv.kernel_size)
        return Csla(
            conv.in_channels,
            conv.out_channels,
            branches=self.branches,
            stride=conv.stride,
            groups=conv.groups,
            dilation=conv.dilation,
            initial_scale=initial_scale,
        )

    def kernel(self, csla: Csla) -> Affine:
        """Kernel and bias of the convolution that equals the sum in eval mode, in float64.

        The kernel has the shape (out_channels, in_channels / groups * height * width).
        """
        out, inputs, height, width = csla.kernel_shape
        weight = to_float64(self.convs[0].weight).new_zeros(csla.kernel_shape)
        bias = weight.new_zeros(out)
        for conv, norm, gain in self.terms:
            if conv is None:
                kernel = torch.eye(inputs, dtype=weight.dtype, device=weight.device).repeat(csla.groups, 1)
                term, size = Affine(kernel, bias.new_zeros(out)), (1, 1)
            else:
                term, size = Affine.from_linear(conv), conv.kernel_size
            if norm is not None:
                term = term.before_norm(norm)
            if gain is not None:
                term = term.scale_outputs(gain.flatten())
            rows, columns = (height - size[0]) // 2, (width - size[1]) // 2
            weight += F.pad(term.weight.reshape(out, inputs, *size), (columns, columns, rows, rows))
            bias += term.bias
        return Affine(weight.flatten(1), bias)

    def output_statistics(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of the channels of the sum in training, as the BatchNorms of its branches tell them.

        The mean is the sum of the branches' means. The variance is the geometric mean of two: that of uncorrelated
        branches, ``sum(std ** 2)``, and the largest, ``sum(std) ** 2``. Where no BatchNorm tells the statistics of an
        identity's input, its mean is taken as 0 and its variance as 1; the output of a convolution without BatchNorm
        is taken as its bias.

        Returns:
            Two tensors of shape (out_channels,), float64.
        """
        inputs = self._input_statistics()
        means, stds = [], []
        for conv, norm, gain in self.terms:
            if norm is not None:
                mean, std = _norm_statistics(norm)
            elif conv is not None:
                mean = Affine.from_linear(conv).bias
                std = torch.zeros_like(mean)
            else:
                mean, std = inputs[0], inputs[1].sqrt()
            factor = 1. if gain is None else to_float64(gain).flatten()
            means.append(mean * factor)
            stds.append((std * factor).abs())
        std = torch.stack(stds)
        return sum(means), std.square().sum(dim=0).sqrt() * std.sum(dim=0)

    def _input_statistics(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of the input channels, from a BatchNorm of the input or of its channels' multiples."""
        for conv, norm, _ in self.terms:
            is_depthwise = conv is None or (conv.kernel_size == (1, 1) and conv.groups == conv.out_channels)
            if norm is None or not is_depthwise:
                continue
            mean, variance = to_float64(norm.running_mean), to_float64(norm.running_var)
            if conv is None:
                return mean, variance
            weight, bias = Affine.from_linear(conv)
            factor = weight.flatten()
            # a constant channel tells nothing: quotients of tiny numbers would drown the function in rounding errors;
            # at this variance its norm divides by 30 times its deviation
            is_constant = (variance < 1e-3 * norm.eps) | (factor == 0)
            return (
                torch.where(is_constant, 0., (mean - bias) / factor),
                torch.where(is_constant, 1., variance / factor.square()))
        ones = to_float64(self.convs[0].weight).new_ones(self.convs[0].out_channels)
        return torch.zeros_like(ones), ones


def _norm_statistics(norm: nn.modules.batchnorm._BatchNorm) -> Tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the output of a BatchNorm in training."""
    scale, _ = batch_norm_scale_shift(norm)
    mean = torch.zeros_like(scale) if norm.bias is None else to_float64(norm.bias)
    return mean, scale.abs() * to_float64(norm.running_var).sqrt()


def _conv_norms(layers: Sequence[nn.Module], norm: str = 'bn', **kwargs: Any) -> List[Term]:
    """Terms of timm's layers of a convolution and a BatchNorm; layers may be None."""
    return [
        Term(layer.get_submodule('conv' if hasattr(layer, 'conv') else 'c'), layer.get_submodule(norm), **kwargs)
        for layer in layers if layer is not None]


def _identity(norm: Optional[nn.Module], **kwargs: Any) -> List[Term]:
    return [] if norm is None else [Term(None, norm, **kwargs)]


def _repvgg(name: str, block: nn.Module) -> List[LinearSum]:
    terms = _conv_norms([block.conv_kxk, block.conv_1x1]) + _identity(block.identity)
    replaced = dict.fromkeys(('conv_kxk', 'conv_1x1', 'identity', 'drop_path'))
    return [LinearSum(name, block, terms, 'reparam_conv', replaced)]


def _mobileone_terms(block: nn.Module, **kwargs: Any) -> List[Term]:
    return [
        *_conv_norms([*(block.conv_kxk or ()), block.conv_scale], **kwargs), *_identity(block.identity, **kwargs)]


def _mobileone(name: str, block: nn.Module) -> List[LinearSum]:
    replaced = dict.fromkeys(('conv_kxk', 'conv_scale', 'identity', 'drop_path'))
    return [LinearSum(name, block, _mobileone_terms(block), 'reparam_conv', replaced)]


def _repmixer(name: str, block: nn.Module) -> List[LinearSum]:
    gain = getattr(block.layer_scale, 'gamma', torch.ones_like(block.norm.identity.weight))
    terms = [*_mobileone_terms(block.mixer, gain=gain), *_mobileone_terms(block.norm, gain=-gain), Term(None)]
    return [LinearSum(
        name, block, terms, 'reparam_conv', dict(mixer=None, norm=None, layer_scale=None, inference_mode=True))]


def _large_kernel(name: str, block: nn.Module) -> List[LinearSum]:
    terms = _conv_norms([block.large_conv, getattr(block, 'small_conv', None)])
    return [LinearSum(
        name, block, terms, 'reparam_conv', dict(large_conv=None, small_conv=None, reparameterize=_noop))]


def _position(name: str, block: nn.Module) -> List[LinearSum]:
    return [LinearSum(
        name, block, [Term(block.pos_enc), Term(None)], 'reparam_conv',
        dict(pos_enc=None, reparameterize=_noop))]


def _repvgg_dw(name: str, block: nn.Module) -> List[LinearSum]:
    norm = block.bn if isinstance(block.bn, nn.modules.batchnorm._BatchNorm) else None
    single = Term(block.conv1) if isinstance(block.conv1, nn.Conv2d) else _conv_norms([block.conv1])[0]
    return [LinearSum(name, block, [*_conv_norms([block.conv]), single, Term(None)], '', {}, norm)]


def _repcpe(name: str, block: nn.Module) -> List[LinearSum]:
    return [LinearSum(name, block, [*_conv_norms([block.cpe.module]), Term(None)], '', {})]


def _repghost(name: str, block: nn.Module) -> List[LinearSum]:
    conv, norm = block.cheap_operation
    identities = [Term(None, bn) for bn in block.fusion_bn]
    return [LinearSum(
        name, block, [Term(conv, norm), *identities], 'cheap_operation',
        dict(fusion_conv=nn.Sequential(), fusion_bn=nn.Sequential()))]


def _ghost_v3(name: str, block: nn.Module) -> List[LinearSum]:
    primary = _conv_norms([*block.primary_rpr_conv, block.primary_rpr_scale], norm='bn1') + _identity(
        block.primary_rpr_skip)
    cheap = _conv_norms([*block.cheap_rpr_conv, block.cheap_rpr_scale], norm='bn1') + _identity(block.cheap_rpr_skip)
    replaced = (dict.fromkeys(f'{half}_rpr_{part}' for part in ('conv', 'scale', 'skip')) for half in (
        'primary', 'cheap'))
    return [
        LinearSum(name, block, primary, 'primary_conv', next(replaced), act=block.primary_activation),
        LinearSum(name, block, cheap, 'cheap_operation', {**next(replaced), 'infer_mode': True},
                  act=block.cheap_activation),
    ]


def _ghost_v3_bottleneck(name: str, block: nn.Module) -> List[LinearSum]:
    if block.stride == 1:
        return []
    terms = _conv_norms([*block.dw_rpr_conv, block.dw_rpr_scale], norm='bn1')
    return [LinearSum(
        name, block, terms, 'conv_dw', dict(dw_rpr_conv=None, dw_rpr_scale=None, dw_rpr_skip=None, infer_mode=True))]


def _lcnet(name: str, block: nn.Module) -> List[LinearSum]:
    if block.dw_conv_list is None:
        return []
    return [LinearSum(name, block, _conv_norms(block.dw_conv_list), 'dw_conv', dict(dw_conv_list=None))]


def _noop() -> None:
    """Replaces ``reparameterize()`` in blocks of timm that require their branches for it."""


_SUM_FINDERS: Dict[str, Callable[[str, nn.Module], List[LinearSum]]] = {
    'byobnet.MobileOneBlock': _mobileone,
    'byobnet.RepVggBlock': _repvgg,
    'fastvit.MobileOneBlock': _mobileone,
    'fastvit.RepConditionalPosEnc': _position,
    'fastvit.RepMixer': _repmixer,
    'fastvit.ReparamLargeKernelConv': _large_kernel,
    'ghostnet.GhostBottleneckV3': _ghost_v3_bottleneck,
    'ghostnet.GhostModuleV3': _ghost_v3,
    'iformer.RepCPE': _repcpe,
    'lcnetv2.RepDepthwiseSeparable': _lcnet,
    'repghost.RepGhostModule': _repghost,
    'repvit.RepVggDw': _repvgg_dw,
}


def _unsupported_reason(linear_sum: LinearSum) -> Optional[str]:
    """Reason why one convolution with a BatchNorm cannot replace a sum; None if it can."""
    if len(linear_sum.terms) < 2:
        return 'has a single branch'
    for conv, norm, _ in linear_sum.terms:
        if conv is not None and (type(conv) is not nn.Conv2d or type(conv.weight.data) is not torch.Tensor):
            return f'has a branch with a {type(conv).__name__} instead of a plain convolution'
        if norm is not None and not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            return f'has a branch with a {type(norm).__name__} instead of a BatchNorm'
        act = getattr(norm, 'act', None)
        if not isinstance(act, (type(None), nn.Identity)):
            return f'has a branch with a {type(act).__name__} in it'
    replaced = [getattr(linear_sum.module, name, None) for name in linear_sum.replaced]
    for part in replaced if linear_sum.slot else [linear_sum.module]:
        reason = unfoldable_reason(part) if isinstance(part, nn.Module) else None
        if reason:
            return reason
    convs = linear_sum.convs
    whole = max(convs, key=lambda conv: conv.kernel_size)
    for conv in convs:
        same = all(
            getattr(conv, name) == getattr(whole, name)
            for name in ('in_channels', 'out_channels', 'stride', 'groups', 'padding_mode'))
        centred = all(k % 2 for k in conv.kernel_size) and conv.padding_mode == 'zeros' and conv.padding == tuple(
            k // 2 * d for k, d in zip(conv.kernel_size, conv.dilation))
        dilated = all(k == 1 or d == w for k, d, w in zip(conv.kernel_size, conv.dilation, whole.dilation))
        if not (same and centred and dilated):
            return f'has a branch {conv} that cannot be added to {whole}'
    return None


def find_linear_sums(model: nn.Module) -> Tuple[List[LinearSum], Dict[str, str]]:
    """The blocks of a timm model that are sums of linear branches, in the order of its modules.

    Returns:
        The sums, and the names of other blocks of known classes with the reason.
    """
    sums: List[LinearSum] = []
    others: Dict[str, str] = {}
    parts: Set[nn.Module] = set()  # blocks inside sums that were found, which fold with these
    for name, module in model.named_modules():
        cls = type(module)
        find = _SUM_FINDERS.get(f'{cls.__module__}.{cls.__qualname__}'.removeprefix('timm.models.'))
        if find is None or module in parts or _is_folded(module):
            continue
        found = find(name, module)
        reasons = {f'{name}.{s.slot}'.rstrip('.'): _unsupported_reason(s) for s in found}
        if any(reasons.values()):  # timm folds all sums of a block together
            others.update({slot: reason for slot, reason in reasons.items() if reason})
            continue
        sums.extend(found)
        for linear_sum in found:
            replaced = [getattr(module, attribute, None) for attribute in linear_sum.replaced]
            parts.update(m for child in replaced if isinstance(child, nn.Module) for m in child.modules())
    return sums, others


def _is_folded(module: nn.Module) -> bool:
    return getattr(module, 'reparam_conv', None) is not None or getattr(module, 'infer_mode', False)
