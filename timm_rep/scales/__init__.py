"""The constants of RepOptimizers: files, checks, and attaching them to models."""
from .attach import ScalesLike, attach_grad_mults, resolve_scales
from .packaged import packaged_scales
from .scales import BranchComparison, Scales

__all__ = [
    'BranchComparison', 'Scales', 'ScalesLike', 'attach_grad_mults', 'packaged_scales', 'resolve_scales',
]
