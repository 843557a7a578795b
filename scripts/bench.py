#!/usr/bin/env python3
"""Measure this package, section by section.

Each section prints a table and writes scripts/results/<machine>/<section>.json with the machine, the versions and the
command. The sides of a comparison take turns in one process; medians count. Spread: half of what lies between the
quartiles, in percent of the median.
"""
import argparse
import copy
import os
import statistics
import subprocess
import sys

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from _bench_optim import bench_optim
from _bench_repopt import bench_repopt_parts, bench_repopt_train
from _bench_scaling import bench_scaling
from _bench_train import VanillaFfn, bench_ffn_train, bench_repa_train
from _report import measured, print_table, save
from _timing import milliseconds, speedup, spreads
from timm.layers import use_fused_attn
from timm.utils import reparameterize_model

import timm_rep  # noqa: F401, registers the models
from timm_rep.latency import PARTS, profile_latency
from timm_rep.layers import RePaMlp
from timm_rep.paper import SPEEDUPS, VANILLA
from timm_rep.utils.profiling import count_macs, throughput, time_passes


def calibrated(name: str, seed: int = 0, **kwargs) -> nn.Module:
    """A RePa model with norm weights and running statistics that no initialization has, in eval mode."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs)
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]
    with torch.no_grad():
        for norm in norms:
            norm.weight.normal_(1., 0.5)
            norm.bias.normal_(0., 0.5)
            norm.momentum = 1.
        model.train()(torch.randn(4, *model.pretrained_cfg['input_size']))
    return model.eval()


def relative(x: torch.Tensor, reference: torch.Tensor) -> str:
    return f'{((x.float() - reference).abs().max() / reference.abs().max()).item():.1e}'


def bench_import(args):
    """What importing timm_rep adds to importing timm, in fresh processes."""
    code = (
        'import time; start = time.perf_counter(); import timm; middle = time.perf_counter(); import timm_rep; '
        'print(middle - start, time.perf_counter() - middle)')
    times = {'timm': [], 'timm_rep': []}
    environment = {**os.environ, 'PYTHONDONTWRITEBYTECODE': ''}  # compiled already, as an installed package is
    for i in range(args.rounds + 1):
        out = subprocess.run(
            [sys.executable, '-c', code], check=True, capture_output=True, text=True, env=environment).stdout
        if i:  # the first round compiles, and warms the disk cache
            for seconds, value in zip(times.values(), out.split()):
                seconds.append(float(value))
    timm_alone, added = (statistics.median(seconds) for seconds in times.values())
    yield {
        'timm (s)': round(timm_alone, 3),
        'timm_rep after it (s)': round(added, 4),
        'ratio': round((timm_alone + added) / timm_alone, 4),
        'spread (%)': spreads(times),
    }


def bench_fold_precision(args):
    """Largest difference between the logits of a RePa model before and after folding, relative to the largest logit.

    'folded': the float32 weights folded, then cast. 'cast, then folded': the weights cast before folding.
    'unfolded': what the dtype alone costs. The last three against the unfolded model in float32.
    """
    for name in args.models or SPEEDUPS:
        if args.measured(model=name):
            continue
        model = calibrated(name)
        x = torch.randn(2, *model.pretrained_cfg['input_size'])
        folded = reparameterize_model(model)
        with torch.inference_mode():
            expected = model(x)

            row = {'model': name, 'float32': relative(folded(x), expected)}
            for dtype in (torch.bfloat16, torch.float16):
                short = str(dtype).removeprefix('torch.')
                low = copy.deepcopy(model).to(dtype)
                row[f'{short}: folded'] = relative(copy.deepcopy(folded).to(dtype)(x.to(dtype)), expected)
                row[f'{short}: unfolded'] = relative(low(x.to(dtype)), expected)
                row[f'{short}: cast, then folded'] = relative(low.reparameterize()(x.to(dtype)), expected)
        yield row


def bench_deploy_ffn(args):
    """Forms of the folded FFN (eq. 7), as speed against the vanilla LayerNorm FFN of its size.

    'one wide GEMM': C + active channels at once, activation on a slice, one addmm. 'two GEMMs, addmm': the same with
    separate matrices. 'three linears': what RePaMlpDeploy does.
    """
    for dim, tokens in ((192, 8 * 197), (384, 8 * 197), (768, 197), (768, 8 * 197), (1024, 8 * 197)):
        if args.measured(C=dim, tokens=tokens):
            continue
        torch.manual_seed(0)
        deploy = RePaMlp(dim, 4 * dim).eval().fuse().to(args.device, args.dtype)
        vanilla = VanillaFfn(dim).eval().to(args.device, args.dtype)
        x = torch.randn(tokens, dim, device=args.device, dtype=args.dtype)
        fc_in, fc_out, shortcut = deploy.fc_in, deploy.fc_out, deploy.shortcut
        wide_weight = torch.cat([fc_in.weight, shortcut.weight]).detach()
        wide_bias = torch.cat([fc_in.bias, shortcut.bias]).detach()

        def one_gemm(x, dim=dim, weight=wide_weight, bias=wide_bias, fc_out=fc_out):
            h = F.linear(x, weight, bias)
            return torch.addmm(h[:, dim:], F.gelu(h[:, :dim]), fc_out.weight.t())

        def two_gemms(x, fc_in=fc_in, shortcut=shortcut, fc_out=fc_out):
            return torch.addmm(shortcut(x), F.gelu(fc_in(x)), fc_out.weight.t())

        for form in (one_gemm, two_gemms):
            torch.testing.assert_close(form(x), deploy(x), rtol=1e-3, atol=1e-4 if args.dtype == torch.float32 else .1)
        times = time_passes({
            'vanilla': vanilla,
            'one wide GEMM': one_gemm,
            'two GEMMs, addmm': two_gemms,
            'three linears': deploy,
        }, x, rounds=args.rounds)
        yield {
            'C': dim,
            'tokens': tokens,
            **{k: speedup(v, times['vanilla']) for k, v in times.items() if k != 'vanilla'},
            'ms': milliseconds(times),
            'spread (%)': spreads(times),
        }


def bench_repa_infer(args):
    """Inference throughput of vanilla timm backbones and of their RePa forms, folded or not; images per second.

    'TIMM_FUSED_ATTN=2': with this environment variable, as timm says that its Swin is to use torch's fused attention.
    """
    also = ', TIMM_FUSED_ATTN=2' if use_fused_attn(experimental=True) else ''
    for name in args.models or SPEEDUPS:
        modes = {f'{mode}{also}': mode for mode in args.modes if not args.measured(model=name, mode=f'{mode}{also}')}
        if not modes:
            continue
        vanilla, vanilla_args = VANILLA[name]
        models = {
            'vanilla': timm.create_model(vanilla, **vanilla_args).eval(),
            'unfolded': timm.create_model(name).eval(),
        }
        models['folded'] = reparameterize_model(models['unfolded'])
        models = {k: m.to(args.device, args.dtype) for k, m in models.items()}
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        for label, mode in modes.items():
            sides = models
            if mode == 'compile':
                torch.compiler.reset()  # or models of one class count as one that is compiled again and again
                sides = {k: torch.compile(m) for k, m in models.items()}
            times = time_passes(sides, x, rounds=args.rounds, warmup=2)
            yield {
                'model': name,
                'mode': label,
                **{k: round(v, 2) for k, v in throughput(len(x), times).items()},
                'folded / vanilla': speedup(times['folded'], times['vanilla']),
                'paper': round(1 + SPEEDUPS[name], 2) if name in SPEEDUPS else None,
                'folded / unfolded': speedup(times['folded'], times['unfolded']),
                'spread (%)': spreads(times),
            }


def bench_parts(args):
    """Where the time of a pass goes, vanilla and folded (figure 3 of the paper): milliseconds by part.

    'arithmetic': how many times the folded model's multiply-accumulates the vanilla one has, which bounds what folding
    is worth but for activations and norms.
    """
    for name in args.models or SPEEDUPS:
        if args.measured(model=name):
            continue
        vanilla, vanilla_args = VANILLA[name]
        models = {
            'vanilla': timm.create_model(vanilla, **vanilla_args).eval(),
            'folded': timm.create_model(name).eval().reparameterize(),
        }
        macs = {k: count_macs(m).total for k, m in models.items()}
        models = {k: m.to(args.device, args.dtype) for k, m in models.items()}
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        ms = profile_latency(models, x, rounds=args.rounds, warmup=2)
        whole = {k: sum(parts.values()) for k, parts in ms.items()}
        yield {
            'model': name,
            **{f'{part}, {k}': float(f'{ms[k][part]:.3g}') for part in PARTS for k in models},
            'FFNs': round(ms['vanilla']['FFNs'] / ms['folded']['FFNs'], 2),
            'whole': round(whole['vanilla'] / whole['folded'], 2),
            'arithmetic': round(macs['vanilla'] / macs['folded'], 2),
        }


def bench_poolformer(args):
    """PoolFormers with their FFNs folded, and with their token mixers folded too; as throughput over timm's PoolFormer.

    'FFNs, pooling of torch': with nn.AvgPool2d as the vanilla model has it, which is all that is not folding. 'mixers,
    training form': BatchNorm token mixers as trained, beside folded FFNs.
    """
    for name in args.models or ['repa_poolformer_s12', 'repa_poolformer_s36']:
        for pool_size in (3, 7):
            if args.measured(model=name, pool_size=pool_size):
                continue
            torch.manual_seed(0)
            vanilla, _ = VANILLA[name]
            mixing = timm.create_model(name, fold_token_mixer=True, pool_size=pool_size).eval()
            ffns_only = copy.deepcopy(mixing)
            for stage in ffns_only.stages:
                for block in stage.blocks:
                    block.mlp = block.mlp.fuse()
            models = {
                'vanilla': timm.create_model(vanilla, pool_size=pool_size).eval(),
                'FFNs': timm.create_model(name, pool_size=pool_size).eval().reparameterize(),
            }
            models['FFNs, pooling of torch'] = copy.deepcopy(models['FFNs'])
            for stage in models['FFNs, pooling of torch'].stages:
                for block in stage.blocks:
                    block.token_mixer.pool = nn.AvgPool2d(pool_size, 1, pool_size // 2, count_include_pad=False)
            models |= {
                'mixers, training form': ffns_only,
                'FFNs and mixers': mixing.reparameterize(),
            }
            x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
            for form in (torch.contiguous_format, torch.channels_last):
                models = {k: m.to(args.device, args.dtype, memory_format=form) for k, m in models.items()}
                times = time_passes(models, x.contiguous(memory_format=form), rounds=args.rounds, warmup=2)
                yield {
                    'model': name,
                    'pool_size': pool_size,
                    'memory': 'channels-last' if form is torch.channels_last else 'contiguous',
                    'vanilla (img/s)': round(throughput(len(x), times)['vanilla'], 2),
                    **{k: speedup(v, times['vanilla']) for k, v in times.items() if k != 'vanilla'},
                    'ms': milliseconds(times),
                    'spread (%)': spreads(times),
                }


# columns that name a row
NAMES = ('model', 'mode', 'img_size', 'pool_size', 'memory', 'optimizer', 'form', 'C', 'tokens', 'cost', 'along')
SECTIONS = {
    'import': bench_import,
    'fold-precision': bench_fold_precision,
    'deploy-ffn': bench_deploy_ffn,
    'repa-infer': bench_repa_infer,
    'parts': bench_parts,
    'poolformer': bench_poolformer,
    'repa-train': bench_repa_train,
    'ffn-train': bench_ffn_train,
    'repopt-train': bench_repopt_train,
    'repopt-parts': bench_repopt_parts,
    'optim': bench_optim,
    'scaling': bench_scaling,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='\n'.join(f'{k}: {v.__doc__.splitlines()[0]}' for k, v in SECTIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sections', nargs='+', choices=SECTIONS)
    parser.add_argument('--models', nargs='*', help='only these models')
    parser.add_argument('--device', default='cpu', type=torch.device)
    parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16', 'float16'])
    parser.add_argument(
        '--amp', action=argparse.BooleanOptionalAction, default=False, help='of training, autocast to bfloat16')
    parser.add_argument(
        '--modes', nargs='+', default=['eager'], choices=['eager', 'compile'], help='of repa-infer (eager)')
    parser.add_argument('--batch-size', default=8, type=int)
    parser.add_argument('--rounds', default=11, type=int)
    parser.add_argument(
        '--resume', action='store_true', help='leave out what the file has already, of the same versions and settings')
    args = parser.parse_args()
    dtype, args.dtype = args.dtype, getattr(torch, args.dtype)
    if args.device == torch.device('cuda'):
        args.device = torch.device('cuda', torch.cuda.current_device())
    settings = dict(
        device=args.device.type, dtype=dtype, batch_size=args.batch_size, rounds=args.rounds,
        amp='bfloat16' if args.amp else None)
    if args.device.type == 'cuda':  # as timm's train.py has it
        torch.set_float32_matmul_precision('high')
        torch.backends.cudnn.benchmark = True
        settings.update(float32='TF32', cudnn=torch.backends.cudnn.version(), cuda=torch.version.cuda)
    for section in args.sections:
        before = measured(section, args.device, settings) if args.resume else []
        args.measured = lambda before=before, **names: any(names.items() <= row.items() for row in before)
        rows, path = [], None
        for row in SECTIONS[section](args):
            rows.append(row)
            print(row, flush=True)
            path = save(  # row by row: what is measured lasts, wherever the run ends
                section, SECTIONS[section].__doc__, rows, args.device, settings, [k for k in NAMES if k in row])
        if rows:
            print_table(rows)
        print(f'\n{section}: {path or "nothing is left to measure"}')


if __name__ == '__main__':
    main()
