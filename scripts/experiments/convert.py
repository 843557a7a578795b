"""Procedures ``accelerate``: convert the FFNs of a trained model, optionally distil it; and ``linear-path``: convert
them with and without a linear path.

``accelerate.yaml`` describes the methods. ``budget, RULE`` chooses an idle ratio for each FFN to minimize the sum over
the FFNs of the lost variance (``absolute``), of its share of the output's variance (``relative``), or of the divergence
of the logits that the lost part of their outputs causes (``divergence``, the rule of ``macs=``).
"""
import contextlib
import copy
import math
from functools import partial
from typing import Any, Dict, Iterator, Mapping, Optional
from unittest import mock

import torch
import torch.nn as nn
from benchmarks.timing import speedup
from experiments.models import idle_first_channels
from experiments.train import trained
from experiments.workspace import Images, Workspace

import timm_rep
from timm_rep.convert import budget, linearize_ffns
from timm_rep.convert.ffn import find_ffns, replace_module
from timm_rep.convert.least_squares import LeastSquares
from timm_rep.layers import Affine, active_channels
from timm_rep.utils.profiling import count_macs, time_passes
from timm_rep.utils.training import distil, evaluate

__all__ = ['COLUMNS', 'DEFAULTS', 'FORMS', 'accelerate', 'linear_path', 'refusing']

DEFAULTS = dict(
    method='closed form',
    idle_ratio=0.75,
    images=512,             # to calibrate on
    distil_epochs=0,
    distil_lr=None,
    timed_images=64,        # of a batch to time
    trained=None,           # the model to convert
    teacher=None,           # the model to compare with, if it is another one
    seed=0,                 # chooses the calibration images
)
# settings of a conversion with and without a linear path
FORMS = dict(trained=None, idle_ratio=0.75, images=512, seed=0)
# settings that identify a row
COLUMNS = ('method', 'idle_ratio', 'distil_epochs', 'distil_lr')


def closed_form(model: nn.Module, loader, ratio: float) -> nn.Module:
    linearize_ffns(model, loader, ratio)
    return model


@torch.no_grad()
def fold_first_channels(model: nn.Module) -> nn.Module:
    """Fold FFNs whose first channels alone have an activation."""
    for ffn in find_ffns(model)[0]:
        idle = ffn.module.get_submodule(ffn.act_name)
        active = idle.active_channels
        ffn.module.set_submodule(ffn.act_name, idle.act)
        deploy = ffn.replacement(active)
        fc_in, fc_out = ffn.fc_in(torch.arange(ffn.hidden_features)), ffn.fc_out()
        like = next(model.parameters())
        if deploy.has_active:
            fc_in.outputs(0, active).write_to(deploy.fc_in, like)
            fc_out.inputs(0, active).write_to(deploy.fc_out, like)
        if deploy.has_idle:
            fc_out.inputs(active).after(fc_in.outputs(active)).write_to(deploy.fc_idle, like)
        replace_module(model, ffn.module, deploy)
    return model


def first_channels(model: nn.Module, loader, ratio: float) -> nn.Module:
    timm_rep.calibrate_batchnorm(idle_first_channels(model, ratio), loader)
    return fold_first_channels(model)


@torch.no_grad()
def prune(model: nn.Module, loader, ratio: float, refit: bool = False) -> nn.Module:
    """Variance-based pruning: replace the hidden channels of least variance by their mean, one FFN after the other."""
    for ffn in find_ffns(model)[0]:
        count = ffn.pruned_features(active_channels(ffn.hidden_features, ratio))
        seen = []
        hook = ffn.last.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        for images, _ in loader:
            model(images)
        hook.remove()
        features = torch.cat([x.movedim(1, -1).flatten(0, -2) if ffn.use_conv else x.flatten(0, -2) for x in seen])
        features = features.double()
        mean = features.mean(0)
        features -= mean
        kept = features.var(0).argsort(descending=True)[:count].sort().values
        gone = torch.ones_like(mean, dtype=torch.bool)
        gone[kept] = False
        weight, bias = ffn.fc_out()
        bias = bias + weight[:, gone] @ mean[gone]
        second = weight[:, kept]
        if refit:
            gram = features[:, kept].T @ features[:, kept]
            gram += 1e-4 * torch.diag(gram.diagonal())
            change = torch.linalg.solve(gram, features[:, kept].T @ (features[:, gone] @ weight[:, gone].T)).T
            second, bias = second + change, bias - change @ mean[kept]
        pruned, like = ffn.replacement(count, linear_path=False), next(model.parameters())
        ffn.fc_in(kept).write_to(pruned.fc_in, like)
        Affine(second, bias).write_to(pruned.fc_out, like)
        replace_module(model, ffn.module, pruned)
    return model


