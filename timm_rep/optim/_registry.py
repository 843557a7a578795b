"""Registration of RepSGD and RepAdamW with timm's optimizer factory."""
from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry  # timm has no public name for it

from .rep_optim import RepAdamW, RepSGD

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
