"""RePa FFNs from a pretrained model and unlabelled images: least squares in closed form, no training.

The FFN ``y = W2 g(u) + b2`` with hidden features g becomes ``W2' g_A + M u + c``: the active channels A keep the
activation, the others are replaced by their best linear predictor from the input u and the active features.
"""
import contextlib
import inspect
import math
import warnings
from numbers import Real
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from tqdm import tqdm

from timm_rep.layers import active_channels
from timm_rep.utils.batches import take_images
from timm_rep.utils.modes import keeping_modes, set_mode_of_others
from timm_rep.utils.profiling import count_macs

from ._reparameterize import add_reparameterize, check_unconverted
from .budget import counts_for_budget
from .calibration import HELD_OUT, MIN_HELD_OUT, CalibrationImages, TokenSampler
from .ffn import Ffn, check_untied, find_ffns, plain_ratio, ratios_of
from .fitting import fit_ffn, sum_over_processes
from .report import ConversionReport
from .residual import Probe, probe
from .streaming import ConvertingPass, record_original

# of a conversion from data without idle_ratio and macs
DEFAULT_IDLE_RATIO = 0.75
# Least number of tokens per image; calibration rows per column of the moments, used and recommended. Neighbouring
# tokens are redundant, so few tokens of many images are worth more than all tokens of a few.
_TOKENS, _ROWS_PER_COLUMN, _RECOMMENDED_ROWS = 16, 4, 16


def check_convertible(model: nn.Module) -> Tuple[List[Ffn], Dict[str, str]]:
    """The pointwise FFNs of a model, and the names of other FFNs with the reason why they cannot be converted.

    Raises ValueError if the model has no pointwise FFN or one with a tied parameter, or is wrapped, compiled or
    converted; TypeError if it is not a module.
    """
    check_unconverted(model)
    ffns, others = find_ffns(model)
    if not ffns:
        reasons = [f'{name} {reason}' for name, reason in others.items()]
        more = f' and {len(reasons) - 3} more' if len(reasons) > 3 else ''
        raise ValueError(
            f'Expected a pointwise FFN, but {type(model).__name__} has none, nothing was changed'
            + (f': {", ".join(reasons[:3])}{more}.' if reasons else '.'))
    check_untied(model, ffns)
    return ffns, others


def check_size(idle_ratio: Any, macs: Optional[float]) -> None:
    """Raise ValueError unless one of idle_ratio and macs, or none, is given and valid; see :func:`linearize_ffns`."""
    if macs is not None and idle_ratio is not None:
        raise ValueError(f'Expected either idle_ratio or macs, but got idle_ratio={idle_ratio!r} and macs={macs!r}.')
    if macs is not None and (not isinstance(macs, Real) or not 0 < macs < 1):
        raise ValueError(
            f"macs must be a fraction of the model's multiply-accumulates, above 0 and below 1, got {macs!r}.")
    if idle_ratio is not None:
        plain_ratio(idle_ratio)


