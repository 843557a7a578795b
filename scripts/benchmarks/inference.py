"""Import and inference: import, fold-precision, deploy-ffn, repa-infer, converted-infer, prepbn, parts, poolformer."""
import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
import yaml
from timm.layers import use_fused_attn

import timm_rep
from timm_rep.convert import folded_copy
from timm_rep.deploy import onnx_runner
from timm_rep.latency import PARTS, profile_latency
from timm_rep.layers import RePaMlp
from timm_rep.paper import SPEEDUPS, VANILLA
from timm_rep.utils.profiling import count_macs, count_params, model_input_size, throughput, time_passes

from .repa_train import vanilla_ffn
from .timing import milliseconds, speedup, timing_columns

__all__ = [
    'converted_infer', 'deploy_ffn', 'fold_precision', 'import_time', 'in_mode', 'parts', 'poolformer', 'prepbn',
    'repa_infer']


def import_time(args):
    """Seconds that importing timm_rep adds to importing timm, in fresh processes."""
    code = (
        'import time; start = time.perf_counter(); import timm; middle = time.perf_counter(); import timm_rep; '
        'print(middle - start, time.perf_counter() - middle)')
    times = {'timm': [], 'timm_rep': []}
    environment = {**os.environ, 'PYTHONDONTWRITEBYTECODE': ''}  # with bytecode files, as an installed package
    for i in range(args.rounds + 1):
        out = subprocess.run(
            [sys.executable, '-c', code], check=True, capture_output=True, text=True, env=environment).stdout
        if i:  # the first round compiles and fills the disk cache
            for seconds, value in zip(times.values(), out.split()):
                seconds.append(float(value))
    timm_alone, added = (ms / 1e3 for ms in milliseconds(times).values())
    yield {
        'timm (s)': round(timm_alone, 3),
        'timm_rep after it (s)': round(added, 4),
        'ratio': round((timm_alone + added) / timm_alone, 4),
        'spread (%)': timing_columns(times)['spread (%)'],
    }


def calibrated(name: str) -> nn.Module:
    """A model in eval mode with random norm weights and the running statistics of a random batch."""
    torch.manual_seed(0)
    model = timm.create_model(name)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
                norm.weight.normal_(1., 0.5)
                norm.bias.normal_(0., 0.5)
                norm.momentum = 1.
        # with few images, variances of a CNN's last layers are near 0, and every rounding error is amplified
        model.train()(torch.randn(32, *model.pretrained_cfg['input_size']))
        head = model.get_classifier()
        if isinstance(head, nn.Linear) and not head.weight.any():  # in timm's mixers
            nn.init.normal_(head.weight, std=.02)
    return model.eval()


def relative(x: torch.Tensor, reference: torch.Tensor) -> str:
    return f'{((x.float() - reference).abs().max() / reference.abs().max()).item():.1e}'


def fold_precision(args):
    """Largest difference between the logits of a model before and after folding, relative to the largest logit.

    'folded': folded in float32, then cast. 'cast, then folded': cast before folding. 'unfolded': the error of the dtype
    alone. The reference is the unfolded model in float32.
    """
    for row in args.pending(model=args.models or [*SPEEDUPS, 'repopt_vgg_a0', 'repopt_ghostnet_100', 'repopt_any']):
        model = calibrated(row['model'])
        x = torch.randn(2, *model.pretrained_cfg['input_size'])
        folded = folded_copy(model)
        with torch.inference_mode():
            expected = model(x)
            row['float32'] = relative(folded(x), expected)
            for dtype in (torch.bfloat16, torch.float16):
                short = str(dtype).removeprefix('torch.')
                low = copy.deepcopy(model).to(dtype)
                row[f'{short}: folded'] = relative(copy.deepcopy(folded).to(dtype)(x.to(dtype)), expected)
                row[f'{short}: unfolded'] = relative(low(x.to(dtype)), expected)
                row[f'{short}: cast, then folded'] = relative(low.reparameterize()(x.to(dtype)), expected)
        yield row


