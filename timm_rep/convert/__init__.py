from .anneal import AnnealedFfn, anneal_ffns
from .ffn import find_ffns, take_layer_scale, use_repa_ffns
from .least_squares import eliminate
from .linear_sums import find_linear_sums
from .linearize import check_convertible, linearize_ffns
from .pointwise import PointwiseFfn, find_pointwise_ffns, ratios_of, replace_module
from .record import is_folded, make_foldable, record_scales, recorded_base
from .repa import convert_to_repa
from ._reparameterize import ReparameterizeMixin, folded_copy, reparameterize
from .repopt import RepOptReport, convert_to_repopt, refuse_branches, set_scales, use_repopt_convs
from .report import ConversionReport, ConvertedFfn
from .survey import Convertibility, survey_convertible

__all__ = [
    'AnnealedFfn',
    'ConversionReport',
    'ConvertedFfn',
    'Convertibility',
    'PointwiseFfn',
    'RepOptReport',
    'ReparameterizeMixin',
    'anneal_ffns',
    'check_convertible',
    'convert_to_repa',
    'convert_to_repopt',
    'eliminate',
    'find_ffns',
    'find_linear_sums',
    'find_pointwise_ffns',
    'folded_copy',
    'is_folded',
    'linearize_ffns',
    'make_foldable',
    'ratios_of',
    'record_scales',
    'recorded_base',
    'refuse_branches',
    'reparameterize',
    'replace_module',
    'set_scales',
    'survey_convertible',
    'take_layer_scale',
    'use_repa_ffns',
    'use_repopt_convs',
]