@torch.inference_mode(False)  # inference tensors cannot be trained
@torch.no_grad()
def linearize_ffns(
        model: nn.Module,
        loader: Iterable[Any],
        idle_ratio: Union[float, Sequence[Optional[float]], None] = None,
        max_images: int = 2048,
        ridge: float = 1e-2,
        progress: bool = False,
        macs: Optional[float] = None,
        tokens_per_image: Optional[int] = None,
        compensate: bool = True,
) -> ConversionReport:
    """Replace the FFNs of a pretrained model by two or three small matrices each, fitted to images without labels.

    FFNs are converted in execution order during a single forward pass in which all batches advance together, so each
    FFN is fitted to inputs that come from the FFNs already converted. The channels made idle are those whose best
    linear replacement costs least, see :func:`timm_rep.convert.least_squares.eliminate`; ``W2'``, M and c solve a
    least-squares problem with the damping ``ridge * variance`` of every variable. If dropping M and spending its
    multiply-accumulates on additional active channels fits the held-out images better, the FFN becomes two matrices.

    The target restores the residual stream of the original model: where an FFN's output is added to the stream, with or
    without a layer scale, the errors that earlier FFNs left in the stream are part of the target. This correction has a
    damping of its own, chosen for each FFN on the held-out images. Elsewhere the target is the output of the FFN on its
    new input. The block keeps its norm, layer scale and shortcut; dropouts within the FFN are left out.

    Memory: all batches are in the model at once and hold about four activations per image; the recorded tokens take
    ``images * tokens * out_features`` numbers per FFN. For a ViT-B/16 at 224 pixels the two add up to 3.3 MB per image
    in float32, 6.7 GB for 2,048 images. In a process group, the processes split the images and get the same weights;
    pass the same loader in each.

    Args:
        model: timm model, in any mode, which is left as it is.
        loader: Batches of images (N, C, H, W), preprocessed as for the model; of a tuple or list the first item is
            used, of a dict the tensor of images. Labels are not used. For a NaFlexViT also batches of timm's NaFlex
            loader, of whose patches the padding is not used.
        idle_ratio: Share of the hidden channels that become linear, from 0 to 1 (default: 0.75); or one for each FFN,
            None to leave an FFN unchanged.
        max_images: Largest number of images to use; the report recommends one for the model. A fifth of them is held
            out while the number of matrices and the damping of the correction are chosen.
        ridge: Damping of the least-squares problems, relative to the variance of every variable.
        progress: Whether to show a progress bar.
        macs: Multiply-accumulates of the converted model as a fraction of the model's, above 0 and below 1. Instead of
            idle_ratio: FFNs whose errors affect the outputs less get more idle channels, see
            :func:`timm_rep.convert.budget.allocate`; this costs one backward pass over about 128 images.
        tokens_per_image: Number of tokens of each image that an FFN is fitted to, class tokens first (default: 16, or
            as many as give four tokens for each channel of the FFN).
        compensate: Whether each FFN also corrects the errors that the FFNs before it left in the residual stream.

    Returns:
        The report.

    Raises:
        TypeError: model is not a module, a batch has no tensor of images, or, with macs, the outputs hold no tensor.
        ValueError: The model has no FFN that can be converted, one with a tied parameter, or no weights, or is wrapped,
            compiled or converted already; idle_ratio, ridge or max_images is out of range; macs cannot be reached;
            there are too few images; or features or weights are not finite. The model is unchanged.
        OverflowError: A fitted weight does not fit the dtype of the model, which is unchanged.

    Examples:
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=48, num_heads=3, depth=2).eval()
        >>> report = linearize_ffns(model, [torch.randn(64, 3, 32, 32)], idle_ratio=[None, 0.75])
        >>> [ffn.name for ffn in report.ffns]
        ['blocks.1.mlp']
    """
    ffns, kept = check_convertible(model)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f'Expected weights, but {type(model).__name__} is on the meta device: load them first.')
    check_size(idle_ratio, macs)
    if tokens_per_image is not None and (not isinstance(tokens_per_image, int) or tokens_per_image < 1):
        raise ValueError(f'tokens_per_image must be an integer >= 1, got {tokens_per_image!r}.')
    if not isinstance(ridge, Real) or not 0 < ridge < math.inf:
        raise ValueError(f'ridge must be positive and finite, got {ridge!r}.')
    names = [ffn.name for ffn in ffns]
    ratios = dict(zip(names, ratios_of(names, DEFAULT_IDLE_RATIO if idle_ratio is None else idle_ratio)))
    ffns = [ffn for ffn in ffns if ratios[ffn.name] is not None]
    if not ffns:
        raise ValueError('idle_ratio must be a number for at least one FFN, got None for all of them.')
    kept = {**kept, **{name: 'has no idle ratio' for name, ratio in ratios.items() if ratio is None}}
    counts = {ffn.name: active_channels(ffn.hidden_features, ratios[ffn.name]) for ffn in ffns}
    images = CalibrationImages(take_images(loader, max_images, naflex=True), next(model.parameters()))
    with keeping_modes(model), _naming_ridge(ridge):
        model.eval()
        before = count_macs(model, inputs=images.first(1)).total
        probes = probe(model, ffns, images.first(4))
        if not compensate:
            probes = {name: seen._replace(residual=None) for name, seen in probes.items()}
        ffns = _drop_unused(ffns, probes, kept, images.count)
        tokens = {
            ffn.name: tokens_per_image or max(_TOKENS, math.ceil(_ROWS_PER_COLUMN * _columns(ffn) / images.count))
            for ffn in ffns}
        sampler = TokenSampler(probes, tokens)
        totals, inputs, predicted = record_original(model, ffns, images.shares, sampler, with_inputs=macs is not None)
        predictions, = sum_over_processes(predicted.float())
        if macs is not None:
            counts = counts_for_budget(model, ffns, images, probes, inputs, ridge, before, macs, progress)
        converted = []
        with ConvertingPass(model, ffns, images.shares, sampler) as converting:
            for ffn in tqdm(ffns, desc='Converting FFNs', disable=not progress):
                rows, stream = converting.run_until(ffn)
                residual, total = probes[ffn.name].residual, totals.get(ffn.name)
                if residual is not None:
                    rows = rows._replace(
                        missing=total - stream.to(total), metric=residual.scale.to(total.device))
                with torch.autocast(rows.inputs.device.type, enabled=False):
                    matrices, found = fit_ffn(ffn, rows, counts[ffn.name], ridge, probes[ffn.name].tokens)
                converting.convert(ffn, matrices)
                converted.append(found)
        saved = sum(ffn.macs[0] - ffn.macs[1] for ffn in converted)
        recommended = max(
            math.ceil(_RECOMMENDED_ROWS * _columns(ffn) / min(_TOKENS, probes[ffn.name].tokens)) for ffn in ffns)
        report = ConversionReport(converted, kept, images.count, (before, before - saved), recommended)
    for ffn in ffns:
        set_mode_of_others(model.get_submodule(ffn.name), ffn.module.modules(), ffn.module.training)
    add_reparameterize(model)
    if images.rank == 0:
        _warn(images, int(predictions.count_nonzero()), report)
    return report


