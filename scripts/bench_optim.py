#!/usr/bin/env python3
"""Measure one step of RepSGD and RepAdamW against torch's SGD and AdamW, on the parameters of RepOpt-VGG-B1.

The optimizers take turns in one process; medians count. 'released' is the formulation of the released optimizers: every
gradient times a dense multiplier, before torch's own step.
"""
import argparse
import itertools
import statistics
import time

import torch
import torch.nn as nn
from _report import report

from timm_rep.layers import ConvBranch, Csla, IdentityBranch
from timm_rep.optim import RepAdamW, RepSGD, set_grad_mult

# stem, then table 1 of the paper: channels and 3x3 layers of the four stages
WIDTHS, DEPTHS, STEM, CLASSES = (128, 256, 512, 2048), (4, 6, 16, 1), 64, 1000


def parameters(device):
    """The parameters of RepOpt-VGG-B1 with gradients, and the CSLA blocks of those that are 3x3 kernels."""
    torch.manual_seed(0)
    channels = [3, STEM] + [width for width, depth in zip(WIDTHS, DEPTHS) for _ in range(depth)]
    blocks = []
    for in_channels, out_channels in itertools.pairwise(channels):
        same = (IdentityBranch(),) if in_channels == out_channels else ()
        blocks.append(Csla(in_channels, out_channels, (ConvBranch(3), ConvBranch(1), *same)))
    shapes = [block.kernel_shape for block in blocks]
    shapes += [(channels_,) for channels_ in channels[1:] for _ in range(2)]  # BatchNorm
    shapes += [(CLASSES, WIDTHS[-1]), (CLASSES,)]
    params = [nn.Parameter(torch.randn(shape, device=device) * 0.1) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params, blocks


def with_grad_mults(cls, device, **kwargs):
    params, blocks = parameters(device)
    for param, block in zip(params, blocks):
        set_grad_mult(param, block.grad_mult({name: torch.randn(block.out_channels) for name in block.scaled}))
    return cls(params, **kwargs)


class Released:
    """Gradients times dense multipliers in place, then torch's step, one tensor at a time as then."""

    def __init__(self, cls, rule, device, **kwargs):
        self.params, blocks = parameters(device)
        self.mults = [
            block.grad_mult({name: torch.randn(block.out_channels) for name in block.scaled}).dense(rule).to(device)
            for block in blocks
        ]
        self.optimizer = cls(self.params, foreach=False, **kwargs)

    def step(self):
        for param, mult in zip(self.params, self.mults):
            param.grad = param.grad * mult
        self.optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu', type=torch.device)
    parser.add_argument('--rounds', default=11, type=int)
    args = parser.parse_args()
    sgd = dict(lr=1e-4, momentum=0.9, nesterov=True, weight_decay=4e-5)
    adamw = dict(lr=1e-4, weight_decay=0.05)
    families = {
        'SGD': (torch.optim.SGD, RepSGD, 'squared', sgd),
        'AdamW': (torch.optim.AdamW, RepAdamW, 'absolute', adamw),
    }
    rows = []
    for family, (plain, rep, rule, kwargs) in families.items():
        sides = {
            'torch, fused': plain(parameters(args.device)[0], fused=True, **kwargs),
            'torch, foreach': plain(parameters(args.device)[0], foreach=True, **kwargs),
            'torch, one at a time': plain(parameters(args.device)[0], foreach=False, **kwargs),
            'released': Released(plain, rule, args.device, **kwargs),
            'ours': with_grad_mults(rep, args.device, **kwargs),
        }
        times = {name: [] for name in sides}
        for i in range(args.rounds + 2):
            for name, side in sides.items():
                start = time.perf_counter()
                side.step()
                if args.device.type == 'cuda':
                    torch.cuda.synchronize()
                if i >= 2:
                    times[name].append(1e3 * (time.perf_counter() - start))
        medians = {name: statistics.median(t) for name, t in times.items()}
        rows += [
            {
                'optimizer': family,
                'form': name,
                'ms per step': round(median, 1),
                'against torch, fused': round(median / medians['torch, fused'], 2),
                'dense multipliers (MB)': round(
                    sum(m.numel() * m.element_size() for m in getattr(sides[name], 'mults', [])) / 1e6),
            }
            for name, median in medians.items()
        ]
    report('optim', __doc__, rows, args.device, dict(device=str(args.device), rounds=args.rounds))


if __name__ == '__main__':
    main()
