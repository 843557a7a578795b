#!/usr/bin/env python3
"""Top-1 accuracy in int8 (RepOptimizers, table 10), and standard deviations of kernel entries (table 11, figure 5).

Models trained by the same recipe, quantized after training with each calibrator, per channel and per tensor, and with
quantization-aware training. 'change': percentage points from float32.

    python scripts/experiments/quantization.py repopt_vgg_a0=a0.pth.tar repvgg_a0=repvgg.pth.tar --recipe recipe.yaml \\
        --data-dir CIFAR10
"""
import argparse
import itertools
import sys
from pathlib import Path
from typing import Dict, Tuple

import timm
import torch
import torch.nn as nn
import yaml
from timm.utils import reparameterize_model

from timm_rep.deploy import BACKENDS, CALIBRATORS, quantize_ptq, quantize_qat
from timm_rep.plotting import kernel_layer, plot_kernels
from timm_rep.utils.checkpoints import load_checkpoint
from timm_rep.utils.data import Images
from timm_rep.utils.training import evaluate

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_table, rows_measured, save

KEYS = ('model', 'backend', 'weights', 'calibrator', 'qat_epochs')
KERNELS = 'Standard deviation of the entries of the middle 3 x 3 kernel of the deepest stage (RepOptimizers, table 11).'


def kernels(model: nn.Module) -> Dict[str, torch.Tensor]:
    """The 3 x 3 kernel that the paper looks at, by what was done to it: the BatchNorm folded, branches added."""
    name = kernel_layer(model.state_dict()).removesuffix('.weight')
    conv = model.get_submodule(name)
    parent, _, _ = name.rpartition('.')
    norm = model.get_submodule(f'{parent}.bn')
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    stages = {'3 x 3 kernel': conv.weight, 'BatchNorm folded': conv.weight * scale[:, None, None, None]}
    folded = reparameterize_model(model).state_dict()
    block = '.'.join(name.split('.')[:3])
    branches = next(value for key, value in folded.items() if key.startswith(f'{block}.') and value.ndim == 4)
    if not torch.allclose(branches, stages['BatchNorm folded'], rtol=1e-3, atol=1e-5):
        stages['branches added'] = branches
    return {stage: kernel.detach() for stage, kernel in stages.items()}


def deviations(kernel: torch.Tensor) -> Dict[str, float]:
    entries = kernel.flatten(2)
    surrounding = torch.cat([entries[..., :4], entries[..., 5:]], -1)
    parts = {'overall': entries, 'centre': entries[..., 4], 'surrounding': surrounding}
    return {part: round(values.std().item(), 5) for part, values in parts.items()}


def pair(text: str) -> Tuple[str, str]:
    name, equals, path = text.partition('=')
    if not equals or not timm.is_model(name):
        raise argparse.ArgumentTypeError(f'expected MODEL=CHECKPOINT with a model of timm, got {text!r}')
    return name, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='+', type=pair, metavar='MODEL=CHECKPOINT')
    parser.add_argument('--recipe', required=True, type=Path, help='of the training, as for timm train.py --config')
    parser.add_argument('--data-dir', required=True)
    parser.add_argument('--backends', nargs='*', choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument('--calibrators', nargs='*', choices=CALIBRATORS, default=list(CALIBRATORS))
    parser.add_argument('--qat-epochs', type=int, default=10, help='0 for none (%(default)s)')
    parser.add_argument('--lr', type=float, default=1e-4, help='of quantization-aware training (%(default)s)')
    parser.add_argument('--images', type=int, default=512, help='to calibrate on (%(default)s)')
    args = parser.parse_args()
    recipe = yaml.safe_load(args.recipe.read_text())
    config = {name: recipe[name] for name in ('mean', 'std', 'interpolation', 'crop_pct') if name in recipe}
    settings = dict(recipe=args.recipe.name, epochs_trained=recipe['epochs'], images=args.images, qat_lr=args.lr)
    device = torch.device('cpu')
    rows = rows_measured('quantization', device, settings)
    done = {tuple(row[key] for key in KEYS) for row in rows}
    sources, drawn = [], {}
    for name, checkpoint in args.models:
        kwargs = recipe.get('model_kwargs') or {}
        model = timm.create_model(name, num_classes=recipe['num_classes'], **kwargs).eval()
        load_checkpoint(model, checkpoint)
        for stage, kernel in kernels(model).items():
            sources.append({'model': name, 'kernel': stage, **deviations(kernel)})
            drawn[f'{name}, {stage}'] = {'kernel.weight': kernel}
        images = Images(
            model, args.data_dir, val_split=recipe['val_split'], batch_size=recipe['batch_size'],
            img_size=recipe['input_size'][-1], **config)
        validation = list(images.validation())
        calibration = list(images.calibration(args.images))
        before = evaluate(model, validation, device)[1]
        cases = [
            *itertools.product(args.backends, ('channel', 'tensor'), args.calibrators, [0]),
            *([('inductor', 'channel', 'minmax', args.qat_epochs)] if args.qat_epochs else [])]
        for backend, weights, calibrator, epochs in cases:
            if (name, backend, weights, calibrator, epochs) in done:
                continue
            if epochs:
                quantized = quantize_qat(model, images, epochs, args.lr, args.images)
            else:
                quantized = quantize_ptq(model, calibration, backend, weights == 'channel', calibrator)
            after = evaluate(quantized, validation, device)[1]
            rows.append({
                **dict(zip(KEYS, (name, backend, weights, calibrator, epochs))), 'float32': round(before, 2),
                'int8': round(after, 2), 'change': round(after - before, 2),
                'layers in int8': len(quantized.report.int8), 'in float': len(quantized.report.float)})
            save('quantization', __doc__.partition('\n\n    python')[0], rows, device, settings, KEYS)
            print_table(rows[-1:])
    path = save('kernel-entries', KERNELS, sources, device, settings, ('model', 'kernel'))
    print_table(sources)
    plot_kernels(drawn).savefig(path.with_suffix('.png'), dpi=110)


if __name__ == '__main__':
    main()
