"""SGD and AdamW with the gradients or updates of convolution kernels multiplied.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), sections 3.4 and 4.2.
"""
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch.optim import SGD, AdamW
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from timm_rep.layers.grad_mult import MultipliedLayers, get_grad_mult, set_grad_mult, to_local

from ._chunks import Scratch, flat, in_chunks, match_strides, row_chunks, use_fused

Params = Union[Iterable[torch.Tensor], Iterable[Dict[str, Any]]]
# parameters that are updated alike, with the lists of their state by the names of torch's arguments, and their group
States = Iterator[Tuple[List[torch.Tensor], Dict[str, List[Any]], Dict[str, Any]]]


class _Pieces(NamedTuple):
    """Whole local parameters, or the rows of one of them from ``start`` on, with their gradients and GradMults.

    ``empty_like`` makes a buffer for a piece, ``relayout`` arranges a piece for torch's kernel.
    """
    params: List[torch.Tensor]
    grads: List[torch.Tensor]
    grad_mults: List[Any]
    start: int = 0
    empty_like: Callable[..., torch.Tensor] = torch.empty_like
    relayout: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


_Base: Any = object  # a subclass has torch's optimizer as its second base


class _RepOptimizer(_Base):
    """First base of RepSGD and RepAdamW, before torch's optimizer.

    A subclass defines:

    - ``_rule``: rule of its GradMults, 'squared' or 'absolute'.
    - ``_takes_sparse``: whether a parameter without a GradMult may have a sparse gradient.
    - ``_update_plain(params, group)``: update of parameters without a GradMult, as in torch.
    - ``_states(params, group)``: :data:`States` of parameters with a GradMult.
    - ``_update(pieces, state, group)``: update of pieces of them.
    """
    _rule: str
    _takes_sparse: bool
    found_inf: torch.Tensor  # set by GradScaler
    _models: Sequence[MultipliedLayers] = ()  # with strict, those of the parameters

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a parameter group; ValueError for an option that is not supported."""
        for name, required in ('differentiable', False), ('decoupled_weight_decay', True):
            if param_group.get(name, required) != required:
                raise ValueError(f'{name} must be {required} for {type(self).__name__}, got {not required}.')
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
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Optional[torch.Tensor]:
        """Perform one step. All gradients and multipliers are checked before any parameter is updated.

        Args:
            closure: Callable that reevaluates the model and returns the loss.

        Returns:
            The loss of the closure, or None.

        Raises:
            RuntimeError: A gradient is sparse or complex where a dense real one is needed.
            ValueError: With strict, GradMults were lost since the last step; or a parameter with a GradMult has another
                shape, or its layer now computes the weight from others.
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
        self._check_not_lost()
        if self._scalers['found_inf'] is not None:
            # GradScaler sums over devices, but torch's fused kernels skip a step only for exactly 1
            self.found_inf = (self.found_inf != 0).to(torch.float32)
        scratch = Scratch()
        for group, params in groups:
            plain = [p for p in params if get_grad_mult(p) is None]
            if plain:
                self._update_plain(plain, group)
            for some, state, shared in self._states([p for p in params if get_grad_mult(p) is not None], group):
                self._update_multiplied(some, state, shared, scratch)
        return loss

    def _update_multiplied(
            self,
            params: List[torch.Tensor],
            state: Dict[str, List[Any]],
            group: Dict[str, Any],
            scratch: Scratch,
    ) -> None:
        """Update parameters on a CPU one by one, chunk by chunk, and the others together."""
        lists = [to_local(p).detach() for p in params], [to_local(p.grad) for p in params], *state.values()
        together = [i for i, p in enumerate(params) if not in_chunks(p)]
        if together:
            whole, grads, *states = ([xs[i] for i in together] for xs in lists)
            pieces = _Pieces(whole, grads, [get_grad_mult(params[i]) for i in together])
            self._update(pieces, dict(zip(state, states)), group)
        for i in [i for i, p in enumerate(params) if in_chunks(p)]:
            param, grad, *own = (xs[i] for xs in lists)
            fused = use_fused(param, group, own)
            relayout, chunk_group = flat if fused else lambda x: x, {**group, 'foreach': False, 'fused': fused}
            for rows in row_chunks(param):
                chunks = [x if x is None or not x.dim() else relayout(x[rows]) for x in own]
                if rows.stop < len(param):  # the kernel advances the number of steps once
                    chunks = [x.clone() if x is not None and not x.dim() else x for x in chunks]
                pieces = _Pieces(
                    [param[rows]], [grad[rows]], [get_grad_mult(params[i])], rows.start, scratch.like, relayout)
                self._update(pieces, {name: [x] for name, x in zip(state, chunks)}, chunk_group)

    @property
    def _scalers(self) -> Dict[str, Optional[torch.Tensor]]:
        """``grad_scale`` and ``found_inf``: attributes that GradScaler sets for the time of a step, None otherwise."""
        return {name: getattr(self, name, None) for name in ('grad_scale', 'found_inf')}

    def _multiplied_models(self) -> List[MultipliedLayers]:
        grad_mults = [get_grad_mult(p) for group in self.param_groups for p in group['params']]
        return [*{id(m.layers): m.layers for m in grad_mults if m is not None and m.layers is not None}.values()]

    def _check_grad_mults(self) -> None:
        """Raise ValueError if no parameter has a GradMult, or a layer of the model has lost its own."""
        params = [p for group in self.param_groups for p in group['params']]
        grad_mults = [grad_mult for grad_mult in map(get_grad_mult, params) if grad_mult is not None]
        how = (
            'call timm_rep.attach_grad_mults(model, scales) before making the optimizer, also after a wrapper that '
            'replaces the parameters (FSDP2)')
        if not grad_mults:
            raise ValueError(
                f'Expected parameters with a GradMult, but {type(self).__name__} was given none, so it would train '
                f"like torch's optimizer. Create a RepOpt model with scales (timm.create_model('repopt_vgg_b1')), or "
                f'{how}. Pass strict=False for a plain optimizer, or if the kernels are frozen for now.')
        plain = [p for p in params if get_grad_mult(p) is None]
        self._models = self._multiplied_models()
        layers = [item for model in self._models for item in model.items()]
        given = {id(param) for param in params}
        # only a layer whose own weight is not trained can be trained by a copy of it
        lost = [
            name for name, layer in layers
            if layer.grad_mult is None
            or (id(layer.weight) not in given and any(_has_equal_values(param, layer.weight) for param in plain))]
        if lost:
            raise ValueError(
                f'Expected a GradMult for every layer that was given one, but {len(lost)} of {len(layers)} have lost '
                f'theirs: {", ".join(lost)}. Their parameters were replaced or copied, or a parametrization computes '
                f'them: remove it and {how}. Pass strict=False to train these layers as plain ones.')

    def _check_not_lost(self) -> None:
        """With strict, raise ValueError if a layer has lost its GradMult since the last step."""
        if not self._models:
            return
        models = self._multiplied_models()
        # removed multipliers are not in a model
        lost = [name for model in models or self._models for name, layer in model.items() if layer.grad_mult is None]
        if lost or (not models and any(self._models)):
            raise ValueError(
                f'The parameters of {", ".join(lost) or "the model"} were replaced by others without a GradMult, for '
                "example by accelerate's prepare() with FSDP2: call timm_rep.attach_grad_mults(model, scales) after "
                'it.')
        self._models = models

    def _check(self, param: torch.Tensor, group: Dict[str, Any]) -> None:
        """Raise the errors of step() if a parameter cannot be updated."""
        name, grad_mult = type(self).__name__, get_grad_mult(param)
        if grad_mult is None:
            if param.grad.is_sparse and (group['fused'] or not self._takes_sparse):
                raise RuntimeError(
                    f'Expected dense gradients for {name}{" with fused=True" if self._takes_sparse else ""}, but a '
                    f'parameter of shape {tuple(param.shape)} has a sparse one: make the gradient dense.')
            return
        if param.grad.is_sparse or param.is_complex():
            raise RuntimeError(
                f'Expected dense real gradients of parameters with a GradMult for {name}, but one of shape '
                f'{tuple(param.shape)} has a {"sparse" if param.grad.is_sparse else "complex"} one: remove its '
                'GradMult, or make the gradient dense and real.')
        if tuple(to_local(param).shape) != grad_mult.shape:
            how = (
                'its values were replaced, for example by pruning. Fold the model before, or remove the multipliers '
                '(timm_rep.attach_grad_mults(model, None))' if param.dim() == 4 else
                'a wrapper has flattened it, for example FullyShardedDataParallel. Shard the model with FSDP2 '
                '(torch.distributed.fsdp.fully_shard), call timm_rep.attach_grad_mults(model, scales) again and make a '
                'new optimizer')
            raise ValueError(
                f'Expected a kernel of shape {grad_mult.shape}, but got a parameter of shape {tuple(param.shape)} with '
                f'its GradMult: {how}.')
        layer = grad_mult.layers.get(grad_mult.name) if grad_mult.layers is not None else None
        if layer is not None:
            try:
                layer.check_weight()  # a parametrization may have been registered meanwhile
            except ValueError as e:
                raise ValueError(f'{grad_mult.name}: {e}') from None
        grad_mult.vectors(self._rule, param.device, param.dtype)  # raises OverflowError; cached


