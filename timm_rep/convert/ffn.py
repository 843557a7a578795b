"""Any timm model whose FFNs are timm's Mlp, made a RePaFormer."""
from functools import cache, partial
from typing import Dict, List, NamedTuple, Tuple

import torch.nn as nn
from timm.layers import LayerScale, LayerScale2d, Mlp
from timm.utils import unwrap_model

from timm_rep.layers import RePaMlp, idle_ratios

from .reparameterize import ReparameterizeMixin

__all__ = ['Ffn', 'convert_to_repa', 'find_ffns']

# timm's classes with a forward() of the form x + ...(mlp(norm(x))), and their names for norm, mlp and layer scale
_NAMES = ('norm2', 'mlp', 'ls2')
_BLOCKS: Dict[str, Tuple[str, str, str]] = {
    'beit.Block': _NAMES,
    'cait.LayerScaleBlock': _NAMES,
    'cait.LayerScaleBlockClassAttn': _NAMES,
    'convit.Block': _NAMES,
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
    'timm_rep.models.repa_lvvit.LvVitBlock': _NAMES,
    'volo.ClassBlock': _NAMES,
    'volo.Outlooker': _NAMES,
    'volo.Transformer': _NAMES,
}


class Ffn(NamedTuple):
    """The FFN of a block: its name in the model, the block, and its names for the norm, the MLP and a layer scale."""
    path: str
    block: nn.Module
    norm: str
    mlp: str
    ls: str


def _class_name(block: nn.Module) -> str:
    """The class that a block's forward() is from, as it is written above."""
    cls = next(c for c in type(block).__mro__ if 'forward' in vars(c))
    return f'{cls.__module__}.{cls.__qualname__}'.removeprefix('timm.models.')


def find_ffns(model: nn.Module) -> List[Ffn]:
    """The FFNs of all blocks of timm's that are known here, whatever their MLP is; a block may have none."""
    classes = ((path, block, _class_name(block)) for path, block in model.named_modules())
    return [Ffn(path, block, *_BLOCKS[name]) for path, block, name in classes if name in _BLOCKS]


def _strangers(model: nn.Module, ffns: List[Ffn]) -> List[str]:
    """What cannot be converted: other MLPs, and other blocks with something called so."""
    known = {f.block for f in ffns}
    return [
        f'{f.path}.{f.mlp} is a {type(mlp).__name__}'
        for f in ffns for mlp in [getattr(f.block, f.mlp)] if type(mlp) is not Mlp
    ] + [
        f'{path} is a {type(block).__name__}'
        for path, block in model.named_modules()
        if block not in known and hasattr(block, 'norm1') and isinstance(getattr(block, 'mlp', None), nn.Module)
    ]


def _keep_affine(norm: nn.Module, old: nn.Module) -> None:
    """Give a BatchNorm what it can take from the norm of the same channels that it replaces."""
    own = norm.state_dict()
    renames = {'alpha': 'weight', 'beta': 'bias'}  # of ResMLP's Affine
    for name, value in old.state_dict().items():
        name = renames.get(name, name)
        if name in own and value.numel() == own[name].numel():
            own[name] = value.reshape(own[name].shape)
    norm.load_state_dict(own)
    frozen = [not p.requires_grad for p in old.parameters()]
    norm.requires_grad_(not frozen or not all(frozen))


def _repa_mlp(mlp: Mlp, norm: nn.Module, ls: nn.Module, norm_args: Dict[str, float], **kwargs) -> RePaMlp:
    use_conv = isinstance(mlp.fc1, nn.Conv2d)
    in_features, hidden_features = mlp.fc1.weight.shape[1::-1]
    repa = RePaMlp(
        in_features,
        hidden_features,
        act_layer=lambda: mlp.act,
        norm_layer=partial(nn.BatchNorm2d if use_conv else nn.BatchNorm1d, **norm_args),
        use_conv=use_conv,
        shortcut=False,
        device=mlp.fc1.weight.device,
        dtype=mlp.fc1.weight.dtype,
        **kwargs,
    )
    repa.fc1, repa.fc2, repa.drop1, repa.drop2 = mlp.fc1, mlp.fc2, mlp.drop1, mlp.drop2
    _keep_affine(repa.norm1, norm)
    _keep_affine(repa.norm2, mlp.norm)
    if isinstance(ls, (LayerScale, LayerScale2d)):
        repa.ls = ls
    return repa.train(mlp.training)


