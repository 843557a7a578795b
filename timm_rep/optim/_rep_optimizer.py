"""What the optimizers of this package share: what they refuse, and the two kinds of parameters in a step."""
from typing import Any, Dict, Iterable, Optional

import torch

from ._chunks import Scratch
from ._fused import Launches, kernels_run_on, launched_together, runs_kernels
from .grad_mult import get_grad_mult, local, set_grad_mult

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
        self._launches, self._on_kernels = Launches(), {}
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
        self._launches, self._on_kernels = Launches(), {}
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
                if param.grad is not None:
                    self._check_gradient(param)
        scratch, kernels_on = Scratch(), kernels_run_on()
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            plain = [p for p in params if get_grad_mult(p) is None]
            if plain:
                self._plain_update(plain, group)
            together = {}
            for param in params:
                if get_grad_mult(param) is None:
                    continue
                if param.device.type == kernels_on and self._runs_kernels(param, group):
                    together.setdefault(launched_together(local(param)), []).append(param)
                else:
                    self._multiplied_update(param, group, scratch)
            for multiplied in together.values():
                self._kernel_update(multiplied, group)
        return loss

    def _runs_kernels(self, param: torch.Tensor, group: dict) -> bool:
        """Whether a kernel updates a parameter: found out once, as long as nothing about it changes."""
        states = [x for name, x in self.state[param].items() if x is not None and name != 'step']
        seen = None
        if local(param) is param:
            grad = param.grad
            seen = [
                param.data_ptr(), param.stride(), grad.stride(), grad.dtype, group['fused'], group['foreach'],
                *map(id, states)]
            known = self._on_kernels.get(param)
            if known is not None and known[0] == seen:
                return True
        runs = runs_kernels(local(param), local(param.grad), [local(x) for x in states], group)
        if runs and seen is not None:
            self._on_kernels[param] = seen, states  # held, so that no other tensor gets the id of one
        return runs

    def _check_gradient(self, param: torch.Tensor) -> None:
        multiplied = get_grad_mult(param) is not None
        if param.grad.is_sparse and (multiplied or not self._plain_takes_sparse):
            kind = 'sparse'
        elif param.is_complex() and multiplied:
            kind = 'complex'
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
            'scales) before making the optimizer, also after a wrapper that replaces the parameters (FSDP). For a '
            'plain optimizer on purpose pass strict=False.')
