"""The pointwise FFNs of a model: two linear layers and an activation, or a gated unit, applied to each token alone."""
import copy
import re
from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.models.nextvit import merge_pre_bn

from timm_rep.layers import Affine, GatedUnit, RePaMlpDeploy, active_channels, idle_ratios, unfoldable_reason
from timm_rep.layers.fold import is_plain_batch_norm
from timm_rep.utils.modes import keeping_modes

from ._reparameterize import replace_modules
from .ffn_classes import Block, FfnSpec, affine_of, class_name, ffn_spec, find_blocks, find_linear

# MLPs of timm that are not block FFNs: position biases, squeeze and excitation, pooling and classifier heads; and MLPs
# over tokens, which RePaFormer leaves alone
_OTHER_ROLES = re.compile(
    r'(^|\.)(attn_pool|rel_pos|shared_rel_pos|meta_mlp|mlp_tokens|mlp_add|mlp_scale|attn\.attn|head|pre_logits)(\.|$)')

# blocks whose reparameterize() folds the norm before the FFN into ``mlp.fc1``
_NORM_FOLDING = ('timm.models.nextvit.NextConvBlock', 'timm.models.nextvit.NextTransformerBlock')


class _One(nn.Module):
    """Returns 1. Replaces the value layer of an inline gated block, whose first layer then computes the whole FFN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(())


class Ffn:
    """A pointwise FFN in a model: ``y = W2 g(u) + b2`` with the hidden features ``g(u)`` of each token.

    Attributes:
        name: Name of the module in the model.
        module: The FFN, or the block with the layers of one.
        class_name: Name of its class; of the block around a Sequential.
        in_features: Channels of u.
        hidden_features: Channels of g.
        out_features: Channels of y.
        use_conv: Whether channels are at dimension 1 (N, C, H, W) instead of the last one.
        hidden_norm: LayerNorm of the hidden features, None if the FFN has none.
        blocks: The blocks that it is the FFN of: one, unless it is shared; none if their class is not registered.
    """

    def __init__(self, name: str, module: nn.Module, spec: FfnSpec, cls: str, blocks: Sequence[Block] = ()):
        self.name, self.module, self._spec = name, module, spec
        self.class_name = cls.rpartition('.')[2]
        first, last = find_linear(self.first), find_linear(self.last)
        self.use_conv = isinstance(first, nn.Conv2d)
        self.in_features = first.weight.shape[1]
        self.out_features, self.hidden_features = last.weight.shape[:2]
        norm = getattr(module, spec.norm) if spec.norm else None
        self.hidden_norm = norm if isinstance(norm, nn.LayerNorm) else None
        self.blocks = tuple(blocks)

    def _layers(self, part: str) -> List[nn.Module]:
        return self._spec.layers(self.module, part)

    @property
    def first(self) -> nn.Module:
        """The layer whose input is u."""
        return self._layers('first')[0]

    @property
    def last(self) -> nn.Module:
        """The layer whose input is g."""
        return self._layers('last')[0]

    @property
    def output_layer(self) -> nn.Module:
        """The layer whose output is y."""
        return self._layers('last')[-1]

    @property
    def drops(self) -> List[nn.Module]:
        """Dropouts after the activation and after the last linear layer."""
        first, last, *_ = [*self._layers('drop'), nn.Identity(), nn.Identity()]
        return [first, last]

    @property
    def act_name(self) -> str:
        """Name of the activation in the module."""
        return self._spec.act

    @property
    def gated(self) -> bool:
        """Whether the hidden features are products of two linear maps of u, one of them activated."""
        return self._spec.packed or bool(self._spec.value)

    @property
    def channel_macs(self) -> int:
        """Multiply-accumulates of a hidden channel, for a token."""
        return self.in_features * (2 if self.gated else 1) + self.out_features

    def pruned_features(self, active_features: int) -> int:
        """Hidden channels of a two-matrix FFN with the multiply-accumulates of three with ``active_features``."""
        return min(self.hidden_features, active_features + self.in_features * self.out_features // self.channel_macs)

    def unsupported_reason(self) -> Optional[str]:
        """Reason why the module, which may have changed, is not a pointwise FFN; None if it is one."""
        return self._spec.unsupported_reason(self.module)

    def unsupported_training_reason(self) -> Optional[str]:
        """Reason why norm, FFN and layer scale of a block cannot become a RePaMlp; None if they can."""
        spec = self._spec
        chains = [self._layers('first'), self._layers('last')]
        plain = all(len(layers) == 1 and type(layers[0]) in (nn.Linear, nn.Conv2d) for layers in chains)
        if not plain or self.gated or any((spec.before, spec.after, spec.absent, spec.attribute, spec.inline)):
            return f'is a {type(self.module).__name__}, which is more than two linear layers and an activation'
        if len(self.blocks) != 1:
            return 'is shared by several blocks' if self.blocks else (
                'is in a block of a class that is not registered with timm_rep.convert.register_block()')
        block, = self.blocks
        norm = getattr(block.module, block.norm)
        for part in (block.norm, block.ls):  # both move into the FFN
            moved = getattr(block.module, part, None)
            reason = unfoldable_reason(moved) if isinstance(moved, nn.Module) else None
            if reason:
                return f'is in a block whose {part} {reason}'
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and not is_plain_batch_norm(norm):
            return f'follows a {type(norm).__name__}, which has an activation'
        kept = {
            id(m) for part in ('first', 'act', 'last', 'drop') for layer in self._layers(part) for m in layer.modules()}
        for name, m in self.module.named_modules():
            if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 and id(m) not in kept:
                return f'has a dropout that is not registered (drop={name!r})'
        return None

    @torch.no_grad()
    def matches_registered_parts(self) -> bool:
        """Whether the FFN equals the composition of its registered parts, checked on two random tokens in eval mode.

        The tokens are in a sequence, a map or alone, whichever the FFN takes. True where this cannot be checked: on the
        meta device, for inline FFNs, or if it takes none of these.
        """
        like = find_linear(self.first).weight
        if like.is_meta or self._spec.inline:
            return True
        copied = self.around(self.exact())
        shapes = [(1, 2), (1, 2, 1), (2,)]
        tokens = torch.randn(2, self.in_features, generator=torch.Generator().manual_seed(0), device='cpu').to(like)
        for x in [tokens.T[None, :, :, None]] if self.use_conv else [tokens.view(*s, self.in_features) for s in shapes]:
            with keeping_modes(self.module):
                try:
                    y, expected = self.module.eval()(x.clone()), copied.eval()(x.clone())
                except Exception:  # an FFN of the user may assert, or unpack, the shape of its input
                    continue
            tolerance = torch.finfo(like.dtype).eps ** 0.5
            return isinstance(y, torch.Tensor) and y.shape == expected.shape and bool(
                (y - expected).abs().max() <= tolerance * expected.abs().max())
        return True

    def _affine(self, part: str) -> Affine:
        try:
            return affine_of(self._layers(part))
        except ValueError as e:  # running statistics that are missing or not finite
            raise ValueError(f'{self.name}: {e}') from e

    def fc_in(self, channels: torch.Tensor) -> Affine:
        """The map of u to the given hidden channels before the activation; of a gated unit gates, then values."""
        maps = [self._affine(part) for part in ('first', 'value') if getattr(self._spec, part)]
        if self._spec.packed:
            half = self.hidden_features
            maps = [maps[0].outputs(0, half), maps[0].outputs(half)]
            if getattr(self.module, 'gate_last', False):
                maps.reverse()
        return Affine(*(torch.cat([parts[channels] for parts in group]) for group in zip(*maps)))

    def fc_out(self) -> Affine:
        """The map of the hidden features to the output."""
        return self._affine('last')

    def unit(self, act: nn.Module) -> nn.Module:
        """The map of gates and values, or of the output of the first layer, to hidden features."""
        return GatedUnit(act, dim=1 if self.use_conv else -1) if self.gated else act

    def act(self, channels: torch.Tensor) -> nn.Module:
        """The map of the output of :meth:`fc_in` to the hidden features of the given channels.

        A LayerNorm of the hidden features becomes one over these channels alone, which is a different function.
        """
        act = self.unit(self.module.get_submodule(self.act_name))
        if self.hidden_norm is None or not len(channels):
            return act
        old = self.hidden_norm
        norm = nn.LayerNorm(
            len(channels), eps=old.eps, elementwise_affine=old.elementwise_affine, bias=old.bias is not None,
            device='meta')
        for name, value in old.named_parameters():
            channels = channels.to(value.device)
            setattr(norm, name, nn.Parameter(value.detach()[channels], requires_grad=value.requires_grad))
        return nn.Sequential(act, norm)

    def matrices(
            self,
            active_features: int,
            act: Optional[nn.Module] = None,
            linear_path: bool = True,
            **dd: Any,
    ) -> RePaMlpDeploy:
        """A map of u to y of at most three matrices, with new weights.

        Args:
            active_features: Number of hidden channels that keep the activation.
            act: Map of the output of ``fc_in`` to the hidden features (default: of the first channels).
            linear_path: Whether a matrix replaces the idle channels; if False they are dropped.
            dd: Device and dtype of the new parameters (default: of the FFN).
        """
        like = find_linear(self.first).weight
        return RePaMlpDeploy(
            self.in_features,
            self.hidden_features if linear_path else active_features,
            active_features=active_features,
            out_features=self.out_features,
            gated=self.gated,
            act_layer=lambda: act or self.act(torch.arange(active_features)),
            use_conv=self.use_conv,
            **{'device': like.device, 'dtype': like.dtype, **dd},
        )

    def with_weights(
            self,
            active: torch.Tensor,
            fc_out: Optional[Affine] = None,
            linear: Optional[Affine] = None,
    ) -> RePaMlpDeploy:
        """:meth:`matrices` with the original first layer of the active channels and the given output maps.

        ``linear=None`` gives two matrices. ``fc_out=None`` leaves the layer fc_out on 'meta', so that only the hidden
        features can be computed.
        """
        new = self.matrices(len(active), self.act(active), linear is not None, device='meta')
        like = find_linear(self.last).weight
        if new.has_active:
            self.fc_in(active).write_to(new.fc_in, like=find_linear(self.first).weight)
            if fc_out is not None:
                fc_out.write_to(new.fc_out, like=like)
        if linear is not None:
            linear.write_to(new.fc_idle, like=like)
        return new.eval()

    def exact(self) -> RePaMlpDeploy:
        """The FFN as two matrices, which map u to y."""
        return self.with_weights(torch.arange(self.hidden_features), self.fc_out())

    def replacement(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The module that takes the place of the FFN: :meth:`matrices` between the layers that are kept."""
        return self.around(self.matrices(*args, **kwargs))

    def around(self, deploy: nn.Module) -> nn.Module:
        """The module that takes the place of the FFN, given the part between the layers that are kept."""
        deploy.train(self.module.training)
        if self._spec.inline:
            return self._block_with(deploy)
        if self._spec.before or self._spec.after:  # which keep their mode
            deploy = nn.Sequential(*self._layers('before'), deploy, *self._layers('after'))
            deploy.training = self.module.training
        return deploy

    def _block_with(self, deploy: nn.Module) -> nn.Module:
        """A copy of the block in which one layer computes the whole FFN; the layers outside of the FFN are shared."""
        block, spec = copy.copy(self.module), self._spec
        layers = {name: nn.Identity() for name in (*spec.first.split(), spec.act, *spec.last.split())}
        layers[spec.first.split()[0]] = deploy
        if spec.value:
            layers[spec.value] = _One()
        block._modules = {**block._modules, **layers}
        return block


