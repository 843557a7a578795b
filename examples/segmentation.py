#!/usr/bin/env python3
"""Semantic segmentation: UPerNet of segmentation_models_pytorch on a RePaFormer or RepOpt-VGG, folded and compared.

Trains on drawn shapes, or on images and masks of your own.
"""
import argparse
from typing import Any, Callable, Dict, List, Tuple

import segmentation_models_pytorch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
from _dense import Shapes, add_arguments, backbone_args, create_loaders, prepare, train
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils import reparameterize_model
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import timm_rep


def build_model(backbone: str, classes: int, **kwargs) -> nn.Module:
    """UPerNet with a backbone of timm as its encoder.

    Args:
        backbone: Name of the backbone.
        classes: Number of classes.
        kwargs: Arguments of smp.UPerNet, of the backbone, and of :func:`backbone_args`.
    """
    # smp reads strides and memory layout of 'tu-' encoders from timm
    kwargs = backbone_args(backbone, **kwargs)
    return smp.UPerNet(f'tu-{backbone}', encoder_weights=kwargs.pop('pretrained', None), classes=classes, **kwargs)


def create_collate(*transforms: nn.Module) -> Callable[[List], Tuple[torch.Tensor, torch.Tensor]]:
    """A function that collates items into images (N, 3, H, W) and classes of pixels (N, H, W)."""
    transform = v2.Compose([
        *transforms, v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)])

    def collate(items):
        images, masks = zip(*(transform(image, mask) for image, mask, _ in items))
        masks = [
            mask[0].long() if labels is None else F.pad(labels, (1, 0))[mask[0].long()]  # from objects to classes
            for mask, (_, _, labels) in zip(masks, items)
        ]
        return torch.stack(images), torch.stack(masks)

    return collate


@torch.inference_mode()
def evaluate(models: Dict[str, nn.Module], loader: DataLoader, args) -> Tuple[Dict[str, float], float]:
    """mIoU of each model in percent, and largest difference of their logits relative to the largest logit."""
    stats = {name: [] for name in models}
    difference = largest = 0.
    for images, targets in loader:
        logits = [model.eval()(images.to(args.device)).cpu() for model in models.values()]
        difference = max(difference, *((x - logits[0]).abs().max().item() for x in logits))
        largest = max(largest, logits[0].abs().max().item())
        for x, batches in zip(logits, stats.values()):
            batches.append(smp.metrics.get_stats(
                x.argmax(1), targets, mode='multiclass', num_classes=args.num_classes, ignore_index=args.ignore_index))
    totals = {name: (torch.cat(counts).sum(0) for counts in zip(*batches)) for name, batches in stats.items()}
    ious = {  # over the classes that occur
        name: 100 * smp.metrics.iou_score(*total, zero_division=float('nan')).nanmean().item()
        for name, total in totals.items()
    }
    return ious, difference / largest


def main() -> Dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, pixels='the class of each pixel')
    parser.add_argument('--num-classes', type=int, default=1 + len(Shapes.orders), help='classes (%(default)s)')
    parser.add_argument('--ignore-index', type=int, default=255, help='class of pixels to ignore (%(default)s)')
    parser.add_argument('--img-size', type=int, default=96, help='a multiple of 32 (%(default)s)')
    parser.add_argument('--decoder-channels', type=int, default=256, help='(%(default)s)')
    parser.add_argument('--output', metavar='DIR', help='write the folded model; smp.from_pretrained(DIR) loads it')
    parser.add_argument('--onnx', metavar='FILE', help='export the folded model for images of --img-size, .onnx')
    parser.add_argument(
        '--int8', metavar='DIR', help='quantize the folded model for images of --img-size, and write it')
    args = parser.parse_args()
    prepare(args)
    size = (args.img_size, args.img_size)
    loaders = create_loaders(
        args,
        create_collate(v2.RandomResizedCrop(size, scale=(.5, 1.)), v2.RandomHorizontalFlip()),
        create_collate(v2.Resize(size)))
    model = build_model(
        args.backbone, args.num_classes, checkpoint=args.checkpoint, decoder_channels=args.decoder_channels,
        **args.backbone_kwargs).to(args.device)

    def loss_fn(model, images, targets):
        return F.cross_entropy(
            model(images.to(args.device)), targets.to(args.device), ignore_index=args.ignore_index)

    losses = train(model, loaders[0], loss_fn, args)
    folded = reparameterize_model(model)
    ious, difference = evaluate({'as trained': model, 'folded': folded}, loaders[1], args)
    for (name, iou), net in zip(ious.items(), (model, folded)):
        count = sum(p.numel() for p in net.encoder.parameters())
        print(f'{name}: mIoU {iou:.1f}%, {count / 1e6:.1f} M parameters in the backbone')
    print(f'largest difference of the logits, relative to the largest: {difference:.1e}')
    if args.output:
        # arguments that smp builds the model with before it loads the weights
        folded.config.update(reparameterized=True, encoder_weights=None, pretrained_cfg_overlay=None)
        folded.save_pretrained(args.output)
    if args.onnx:
        print(timm_rep.export(model, args.onnx, 'onnx', input_size=(3, *size)))
    if args.int8:
        args.device = torch.device('cpu')
        quantized = timm_rep.quantize_ptq(folded.cpu(), loaders[0])
        quantized.save(args.int8)
        print(f'{quantized.report}\nint8: mIoU {evaluate({"int8": quantized}, loaders[1], args)[0]["int8"]:.1f}%')
    return dict(losses=losses, ious=ious, difference=difference, folded=folded)


if __name__ == '__main__':
    main()
