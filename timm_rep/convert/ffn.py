"""RePa FFNs in the blocks of timm models: the registered RePaFormers, and any model whose FFNs are timm's Mlp.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`, equation 3.
"""
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch.nn as nn
from timm.layers import LayerScale, LayerScale2d, Mlp
from timm.models.metaformer import Scale

from timm_rep.layers import RePaMlp, RePaMlpDeploy, active_channels, idle_ratios

from .pointwise import plain_ratio, ratios_of
from .report import ConversionReport, ConvertedFfn

__all__ = [
    'Ffn',
    'affine_names',
    'batch_norm_like',
    'check_batch_norm',
    'find_ffns',
    'find_supported_ffns',
    'take_layer_scale',
    'use_repa_ffns',
]

# timm's block classes whose forward() adds ls(mlp(norm(x))) to x: their names for norm, MLP and layer scale
_NAMES = ('norm2', 'mlp', 'ls2')
_BLOCKS: Dict[str, Tuple[str, str, str]] = {
    'beit.Block': _NAMES,
    'cait.LayerScaleBlock': _NAMES,
    'cait.LayerScaleBlockClassAttn': _NAMES,
    'convit.Block': _NAMES,
    'convnext.ConvNeXtBlock': ('norm', 'mlp', 'gamma'),
    'davit.ChannelBlock': _NAMES,
    'davit.SpatialBlock': _NAMES,
    'eva.EvaBlock': _NAMES,
    'gcvit.GlobalContextVitBlock': _NAMES,
    'hiera.HieraBlock': _NAMES,
    'hieradet_sam2.MultiScaleBlock': _NAMES,
    'maxxvit.ParallelPartitionAttention': _NAMES,
    'maxxvit.PartitionAttentionCl': _NAMES,
    'metaformer.MetaFormerBlock': ('norm2', 'mlp', 'layer_scale2'),
    'mlp_mixer.MixerBlock': ('norm2', 'mlp_channels', 'ls2'),
    'mlp_mixer.ResBlock': ('norm2', 'mlp_channels', 'ls2'),
    'nest.TransformerLayer': _NAMES,
    'sequencer.Sequencer2dBlock': ('norm2', 'mlp_channels', 'ls2'),
    'swin_transformer.SwinTransformerBlock': _NAMES,
    'twins.Block': _NAMES,
    'vision_transformer.Block': _NAMES,
    'vision_transformer_relpos.RelPosBlock': _NAMES,
    'vision_transformer_sam.Block': _NAMES,
    'volo.ClassBlock': _NAMES,
    'volo.Outlooker': _NAMES,
    'volo.Transformer': _NAMES,
}


class Ffn(NamedTuple):
    """FFN of a block.

    Attributes:
        path: Name of the block in the model.
        block: The block.
        norm: Attribute of the block that holds the norm before the MLP.
        mlp: Attribute that holds the MLP.
        ls: Attribute that holds the layer scale, if the block has one.
    """
    path: str
    block: nn.Module
    norm: str
    mlp: str
    ls: str


def _attribute_names(block: nn.Module) -> Optional[Tuple[str, str, str]]:
    """Attributes of a known block that hold norm, MLP and layer scale, None of any other module."""
    if hasattr(block, 'ffn_names'):
        return block.ffn_names
    # a subclass with a forward() of its own may use them differently
    cls = next(c for c in type(block).__mro__ if 'forward' in vars(c))
    return _BLOCKS.get(f'{cls.__module__}.{cls.__qualname__}'.removeprefix('timm.models.'))


def find_ffns(model: nn.Module) -> List[Ffn]:
    """The FFNs of all blocks of known classes, whatever the type of their MLP.

    A block class declares its attributes as ``ffn_names = (norm, mlp, layer scale)``, or is in the table of this file.
    """
    named = ((path, block, _attribute_names(block)) for path, block in model.named_modules())
    return [Ffn(path, block, *names) for path, block, names in named if names and getattr(block, names[1]) is not None]


def _unsupported(model: nn.Module, ffns: List[Ffn]) -> List[str]:
    """Descriptions of the FFNs that cannot be converted: MLPs of other types, and unknown blocks with an MLP."""
    known = {ffn.block for ffn in ffns}
    return [
        f'{ffn.path}.{ffn.mlp} is a {type(mlp).__name__}'
        for ffn in ffns for mlp in [getattr(ffn.block, ffn.mlp)] if type(mlp) is not Mlp
    ] + [
        f'{path} is a {type(block).__name__}'
        for path, block in model.named_modules()
        if block not in known and hasattr(block, 'norm1') and isinstance(getattr(block, 'mlp', None), nn.Module)
    ]


