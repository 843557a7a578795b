from .repa_vit import RePaVisionTransformer

__all__ = ['RePaVisionTransformer']
