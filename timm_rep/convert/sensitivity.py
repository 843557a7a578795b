"""How much errors of the FFNs change the outputs of a model, from one backward pass."""
from typing import Any, Dict, List, Sequence

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from .calibration import CalibrationImages, take
from .ffn import Ffn
from .fitting import sum_over_processes
from .least_squares import wide
from .residual import image_count, tokens_of

__all__ = ['logits_of', 'output_metrics']

_IMAGES, _CHUNK = 128, 16  # images in all, and in one backward pass


def logits_of(outputs: Any) -> torch.Tensor:
    """The first output with a row for each image, (images, classes).

    Raises:
        TypeError: There is none.
    """
    for x in tree_leaves(outputs):
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim:
            return x.reshape(len(x), -1)
    raise TypeError(
        'Expected the model to return a floating-point tensor with a row for each image, which macs needs, but got '
        f'{type(outputs).__name__}. Let it return its logits, or pass idle_ratio instead. Nothing was changed.')


def output_metrics(model: nn.Module, ffns: Sequence[Ffn], images: CalibrationImages) -> Dict[str, torch.Tensor]:
    """Metrics of the FFNs' outputs in which squared errors add up to the divergence of the model's outputs.

    To second order, an error e of an FFN's output changes the Kullback-Leibler divergence of the model's outputs by
    ``e^T F e / 2``, where F is the Fisher information ``E g g^T`` and g the gradient of the log probability of a class
    that is drawn from the outputs; errors of different tokens are taken as independent. Of a model with a single
    output, g is its gradient.

    Returns:
        By name a matrix R with ``R^T R = F``, (out, out), float64.

    Raises:
        TypeError: There is no output with a row for each image.
        ValueError: Outputs or gradients are not finite.
    """
    ys: Dict[str, List[torch.Tensor]] = {}

    def see_output(ffn: Ffn, y: torch.Tensor) -> torch.Tensor:
        y = y if y.requires_grad else y.detach().requires_grad_()  # of a frozen model
        ys.setdefault(ffn.name, []).append(y)
        return y

    device = next(model.parameters()).device
    information = {ffn.name: wide(torch.zeros(ffn.out_features, ffn.out_features, device=device)) for ffn in ffns}
    hooks = [
        ffn.output_layer.register_forward_hook(lambda _, args, y, ffn=ffn: see_output(ffn, y)) for ffn in ffns]
    of_each_batch, count = -(-_IMAGES // images.batches), wide(torch.zeros((), device=device))
    try:
        for share in images.shares:
            x = take(share.x, slice(len(range(of_each_batch)[share.part])))
            count += image_count(x)
            noise = None
            for start in range(0, image_count(x), _CHUNK):
                ys.clear()
                with torch.enable_grad():
                    logits = logits_of(model(take(x, slice(start, start + _CHUNK))))
                    if logits.shape[1] > 1:
                        logits = logits.float().log_softmax(1)
                        if noise is None:
                            noise = -torch.empty(share.size, logits.shape[1]).exponential_(
                                generator=torch.Generator().manual_seed(share.batch)).log()[share.part]
                        drawn = (logits.detach() + noise[start:start + len(logits)].to(logits)).argmax(1)
                        logits = logits.gather(1, drawn[:, None])
                    names = [name for name, outputs in ys.items() for _ in outputs]
                    outputs = [y for outputs in ys.values() for y in outputs]
                    grads = torch.autograd.grad(logits.sum(), outputs, allow_unused=True)
                for name, grad in zip(names, grads):
                    if grad is not None:
                        ffn = next(ffn for ffn in ffns if ffn.name == name)
                        g = tokens_of(grad, ffn.use_conv)
                        information[name] += wide(g.T @ g)
    finally:
        for hook in hooks:
            hook.remove()
    sum_over_processes(count, *information.values())
    if not all(f.isfinite().all() for f in information.values()):
        raise ValueError(
            'The outputs of the model, or their gradients, are not finite on the calibration images: macs cannot '
            'compare them. Pass idle_ratio instead. Nothing was changed.')
    metrics = {}
    for name, f in information.items():
        f = f / count
        floor = 1e-3 * f.diagonal().mean() + torch.finfo(f.dtype).tiny ** .5
        metrics[name] = torch.linalg.cholesky(f + floor * torch.eye(len(f)).to(f)).T
    return metrics
