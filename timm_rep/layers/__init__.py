from .channel_idle import ChannelIdle, RePaMlp, RePaMlpDeploy, active_channels, idle_ratios
from .csla import ConvBranch, Csla, CslaBlock, CslaConv2d, IdentityBranch, SearchBlock, csla_layers
from .fold import Affine, batch_norm_scale_shift
from .idle_training import set_fast_train, use_fast_train
from .pooling import NeighborMean, RePaPooling, RePaPoolingDeploy, check_pool_size
from .structures import foldable_layers, holds_structure

__all__ = [
    'Affine',
    'ChannelIdle',
    'ConvBranch',
    'Csla',
    'CslaBlock',
    'CslaConv2d',
    'IdentityBranch',
    'NeighborMean',
    'RePaMlp',
    'RePaMlpDeploy',
    'RePaPooling',
    'RePaPoolingDeploy',
    'SearchBlock',
    'active_channels',
    'batch_norm_scale_shift',
    'check_pool_size',
    'csla_layers',
    'foldable_layers',
    'holds_structure',
    'idle_ratios',
    'set_fast_train',
    'use_fast_train',
]