class RepSGD(_RepOptimizer, SGD):
    """``torch.optim.SGD``, with the gradient of each parameter that has a GradMult multiplied by it.

    The multiplier is the sum of the squared scales of the branches (rule of iteration). It is applied before momentum;
    weight decay is not multiplied, and ``p.grad`` is left unchanged. Parameters without a GradMult are updated as by
    torch. The multiplier is not part of the state: state dicts can be exchanged with ``torch.optim.SGD``.

    Clipping the gradients breaks the equivalence with the CSLA block, whose gradients have a different norm. Hugging
    Face's Trainer clips at 1.0 by default: set ``max_grad_norm=0`` there.
    """
    _rule = 'squared'
    _takes_sparse = True

    def __init__(
            self,
            params: Params,
            lr: Union[float, torch.Tensor] = 1e-3,
            momentum: float = 0.,
            dampening: float = 0.,
            weight_decay: float = 0.,
            nesterov: bool = False,
            *,
            maximize: bool = False,
            foreach: Optional[bool] = None,
            fused: Optional[bool] = None,
            strict: bool = True,
    ):
        """
        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            momentum: Momentum factor.
            dampening: Dampening of the momentum.
            weight_decay: Weight decay.
            nesterov: Nesterov momentum.
            maximize: Maximize the objective instead of minimizing it.
            foreach: As in torch.
            fused: As in torch. On a CPU, kernels with a GradMult use torch's fused implementation by default.
            strict: Raise an error if no parameter has a GradMult, or a layer of the model has lost its own.

        Raises:
            ValueError: With strict, GradMults are missing; or an option is invalid.
        """
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=foreach, fused=fused)
        if strict:
            self._check_grad_mults()

    def _sgd(self, params: List[Any], grads: List[Any], momentum_buffer_list: List[Any], group: Dict[str, Any]) -> None:
        names = 'lr', 'momentum', 'dampening', 'weight_decay', 'nesterov', 'maximize', 'foreach', 'fused'
        sgd(
            params,
            grads,
            momentum_buffer_list,
            has_sparse_grad=any(g.is_sparse for g in grads),
            **self._scalers,
            **{name: group[name] for name in names},
        )

    def _update_plain(self, params: List[torch.Tensor], group: Dict[str, Any]) -> None:
        buffers = [self.state[p].get('momentum_buffer') for p in params]
        new, dampening = [p for p, buffer in zip(params, buffers) if buffer is None], group['dampening']
        if self._scalers['found_inf'] is not None and group['momentum'] != 0 and any(b is None for b in buffers):
            # torch's fused kernel, where it skips its first step, leaves a new buffer uninitialized for the second one
            group = {**group, 'dampening': 0} if all(b is None for b in buffers) else group
            buffers = [torch.zeros_like(p) if b is None else b for p, b in zip(params, buffers)]
        self._sgd(params, [p.grad for p in params], buffers, group)
        if group['momentum'] != 0:
            for param, buffer in zip(params, buffers):
                self.state[param]['momentum_buffer'] = buffer
            self._forget_skipped(new, dampening)

    def _states(self, params: List[torch.Tensor], group: Dict[str, Any]) -> States:
        if group['momentum'] == 0:
            yield params, {'momentum_buffer_list': [None] * len(params)}, group
            return
        has_buffer = [self.state[p].get('momentum_buffer') is not None for p in params]
        for is_old, shared in (False, {**group, 'dampening': 0}), (True, group):  # the first step is not dampened
            some = [p for p, has in zip(params, has_buffer) if has == is_old]
            for p in some:
                # a new buffer stays zero if this step fails or is skipped
                buffer = self.state[p]['momentum_buffer'] if is_old else torch.zeros_like(p)
                self.state[p]['momentum_buffer'] = match_strides(p, buffer)
            yield some, {'momentum_buffer_list': [to_local(self.state[p]['momentum_buffer']) for p in some]}, shared
            if not is_old:
                self._forget_skipped(some, group['dampening'])

    def _forget_skipped(self, params: List[torch.Tensor], dampening: float) -> None:
        """Forget the new buffers of a skipped step: the next step is the first one, which is not dampened."""
        if params and dampening and self._scalers['found_inf'] is not None and self._scalers['found_inf'].item():
            for param in params:
                del self.state[param]['momentum_buffer']

    def _update(self, pieces: _Pieces, state: Dict[str, List[Any]], group: Dict[str, Any]) -> None:
        params, grads, grad_mults, start, empty_like, relayout = pieces
        products = [
            grad_mult.multiply(grad, self._rule, out=empty_like(param), start=start)
            for param, grad, grad_mult in zip(params, grads, grad_mults)]
        self._sgd(list(map(relayout, params)), list(map(relayout, products)), group=group, **state)


