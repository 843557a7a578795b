"""Procedure ``quantize``: a trained model in int8 and statistics of its kernels (RepOptimizers, tables 10 and 11)."""
from typing import Any, Dict, Mapping

import torch
import torch.nn as nn
from experiments.train import trained
from experiments.workspace import Images, Workspace

from timm_rep.convert import folded_copy
from timm_rep.deploy import quantize_ptq, quantize_qat
from timm_rep.plotting import kernel_layer
from timm_rep.utils.training import evaluate

__all__ = ['DEFAULTS', 'quantize']

DEFAULTS = dict(
    trained=None,           # the model
    backend='inductor',     # None for the model in float32 and statistics of its kernels
    per_channel=True,       # scales of the weights by output channel, otherwise one per layer
    calibrator='minmax',
    equalize=False,         # ranges of consecutive layers, before quantization after training
    qat_epochs=0,           # quantization-aware training
    lr=1e-4,                # learning rate of quantization-aware training
    images=512,             # to calibrate on
    seed=0,
)


def kernels(model: nn.Module, folded: nn.Module) -> Dict[str, torch.Tensor]:
    """The 3 x 3 kernel of table 11: as trained, with its BatchNorm folded, and with the branches added."""
    name = kernel_layer(model.state_dict()).removesuffix('.weight')
    conv = model.get_submodule(name)
    parent, _, _ = name.rpartition('.')
    norm = next(m for m in model.get_submodule(parent).children() if isinstance(m, nn.BatchNorm2d))
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    stages = {'3 x 3 kernel': conv.weight, 'BatchNorm folded': conv.weight * scale[:, None, None, None]}
    block = '.'.join(name.split('.')[:3])
    branches = next(
        value for key, value in folded.state_dict().items() if key.startswith(f'{block}.') and value.ndim == 4)
    if not torch.allclose(branches, stages['BatchNorm folded'], rtol=1e-3, atol=1e-5):
        stages['branches added'] = branches
    return {stage: kernel.detach() for stage, kernel in stages.items()}


def deviations(kernel: torch.Tensor) -> Dict[str, float]:
    entries = kernel.flatten(2)
    surrounding = torch.cat([entries[..., :4], entries[..., 5:]], -1)
    parts = {'overall': entries, 'centre': entries[..., 4], 'surrounding': surrounding}
    return {part: round(values.std().item(), 5) for part, values in parts.items()}


def largest_entry(folded: nn.Module) -> float:
    """Largest absolute entry of the folded kernels, which determines the step size of int8."""
    return max(m.weight.abs().max().item() for m in folded.modules() if isinstance(m, nn.Conv2d))


def quantize(settings: Mapping[str, Any], workspace: Workspace) -> Dict[str, Any]:
    """Row of a quantization: accuracy in int8 and its change from float32; without a backend, statistics of kernels."""
    cpu = torch.device('cpu')  # int8 backends run on the CPU
    model = trained(settings['trained'], workspace).model.to(cpu, memory_format=torch.contiguous_format)
    images = Images(workspace, {**settings['trained'], 'seed': settings['seed']}, cpu)
    before = evaluate(model, images.validation(), cpu)[1]
    if settings['backend'] is None:
        folded = folded_copy(model)
        entries = {f'std of the {stage}': deviations(kernel) for stage, kernel in kernels(model, folded).items()}
        return {'top-1': round(before, 2), 'largest entry': round(largest_entry(folded), 2), **entries}
    if settings['qat_epochs']:
        with workspace.training_folder({**settings, 'model': settings['trained']['model']}) as folder:
            quantized = quantize_qat(
                model, images, settings['qat_epochs'], settings['lr'], settings['images'],
                checkpoint=folder / 'training.pth', resume=True)
    else:
        calibration = [(x.contiguous(), y) for x, y in images.calibration(settings['images'])]
        quantized = quantize_ptq(
            model, calibration, settings['backend'], settings['per_channel'], settings['calibrator'],
            equalize=settings['equalize'])
    after = evaluate(quantized, images.validation(), cpu)[1]
    return {
        'top-1': round(after, 2), 'change': round(after - before, 2),
        'layers in int8': len(quantized.report.int8_layers), 'in float': len(quantized.report.float_layers)}
