from .attach import ScalesLike, attach_grad_mults, resolve_scales
from .scales import BranchComparison, Scales

__all__ = ['BranchComparison', 'Scales', 'ScalesLike', 'attach_grad_mults', 'resolve_scales']
