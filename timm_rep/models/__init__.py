from . import repa_any, repopt_any, students
from .repa_lvvit import LvVit, RePaLvVit
from .repa_mixer import RePaMlpMixer
from .repa_poolformer import RePaPoolFormer
from .repa_swin import RePaSwinTransformer
from .repa_vit import RePaVisionTransformer
from .repopt_ghostnet import RepOptGhostNet
from .repopt_vgg import RepOptVgg

__all__ = [
    'LvVit',
    'RePaLvVit',
    'RePaMlpMixer',
    'RePaPoolFormer',
    'RePaSwinTransformer',
    'RePaVisionTransformer',
    'RepOptGhostNet',
    'RepOptVgg',
    'repa_any',
    'repopt_any',
    'students',
]
