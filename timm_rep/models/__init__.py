from .repa_vit import RePaVisionTransformer
from .repopt_vgg import RepOptVgg

__all__ = ['RePaVisionTransformer', 'RepOptVgg']
