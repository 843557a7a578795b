"""The first part of the demo: a RePa-DeiT, folded, and the plain ViT of its size."""
from pathlib import Path
from typing import Dict, NamedTuple

import torch
import torch.nn as nn
from timm.models import save_for_hf
from timm.utils import reparameterize_model

from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.profiling import count_macs, count_params, measure_throughput
from timm_rep.utils.training import evaluate

from . import training

# a ViT that two CPU cores train in a minute; the mean over all tokens learns faster on so few images than a class token
_MODEL_ARGS = dict(patch_size=4, embed_dim=128, depth=4, num_heads=4, global_pool='avg', img_size=16)


class RePaResult(NamedTuple):
    """What the first part measured.

    Attributes:
        rows: For each of the plain ViT, the RePa model and the folded RePa model: accuracy (percent of the validation
            images), params, macs (of one image), throughput (images per second).
        logits_difference: Largest difference between the logits before and after folding, relative to the largest.
        folded: The folded model.
        predictions: What it reads in the validation images.
    """
    rows: Dict[str, Dict[str, float]]
    logits_difference: float
    folded: nn.Module
    predictions: torch.Tensor


def run_repa(
        train_set: training.Images,
        val_set: training.Images,
        device: torch.device,
        seed: int,
        epochs: int,
) -> RePaResult:
    """Train both models, fold one, measure all three."""
    models = {}
    for label, name in (('plain ViT', 'deit_tiny_patch16_224'), ('RePa-DeiT', 'repa_deit_tiny')):
        models[label] = model = training.create_model(name, seed, device, **_MODEL_ARGS)
        loader = training.create_loader_for(train_set, model, is_training=True)
        training.train(label, model, loader, epochs, device, opt='adamw', lr=2e-3, weight_decay=0.05)
    folded = models['RePa-DeiT, folded'] = reparameterize_model(models['RePa-DeiT'])

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
    return RePaResult(rows, difference, folded, after.argmax(-1))


def save_folded(model: nn.Module, folder: Path) -> None:
    # named here, though newer timm finds them by itself
    model_args = dict(_MODEL_ARGS, in_chans=1, reparameterized=True)
    with replacing_files(folder) as temporary:
        save_for_hf(model.cpu(), str(temporary), model_args=model_args, safe_serialization=True)
