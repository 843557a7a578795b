from .ffn import convert_to_repa, find_ffns
from .reparameterize import ReparameterizeMixin

__all__ = ['ReparameterizeMixin', 'convert_to_repa', 'find_ffns']