def deploy_ffn(args):
    """Forms of the folded FFN (eq. 7) with its shortcut: speedup over the vanilla LayerNorm FFN of the same size.

    'one wide GEMM': C + active channels at once, activation on a slice, one addmm. 'two GEMMs, addmm': the same with
    separate matrices. Both have the identity of the shortcut in the matrix of the idle channels. 'three linears': the
    form of RePaMlpDeploy, to which the block adds the shortcut.
    """
    for row in args.pending(C=(192, 384, 768, 1024), tokens=(197, 8 * 197)):
        dim, tokens = row.values()
        torch.manual_seed(0)
        deploy = RePaMlp(dim, 4 * dim).eval().fuse().to(args.device, args.dtype)
        vanilla = vanilla_ffn(dim).eval().to(args.device, args.dtype)
        x = torch.randn(tokens, dim, device=args.device, dtype=args.dtype)
        fc_in, fc_out, shortcut = deploy.fc_in, deploy.fc_out, copy.deepcopy(deploy.fc_idle)
        shortcut.weight.data.diagonal().add_(1.)
        wide_weight = torch.cat([fc_in.weight, shortcut.weight]).detach()
        wide_bias = torch.cat([fc_in.bias, shortcut.bias]).detach()

        def one_gemm(x, dim=dim, weight=wide_weight, bias=wide_bias, fc_out=fc_out):
            h = F.linear(x, weight, bias)
            return torch.addmm(h[:, dim:], F.gelu(h[:, :dim]), fc_out.weight.t())

        def two_gemms(x, fc_in=fc_in, shortcut=shortcut, fc_out=fc_out):
            return torch.addmm(shortcut(x), F.gelu(fc_in(x)), fc_out.weight.t())

        def three_linears(x, deploy=deploy):
            return x + deploy(x)

        for form in (one_gemm, two_gemms):
            torch.testing.assert_close(
                form(x), three_linears(x), rtol=1e-3, atol=1e-4 if args.dtype == torch.float32 else .1)
        forms = {
            'vanilla': vanilla, 'one wide GEMM': one_gemm, 'two GEMMs, addmm': two_gemms,
            'three linears': three_linears}
        times = time_passes(forms, x, rounds=args.rounds)
        yield {
            **row,
            **{k: speedup(v, times['vanilla']) for k, v in times.items() if k != 'vanilla'},
            **timing_columns(times),
        }


