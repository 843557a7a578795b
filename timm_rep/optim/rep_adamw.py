"""AdamW that carries a structure's prior: the method is not bound to SGD (RepOptimizers, section 4.2)."""
from typing import Any, Dict, List, Tuple

import torch
from torch.optim import AdamW
from torch.optim.adamw import adamw

from timm_rep.layers.grad_mult import get_grad_mult, local

from ._base import RepOptimizerMixin
from ._chunks import Scratch, flat, match_strides, row_chunks, use_fused

__all__ = ['RepAdamW']


class RepAdamW(RepOptimizerMixin, AdamW):
    """``torch.optim.AdamW``, with the update of each parameter that has a GradMult multiplied by it.

    AdamW's update ignores the magnitude of the gradient: a branch's weight moves by ``-lr * sign(scale) * u`` and its
    contribution by ``scale`` times that, so the multiplier is the sum of the *absolute* scales, on the update (rule of
    iteration). Weight decay is not multiplied. Exact up to ``eps``, which the branches' gradients meet scaled. Other
    parameters are updated as torch does; state dicts go both ways between this optimizer and ``torch.optim.AdamW``.

    ``decoupled_weight_decay`` is always true.

    Clipping gradients before the step breaks the equivalence with the CSLA block, whose gradients it does not see.
    """

    _plain_takes_sparse = False
    _kernel, _rule = 'adamw_kernel', 'absolute'

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if not param_group.get('decoupled_weight_decay', True):
            raise ValueError(
                'RepAdamW decays the weights apart from their gradients: decoupled_weight_decay=False is not for it.')
        super().add_param_group(param_group)

    def _plain_update(self, params: List[torch.Tensor], group: dict) -> None:
        self._update(
            params,
            [p.grad for p in params],
            self._state_of(params, group),
            group,
            weight_decay=group['weight_decay'],
            foreach=group['foreach'],
            fused=group['fused'],
        )

    def _state_of(self, params: List[torch.Tensor], group: dict) -> Dict[str, List[torch.Tensor]]:
        """The state of some parameters in the lists that adamw() takes, initialized where it is new, as torch does."""
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
        lists = {'max_exp_avg_sqs': [], **{key: [self.state[p][name] for p in params] for key, name in names.items()}}
        return {**lists, 'state_steps': [self.state[p]['step'] for p in params]}

    def _update(self, params, grads, state, group, weight_decay, foreach, fused) -> None:
        beta1, beta2 = group['betas']
        adamw(
            params,
            grads,
            **state,
            foreach=foreach,
            capturable=group['capturable'],
            fused=fused,
            grad_scale=getattr(self, 'grad_scale', None),
            found_inf=getattr(self, 'found_inf', None),
            has_complex=any(p.is_complex() for p in params),
            amsgrad=group['amsgrad'],
            beta1=beta1,
            beta2=beta2,
            lr=group['lr'],
            weight_decay=weight_decay,
            eps=group['eps'],
            maximize=group['maximize'],
        )

    def _multiplied_update(self, param: torch.Tensor, group: dict, scratch: Scratch) -> None:
        grad_mult = get_grad_mult(param)
        state = self._state_in_layout([param], group)
        step = state.pop('state_steps')[0]
        state = {name: [local(x) for x in tensors] for name, tensors in state.items()}
        param, grad = local(param).detach(), local(param.grad)
        fused = use_fused(param, group)
        in_order = flat if fused else lambda x: x
        taken = self._steps_taken(param.device)
        for rows in row_chunks(param):
            chunk = param[rows]
            # torch's own arithmetic on a parameter of zeros leaves the bare update
            update = scratch.like(chunk).zero_()
            chunk_state = {name: [in_order(x[rows]) for x in tensors] for name, tensors in state.items()}
            self._update(
                [in_order(update)],
                [in_order(match_strides(chunk, grad[rows]))],
                {**chunk_state, 'state_steps': [step.to(param.device if fused else step.device, copy=True)]},
                group,
                weight_decay=0.,
                foreach=False,
                fused=fused,
            )
            chunk.mul_(1 - group['lr'] * group['weight_decay'] * taken)
            grad_mult.add_product(chunk, update, self._rule, start=rows.start)
        step.add_(self._steps_taken(step.device))

    def _state_in_layout(self, params: List[torch.Tensor], group: dict) -> Dict[str, List[torch.Tensor]]:
        for param in params:
            for name, x in self.state[param].items():
                if name != 'step':
                    self.state[param][name] = match_strides(param, x)
        return self._state_of(params, group)

    def _steps_taken(self, device: torch.device):
        """1, or 0 on the device: GradScaler leaves it to a fused kernel to skip a step, so the rest is skipped too."""
        found_inf = getattr(self, 'found_inf', None)
        return 1 if found_inf is None else 1 - found_inf.to(device)

    def _kernel_facts(self, group: dict) -> Tuple[bool, ...]:
        return (group['amsgrad'],)

    def _kernel_state(self, param: torch.Tensor, group: dict) -> Tuple[List[torch.Tensor], bool]:
        state = self._state_in_layout([param], group)
        del state['state_steps']
        return [x for of_one in ('exp_avgs', 'exp_avg_sqs', 'max_exp_avg_sqs') for x in state[of_one]], False

    def _kernel_numbers(self, params: List[torch.Tensor], group: dict) -> Tuple[List[torch.Tensor], Dict[str, Any]]:
        """With what corrects the bias of the averages, and counts the step."""
        steps = [self.state[p]['step'] for p in params]
        devices = {step.device for step in steps}
        for device in devices:
            of_device = [step for step in steps if step.device == device]
            torch._foreach_add_(of_device, self._steps_taken(device))
        if len(devices) > 1:  # those of a checkpoint may be elsewhere than new ones
            steps = [step.to(steps[0].device) for step in steps]
        beta1, beta2 = group['betas']
        steps = torch.stack(steps).double()
        corrections = torch.stack((1 - beta1 ** steps, (1 - beta2 ** steps).sqrt()), dim=1)
        return [corrections], dict(
            new_weight1=1 - beta1, beta2=beta2, new_weight2=1 - beta2, eps=group['eps'], amsgrad=group['amsgrad'])
