"""RepSGD and RepAdamW, which timm's optimizer factory knows as 'repsgd' and 'repadamw'."""
from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry  # timm has no public name for it

from timm_rep.layers.grad_mult import GradMult, get_grad_mult, set_grad_mult

from .rep_optim import RepAdamW, RepSGD

__all__ = ['GradMult', 'RepAdamW', 'RepSGD', 'get_grad_mult', 'set_grad_mult']

default_registry.register(OptimInfo(
    name='repsgd',
    opt_class=RepSGD,
    description='torch.optim.SGD with Nesterov momentum, gradients multiplied by the GradMults of a RepOpt model',
    has_eps=False,
    has_momentum=True,
    defaults={'nesterov': True},
))
default_registry.register(OptimInfo(
    name='repadamw',
    opt_class=RepAdamW,
    description='torch.optim.AdamW, updates multiplied by the GradMults of a RepOpt model',
    has_betas=True,
))
