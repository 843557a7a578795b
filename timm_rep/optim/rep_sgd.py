"""SGD that carries a structure's prior (RepOptimizers, section 3.4)."""
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch.optim import SGD
from torch.optim.sgd import sgd

from timm_rep.layers.grad_mult import get_grad_mult, local

from ._base import RepOptimizerMixin
from ._chunks import Scratch, flat, match_strides, row_chunks, use_fused

__all__ = ['RepSGD']


class RepSGD(RepOptimizerMixin, SGD):
    """``torch.optim.SGD``, with the gradient of each parameter that has a GradMult multiplied by it.

    The multiplier is the sum of the squared scales of the branches, applied before momentum; weight decay is not
    multiplied (rule of iteration). ``p.grad`` is left as the backward pass wrote it. Other parameters are updated as
    torch does. The multiplier is not state: state dicts go both ways between this optimizer and ``torch.optim.SGD``.

    Clipping gradients before the step breaks the equivalence with the CSLA block, whose gradients it does not see.
    """

    _plain_takes_sparse = True
    _kernel, _rule = 'sgd_kernel', 'squared'

    def _plain_update(self, params: List[torch.Tensor], group: dict) -> None:
        buffers = [self.state[p].get('momentum_buffer') for p in params]
        grads = [p.grad for p in params]
        self._update(params, grads, buffers, group, foreach=group['foreach'], fused=group['fused'])
        if group['momentum'] != 0:
            for param, buffer in zip(params, buffers):
                self.state[param]['momentum_buffer'] = buffer

    def _update(self, params, grads, buffers, group, foreach, fused) -> None:
        dampening, found_inf = group['dampening'], getattr(self, 'found_inf', None)
        if found_inf is not None and group['momentum'] != 0 and any(b is None for b in buffers):
            # torch's fused kernel, where it skips its first step, leaves a new buffer uninitialized, for the second one
            dampening = 0 if all(b is None for b in buffers) else dampening
            buffers[:] = [torch.zeros_like(p) if b is None else b for p, b in zip(params, buffers)]
        sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=any(g.is_sparse for g in grads),
            foreach=foreach,
            fused=fused,
            grad_scale=getattr(self, 'grad_scale', None),
            found_inf=found_inf,
            weight_decay=group['weight_decay'],
            momentum=group['momentum'],
            lr=group['lr'],
            dampening=dampening,
            nesterov=group['nesterov'],
            maximize=group['maximize'],
        )

    def _multiplied_update(self, param: torch.Tensor, group: dict, scratch: Scratch) -> None:
        grad_mult = get_grad_mult(param)
        buffer, new = self._state_of(param, group)
        param, grad, buffer = local(param).detach(), local(param.grad), None if buffer is None else local(buffer)
        fused = use_fused(param, group)
        for rows in row_chunks(param):
            chunk, chunk_buffer = param[rows], None if buffer is None else buffer[rows]
            product = grad_mult.multiply(grad[rows], self._rule, out=scratch.like(chunk), start=rows.start)
            if fused:
                chunk, product = flat(chunk), flat(product)
                chunk_buffer = None if buffer is None else flat(chunk_buffer)
            buffers = [None if new else chunk_buffer]
            self._update([chunk], [product], buffers, group, foreach=False, fused=fused)
            if new:
                chunk_buffer.copy_(buffers[0])

    def _state_of(self, param: torch.Tensor, group: dict) -> Tuple[Optional[torch.Tensor], bool]:
        """The momentum of a parameter in its layout, None if there is none at all, and whether it is new."""
        buffer = self.state[param].get('momentum_buffer')
        new = group['momentum'] != 0 and buffer is None
        if new:
            buffer = torch.zeros_like(param)  # which it still is if this step fails or is skipped
        if buffer is not None:
            buffer = self.state[param]['momentum_buffer'] = match_strides(param, buffer)
        return buffer, new

    def _kernel_facts(self, group: dict) -> Tuple[bool, ...]:
        return (group['momentum'] != 0,)

    def _kernel_state(self, param: torch.Tensor, group: dict) -> Tuple[List[torch.Tensor], bool]:
        buffer, new = self._state_of(param, group)
        return [buffer] if group['momentum'] != 0 else [], new

    def _kernel_numbers(self, params: List[torch.Tensor], group: dict) -> Tuple[List[torch.Tensor], Dict[str, Any]]:
        return [], dict(
            momentum=group['momentum'],
            new_weight=1 - group['dampening'],
            has_momentum=group['momentum'] != 0,
            nesterov=group['nesterov'],
        )