def find_ffns(model: nn.Module) -> Tuple[List[Ffn], Dict[str, str]]:
    """The pointwise FFNs of a model, in the order of its modules.

    Returns:
        The FFNs, and for each other module of a registered class its name and the reason.
    """
    blocks: Dict[nn.Module, List[Block]] = {}
    for block in find_blocks(model):
        blocks.setdefault(getattr(block.module, block.mlp), []).append(block)
    ffns, others = [], {}
    for name, module in model.named_modules():
        spec, key = ffn_spec(type(module)), class_name(type(module))
        if spec is None or (key.startswith('timm.') and _OTHER_ROLES.search(name)):
            continue
        if isinstance(spec, str):
            others[name] = spec
            continue
        if (spec.attribute or spec.inline) and any(isinstance(m, RePaMlpDeploy) for m in module.modules()):
            continue  # converted already
        if spec.attribute:
            try:
                module, name = module.get_submodule(spec.attribute), f'{name}.{spec.attribute}'
            except AttributeError as e:
                others[name] = f'does not have the registered parts ({e})'
                continue
        reason = spec.unsupported_reason(module)
        if reason:
            others[name] = reason
            continue
        ffn = Ffn(name, module, spec, key, blocks.get(module, ()))
        if key.startswith('timm.') or ffn.matches_registered_parts():  # timm's are tested
            ffns.append(ffn)
        else:
            others[name] = 'does not compute what its registered parts do'
    return ffns, others


