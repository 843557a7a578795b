"""Dense prediction on Swin backbones: dense."""
import sys
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn as nn
from timm.utils import random_seed

from timm_rep.convert import folded_copy
from timm_rep.utils.profiling import time_passes

from .timing import speedup, timing_columns

sys.path.insert(0, str(Path(__file__).parents[2] / 'examples'))

__all__ = ['NETWORKS', 'dense']

# networks, and the prefix of the backbone's weights in each
NETWORKS = {'backbone': '', 'retinanet': 'backbone.body.', 'mask_rcnn': 'backbone.body.', 'upernet': 'encoder.'}
# at one fixed size the masks of the shifted windows are computed once, not for every image
BACKBONE_ARGS = dict(strict_img_size=True, always_partition=True)
PROPOSALS, DETECTIONS = 1000, 100
# table 6: milliseconds of the vanilla and of the folded model
TABLE_6 = {
    ('swin_small', 'retinanet'): (61.7, 53.8),
    ('swin_small', 'mask_rcnn'): (62.5, 53.8),
    ('swin_small', 'upernet'): (36.3, 32.1),
    ('swin_base', 'retinanet'): (82.0, 66.7),
    ('swin_base', 'mask_rcnn'): (82.6, 69.4),
    ('swin_base', 'upernet'): (45.6, 38.6),
}


def build(network: str, backbone: str, img_size) -> nn.Module:
    """A network on a Swin of timm, in eval mode, with the classes of COCO or ADE20K."""
    swin = dict(BACKBONE_ARGS, img_size=tuple(img_size))
    if network == 'backbone':
        return timm.create_model(backbone, features_only=True, **swin).eval()
    if network == 'upernet':
        import segmentation

        return segmentation.build_model(backbone, classes=150, **swin).eval()
    import detection

    # without suppression of overlapping boxes the number of detections is the limit
    size = dict(min_size=min(img_size), max_size=max(img_size))
    if network == 'retinanet':
        return detection.build_model(
            network, backbone, 91, swin, score_thresh=0., nms_thresh=1., detections_per_img=DETECTIONS, **size).eval()
    model = detection.build_model(
        network, backbone, 91, swin, rpn_nms_thresh=1., rpn_post_nms_top_n_test=PROPOSALS, box_nms_thresh=1.,
        box_detections_per_img=DETECTIONS, **size).eval()
    # every proposal is detected as the first class: with random weights none would be
    nn.init.constant_(model.roi_heads.box_predictor.cls_score.bias[1], 10.)
    return model


def forward(model: nn.Module, is_detector: bool, amp: bool, images: torch.Tensor):
    with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
        return model(list(images) if is_detector else images)


def dense(args):
    """Swin under a dense head (table 6 of the paper): milliseconds of one image; 'ratio': speedup by folding.

    Vanilla, unfolded and folded networks share all random weights except for the backbone's. Detectors keep 1000
    proposals and 100 detections, so that the heads do the same work.
    """
    for row in args.pending(backbone=args.models or ['swin_small', 'swin_base'], network=args.networks):
        backbone, network = row.values()
        random_seed(0)
        models = {
            side: build(network, name, args.img_size).to(args.device)
            for side, name in (('vanilla', f'{backbone}_patch4_window7_224'), ('unfolded', f'repa_{backbone}'))}
        prefix = NETWORKS[network]
        shared = {k: v for k, v in models['vanilla'].state_dict().items() if not k.startswith(prefix)}
        models['unfolded'].load_state_dict(shared, strict=False)
        models['folded'] = folded_copy(models['unfolded'])
        is_detector = network in ('retinanet', 'mask_rcnn')
        runs = {side: partial(forward, model, is_detector, args.amp) for side, model in models.items()}
        image = torch.rand(1, 3, *args.img_size, device=args.device)
        if is_detector:
            with torch.inference_mode():
                counts = {side: len(run(image)[0]['boxes']) for side, run in runs.items()}
            if len(set(counts.values())) > 1:
                raise RuntimeError(f'{network}: the numbers of detections differ, {counts}.')
        times = time_passes(runs, image, rounds=args.rounds, warmup=1)
        vanilla, folded = TABLE_6.get((backbone, network), (None, None))
        yield {
            **row,
            'ratio': speedup(times['folded'], times['vanilla']),
            'paper': vanilla and round(vanilla / folded, 2),
            **timing_columns(times),
        }