class RepAdamW(_RepOptimizer, AdamW):
    """``torch.optim.AdamW``, with the update of each parameter that has a GradMult multiplied by it.

    The update of AdamW does not depend on the magnitude of the gradient: a branch's weight moves by
    ``-lr * sign(scale) * u`` and its contribution to the kernel by ``scale`` times that. The multiplier is therefore
    the sum of the *absolute* scales, applied to the update (rule of iteration). Weight decay is not multiplied. The
    equivalence with the CSLA block is exact up to ``eps``. Parameters without a GradMult are updated as by torch. The
    multiplier is not part of the state: state dicts can be exchanged with ``torch.optim.AdamW``.

    Clipping the gradients breaks the equivalence, as for :class:`RepSGD`.

    Examples:
        >>> model = timm.create_model('repopt_vgg_a0', depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8)
        >>> optimizer = RepAdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    """
    _rule = 'absolute'
    _takes_sparse = False

    def __init__(
            self,
            params: Params,
            lr: Union[float, torch.Tensor] = 1e-3,
            betas: Tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 1e-2,
            amsgrad: bool = False,
            *,
            maximize: bool = False,
            foreach: Optional[bool] = None,
            capturable: bool = False,
            fused: Optional[bool] = None,
            strict: bool = True,
    ):
        """
        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            betas: Coefficients of the running averages of the gradient and its square.
            eps: Term added to the denominator.
            weight_decay: Decoupled weight decay.
            amsgrad: Use the AMSGrad variant.
            maximize: Maximize the objective instead of minimizing it.
            foreach: As in torch.
            capturable: As in torch.
            fused: As for :class:`RepSGD`.
            strict: As for :class:`RepSGD`.

        Raises:
            ValueError: With strict, GradMults are missing; or an option is invalid.
        """
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            fused=fused)
        if strict:
            self._check_grad_mults()

    def _adamw(self, params: List[Any], grads: List[Any], state: Dict[str, List[Any]], group: Dict[str, Any]) -> None:
        names = 'lr', 'eps', 'weight_decay', 'amsgrad', 'maximize', 'capturable', 'foreach', 'fused'
        adamw(
            params,
            grads,
            **{'max_exp_avg_sqs': [], **state},
            beta1=group['betas'][0],
            beta2=group['betas'][1],
            has_complex=any(p.is_complex() for p in params),
            **self._scalers,
            **{name: group[name] for name in names},
        )

    def _state_of(self, params: List[torch.Tensor], group: Dict[str, Any]) -> Dict[str, List[torch.Tensor]]:
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
        names['state_steps'] = 'step'
        return {key: [self.state[p][name] for p in params] for key, name in names.items()}

    def _states(self, params: List[torch.Tensor], group: Dict[str, Any]) -> States:
        for param in params:
            for name, x in self.state[param].items():
                if name != 'step':
                    self.state[param][name] = match_strides(param, x)
        yield params, {name: [to_local(x) for x in xs] for name, xs in self._state_of(params, group).items()}, group

    def _update_plain(self, params: List[torch.Tensor], group: Dict[str, Any]) -> None:
        self._adamw(params, [p.grad for p in params], self._state_of(params, group), group)

    def _update(self, pieces: _Pieces, state: Dict[str, List[Any]], group: Dict[str, Any]) -> None:
        params, grads, grad_mults, start, empty_like, relayout = pieces
        found_inf = self._scalers['found_inf']
        # torch's arithmetic on parameters of zeros gives the bare update
        updates = [empty_like(param).zero_() for param in params]
        grads = [relayout(match_strides(param, grad)) for param, grad in zip(params, grads)]
        self._adamw(list(map(relayout, updates)), grads, state, {**group, 'weight_decay': 0.})
        for param, update, grad_mult in zip(params, updates, grad_mults):
            # with GradScaler, a fused kernel skips a step by itself, and found_inf says whether it did
            taken = 1 if found_inf is None else 1 - found_inf.to(param.device)
            param.mul_(1 - group['lr'] * group['weight_decay'] * taken)
            grad_mult.add_product(param, update, self._rule, start=start)


def _has_equal_values(param: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a parameter has the values of a weight, such as a float32 copy that a trainer made."""
    if param.shape != weight.shape:
        return False
    if any(x.is_meta or to_local(x) is not x for x in (param, weight)):
        return False
    return torch.equal(param.detach().to(weight), weight.detach())
