"""Choose the number of idle channels of each FFN for a given number of multiply-accumulates of the model.

FFNs are compared by how much their errors change the outputs of the model, from one backward pass.
"""
from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from timm_rep.layers.fold import to_float64

from .calibration import CalibrationImages, take
from .ffn import Ffn
from .fitting import CalibrationRows, least_squares, macs_per_token, sum_over_processes
from .residual import Probe, image_count, tokens_of

_IMAGES, _CHUNK = 128, 16  # images in all, and in one backward pass


def logits_of(outputs: Any, count: int) -> List[torch.Tensor]:
    """The outputs with a row for each of ``count`` images that have a gradient, (images, classes)."""
    found = [
        x.reshape(count, -1) for x in tree_leaves(outputs)
        if isinstance(x, torch.Tensor) and x.requires_grad and x.ndim and len(x) == count]
    if not found:
        raise TypeError(
            'Expected the model to return a differentiable tensor with a row for each image, as macs requires, but got '
            f'{type(outputs).__name__}. Return the logits, or pass idle_ratio instead of macs. Nothing was changed.')
    return found


def output_metrics(model: nn.Module, ffns: Sequence[Ffn], images: CalibrationImages) -> Dict[str, torch.Tensor]:
    """Metric of each FFN output under which squared errors sum to the divergence of the model outputs.

    To second order, an error e of an FFN's output changes the Kullback-Leibler divergence of the model's outputs by
    ``e^T F e / 2``, where F is the Fisher information ``E g g^T`` and g the gradient of the log probability of a class
    that is drawn from the outputs; errors of different tokens are taken as independent. For a model with a
    single output, g is the gradient of that output. The divergences of several tensors of outputs are added.

    Returns:
        By name a matrix R with ``R^T R = F``, (out, out), float64.
    """
    ys: List[Tuple[Ffn, torch.Tensor]] = []  # of one forward pass

    def record_output(ffn: Ffn, y: torch.Tensor) -> torch.Tensor:
        y = y if y.requires_grad else y.detach().requires_grad_()  # the model is frozen
        ys.append((ffn, y))
        return y.clone()  # what follows may modify it in place

    device = next(model.parameters()).device
    information = {ffn.name: to_float64(torch.zeros(ffn.out_features, ffn.out_features, device=device)) for ffn in ffns}
    hooks = [
        ffn.output_layer.register_forward_hook(lambda _, args, y, ffn=ffn: record_output(ffn, y)) for ffn in ffns]
    images_per_batch, count = -(-_IMAGES // images.batches), to_float64(torch.zeros((), device=device))
    try:
        for share in images.shares:
            # this process's part of the first images of the batch
            x = take(share.x, slice(len(range(images_per_batch)[share.part])))
            count += image_count(x)
            noises: Dict[int, torch.Tensor] = {}  # by number of the output
            generator = torch.Generator().manual_seed(share.batch)  # per batch, whatever the number of processes
            for start in range(0, image_count(x), _CHUNK):
                ys.clear()
                chunk = take(x, slice(start, start + _CHUNK))
                with torch.enable_grad():
                    outputs = logits_of(model(chunk), image_count(chunk))
                for i, logits in enumerate(outputs):
                    if logits.shape[1] > 1 and i not in noises:
                        noises[i] = -torch.empty(
                            share.size, logits.shape[1], dtype=torch.float32, device='cpu',
                        ).exponential_(generator=generator).log()[share.part]
                    with torch.enable_grad():
                        if i in noises:
                            logits = _drawn_log_probs(logits, noises[i][start:start + len(logits)])
                        grads = torch.autograd.grad(
                            logits.sum(), [y for _, y in ys], allow_unused=True, retain_graph=i + 1 < len(outputs))
                    for (ffn, _), grad in zip(ys, grads):
                        if grad is not None:
                            g = to_float64(tokens_of(grad, ffn.use_conv))
                            with torch.autocast(device.type, enabled=False):
                                information[ffn.name] += g.T @ g
    finally:
        for hook in hooks:
            hook.remove()
    sum_over_processes(count, *information.values())
    if not all(f.isfinite().all() for f in information.values()):
        raise ValueError(
            'With macs, the outputs of the model and their gradients must be finite on the calibration images: pass '
            'idle_ratio instead. Nothing was changed.')
    metrics = {}
    for name, f in information.items():
        f = f / count
        # keeps F positive definite for its Cholesky factor
        floor = 1e-3 * f.diagonal().mean() + torch.finfo(f.dtype).tiny ** .5
        metrics[name] = torch.linalg.cholesky(f + floor * torch.eye(len(f)).to(f)).T
    return metrics


def _drawn_log_probs(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Log probability of the class of each image that Gumbel noise draws."""
    log_probs = logits.float().log_softmax(1)
    drawn = (log_probs.detach() + noise.to(log_probs)).argmax(1)
    return log_probs.gather(1, drawn[:, None])


def allocate(losses: Sequence[torch.Tensor], macs: Sequence[torch.Tensor], budget: float) -> List[int]:
    """Choose the number of idle channels of each FFN: the least total loss within a budget of multiply-accumulates.

    Minimizes ``sum_f loss_f[k_f] + lambda * macs_f[k_f]`` for the smallest multiplier lambda that meets the budget,
    found by bisection. What is left of the budget goes to the FFN whose loss it lowers most.

    Args:
        losses: Loss of every FFN with k idle channels, entry k of hidden_features + 1; float64.
        macs: Multiply-accumulates of every FFN with k idle channels.
        budget: Multiply-accumulates of all FFNs together.

    Returns:
        Number of idle channels of every FFN.
    """
    def choose(multiplier: float) -> List[int]:
        return [(loss + multiplier * m).argmin().item() for loss, m in zip(losses, macs)]

    def total(idle: Sequence[int]) -> float:
        return sum(m[k].item() for m, k in zip(macs, idle))

    if not all(loss.isfinite().all() for loss in losses):
        raise ValueError('losses must be finite.')
    least = sum(m.min().item() for m in macs)
    if budget < least:
        raise ValueError(f'budget must be at least {least}, the least multiply-accumulates of the FFNs, got {budget}.')
    largest = max(loss.max().item() for loss in losses)
    losses = [loss / (largest or 1.) for loss in losses]  # so that the multiplier stays in the range of float64
    low, high = 0., torch.finfo(torch.float64).tiny ** .5
    if total(choose(low)) <= budget:
        return choose(low)
    # with a large enough multiplier the fewest multiply-accumulates win, which are within the budget
    while total(choose(high)) > budget:
        low, high = high, 10 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if total(choose(middle)) <= budget else (middle, high)
    idle = choose(high)
    while True:
        left = budget - total(idle)
        # the fewest idle channels of each FFN that the rest of the budget pays for
        options = [(m <= m[k] + left).nonzero()[0].item() for m, k in zip(macs, idle)]
        gains = [(loss[k] - loss[o]).item() if o < k else 0. for loss, k, o in zip(losses, idle, options)]
        best = max(range(len(idle)), key=gains.__getitem__)
        if gains[best] <= 0:
            return idle
        idle[best] = options[best]


def counts_for_budget(
        model: nn.Module,
        ffns: Sequence[Ffn],
        images: CalibrationImages,
        probes: Dict[str, Probe],
        inputs: Dict[str, CalibrationRows],
        ridge: float,
        model_macs: int,
        fraction: float,
        progress: bool,
) -> Dict[str, int]:
    """Number of active channels of each FFN, by name, for a fraction of the model's multiply-accumulates."""
    macs = []
    for ffn in ffns:
        idle = torch.arange(ffn.hidden_features + 1, dtype=torch.float64)
        linear_path_macs = (ffn.in_features * ffn.out_features) * (idle > 0)
        macs.append(
            probes[ffn.name].tokens * (macs_per_token(ffn.module) - ffn.channel_macs * idle + linear_path_macs))
    others = model_macs - sum(m[0].item() for m in macs)
    least = others + sum(m.min().item() for m in macs)
    if least > fraction * model_macs:
        raise ValueError(
            f'macs must be at least about {least / model_macs:.4f}, the share of multiply-accumulates with all hidden '
            f'channels idle, got {fraction}. Nothing was changed.')
    metrics = output_metrics(model, ffns, images)
    losses = []
    for ffn in tqdm(ffns, desc='Measuring FFNs', disable=not progress):
        rows = inputs[ffn.name]._replace(metric=metrics[ffn.name])
        with torch.autocast(rows.inputs.device.type, enabled=False):
            problem, _ = least_squares(ffn, rows, ridge)
        loss = problem.elimination(ridge).loss.cpu()
        if ffn.hidden_norm is None:
            pruned = problem.elimination(ridge, linear_path=False).loss.cpu()
            dropped = [ffn.hidden_features - ffn.pruned_features(a) for a in range(ffn.hidden_features, -1, -1)]
            loss = torch.minimum(loss, pruned[dropped])
        losses.append(loss)
    # the least may exceed the budget by rounding
    idle = allocate(losses, macs, max(fraction * model_macs, least) - others)
    return {ffn.name: ffn.hidden_features - k for ffn, k in zip(ffns, idle)}
