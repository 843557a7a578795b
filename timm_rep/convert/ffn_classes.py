"""Registry of pointwise FFN classes, which are applied to each token alone, and of the blocks around them.

A registration names the layers of an FFN; here they are found and checked.
"""
import inspect
import re
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn

from timm_rep.layers import Affine, unfoldable_reason


class FfnSpec(NamedTuple):
    """Attribute names of the parts of an FFN class, see :func:`register_ffn`."""
    first: str = 'fc1'
    act: str = 'act'
    last: str = 'fc2'
    value: str = ''
    packed: bool = False
    norm: str = ''
    drop: str = ''
    before: str = ''
    after: str = ''
    absent: str = ''
    attribute: str = ''
    inline: bool = False

    def layers(self, module: nn.Module, part: str) -> List[nn.Module]:
        """The layers of a part in an FFN, in the order of execution."""
        return [module.get_submodule(name) for name in getattr(self, part).split()]

    def unsupported_reason(self, module: nn.Module) -> Optional[str]:
        """Reason why a module of a registered class is not a pointwise FFN; None if it is one."""
        try:
            parts = {part: self.layers(module, part) for part in (
                'first', 'act', 'last', 'value', 'drop', 'before', 'after')}
            norm, absent = (getattr(module, name) if name else None for name in (self.norm, self.absent))
        except AttributeError as e:
            return f'does not have the registered parts ({e})'
        if len(parts['act']) != 1:
            return f'must have one activation, not {len(parts["act"])}'
        if absent is not None and not isinstance(absent, nn.Identity):
            return 'has a convolution between its linear layers'
        act, = parts['act']
        for layer in (*parts['first'], *parts['last'], *parts['value']):
            for part in layer.modules():
                reason = None if part in act.modules() else _unsupported_linear(part)  # composites hold the activation
                if reason:
                    return reason
        for name in 'first', 'last':
            if not any(isinstance(m, (nn.Linear, nn.Conv2d)) for layer in parts[name][:1] for m in layer.modules()):
                return f'has no linear layer at the beginning of {name}={getattr(self, name)!r}'
        if any(p.numel() > 1 for p in act.parameters()):
            return 'has an activation with parameters for every channel'
        use_conv = isinstance(find_linear(parts['first'][0]), nn.Conv2d)
        # LayerNorm2d is a LayerNorm
        if norm is not None and not isinstance(norm, nn.Identity if use_conv else (nn.Identity, nn.LayerNorm)):
            return f'has a {type(norm).__name__} before its last linear layer'
        named = [m for layers in (*parts.values(), [norm, absent]) for m in layers if m is not None]
        known = {p for m in named for p in m.parameters()}
        others = [name for name, p in module.named_parameters() if p not in known]
        if others and not self.inline:
            return f'has parameters outside of its registered parts: {others[0]}'
        if not self.inline and not _takes_tokens_alone(module):
            return 'has a forward() that requires more than its tokens'
        return unfoldable_reason(module)


def _takes_tokens_alone(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError:
        return False
    return True


def find_linear(layer: nn.Module) -> nn.Module:
    """The linear layer in a composite."""
    return next(m for m in layer.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def affine_of(layers: Sequence[nn.Module]) -> Affine:
    """The affine map of a linear layer followed by BatchNorms, with composites of both expanded."""
    parts: List[nn.Module] = []
    for layer in layers:
        if isinstance(layer, (nn.Linear, nn.Conv2d, nn.modules.batchnorm._BatchNorm)):
            parts.append(layer)
        else:
            parts += [m for m in layer.children() if not isinstance(m, (nn.Identity, nn.Dropout))]
    affine = Affine.from_linear(parts[0])
    for norm in parts[1:]:
        affine = affine.before_norm(norm)
    return affine


def _type_name(module: nn.Module) -> str:
    cls = type(module)
    return re.sub(r'^torch\.nn\.modules\.[a-z]+\.', '', f'{cls.__module__}.{cls.__qualname__}')


def _unsupported_linear(part: nn.Module) -> Optional[str]:
    """Reason why a module is neither a linear layer nor a part of one with BatchNorms; None if it is."""
    if type(part) is nn.Linear or type(part) is nn.Conv2d:
        if isinstance(part, nn.Conv2d) and not (
                part.kernel_size == part.stride == (1, 1) and part.groups == 1
                and part.padding in ((0, 0), 'same', 'valid')):
            return f'has a {_type_name(part)} where a linear layer is expected'
        weight = part.weight
        # quantized and distributed weights are subclasses of Tensor
        if type(weight.data) is not torch.Tensor or not weight.is_floating_point():
            return f'has a weight that is a {type(weight.data).__name__} of {weight.dtype}'
        return None
    known = isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.Identity, nn.Dropout)) or (
        # composites of timm; adapters are subclasses of linear layers
        type(part).__module__.startswith('timm.') and any(part.children())
        and not isinstance(part, (nn.Linear, nn.Conv2d)))
    return None if known else f'has a {_type_name(part)} where a linear layer is expected'


