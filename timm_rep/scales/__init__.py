"""The constants of RepOptimizers: files, checks, and attaching them to models."""
from .attach import ScalesLike, attach_grad_mults, attached_scales, has_name, recorded_scales, resolve_scales
from .packaged import packaged_scales
from .released import RELEASED, RELEASED_PREFIX, locate_released
from .scales import BranchComparison, Scales, stage_of

__all__ = [
    'RELEASED',
    'RELEASED_PREFIX',
    'BranchComparison',
    'Scales',
    'ScalesLike',
    'attach_grad_mults',
    'attached_scales',
    'has_name',
    'locate_released',
    'packaged_scales',
    'recorded_scales',
    'resolve_scales',
    'stage_of',
]
