from ._reparameterize import ReparameterizeMixin, folded_copy, reparameterize
from .anneal import anneal_ffns
from .ffn_classes import register_block, register_ffn
from .linearize import linearize_ffns
from .repa import convert_to_repa
from .repopt import RepOptReport, convert_to_repopt
from .report import ConversionReport, ConvertedFfn
from .survey import Convertibility, survey_convertible
from .to_train import use_repa_ffns

__all__ = [
    'ConversionReport',
    'ConvertedFfn',
    'Convertibility',
    'RepOptReport',
    'ReparameterizeMixin',
    'anneal_ffns',
    'convert_to_repa',
    'convert_to_repopt',
    'folded_copy',
    'linearize_ffns',
    'register_block',
    'register_ffn',
    'reparameterize',
    'survey_convertible',
    'use_repa_ffns',
]
