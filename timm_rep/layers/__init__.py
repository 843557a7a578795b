from .channel_idle import ChannelIdle, RePaMlp, RePaMlpDeploy, active_channels, idle_ratios, mlp_structure
from .csla import ConvBranch, Csla, CslaBlock, IdentityBranch, SearchBlock
from .fold import Affine, batch_norm_scale_shift

__all__ = [
    'Affine',
    'ChannelIdle',
    'ConvBranch',
    'Csla',
    'CslaBlock',
    'IdentityBranch',
    'RePaMlp',
    'RePaMlpDeploy',
    'SearchBlock',
    'active_channels',
    'batch_norm_scale_shift',
    'idle_ratios',
    'mlp_structure',
]
