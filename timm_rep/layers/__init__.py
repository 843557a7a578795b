from .channel_idle import ChannelIdle, RePaMlp, RePaMlpDeploy, active_channels, idle_ratios, mlp_structure
from .fold import Affine, batch_norm_scale_shift

__all__ = [
    'Affine',
    'ChannelIdle',
    'RePaMlp',
    'RePaMlpDeploy',
    'active_channels',
    'batch_norm_scale_shift',
    'idle_ratios',
    'mlp_structure',
]
