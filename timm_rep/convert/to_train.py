"""RePa FFNs to train: the registered RePaFormers, and any model with FFNs of two linear layers.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`, equation 3.
"""
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch.nn as nn
from timm.layers import LayerScale, LayerScale2d
from timm.models.metaformer import Scale
from timm.models.naflexvit import NaFlexVit

from timm_rep.layers import RePaMlp, active_channels

from ._reparameterize import add_reparameterize
from .calibration import attended_tokens
from .ffn import Ffn, check_untied, find_ffns, ratios_of
from .ffn_classes import find_blocks
from .report import ConversionReport, ConvertedFfn


def find_trainable_ffns(model: nn.Module) -> List[Ffn]:
    """The FFNs of a model; a ValueError unless each can become a RePaMlp with norm and layer scale of its block."""
    ffns, reasons = find_ffns(model)
    reasons.update({ffn.name: reason for ffn in ffns if (reason := ffn.unsupported_training_reason())})
    known = {ffn.module for ffn in ffns}
    for block in find_blocks(model):
        name, mlp = f'{block.path}.{block.mlp}'.lstrip('.'), getattr(block.module, block.mlp)
        if mlp not in known:
            reasons.setdefault(name, f'is a {type(mlp).__name__}, whose class is not registered as an FFN')
    if reasons or not ffns:
        named = [f'{name} {reason}' for name, reason in list(reasons.items())[:5]]
        more = f' and {len(reasons) - 5} more' if len(reasons) > 5 else ''
        raise ValueError(
            f'Each FFN of {type(model).__name__} must be two linear layers with an activation, such as '
            'timm.layers.Mlp, between the norm and the shortcut of a known block, but '
            + (f'{", ".join(named)}{more}. Convert it with calibration instead.' if named else 'the model has none.')
            + ' Nothing was changed.')
    check_untied(model, ffns)
    return ffns


def affine_names(norm: nn.Module) -> Dict[str, str]:
    """Names of scale and shift in the state dict of a norm, mapped to their names in a BatchNorm."""
    renames = {'alpha': 'weight', 'beta': 'bias'}  # ResMLP's Affine
    names = {name: renames.get(name, name) for name in norm.state_dict()}
    return {name: affine for name, affine in names.items() if affine in ('weight', 'bias')}


def check_batch_norm(bn_momentum: Optional[float], bn_eps: float) -> None:
    """Check the arguments of BatchNorms."""
    if not _is_number(bn_eps) or not 0 < bn_eps < float('inf'):
        raise ValueError(f'bn_eps must be a positive number, got {bn_eps!r}.')
    if bn_momentum is not None and not (_is_number(bn_momentum) and 0 <= bn_momentum <= 1):
        raise ValueError(f'bn_momentum must be a number from 0 to 1 or None, got {bn_momentum!r}.')


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def batch_norm_like(
        norm: Optional[nn.Module],
        linear: Union[nn.Linear, nn.Conv2d],
        bn_momentum: Optional[float],
        bn_eps: float,
        outputs: bool = False,
) -> nn.modules.batchnorm._BatchNorm:
    """A BatchNorm for the inputs of a linear layer, or with ``outputs`` its outputs, that takes over a given norm."""
    weight = linear.weight
    bn = (nn.BatchNorm2d if isinstance(linear, nn.Conv2d) else nn.BatchNorm1d)(
        weight.shape[0 if outputs else 1], eps=bn_eps, momentum=bn_momentum, device=weight.device, dtype=weight.dtype)
    if norm is None:
        return bn
    own, old = bn.state_dict(), norm.state_dict()
    for name, affine in affine_names(norm).items():
        if old[name].numel() == own[affine].numel():
            own[affine] = old[name].reshape(-1)
    own.update({name: old[name] for name in ('running_mean', 'running_var', 'num_batches_tracked') if name in old})
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
    if ls is None or gamma is None:
        return None
    setattr(block, name, nn.Identity())
    moved = (LayerScale2d if use_conv else LayerScale)(getattr(ls, gamma).numel(), device='meta')
    moved.gamma = getattr(ls, gamma)
    return moved.train(ls.training)


