"""AdamW with the updates of convolution kernels multiplied (RepOptimizers, section 4.2)."""
from typing import Any, Dict, List

import torch
from torch.optim import AdamW
from torch.optim.adamw import adamw

from timm_rep.layers.grad_mult import get_grad_mult, to_local

from ._base import RepOptimizerMixin
from ._chunks import Scratch, flat, match_strides, row_chunks, use_fused
from ._triton import launch, use_triton

__all__ = ['RepAdamW']


class RepAdamW(RepOptimizerMixin, AdamW):
    """``torch.optim.AdamW``, with the update of each parameter that has a GradMult multiplied by it.

    The update of AdamW does not depend on the magnitude of the gradient: a branch's weight moves by
    ``-lr * sign(scale) * u`` and its contribution to the kernel by ``scale`` times that. The multiplier is therefore
    the sum of the *absolute* scales, applied to the update (rule of iteration). Weight decay is not multiplied. The
    equivalence with the CSLA block is exact up to ``eps``. Parameters without a GradMult are updated as by torch.

    The multiplier is not part of the state: state dicts can be exchanged with ``torch.optim.AdamW``. The arguments are
    those of ``torch.optim.AdamW`` without ``differentiable``, and ``strict``: whether to raise an error if no parameter
    has a GradMult, True by default.

    On a GPU ``fused=True`` selects Triton kernels for the parameters with a GradMult; without it torch's own kernels
    update them.

    Clipping the gradients breaks the equivalence with the CSLA block, whose gradients have another norm. Hugging Face's
    Trainer clips at 1.0 by default: set ``max_grad_norm=0`` there.
    """

    _plain_takes_sparse = False
    _rule = 'absolute'

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            ValueError: An option is not supported.
        """
        if not param_group.get('decoupled_weight_decay', True):
            raise ValueError(
                'RepAdamW decays the weights apart from their gradients: leave decoupled_weight_decay at True.')
        super().add_param_group(param_group)

    def _plain_update(self, params: List[torch.Tensor], group: dict) -> None:
        self._update(params, [p.grad for p in params], self._state_of(params, group), group)

    def _state_of(self, params: List[torch.Tensor], group: dict) -> Dict[str, List[torch.Tensor]]:
        """The state of some parameters as the lists that adamw() takes, initialized where it is new, as torch does."""
        names = {'exp_avgs': 'exp_avg', 'exp_avg_sqs': 'exp_avg_sq'}
        if group['amsgrad']:
            names['max_exp_avg_sqs'] = 'max_exp_avg_sq'
        for param in params:
            state = self.state[param]
            if not state:
                on_device = group['capturable'] or group['fused']
                state['step'] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else 'cpu')
                for name in names.values():
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        lists = {key: [self.state[p][name] for p in params] for key, name in names.items()}
        return {'max_exp_avg_sqs': [], **lists, 'state_steps': [self.state[p]['step'] for p in params]}

    def _update(self, params: list, grads: list, state: Dict[str, list], group: dict) -> None:
        names = 'lr', 'eps', 'weight_decay', 'amsgrad', 'maximize', 'capturable', 'foreach', 'fused'
        adamw(
            params,
            grads,
            **state,
            beta1=group['betas'][0],
            beta2=group['betas'][1],
            has_complex=any(p.is_complex() for p in params),
            **self._scalers,
            **{name: group[name] for name in names},
        )

    def _multiplied_update(self, param: torch.Tensor, group: dict, scratch: Scratch) -> None:
        grad_mult = get_grad_mult(param)
        for name, x in self.state[param].items():
            if name != 'step':
                self.state[param][name] = match_strides(param, x)
        state = {name: [to_local(x) for x in tensors] for name, tensors in self._state_of([param], group).items()}
        step, = state.pop('state_steps')
        param, grad = to_local(param).detach(), to_local(param.grad)
        averages = [x for name in ('exp_avgs', 'exp_avg_sqs', 'max_exp_avg_sqs') for x in state[name]]
        if use_triton(param, [grad, *averages], group):
            step.add_(self._steps_taken(step.device))
            on_device = step.to(param.device, non_blocking=True)
            launch(
                'adamw_kernel', param, grad, [on_device, *averages, *[None] * (3 - len(averages))],
                grad_mult.table(self._rule, param.device), grad_mult.row_offset, group,
                **self._scalers,
                new_weight1=1 - group['betas'][0],
                new_weight2=1 - group['betas'][1],
                eps=group['eps'],
            )
            return
        fused = use_fused(param, group)
        in_order = flat if fused else lambda x: x
        decay = 1 - group['lr'] * group['weight_decay'] * self._steps_taken(param.device)
        group = {**group, 'weight_decay': 0., 'foreach': False, 'fused': fused}
        for rows in row_chunks(param):
            chunk = param[rows]
            # torch's own arithmetic on a parameter of zeros gives the bare update
            update = scratch.like(chunk).zero_()
            chunk_state = {name: [in_order(x[rows]) for x in tensors] for name, tensors in state.items()}
            # blocking, every kernel would wait for the device
            chunk_state['state_steps'] = [
                step.to(param.device if fused else step.device, non_blocking=True, copy=True)]
            self._update([in_order(update)], [in_order(match_strides(chunk, grad[rows]))], chunk_state, group)
            chunk.mul_(decay)
            grad_mult.add_product(chunk, update, self._rule, start=rows.start)
        step.add_(self._steps_taken(step.device))

    def _steps_taken(self, device: torch.device):
        """1, or 0 as a tensor where GradScaler leaves it to a fused kernel to skip a step."""
        found_inf = self._scalers['found_inf']
        return 1 if found_inf is None else 1 - found_inf.to(device)
