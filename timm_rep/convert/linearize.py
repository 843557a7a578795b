"""RePa FFNs from a pretrained model and unlabelled images: least squares in closed form, no training.

The FFN ``y = W2 g(u) + b2`` with hidden features g becomes ``W2' g_A + M u + c``: the active channels A keep the
activation, the others are replaced by their best linear predictor from the input u and the active features.
"""
import math
from numbers import Real
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from timm_rep.layers import Affine, RePaMlpDeploy, active_channels
from timm_rep.utils.data import take_images
from timm_rep.utils.profiling import count_macs

from ._reparameterize import check_unconverted
from .budget import allocate
from .ffn import (
    Ffn,
    deploy_of,
    find_ffns,
    ratios_of,
    replace_module,
)
from .ffn_parts import linear_of
from .least_squares import LeastSquares, Moments
from .recording import Recorder, wide
from .report import ConversionReport, ConvertedFfn

__all__ = ['check_convertible', 'linearize_ffns']


def check_convertible(model: nn.Module) -> Tuple[List[Ffn], Dict[str, str]]:
    """The pointwise FFNs of a model, and the names of other FFNs with the reason why they cannot be converted.

    Raises:
        TypeError: model is not a module.
        ValueError: The model has no pointwise FFN, or is wrapped, compiled or converted already.
    """
    check_unconverted(model)
    ffns, others = find_ffns(model)
    if not ffns:
        reasons = [f'{name} {reason}' for name, reason in others.items()]
        more = f' and {len(reasons) - 3} more' if len(reasons) > 3 else ''
        raise ValueError(
            f'Cannot convert {type(model).__name__}, nothing was changed: it has no pointwise FFN'
            + (f', {", ".join(reasons[:3])}{more}.' if reasons else '.'))
    return ffns, others


@torch.no_grad()
def linearize_ffns(
        model: nn.Module,
        loader: Iterable[Any],
        idle_ratio: Union[float, Sequence[Optional[float]], None] = None,
        max_images: int = 512,
        ridge: float = 1e-4,
        progress: bool = False,
        macs: Optional[float] = None,
) -> ConversionReport:
    """Replace the FFNs of a pretrained model by three small matrices each, fitted to unlabelled images, in place.

    FFN after FFN in the order of execution: what enters an FFN comes from the converted ones before it. The idle
    channels are those whose best linear replacement costs least, see :func:`timm_rep.convert.eliminate`; ``W2'``, M and
    c solve ``min E |W2 g + b2 - (W2' g_A + M u + c)|^2`` with the damping ``ridge * variance`` of every variable. Where
    the fit with M = 0 and more active channels, as many as have the multiply-accumulates of M, is better, the FFN
    becomes two matrices.
    Norm, layer scale and shortcut stay those of the block.

    Args:
        model: timm model, in any mode, which is left as it is.
        loader: Batches of images (N, C, H, W), preprocessed as for the model; of a tuple or list the first item is
            used, of a dict the tensor of images. Labels are not used.
        idle_ratio: Share of the hidden channels that become linear, from 0 to 1; or one for each FFN, None for those
            that stay as they are. 0.75 by default.
        max_images: Number of images to use.
        ridge: Damping of the least-squares problems, relative to the variance of every variable.
        progress: Whether to show a progress bar.
        macs: Multiply-accumulates of the converted model as a fraction of the model's, above 0 and below 1. Takes the
            place of idle_ratio: FFNs whose conversion changes the outputs less idle more, see
            :func:`timm_rep.convert.budget.allocate`, and the images pass the model about twice more for each FFN.

    Returns:
        The report.

    Raises:
        TypeError: model is not a module, a batch has no tensor of images, or, with macs, the outputs hold no tensor.
        ValueError: The model has no FFN that can be converted, no weights, or is wrapped or converted already;
            idle_ratio, ridge or max_images is out of range; macs cannot be reached; there are too few images; or
            features or weights are not finite. The model is unchanged.
        OverflowError: A fitted weight does not fit the dtype of the model, which is unchanged.
    """
    ffns, kept = check_convertible(model)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f'{type(model).__name__} is on the meta device and has no weights: load them first.')
    if macs is not None and idle_ratio is not None:
        raise ValueError(f'Expected either idle_ratio or macs, but got idle_ratio={idle_ratio!r} and macs={macs!r}.')
    if macs is not None and (not isinstance(macs, Real) or not 0 < macs < 1):
        raise ValueError(
            f"macs must be a fraction of the model's multiply-accumulates, above 0 and below 1, got {macs!r}.")
    if idle_ratio is None:
        idle_ratio = 0.75
    if not 0 < ridge < math.inf:
        raise ValueError(f'ridge must be positive and finite, got {ridge!r}.')
    names = [ffn.name for ffn in ffns]
    ratios = dict(zip(names, ratios_of(names, idle_ratio)))
    ffns = [ffn for ffn in ffns if ratios[ffn.name] is not None]
    if not ffns:
        raise ValueError('idle_ratio is None for all FFNs: nothing is to be converted.')
    kept = {**kept, **{name: 'has no idle ratio' for name, ratio in ratios.items() if ratio is None}}
    counts = {ffn.name: active_channels(ffn.hidden_features, ratios[ffn.name]) for ffn in ffns}
    recorder = Recorder(model, take_images(loader, max_images))
    modes = {m: m.training for m in model.modules()}
    replaced: List[Tuple[nn.Module, nn.Module]] = []
    try:
        model.eval()
        images = sum(map(len, recorder.batches))
        input_size = tuple(recorder.batches[0].shape[1:])
        before = count_macs(model, input_size).total
        ffns, tokens, calls = _survey(recorder, ffns, kept, images)
        if macs is not None:
            counts = _counts_for_budget(recorder, ffns, tokens, calls, ridge, before, macs, progress)
        converted = []
        for ffn in tqdm(ffns, desc='Converting FFNs', disable=not progress):
            problem = _least_squares(recorder, ffn, calls[ffn.name], ridge)
            new, fit, lost = _replacement(recorder, ffn, problem, counts[ffn.name], calls[ffn.name], ridge)
            replace_module(model, ffn.module, new)
            replaced.append((new, ffn.module))
            converted.append(ConvertedFfn(
                ffn.name, ffn.hidden_features, len(fit.active), fit.linear_path, lost,
                tuple(tokens[ffn.name] * _matrix_entries(m) for m in (ffn.module, new))))
        saved = sum(ffn.macs[0] - ffn.macs[1] for ffn in converted)
        report = ConversionReport(converted, kept, images, (before, before - saved))
    except BaseException:
        for new, old in replaced:
            replace_module(model, new, old)
        raise
    finally:
        for new, old in replaced:
            new.train(modes[old])
        for module, training in modes.items():
            module.training = training
    return report


