"""What the optimizers of this package share: what they refuse, and the two kinds of parameters in a step."""
from typing import Iterable, Optional

import torch

from ._chunks import Scratch
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
        _check_grad_mults(type(self).__name__, self.param_groups, strict)

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
        scratch = Scratch()
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            plain = [p for p in params if get_grad_mult(p) is None]
            if plain:
                self._plain_update(plain, group)
            for param in params:
                if get_grad_mult(param) is not None:
                    _check_gradient(type(self).__name__, param)
                    self._multiplied_update(param, group, scratch)
        return loss


def _check_gradient(name: str, param: torch.Tensor) -> None:
    """Refuse what no multiplier fits.

    Raises:
        RuntimeError: The gradient is sparse, or the parameter complex.
    """
    if param.grad.is_sparse or param.is_complex():
        kind = 'sparse' if param.grad.is_sparse else 'complex'
        raise RuntimeError(
            f'{name} multiplies dense real gradients, got a {kind} one for a parameter of shape {tuple(param.shape)}. '
            'Take its GradMult off, or make the gradient dense.')


def _check_grad_mults(name: str, param_groups: Iterable[dict], strict: bool) -> None:
    """Refuse to start an optimizer that would be a plain one.

    Raises:
        ValueError: No parameter has a GradMult, and strict is True.
    """
    if strict and all(get_grad_mult(p) is None for group in param_groups for p in group['params']):
        raise ValueError(
            f'{name} was given no parameter with a GradMult, so it would train like the plain optimizer. Create a '
            "RepOpt model with scales (timm.create_model('repopt_vgg_b1')), or call timm_rep.attach_grad_mults(model, "
            'scales) before making the optimizer, also after a wrapper that replaces the parameters (FSDP). For a '
            'plain optimizer on purpose pass strict=False.')
