"""RePa-MLPMixer: MLP-Mixers with re-parameterizable channel MLPs.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from functools import partial
from typing import Tuple, Type, Union

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import Mlp
from timm.models import generate_default_cfgs, register_model
from timm.models.mlp_mixer import MixerBlock, MlpMixer

from timm_rep.convert import ReparameterizeMixin
from timm_rep.hub.load import build_model, resolve_pretrained
from timm_rep.hub.released import register_released_keys
from timm_rep.layers import RePaMlp, RePaMlpDeploy, idle_ratios

__all__ = ['RePaMlpMixer']


class RePaMixerBlock(MixerBlock):
    """timm's block, its channel MLP replaced by a RePaMlp; input and output (N, seq_len, dim).

    As released, the norm before the token MLP is one over the tokens, the axis that this MLP works on.
    """

    def __init__(
            self,
            dim: int,
            seq_len: int,
            mlp_ratio: Union[float, Tuple[float, float]] = (0.5, 4.0),
            mlp_layer: Type[nn.Module] = RePaMlp,
            act_layer: Type[nn.Module] = nn.GELU,
            drop: float = 0.,
            drop_path: float = 0.,
            *,
            idle_ratio: float,
            mlp_norm_layer: Type[nn.Module] = nn.BatchNorm1d,
            device=None,
            dtype=None,
            **kwargs,
    ):
        """
        Args:
            mlp_layer: RePaMlp, or RePaMlpDeploy for the deploy structure.
            idle_ratio: Share of the hidden channels of the channel MLP that skip the activation.
            mlp_norm_layer: BatchNorm of the channel MLP.
            kwargs: The other arguments of timm's MixerBlock.
        """
        dd = {'device': device, 'dtype': dtype}
        super().__init__(
            dim, seq_len, mlp_ratio, mlp_layer=Mlp, act_layer=act_layer, drop=drop, drop_path=drop_path, **dd, **kwargs)
        self.norm1 = nn.LayerNorm(seq_len, **dd)
        # the FFN brings its own norm, drop path and shortcut, so that they can fold
        del self.norm2
        train_args = dict(norm_layer=mlp_norm_layer, drop=drop, drop_path=drop_path)
        self.mlp_channels = mlp_layer(
            dim,
            hidden_features=self.mlp_channels.fc1.out_features,
            idle_ratio=idle_ratio,
            act_layer=act_layer,
            **({} if mlp_layer is RePaMlpDeploy else train_args),
            **dd,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.mlp_tokens(self.norm1(x.transpose(1, 2))).transpose(1, 2))
        return self.mlp_channels(x)


class RePaMlpMixer(ReparameterizeMixin, MlpMixer):
    """MLP-Mixer with RePaFormer channel MLPs.

    The arguments of timm's MlpMixer, but for its block and MLP classes, and those below.
    """

    def __init__(
            self,
            *,
            num_blocks: int = 8,
            idle_ratio: float = 0.75,
            idle_schedule: str = 'constant',
            reparameterized: bool = False,
            bn_momentum: float = 0.1,
            bn_eps: float = 1e-5,
            **kwargs,
    ):
        """
        Args:
            num_blocks: Number of blocks.
            idle_ratio: Share of the hidden channels of a channel MLP that skip the activation, from 0 to 1.
            idle_schedule: 'constant' or 'linear', see :func:`timm_rep.layers.idle_ratios`.
            reparameterized: Build the deploy structure, for checkpoints of a folded model.
            bn_momentum: Momentum of the BatchNorms of the channel MLPs.
            bn_eps: Epsilon of the BatchNorms of the channel MLPs.
            kwargs: The other arguments of timm's MlpMixer, but for mlp_layer and block_layer.

        Raises:
            ValueError: idle_ratio or idle_schedule is out of range.
            TypeError: mlp_layer or block_layer is given.
        """
        for name in ('mlp_layer', 'block_layer'):
            if name in kwargs:
                raise TypeError(f'{name} is not for RePa models: their blocks and FFNs are what makes them foldable.')
        ratios = iter(idle_ratios(num_blocks, idle_ratio, idle_schedule))
        norm_layer = partial(nn.BatchNorm1d, eps=bn_eps, momentum=bn_momentum)
        super().__init__(
            num_blocks=num_blocks,
            block_layer=lambda *a, **kw: RePaMixerBlock(*a, idle_ratio=next(ratios), mlp_norm_layer=norm_layer, **kw),
            mlp_layer=RePaMlpDeploy if reparameterized else RePaMlp,
            **kwargs,
        )


register_released_keys(RePaMlpMixer, [(r'^(blocks\.\d+)\.norm1\.', r'\1.mlp_tokens.norm.')])

# Table 1, and the other sizes of the MLP-Mixer paper
model_cfgs = {
    'repa_mixer_s32': dict(patch_size=32, num_blocks=8, embed_dim=512),
    'repa_mixer_s16': dict(patch_size=16, num_blocks=8, embed_dim=512),
    'repa_mixer_b32': dict(patch_size=32, num_blocks=12, embed_dim=768),
    'repa_mixer_b16': dict(patch_size=16, num_blocks=12, embed_dim=768),
    'repa_mixer_l32': dict(patch_size=32, num_blocks=24, embed_dim=1024),
    'repa_mixer_l16': dict(patch_size=16, num_blocks=24, embed_dim=1024),
}


def _create_repa_mixer(variant: str, pretrained: bool = False, **kwargs) -> RePaMlpMixer:
    kwargs = resolve_pretrained(RePaMlpMixer, variant, pretrained, kwargs)
    out_indices = kwargs.pop('out_indices', 3)
    return build_model(
        RePaMlpMixer,
        variant,
        pretrained,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **dict(model_cfgs[variant], **kwargs),
    )


def _cfg(url: str = '', **kwargs):
    return {
        'url': url,
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': None,
        'crop_pct': .9, 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'stem.proj', 'classifier': 'head',
        'license': 'apache-2.0',
        **kwargs
    }


default_cfgs = generate_default_cfgs({f'{variant}.untrained': _cfg() for variant in model_cfgs})


@register_model
def repa_mixer_s32(pretrained=False, **kwargs) -> RePaMlpMixer:
    """RePa-MLPMixer-S/32."""
    return _create_repa_mixer('repa_mixer_s32', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_s16(pretrained=False, **kwargs) -> RePaMlpMixer:
    """RePa-MLPMixer-S/16."""
    return _create_repa_mixer('repa_mixer_s16', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_b32(pretrained=False, **kwargs) -> RePaMlpMixer:
    """RePa-MLPMixer-B/32."""
    return _create_repa_mixer('repa_mixer_b32', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_b16(pretrained=False, **kwargs) -> RePaMlpMixer:
    """RePa-MLPMixer-B/16 of table 1: 59.9 M parameters, 24.4 M folded."""
    return _create_repa_mixer('repa_mixer_b16', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_l32(pretrained=False, **kwargs) -> RePaMlpMixer:
    """RePa-MLPMixer-L/32."""
    return _create_repa_mixer('repa_mixer_l32', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_l16(pretrained=False, **kwargs) -> RePaMlpMixer:
    """RePa-MLPMixer-L/16 of table 1: 208.4 M parameters, 82.2 M folded."""
    return _create_repa_mixer('repa_mixer_l16', pretrained=pretrained, **kwargs)
