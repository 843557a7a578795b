"""SGD that carries a structure's prior (RepOptimizers, section 3.4)."""
from typing import List

import torch
from torch.optim import SGD
from torch.optim.sgd import sgd

from ._chunks import Scratch, in_layout_of, row_chunks, use_fused
from ._rep_optimizer import RepOptimizerMixin
from .grad_mult import get_grad_mult, local

__all__ = ['RepSGD']


class RepSGD(RepOptimizerMixin, SGD):
    """``torch.optim.SGD``, with the gradient of each parameter that has a GradMult multiplied by it.

    The multiplier is the sum of the squared scales of the branches, applied before momentum; weight decay is not
    multiplied (rule of iteration). ``p.grad`` is left as the backward pass wrote it. Other parameters are updated as
    torch does. The multiplier is not state: state dicts go both ways between this optimizer and ``torch.optim.SGD``.

    Clipping gradients before the step breaks the equivalence with the CSLA block, whose gradients it does not see.
    """

    _plain_takes_sparse = True

    def _plain_update(self, params: List[torch.Tensor], group: dict) -> None:
        buffers = [self.state[p].get('momentum_buffer') for p in params]
        grads = [p.grad for p in params]
        self._update(params, grads, buffers, group, foreach=group['foreach'], fused=group['fused'])
        if group['momentum'] != 0:
            for param, buffer in zip(params, buffers):
                self.state[param]['momentum_buffer'] = buffer

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
        grad_mult = get_grad_mult(param)
        state = self.state[param]
        buffer = state.get('momentum_buffer')
        first = group['momentum'] != 0 and buffer is None
        if first:
            buffer = state['momentum_buffer'] = torch.empty_like(param)
        elif buffer is not None:
            buffer = state['momentum_buffer'] = in_layout_of(param, buffer)
        param, grad, buffer = local(param).detach(), local(param.grad), None if buffer is None else local(buffer)
        fused = use_fused(param, group)
        for rows in row_chunks(param):
            chunk = param[rows]
            product = grad_mult.multiply(grad[rows], 'squared', out=scratch.like(chunk), start=rows.start)
            buffers = [None if first or buffer is None else buffer[rows]]
            self._update([chunk], [product], buffers, group, foreach=False, fused=fused)
            if first:
                buffer[rows] = buffers[0]
