from .annealing import (
    AnnealedActivation,
    AnnealedNorm,
    add_annealing_hooks,
    advance_annealing,
    check_annealing,
    has_other_hooks,
    remove_annealing_hooks,
)
from .channel_idle import ChannelIdle, active_channels, idle_ratios
from .csla import ConvBranch, Csla, IdentityBranch
from .csla_conv import CslaBlock, CslaConv2d, RepOptConv, RepOptConvDeploy, csla_layers
from .fold import (
    Affine,
    batch_norm_scale_shift,
    check_foldable,
    foldable_layers,
    holds_structure,
    is_reparameterized,
    structures_in,
    unfoldable_reason,
)
from .fused_idle import set_fused_idle, use_fused_idle
from .pooling import WindowAvgPool2d
from .repa_mlp import GatedUnit, RePaMlp, RePaMlpDeploy

__all__ = [
    'Affine',
    'AnnealedActivation',
    'AnnealedNorm',
    'ChannelIdle',
    'ConvBranch',
    'Csla',
    'CslaBlock',
    'CslaConv2d',
    'GatedUnit',
    'IdentityBranch',
    'RePaMlp',
    'RePaMlpDeploy',
    'RepOptConv',
    'RepOptConvDeploy',
    'WindowAvgPool2d',
    'active_channels',
    'add_annealing_hooks',
    'advance_annealing',
    'batch_norm_scale_shift',
    'check_annealing',
    'check_foldable',
    'csla_layers',
    'foldable_layers',
    'has_other_hooks',
    'holds_structure',
    'idle_ratios',
    'is_reparameterized',
    'remove_annealing_hooks',
    'set_fused_idle',
    'structures_in',
    'unfoldable_reason',
    'use_fused_idle',
]
