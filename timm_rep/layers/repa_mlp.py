"""The FFN of RePaFormer: channel idling in training, three small matrices at deployment.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`, equations 3-7.
"""
from functools import partial
from typing import Callable, Optional, Type, Union

import torch
import torch.nn as nn
from timm.layers import LayerScale, LayerScale2d, register_notrace_module
from torch.jit import Final

from .channel_idle import ChannelIdle, active_channels
from .fold import Affine, check_foldable, in_eval_mode, is_plain_batch_norm, unfoldable_reason
from .fused_idle import fused_idle_ffn, fused_idle_is_faster, use_fused_idle

_STRUCTURE_KEYS = {
    'norm1.running_mean': ('training',),
    'fc_in.weight': ('deploy',),
    'fc_idle.weight': ('deploy',),
}

# layer types whose forward() is known, so that the fused path may bypass it
_KNOWN_LAYERS = (
    nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, ChannelIdle, nn.Dropout, nn.Identity)


def _is_unmodified(layer: nn.Module) -> bool:
    """Whether a layer is of a known type, with no hooks registered and its forward() not replaced (by an adapter)."""
    hooked = layer._backward_hooks or layer._backward_pre_hooks  # not among the hooks that unfoldable_reason looks at
    return type(layer) in _KNOWN_LAYERS and not hooked and not unfoldable_reason(layer)


def _linear_layer(use_conv: bool) -> Callable[..., nn.Module]:
    return partial(nn.Conv2d, kernel_size=1) if use_conv else nn.Linear


class GatedUnit(nn.Module):
    """``act(gates) * values``, with the gates in the first half of the channels and the values in the second.

    Input: (..., 2 * channels), or with the channels at ``dim``. Output: the same with half of the channels.
    """
    dim: Final[int]

    def __init__(self, act: nn.Module, dim: int = -1):
        """
        Args:
            act: Element-wise activation of the gates.
            dim: Channel dimension.
        """
        super().__init__()
        self.dim = dim
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # chunk() gives views that an activation in place must not write to
        width = x.shape[self.dim] // 2
        gates, values = x.narrow(self.dim, 0, width), x.narrow(self.dim, width, width)
        return self.act(gates) * values


