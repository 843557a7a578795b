"""Pointwise FFNs of timm's models: two linear layers and an activation, or a gated unit, applied to every token alone.

The table of this file names the parts of every FFN class of timm. The form of the block around an FFN does not matter.
"""
import copy
import re
from functools import partial
from numbers import Real
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import GlobalResponseNormMlp
from timm.layers.mlp import GatedMlp
from timm.models.nextvit import merge_pre_bn

from timm_rep.layers import Affine, GatedUnit, RePaMlpDeploy, modified

__all__ = ['PointwiseFfn', 'find_pointwise_ffns', 'linear_of', 'plain_ratio', 'ratios_of', 'replace_module']


class _Names(NamedTuple):
    """Attributes of an FFN class.

    Attributes:
        first: Linear layer, and BatchNorm, in the order of execution; separated by spaces.
        act: Activation.
        last: Last linear layer, and BatchNorm.
        value: Linear layer whose output the activated one is multiplied by, for gated units.
        norm: Norm of the hidden features, before the last linear layer.
        before: Layers before the first linear one, kept as they are.
        after: Layers after the last one, kept as they are.
        absent: Layer between the linear ones that mixes tokens; the FFN is pointwise if it is None or an identity.
        packed: Whether the first linear layer computes both halves of a gated unit.
    """
    first: str = 'fc1'
    act: str = 'act'
    last: str = 'fc2'
    value: str = ''
    norm: str = ''
    before: str = ''
    after: str = ''
    absent: str = ''
    packed: bool = False


_CLASSES: Dict[str, _Names] = {
    'layers.mlp.Mlp': _Names(norm='norm'),
    'layers.mlp.ConvMlp': _Names('fc1 norm'),
    'layers.mlp.GluMlp': _Names(norm='norm', packed=True),
    'layers.mlp.SwiGLU': _Names('fc1_g', value='fc1_x', norm='norm'),
    'models.efficientformer.ConvMlpWithNorm': _Names('fc1 norm1', last='fc2 norm2'),
    'models.efficientformer_v2.ConvMlpWithNorm': _Names(
        'fc1.conv fc1.bn', 'fc1.bn.act', 'fc2.conv fc2.bn', absent='mid'),
    'models.efficientvim.FFN': _Names('fc1.conv fc1.norm', 'fc1.act', 'fc2.conv fc2.norm'),
    'models.efficientvit_msra.ConvMlp': _Names('pw1', 'act', 'pw2'),
    'models.fastvit.ConvMlp': _Names(before='conv'),
    'models.inception_next.ConvMlp': _Names('fc1 norm'),
    'models.levit.LevitMlp': _Names('ln1', 'act', 'ln2'),
    'models.repvit.RepVitMlp': _Names('conv1', 'act', 'conv2'),
    'models.shvit.FFN': _Names('pw1', 'act', 'pw2'),
    'models.swiftformer.Mlp': _Names(before='norm1'),
    'models.tiny_vit.NormMlp': _Names(before='norm'),
    'models.visformer.SpatialMlp': _Names('conv1', 'act1', 'conv3', absent='conv2'),
    'models.vitamin.GeGluMlp': _Names('w0', 'act', 'w2', value='w1', before='norm'),
}
# blocks with an FFN that is an nn.Sequential: the attribute that holds it
_SEQUENTIALS: Dict[str, Tuple[str, _Names]] = {
    'models.fasternet.MLPBlock': ('mlp', _Names('0 1', '2', '3')),
    'models.iformer.ConvBlock': ('mixer.module', _Names('1', '2', '3', before='0')),
    'models.iformer.FFN': ('mixer.module', _Names('0', '1', '2')),
    'models.rdnet.Block': ('layers', _Names('2', '3', '4', before='0 1')),
    'models.rdnet.BlockESE': ('layers', _Names('2', '3', '4', before='0 1', after='5')),
}
# blocks whose own layers are an FFN
_INLINE: Dict[str, _Names] = {
    'models.starnet.Block': _Names('f1', 'act', 'g', value='f2'),
    'models.swiftformer.ConvEncoder': _Names('pwconv1', 'act', 'pwconv2'),
}
# classes that have the role of an FFN and are not pointwise, with the reason
_OTHERS = {
    GlobalResponseNormMlp: 'normalizes over all positions (global response norm)',
    GatedMlp: 'gates with other positions (spatial gating unit)',
}
_OTHER_NAMES = {
    'models.pvt_v2.MlpWithDepthwiseConv': 'has a depthwise convolution between its linear layers',
    'models.gemma4_vit.Gemma4GatedMlp': 'has clipped linear layers',
    'models.vision_transformer.ParallelScalingBlock': 'computes FFN and attention with one matrix',
    'models.vision_transformer.DiffParallelScalingBlock': 'computes FFN and attention with one matrix',
}
# MLPs that are no FFN of a block: position biases, squeeze and excitation, pooling and classifier heads; and MLPs over
# tokens, which RePaFormer leaves alone
_NO_FFN = re.compile(
    r'(^|\.)(attn_pool|rel_pos|shared_rel_pos|meta_mlp|mlp_tokens|mlp_add|mlp_scale|attn\.attn|head|pre_logits)(\.|$)')

