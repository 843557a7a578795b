"""What the optimizers of this package share: the check at the start, and the two kinds of parameters in a step."""
from typing import Optional

import torch

from ._chunks import Scratch, check_grad_mults, check_gradient
from .grad_mult import get_grad_mult

__all__ = ['RepOptimizerMixin']


class RepOptimizerMixin:
    """Goes before an optimizer of torch, which then updates parameters without a GradMult as it always does."""

    def __init__(self, params, lr=1e-3, *args, strict: bool = True, **kwargs):
        """
        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            strict: Refuse to start without any GradMult.
            args: The other arguments of torch's optimizer.
            kwargs: Likewise.

        Raises:
            ValueError: No parameter has a GradMult, and strict is True.
        """
        super().__init__(params, lr, *args, **kwargs)
        check_grad_mults(type(self).__name__, self.param_groups, strict)

    @torch.no_grad()
    def step(self, closure=None) -> Optional[torch.Tensor]:
        """Perform one step.

        Args:
            closure: Reevaluates the model and returns the loss.

        Raises:
            RuntimeError: A parameter with a GradMult has a sparse or complex gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scratch = Scratch(), Scratch()
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            plain = [p for p in params if get_grad_mult(p) is None]
            if plain:
                self._plain_update(plain, group)
            for param in params:
                if get_grad_mult(param) is not None:
                    check_gradient(type(self).__name__, param)
                    self._multiplied_update(param, group, scratch)
        return loss
