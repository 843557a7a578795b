#!/usr/bin/env python3
"""Object detection: torchvision's RetinaNet or Mask R-CNN on a RePaFormer or RepOpt-VGG, trained, folded and compared.

Trains on drawn shapes, or on images and masks of your own.
"""
import argparse
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import timm
import torch
import torch.nn as nn
from _dense import Shapes, add_arguments, backbone_args, create_loaders, prepare, train
from safetensors.torch import save_file
from timm.layers import LayerNorm2d
from timm.utils import ParseKwargs, reparameterize_model
from torch.utils.data import DataLoader
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.ops import FeaturePyramidNetwork, box_iou, masks_to_boxes
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7
from torchvision.transforms.v2.functional import resize

import timm_rep
from timm_rep.utils.atomic import replacing_files


class Backbone(nn.Module):
    """A backbone of timm, a norm for each of its feature maps, and torchvision's FPN."""

    def __init__(
            self,
            name: str,
            out_indices: Tuple[int, ...],
            out_channels: int,
            extra_blocks: nn.Module,
            **kwargs,
    ):
        """
        Args:
            name: Name of the backbone.
            out_indices: Feature maps that are inputs of the FPN, counted from the last one, -1.
            out_channels: Channels of the FPN.
            extra_blocks: Coarser levels of the FPN.
            kwargs: Arguments of :func:`backbone_args`.
        """
        super().__init__()
        # 'getter' returns NCHW maps, which the FPN takes; timm's default for a Swin returns NHWC
        self.body = timm.create_model(
            name, features_only=True, feature_cls='getter', out_indices=out_indices, **backbone_args(name, **kwargs))
        channels = self.body.feature_info.channels()
        self.norms = nn.ModuleList(LayerNorm2d(n) for n in channels)
        self.fpn = FeaturePyramidNetwork(channels, out_channels, extra_blocks)
        self.out_channels = out_channels

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:
        maps = (norm(y) for norm, y in zip(self.norms, self.body(x)))
        return self.fpn({str(i): y for i, y in enumerate(maps)})


def build_model(
        detector: str,
        backbone: str,
        num_classes: int,
        backbone_kwargs: Dict[str, Any],
        fpn_channels: int = 256,
        **kwargs,
) -> nn.Module:
    """A detector of torchvision on a backbone of timm, with the pyramid levels of torchvision's ResNet detectors.

    Args:
        detector: 'retinanet' or 'mask_rcnn'.
        backbone: Name of the backbone, whose last feature maps have strides of 4, 8, 16 and 32 pixels.
        num_classes: Number of classes including the background.
        backbone_kwargs: Arguments of :func:`backbone_args`.
        fpn_channels: Channels of the FPN and of RetinaNet's head.
        kwargs: Arguments of torchvision's detector.
    """
    if detector == 'retinanet':
        net, out_indices, extra_blocks = RetinaNet, (-3, -2, -1), LastLevelP6P7(fpn_channels, fpn_channels)
    else:
        net, out_indices, extra_blocks = MaskRCNN, (-4, -3, -2, -1), LastLevelMaxPool()
    return net(Backbone(backbone, out_indices, fpn_channels, extra_blocks, **backbone_kwargs), num_classes, **kwargs)


class DenseRetinaNet(nn.Module):
    """The part of a RetinaNet that can be exported: backbone, FPN and head, without the selection of boxes.

    torch.export does not take torchvision's non-maximum suppression, whose shapes depend on the data.
    """

    def __init__(self, model: RetinaNet):
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:
        """Logits (N, anchors, classes) and offsets of boxes (N, anchors, 4), of normalized images."""
        return self.head(list(self.backbone(x).values()))


def collate(items: List) -> Tuple[List[torch.Tensor], List[Dict[str, torch.Tensor]]]:
    """A list of images in [0, 1] and torchvision's targets: boxes, labels and masks of the objects."""
    images, targets = [], []
    for image, mask, labels in items:
        numbers = mask.unique()
        numbers = numbers[numbers > 0]
        masks = mask == numbers[:, None, None]
        images.append(image.float() / 255)
        targets.append(dict(
            boxes=masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1]),  # up to the far edge of the last pixel
            labels=torch.ones_like(numbers, dtype=torch.long) if labels is None else labels[numbers.long() - 1],
            masks=masks.byte(),
        ))
    return images, targets


def squares(model: nn.Module, loader: DataLoader, size: int) -> Iterator[torch.Tensor]:
    """Images of a loader, square and normalized as by the detector: (N, 3, size, size)."""
    for images, _ in loader:
        yield torch.stack([model.transform.normalize(resize(image, [size, size])) for image in images])


