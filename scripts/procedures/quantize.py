"""Procedure ``quantize``: a trained model in int8, and the entries of its kernels (RepOptimizers, tables 10 and 11)."""
from typing import Any, Dict, Mapping

import torch
import torch.nn as nn
from procedures.train import trained
from procedures.workspace import Images, Workspace
from timm.utils import reparameterize_model

from timm_rep.deploy import quantize_ptq, quantize_qat
from timm_rep.plotting import kernel_layer, plot_kernels
from timm_rep.utils.training import evaluate

__all__ = ['DEFAULTS', 'quantize']

DEFAULTS = dict(
    trained=None,           # the model
    backend='inductor',     # None for the model in float32, and its kernels
    per_channel=True,       # a scale for each channel of the weights, instead of each layer
    calibrator='minmax',
    qat_epochs=0,           # of quantization-aware training
    lr=1e-4,                # of quantization-aware training
    images=512,             # to calibrate on
    seed=0,
)


def kernels(model: nn.Module, folded: nn.Module) -> Dict[str, torch.Tensor]:
    """The 3 x 3 kernel that table 11 looks at, by what was done to it: the BatchNorm folded, branches added."""
    name = kernel_layer(model.state_dict()).removesuffix('.weight')
    conv = model.get_submodule(name)
    parent, _, _ = name.rpartition('.')
    norm = model.get_submodule(f'{parent}.bn')
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
    """The largest absolute entry of the folded kernels, which sets the step of int8."""
    return max(m.weight.abs().max().item() for m in folded.modules() if isinstance(m, nn.Conv2d))


def quantize(settings: Mapping[str, Any], workspace: Workspace) -> Dict[str, Any]:
    """A row of a quantization: accuracy in int8 and its change from float32; without a backend, entries of kernels."""
    cpu = torch.device('cpu')  # where int8 runs
    model = trained(settings['trained'], workspace).model.to(cpu, memory_format=torch.contiguous_format)
    images = Images(workspace, {**settings['trained'], 'seed': settings['seed']}, cpu)
    before = evaluate(model, images.validation(), cpu)[1]
    if settings['backend'] is None:
        folded = reparameterize_model(model)
        found = kernels(model, folded)
        entries = {f'std of the {stage}': deviations(kernel) for stage, kernel in found.items()}
        figure = plot_kernels({stage: {'3 x 3': kernel} for stage, kernel in found.items()}, ['3 x 3'] * len(found))
        return {
            'top-1': round(before, 2), 'largest entry': round(largest_entry(folded), 2), **entries, 'picture': figure}
    if settings['qat_epochs']:
        with workspace.training_folder({**settings, 'model': settings['trained']['model']}) as folder:
            quantized = quantize_qat(
                model, images, settings['qat_epochs'], settings['lr'], settings['images'],
                checkpoint=folder / 'training.pth', resume=True)
    else:
        calibration = [(x.contiguous(), y) for x, y in images.calibration(settings['images'])]
        quantized = quantize_ptq(
            model, calibration, settings['backend'], settings['per_channel'], settings['calibrator'])
    after = evaluate(quantized, images.validation(), cpu)[1]
    return {
        'top-1': round(after, 2), 'change': round(after - before, 2),
        'layers in int8': len(quantized.report.int8_layers), 'in float': len(quantized.report.float_layers)}
