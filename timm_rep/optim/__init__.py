from timm_rep.layers.grad_mult import GradMult, get_grad_mult, set_grad_mult

from . import _registry as _registry
from .rep_optim import RepAdamW, RepSGD

__all__ = ['GradMult', 'RepAdamW', 'RepSGD', 'get_grad_mult', 'set_grad_mult']
