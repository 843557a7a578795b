from .anneal import AnnealedFfn, anneal_ffns
from .ffn import find_ffns, take_layer_scale, use_repa_ffns
from .least_squares import eliminate
from .linearize import check_convertible, linearize_ffns
from .pointwise import PointwiseFfn, find_pointwise_ffns, ratios_of, replace_module
from .repa import convert_to_repa
from .reparameterize import ReparameterizeMixin, reparameterize
from .report import ConversionReport, ConvertedFfn
from .survey import Convertibility, survey_convertible

__all__ = [
    'AnnealedFfn',
    'ConversionReport',
    'ConvertedFfn',
    'Convertibility',
    'PointwiseFfn',
    'ReparameterizeMixin',
    'anneal_ffns',
    'check_convertible',
    'convert_to_repa',
    'eliminate',
    'find_ffns',
    'find_pointwise_ffns',
    'linearize_ffns',
    'ratios_of',
    'reparameterize',
    'replace_module',
    'survey_convertible',
    'take_layer_scale',
    'use_repa_ffns',
]
