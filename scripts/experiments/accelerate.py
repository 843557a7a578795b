#!/usr/bin/env python3
"""Accuracy of a pretrained model after converting its FFNs, without training and after a short distillation.

``closed form``: ``convert_to_repa`` with calibration images. At the same multiply-accumulates: ``first channels``, the
first channels of each FFN stay active and the others lose their activation, with recalibrated BatchNorms; ``VBP``,
variance-based pruning of hidden channels with a mean shift; ``VBP, refitted``, the same with the second layer fitted by
least squares. If named, ``budget, ...``: the closed form with an idle ratio for each FFN, minimizing a sum over the
FFNs of the lost variance (``absolute``), its share of the output's variance (``relative``), or the lost variance times
the divergence of the logits that a unit of it causes where the FFN alone is converted (``divergence``, the rule of
``macs=``). Only with distillation: ``annealed``, over the first half of the steps; ``RePa from scratch``, first
channels with new weights. Idle ratios are those of ``closed form``; MACs are relative to the original model.

    python scripts/experiments/accelerate.py --data-dir CIFAR10 --checkpoint fasternet.pth.tar
"""
import argparse
import copy
import math
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import timm
import torch
import torch.nn as nn
import yaml

import timm_rep
from timm_rep.convert import find_pointwise_ffns, linearize, linearize_ffns, replace_module
from timm_rep.layers import Affine, ChannelIdle
from timm_rep.utils.checkpoints import load_checkpoint
from timm_rep.utils.data import Images
from timm_rep.utils.profiling import count_macs
from timm_rep.utils.training import distil, evaluate

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_table, rows_measured, save

SECTION = 'accelerate'
KEYS = ('method', 'idle_ratio', 'epochs', 'lr', 'seed')


def closed_form(model: nn.Module, loader, ratio: float) -> nn.Module:
    linearize_ffns(model, loader, ratio)
    return model


def idle_first_channels(model: nn.Module, ratio: float) -> nn.Module:
    """Remove the activation of all but the first channels, behind the BatchNorm of the hidden channels."""
    for ffn in find_pointwise_ffns(model)[0]:
        act = ffn.module.get_submodule(ffn.act_name)
        ffn.module.set_submodule(
            ffn.act_name, ChannelIdle(ffn.hidden_features, ratio, lambda act=act: act, dim=1 if ffn.use_conv else -1))
    return model


@torch.no_grad()
def fold_first_channels(model: nn.Module) -> nn.Module:
    for ffn in find_pointwise_ffns(model)[0]:
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
    """Variance-based pruning: the hidden channels of least variance are replaced by their mean, FFN after FFN."""
    for ffn in find_pointwise_ffns(model)[0]:
        # as many channels more as the matrix of the idle channels of a RePa FFN costs
        matrix = ffn.in_features * ffn.out_features // (ffn.in_features + ffn.out_features)
        count = min(ffn.hidden_features, math.ceil(ffn.hidden_features * (1 - ratio)) + matrix)
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
        gone = torch.ones(len(mean), dtype=torch.bool)
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


@torch.no_grad()
def with_budget(model: nn.Module, loader, ratio: float, rule: str) -> nn.Module:
    """Idle ratios by a rule, for the multiply-accumulates of one idle ratio for all FFNs."""
    report = linearize_ffns(copy.deepcopy(model), loader, ratio)
    rules = {
        'divergence': linearize._budget_weight,
        'absolute': lambda *args: 1.,
        'relative': lambda recorder, ffn, problem, *args: 1 / problem.output_variance(),
    }
    with mock.patch.object(linearize, '_budget_weight', rules[rule]):
        linearize_ffns(model, loader, macs=report.macs[1] / report.macs[0])
    return model


METHODS = {
    'closed form': closed_form,
    'first channels': first_channels,
    'VBP': prune,
    'VBP, refitted': lambda *args: prune(*args, refit=True),
}
BUDGETS = {
    f'budget, {rule}': partial(with_budget, rule=rule) for rule in ('divergence', 'absolute', 'relative')}
ANNEALED, SCRATCH = 'annealed', 'RePa from scratch'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--recipe', default=Path(__file__).with_name('fasternet_cifar10.yaml'), type=Path)
    parser.add_argument('--checkpoint', required=True, help='checkpoint of a training with the recipe')
    parser.add_argument('--data-dir', required=True)
    parser.add_argument('--methods', nargs='+', choices=[*METHODS, *BUDGETS, ANNEALED, SCRATCH], default=[*METHODS])
    parser.add_argument('--ratios', nargs='+', type=float, default=[0.25, 0.5, 0.75, 0.9, 1.])
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1, 2])
    parser.add_argument('--epochs', type=int, default=0, help='epochs of distillation')
    parser.add_argument('--images', type=int, default=512)
    parser.add_argument('--lr', type=float, default=1e-4, help='learning rate of the distillation (%(default)s)')
    args = parser.parse_args()
    recipe = yaml.safe_load(args.recipe.read_text())

    def create() -> nn.Module:
        kwargs = dict(recipe['model_kwargs'], num_classes=recipe['num_classes'], drop_path_rate=recipe['drop_path'])
        return timm.create_model(recipe['model'], **kwargs).eval()

    model = create()
    load_checkpoint(model, args.checkpoint)
    config = {name: recipe[name] for name in ('mean', 'std', 'interpolation', 'crop_pct')}
    size = recipe['input_size'][-1]
    device = torch.device('cpu')

    def images(seed: int) -> Images:
        return Images(
            model, args.data_dir, val_split=recipe['val_split'], batch_size=128, seed=seed, img_size=size, **config)

    validation = list(images(0).validation())
    original = evaluate(model, validation, device)[1]
    settings = dict(
        model=recipe['model'], epochs_trained=recipe['epochs'], accuracy=round(original, 2), images=args.images)
    rows = rows_measured(SECTION, device, settings)
    done = {tuple(row[key] for key in KEYS) for row in rows}
    lr = args.lr if args.epochs else None
    gmacs = count_macs(model, (3, size, size)).total
    for seed in args.seeds:
        for ratio in args.ratios:
            for method in args.methods:
                if (method, ratio, args.epochs, lr, seed) in done:
                    continue
                if method == SCRATCH:
                    torch.manual_seed(seed)
                    converted = idle_first_channels(create(), ratio)
                elif method == ANNEALED:
                    converted, steps = copy.deepcopy(model), args.epochs * len(images(seed).training())
                    timm_rep.convert_to_repa(converted, ratio, anneal_steps=steps // 2)
                else:
                    loader = list(images(seed).calibration(args.images))
                    converted = {**METHODS, **BUDGETS}[method](copy.deepcopy(model), loader, ratio)
                if args.epochs:
                    distil(converted, model, images(seed), args.epochs, args.lr)
                if method == SCRATCH:
                    fold_first_channels(converted)
                elif method == ANNEALED:
                    converted.reparameterize()
                rows.append({
                    'method': method, 'idle_ratio': ratio, 'epochs': args.epochs, 'lr': lr, 'seed': seed,
                    'MACs': round(count_macs(converted, (3, size, size)).total / gmacs, 3),
                    'top-1 change': round(evaluate(converted, validation, device)[1] - original, 2),
                })
                save(SECTION, __doc__.strip(), rows[-1:], device, settings, KEYS)
                print_table(rows[-1:])


if __name__ == '__main__':
    main()