# blocks whose reparameterize() folds the norm before the FFN into ``mlp.fc1``
_NORM_FOLDING = ('models.nextvit.NextConvBlock', 'models.nextvit.NextTransformerBlock')


def _class_name(module: nn.Module) -> str:
    # a subclass with a forward() of its own may use its attributes differently
    cls = next((c for c in type(module).__mro__ if 'forward' in vars(c)), type(module))
    return f'{cls.__module__}.{cls.__qualname__}'.removeprefix('timm.')


def _chain(module: nn.Module, names: str) -> List[nn.Module]:
    return [module.get_submodule(name) for name in names.split()]


def _affine(layers: Sequence[nn.Module]) -> Affine:
    """The affine map of a linear layer followed by BatchNorms, with composites of both expanded."""
    affine = None
    for layer in layers:
        parts = [layer]
        if not isinstance(layer, (nn.Linear, nn.Conv2d, nn.modules.batchnorm._BatchNorm)):
            parts = [m for m in layer.children() if not isinstance(m, (nn.Identity, nn.Dropout))]
        for part in parts:
            if affine is None:
                affine = Affine.from_linear(part)
            else:
                affine = affine.before_norm(part)
    return affine


def deploy_of(replacement: nn.Module) -> RePaMlpDeploy:
    """The matrices in what :meth:`PointwiseFfn.replacement` gives."""
    return next(m for m in replacement.modules() if isinstance(m, RePaMlpDeploy))


def linear_of(layer: nn.Module) -> nn.Module:
    """The linear layer of a composite."""
    return next(m for m in layer.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def _obstacle(module: nn.Module, names: _Names) -> Optional[str]:
    """Why an FFN of a known class is not two pointwise linear layers with an activation; None if it is."""
    absent = getattr(module, names.absent) if names.absent else None
    if absent is not None and not isinstance(absent, nn.Identity):
        return 'has a convolution between its linear layers'
    act = module.get_submodule(names.act)
    for layer in _chain(module, f'{names.first} {names.last} {names.value}'):
        for part in layer.modules():
            if part in act.modules():  # of a composite
                continue
            if type(part) is nn.Linear or (
                    type(part) is nn.Conv2d and part.kernel_size == part.stride == (1, 1) and part.groups == 1):
                weight = part.weight
                # quantized and distributed weights are subclasses of Tensor
                if type(weight.data) is not torch.Tensor or not weight.is_floating_point():
                    return f'has a weight that is a {type(weight.data).__name__} of {weight.dtype}'
                continue
            known = isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.Identity, nn.Dropout)) or (
                # composites; adapters are subclasses of linear layers
                type(part).__module__.startswith('timm.') and any(part.children())
                and not isinstance(part, (nn.Linear, nn.Conv2d)))
            if not known:
                kind = f'{type(part).__module__}.{type(part).__qualname__}'
                return f'has a {re.sub(r"^torch.nn.modules.[a-z]+.", "", kind)} where a linear layer is expected'
    if any(p.numel() > 1 for p in act.parameters()):
        return 'has an activation with parameters for every channel'
    norm = module.get_submodule(names.norm) if names.norm else nn.Identity()
    # LayerNorm2d is a LayerNorm
    if not isinstance(norm, nn.Identity if isinstance(linear_of(module), nn.Conv2d) else (nn.Identity, nn.LayerNorm)):
        return f'has a {type(norm).__name__} before its last linear layer'
    return modified(module)


