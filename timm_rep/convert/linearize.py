"""RePa FFNs from a pretrained model and unlabelled images: least squares in closed form, no training.

The FFN ``y = W2 g(u) + b2`` with hidden features g becomes ``W2' g_A + M u + c``: the active channels A keep the
activation, the others are replaced by their best linear predictor from the input u and the active features.
"""
import math
import warnings
from numbers import Real
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from tqdm import tqdm

from timm_rep.layers import active_channels
from timm_rep.utils.data import take_images, world_size_and_rank
from timm_rep.utils.profiling import count_macs

from ._reparameterize import check_unconverted
from .budget import allocate
from .ffn import Ffn, check_untied, find_ffns, ratios_of
from .fitting import CalibrationRows, fit_ffn, least_squares
from .masks import image_count, image_hash, take
from .report import ConversionReport, ConvertedFfn
from .residual import Probe, Residual, probe
from .sensitivity import output_metrics
from .streaming import ConvertingPass, Inputs, Original, Share, TokenSampler, record_original

__all__ = ['check_convertible', 'linearize_ffns']

# Tokens of each image that are used at least, and rows for each column of the moments. Neighbouring tokens repeat each
# other, so that few tokens of many images say more than all tokens of a few.
_TOKENS, _ROWS_PER_COLUMN, _RECOMMENDED_ROWS = 16, 4, 16
# share of the images that is held out, and the number of them from which on losses on them are compared
_HELD_OUT, _MIN_HELD_OUT = 5, 4
# batches that wait in the model at the same time
_MAX_BATCHES = 64


def check_convertible(model: nn.Module) -> Tuple[List[Ffn], Dict[str, str]]:
    """The pointwise FFNs of a model, and the names of other FFNs with the reason why they cannot be converted.

    Raises:
        TypeError: model is not a module.
        ValueError: The model has no pointwise FFN, one with a tied parameter, or is wrapped, compiled or converted.
    """
    check_unconverted(model)
    ffns, others = find_ffns(model)
    if not ffns:
        reasons = [f'{name} {reason}' for name, reason in others.items()]
        more = f' and {len(reasons) - 3} more' if len(reasons) > 3 else ''
        raise ValueError(
            f'Cannot convert {type(model).__name__}, nothing was changed: it has no pointwise FFN'
            + (f', {", ".join(reasons[:3])}{more}.' if reasons else '.'))
    check_untied(model, ffns)
    return ffns, others


