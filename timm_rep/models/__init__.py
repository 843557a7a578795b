from .repa_swin import RePaSwinTransformer
from .repa_vit import RePaVisionTransformer
from .repopt_ghostnet import RepOptGhostNet
from .repopt_vgg import RepOptVgg

__all__ = ['RePaSwinTransformer', 'RePaVisionTransformer', 'RepOptGhostNet', 'RepOptVgg']
