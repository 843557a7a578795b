"""The step that RepSGD and RepAdamW share."""
from typing import Any, Dict, List, Optional

import torch

from timm_rep.layers.grad_mult import get_grad_mult, set_grad_mult

from ._chunks import Scratch

__all__ = ['RepOptimizerMixin']


class RepOptimizerMixin:
    """First base of RepSGD and RepAdamW, before torch's optimizer.

    A subclass defines:

    - ``_rule``: the rule of its GradMults, 'squared' or 'absolute'.
    - ``_plain_takes_sparse``: whether a parameter without a GradMult may have a sparse gradient, unless fused.
    - ``_plain_update(params, group)``: torch's own update of a list of parameters without a GradMult.
    - ``_multiplied_update(param, group, scratch)``: the update of one parameter with a GradMult.
    """

    def __init__(self, params, lr=1e-3, *args, strict: bool = True, **kwargs):
        """
        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            strict: Raise an error if no parameter has a GradMult.
            args: Further arguments of torch's optimizer.
            kwargs: Further arguments of torch's optimizer.

        Raises:
            ValueError: No parameter has a GradMult and strict is True, or an option is not supported.
        """
        super().__init__(params, lr, *args, **kwargs)
        if strict and all(get_grad_mult(p) is None for group in self.param_groups for p in group['params']):
            raise ValueError(
                f'{type(self).__name__} was given no parameter with a GradMult, so it would train like the plain '
                "optimizer. Create a RepOpt model with scales (timm.create_model('repopt_vgg_b1')), or call "
                'timm_rep.attach_grad_mults(model, scales) before making the optimizer, also after a wrapper that '
                'replaces the parameters (FSDP2). For a plain optimizer on purpose pass strict=False.')

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            ValueError: An option is not supported.
        """
        if param_group.get('differentiable', self.defaults['differentiable']):
            raise ValueError(
                f'{type(self).__name__} does not differentiate through its steps: leave differentiable at False.')
        super().add_param_group(param_group)

    # torch copies and unpickles parameters without the attributes attached to them
    def __getstate__(self) -> Dict[str, Any]:
        grad_mults = [[get_grad_mult(p) for p in group['params']] for group in self.param_groups]
        return {**super().__getstate__(), '_grad_mults': grad_mults}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        state = dict(state)
        grad_mults = state.pop('_grad_mults', [])
        super().__setstate__(state)
        for group, mults in zip(self.param_groups, grad_mults):
            for param, grad_mult in zip(group['params'], mults):
                if grad_mult is not None and get_grad_mult(param) is None:
                    set_grad_mult(param, grad_mult)

    @torch.no_grad()
    def step(self, closure=None) -> Optional[torch.Tensor]:
        """Perform one step. All gradients and multipliers are checked before any parameter is updated.

        Args:
            closure: Callable that reevaluates the model and returns the loss.

        Returns:
            The loss of the closure, or None.

        Raises:
            RuntimeError: A gradient is sparse or complex where a dense real one is needed.
            ValueError: A parameter with a GradMult is not 4-dimensional any more.
            OverflowError: A multiplier exceeds the range of the dtype of its parameter.
        """
        if 'capturable' in self.defaults:  # the check reads this option
            new_name, old_name = '_accelerator_graph_capture_health_check', '_cuda_graph_capture_health_check'  # < 2.9
            getattr(self, new_name if hasattr(self, new_name) else old_name)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group['params'] if p.grad is not None]) for group in self.param_groups]
        for group, params in groups:
            for param in params:
                self._check(param, group)
        if self._scalers['found_inf'] is not None:
            # GradScaler sums over devices, but torch's fused kernels skip a step only for exactly 1
            self.found_inf = (self.found_inf != 0).to(torch.float32)
        scratch = Scratch()
        for group, params in groups:
            plain: List[torch.Tensor] = []
            for param in params:
                if get_grad_mult(param) is None:
                    plain.append(param)
                else:
                    self._multiplied_update(param, group, scratch)
            if plain:
                self._plain_update(plain, group)
        return loss

    @property
    def _scalers(self) -> Dict[str, Optional[torch.Tensor]]:
        """``grad_scale`` and ``found_inf``: attributes that GradScaler sets for the time of a step, None otherwise."""
        return {name: getattr(self, name, None) for name in ('grad_scale', 'found_inf')}

    def _check(self, param: torch.Tensor, group: Dict[str, Any]) -> None:
        """Raise what step() documents if a parameter cannot be updated."""
        grad_mult = get_grad_mult(param)
        if grad_mult is None:
            if param.grad.is_sparse and (group['fused'] or not self._plain_takes_sparse):
                raise RuntimeError(
                    f'{type(self).__name__}{" with fused=True" if self._plain_takes_sparse else ""} needs dense '
                    f'gradients, got a sparse one for a parameter of shape {tuple(param.shape)}: make the gradient '
                    'dense.')
            return
        if param.grad.is_sparse or param.is_complex():
            raise RuntimeError(
                f'{type(self).__name__} needs dense real gradients, got a '
                f'{"sparse" if param.grad.is_sparse else "complex"} one for a parameter of shape '
                f'{tuple(param.shape)}: remove its GradMult, or make the gradient dense and real.')
        if param.dim() != 4:
            raise ValueError(
                f'{type(self).__name__} has a parameter of shape {tuple(param.shape)} with a GradMult for a kernel of '
                f'shape {grad_mult.shape}: a wrapper has flattened it, as FullyShardedDataParallel does. Shard the '
                'model with FSDP2 (torch.distributed.fsdp.fully_shard), call timm_rep.attach_grad_mults(model, scales) '
                'again and make the optimizer anew.')
        grad_mult.vectors(self._rule, param.device, param.dtype)  # raises OverflowError; cached
