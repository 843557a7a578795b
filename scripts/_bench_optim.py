"""The section of bench.py about the optimizers."""
import itertools
import statistics
import time

import timm
import torch
import torch.nn.functional as F
from _timing import milliseconds, speedup, spreads

import timm_rep
import timm_rep.optim._chunks as chunks
from timm_rep.optim import RepAdamW, RepSGD, get_grad_mult
from timm_rep.scales import Scales
from timm_rep.utils.profiling import synchronize

__all__ = ['bench_optim']


def build(name, device):
    """The model with some searched-looking scales, negative ones among them, and gradients."""
    torch.manual_seed(0)
    model = timm.create_model(name, scales=False, reinit=False)
    scales = {n: {b: torch.randn_like(s) for b, s in branches.items()} for n, branches in Scales.ones(model).items()}
    model = timm_rep.attach_grad_mults(model, scales).to(device).train()
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


def parameters(name, device):
    return list(build(name, device).parameters())


class Released:
    """Gradients times dense multipliers in place, then torch's step, one tensor at a time as then."""

    def __init__(self, cls, rule, params, **kwargs):
        self.mults = [(p, get_grad_mult(p).dense(rule).to(p.device)) for p in params if get_grad_mult(p)]
        self.optimizer = cls(params, foreach=False, **kwargs)
        self.state = self.optimizer.state

    def step(self):
        for param, mult in self.mults:
            param.grad = param.grad * mult
        self.optimizer.step()


def megabytes(tensors):
    return round(sum(t.numel() * t.element_size() for t in tensors) / 1e6, 1)


def state_memory(optimizer):
    return megabytes(t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))


def compact_multipliers(optimizer):
    """What the multipliers take, made once: of kernels on a GPU, or of a step by torch's own parts."""
    return megabytes(optimizer._launches.tables.multipliers or [
        vector for group in optimizer.param_groups for p in group['params'] if get_grad_mult(p)
        for regions in get_grad_mult(p)._vectors.values() for _, vector, _ in regions
    ])


def scratch_memory(device, step):
    """What a step allocates and gives back."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return round((torch.cuda.max_memory_allocated(device) - before) / 1e6, 1)
    sizes = [0]
    like = chunks.Scratch.like
    try:
        chunks.Scratch.like = lambda self, x: sizes.append(x.numel() * x.element_size()) or like(self, x)
        step()
    finally:
        chunks.Scratch.like = like
    return round(max(sizes) / 1e6, 1)


def beside(device, form, optimizer, step):
    """What a step takes besides parameters, gradients and state; of torch's optimizers not known on a CPU."""
    if form.startswith('torch'):
        return scratch_memory(device, step) if device.type == 'cuda' else None
    multipliers = (
        megabytes(m for _, m in optimizer.mults) if form == 'released' else compact_multipliers(optimizer))
    return round(scratch_memory(device, step) + multipliers, 1)


def timed(device, fn, *args):
    start = time.perf_counter()
    fn(*args)
    synchronize(device)
    return time.perf_counter() - start


def on_device(device, step, steps=20):
    """Seconds of a step on a GPU alone: one of many that wait while it is busy, so that it never waits for Python."""
    square = torch.randn(8192, 8192, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(16):
        square @ square
    start.record()
    for _ in range(steps):
        step()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / steps / 1e3


def training_step(model, optimizer, images, targets):
    optimizer.zero_grad()
    F.cross_entropy(model(images), targets).backward()
    optimizer.step()


def bench_optim(args):
    """A step of RepSGD and RepAdamW and of torch's SGD and AdamW, on RepOpt-VGG-B1 or another.

    'released': the formulation of the released optimizers, every gradient times a dense multiplier before torch's own
    step. 'ours, fused': parameters without a multiplier by torch's fused kernel too, which it takes if asked to.
    'over torch, fused': how many times as long a step takes; on a GPU also without what Python takes, for which the GPU
    does not wait in a training. 'beside it': multipliers, and what a step allocates and gives back (of torch's on a GPU
    only). The training step is a forward pass, a backward pass and the optimizer's step on a batch of images.
    """
    sgd = dict(lr=1e-4, momentum=0.9, nesterov=True, weight_decay=4e-5)
    adamw = dict(lr=1e-4, weight_decay=0.05)
    families = {
        'SGD': (torch.optim.SGD, RepSGD, 'squared', sgd),
        'AdamW': (torch.optim.AdamW, RepAdamW, 'absolute', adamw),
    }
    images = torch.randn(args.batch_size, 3, 224, 224, device=args.device)
    targets = torch.arange(args.batch_size, device=args.device)
    for name, (family, (plain, rep, rule, kwargs)) in itertools.product(
            args.models or ['repopt_vgg_b1'], families.items()):
        if args.measured(model=name, optimizer=family):
            continue
        model = build(name, args.device)
        ours = rep(model.parameters(), **kwargs)
        sides = {
            'torch, fused': plain(parameters(name, args.device), fused=True, **kwargs),
            'torch, foreach': plain(parameters(name, args.device), foreach=True, **kwargs),
            'torch, one at a time': plain(parameters(name, args.device), foreach=False, **kwargs),
            'torch, compiled': plain(parameters(name, args.device), foreach=True, **kwargs),
            'released': Released(plain, rule, parameters(name, args.device), **kwargs),
            'ours': ours,
            'ours, fused': rep(parameters(name, args.device), fused=True, **kwargs),
        }
        steps = {form: torch.compile(of.step) if 'compiled' in form else of.step for form, of in sides.items()}
        times = {form: [] for form in sides}
        for i in range(args.rounds + 2):
            for form, step in steps.items():
                elapsed = timed(args.device, step)
                if i >= 2:
                    times[form].append(elapsed)
        alone = {form: [] for form in sides}
        if args.device.type == 'cuda':
            for _ in range(5):
                for form, step in steps.items():
                    alone[form].append(on_device(args.device, step))
        spread = spreads(times)
        whole = 1e3 * statistics.median(
            timed(args.device, training_step, model, ours, images, targets) for _ in range(3))
        for form, ms in milliseconds(times).items():
            gpu = {}
            if alone[form]:
                gpu = {
                    'ms on the GPU': milliseconds(alone)[form],
                    'over torch, fused, on the GPU': speedup(alone['torch, fused'], alone[form]),
                    'kernel': bool(form.startswith('ours') and sides[form]._launches.tables.multipliers),
                }
            yield {
                'model': name,
                'optimizer': family,
                'form': form,
                'ms per step': ms,
                'over torch, fused': speedup(times['torch, fused'], times[form]),
                **gpu,
                'state (MB)': state_memory(sides[form]),
                'beside it (MB)': beside(args.device, form, sides[form], steps[form]),
                f'% of a training step, batch {args.batch_size}': round(100 * ms / whole, 2),
                'spread (%)': spread[form],
            }
