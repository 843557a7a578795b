#!/usr/bin/env python3
"""Measure a training step of Hyper-Search: branches added up as kernels, as here, and as feature maps, as released.

Both train the same net on the same batch, in turn in one process; medians count.
"""
import argparse
import time

import timm
import torch
import torch.nn.functional as F
from _report import report
from _timing import milliseconds, speedup, spreads

from timm_rep.layers import CslaBlock, SearchBlock
from timm_rep.utils.profiling import synchronize


class FeatureMaps(SearchBlock):
    """The same parameters, every branch a convolution of its own."""
    forward = CslaBlock.forward


def build(name, device, channels_last, as_feature_maps):
    torch.manual_seed(0)
    model = timm.create_model(name, structure='search', num_classes=100).to(device).train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if as_feature_maps:
        for layer in model.modules():
            if isinstance(layer, SearchBlock):
                layer.__class__ = FeatureMaps
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)


def step(model, optimizer, images, targets, amp):
    with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
        loss = F.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    synchronize(images.device)


def measure(name, args, channels_last):
    sides = {s: build(name, args.device, channels_last, s == 'feature_maps') for s in ('kernels', 'feature_maps')}
    images = torch.randn(args.batch_size, 3, 32, 32, device=args.device)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(0, 100, (args.batch_size,), device=args.device)
    times = {side: [] for side in sides}
    for i in range(args.rounds + 2):
        for side, (model, optimizer) in sides.items():
            begin = time.perf_counter()
            step(model, optimizer, images, targets, args.amp)
            if i >= 2:
                times[side].append(time.perf_counter() - begin)
    return dict(
        model=name, memory='channels-last' if channels_last else 'contiguous',
        **{f'{side}_ms': round(ms, 1) for side, ms in milliseconds(times).items()},
        ratio=speedup(times['kernels'], times['feature_maps']),
        **{'spread (%)': spreads(times)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--models', nargs='+', default=['repopt_vgg_a0', 'repopt_ghostnet_050'])
    parser.add_argument('--batch-size', type=int, default=128, help='(%(default)s)')
    parser.add_argument('--rounds', type=int, default=9, help='(%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'), help='(%(default)s)')
    parser.add_argument('--amp', action='store_true', help='autocast to bfloat16')
    parser.add_argument(
        '--contiguous-only', action='store_true',
        help='where the channels-last backward of a 1 x 1 convolution with stride 2 crashes, as in torch 2.15 on CPUs')
    args = parser.parse_args()
    formats = [False] if args.contiguous_only else [False, True]
    report(
        'search-step',
        'Milliseconds of a training step of the search structure on 32 x 32 images; ratio: how many times as long it '
        'takes with the branches as feature maps.',
        [measure(name, args, channels_last) for name in args.models for channels_last in formats],
        args.device,
        {'batch_size': args.batch_size, 'dtype': 'bfloat16 autocast' if args.amp else 'float32'},
        keys=('model', 'memory'),
    )


if __name__ == '__main__':
    main()
