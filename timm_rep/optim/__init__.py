from . import _registry as _registry
from .grad_mult import GradMult, GradTerm, get_grad_mult, set_grad_mult
from .rep_adamw import RepAdamW
from .rep_sgd import RepSGD

__all__ = ['GradMult', 'GradTerm', 'RepAdamW', 'RepSGD', 'get_grad_mult', 'set_grad_mult']