def mask_iou(masks: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """IoU (N, M) of masks (N, H, W) and (M, H, W)."""
    masks, others = masks.flatten(1).float(), others.flatten(1).float()
    intersection = masks @ others.T
    return intersection / (masks.sum(1)[:, None] + others.sum(1) - intersection)


def covered(objects: Dict[str, torch.Tensor], detections: Dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether each object (N,) has an IoU of 0.5 with a detection of its label: of masks if there are any, or boxes."""
    if 'masks' in detections:
        overlap = mask_iou(objects['masks'], detections['masks'][:, 0] >= .5)
    else:
        overlap = box_iou(objects['boxes'], detections['boxes'])
    return ((overlap >= .5) & (objects['labels'][:, None] == detections['labels'])).any(dim=1)


def same(detections: Dict[str, torch.Tensor], others: Dict[str, torch.Tensor]) -> torch.Tensor:
    """Whether each detection (N,) is among the others, within a tenth of a pixel."""
    distance = torch.cdist(detections['boxes'], others['boxes'], p=float('inf'))
    return ((distance <= .1) & (detections['labels'][:, None] == others['labels'])).any(dim=1)


@torch.inference_mode()
def evaluate(models: Dict[str, nn.Module], loader: DataLoader, args) -> Tuple[Dict[str, float], float]:
    """Percentage of objects that each model finds, and percentage of detections that all models share.

    In an image with n objects the n most confident detections count, see :func:`covered`.
    """
    found = dict.fromkeys(models, 0)
    objects = detections = shared = 0
    for images, targets in loader:
        images = [image.to(args.device) for image in images]
        outputs = [model.eval()(images) for model in models.values()]
        for target, *found_by in zip(targets, *outputs):
            found_by = [{k: v.cpu() for k, v in y.items()} for y in found_by]
            objects += len(target['labels'])
            for name, y in zip(models, found_by):
                best = {k: v[:len(target['labels'])] for k, v in y.items()}
                found[name] += covered(target, best).sum().item()
            detections += max(len(y['labels']) for y in found_by)
            shared += torch.stack([same(found_by[0], y) for y in found_by]).all(dim=0).sum().item()
    # 100% if there are none
    return (
        {name: 100 * n / objects if objects else 100. for name, n in found.items()},
        100 * shared / detections if detections else 100.)


def main() -> Dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', choices=['retinanet', 'mask_rcnn'], default='retinanet', help='(%(default)s)')
    parser.add_argument(
        '--model-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='KEY=VALUE', help='detector arguments')
    add_arguments(parser, pixels='the number of the object of each pixel, or 0')
    parser.add_argument('--img-size', type=int, default=128, help='the shorter side of an image (%(default)s)')
    parser.add_argument('--fpn-channels', type=int, default=256, help='(%(default)s)')
    parser.add_argument(
        '--output', type=Path, metavar='FILE', help='write the weights of the folded model, .safetensors')
    parser.add_argument(
        '--onnx', metavar='FILE',
        help="export the folded RetinaNet's backbone, FPN and head for square images of --img-size, .onnx")
    parser.add_argument('--int8', metavar='DIR', help='quantize the same, and write it')
    args = parser.parse_args()
    if (args.onnx or args.int8) and args.model != 'retinanet':
        parser.error(
            '--onnx and --int8 are for --model retinanet: the heads of Mask R-CNN need boxes that are selected before')
    prepare(args)
    loaders = create_loaders(args, collate, collate)
    model = build_model(
        args.model, args.backbone, 2 if args.images else 1 + len(Shapes.orders),
        dict(checkpoint=args.checkpoint, **args.backbone_kwargs), args.fpn_channels,
        **{'min_size': args.img_size, 'max_size': 5 * args.img_size // 3, **args.model_kwargs}).to(args.device)

    def loss_fn(model, images, targets):
        images = [image.to(args.device) for image in images]
        targets = [{k: v.to(args.device) for k, v in target.items()} for target in targets]
        return sum(model(images, targets).values())

    losses = train(model, loaders[0], loss_fn, args)
    folded = reparameterize_model(model)
    found, shared = evaluate({'as trained': model, 'folded': folded}, loaders[1], args)
    for (name, percent), net in zip(found.items(), (model, folded)):
        count = sum(p.numel() for p in net.backbone.body.parameters())
        print(f'{name}: {percent:.1f}% of the objects found, {count / 1e6:.1f} M parameters in the backbone')
    print(f'detections that both share: {shared:.1f}%')
    if args.output:
        # for build_model(..., backbone_kwargs=dict(reparameterized=True))
        with replacing_files(args.output.parent) as temporary:
            save_file(folded.state_dict(), temporary / args.output.name)
    if args.onnx:
        print(timm_rep.export(DenseRetinaNet(model), args.onnx, 'onnx', input_size=(3, args.img_size, args.img_size)))
    if args.int8:
        dense = DenseRetinaNet(folded.cpu()).eval()
        quantized = timm_rep.quantize_ptq(dense, squares(folded, loaders[0], args.img_size))
        quantized.save(args.int8)
        print(quantized.report)
    return dict(losses=losses, found=found, shared=shared, folded=folded)


if __name__ == '__main__':
    main()