class _Converted(ReparameterizeMixin):
    """A model of a class of timm's with RePa FFNs in its blocks."""
    # create_model() builds the plain one
    _registered = False

    def __reduce_ex__(self, protocol: int):
        # pickle looks classes up by their names, and those made here have none
        return _new, (type(self).__bases__[1],), self.__dict__


@cache
def _converted_class(cls: type) -> type:
    return type(f'RePa{cls.__name__}', (_Converted, cls), {'__module__': cls.__module__})


def _new(cls: type) -> nn.Module:
    converted = _converted_class(cls)
    return converted.__new__(converted)


def convert_to_repa(
        model: nn.Module,
        idle_ratio: float = 0.75,
        idle_schedule: str = 'constant',
        bn_momentum: float = 0.1,
        bn_eps: float = 1e-5,
) -> nn.Module:
    """Make a RePaFormer of a timm model whose FFNs are ``timm.layers.Mlp``, in place, for training (eq. 3).

    DeiT, DeiT-III, BEiT, CaiT, EVA without GLU, Swin, PoolFormer, MLP-Mixer, ResMLP, MaxViT, Hiera, ... Every weight
    that has a place stays: both linear layers, the layer scale, dropout and stochastic depth, and as scale and shift of
    the BatchNorms those of the norms that they replace. Idle channels and batch statistics make it another function, so
    it has to be trained; then ``model.reparameterize()`` folds it. Shortcuts stay in the blocks, which are timm's own,
    and so does a layer scale that is a parameter of the block (BEiT, CaiT, EVA): each costs a pass over the tokens.
    Optimizers are to be made afterwards.

    Args:
        model: A timm model, not wrapped.
        idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1.
        idle_schedule: 'constant' or 'linear' over all FFNs, see :func:`timm_rep.layers.idle_ratios`.
        bn_momentum: Momentum of the BatchNorms.
        bn_eps: Epsilon of the BatchNorms.

    Returns:
        The model, with a ``reparameterize()``.

    Raises:
        ValueError: There is no such FFN, or beside them there are others, GLUs for one: they are named, and the model
            is as it was. Or it is wrapped (DDP, torch.compile, features_only), or a RePaFormer already; or idle_ratio
            or idle_schedule is out of range.
    """
    if isinstance(model, ReparameterizeMixin):
        raise ValueError(f'{type(model).__name__} has structures to fold already.')
    if unwrap_model(model) is not model or isinstance(model, nn.ModuleDict):  # features_only makes the latter
        raise ValueError(f'{type(model).__name__} is a model in another one: convert it before you wrap it.')
    found = [f for f in find_ffns(model) if getattr(f.block, f.mlp) is not None]
    strangers = _strangers(model, found)
    if strangers or not found:
        raise ValueError(
            f'Cannot convert {type(model).__name__}, nothing was changed. Its FFNs should be timm.layers.Mlp, each '
            'between a norm and a shortcut in a block of timm\'s'
            + (f', but {_listed(strangers)}.' if strangers else ', and it has none.'))
    norm_args = dict(eps=bn_eps, momentum=bn_momentum)
    ratios = idle_ratios(len(found), idle_ratio, idle_schedule)
    converted = [
        _repa_mlp(getattr(f.block, f.mlp), getattr(f.block, f.norm), getattr(f.block, f.ls, None), norm_args,
                  idle_ratio=ratio)
        for f, ratio in zip(found, ratios)
    ]
    for f, mlp in zip(found, converted):
        setattr(f.block, f.mlp, mlp)
        setattr(f.block, f.norm, nn.Identity())
        if not isinstance(mlp.ls, nn.Identity):
            setattr(f.block, f.ls, nn.Identity())
    # the mixin keeps the arguments that create_model() noted elsewhere
    created_with = model.__dict__.pop('_model_args', {})
    model.__class__ = _converted_class(type(model))
    model._model_args = created_with
    return model


def _listed(strangers: List[str]) -> str:
    more = len(strangers) - 5
    return ', '.join(strangers[:5]) + (f' and {more} more' if more > 0 else '')
