"""Steps of the optimizers: optim."""
from functools import partial

import timm
import torch

import timm_rep
from timm_rep.optim import RepAdamW, RepSGD, get_grad_mult
from timm_rep.scales import Scales
from timm_rep.utils.profiling import time_calls

from .repa_train import TrainingStep
from .timing import memory_use, milliseconds, speedup, timing_columns

__all__ = ['optim']


def build(name: str, device: torch.device) -> torch.nn.Module:
    """A RepOpt model with normally distributed scales, as searched ones some of them negative, and random gradients."""
    torch.manual_seed(0)
    model = timm.create_model(name, scales=False, reinit=False)
    scales = {n: {b: torch.randn_like(s) for b, s in branches.items()} for n, branches in Scales.ones(model).items()}
    model = timm_rep.attach_grad_mults(model, scales).to(device).train()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


class Released:
    """The released optimizers: gradients times dense multipliers, then torch's step, one tensor at a time."""

    def __init__(self, cls, rule, params, **kwargs):
        self.mults = [(p, get_grad_mult(p).dense(rule).to(p.device)) for p in params if get_grad_mult(p)]
        self.optimizer = cls(params, foreach=False, **kwargs)
        self.state = self.optimizer.state

    def step(self):
        for param, mult in self.mults:
            param.grad = param.grad * mult
        self.optimizer.step()


def state_memory(optimizer) -> float:
    """Size of the optimizer's state in MB."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in tensors) / 1e6


def with_extra_memory(create, params, device: torch.device):
    """An optimizer after two steps, and MB that it holds between steps besides its state plus the peak of a step."""
    optimizers = []

    def first_step():
        optimizers.append(create(params))
        optimizers[0].step()

    held, _ = memory_use(first_step, device)
    _, peak = memory_use(optimizers[0].step, device)
    return optimizers[0], round(held - state_memory(optimizers[0]) + peak, 1)


def on_device(device: torch.device, step) -> float:
    """Seconds of a step on the GPU alone: it is queued while the GPU is busy, so that it never waits for Python.

    One step only, since a queue holds about a thousand kernels: when it is full, Python sets the pace.
    """
    square = torch.randn(8192, 8192, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(16):
        square @ square
    start.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


def optim(args):
    """Step of RepSGD and RepAdamW and of torch's SGD and AdamW, on RepOpt-VGG-B1 by default.

    'released': every gradient times a dense multiplier, then torch's step. 'ours, fused': with fused=True. 'over torch,
    fused': slowdown over torch's fused step; on a GPU also without the time that Python takes. 'extra (MB)': memory in
    addition to parameters, gradients and state, held between steps (multipliers) and at the peak of a step. A training
    step is a forward pass, a backward pass and the step of 'ours, fused' on a batch of images.
    """
    sgd = dict(lr=1e-4, momentum=0.9, nesterov=True, weight_decay=4e-5)
    adamw = dict(lr=1e-4, weight_decay=0.05)
    families = {
        'SGD': (torch.optim.SGD, RepSGD, 'squared', sgd),
        'AdamW': (torch.optim.AdamW, RepAdamW, 'absolute', adamw),
    }
    images = torch.randn(args.batch_size, 3, 224, 224, device=args.device)
    for row in args.pending(model=args.models or ['repopt_vgg_b1'], optimizer=families):
        plain, rep, rule, kwargs = families[row['optimizer']]
        sides = {
            'torch, fused': partial(plain, fused=True, **kwargs),
            'torch, foreach': partial(plain, foreach=True, **kwargs),
            'torch, one at a time': partial(plain, foreach=False, **kwargs),
            'torch, compiled': partial(plain, foreach=True, **kwargs),
            'released': partial(Released, plain, rule, **kwargs),
            'ours': partial(rep, **kwargs),
            'ours, fused': partial(rep, fused=True, **kwargs),
        }
        optimizers, steps, extra = {}, {}, {}
        for form, create in sides.items():
            model = build(row['model'], args.device)
            optimizers[form], extra[form] = with_extra_memory(create, list(model.parameters()), args.device)
            step = optimizers[form].step
            steps[form] = step
            if 'compiled' in form:  # what was measured is the memory of the step that is compiled now
                steps[form], extra[form] = torch.compile(step), None
        times = time_calls(steps, args.device, args.rounds, warmup=2)
        columns = timing_columns(times)
        alone = {}
        if args.device.type == 'cuda':
            rounds = [{form: on_device(args.device, step) for form, step in steps.items()} for _ in range(15)]
            alone = {form: [seconds[form] for seconds in rounds] for form in steps}
        # of the last form
        training = {'step': TrainingStep(model, images, optimizer=optimizers['ours, fused'])}
        whole = milliseconds(time_calls(training, args.device, rounds=3))['step']
        for form, ms in columns['ms'].items():
            yield {
                **row,
                'form': form,
                'ms per step': ms,
                'over torch, fused': speedup(times['torch, fused'], times[form]),
                **({
                    'ms on the GPU': milliseconds(alone)[form],
                    'over torch, fused, on the GPU': speedup(alone['torch, fused'], alone[form]),
                } if alone else {}),
                'state (MB)': round(state_memory(optimizers[form]), 1),
                'extra (MB)': extra[form],
                f'% of a training step, batch {args.batch_size}': round(100 * ms / whole, 2),
                'spread (%)': columns['spread (%)'][form],
            }