def find_supported_ffns(model: nn.Module) -> List[Ffn]:
    """The FFNs of a model whose blocks are all known and whose MLPs are all ``timm.layers.Mlp``.

    Raises:
        ValueError: The model has no such FFN, or others beside them, which are named.
    """
    ffns = find_ffns(model)
    unsupported = _unsupported(model, ffns)
    if unsupported or not ffns:
        more = f' and {len(unsupported) - 5} more' if len(unsupported) > 5 else ''
        raise ValueError(
            f"Cannot convert {type(model).__name__}, nothing was changed. Its FFNs must be timm.layers.Mlp, each "
            "between a norm and a shortcut in a block of timm's, but "
            + (f'{", ".join(unsupported[:5])}{more}.' if unsupported else 'it has none.'))
    return ffns


def affine_names(norm: nn.Module) -> Dict[str, str]:
    """Names of scale and shift in the state dict of a norm, with those of a BatchNorm."""
    renames = {'alpha': 'weight', 'beta': 'bias'}  # ResMLP's Affine
    names = {name: renames.get(name, name) for name in norm.state_dict()}
    return {name: affine for name, affine in names.items() if affine in ('weight', 'bias')}


def check_batch_norm(bn_momentum: Optional[float], bn_eps: float) -> None:
    """Check the arguments of BatchNorms.

    Raises:
        ValueError: One is out of range.
    """
    if not bn_eps > 0 or not (bn_momentum is None or 0 <= bn_momentum <= 1):
        raise ValueError(
            f'bn_eps must be positive and bn_momentum from 0 to 1 (or None), got bn_eps={bn_eps}, '
            f'bn_momentum={bn_momentum}.')


def batch_norm_like(
        norm: nn.Module,
        linear: Union[nn.Linear, nn.Conv2d],
        bn_momentum: Optional[float],
        bn_eps: float,
        outputs: bool = False,
) -> nn.modules.batchnorm._BatchNorm:
    """A BatchNorm for the inputs or outputs of a linear layer, with the scale and shift of another norm.

    Args:
        norm: Norm over the same channels, or an identity.
        linear: Linear layer, or 1 x 1 convolution for images, whose device and dtype it takes.
        bn_momentum: Momentum.
        bn_eps: Epsilon.
        outputs: Whether it normalizes the outputs of the layer, not its inputs.
    """
    weight = linear.weight
    bn = (nn.BatchNorm2d if isinstance(linear, nn.Conv2d) else nn.BatchNorm1d)(
        weight.shape[0 if outputs else 1], eps=bn_eps, momentum=bn_momentum, device=weight.device, dtype=weight.dtype)
    own, old = bn.state_dict(), norm.state_dict()
    for name, affine in affine_names(norm).items():
        if old[name].numel() == own[affine].numel():
            own[affine] = old[name].reshape(-1)
    bn.load_state_dict(own)
    frozen = [not p.requires_grad for p in norm.parameters()]
    return bn.requires_grad_(not frozen or not all(frozen))


def take_layer_scale(block: nn.Module, name: str, use_conv: bool) -> Optional[nn.Module]:
    """Replace the layer scale of a block by an identity.

    Returns:
        The layer scale as timm's LayerScale, or LayerScale2d with use_conv; None if the block has none that can move.
    """
    ls = getattr(block, name, None)
    gamma = {LayerScale: 'gamma', LayerScale2d: 'gamma', Scale: 'scale'}.get(type(ls))
    if gamma is None:
        return None
    setattr(block, name, nn.Identity())
    moved = (LayerScale2d if use_conv else LayerScale)(getattr(ls, gamma).numel(), device='meta')
    moved.gamma = getattr(ls, gamma)
    return moved.train(ls.training)


