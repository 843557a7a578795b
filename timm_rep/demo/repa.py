"""First and third part of the demo: a RePa-DeiT, trained and folded; a plain ViT of its size, converted."""
import copy
from pathlib import Path
from typing import Dict, NamedTuple

import torch
import torch.nn as nn

from timm_rep.convert import ConversionReport, convert_to_repa, folded_copy
from timm_rep.hub import CONFIG_NAME, read_folder, save_folder
from timm_rep.utils.profiling import count_macs, count_params, measure_throughput
from timm_rep.utils.training import evaluate

from . import training

# trains within a minute on two CPU cores; average pooling learns faster than a class token from so few images
_MODEL_ARGS = dict(patch_size=4, embed_dim=128, depth=4, num_heads=4, global_pool='avg', img_size=16)


class RePaResult(NamedTuple):
    """Results of the first and the third part.

    Attributes:
        rows: Figures of the plain ViT, the converted plain ViT, the RePa model and the folded RePa model, by label:
            ``accuracy`` (percent of the validation images), ``params``, ``macs`` (per image) and ``throughput`` (images
            per second).
        logits_difference: Largest difference between the logits before and after folding, relative to the largest
            logit.
        agreement: Percentage of validation images with equal predictions of the plain and the converted ViT.
        conversion: Report of the conversion of the plain ViT.
        folded: The folded model.
    """
    rows: Dict[str, Dict[str, float]]
    logits_difference: float
    agreement: float
    conversion: ConversionReport
    folded: nn.Module


def run_repa(
        train_set: training.Images,
        val_set: training.Images,
        device: torch.device,
        seed: int,
        epochs: int,
) -> RePaResult:
    """Train a plain ViT and a RePa-DeiT, convert the former, fold the latter, and measure all four models."""
    trained = {}
    for label, name in (('plain ViT', 'deit_tiny_patch16_224'), ('RePa-DeiT', 'repa_deit_tiny')):
        trained[label] = model = training.create_model(name, seed, device, **_MODEL_ARGS)
        loader = training.create_loader_for(train_set, model, is_training=True)
        training.train(label, model, loader, epochs, device, opt='adamw', lr=2e-3, weight_decay=0.05)
    plain, repa = trained['plain ViT'], trained['RePa-DeiT']
    converted = copy.deepcopy(plain)
    conversion = convert_to_repa(
        converted, idle_ratio=0.75, calibration=training.create_loader_for(train_set, plain, is_training=False))
    folded = folded_copy(repa)
    models = {'plain ViT': plain, 'plain ViT, converted': converted, 'RePa-DeiT': repa, 'RePa-DeiT, folded': folded}

    rows: Dict[str, Dict[str, float]] = {}
    logits = {}
    for label, model in models.items():
        val_loader = training.create_loader_for(val_set, model, is_training=False)
        logits[label], top1 = evaluate(model, val_loader, device)
        rows[label] = dict(accuracy=top1, params=count_params(model), macs=count_macs(model).total)
    before, after = logits['RePa-DeiT'], logits['RePa-DeiT, folded']
    batch = next(iter(val_loader))[0].to(device)
    for label, throughput in measure_throughput(models, batch).items():
        rows[label]['throughput'] = throughput
    difference = ((after - before).abs().max() / before.abs().max()).item()
    plain_classes, converted_classes = (logits[label].argmax(-1) for label in ('plain ViT', 'plain ViT, converted'))
    agreement = 100 * (converted_classes == plain_classes).double().mean().item()
    return RePaResult(rows, difference, agreement, conversion, folded)


def check_replaceable(folder: Path) -> None:
    """Raise FileExistsError if a folder holds another model than the demo's."""
    if (folder / CONFIG_NAME).exists():
        found = read_folder(folder).model_args
        if any(found.get(name) != value for name, value in _MODEL_ARGS.items()):
            raise FileExistsError(f'{str(folder)!r} holds another model: name another output folder.')


def save_folded(model: nn.Module, folder: Path) -> None:
    """Write model.safetensors and config.json of the folded model to a folder."""
    # timm records them since 1.0.31
    model_args = dict(_MODEL_ARGS, in_chans=1, reparameterized=True)
    save_folder(model.cpu(), folder, model_args=model_args)