def in_mode(models: Dict[str, nn.Module], mode: str) -> Dict[str, Callable]:
    """Models in eager mode, compiled, or in ONNX Runtime on the CPU."""
    if mode == 'eager':
        return models
    if mode == 'compile':
        torch.compiler.reset()  # else models of one class share its limit of recompilations
        return {form: torch.compile(model) for form, model in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        runners = {}
        for form, model in models.items():
            path = Path(folder) / f'{form}.onnx'
            timm_rep.export(model, path, 'onnx')
            runners[form] = onnx_runner(path)
    return runners


def repa_infer(args):
    """Inference throughput in images per second: vanilla timm backbones and their RePa forms, folded and not.

    'TIMM_FUSED_ATTN=2': with this environment variable, which makes timm's Swin use torch's fused attention.
    """
    suffix = ', TIMM_FUSED_ATTN=2' if use_fused_attn(experimental=True) else ''
    for name in args.models or SPEEDUPS:
        rows = list(args.pending(model=[name], mode=[f'{mode}{suffix}' for mode in args.modes]))
        if not rows:
            continue
        vanilla, vanilla_args = VANILLA[name]
        models = {
            'vanilla': timm.create_model(vanilla, **vanilla_args).eval(),
            'unfolded': timm.create_model(name).eval(),
        }
        models['folded'] = folded_copy(models['unfolded'])
        models = {k: m.to(args.device, args.dtype) for k, m in models.items()}
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        for row in rows:
            times = time_passes(in_mode(models, row['mode'].partition(',')[0]), x, rounds=args.rounds, warmup=2)
            yield {
                **row,
                **{k: round(v, 2) for k, v in throughput(len(x), times).items()},
                'folded / vanilla': speedup(times['folded'], times['vanilla']),
                'paper': round(1 + SPEEDUPS[name], 2) if name in SPEEDUPS else None,
                'folded / unfolded': speedup(times['folded'], times['unfolded']),
                'spread (%)': timing_columns(times)['spread (%)'],
            }


def _converted(name: str) -> Dict[str, Any]:
    """Arguments of create_model for a model to convert; 'fasternet_cifar10' is the model of ``accelerate.yaml``."""
    if name != 'fasternet_cifar10':
        return dict(model_name=name)
    experiment = yaml.safe_load((Path(__file__).parents[1] / 'experiments' / 'accelerate.yaml').read_text())
    training = experiment['trainings']['fasternet']
    return dict(
        training['model_args'], model_name=training['model'], num_classes=10,
        pretrained_cfg_overlay=dict(input_size=(3, 32, 32)))


def converted_infer(args):
    """Inference of converted models, ``repa_any``: speedup over timm's model, by idle ratio, batch size and mode.

    'images': batch size. 'mode': eager, compile, or onnx for ONNX Runtime on the CPU. 'MACs': multiply-accumulates of
    timm's model divided by the converted model's.
    """
    names = args.models or [
        'fasternet_cifar10', 'deit3_base_patch16_224', 'swin_tiny_patch4_window7_224', 'convnext_tiny',
        'eva02_small_patch14_224']
    for row in args.pending(
            model=names, images=[args.batch_size] if args.batch_size else (1, 8), mode=args.modes):
        kwargs = _converted(row['model'])
        base = kwargs.pop('model_name')
        models = {'timm': timm.create_model(base, **kwargs)} | {
            str(ratio): timm.create_model('repa_any', base=base, idle_ratio=ratio, **kwargs)
            for ratio in (0.25, 0.5, 0.75, 0.9, 1.)}
        size = model_input_size(models['timm'])
        macs = {form: count_macs(model, size).total for form, model in models.items()}
        models = {form: model.eval().to(args.device, args.dtype) for form, model in models.items()}
        x = torch.randn(row['images'], *size, device=args.device, dtype=args.dtype)
        times = time_passes(in_mode(models, row['mode']), x, rounds=args.rounds)
        yield {
            **row,
            'timm (img/s)': round(throughput(row['images'], times)['timm'], 2),
            **{form: speedup(seconds, times['timm']) for form, seconds in times.items() if form != 'timm'},
            'MACs': {form: round(macs['timm'] / n, 2) for form, n in macs.items() if form != 'timm'},
            **timing_columns(times),
        }


def prepbn(args):
    """Table 3 of the RePaFormer paper: images per second and parameters against PRepBN (SLAB), which folds every norm.

    'PRepBN': the vanilla backbone after training, its re-parameterized BatchNorms folded into the following linear
    layers. 'RePa': folded, at idle ratios of 25% and 75%.
    """
    names = args.models or ['repa_deit_tiny', 'repa_deit_small', 'repa_deit_base', 'repa_swin_tiny']
    for row in args.pending(model=names):
        vanilla, vanilla_args = VANILLA[row['model']]
        models = {name: timm.create_model(vanilla, **vanilla_args).eval() for name in ('vanilla', 'PRepBN')}
        for name, layer in list(models['PRepBN'].named_modules()):
            if isinstance(layer, nn.LayerNorm):
                models['PRepBN'].set_submodule(name, nn.Identity())
        for ratio in (.25, .75):
            models[f'RePa, {ratio:.0%}'] = timm.create_model(
                row['model'], idle_ratio=ratio, reparameterized=True).eval()
        params = {f'{k} (M)': round(count_params(m) / 1e6, 1) for k, m in models.items()}
        models = {k: m.to(args.device, args.dtype) for k, m in models.items()}
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        times = time_passes(models, x, rounds=args.rounds, warmup=2)
        yield {
            **row,
            **params,
            **{k: round(v, 2) for k, v in throughput(len(x), times).items()},
            **{f'{k} / vanilla': speedup(times[k], times['vanilla']) for k in models if k != 'vanilla'},
            'spread (%)': timing_columns(times)['spread (%)'],
        }


def parts(args):
    """Inference by part, vanilla and folded (figure 3 of the paper): milliseconds.

    'arithmetic': multiply-accumulates of the vanilla model divided by the folded one's, the largest speedup without
    activations and norms.
    """
    for row in args.pending(model=args.models or SPEEDUPS):
        vanilla, vanilla_args = VANILLA[row['model']]
        models = {
            'vanilla': timm.create_model(vanilla, **vanilla_args).eval(),
            'folded': timm.create_model(row['model']).eval().reparameterize(),
        }
        macs = {k: count_macs(m).total for k, m in models.items()}
        models = {k: m.to(args.device, args.dtype) for k, m in models.items()}
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        ms = profile_latency(models, x, rounds=args.rounds, warmup=2)
        whole = {k: sum(by_part.values()) for k, by_part in ms.items()}
        yield {
            **row,
            **{f'{part}, {k}': float(f'{ms[k][part]:.3g}') for part in PARTS for k in models},
            'FFNs': round(ms['vanilla']['FFNs'] / ms['folded']['FFNs'], 2),
            'whole': round(whole['vanilla'] / whole['folded'], 2),
            'arithmetic': round(macs['vanilla'] / macs['folded'], 2),
        }


def poolformer(args):
    """PoolFormers with folded FFNs: speedup over timm's PoolFormer.

    'FFNs, pooling of torch': with nn.AvgPool2d as in the vanilla model, which isolates folding.
    """
    def blocks(model):
        return [block for stage in model.stages for block in stage.blocks]

    formats = {'contiguous': torch.contiguous_format, 'channels-last': torch.channels_last}
    names = args.models or ['repa_poolformer_s12', 'repa_poolformer_s36']
    for row in args.pending(model=names, pool_size=(3, 7), memory=formats):
        name, pool_size, memory = row.values()
        torch.manual_seed(0)
        vanilla, _ = VANILLA[name]
        ffns = timm.create_model(name, pool_size=pool_size).eval().reparameterize()
        torch_pooling = copy.deepcopy(ffns)
        for block in blocks(torch_pooling):
            block.token_mixer.pool = nn.AvgPool2d(pool_size, 1, pool_size // 2, count_include_pad=False)
        models = {
            'vanilla': timm.create_model(vanilla, pool_size=pool_size).eval(),
            'FFNs': ffns,
            'FFNs, pooling of torch': torch_pooling,
        }
        models = {k: m.to(args.device, args.dtype, memory_format=formats[memory]) for k, m in models.items()}
        x = torch.randn(args.batch_size, 3, 224, 224, device=args.device, dtype=args.dtype)
        times = time_passes(models, x.contiguous(memory_format=formats[memory]), rounds=args.rounds, warmup=2)
        yield {
            **row,
            'vanilla (img/s)': round(throughput(len(x), times)['vanilla'], 2),
            **{k: speedup(v, times['vanilla']) for k, v in times.items() if k != 'vanilla'},
            **timing_columns(times),
        }
