"""The section of bench.py about how costs grow."""
import copy
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import timm
import torch
from _bench_train import ReleasedForm, VanillaFfn, training_step
from _timing import milliseconds, spreads
from timm.utils import reparameterize_model

from timm_rep.layers import RePaMlp, set_fused_idle, use_fused_idle
from timm_rep.optim import RepSGD
from timm_rep.utils.profiling import time_passes

__all__ = ['bench_scaling', 'exponent']

Sides = Dict[str, Callable[[torch.Tensor], object]]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """b of the least-squares fit of cost = a * size ** b in logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def _ffn(dim: int, args) -> Sides:
    torch.manual_seed(0)
    mlp = RePaMlp(dim, 4 * dim).to(args.device, args.dtype)
    vanilla = VanillaFfn(dim).to(args.device, args.dtype)
    folded = copy.deepcopy(mlp).eval().fuse()
    return {
        'FFN, vanilla': vanilla,
        'FFN, folded': folded,
        'FFN training step, vanilla': training_step(copy.deepcopy(vanilla), amp=args.amp),
        'FFN training step, released': training_step(ReleasedForm(copy.deepcopy(mlp)), fast=False, amp=args.amp),
        'FFN training step, matrix': training_step(mlp, amp=args.amp),
    }


def _deit(args, **kwargs) -> Sides:
    torch.manual_seed(0)
    unfolded = timm.create_model('repa_deit_tiny', **kwargs).eval().to(args.device, args.dtype)
    vanilla = timm.create_model('deit_tiny_patch16_224', **kwargs).eval().to(args.device, args.dtype)
    return {'DeiT, vanilla': vanilla, 'DeiT, folded': reparameterize_model(unfolded)}


def _rep_sgd(width: int, args) -> Sides:
    model = timm.create_model('repopt_vgg_a0', widths=(width, width, width, width), stem_width=width).to(args.device)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer = RepSGD(model.parameters(), lr=1e-4, momentum=.9, nesterov=True, weight_decay=4e-5)
    return {'step of RepSGD': lambda x: optimizer.step()}


def _costs(args) -> List[Tuple[str, float, Sequence[int], Callable[[int], Tuple[Sides, torch.Tensor]]]]:
    """Along what, the exponent of the arithmetic, the sizes, and what is timed at each of them."""

    def hidden(tokens, dim):  # within a network their gradient is needed
        return torch.randn(tokens, dim, device=args.device, dtype=args.dtype, requires_grad=True)

    images = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
    tokens = 197 * args.batch_size
    return [
        (f'width, {tokens} tokens', 2, (96, 192, 384, 768), lambda n: (_ffn(n, args), hidden(tokens, n))),
        ('tokens, 384 wide', 1, [tokens * k // 8 for k in (1, 2, 4, 8, 16)], lambda n: (
            _ffn(384, args), hidden(n, 384))),
        ('depth', 1, (3, 6, 12, 24), lambda n: (_deit(args, depth=n), images)),
        ('width, 12 blocks', 2, (96, 192, 384, 768), lambda n: (
            _deit(args, embed_dim=n, num_heads=n // 32), images)),
        ('width', 2, (64, 128, 256, 512), lambda n: (_rep_sgd(n, args), images)),
    ]


def bench_scaling(args):
    """How costs grow: milliseconds by width, tokens or depth, and the exponent of their growth, fitted.

    'arithmetic': the exponent of the multiplications with weights alone; DeiT's attention grows with the width by one
    less. 'matrix' goes layer by layer where the matrix does not pay, so its exponent is of two forms.
    """
    before = use_fused_idle()
    try:
        for along, arithmetic, sizes, at in _costs(args):
            if args.measured(along=along):
                continue
            measured: Dict[str, List[Tuple[float, Optional[float]]]] = {}
            for size in sizes:
                sides, x = at(size)
                times = time_passes(sides, x, rounds=args.rounds, warmup=1)
                spread = spreads(times)
                for name, ms in milliseconds(times).items():
                    measured.setdefault(name, []).append((ms, spread[name]))
            for name, values in measured.items():
                costs, lie_apart = zip(*values)
                yield {
                    'cost': name,
                    'along': along,
                    'sizes': list(sizes),
                    'ms': list(costs),
                    'exponent': round(exponent(sizes, costs), 2),
                    'arithmetic': arithmetic,
                    'spread (%)': lie_apart,
                }
    finally:
        set_fused_idle(before)
