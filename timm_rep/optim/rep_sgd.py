"""SGD with the gradients of convolution kernels multiplied (RepOptimizers, section 3.4)."""
from typing import List

import torch
from torch.optim import SGD
from torch.optim.sgd import sgd

from timm_rep.layers.grad_mult import get_grad_mult, to_local

from ._base import RepOptimizerMixin
from ._chunks import Scratch, flat, match_strides, row_chunks, use_fused
from ._triton import launch, use_triton

__all__ = ['RepSGD']


class RepSGD(RepOptimizerMixin, SGD):
    """``torch.optim.SGD``, with the gradient of each parameter that has a GradMult multiplied by it.

    The multiplier is the sum of the squared scales of the branches (rule of iteration). It is applied before momentum;
    weight decay is not multiplied, and ``p.grad`` is left unchanged. Parameters without a GradMult are updated as by
    torch.

    The multiplier is not part of the state: state dicts can be exchanged with ``torch.optim.SGD``. The arguments are
    those of ``torch.optim.SGD`` without ``differentiable``, and ``strict``: whether to raise an error if no parameter
    has a GradMult, True by default.

    On a GPU ``fused=True`` selects Triton kernels for the parameters with a GradMult; without it torch's own kernels
    update them.

    Clipping the gradients breaks the equivalence with the CSLA block, whose gradients have another norm. Hugging Face's
    Trainer clips at 1.0 by default: set ``max_grad_norm=0`` there.
    """

    _plain_takes_sparse = True
    _rule = 'squared'

    def _plain_update(self, params: List[torch.Tensor], group: dict) -> None:
        buffers = [self.state[p].get('momentum_buffer') for p in params]
        if self._scalers['found_inf'] is not None and group['momentum'] != 0 and any(b is None for b in buffers):
            # torch's fused kernel, where it skips its first step, leaves a new buffer uninitialized for the second one
            group = {**group, 'dampening': 0} if all(b is None for b in buffers) else group
            buffers = [torch.zeros_like(p) if b is None else b for p, b in zip(params, buffers)]
        self._update(params, [p.grad for p in params], buffers, group)
        if group['momentum'] != 0:
            for param, buffer in zip(params, buffers):
                self.state[param]['momentum_buffer'] = buffer

    def _update(self, params: list, grads: list, buffers: list, group: dict) -> None:
        names = 'lr', 'momentum', 'dampening', 'weight_decay', 'nesterov', 'maximize', 'foreach', 'fused'
        sgd(
            params,
            grads,
            buffers,
            has_sparse_grad=any(g.is_sparse for g in grads),
            **self._scalers,
            **{name: group[name] for name in names},
        )

    def _multiplied_update(self, param: torch.Tensor, group: dict, scratch: Scratch) -> None:
        grad_mult, state, buffer = get_grad_mult(param), self.state[param], None
        if group['momentum'] != 0:
            buffer = state.get('momentum_buffer')
            if buffer is None:
                # stays zero if this step fails or is skipped; the first update is not dampened
                buffer, group = torch.zeros_like(param), {**group, 'dampening': 0}
            state['momentum_buffer'] = match_strides(param, buffer)
            buffer = to_local(state['momentum_buffer'])
        param, grad = to_local(param).detach(), to_local(param.grad)
        if use_triton(param, [grad] if buffer is None else [grad, buffer], group):
            launch(
                'sgd_kernel', param, grad, [buffer], grad_mult.table(self._rule, param.device), grad_mult.row_offset,
                group,
                **self._scalers,
                momentum=group['momentum'],
                new_weight=1 - group['dampening'],
                NESTEROV=group['nesterov'],
            )
            return
        fused = use_fused(param, group)
        in_order = flat if fused else lambda x: x
        group = {**group, 'foreach': False, 'fused': fused}
        for rows in row_chunks(param):
            chunk, chunk_buffer = param[rows], None if buffer is None else in_order(buffer[rows])
            product = grad_mult.multiply(grad[rows], self._rule, out=scratch.like(chunk), start=rows.start)
            self._update([in_order(chunk)], [in_order(product)], [chunk_buffer], group)
