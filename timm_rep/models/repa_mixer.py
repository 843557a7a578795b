"""RePa-MLPMixer: MLP-Mixers with re-parameterizable channel MLPs.

`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from typing import Any, Dict, Optional, Union

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model
from timm.models.mlp_mixer import MixerBlock, MlpMixer, _cfg

from timm_rep.convert import register_block
from timm_rep.hub import build_model, register_released_keys

from ._repa import RePaMixin

__all__ = ['RePaMlpMixer']


class TokenNormMixerBlock(MixerBlock):
    """timm's MixerBlock, except that the norm before the token MLP normalizes over the tokens, as in the released code.

    Input and output: (N, seq_len, dim).
    """

    def __init__(
            self,
            dim: int,
            seq_len: int,
            *args: Any,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
            **kwargs: Any,
    ):
        super().__init__(dim, seq_len, *args, device=device, dtype=dtype, **kwargs)
        self.norm1 = nn.LayerNorm(seq_len, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.mlp_tokens(self.norm1(x.transpose(1, 2))).transpose(1, 2))
        return x + self.drop_path(self.mlp_channels(self.norm2(x)))


register_block(TokenNormMixerBlock, mlp='mlp_channels')


class RePaMlpMixer(RePaMixin, MlpMixer):
    """MLP-Mixer with RePaFormer channel MLPs."""

    def __init__(self, **kwargs: Any):
        """
        Args:
            kwargs: Arguments of RePaMixin and of timm's MlpMixer, except block_layer.

        Raises:
            ValueError: An argument is out of range, or mlp_layer is not two linear layers with an activation.
        """
        super().__init__(block_layer=TokenNormMixerBlock, **kwargs)


register_released_keys(RePaMlpMixer, [(r'^(blocks\.\d+)\.norm1\.', r'\1.mlp_tokens.norm.')])

# Table 1, and the other sizes of the MLP-Mixer paper
model_cfgs: Dict[str, Dict[str, Any]] = {
    'repa_mixer_s32': dict(patch_size=32, num_blocks=8, embed_dim=512),
    'repa_mixer_s16': dict(patch_size=16, num_blocks=8, embed_dim=512),
    'repa_mixer_b32': dict(patch_size=32, num_blocks=12, embed_dim=768),
    'repa_mixer_b16': dict(patch_size=16, num_blocks=12, embed_dim=768),
    'repa_mixer_l32': dict(patch_size=32, num_blocks=24, embed_dim=1024),
    'repa_mixer_l16': dict(patch_size=16, num_blocks=24, embed_dim=1024),
}


def _create_repa_mixer(variant: str, /, pretrained: bool = False, **kwargs: Any) -> RePaMlpMixer:
    return build_model(
        RePaMlpMixer,
        variant,
        pretrained,
        model_cfgs,
        feature_cfg=dict(out_indices=3, feature_cls='getter'),
        **kwargs,
    )


default_cfgs = generate_default_cfgs({
    f'{variant}.untrained': _cfg(crop_pct=.9, mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    for variant in model_cfgs})


@register_model
def repa_mixer_s32(pretrained: bool = False, **kwargs: Any) -> RePaMlpMixer:
    """RePa-MLPMixer-S/32."""
    return _create_repa_mixer('repa_mixer_s32', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_s16(pretrained: bool = False, **kwargs: Any) -> RePaMlpMixer:
    """RePa-MLPMixer-S/16."""
    return _create_repa_mixer('repa_mixer_s16', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_b32(pretrained: bool = False, **kwargs: Any) -> RePaMlpMixer:
    """RePa-MLPMixer-B/32."""
    return _create_repa_mixer('repa_mixer_b32', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_b16(pretrained: bool = False, **kwargs: Any) -> RePaMlpMixer:
    """RePa-MLPMixer-B/16 of table 1: 59.9 M parameters, 24.4 M folded."""
    return _create_repa_mixer('repa_mixer_b16', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_l32(pretrained: bool = False, **kwargs: Any) -> RePaMlpMixer:
    """RePa-MLPMixer-L/32."""
    return _create_repa_mixer('repa_mixer_l32', pretrained=pretrained, **kwargs)


@register_model
def repa_mixer_l16(pretrained: bool = False, **kwargs: Any) -> RePaMlpMixer:
    """RePa-MLPMixer-L/16 of table 1: 208.4 M parameters, 82.2 M folded."""
    return _create_repa_mixer('repa_mixer_l16', pretrained=pretrained, **kwargs)