# by qualified name; a reason for classes that have the role of an FFN and are not pointwise
_FFNS: Dict[str, Union[FfnSpec, str]] = {}
_BLOCKS: Dict[str, Tuple[str, str, str]] = {}  # attribute names of norm, FFN and layer scale


def _defining_class(cls: Type[nn.Module]) -> Type[nn.Module]:
    return next(c for c in cls.__mro__ if 'forward' in vars(c))


def class_name(cls: Type[nn.Module]) -> str:
    """Qualified name of the class that defines ``forward()``: a subclass with its own may use its parts differently."""
    cls = _defining_class(cls)
    return f'{cls.__module__}.{cls.__qualname__}'


def _registered_name(cls: Union[Type[nn.Module], str]) -> str:
    if isinstance(cls, str):
        return cls
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f'cls must be a class of modules or its qualified name, got {cls!r}.')
    defining = _defining_class(cls)
    if defining is not cls:
        raise ValueError(
            f'cls must define its own forward(), got {cls.__qualname__}: register {defining.__qualname__} instead.')
    return class_name(cls)


def register_ffn(
        cls: Union[Type[nn.Module], str],
        first: str = 'fc1',
        act: str = 'act',
        last: str = 'fc2',
        *,
        value: str = '',
        packed: bool = False,
        norm: str = '',
        drop: str = '',
        before: str = '',
        after: str = '',
        absent: str = '',
        attribute: str = '',
        inline: bool = False,
) -> None:
    """Register a class of pointwise FFNs, so that :func:`timm_rep.convert_to_repa` converts them.

    The class computes ``after(drop2(last(norm(drop1(act(first(before(x))))))))``, or with ``value`` or ``packed``
    ``act(gates) * values`` instead of ``act``. Parts are given by attribute names, with dots for nested ones
    (``'fc1.conv'``); several layers in a row are separated by spaces in the order of execution (``'fc1 bn1'``). Linear
    parts are ``nn.Linear``, ungrouped 1 x 1 ``nn.Conv2d`` with channels at dimension 1, BatchNorms after them, or
    timm's composites of these. An FFN is not converted if it has parameters outside of the named parts, hooks or a part
    of a different type, or if it does not compute what the parts do.

    A registration applies to the class that defines ``forward()`` and to subclasses that inherit it. A subclass with
    its own ``forward()`` needs its own registration. Registrations are not saved: register in the module that defines
    the class.

    Which of these FFNs can be converted depends on the conversion:

    - From data: all.
    - Annealed: those without a LayerNorm in ``norm``.
    - To train, and annealed with ``norm='batch'``: those whose ``first`` and ``last`` are one plain layer each, without
      ``value``, ``packed``, ``before``, ``after``, ``absent``, ``attribute`` and ``inline``, in a block of a class
      registered with :func:`register_block`.

    Example::

        class Ffn(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.up, self.act, self.down = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)

            def forward(self, x):
                return self.down(self.act(self.up(x)))

        timm_rep.convert.register_ffn(Ffn, first='up', last='down')

    Args:
        cls: The class, or its qualified name.
        first: First linear layer.
        act: Element-wise activation.
        last: Last linear layer.
        value: Second linear layer on the same input, by whose output the activated one is multiplied (gated unit).
        packed: Whether the first linear layer computes gates and values of a gated unit, in this order unless the
            attribute ``gate_last`` of the FFN is True.
        norm: Attribute that holds the LayerNorm of the hidden features; it may hold None or an identity.
        drop: Dropouts after the activation and after the last linear layer, which a model to train keeps: two names.
            One name: after the activation.
        before: Layers before the first linear layer; they are kept.
        after: Layers after the last linear layer; they are kept.
        absent: Layer between the linear ones that mixes tokens. The FFN is pointwise where it is None or an identity.
        attribute: Attribute that holds the FFN, an ``nn.Sequential``, if cls is the block around it.
        inline: Whether cls is a block with its own linear layers in place of an FFN module.

    Raises:
        TypeError: cls is not a module class, or a part is not a string.
        ValueError: cls inherits its ``forward()``, or drop has more than two names.
    """
    spec = FfnSpec(first, act, last, value, packed, norm, drop, before, after, absent, attribute, inline)
    for part, names in spec._asdict().items():
        kind = type(FfnSpec._field_defaults[part])
        if not isinstance(names, kind):
            raise TypeError(f'{part} must be a {kind.__name__}, got {names!r}.')
    if len(drop.split()) > 2:
        raise ValueError(f'drop must be at most two names, got {drop!r}.')
    _FFNS[_registered_name(cls)] = spec