def _plain_metrics(model: nn.Module, ffns, images, relative: bool) -> Dict[str, torch.Tensor]:
    """Metrics that weigh all channels of an FFN's output alike, and the outputs by their variance if relative."""
    variances = {}
    hooks = [ffn.output_layer.register_forward_hook(lambda _, args, y, ffn=ffn: variances.__setitem__(
        ffn.name, y.transpose(1, -1).flatten(0, -2).var(0).sum() if ffn.use_conv else y.flatten(0, -2).var(0).sum()))
        for ffn in ffns]
    model(images.shares[0].x)
    for hook in hooks:
        hook.remove()
    return {
        ffn.name: torch.full((ffn.out_features,), float(variances[ffn.name]) ** -.5 if relative else 1.).double()
        for ffn in ffns}


@torch.no_grad()
def with_budget(model: nn.Module, loader, ratio: float, rule: str) -> nn.Module:
    """Choose the idle ratios by a rule, at the MACs of one idle ratio for all FFNs."""
    report = linearize_ffns(copy.deepcopy(model), loader, ratio)
    fraction = report.macs[1] / report.macs[0]
    with contextlib.ExitStack() as stack:
        if rule != 'divergence':
            metrics = partial(_plain_metrics, relative=rule == 'relative')
            stack.enter_context(mock.patch.object(budget, 'output_metrics', metrics))
        linearize_ffns(model, loader, macs=fraction)
    return model


METHODS = {
    'closed form': closed_form,
    'first channels': first_channels,
    'VBP': prune,
    'VBP, refitted': lambda *args: prune(*args, refit=True),
    **{f'budget, {rule}': partial(with_budget, rule=rule) for rule in ('divergence', 'absolute', 'relative')},
}
ANNEALED, SCRATCH = 'annealed', 'RePa from scratch'


def accelerate(settings: Mapping[str, Any], workspace: Workspace) -> Dict[str, Any]:
    """Row of a conversion: change of the accuracy, after the distillation if there is one, MACs and speedup.

    Raises:
        ValueError: The method is unknown.
    """
    method, ratio, epochs = settings['method'], settings['idle_ratio'], settings['distil_epochs']
    if method not in (*METHODS, ANNEALED, SCRATCH):
        raise ValueError(f'method must be one of {", ".join([*METHODS, ANNEALED, SCRATCH])}, got {method!r}.')
    base, device = settings['trained'], workspace.device
    model = trained(base, workspace).model.to(memory_format=torch.contiguous_format)
    images = Images(workspace, {**base, 'seed': settings['seed']}, device)
    if method == SCRATCH:
        converted = fold_first_channels(model)
        model = trained(settings['teacher'], workspace).model.to(memory_format=torch.contiguous_format)
    elif method == ANNEALED:
        converted = copy.deepcopy(model)
        timm_rep.convert_to_repa(converted, ratio, anneal_steps=epochs * len(images.training()) // 2)
    else:
        converted = METHODS[method](copy.deepcopy(model), images.calibration(settings['images']), ratio)
    if epochs:
        with workspace.training_folder({**settings, 'model': base['model']}) as folder:
            distil(
                converted, model, images, epochs, settings['distil_lr'], checkpoint=folder / 'distillation.pth',
                resume=True)
    if method == ANNEALED:
        converted.reparameterize()
    original, top1 = (evaluate(net, images.validation(), device)[1] for net in (model, converted))
    size = (3, *[base['img_size']] * 2)
    batch = torch.randn(settings['timed_images'], *size, device=device)
    times = time_passes({'original': model, 'converted': converted}, batch)
    return {
        'MACs': round(count_macs(converted, size).total / count_macs(model, size).total, 3),
        'speedup': speedup(times['converted'], times['original']),
        'top-1 change': round(top1 - original, 2), 'original': round(original, 2)}


@contextlib.contextmanager
def refusing(linear_path: Optional[bool]) -> Iterator[None]:
    """Leave conversions no choice of the form of an FFN: refuse those with a linear path, or those without."""
    losses = LeastSquares.losses

    def allowed(problem, fits):
        return [
            math.inf if fit.linear_path is linear_path else loss for fit, loss in zip(fits, losses(problem, fits))]

    with mock.patch.object(LeastSquares, 'losses', allowed):
        yield


def linear_path(settings: Mapping[str, Any], workspace: Workspace) -> Dict[str, Any]:
    """Row of three conversions at the same MACs: each FFN in the form that is better on held-out images, all in two
    matrices, and all in three; change of the accuracy, and number of FFNs of the first that have a linear path.
    """
    base, ratio = settings['trained'], settings['idle_ratio']
    model = trained(base, workspace).model.to(memory_format=torch.contiguous_format)
    images = Images(workspace, {**base, 'seed': settings['seed']}, workspace.device)
    calibration = images.calibration(settings['images'])
    original = evaluate(model, images.validation(), workspace.device)[1]
    row = {}
    for form, refused in ('better', None), ('two matrices', True), ('three matrices', False):
        converted = copy.deepcopy(model)
        with refusing(refused):
            report = linearize_ffns(converted, calibration, ratio)
        row[form] = round(evaluate(converted, images.validation(), workspace.device)[1] - original, 2)
        if refused is None:
            row.update({
                'FFNs': len(report.ffns), 'with a linear path': sum(ffn.linear_path for ffn in report.ffns),
                'MACs': round(report.macs[1] / report.macs[0], 3)})
    return {**row, 'original': round(original, 2)}