@register_notrace_module  # a traced model folds too
class RePaMlp(nn.Module):
    """Training structure of the RePaFormer FFN: both norms and the layer scale, without the shortcut (eq. 3).

    ``layer_scale(fc2(BN(channel_idle(fc1(BN(x))))))``, with the dropout of timm's Mlp. In a block it takes the place of
    norm, MLP and layer scale; the block adds the shortcut. Both BatchNorms take their statistics over all tokens of all
    images. Input and output: (..., in_features), channels last; with ``use_conv`` (N, in_features, H, W), in either
    memory format.

    Examples:
        >>> mlp = RePaMlp(48, hidden_features=192, idle_ratio=0.75).eval()
        >>> folded = mlp.fuse()
        >>> folded.fc_in.out_features, folded.fc_idle.out_features
        (48, 48)
        >>> x = torch.randn(2, 10, 48)
        >>> torch.allclose(folded(x), mlp(x), atol=1e-5)
        True
    """
    structure = 'training'
    structure_keys = _STRUCTURE_KEYS
    use_conv: Final[bool]

    def __init__(
            self,
            in_features: int,
            hidden_features: Optional[int] = None,
            idle_ratio: float = 0.75,
            act_layer: Callable[[], nn.Module] = nn.GELU,
            norm_layer: Optional[Type[nn.Module]] = None,
            bias: bool = True,
            drop: float = 0.,
            use_conv: bool = False,
            init_values: Optional[float] = None,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
    ):
        """
        Args:
            in_features: Number C of input and output channels.
            hidden_features: Number of hidden channels, in_features if None.
            idle_ratio: Share of the hidden channels that skip the activation, from 0 to 1.
            act_layer: Element-wise activation.
            norm_layer: BatchNorm class; nn.BatchNorm1d by default, nn.BatchNorm2d with use_conv.
            bias: Whether both linear layers have a bias.
            drop: Dropout rate after the activation and after the second linear layer.
            use_conv: Use 1 x 1 convolutions as linear layers, as in timm's Mlp.
            init_values: Initial layer scale; no layer scale if None or 0.
            device: Device of the parameters.
            dtype: Dtype of the parameters.

        Raises:
            ValueError: The ratio is not in [0, 1].
            TypeError: norm_layer is not a BatchNorm, so it could not be folded.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        hidden_features = hidden_features or in_features
        norm_layer = norm_layer or (nn.BatchNorm2d if use_conv else nn.BatchNorm1d)
        linear_layer = _linear_layer(use_conv)
        ls_layer = LayerScale2d if use_conv else LayerScale
        self.idle_ratio = idle_ratio
        self.use_conv = use_conv
        self.valid_tokens: Optional[torch.Tensor] = None  # (N, tokens), not padding in the next forward pass
        self.norm1 = norm_layer(in_features, **dd)
        self.fc1 = linear_layer(in_features, hidden_features, bias=bias, **dd)
        self.act = ChannelIdle(hidden_features, idle_ratio, act_layer, dim=1 if use_conv else -1)
        self.drop1 = nn.Dropout(drop)
        self.norm2 = norm_layer(hidden_features, **dd)
        self.fc2 = linear_layer(hidden_features, in_features, bias=bias, **dd)
        self.drop2 = nn.Dropout(drop)
        self.ls = ls_layer(in_features, init_values=init_values, **dd) if init_values else nn.Identity()
        if not is_plain_batch_norm(self.norm1):
            raise TypeError(
                'norm_layer must build a BatchNorm without activation, which folds into a linear layer, got '
                f'{type(self.norm1).__name__}: pass nn.BatchNorm1d, nn.BatchNorm2d or a partial of them.')

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Initialize the norms; timm's ``init_weights()``, which calls this, leaves out BatchNorms of tokens."""
        for norm in (self.norm1, self.norm2):
            norm.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_scripting() and self.valid_tokens is not None:
            return self._forward_valid(x, self.valid_tokens)
        if not torch.jit.is_scripting() and not torch.jit.is_tracing() and self._can_fuse_idle(x):
            y = self._forward_fused(x)
        else:
            # BatchNorm1d expects the channels second: flattening the tokens into one axis avoids a transposed copy
            y = self.norm1(x if self.use_conv else x.reshape(-1, x.shape[-1]))
            y = self.fc1(y)
            y = self.act(y)
            y = self.drop1(y)
            y = self.norm2(y)
            y = self.fc2(y)
            if not self.use_conv:
                y = y.view(x.shape)
        return self.ls(self.drop2(y))

    @torch.jit.unused
    def _can_fuse_idle(self, x: torch.Tensor) -> bool:
        """Whether the fused path applies to this input and is expected to be faster."""
        norms, layers = (self.norm1, self.norm2), (self.norm1, self.fc1, self.act, self.drop1, self.norm2, self.fc2)
        # checked first: a frozen norm or an adapter may lack the attributes used below
        if not (
            self.training and use_fused_idle() and isinstance(x, torch.Tensor) and x.device.type in ('cpu', 'meta')
            and all(map(_is_unmodified, layers))
        ):
            return False
        active, hidden, channels = self.act.active_channels, self.act.channels, self.fc1.weight.shape[1]
        if not 0 < active < hidden:
            return False
        return (
            fused_idle_is_faster(x.numel() // channels, channels, hidden - active)
            and all(
                isinstance(norm, nn.modules.batchnorm._BatchNorm)
                and norm.training and norm.affine and norm.track_running_stats for norm in norms)
            and not (isinstance(self.drop1, nn.Dropout) and self.drop1.p and self.drop1.training)
        )

    @torch.jit.unused
    def _forward_valid(self, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """The outputs of the tokens that are not padding, zeros for the others."""
        self.valid_tokens = None
        y = self.forward(x[valid])
        return x.new_zeros(x.shape, dtype=y.dtype).masked_scatter(valid[..., None], y)

    @torch.jit.unused
    def _forward_fused(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.movedim(1, -1) if self.use_conv else x
        y = fused_idle_ffn(
            tokens.reshape(-1, tokens.shape[-1]), self.norm1, self.fc1, self.act, self.norm2, self.fc2)
        y = y.view(tokens.shape)
        if not self.use_conv:
            return y
        y = y.movedim(-1, 1)
        return y.contiguous() if x.is_contiguous() else y

    @torch.jit.ignore
    @torch.no_grad()
    def fuse(self) -> 'RePaMlpDeploy':
        """The deploy structure with the same function as in eval mode (eq. 4-7), as a new module.

        Running statistics are folded whatever the mode of this module.

        Raises:
            ValueError: A BatchNorm has no running statistics, or a layer has hooks or was replaced by an adapter.
            OverflowError: A folded weight does not fit the dtype of the model.
        """
        check_foldable(self)
        with in_eval_mode(self):
            active, hidden_features = self.act.active_channels, self.act.channels
            fc_in = Affine.from_linear(self.fc1).after_norm(self.norm1)
            fc_out = Affine.from_linear(self.fc2).after_norm(self.norm2)
            if isinstance(self.ls, (LayerScale, LayerScale2d)):
                fc_out = fc_out.scale_outputs(self.ls.gamma)

            deploy = RePaMlpDeploy(
                self.fc1.weight.shape[1],
                hidden_features,
                idle_ratio=self.idle_ratio,
                use_conv=self.use_conv,
                device='meta',  # every parameter is replaced below, so no random numbers are drawn
            )
            if active < hidden_features:
                fc_out.inputs(active).after(fc_in.outputs(active)).write_to(deploy.fc_idle, like=self.fc2.weight)
            if active > 0:
                fc_in.outputs(0, active).write_to(deploy.fc_in, like=self.fc1.weight)
                fc_out.inputs(0, active).write_to(deploy.fc_out, like=self.fc2.weight)
                deploy.act = self.act.act
        return deploy.train(self.training)


class RePaMlpDeploy(nn.Module):
    """Deploy structure of the RePaFormer FFN: at most three small matrices (eq. 7), without the shortcut.

    ``fc_out(act(fc_in(x))) + fc_idle(x)``; ``fc_idle`` is missing without idle channels, ``fc_in`` and ``fc_out``
    without active ones. The identity of the shortcut is not added to ``fc_idle``: in int8 its quantization step would
    swallow the small entries, and the block's own addition costs little on a CPU (``scripts/bench.py deploy-ffn``; on
    an H100 an FFN of 1,576 tokens or fewer was up to 1.2 times as fast without it).
    The linear layers are plain ``nn.Linear`` or ``nn.Conv2d``, so hooks, adapters and quantizers work on them.

    Input: (..., in_features), channels last; with ``use_conv`` (N, in_features, H, W). Output: the same with
    out_features.

    Examples:
        >>> RePaMlpDeploy(48, idle_ratio=1.)    # linear
        RePaMlpDeploy(
          (fc_idle): Linear(in_features=48, out_features=48, bias=True)
        )
    """
    structure = 'deploy'
    structure_keys = _STRUCTURE_KEYS
    has_active: Final[bool]
    has_idle: Final[bool]
    __jit_unused_properties__ = ('fc2',)

    def __init__(
            self,
            in_features: int,
            hidden_features: Optional[int] = None,
            idle_ratio: float = 0.75,
            act_layer: Callable[[], nn.Module] = nn.GELU,
            use_conv: bool = False,
            out_features: Optional[int] = None,
            active_features: Optional[int] = None,
            gated: bool = False,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
    ):
        """
        Args:
            in_features: Number C of input channels.
            hidden_features: Number of hidden channels of the training structure, in_features if None.
            idle_ratio: Share of the hidden channels that skip the activation, from 0 to 1.
            act_layer: Element-wise activation.
            use_conv: Use 1 x 1 convolutions as linear layers.
            out_features: Number of output channels, in_features if None.
            active_features: Number of activated hidden channels; from idle_ratio if None.
            gated: Whether act_layer halves the channels, see :class:`GatedUnit`.
            device: Device of the parameters.
            dtype: Dtype of the parameters.

        Raises:
            ValueError: The ratio is not in [0, 1], or there are no hidden channels.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        hidden_features = in_features if hidden_features is None else hidden_features
        if hidden_features < 1:
            raise ValueError(f'There must be a hidden channel or, for idle ones, a linear path, got {hidden_features}.')
        out_features = out_features or in_features
        if active_features is None:
            active_features = active_channels(hidden_features, idle_ratio)
        linear_layer = _linear_layer(use_conv)
        self.has_active = active_features > 0
        self.has_idle = active_features < hidden_features
        if self.has_active:
            self.fc_in = linear_layer(in_features, active_features * (2 if gated else 1), **dd)
            self.act = act_layer()
            self.fc_out = linear_layer(active_features, out_features, bias=not self.has_idle, **dd)
        if self.has_idle:
            self.fc_idle = linear_layer(in_features, out_features, **dd)

    @property
    def fc2(self) -> nn.Module:
        """The last layer, under timm's name: ``init_weights()`` of its BEiT, Eva and NaFlexViT scales its weight."""
        return self.fc_out if self.has_active else self.fc_idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_active:
            return self.fc_idle(x)
        y = self.fc_out(self.act(self.fc_in(x)))
        if self.has_idle:
            y = y + self.fc_idle(x)
        return y
