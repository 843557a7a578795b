from timm_rep.layers.grad_mult import BranchScale, GradMult, get_grad_mult, set_grad_mult

from . import _registry as _registry
from .rep_adamw import RepAdamW
from .rep_sgd import RepSGD

__all__ = ['BranchScale', 'GradMult', 'RepAdamW', 'RepSGD', 'get_grad_mult', 'set_grad_mult']
