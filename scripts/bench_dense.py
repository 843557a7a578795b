#!/usr/bin/env python3
"""Measure what folding a RePa-Swin is worth under a dense head, as table 6 of the paper does: milliseconds an image.

Vanilla, as trained and folded take turns in one process; medians count. But for the backbone all have the same random
weights, and the detectors keep a fixed number of boxes: so the heads have the same to do.
"""
import argparse
import sys
from pathlib import Path
from typing import Any, Dict

import timm
import torch
import torch.nn as nn
from _report import report
from _timing import milliseconds, speedup, spreads
from timm.utils import ParseKwargs, random_seed, reparameterize_model

from timm_rep.utils.profiling import time_passes

sys.path.insert(0, str(Path(__file__).parent / 'examples'))
import detection

# a network and the prefix of its backbone's weights
NETWORKS = {'backbone': '', 'retinanet': 'backbone.body.', 'mask_rcnn': 'backbone.body.', 'upernet': 'encoder.'}
# milliseconds of the vanilla and of the folded model
TABLE_6 = {
    ('swin_small', 'retinanet'): (61.7, 53.8),
    ('swin_small', 'mask_rcnn'): (62.5, 53.8),
    ('swin_small', 'upernet'): (36.3, 32.1),
    ('swin_base', 'retinanet'): (82.0, 66.7),
    ('swin_base', 'mask_rcnn'): (82.6, 69.4),
    ('swin_base', 'upernet'): (45.6, 38.6),
}


def build(network: str, backbone: str, args) -> nn.Module:
    """A network on a Swin of timm, in eval mode, with the classes of COCO or ADE20K."""
    # at one size the masks of the windows are made once, not for every image
    swin = dict(img_size=tuple(args.img_size), strict_img_size=True, always_partition=True, **args.backbone_kwargs)
    if network == 'backbone':
        return timm.create_model(backbone, features_only=True, **swin).eval()
    if network == 'upernet':
        import segmentation

        return segmentation.build_model(backbone, classes=150, **swin).eval()
    size = dict(min_size=min(args.img_size), max_size=max(args.img_size))
    # no box suppresses another, so that as many are kept as may be
    if network == 'retinanet':
        return detection.build_model(
            network, backbone, 91, swin, score_thresh=0., nms_thresh=1., detections_per_img=args.detections,
            **size).eval()
    model = detection.build_model(
        network, backbone, 91, swin, rpn_nms_thresh=1., rpn_post_nms_top_n_test=args.proposals,
        box_nms_thresh=1., box_detections_per_img=args.detections, **size).eval()
    # each proposal is of the first class: with random weights it would be of none
    nn.init.constant_(model.roi_heads.box_predictor.cls_score.bias[1], 10.)
    return model


def measure(network: str, backbone: str, args) -> Dict[str, Any]:
    random_seed(0)
    models = {'vanilla': build(network, f'{backbone}_patch4_window7_224', args).to(args.device)}
    models['unfolded'] = build(network, f'repa_{backbone}', args).to(args.device)
    prefix = NETWORKS[network]
    shared = {k: v for k, v in models['vanilla'].state_dict().items() if not k.startswith(prefix)}
    models['unfolded'].load_state_dict(shared, strict=False)
    models['folded'] = reparameterize_model(models['unfolded'])
    is_detector = network in ('retinanet', 'mask_rcnn')

    def forward(model):
        def run(images):
            with torch.autocast(args.device.type, torch.bfloat16, enabled=args.amp):
                return model(list(images) if is_detector else images)

        return run

    runs = {side: forward(model) for side, model in models.items()}
    images = torch.rand(1, 3, *args.img_size, device=args.device)
    if is_detector:
        with torch.inference_mode():
            counts = {side: len(run(images)[0]['boxes']) for side, run in runs.items()}
        if len(set(counts.values())) > 1:
            raise RuntimeError(f'{network}: the heads do not do the same, they detect {counts} objects.')
    times = time_passes(runs, images, rounds=args.rounds, warmup=1)
    vanilla, folded = TABLE_6.get((backbone, network), (None, None))
    row = dict(
        backbone=backbone, network=network,
        **{f'{side}_ms': round(ms, 1) for side, ms in milliseconds(times).items()},
        ratio=speedup(times['folded'], times['vanilla']),
        paper=vanilla and round(vanilla / folded, 2),
        **{'spread (%)': spreads(times)})
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--backbones', nargs='+', default=['swin_small', 'swin_base'], metavar='NAME', help='(%(default)s)')
    parser.add_argument('--networks', nargs='+', choices=NETWORKS, default=list(NETWORKS), help='(all)')
    parser.add_argument(
        '--img-size', nargs=2, type=int, default=[512, 512], metavar=('H', 'W'), help='multiples of 32 (%(default)s)')
    parser.add_argument('--proposals', type=int, default=1000, help='of Mask R-CNN (%(default)s)')
    parser.add_argument('--detections', type=int, default=100, help='of the detectors (%(default)s)')
    parser.add_argument('--rounds', type=int, default=11, help='(%(default)s)')
    parser.add_argument('--device', type=torch.device, default=torch.device('cpu'), help='(%(default)s)')
    parser.add_argument('--amp', action='store_true', help='autocast to bfloat16')
    parser.add_argument(
        '--backbone-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='KEY=VALUE', help='their arguments')
    args = parser.parse_args()
    if any(side % 32 for side in args.img_size):
        parser.error(f'--img-size: UPerNet takes multiples of 32, got {args.img_size}')
    report(
        'dense',
        'Milliseconds of one image; ratio: how many times as long it takes with the vanilla backbone as folded.',
        [measure(network, backbone, args) for backbone in args.backbones for network in args.networks],
        args.device,
        {
            **{k: getattr(args, k) for k in ('img_size', 'proposals', 'detections', 'rounds')},
            'dtype': 'bfloat16 autocast' if args.amp else 'float32',
            'backbone_kwargs': {k: str(v) for k, v in args.backbone_kwargs.items()},
        },
        keys=('backbone', 'network'),
    )


if __name__ == '__main__':
    main()