def _matrix_entries(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def _survey(
        recorder: Recorder,
        ffns: Sequence[Ffn],
        kept: Dict[str, str],
        images: int,
) -> Tuple[List[Ffn], Dict[str, int], Dict[str, int]]:
    """FFNs in the order of execution, with their tokens and passes for each image; checks that the images suffice."""
    tokens: Dict[str, int] = {}
    calls: Dict[str, int] = {}

    def see(ffn: Ffn, u: torch.Tensor, g: torch.Tensor) -> None:
        tokens[ffn.name] = tokens.get(ffn.name, 0) + len(u)
        calls[ffn.name] = calls.get(ffn.name, 0) + 1

    recorder.run(ffns, see, batches=1)
    by_name = {ffn.name: ffn for ffn in ffns}
    ordered = []
    for ffn in ffns:
        if ffn.name not in calls:
            kept[ffn.name] = 'is not used in the forward pass'
    for name in calls:
        tokens[name] //= len(recorder.batches[0])
        if tokens[name] == calls[name]:
            kept[name] = 'sees one token of each image, so that converting it saves next to nothing'
            continue
        ordered.append(by_name[name])
    if not ordered:
        raise ValueError(
            'No FFN can be converted, nothing was changed: '
            + ', '.join(f'{name} {reason}' for name, reason in list(kept.items())[:3]) + '.')
    channels = {ffn.name: ffn.in_features + ffn.hidden_features for ffn in ordered}
    needed = {name: math.ceil((n + 1) / tokens[name]) for name, n in channels.items()}
    name = max(needed, key=needed.get)
    if images < needed[name]:
        raise ValueError(
            f'{name} has {channels[name]} input and hidden channels and sees {tokens[name]} tokens of each image: its '
            f'conversion needs at least {needed[name]} images, got {images}. Nothing was changed.')
    return ordered, tokens, calls


def _outputs(recorder: Recorder) -> torch.Tensor:
    """Log probabilities of the images, (images, classes), of the first output if there are several.

    Raises:
        TypeError: There is no output with a row for each image.
    """
    outputs = []
    for batch in recorder.batches:
        returned = recorder(batch)
        rows = [x for x in tree_leaves(returned) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim]
        if not rows:
            raise TypeError(
                f'macs compares the outputs of the model, {type(recorder.model).__name__} returns no tensor of '
                f'floating-point numbers with a row for each image, got {type(returned).__name__}: let it return its '
                'logits, or pass idle_ratio instead. Nothing was changed.')
        outputs.append(rows[0].reshape(len(rows[0]), -1))
    return wide(torch.cat(outputs)).log_softmax(1)


def _even_counts(ffns: Sequence[Ffn], macs: Sequence[torch.Tensor], budget: float) -> List[int]:
    """Active channels of every FFN, for one idle ratio of at most 1 that meets a budget."""
    for percent in range(101):
        counts = [active_channels(ffn.hidden_features, percent / 100) for ffn in ffns]
        if sum(m[ffn.hidden_features - n].item() for ffn, m, n in zip(ffns, macs, counts)) <= budget:
            break
    return counts


def _budget_weight(
        recorder: Recorder,
        ffn: Ffn,
        problem: LeastSquares,
        active_features: int,
        calls: int,
        ridge: float,
        outputs: torch.Tensor,
) -> float:
    """The factor of an FFN's loss in the sum over all FFNs that a budget minimizes.

    The Kullback-Leibler divergence of the model's outputs with this FFN alone converted, with the active channels of
    one idle ratio for all, over the loss. Weights of 1, or of one over the variance of the FFN's output, cost no pass
    of the images; they lost more accuracy on one model and as much on another (scripts/results: `converted-accuracy`,
    `accelerate-budget`).
    """
    new, fit, _ = _replacement(recorder, ffn, problem, active_features, calls, ridge)
    replace_module(recorder.model, ffn.module, new)
    try:
        divergence = F.kl_div(_outputs(recorder), outputs, log_target=True, reduction='batchmean').item()
    finally:
        replace_module(recorder.model, new, ffn.module)
    # a divergence of rounding errors is no measure for an FFN that is linear
    error = max(fit.error, 1e-4 * problem.output_variance())
    return max(divergence, 0.) / error if error > 0 else 0.


def _counts_for_budget(
        recorder: Recorder,
        ffns: Sequence[Ffn],
        tokens: Dict[str, int],
        calls: Dict[str, int],
        ridge: float,
        model_macs: int,
        fraction: float,
        progress: bool,
) -> Dict[str, int]:
    """Active channels of every FFN for a fraction of the model's multiply-accumulates."""
    macs = []
    for ffn in ffns:
        idle = torch.arange(ffn.hidden_features + 1, dtype=torch.float64)
        line = (ffn.in_features * ffn.out_features) * (idle > 0)
        macs.append(tokens[ffn.name] * (_matrix_entries(ffn.module) - ffn.channel_macs * idle + line))
    others = model_macs - sum(m[0].item() for m in macs)
    least = others + sum(m.min().item() for m in macs)
    if least > fraction * model_macs:
        raise ValueError(
            f'macs={fraction} cannot be reached: with all hidden channels idle the model has {least / model_macs:.4f} '
            'of its multiply-accumulates. Nothing was changed.')
    even = _even_counts(ffns, macs, fraction * model_macs - others)
    losses, weights, outputs = [], [], _outputs(recorder)
    for ffn, active in zip(tqdm(ffns, desc='Measuring FFNs', disable=not progress), even):
        problem = _least_squares(recorder, ffn, calls[ffn.name], ridge)
        loss = problem.elimination().loss.cpu()
        if ffn.hidden_norm is None:
            pruned = problem.elimination(linear_path=False).loss.cpu()
            dropped = [ffn.hidden_features - ffn.pruned_features(a) for a in range(ffn.hidden_features, -1, -1)]
            loss = torch.minimum(loss, pruned[dropped])
        losses.append(loss)
        weights.append(_budget_weight(recorder, ffn, problem, active, calls[ffn.name], ridge, outputs))
    if not any(weights):  # a single output has no divergence
        weights = [1.] * len(ffns)
    losses = [weight * loss for weight, loss in zip(weights, losses)]
    idle = allocate(losses, macs, fraction * model_macs - others)
    return {ffn.name: ffn.hidden_features - k for ffn, k in zip(ffns, idle)}


class _Fit(NamedTuple):
    """Least-squares fit of an FFN: active channels, whether it has the path M; M and c, W2', squared error."""
    active: torch.Tensor
    linear_path: bool
    linear: Affine
    weight: torch.Tensor
    error: float


def _fit(problem: LeastSquares, ffn: Ffn, active_features: int) -> _Fit:
    """The better fit of three matrices, and of two with as many multiply-accumulates."""
    fits = []
    for linear_path, count in ((False, ffn.pruned_features(active_features)), (True, active_features)):
        if not linear_path and (ffn.hidden_norm is not None or active_features == ffn.hidden_features):
            continue
        active = torch.arange(count, device=problem.mean.device)
        if 0 < count < ffn.hidden_features:
            active = problem.elimination(linear_path).order[-count:].sort().values
        fits.append(_Fit(active, linear_path, *problem.solve(active, linear_path)))
    return min(fits, key=lambda fit: fit.error)  # of equal ones the first, two matrices


def _replacement(
        recorder: Recorder,
        ffn: Ffn,
        problem: LeastSquares,
        active_features: int,
        calls: int,
        ridge: float,
) -> Tuple[nn.Module, _Fit, float]:
    """The replacement of an FFN, its fit, and the share of the variance of the output that is lost."""
    fit = _fit(problem, ffn, active_features)
    act = ffn.act(fit.active)
    new = ffn.replacement(len(fit.active), act, fit.linear_path, device='meta')
    deploy = deploy_of(new)
    fc_in_like, like = linear_of(ffn.first).weight, linear_of(ffn.last).weight
    if deploy.has_active:
        ffn.fc_in(fit.active).write_to(deploy.fc_in, like=fc_in_like)
    if ffn.hidden_norm is not None:
        fit = _fit_to_new_features(recorder, ffn, deploy, fit.active, calls, ridge)
    if deploy.has_idle:
        fit.linear.write_to(deploy.fc_idle, like=like)
    if deploy.has_active:
        Affine(fit.weight, fit.linear.bias).write_to(deploy.fc_out, like=like)
    variance = problem.output_variance()
    return new, fit, fit.error / variance if variance > 0 else 0.


def _least_squares(recorder: Recorder, ffn: Ffn, calls: int, ridge: float) -> LeastSquares:
    moments = Moments()

    def see(ffn: Ffn, u: torch.Tensor, g: torch.Tensor) -> None:
        moments.add(wide(torch.cat([g, u], 1)))

    recorder.run([ffn], see, calls)
    covariance, second = moments.covariance(), ffn.fc_out()
    if not all(x.isfinite().all() for x in (covariance, *second)):
        raise ValueError(
            f'The features of {ffn.name} are not finite on the calibration images: the images, or the weights up to '
            'it, hold NaN or infinite values. Nothing was changed.')
    return LeastSquares(second, moments.mean(), covariance, ridge)


def _fit_to_new_features(
        recorder: Recorder,
        ffn: Ffn,
        deploy: RePaMlpDeploy,
        active: torch.Tensor,
        calls: int,
        ridge: float,
) -> _Fit:
    """Fit to hidden features whose LayerNorm sees the active channels alone, which the moments of all do not give."""
    out, a = ffn.fc_out(), len(active)
    kept = out.weight[:, active]
    moments = Moments()

    def see(ffn: Ffn, u: torch.Tensor, g: torch.Tensor) -> None:
        x, y = wide(u), wide(g) @ out.weight.T + out.bias
        if not a:
            moments.add(torch.cat([y, x], 1))
            return
        image = u.T[None, :, :, None] if ffn.use_conv else u
        features = wide(deploy.act(deploy.fc_in(image)))
        features = features[0, :, :, 0].T if ffn.use_conv else features
        moments.add(torch.cat([features, y - features @ kept.T, x], 1))

    recorder.run([ffn], see, calls)
    identity = torch.eye(len(kept), dtype=kept.dtype, device=kept.device)
    problem = LeastSquares(
        Affine(torch.cat([kept, identity], 1), torch.zeros_like(out.bias)), moments.mean(), moments.covariance(), ridge)
    return _Fit(active, True, *problem.solve(torch.arange(a, device=kept.device)))