def _repa_mlp(ffn: Ffn, idle_ratio: float, bn_momentum: float, bn_eps: float) -> RePaMlp:
    """The training structure with the linear layers, dropout, norm scales and layer scale of an FFN of timm's."""
    mlp: Mlp = getattr(ffn.block, ffn.mlp)
    use_conv = isinstance(mlp.fc1, nn.Conv2d)
    hidden_features, in_features = mlp.fc1.weight.shape[:2]
    repa = RePaMlp(
        in_features,
        hidden_features,
        idle_ratio=idle_ratio,
        act_layer=lambda: mlp.act,
        use_conv=use_conv,
        device='meta',  # every parameter is replaced below
    )
    repa.norm1 = batch_norm_like(getattr(ffn.block, ffn.norm), mlp.fc1, bn_momentum, bn_eps)
    repa.norm2 = batch_norm_like(mlp.norm, mlp.fc1, bn_momentum, bn_eps, outputs=True)
    repa.fc1, repa.fc2, repa.drop1, repa.drop2 = mlp.fc1, mlp.fc2, mlp.drop1, mlp.drop2
    repa.ls = take_layer_scale(ffn.block, ffn.ls, use_conv) or nn.Identity()
    return repa.train(mlp.training)


def _repa_mlp_deploy(ffn: Ffn, idle_ratio: float) -> RePaMlpDeploy:
    """The deploy structure of the size of an FFN of timm's, its weights newly initialized."""
    mlp: Mlp = getattr(ffn.block, ffn.mlp)
    use_conv = isinstance(mlp.fc1, nn.Conv2d)
    take_layer_scale(ffn.block, ffn.ls, use_conv)
    hidden_features, in_features = mlp.fc1.weight.shape[:2]
    return RePaMlpDeploy(
        in_features,
        hidden_features,
        idle_ratio=idle_ratio,
        act_layer=lambda: mlp.act,
        use_conv=use_conv,
        device=mlp.fc1.weight.device,
        dtype=mlp.fc1.weight.dtype,
    ).train(mlp.training)


def _ratios(ffns: Sequence[Ffn], idle_ratio: Union[float, Sequence[float]], idle_schedule: str) -> List[float]:
    """The idle ratio of every FFN.

    Raises:
        ValueError: One is out of range, or there are several, but not one for each FFN.
    """
    given = plain_ratio(idle_ratio)
    if not isinstance(given, list):
        return idle_ratios(len(ffns), given, idle_schedule)
    if idle_schedule != 'constant':
        raise ValueError(
            f"With several idle ratios, idle_schedule is 'constant', got {idle_ratio!r} and {idle_schedule!r}.")
    ratios = ratios_of([ffn.path for ffn in ffns], given)
    if None in ratios:
        raise ValueError('This conversion changes all FFNs, each needs an idle ratio: got None for one.')
    for ratio in ratios:
        active_channels(1, ratio)
    return ratios


def use_repa_ffns(
        model: nn.Module,
        idle_ratio: Union[float, Sequence[float]] = 0.75,
        idle_schedule: str = 'constant',
        bn_momentum: float = 0.1,
        bn_eps: float = 1e-5,
        reparameterized: bool = False,
) -> ConversionReport:
    """Replace the FFNs in the blocks of a timm model by RePa FFNs, in place.

    In each block a RePaMlp takes the place of the MLP and includes its norm and layer scale, whose places hold
    identities; shortcut and stochastic depth stay the block's. Linear layers, dropout and activation are the MLP's own.

    Args:
        model: Model whose FFNs are all ``timm.layers.Mlp``.
        idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1; or one for each FFN.
        idle_schedule: 'constant' or 'linear' over all FFNs, see :func:`timm_rep.layers.idle_ratios`; 'constant' with
            several ratios.
        bn_momentum: Momentum of the BatchNorms.
        bn_eps: Epsilon of the BatchNorms.
        reparameterized: Use the deploy structure, with new weights, for checkpoints of a folded model.

    Returns:
        The report.

    Raises:
        ValueError: The model has no such FFN, or others beside them, which are named; or an argument is out of range.
            The model is unchanged.
    """
    ffns = find_supported_ffns(model)
    ratios = _ratios(ffns, idle_ratio, idle_schedule)
    check_batch_norm(bn_momentum, bn_eps)
    converted = []
    for ffn, ratio in zip(ffns, ratios):
        hidden_features = getattr(ffn.block, ffn.mlp).fc1.weight.shape[0]
        converted.append(
            ConvertedFfn(f'{ffn.path}.{ffn.mlp}', hidden_features, active_channels(hidden_features, ratio)))
        mlp = _repa_mlp_deploy(ffn, ratio) if reparameterized else _repa_mlp(ffn, ratio, bn_momentum, bn_eps)
        setattr(ffn.block, ffn.mlp, mlp)
        setattr(ffn.block, ffn.norm, nn.Identity())
    return ConversionReport(converted, {})
