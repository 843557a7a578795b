"""What the optimizers of this package share: what they refuse, and the two kinds of parameters in a step."""
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

import torch
from torch.autograd.graph import increment_version

from timm_rep.layers.grad_mult import get_grad_mult, local, set_grad_mult

from ._chunks import Scratch
from ._triton import Launch, Launches, has_numbers_only, kernels_run_on, launched_together, runs_kernels

__all__ = ['RepOptimizerMixin']


class _Plan(NamedTuple):
    """How a step updates the parameters of a group that have a GradMult, until something about them changes.

    Attributes:
        facts: Of parameters, gradients and state, all that it depends on.
        launches: Of Triton kernels.
        others: Parameters that are updated one by one.
    """
    facts: list
    launches: List[Launch]
    others: List[torch.Tensor]


class RepOptimizerMixin:
    """Goes before an optimizer of torch, which then updates parameters without a GradMult as it always does.

    For Triton a class has the name of its ``_kernel``, the ``_rule`` of its GradMults, ``_kernel_facts()`` of a group
    that its state depends on, ``_kernel_state()`` of a parameter, made if it is new, and ``_kernel_numbers()`` of a
    step.
    """

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
        self._launches, self._plans = Launches(), {}
        _check_grad_mults(type(self).__name__, self.param_groups, strict)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if param_group.get('differentiable', self.defaults['differentiable']):
            raise ValueError(
                f'{type(self).__name__} does not differentiate through its steps: leave differentiable at False.')
        super().add_param_group(param_group)

    # A copy of an optimizer has copies of the parameters, which torch makes without what is attached to them.
    def __getstate__(self) -> Dict[str, Any]:
        grad_mults = [[get_grad_mult(p) for p in group['params']] for group in self.param_groups]
        return {**super().__getstate__(), '_grad_mults': grad_mults}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        state = dict(state)
        grad_mults = state.pop('_grad_mults', [])
        super().__setstate__(state)
        self._launches, self._plans = Launches(), {}
        for group, mults in zip(self.param_groups, grad_mults):
            for param, grad_mult in zip(group['params'], mults):
                if grad_mult is not None and get_grad_mult(param) is None:
                    set_grad_mult(param, grad_mult)

    @torch.no_grad()
    def step(self, closure=None) -> Optional[torch.Tensor]:
        """Perform one step.

        Args:
            closure: Reevaluates the model and returns the loss.

        Raises:
            RuntimeError: A gradient is sparse or complex where a dense real one is needed; nothing has been updated.
            ValueError: A parameter with a GradMult is no kernel any more; nothing has been updated.
            OverflowError: A multiplier is more than the dtype of its parameter holds.
        """
        if 'capturable' in self.defaults:  # the check reads it
            if hasattr(self, '_accelerator_graph_capture_health_check'):
                self._accelerator_graph_capture_health_check()
            else:  # its name before torch 2.9
                self._cuda_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group['params']:
                if param.grad is not None and (param.grad.is_sparse or param.is_complex() or param.dim() != 4):
                    self._check(param)
        if getattr(self, 'found_inf', None) is not None:
            # GradScaler's sum over devices; torch's kernels skip a step for a 1 only
            self.found_inf = (self.found_inf != 0).to(torch.float32)
        scratch, kernels_on = Scratch(), kernels_run_on()
        if kernels_on:
            self._launches.tables.begin_step()
        for index, group in enumerate(self.param_groups):
            plain, multiplied = [], []
            for param in group['params']:
                if param.grad is not None:
                    (plain if get_grad_mult(param) is None else multiplied).append(param)
            # first what has the most to do: a GPU works on it while the rest is prepared
            if kernels_on and multiplied and has_numbers_only(group):
                plan = self._plan(index, multiplied, group, kernels_on)
                for launch in plan.launches:
                    self._kernel_update(launch, group)
                multiplied = plan.others
            for param in multiplied:
                self._multiplied_update(param, group, scratch)
            if plain:
                self._plain_update(plain, group)
        return loss

    def _plan(self, index: int, params: List[torch.Tensor], group: dict, device_type: str) -> _Plan:
        """The plan for the group with this index: that of the step before, as long as its facts stay."""
        facts = self._facts(params, group, device_type)
        plan = self._plans.get(index)
        if plan is not None and plan.facts == facts:
            return plan
        together: Dict[tuple, List[torch.Tensor]] = {}
        others = []
        for param in params:
            states = [local(x) for name, x in self.state[param].items() if x is not None and name != 'step']
            shard = local(param)
            if shard.device.type == device_type and runs_kernels(shard, local(param.grad), states, group):
                together.setdefault(launched_together(shard), []).append(param)
            else:
                others.append(param)
        launches = []
        for of in together.values():
            states, first = zip(*(self._kernel_state(param, group) for param in of))
            for param in of:  # ready for torch's own parts, too: a CUDA graph that captures them cannot copy to the GPU
                get_grad_mult(param).vectors(self._rule, local(param).device, param.dtype)
            launches.append(Launch(
                of, [[local(x) for x in state] for state in zip(*states)], list(first),
                all(local(p) is p and p.stride() == p.grad.stride() for p in of)))
        plan = _Plan(facts, launches, others)
        # state that is new has another meaning in the next step; a shard is another tensor each time
        if all(local(p) is p for p in params) and not any(first for launch in launches for first in launch.first):
            # its facts once more: there may be state now that was not there, or in another layout
            self._plans[index] = plan._replace(facts=self._facts(params, group, device_type))
        return plan

    def _facts(self, params: List[torch.Tensor], group: dict, device_type: str) -> list:
        """All that a plan depends on but addresses, which the tables of a launch follow."""
        facts = [device_type, group['fused'], group['foreach'], *self._kernel_facts(group)]
        for param in params:
            grad = param.grad
            facts += (
                id(param), param.dtype, param.device, param.shape, param.stride(), grad.dtype, grad.stride(),
                get_grad_mult(param))
            for name, x in self.state[param].items():
                if x is not None and name != 'step':
                    facts += id(x), x.dtype, x.device, x.stride()
        return facts

    def _kernel_update(self, launch: Launch, group: dict) -> None:
        args, numbers = self._kernel_numbers(launch.params, group)
        self._launches(
            self._kernel,
            self._rule,
            launch,
            *args,
            grad_scale=getattr(self, 'grad_scale', None),
            found_inf=getattr(self, 'found_inf', None),
            lr=group['lr'],
            weight_decay=group['weight_decay'],
            maximize=group['maximize'],
            **numbers,
        )
        # as all of torch's in-place operations do: autograd is to notice a backward pass that comes too late
        increment_version(launch.params)

    def _check(self, param: torch.Tensor) -> None:
        grad_mult = get_grad_mult(param)
        multiplied = grad_mult is not None
        if param.grad.is_sparse and (multiplied or not self._plain_takes_sparse):
            kind = 'sparse'
        elif param.is_complex() and multiplied:
            kind = 'complex'
        elif multiplied and param.dim() != 4:
            raise ValueError(
                f'{type(self).__name__} has a parameter of shape {tuple(param.shape)} with a GradMult for a kernel of '
                f'shape {grad_mult.shape}: a wrapper has flattened it, as FullyShardedDataParallel does. Shard the '
                'model with FSDP2 (torch.distributed.fsdp.fully_shard), call timm_rep.attach_grad_mults(model, scales) '
                'again and make the optimizer anew.')
        else:
            return
        raise RuntimeError(
            f'{type(self).__name__} takes dense real gradients, got a {kind} one for a parameter of shape '
            f'{tuple(param.shape)}. ' + ('Take its GradMult off, or make' if multiplied else 'Make')
            + ' the gradient dense.')


def _check_grad_mults(name: str, param_groups: Iterable[dict], strict: bool) -> None:
    """Refuse to start an optimizer that would be a plain one.

    Raises:
        ValueError: No parameter has a GradMult, and strict is True.
    """
    if strict and all(get_grad_mult(p) is None for group in param_groups for p in group['params']):
        raise ValueError(
            f'{name} was given no parameter with a GradMult, so it would train like the plain optimizer. Create a '
            "RepOpt model with scales (timm.create_model('repopt_vgg_b1')), or call timm_rep.attach_grad_mults(model, "
            'scales) before making the optimizer, also after a wrapper that replaces the parameters (FSDP2). For a '
            'plain optimizer on purpose pass strict=False.')