def names_without_hooks(model: nn.Module) -> List[str]:
    """Names of the pointwise FFNs that a model has without its hooks, which a saved model does not keep."""
    ffns, others = find_ffns(model)
    names = {ffn.name for ffn in ffns}
    names.update(name for name, reason in others.items() if reason == unfoldable_reason(model.get_submodule(name)))
    return [name for name, _ in model.named_modules() if name in names]


def check_untied(model: nn.Module, ffns: Sequence[Ffn]) -> None:
    """Raise ValueError if an FFN shares a parameter with a layer outside of it, which keeps the old value."""
    names: Dict[nn.Parameter, List[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    paths: Dict[nn.Module, List[str]] = {}  # a module may be called in several places
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(f'{path}.')
    for ffn in ffns:
        for parameter in ffn.module.parameters():
            own, *others = sorted(names[parameter], key=lambda name: not name.startswith(f'{ffn.name}.'))
            for name in others:
                if not name.startswith(tuple(paths[ffn.module])):
                    raise ValueError(
                        f'Expected FFNs whose parameters are not shared, but {own} is shared with {name}: replace one '
                        'of them with a copy. Nothing was changed.')


def plain_ratio(idle_ratio: Any) -> Union[float, List[Optional[float]]]:
    """An idle ratio, or one per FFN, as Python numbers, which config.json can hold; other values are a ValueError."""
    given = idle_ratio.tolist() if hasattr(idle_ratio, 'tolist') else idle_ratio  # torch, NumPy
    try:
        if isinstance(given, (list, tuple)):
            return [None if ratio is None else _plain_number(ratio) for ratio in given]
        return _plain_number(given)
    except (TypeError, ValueError) as e:
        raise ValueError(
            'idle_ratio must be a number from 0 to 1 or a sequence of one number per FFN, None to keep an FFN, got '
            f'{idle_ratio!r}.') from e


def _plain_number(ratio: Any) -> float:
    ratio = ratio.item() if hasattr(ratio, 'item') else ratio
    active_channels(1, ratio)
    return float(ratio)


def ratios_of(
        names: Sequence[str],
        idle_ratio: Union[float, Sequence[Optional[float]]],
        idle_schedule: str = 'constant',
) -> List[Optional[float]]:
    """The idle ratio of each FFN, None for those that are kept.

    Args:
        names: Names of the FFNs.
        idle_ratio: One ratio, or one per FFN.
        idle_schedule: 'constant', or for one ratio 'linear', see :func:`timm_rep.layers.idle_ratios`.
    """
    given = plain_ratio(idle_ratio)
    if not isinstance(given, list):
        return list(idle_ratios(len(names), given, idle_schedule))
    if idle_schedule != 'constant':
        raise ValueError(f"idle_schedule must be 'constant' with one idle ratio per FFN, got {idle_schedule!r}.")
    if len(given) != len(names):
        raise ValueError(
            f'Expected one idle_ratio or one for each of the {len(names)} FFNs, but got {len(given)}: '
            f'{", ".join(names)}.')
    return given


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace an FFN wherever it occurs."""
    for parent in replace_modules(model, {old: new}):
        if class_name(type(parent)) in _NORM_FOLDING:
            parent.__dict__.pop('reparameterize', None)
            if ffn_spec(type(new)) is None:  # not the original, put back
                parent.reparameterize = partial(_fold_norms, parent)


def _fold_norms(block: nn.Module) -> None:
    """``reparameterize()`` of a NextViT block with a converted FFN, in which several layers may read the input."""
    mlp, norm = block.mlp, block.norm2 if hasattr(block, 'norm2') else block.norm
    first, *others = (m for name, m in mlp.named_modules() if name.split('.')[-1] in ('fc1', 'fc_in', 'fc_idle'))
    if not block.is_fused:
        for layer in others:
            merge_pre_bn(layer, norm)
    block.mlp = nn.ModuleDict({'fc1': first})  # where timm looks for it
    type(block).reparameterize(block)
    block.mlp = mlp