def _repa_mlp(ffn: Ffn, idle_ratio: float, bn_momentum: Optional[float], bn_eps: float) -> RePaMlp:
    """The training structure with the linear layers, dropouts, norm scales and layer scale of an FFN."""
    block, = ffn.blocks
    repa = RePaMlp(
        ffn.in_features,
        ffn.hidden_features,
        idle_ratio=idle_ratio,
        act_layer=lambda: ffn.module.get_submodule(ffn.act_name),
        use_conv=ffn.use_conv,
        device='meta',  # every parameter is replaced below
    )
    repa.fc1, repa.fc2 = ffn.first, ffn.last
    repa.drop1, repa.drop2 = ffn.drops
    repa.norm1 = batch_norm_like(getattr(block.module, block.norm), repa.fc1, bn_momentum, bn_eps)
    repa.norm2 = batch_norm_like(ffn.hidden_norm, repa.fc1, bn_momentum, bn_eps, outputs=True)
    repa.ls = take_layer_scale(block.module, block.ls, ffn.use_conv) or nn.Identity()
    repa.train(ffn.module.training)
    old = getattr(block.module, block.norm)
    if isinstance(old, nn.modules.batchnorm._BatchNorm):
        repa.norm1.train(old.training)
    return repa


def _set_valid_tokens(name: str, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Set which tokens of a RePaMlp's next input are not padding; a forward pre-hook of its block."""
    mlp = getattr(block, name)
    if isinstance(mlp, RePaMlp):  # also without a mask: an interrupted forward pass leaves its own
        mlp.valid_tokens = attended_tokens(kwargs.get('attn_mask')) if mlp.training else None


def use_repa_ffns(
        model: nn.Module,
        idle_ratio: Union[float, Sequence[float]] = 0.75,
        idle_schedule: str = 'constant',
        bn_momentum: Optional[float] = 0.1,
        bn_eps: float = 1e-5,
        reparameterized: bool = False,
) -> ConversionReport:
    """Replace the FFNs in the blocks of a timm model by RePa FFNs to train, in place.

    In each block a RePaMlp takes the place of the FFN and includes its norm and layer scale, which are replaced by
    ``nn.Identity``; shortcut, stochastic depth, and a layer scale that is a parameter of the block (BEiT, CaiT,
    ConvNeXt, EVA) stay in the block. Linear layers, dropouts, activation, and scale and shift of the norm are kept.
    Idle channels and batch statistics change the function, so the model has to be trained. Padded patches of a
    NaFlexViT are excluded from the batch statistics.

    Args:
        model: Model whose FFNs are all two linear layers with an activation, such as ``timm.layers.Mlp``.
        idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1; or one per FFN.
        idle_schedule: 'constant' or 'linear' over all FFNs, see :func:`timm_rep.layers.idle_ratios`; 'constant' with
            several ratios.
        bn_momentum: Momentum of the BatchNorms; None for a cumulative average.
        bn_eps: Epsilon of the BatchNorms.
        reparameterized: Use the deploy structure, with new weights, for checkpoints of a folded model.

    Returns:
        The report.

    Raises:
        ValueError: The model has no such FFN, others too, which are named, or one with a tied parameter; or an argument
            is out of range. The model is unchanged.

    Examples:
        >>> model = timm.create_model('vit_tiny_patch16_224', embed_dim=48, num_heads=3, depth=3)
        >>> report = use_repa_ffns(model, [0.5, 0.75, 0.9])
        >>> [ffn.active_features for ffn in report.ffns]    # of 192 hidden channels
        [96, 48, 20]
    """
    ffns = find_trainable_ffns(model)
    names = [ffn.name for ffn in ffns]
    ratios = ratios_of(names, idle_ratio, idle_schedule)
    numbers = [ratio for ratio in ratios if ratio is not None]
    if len(numbers) < len(ratios):
        raise ValueError(
            f'idle_ratio must be a number for each FFN of a model to train, got None for {names[ratios.index(None)]}.')
    check_batch_norm(bn_momentum, bn_eps)
    is_naflex = any(isinstance(m, NaFlexVit) for m in model.modules())
    converted = []
    for ffn, ratio in zip(ffns, numbers):
        block, = ffn.blocks
        active = active_channels(ffn.hidden_features, ratio)
        if reparameterized:
            take_layer_scale(block.module, block.ls, ffn.use_conv)
            mlp = ffn.replacement(active, ffn.module.get_submodule(ffn.act_name))
        else:
            mlp = _repa_mlp(ffn, ratio, bn_momentum, bn_eps)
            if is_naflex:
                block.module.register_forward_pre_hook(partial(_set_valid_tokens, block.mlp), with_kwargs=True)
        setattr(block.module, block.mlp, mlp)
        setattr(block.module, block.norm, nn.Identity())
        converted.append(ConvertedFfn(ffn.name, ffn.hidden_features, active))
    add_reparameterize(model)
    return ConversionReport(converted, {})
