"""Annealing: pretrained FFNs gradually become foldable RePa FFNs during training.

A state dict of the plain model loads into the annealed one.
"""
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import LayerScale, LayerScale2d, register_notrace_module

from timm_rep.layers import (
    Affine,
    AnnealedActivation,
    AnnealedNorm,
    active_channels,
    add_annealing_hooks,
    check_annealing,
)
from timm_rep.utils.modes import set_mode_of_others

from ._reparameterize import add_reparameterize, as_batch_norms, reparameterize
from .ffn import Ffn, ratios_of, replace_module
from .ffn_classes import find_linear
from .linearize import check_convertible
from .report import ConversionReport, ConvertedFfn
from .to_train import affine_names, batch_norm_like, check_batch_norm, find_trainable_ffns, take_layer_scale

_STRUCTURE_KEYS = {'ffn.': ('annealing',), 'fc_in.weight': ('deploy',), 'fc_idle.weight': ('deploy',)}


@register_notrace_module  # what it does depends on the step, and a traced one would not fold
class AnnealedFfn(nn.Module):
    """A pointwise FFN whose idle channels become linear, see :class:`timm_rep.layers.AnnealedActivation`.

    With a norm, it replaces norm, FFN and layer scale of a block, and the norm becomes a BatchNorm, see
    :class:`timm_rep.layers.AnnealedNorm`. Input and output have the shapes of the FFN's.
    """
    structure = 'annealing'
    structure_keys = _STRUCTURE_KEYS
    __jit_unused_properties__ = ('fc2',)

    def __init__(
            self,
            ffn: Ffn,
            active_features: int,
            anneal_steps: int,
            anneal_schedule: str = 'linear',
            norm: Optional[nn.Module] = None,
            ls: Optional[nn.Module] = None,
    ):
        """
        Args:
            ffn: The FFN; the activation in its module is replaced.
            active_features: Number of hidden channels that keep the activation.
            anneal_steps: Training steps until the FFN is foldable, an integer >= 2.
            anneal_schedule: 'linear' or 'cosine'.
            norm: Norm before the FFN, a BatchNorm or an AnnealedNorm; None if it stays in the block.
            ls: Layer scale after the FFN; None if it stays in the block.
        """
        super().__init__()
        kept = [*ffn.module.modules()]
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):  # which may be frozen
            kept.append(norm)
        self.norm = nn.Identity() if norm is None else norm
        self.ffn = ffn.module
        self.ls = nn.Identity() if ls is None else ls
        self.active_features = active_features
        self.pointwise = ffn
        ffn.module.set_submodule(ffn.act_name, AnnealedActivation(
            ffn.module.get_submodule(ffn.act_name),
            ffn.hidden_features,
            active_features,
            anneal_steps,
            anneal_schedule,
            gates=ffn.gated,
            dim=1 if ffn.use_conv else -1,
            device=find_linear(ffn.first).weight.device,
        ))
        set_mode_of_others(self, kept, ffn.module.training)

    @property
    def fc2(self) -> nn.Module:
        """The last layer, by its name in timm's Mlp: timm's ``init_weights()`` of some models scales it."""
        return self.pointwise.last

    @property
    def act(self) -> AnnealedActivation:
        """The annealed activation."""
        return self.ffn.get_submodule(self.pointwise.act_name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.act.has_ended:
            with torch.no_grad():
                # how much an error of a hidden channel changes the output: squared column norms of the last layer
                self.act.importance.copy_(find_linear(self.pointwise.last).weight.flatten(1).square().sum(0))
        return self.ls(self.ffn(self.norm(x)))

    @torch.no_grad()
    def fuse(self) -> nn.Module:
        """The deploy structure, as a new module: at most three matrices.

        Raises:
            ValueError: Annealing is not finished, a BatchNorm has no running statistics, or a layer was replaced by one
                that cannot be folded.
            OverflowError: A folded weight exceeds the range of the model's dtype.
        """
        with as_batch_norms(self):
            return self._fused()

    def _fused(self) -> nn.Module:
        ffn, annealed = self.pointwise, self.act
        annealed.check_end()
        reason = ffn.unsupported_reason()
        if reason:
            raise ValueError(f'Expected a pointwise FFN, but it {reason}.')
        first, out = find_linear(ffn.first).weight, ffn.fc_out()
        if isinstance(self.ls, (LayerScale, LayerScale2d)):
            out = out.scale_outputs(self.ls.gamma)
        active, idle = ((annealed.idle == i).nonzero().squeeze(1) for i in (False, True))
        deploy = ffn.matrices(self.active_features, ffn.unit(annealed.act), device='meta')
        slope, intercept = (v[idle].to(out.weight) for v in annealed.linear_fit())
        if deploy.has_idle:
            inner = self._after_norm(ffn.fc_in(idle))
            # keep the values of a gated unit only: its gates have become constants
            inner = Affine(*(v[-len(idle):] for v in inner))
            scale, shift = (intercept, 0 * intercept) if ffn.gated else (slope, intercept)
            inner = inner.scale_outputs(scale)
            inner = Affine(inner.weight, inner.bias + shift)
            Affine(out.weight[:, idle], out.bias).after(inner).write_to(deploy.fc_idle, like=first)
        if deploy.has_active:
            self._after_norm(ffn.fc_in(active)).write_to(deploy.fc_in, like=first)
            Affine(out.weight[:, active], out.bias).write_to(deploy.fc_out, like=first)
        # timm's reparameterize_model() does not recurse into the result of fuse(): fold the layers around the FFN here
        return reparameterize(ffn.around(deploy))

    def _after_norm(self, linear: Affine) -> Affine:
        if isinstance(self.norm, AnnealedNorm):
            return self.norm.affine_before(linear)
        return linear if isinstance(self.norm, nn.Identity) else linear.after_norm(self.norm)


def anneal_ffns(
        model: nn.Module,
        anneal_steps: int,
        idle_ratio: Union[float, Sequence[Optional[float]]] = 0.75,
        norm: str = 'keep',
        anneal_schedule: str = 'linear',
        bn_momentum: Optional[float] = 0.1,
        bn_eps: float = 1e-5,
) -> ConversionReport:
    """Gradually turn the FFNs of a pretrained model into foldable RePa FFNs during training, in place.

    The first step computes the original function; from step ``anneal_steps`` on the model folds exactly. A step is a
    forward pass ``model(x)`` in training mode; where training calls other methods of the model, call
    :func:`timm_rep.layers.advance_annealing` before each step. The annealing state lives in buffers, so an EMA of the
    model must copy integer buffers: timm's ModelEmaV3 does, and so do torch's AveragedModel and Lightning's callbacks
    with ``use_buffers=False``.

    Args:
        model: timm model.
        anneal_steps: Training steps until the model is foldable, an integer >= 2.
        idle_ratio: Share of the hidden channels of an FFN that become linear, from 0 to 1; or one per FFN, None to keep
            an FFN with norm='keep'.
        norm: 'keep', or 'batch' to turn the norms before the FFNs into BatchNorms too.
        anneal_schedule: 'linear' or 'cosine'.
        bn_momentum: Momentum of the BatchNorms; None for a cumulative average.
        bn_eps: Epsilon of the BatchNorms.

    Returns:
        The report.

    Raises:
        TypeError: model is not a module.
        ValueError: The model has no FFN that can be annealed or one with a tied parameter, or is wrapped, compiled or
            converted; norm='batch' and an FFN is not two linear layers in a known block; or an argument is out of
            range. The model is unchanged.

    Examples:
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=48, num_heads=3, depth=2)
        >>> report = anneal_ffns(model, anneal_steps=2)
        >>> for _ in range(2):  # training
        ...     y = model(torch.randn(2, 3, 32, 32))
        >>> before = sum(p.numel() for p in model.parameters())
        >>> folded = model.eval().reparameterize()
        >>> sum(p.numel() for p in folded.parameters()) < before
        True
    """
    check_annealing(anneal_steps, anneal_schedule)
    ffns, kept = check_convertible(model)
    ratios = ratios_of([ffn.name for ffn in ffns], idle_ratio)
    chosen = [
        (ffn, active_channels(ffn.hidden_features, ratio)) for ffn, ratio in zip(ffns, ratios) if ratio is not None]
    if not chosen:
        raise ValueError('idle_ratio must be a number for at least one FFN, got None for all of them.')
    for ffn, _ in chosen:
        if ffn.hidden_norm is not None:
            raise ValueError(
                f'Expected FFNs without a norm of their hidden features, but {ffn.name} has one: convert with '
                'calibration, or pass None as its idle ratio.')
    plain: Dict[int, List[str]] = {}  # a tied tensor has several names
    for name, value in model.state_dict(keep_vars=True).items():
        plain.setdefault(id(value), []).append(name)
    if norm == 'keep':
        for ffn, active in chosen:
            replace_module(model, ffn.module, AnnealedFfn(ffn, active, anneal_steps, anneal_schedule))
    elif norm == 'batch':
        _anneal_with_norms(model, chosen, anneal_steps, anneal_schedule, bn_momentum, bn_eps)
    else:
        raise ValueError(f"norm must be 'keep' or 'batch', got {norm!r}.")
    add_annealing_hooks(model)
    add_reparameterize(model)
    plain_names = {name: plain.get(id(value), []) for name, value in model.state_dict(keep_vars=True).items()}
    model.register_load_state_dict_pre_hook(partial(
        _take_plain_weights, {name: old for name, old in plain_names.items() if name not in old}))
    kept = {**kept, **{ffn.name: 'has no idle ratio' for ffn, ratio in zip(ffns, ratios) if ratio is None}}
    return ConversionReport([ConvertedFfn(ffn.name, ffn.hidden_features, active) for ffn, active in chosen], kept)


def _anneal_with_norms(
        model: nn.Module,
        chosen: Sequence[Tuple[Ffn, int]],
        anneal_steps: int,
        anneal_schedule: str,
        bn_momentum: Optional[float],
        bn_eps: float,
) -> None:
    check_batch_norm(bn_momentum, bn_eps)
    missing = {ffn.name for ffn in find_trainable_ffns(model)} - {ffn.name for ffn, _ in chosen}
    if missing:
        raise ValueError(
            f"idle_ratio must be a number for each FFN with norm='batch', got None for {sorted(missing)[0]}.")
    for ffn, active in chosen:
        block, = ffn.blocks
        norm = getattr(block.module, block.norm)
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            bn = batch_norm_like(norm, find_linear(ffn.first), bn_momentum, bn_eps)
            norm = AnnealedNorm(norm, bn, anneal_steps, anneal_schedule, ffn.use_conv)
        ls = take_layer_scale(block.module, block.ls, ffn.use_conv)
        setattr(block.module, block.norm, nn.Identity())
        setattr(block.module, block.mlp, AnnealedFfn(ffn, active, anneal_steps, anneal_schedule, norm, ls))


def _take_plain_weights(
        plain_names: Mapping[str, Sequence[str]],
        model: nn.Module,
        state_dict: Dict[str, Any],
        prefix: str,
        *args: Any,
) -> None:
    """Rename the entries of a plain model's state dict and add the model's own annealing state.

    A load_state_dict pre-hook. ``plain_names`` maps names in the annealed model to names in the plain one, None for
    entries that only the annealed one has.
    """
    own = model.state_dict()
    if any(prefix + name in state_dict or name not in own for name in plain_names):  # annealed or folded
        return
    taken = {
        name: state_dict[prefix + old] for name, names in plain_names.items()
        for old in names if prefix + old in state_dict}
    if not taken:
        return
    kept = {name: own[name] for name, names in plain_names.items() if not names}
    device = next(iter(taken.values())).device
    for layer_name, layer in model.named_modules():
        initial = layer.initial_state(device) if isinstance(layer, (AnnealedActivation, AnnealedNorm)) else {}
        kept.update({  # what a model on 'meta' does not hold
            f'{layer_name}.{name}': value.to(own[f'{layer_name}.{name}'].dtype) for name, value in initial.items()
            if own[f'{layer_name}.{name}'].is_meta})
        if isinstance(layer, AnnealedNorm):
            taken.update({
                f'{layer_name}.bn.{affine}': taken[f'{layer_name}.norm.{name}'].reshape(-1).clone()
                for name, affine in affine_names(layer.norm).items() if f'{layer_name}.norm.{name}' in taken})
    for old in {old for names in plain_names.values() for old in names} - own.keys():
        state_dict.pop(prefix + old, None)
    state_dict.update({prefix + name: value for name, value in {**kept, **taken}.items()})
