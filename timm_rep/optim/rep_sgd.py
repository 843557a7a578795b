"""SGD that carries a structure's prior (RepOptimizers, section 3.4)."""
from typing import Optional

import torch
from torch.optim import SGD
from torch.optim.sgd import sgd

from ._chunks import Scratch, check_grad_mults, check_gradient, row_chunks, use_fused
from .grad_mult import get_grad_mult

__all__ = ['RepSGD']


class RepSGD(SGD):
    """``torch.optim.SGD``, with the gradient of each parameter that has a GradMult multiplied by it.

    The multiplier is the sum of the squared scales of the branches, applied before momentum; weight decay is not
    multiplied (rule of iteration). ``p.grad`` is left as the backward pass wrote it. Other parameters are updated as
    torch does. The multiplier is not state: state dicts go both ways between this optimizer and ``torch.optim.SGD``.

    Clipping gradients before the step breaks the equivalence with the CSLA block, whose gradients it does not see.
    """

    def __init__(self, params, lr=1e-3, *args, strict: bool = True, **kwargs):
        """
        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            strict: Refuse to start without any GradMult.
            args: The other arguments of torch.optim.SGD.
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
        scratch = Scratch()
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            plain = [p for p in params if get_grad_mult(p) is None]
            if plain:
                buffers = [self.state[p].get('momentum_buffer') for p in plain]
                grads = [p.grad for p in plain]
                self._update(plain, grads, buffers, group, foreach=group['foreach'], fused=group['fused'])
                if group['momentum'] != 0:
                    for param, buffer in zip(plain, buffers):
                        self.state[param]['momentum_buffer'] = buffer
            for param in params:
                if get_grad_mult(param) is not None:
                    self._multiplied_update(param, group, scratch)
        return loss

    def _update(self, params, grads, buffers, group, foreach, fused) -> None:
        sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=any(g.is_sparse for g in grads),
            foreach=foreach,
            fused=fused,
            grad_scale=getattr(self, 'grad_scale', None),
            found_inf=getattr(self, 'found_inf', None),
            weight_decay=group['weight_decay'],
            momentum=group['momentum'],
            lr=group['lr'],
            dampening=group['dampening'],
            nesterov=group['nesterov'],
            maximize=group['maximize'],
        )

    def _multiplied_update(self, param: torch.Tensor, group: dict, scratch: Scratch) -> None:
        check_gradient(type(self).__name__, param)
        grad_mult = get_grad_mult(param)
        buffer = self.state[param].get('momentum_buffer')
        first = group['momentum'] != 0 and buffer is None
        if first:
            buffer = self.state[param]['momentum_buffer'] = torch.empty_like(param)
        for rows in row_chunks(param):
            chunk = param[rows]
            product = grad_mult.multiply(param.grad[rows], 'squared', out=scratch.like(chunk), start=rows.start)
            buffers = [None if first or buffer is None else buffer[rows]]
            self._update([chunk], [product], buffers, group, foreach=False, fused=use_fused(param, group))
            if first:
                buffer[rows] = buffers[0]