def register_block(
        cls: Union[Type[nn.Module], str],
        norm: str = 'norm2',
        mlp: str = 'mlp',
        ls: str = 'ls2',
) -> None:
    """Register a class of blocks whose ``forward()`` adds ``ls(mlp(norm(x)))`` to x, possibly with stochastic depth.

    :func:`timm_rep.convert_to_repa` needs it where norm and layer scale become a part of the FFN: to train, and
    annealed with ``norm='batch'``. Subclasses follow the rule of :func:`register_ffn`.

    Args:
        cls: The class, or its qualified name.
        norm: Attribute that holds the norm before the FFN.
        mlp: Attribute that holds the FFN.
        ls: Attribute that holds the layer scale. A block may have no such attribute; a layer scale that is a parameter
            stays in the block.

    Raises:
        TypeError: cls is not a module class.
        ValueError: cls inherits its ``forward()``.
    """
    _BLOCKS[_registered_name(cls)] = norm, mlp, ls


def ffn_spec(cls: Type[nn.Module]) -> Union[FfnSpec, str, None]:
    """The registered FFN class, a reason why the class is not pointwise, or None for any other module."""
    found = _FFNS.get(class_name(cls))
    if found is None and any(f'{c.__module__}.{c.__qualname__}' in _FFNS for c in cls.__mro__):
        return 'has a forward() of its own: add its class with timm_rep.convert.register_ffn()'
    return found


class Block(NamedTuple):
    """A block that adds ``ls(mlp(norm(x)))`` to x.

    Attributes:
        path: Name of the block in the model.
        module: The block.
        norm: Attribute that holds the norm.
        mlp: Attribute that holds the FFN.
        ls: Attribute that holds the layer scale, if the block has one.
    """
    path: str
    module: nn.Module
    norm: str
    mlp: str
    ls: str


def find_blocks(model: nn.Module) -> Iterator[Block]:
    """The blocks of registered classes, see :func:`timm_rep.convert.register_block`, whatever the type of their FFN."""
    for path, module in model.named_modules():
        norm, mlp, ls = _BLOCKS.get(class_name(type(module)), ('', '', ''))
        missing = [name for name in (norm, mlp) if name and not hasattr(module, name)]
        if missing:
            raise ValueError(
                f'{type(module).__name__} must have the attributes that it was registered with, but has no '
                f'{missing[0]!r}: check the arguments of timm_rep.convert.register_block().')
        if mlp and getattr(module, mlp) is not None:
            yield Block(path, module, norm, mlp, ls)


