from .ffn import convert_to_repa, find_ffns, take_layer_scale, use_repa_ffns
from .reparameterize import ReparameterizeMixin, is_reparameterized, reparameterize

__all__ = [
    'ReparameterizeMixin',
    'convert_to_repa',
    'find_ffns',
    'is_reparameterized',
    'reparameterize',
    'take_layer_scale',
    'use_repa_ffns',
]