class _One(nn.Module):
    """1, the value of a gated unit that a block multiplies by what has its function already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(())


class PointwiseFfn:
    """A pointwise FFN in a model: ``y = W2 g(u) + b2`` with the hidden features ``g(u)`` of every token.

    Attributes:
        name: Name of the module in the model.
        module: The FFN, or the block whose own layers are one.
        class_name: Name of its class; of the block, if the FFN is a Sequential.
        in_features: Channels of u.
        hidden_features: Channels of g.
        out_features: Channels of y.
        use_conv: Whether channels are at dimension 1 (N, C, H, W) instead of the last one.
        hidden_norm: LayerNorm of the hidden features, None if there is none.
    """

    def __init__(self, name: str, module: nn.Module, names: _Names, class_name: str):
        self.name, self.module, self._names = name, module, names
        self.class_name = class_name.rpartition('.')[2]
        self._inline = class_name in _INLINE
        first, last = linear_of(self.first), linear_of(self.last)
        self.use_conv = isinstance(first, nn.Conv2d)
        self.in_features = first.weight.shape[1]
        self.out_features, self.hidden_features = last.weight.shape[:2]
        norm = module.get_submodule(names.norm) if names.norm else None
        self.hidden_norm = norm if isinstance(norm, nn.LayerNorm) else None

    @property
    def first(self) -> nn.Module:
        """The layer whose input is u."""
        return _chain(self.module, self._names.first)[0]

    @property
    def last(self) -> nn.Module:
        """The layer whose input is g."""
        return _chain(self.module, self._names.last)[0]

    @property
    def output_layer(self) -> nn.Module:
        """The layer whose output is y."""
        return _chain(self.module, self._names.last)[-1]

    @property
    def act_name(self) -> str:
        """Name of the activation in the module."""
        return self._names.act

    @property
    def gated(self) -> bool:
        """Whether the hidden features are products of two linear maps of u, one of them activated."""
        return self._names.packed or bool(self._names.value)

    @property
    def channel_macs(self) -> int:
        """Multiply-accumulates of a hidden channel, for a token."""
        return self.in_features * (2 if self.gated else 1) + self.out_features

    def pruned_features(self, active_features: int) -> int:
        """Number of hidden channels of two matrices that cost as much as three with ``active_features``."""
        return min(self.hidden_features, active_features + self.in_features * self.out_features // self.channel_macs)

    def obstacle(self) -> Optional[str]:
        """Why the module, which may have changed, is not a pointwise FFN; None if it is."""
        return _obstacle(self.module, self._names)

    def _affine(self, names: str) -> Affine:
        try:
            return _affine(_chain(self.module, names))
        except ValueError as e:  # running statistics that are missing or not finite
            raise ValueError(f'{self.name}: {e}') from e

    def fc_in(self, channels: torch.Tensor) -> Affine:
        """The map of u to the given hidden channels before the activation; of a gated unit gates, then values."""
        maps = [self._affine(names) for names in (self._names.first, self._names.value) if names]
        if self._names.packed:
            half = self.hidden_features
            maps = [maps[0].outputs(0, half), maps[0].outputs(half)]
            if self.module.gate_last:
                maps.reverse()
        return Affine(*(torch.cat([parts[channels] for parts in group]) for group in zip(*maps)))

    def fc_out(self) -> Affine:
        """The map of the hidden features to the output."""
        return self._affine(self._names.last)

    def unit(self, act: nn.Module) -> nn.Module:
        """The map of gates and values, or of the output of the first layer, to hidden features."""
        return GatedUnit(act, dim=1 if self.use_conv else -1) if self.gated else act

    def act(self, channels: torch.Tensor) -> nn.Module:
        """The map of the output of :meth:`fc_in` to the hidden features of the given channels.

        A LayerNorm of the hidden features becomes one over these channels alone, which is another function.
        """
        act = self.unit(self.module.get_submodule(self.act_name))
        if self.hidden_norm is None or not len(channels):
            return act
        old = self.hidden_norm
        norm = nn.LayerNorm(len(channels), eps=old.eps, elementwise_affine=old.elementwise_affine, device='meta')
        for name, value in old.named_parameters():
            channels = channels.to(value.device)
            setattr(norm, name, nn.Parameter(value.detach()[channels], requires_grad=value.requires_grad))
        return nn.Sequential(act, norm)

    def replacement(
            self,
            active_features: int,
            act: Optional[nn.Module] = None,
            linear_path: bool = True,
            **dd,
    ) -> nn.Module:
        """The module that takes the place of the FFN: at most three matrices, between the layers before and after.

        Args:
            active_features: Number of hidden channels that keep the activation.
            act: Map of the output of ``fc_in`` to the hidden features; that of the first channels by default.
            linear_path: Whether the idle channels become a matrix, or are dropped.
            dd: Device and dtype of the new parameters; those of the FFN by default.
        """
        like = linear_of(self.first).weight
        deploy = RePaMlpDeploy(
            self.in_features,
            self.hidden_features if linear_path else active_features,
            active_features=active_features,
            out_features=self.out_features,
            gated=self.gated,
            act_layer=lambda: act or self.act(torch.arange(active_features)),
            use_conv=self.use_conv,
            **{'device': like.device, 'dtype': like.dtype, **dd},
        )
        return self.around(deploy)

    def around(self, deploy: nn.Module) -> nn.Module:
        """The module that takes the place of the FFN, given the part between the layers that are kept.

        Args:
            deploy: Map of u to y.
        """
        if self._inline:
            return self._block_with(deploy)
        if self._names.before or self._names.after:
            deploy = nn.Sequential(
                *_chain(self.module, self._names.before), deploy, *_chain(self.module, self._names.after))
        return deploy.train(self.module.training)

    def _block_with(self, deploy: nn.Module) -> nn.Module:
        """A copy of the block with one of its layers for the whole FFN; the others are shared."""
        block, names = copy.copy(self.module), self._names
        layers = {name: nn.Identity() for name in (*names.first.split(), names.act, *names.last.split())}
        layers[names.first.split()[0]] = deploy.train(block.training)
        if names.value:
            layers[names.value] = _One()
        block._modules = {**block._modules, **layers}
        return block


def find_pointwise_ffns(model: nn.Module) -> Tuple[List[PointwiseFfn], Dict[str, str]]:
    """The pointwise FFNs of a model, in the order of its modules.

    Returns:
        The FFNs, and for every FFN that is not pointwise its name and the reason.
    """
    ffns, others = [], {}
    for name, module in model.named_modules():
        if _NO_FFN.search(name):
            continue
        key = _class_name(module)
        reason = _OTHERS.get(type(module)) or _OTHER_NAMES.get(key)
        names = _CLASSES.get(key) or _INLINE.get(key)
        if key in _SEQUENTIALS:
            attribute, names = _SEQUENTIALS[key]
            module, name = module.get_submodule(attribute), f'{name}.{attribute}'
        if key in (*_SEQUENTIALS, *_INLINE) and any(isinstance(m, RePaMlpDeploy) for m in module.modules()):
            continue  # converted already
        if names is not None:
            reason = _obstacle(module, names)
        if reason:
            others[name] = reason
        elif names is not None:
            ffns.append(PointwiseFfn(name, module, names, key))
    return ffns, others


def plain_ratio(idle_ratio: Any) -> Union[float, List[Optional[float]]]:
    """An idle ratio, or one for each FFN, as Python's numbers, which config.json can hold.

    Raises:
        ValueError: It is neither a number nor a sequence of them.
    """
    given = idle_ratio.tolist() if hasattr(idle_ratio, 'tolist') else idle_ratio  # of torch and NumPy
    try:
        if isinstance(given, Real):
            return float(given)
        if isinstance(given, (list, tuple)):
            return [None if ratio is None else float(ratio) for ratio in given]
    except (TypeError, ValueError):
        pass
    raise ValueError(
        'idle_ratio is a number from 0 to 1, or a list of one for each FFN, None for those that stay as they are: '
        f'got {idle_ratio!r}.')


def ratios_of(
        names: Sequence[str],
        idle_ratio: Union[float, Sequence[Optional[float]]],
) -> List[Optional[float]]:
    """The idle ratio of every FFN, None for those that are to stay as they are.

    Args:
        names: Names of the FFNs.
        idle_ratio: One ratio, or one for each FFN.

    Raises:
        ValueError: It is neither a number nor a sequence of them, or there are several, but not one for each FFN.
    """
    given = plain_ratio(idle_ratio)
    ratios = given if isinstance(given, list) else [given] * len(names)
    if len(ratios) != len(names):
        raise ValueError(
            f'idle_ratio is one number or one for each of the {len(names)} FFNs, got {len(ratios)}: '
            f'{", ".join(names)}.')
    return ratios


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in all places of another one, which several parents may share."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
                if _class_name(parent) in _NORM_FOLDING:
                    parent.reparameterize = partial(_fold_norms, parent)


def _fold_norms(block: nn.Module) -> None:
    """The ``reparameterize()`` of a NextViT block with a converted FFN, several of whose layers may have its input."""
    mlp, norm = block.mlp, block.norm2 if hasattr(block, 'norm2') else block.norm
    first, *others = (m for name, m in mlp.named_modules() if name.split('.')[-1] in ('fc1', 'fc_in', 'fc_idle'))
    if not block.is_fused:
        for layer in others:
            merge_pre_bn(layer, norm)
    block.mlp = nn.ModuleDict({'fc1': first})  # where timm looks for it
    type(block).reparameterize(block)
    block.mlp = mlp