_BUILT_IN: Tuple[Tuple[str, Dict[str, Any]], ...] = (
    ('layers.mlp.Mlp', dict(norm='norm', drop='drop1 drop2')),
    ('layers.mlp.ConvMlp', dict(first='fc1 norm')),
    ('layers.mlp.GluMlp', dict(norm='norm', packed=True)),
    ('layers.mlp.SwiGLU', dict(first='fc1_g', value='fc1_x', norm='norm')),
    ('models.efficientformer.ConvMlpWithNorm', dict(first='fc1 norm1', last='fc2 norm2')),
    ('models.efficientformer_v2.ConvMlpWithNorm', dict(
        first='fc1.conv fc1.bn', act='fc1.bn.act', last='fc2.conv fc2.bn', absent='mid')),
    ('models.efficientvim.FFN', dict(first='fc1.conv fc1.norm', act='fc1.act', last='fc2.conv fc2.norm')),
    ('models.efficientvit_msra.ConvMlp', dict(first='pw1', last='pw2')),
    ('models.fasternet.MLPBlock', dict(first='0 1', act='2', last='3', attribute='mlp')),
    ('models.fastvit.ConvMlp', dict(before='conv')),
    ('models.iformer.ConvBlock', dict(first='1', act='2', last='3', before='0', attribute='mixer.module')),
    ('models.iformer.FFN', dict(first='0', act='1', last='2', attribute='mixer.module')),
    ('models.inception_next.ConvMlp', dict(first='fc1 norm')),
    ('models.levit.LevitMlp', dict(first='ln1', last='ln2')),
    ('models.rdnet.Block', dict(first='2', act='3', last='4', before='0 1', attribute='layers')),
    ('models.rdnet.BlockESE', dict(first='2', act='3', last='4', before='0 1', after='5', attribute='layers')),
    ('models.repvit.RepVitMlp', dict(first='conv1', last='conv2')),
    ('models.shvit.FFN', dict(first='pw1', last='pw2')),
    ('models.starnet.Block', dict(first='f1', last='g', value='f2', inline=True)),
    ('models.swiftformer.ConvEncoder', dict(first='pwconv1', last='pwconv2', inline=True)),
    ('models.swiftformer.Mlp', dict(before='norm1')),
    ('models.tiny_vit.NormMlp', dict(before='norm')),
    ('models.visformer.SpatialMlp', dict(first='conv1', act='act1', last='conv3', absent='conv2')),
    ('models.vitamin.GeGluMlp', dict(first='w0', last='w2', value='w1', before='norm')),
)
for _name, _parts in _BUILT_IN:
    register_ffn(f'timm.{_name}', **_parts)

_FFNS.update({f'timm.{name}': reason for name, reason in {
    'layers.mlp.GatedMlp': 'gates with other positions (spatial gating unit)',
    'layers.mlp.GlobalResponseNormMlp': 'normalizes over all positions (global response norm)',
    'models.gemma4_vit.Gemma4GatedMlp': 'has clipped linear layers',
    'models.pvt_v2.MlpWithDepthwiseConv': 'has a depthwise convolution between its linear layers',
    'models.vision_transformer.DiffParallelScalingBlock': 'computes FFN and attention with one matrix',
    'models.vision_transformer.ParallelScalingBlock': 'computes FFN and attention with one matrix',
}.items()})

for _name in (
        'beit.Block', 'cait.LayerScaleBlock', 'cait.LayerScaleBlockClassAttn', 'convit.Block', 'davit.ChannelBlock',
        'davit.SpatialBlock', 'eva.EvaBlock', 'gcvit.GlobalContextVitBlock', 'hiera.HieraBlock',
        'hieradet_sam2.MultiScaleBlock', 'maxxvit.ParallelPartitionAttention', 'maxxvit.PartitionAttentionCl',
        'nest.TransformerLayer', 'swin_transformer.SwinTransformerBlock', 'twins.Block', 'vision_transformer.Block',
        'vision_transformer_relpos.RelPosBlock', 'vision_transformer_sam.Block', 'volo.ClassBlock', 'volo.Outlooker',
        'volo.Transformer'):
    register_block(f'timm.models.{_name}')
for _name in ('mlp_mixer.MixerBlock', 'mlp_mixer.ResBlock', 'sequencer.Sequencer2dBlock'):
    register_block(f'timm.models.{_name}', mlp='mlp_channels')
register_block('timm.models.convnext.ConvNeXtBlock', norm='norm', ls='gamma')
register_block('timm.models.metaformer.MetaFormerBlock', ls='layer_scale2')