@contextlib.contextmanager
def _naming_ridge(ridge: float) -> Iterator[None]:
    """Turn a factorization that fails into an error that names the damping."""
    try:
        yield
    except torch.linalg.LinAlgError as e:
        raise ValueError(
            f'ridge must be large enough for features that depend linearly on each other, got {ridge!r}: pass a larger '
            'one, 1e-2 by default, or more distinct images. Nothing was changed.') from e


def _warn(images: CalibrationImages, predicted_classes: int, report: ConversionReport) -> None:
    """Warn if the calibration images are too few or too similar."""
    messages = []
    if images.count - images.unique > images.count / 10:
        messages.append(f'Only {images.unique} of the {images.count} calibration images are distinct.')
    if images.unique > 1 and predicted_classes == 1:
        messages.append(
            'The model predicts the same class for all calibration images: pass images of all classes, in random '
            'order.')
    worst = max(report.ffns, key=lambda ffn: (ffn.held_out or 0) - (ffn.lost_variance or 0))
    if worst.held_out is None:
        messages.append(
            f'{images.unique} distinct calibration images are too few to hold some out, so that the number of matrices '
            f'and the damping are not chosen on data: pass at least {HELD_OUT * MIN_HELD_OUT}, better '
            f'{report.recommended_images}.')
    elif worst.lost_variance is not None and worst.held_out > 1.5 * worst.lost_variance + 0.02:
        messages.append(
            f'{worst.name} loses {worst.held_out:.0%} of the variance on held-out images and {worst.lost_variance:.0%} '
            f'on those it is fitted to, {images.count}: pass more calibration images, about '
            f'{report.recommended_images}.')
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals.get('__name__', '').partition('.')[0] in ('timm_rep', 'torch'):
        frame, level = frame.f_back, level + 1
    for message in messages:
        warnings.warn(message, stacklevel=level + 1)  # where the user's code calls


def _columns(ffn: Ffn) -> int:
    return ffn.in_features + ffn.hidden_features


def _drop_unused(
        ffns: Sequence[Ffn],
        probes: Dict[str, Probe],
        kept: Dict[str, str],
        images: int,
) -> List[Ffn]:
    """The FFNs worth converting, in execution order; adds the others to ``kept``, checks that the images suffice."""
    by_name = {ffn.name: ffn for ffn in ffns}
    ordered = []
    for ffn in ffns:
        if ffn.name not in probes:
            kept[ffn.name] = 'is not used in the forward pass'
    for name, seen in probes.items():
        if seen.tokens == seen.calls:
            kept[name] = 'sees only one token of each image, so converting it saves almost nothing'
        else:
            ordered.append(by_name[name])
    if not ordered:
        raise ValueError(
            'Expected an FFN that can be converted, but '
            + ', '.join(f'{name} {reason}' for name, reason in list(kept.items())[:3]) + '. Nothing was changed.')
    needed = {ffn.name: math.ceil((_columns(ffn) + 1) / probes[ffn.name].tokens) for ffn in ordered}
    name = max(needed, key=needed.__getitem__)
    if images < needed[name]:
        raise ValueError(
            f'Expected at least {needed[name]} images for {name}, with {_columns(by_name[name])} input and hidden '
            f'channels and {probes[name].tokens} tokens of each image, but got {images}. Nothing was changed.')
    return ordered
