"""Growth of costs with width, tokens and depth: scaling."""
import copy
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import timm
import torch

from timm_rep.convert import folded_copy
from timm_rep.layers import RePaMlp
from timm_rep.optim import RepSGD
from timm_rep.utils.profiling import time_calls, time_passes

from .repa_train import TrainingStep, WithShortcut, in_released_form, vanilla_ffn
from .timing import Times, timing_columns

__all__ = ['exponent', 'scaling']


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """b of the least-squares fit of log(cost) = log(a) + b * log(size)."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def _ffn(dim: int, tokens: int, args) -> Times:
    torch.manual_seed(0)
    # inside a network the gradient of the input is needed
    x = torch.randn(tokens, dim, device=args.device, dtype=args.dtype, requires_grad=True)
    mlp = RePaMlp(dim, 4 * dim).to(args.device, args.dtype)
    vanilla = vanilla_ffn(dim).to(args.device, args.dtype)
    passes = {'FFN, vanilla': vanilla, 'FFN, folded': WithShortcut(copy.deepcopy(mlp).eval().fuse())}
    steps = {
        'FFN training step, vanilla': TrainingStep(copy.deepcopy(vanilla), x, amp=args.amp),
        'FFN training step, released': TrainingStep(
            WithShortcut(in_released_form(mlp)), x, fused_idle=False, amp=args.amp),
        'FFN training step, matrix': TrainingStep(WithShortcut(mlp), x, amp=args.amp),
    }
    return {**time_passes(passes, x, args.rounds, warmup=1), **time_calls(steps, args.device, args.rounds)}


def _deit(args, **kwargs) -> Times:
    torch.manual_seed(0)
    unfolded = timm.create_model('repa_deit_tiny', **kwargs).eval().to(args.device, args.dtype)
    vanilla = timm.create_model('deit_tiny_patch16_224', **kwargs).eval().to(args.device, args.dtype)
    x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
    models = {'DeiT, vanilla': vanilla, 'DeiT, folded': folded_copy(unfolded)}
    return time_passes(models, x, args.rounds, warmup=1)


def _rep_sgd(width: int, args) -> Times:
    model = timm.create_model('repopt_vgg_a0', widths=(width, width, width, width), stem_width=width).to(args.device)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer = RepSGD(model.parameters(), lr=1e-4, momentum=.9, nesterov=True, weight_decay=4e-5)
    return time_calls({'step of RepSGD': optimizer.step}, args.device, args.rounds)


def scaling(args):
    """Growth of costs: milliseconds by width, tokens or depth, and the fitted exponent.

    'arithmetic': exponent of the multiplications with weights alone; DeiT's attention grows with the width by one less.
    'matrix' is computed layer by layer on a GPU and where that is faster, so its exponent covers two forms.
    """
    tokens = 197 * args.batch_size
    costs: List[Tuple[str, float, Sequence[int], Callable[[int], Times]]] = [
        (f'width, {tokens} tokens', 2, (96, 192, 384, 768), lambda n: _ffn(n, tokens, args)),
        ('tokens, 384 wide', 1, [tokens * k // 8 for k in (1, 2, 4, 8, 16)], lambda n: _ffn(384, n, args)),
        ('depth', 1, (3, 6, 12, 24), lambda n: _deit(args, depth=n)),
        ('width, 12 blocks', 2, (96, 192, 384, 768), lambda n: _deit(args, embed_dim=n, num_heads=n // 32)),
        ('width', 2, (64, 128, 256, 512), lambda n: _rep_sgd(n, args)),
    ]
    for along, arithmetic, sizes, measure in costs:
        for row in args.pending(along=[along]):
            found: Dict[str, List[Tuple[float, Optional[float]]]] = {}
            for size in sizes:
                columns = timing_columns(measure(size))
                for name, ms in columns['ms'].items():
                    found.setdefault(name, []).append((ms, columns['spread (%)'][name]))
            for name, values in found.items():
                ms, spread = zip(*values)
                yield {
                    'cost': name,
                    **row,
                    'sizes': list(sizes),
                    'ms': list(ms),
                    'exponent': round(exponent(sizes, ms), 2),
                    'arithmetic': arithmetic,
                    'spread (%)': list(spread),
                }
