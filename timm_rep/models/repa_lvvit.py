"""LV-ViT and RePa-LV-ViT: Vision Transformers trained with token labels, plain and with re-parameterizable FFNs.

`All Tokens Matter: Token Labeling for Training Better Vision Transformers` - https://arxiv.org/abs/2104.10858
`RePaFormer: Ferocious and Scalable Acceleration of MetaFormers via Structural Reparameterization`
"""
from collections import OrderedDict
from functools import partial
from typing import Any, Dict, Optional, Tuple, Type, Union

import torch
import torch.nn as nn
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm, LayerType, PatchEmbed, to_2tuple, trunc_normal_
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch.jit import Final

from timm_rep.convert import register_block
from timm_rep.hub import build_model, register_released_keys

from .repa_vit import RePaVisionTransformer

__all__ = ['LvVit', 'RePaLvVit']


class ConvPatchEmbed(PatchEmbed):
    """Patch embedding by three convolutions at half the resolution and a projection."""

    def __init__(
            self,
            img_size: Optional[Union[int, Tuple[int, int]]] = 224,
            patch_size: int = 16,
            in_chans: int = 3,
            embed_dim: int = 768,
            stem_width: int = 64,
            bias: bool = True,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
            **kwargs: Any,
    ):
        """
        Args:
            stem_width: Number of channels of the convolutions.
            kwargs: Other arguments of timm's PatchEmbed.

        Raises:
            ValueError: patch_size is odd: the first convolution halves the resolution.
        """
        if any(size % 2 for size in to_2tuple(patch_size)):
            raise ValueError(f'patch_size must be even with a convolutional stem, got {patch_size}.')
        dd = {'device': device, 'dtype': dtype}
        super().__init__(img_size, patch_size, in_chans, embed_dim, bias=bias, **dd, **kwargs)
        proj_size = tuple(size // 2 for size in self.patch_size)
        self.proj = nn.Sequential(OrderedDict([
            ('conv1', nn.Conv2d(in_chans, stem_width, 7, stride=2, padding=3, bias=False, **dd)),
            ('bn1', nn.BatchNorm2d(stem_width, **dd)),
            ('act1', nn.ReLU()),
            ('conv2', nn.Conv2d(stem_width, stem_width, 3, padding=1, bias=False, **dd)),
            ('bn2', nn.BatchNorm2d(stem_width, **dd)),
            ('act2', nn.ReLU()),
            ('conv3', nn.Conv2d(stem_width, stem_width, 3, padding=1, bias=False, **dd)),
            ('bn3', nn.BatchNorm2d(stem_width, **dd)),
            ('act3', nn.ReLU()),
            ('proj', nn.Conv2d(stem_width, embed_dim, proj_size, stride=proj_size, bias=bias, **dd)),
        ]))

    @torch.jit.ignore
    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise ValueError(f'patch_size must be {self.patch_size} with a convolutional stem, got {patch_size}.')
        super().set_input_size(img_size=img_size)


class LvVitBlock(Block):
    """timm's block with its branches scaled by a constant before they are added to the shortcut."""
    residual_scale: Final[float]

    def __init__(self, *args: Any, residual_scale: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.residual_scale = residual_scale

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        y = self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        x = x + self.residual_scale * y  # not torch.add(alpha=...), which LiteRT does not convert
        return x + self.residual_scale * self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


register_block(LvVitBlock)


_Base: Any = object  # a subclass has VisionTransformer as its second base


class TokenLabelMixin(_Base):
    """Stem and heads of LV-ViT for a timm VisionTransformer: a convolutional stem, and a classifier of every token.

    The logits are ``head(class token) + 0.5 * max over tokens of aux_head(token)``.
    """
    return_dense: Final[bool]

    def __init__(
            self,
            *,
            mlp_ratio: float = 3.,
            qkv_bias: bool = False,
            embed_layer: Type[nn.Module] = ConvPatchEmbed,
            norm_layer: Optional[LayerType] = None,
            skip_lam: float = 2.,
            return_dense: bool = True,
            device: Optional[Union[str, torch.device]] = None,
            dtype: Optional[torch.dtype] = None,
            **kwargs: Any,
    ):
        """
        Args:
            skip_lam: Divisor of the branches before they are added to the shortcut, positive.
            return_dense: Whether there is a classifier of every token.
            kwargs: Other arguments of timm's VisionTransformer, except block_fn.

        Raises:
            ValueError: skip_lam is not positive.
        """
        if not skip_lam > 0:
            raise ValueError(f'skip_lam must be positive, got {skip_lam}.')
        super().__init__(
            block_fn=partial(LvVitBlock, residual_scale=1 / skip_lam),
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            embed_layer=embed_layer,
            norm_layer=norm_layer or partial(LayerNorm, eps=1e-5),
            device=device,
            dtype=dtype,
            **kwargs,
        )
        self.return_dense = return_dense
        self.token_labeling = False
        self._reset_aux_head()

    def _reset_aux_head(self) -> None:
        self.aux_head = nn.Identity()
        if self.return_dense and self.num_classes > 0:
            like = next(self.parameters())
            dd = {'device': like.device, 'dtype': like.dtype}
            self.aux_head = nn.Linear(self.embed_dim, self.num_classes, **dd).train(self.training)
            trunc_normal_(self.aux_head.weight, std=.02)
            nn.init.zeros_(self.aux_head.bias)

    @torch.jit.ignore
    def get_classifier(self) -> Union[nn.Module, Tuple[nn.Module, nn.Module]]:
        return (self.head, self.aux_head) if self.return_dense else self.head

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        self._reset_aux_head()

    @torch.jit.ignore
    def set_token_labeling(self, enable: bool = True) -> None:
        """Set whether a forward pass in training mode returns two tensors of logits, for a loss with token labels.

        They are the logits of the class token (N, num_classes) and of the other tokens (N, tokens, num_classes).
        """
        self.token_labeling = enable

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        pooled = self.head_drop(self.fc_norm(self.pool(x)))
        if pre_logits:
            return pooled
        logits = self.head(pooled)
        if not self.return_dense or self.num_classes == 0 or not self.global_pool:
            return logits
        aux_logits = self.aux_head(self.fc_norm(x[:, self.num_prefix_tokens:]))
        if self.token_labeling and self.training and not torch.jit.is_scripting():
            return logits, aux_logits
        return logits + 0.5 * aux_logits.amax(dim=1)


class LvVit(TokenLabelMixin, VisionTransformer):
    """LV-ViT, the vanilla backbone of RePa-LV-ViT."""


class RePaLvVit(TokenLabelMixin, RePaVisionTransformer):
    """LV-ViT with RePaFormer FFNs. Their MLP ratio is 3, and two thirds of their hidden channels are idle."""

    def __init__(self, *, idle_ratio: float = 2 / 3, **kwargs: Any):
        """
        Args:
            idle_ratio: Share of the hidden channels of an FFN that skip the activation, from 0 to 1.
            kwargs: Other arguments of LvVit and RePaVisionTransformer.

        Raises:
            ValueError: skip_lam, idle_ratio or idle_schedule is out of range.
        """
        super().__init__(idle_ratio=idle_ratio, **kwargs)


register_released_keys(LvVit, [(r'^patch_embed\.proj\.', 'patch_embed.')])


# Table 1
_S = dict(embed_dim=384, depth=16, num_heads=6)
_M = dict(embed_dim=512, depth=20, num_heads=8)

model_cfgs: Dict[str, Dict[str, Any]] = {
    'lvvit_s': _S,
    'lvvit_m': _M,
    'repa_lvvit_s': _S,
    'repa_lvvit_m': _M,
}


def _create_lvvit(variant: str, /, pretrained: bool = False, **kwargs: Any) -> TokenLabelMixin:
    cls = RePaLvVit if variant.startswith('repa_') else LvVit
    return build_model(
        cls,
        variant,
        pretrained,
        model_cfgs,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=3, feature_cls='getter'),
        **kwargs,
    )


def _cfg(url: str = '', **kwargs: Any) -> Dict[str, Any]:
    return {
        'url': url,
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': None,
        'crop_pct': .9, 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'patch_embed.proj.conv1', 'classifier': ('head', 'aux_head'),
        'license': 'apache-2.0',
        **kwargs
    }


default_cfgs = generate_default_cfgs({
    'lvvit_s.untrained': _cfg(),
    'lvvit_m.untrained': _cfg(crop_pct=1.),
    'repa_lvvit_s.untrained': _cfg(),
    'repa_lvvit_m.untrained': _cfg(crop_pct=1.),
})


@register_model
def lvvit_s(pretrained: bool = False, **kwargs: Any) -> LvVit:
    """LV-ViT-S: 26.2 M parameters."""
    return _create_lvvit('lvvit_s', pretrained=pretrained, **kwargs)


@register_model
def lvvit_m(pretrained: bool = False, **kwargs: Any) -> LvVit:
    """LV-ViT-M: 55.8 M parameters."""
    return _create_lvvit('lvvit_m', pretrained=pretrained, **kwargs)


@register_model
def repa_lvvit_s(pretrained: bool = False, **kwargs: Any) -> RePaLvVit:
    """RePa-LV-ViT-S of table 1: 26.2 M parameters, 19.1 M folded."""
    return _create_lvvit('repa_lvvit_s', pretrained=pretrained, **kwargs)


@register_model
def repa_lvvit_m(pretrained: bool = False, **kwargs: Any) -> RePaLvVit:
    """RePa-LV-ViT-M of table 1: 55.9 M parameters, 40.1 M folded."""
    return _create_lvvit('repa_lvvit_m', pretrained=pretrained, **kwargs)