@torch.no_grad()
def linearize_ffns(
        model: nn.Module,
        loader: Iterable[Any],
        idle_ratio: Union[float, Sequence[Optional[float]], None] = None,
        max_images: int = 512,
        ridge: float = 1e-2,
        progress: bool = False,
        macs: Optional[float] = None,
        tokens_per_image: Optional[int] = None,
        compensate: bool = True,
) -> ConversionReport:
    """Replace the FFNs of a pretrained model by two or three small matrices each, fitted to images without labels.

    FFN after FFN in the order of execution, in one forward pass of the images, in step: what enters an FFN comes from
    the converted ones before it. The idle channels are those whose best linear replacement costs least, see
    :func:`timm_rep.convert.eliminate`; ``W2'``, M and c solve a least-squares problem with the damping
    ``ridge * variance`` of every variable. Where the fit with M = 0 and more active channels, as many as have the
    multiply-accumulates of M, is better on held-out images, the FFN becomes two matrices.

    The target is what brings the residual stream back to the original model's: where an FFN's output is added to the
    stream, with or without a layer scale, what the stream lacks so far is part of the target. This correction is
    fitted with a stronger damping, chosen for each FFN on the held-out images. Elsewhere the target is what the FFN
    gives on its new input. Norm, layer scale and shortcut stay those of the block.

    Memory: all batches are in the model at once, each with about two activations; the recorded tokens of each FFN take
    ``images * tokens * out_features`` numbers. In a process group the processes share the images, and all get the same
    weights; each passes the same loader.

    Args:
        model: timm model, in any mode, which is left as it is.
        loader: Batches of images (N, C, H, W), preprocessed as for the model; of a tuple or list the first item is
            used, of a dict the tensor of images. Labels are not used. For a NaFlexViT also batches of timm's NaFlex
            loader, of whose patches the padding is not used.
        idle_ratio: Share of the hidden channels that become linear, from 0 to 1 (default: 0.75); or one for each FFN,
            None for those that stay as they are.
        max_images: Number of images to use. A fifth of them is held out while path and damping are chosen.
        ridge: Damping of the least-squares problems, relative to the variance of every variable.
        progress: Whether to show a progress bar.
        macs: Multiply-accumulates of the converted model as a fraction of the model's, above 0 and below 1. Takes the
            place of idle_ratio: FFNs whose errors change the outputs less idle more, see
            :func:`timm_rep.convert.budget.allocate`; this takes one backward pass of a part of the images.
        tokens_per_image: Number of tokens of each image that an FFN is fitted to, class tokens first (default: 16, or
            as many as give four tokens for each channel of the FFN).
        compensate: Whether the errors of the FFNs before it are a part of the target of an FFN.

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
    if tokens_per_image is not None and (not isinstance(tokens_per_image, int) or tokens_per_image < 1):
        raise ValueError(f'tokens_per_image must be an integer >= 1, got {tokens_per_image!r}.')
    if not isinstance(ridge, Real) or not 0 < ridge < math.inf:
        raise ValueError(f'ridge must be positive and finite, got {ridge!r}.')
    names = [ffn.name for ffn in ffns]
    ratios = dict(zip(names, ratios_of(names, 0.75 if idle_ratio is None else idle_ratio)))
    ffns = [ffn for ffn in ffns if ratios[ffn.name] is not None]
    if not ffns:
        raise ValueError('idle_ratio is None for all FFNs: nothing is to be converted.')
    kept = {**kept, **{name: 'has no idle ratio' for name, ratio in ratios.items() if ratio is None}}
    counts = {ffn.name: active_channels(ffn.hidden_features, ratios[ffn.name]) for ffn in ffns}
    images = _CalibrationImages(take_images(loader, max_images, naflex=True), next(model.parameters()))
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()
        before = count_macs(model, inputs=images.first(1)).total
        probes = probe(model, ffns, images.first(4))
        if not compensate:
            probes = {name: seen._replace(residual=None) for name, seen in probes.items()}
        ffns = _used(ffns, probes, kept, images.count)
        tokens = {
            ffn.name: tokens_per_image or max(_TOKENS, math.ceil(_ROWS_PER_COLUMN * _columns(ffn) / images.count))
            for ffn in ffns}
        sampler = TokenSampler(images.batch_sizes, probes, tokens)
        original = record_original(model, ffns, images.shares, sampler, with_inputs=macs is not None)
        if macs is not None:
            counts = _counts_for_budget(model, ffns, images, sampler, original, ridge, before, macs, progress)
        converted = []
        with ConvertingPass(model, ffns, images.shares, sampler) as converting:
            for ffn in tqdm(ffns, desc='Converting FFNs', disable=not progress):
                rows = _rows(ffn, *converting.arrive_at(ffn), images, probes[ffn.name].residual, original)
                with torch.autocast(rows.inputs.device.type, enabled=False):
                    fitted = fit_ffn(ffn, rows, counts[ffn.name], ridge)
                converting.convert(ffn, fitted.matrices)
                converted.append(ConvertedFfn(
                    ffn.name, ffn.hidden_features, fitted.active_features, fitted.linear_path, fitted.loss,
                    tuple(probes[ffn.name].tokens * _matrix_entries(m) for m in (
                        ffn.module, ffn.around(fitted.matrices))),
                    fitted.held_out_loss, fitted.other_held_out_loss, fitted.linear_share,
                    rows.wanted is not None, fitted.correction_ridge))
        saved = sum(ffn.macs[0] - ffn.macs[1] for ffn in converted)
        recommended = max(
            math.ceil(_RECOMMENDED_ROWS * _columns(ffn) / min(_TOKENS, probes[ffn.name].tokens)) for ffn in ffns)
        report = ConversionReport(converted, kept, images.count, (before, before - saved), recommended)
        for ffn in ffns:
            model.get_submodule(ffn.name).train(modes[ffn.module])
    finally:
        for module, training in modes.items():
            module.training = training
    if images.rank == 0:
        _warn(model, images, original, report)
    return report


def _warn(model: nn.Module, images: '_CalibrationImages', original: Original, report: ConversionReport) -> None:
    """Warn of images that say little about others."""
    messages = []
    if images.count - images.unique > images.count / 10:
        messages.append(f'Only {images.unique} of the {images.count} calibration images are different ones.')
    if getattr(model, 'num_classes', 0) > 1 and images.unique > 1 and len(original.predicted.unique()) == 1:
        messages.append(
            'The model predicts the same class for all calibration images: pass images of all classes, in random '
            'order.')
    worst = max(report.ffns, key=lambda ffn: (ffn.held_out or 0) - ffn.lost_variance)
    if worst.held_out is None:
        messages.append(
            f'{images.unique} different calibration images are too few to hold some out, so that the form of the '
            f'FFNs and their damping are not chosen on data: pass at least {_HELD_OUT * _MIN_HELD_OUT}, better '
            f'{report.recommended_images}.')
    elif worst.held_out > 1.5 * worst.lost_variance + 0.02:
        messages.append(
            f'{worst.name} loses {worst.held_out:.0%} of the variance on held-out images and {worst.lost_variance:.0%} '
            f'on those it is fitted to, {images.count}: pass more calibration images, about '
            f'{report.recommended_images}.')
    for message in messages:
        warnings.warn(message, stacklevel=4)  # where linearize_ffns() is called


def _matrix_entries(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def _columns(ffn: Ffn) -> int:
    return ffn.in_features + ffn.hidden_features


class _CalibrationImages:
    """The calibration images of all processes, those of this one, and which are held out."""

    def __init__(self, batches: Sequence[Any], like: torch.Tensor):
        if len(batches) > _MAX_BATCHES and all(isinstance(batch, torch.Tensor) for batch in batches) and len(
                {(batch.shape[1:], batch.dtype) for batch in batches}) == 1:
            # each batch takes a thread
            every = torch.cat(list(batches))
            batches = every.split(math.ceil(len(every) / _MAX_BATCHES))
        self.batch_sizes = [image_count(batch) for batch in batches]
        self.count = sum(self.batch_sizes)
        self.world_size, self.rank = world_size_and_rank()
        if self.count < self.world_size:
            raise ValueError(f'Expected an image for each of {self.world_size} processes, but got {self.count}.')
        self._first, self._like = batches[0], dict(device=like.device, dtype=like.dtype)
        self.shares = []
        for i, batch in enumerate(batches):
            images = slice(self.rank, None, self.world_size)
            if image_count(take(batch, images)):
                self.shares.append(Share(i, images, take(batch, images, **self._like)))
        # an image that is there twice is either held out or not
        first: Dict[int, int] = {}
        groups = [
            first.setdefault(image_hash(batch, i), len(first))
            for batch, count in zip(batches, self.batch_sizes) for i in range(count)]
        held_out = torch.tensor(groups) % _HELD_OUT == _HELD_OUT - 1
        self.unique = len(first)
        self.held_out = held_out & (self.unique // _HELD_OUT >= _MIN_HELD_OUT)

    def first(self, count: int) -> Any:
        """The first images of the first batch, as the model takes them."""
        return take(self._first, slice(count), **self._like)


def _used(
        ffns: Sequence[Ffn],
        probes: Dict[str, Probe],
        kept: Dict[str, str],
        images: int,
) -> List[Ffn]:
    """FFNs that are worth converting, in the order of execution; checks that the images suffice."""
    by_name = {ffn.name: ffn for ffn in ffns}
    ordered = []
    for ffn in ffns:
        if ffn.name not in probes:
            kept[ffn.name] = 'is not used in the forward pass'
    for name, seen in probes.items():
        if seen.tokens == seen.calls:
            kept[name] = 'sees one token of each image, so that converting it saves next to nothing'
        else:
            ordered.append(by_name[name])
    if not ordered:
        raise ValueError(
            'No FFN can be converted, nothing was changed: '
            + ', '.join(f'{name} {reason}' for name, reason in list(kept.items())[:3]) + '.')
    needed = {ffn.name: math.ceil((_columns(ffn) + 1) / probes[ffn.name].tokens) for ffn in ordered}
    name = max(needed, key=needed.get)
    if images < needed[name]:
        raise ValueError(
            f'{name} has {_columns(by_name[name])} input and hidden channels and sees {probes[name].tokens} tokens of '
            f'each image: its conversion needs at least {needed[name]} images, got {images}. Nothing was changed.')
    return ordered


def _rows(
        ffn: Ffn,
        inputs: Inputs,
        streams: Optional[torch.Tensor],
        images: _CalibrationImages,
        residual: Optional[Residual],
        original: Original,
        metric: Optional[torch.Tensor] = None,
) -> CalibrationRows:
    """What the fit of an FFN takes, from its recorded inputs and residual streams."""
    held_out = images.held_out.to(inputs.images.device)[inputs.images]
    if residual is None:
        return CalibrationRows(inputs.rows, held_out, None, metric)
    scale = residual.scale.to(inputs.rows.device)
    wanted = None
    if streams is not None:
        total = original.totals[ffn.name]
        wanted = (total - streams.to(total)) / scale.to(total)
    return CalibrationRows(inputs.rows, held_out, wanted, scale if metric is None else metric)


def _counts_for_budget(
        model: nn.Module,
        ffns: Sequence[Ffn],
        images: _CalibrationImages,
        sampler: TokenSampler,
        original: Original,
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
        macs.append(
            sampler.probes[ffn.name].tokens * (_matrix_entries(ffn.module) - ffn.channel_macs * idle + line))
    others = model_macs - sum(m[0].item() for m in macs)
    least = others + sum(m.min().item() for m in macs)
    if least > fraction * model_macs:
        raise ValueError(
            f'macs={fraction} cannot be reached: with all hidden channels idle the model has {least / model_macs:.4f} '
            'of its multiply-accumulates. Nothing was changed.')
    metrics = output_metrics(model, ffns, images.shares, images.batch_sizes, images.rank, images.world_size)
    losses = []
    for ffn in tqdm(ffns, desc='Measuring FFNs', disable=not progress):
        rows = _rows(ffn, original.inputs[ffn.name], None, images, None, original, metrics[ffn.name])
        with torch.autocast(rows.inputs.device.type, enabled=False):
            problem, _ = least_squares(ffn, rows, ridge)
        loss = problem.elimination(ridge).loss.cpu()
        if ffn.hidden_norm is None:
            pruned = problem.elimination(ridge, linear_path=False).loss.cpu()
            dropped = [ffn.hidden_features - ffn.pruned_features(a) for a in range(ffn.hidden_features, -1, -1)]
            loss = torch.minimum(loss, pruned[dropped])
        losses.append(loss)
    idle = allocate(losses, macs, fraction * model_macs - others)
    return {ffn.name: ffn.hidden_features - k for ffn, k in zip(ffns, idle)}
