"""Exported and quantized models: onnx, int8."""
import copy
import importlib.metadata
import importlib.util
import tempfile
from pathlib import Path

import timm
import torch

import timm_rep
from timm_rep.convert import folded_copy
from timm_rep.deploy import BACKENDS, onnx_runner, quantize_ptq
from timm_rep.utils.profiling import model_input_size, throughput, time_passes

from .timing import speedup, timing_columns

__all__ = ['int8', 'onnx']

_MODELS = ('repa_deit_small', 'repa_swin_tiny', 'repa_poolformer_s12', 'repopt_vgg_a0', 'repopt_vgg_b1')
_INT8_MODELS = ('repopt_vgg_a0', 'repopt_vgg_b1', 'repa_deit_base')


def _check_cpu(section, args):
    if args.device.type != 'cpu' or args.dtype != torch.float32:
        raise SystemExit(f'{section} is measured with --device cpu --dtype float32')


def onnx(args):
    """Folded models in ONNX Runtime and in eager mode, on the CPU in float32: images per second.

    'images': batch size. Both use as many threads.
    """
    import onnxruntime  # an extra

    _check_cpu('onnx', args)
    for name in args.models or _MODELS:
        rows = list(args.pending(model=[name], images=[args.batch_size] if args.batch_size else [1, 8]))
        if not rows:
            continue
        model = timm.create_model(name).eval()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / 'model.onnx'
            timm_rep.export(model, path, 'onnx')
            sides = {'eager': folded_copy(model), 'ONNX Runtime': onnx_runner(path)}
        for row in rows:
            x = torch.randn(row['images'], *model_input_size(model))
            times = time_passes(sides, x, rounds=args.rounds)
            yield {
                **row,
                **{side: round(rate, 2) for side, rate in throughput(len(x), times).items()},
                'ONNX Runtime / eager': speedup(times['ONNX Runtime'], times['eager']),
                'spread (%)': timing_columns(times)['spread (%)'],
                'onnxruntime': onnxruntime.__version__,
            }


def _compiled(model, dtype=torch.float32, freeze=False):
    from torch._inductor import config  # brings the compiler

    # options too: torch shares compiled code among models of a class whose options are equal, whatever the config
    model = torch.compile(copy.deepcopy(model).to(dtype), dynamic=False, options={'freezing': freeze})

    def call(x):
        with torch.inference_mode(False), torch.no_grad(), config.patch(freezing=freeze):
            return model(x.to(dtype))

    return call


def int8(args):
    """Folded models in int8 and in floating point, on the CPU: images per second.

    'images': batch size. 'compiled': ``torch.compile``; 'frozen': with weights as constants, as for int8; 'bfloat16':
    frozen, where the CPU has instructions for it. Backends of int8: those whose packages are installed. Speedups are
    over the fastest side in floating point.
    """
    _check_cpu('int8', args)
    backends = [name for name, entry in BACKENDS.items() if all(map(importlib.util.find_spec, entry.packages))]
    for name in args.models or _INT8_MODELS:
        for row in args.pending(model=[name], images=[args.batch_size] if args.batch_size else [1, 8]):
            torch.manual_seed(0)
            model = timm.create_model(name).eval()
            x = torch.randn(row['images'], *model_input_size(model))
            folded = folded_copy(model)
            baselines = {'eager': folded, 'compiled': _compiled(folded), 'frozen': _compiled(folded, freeze=True)}
            if torch.cpu._is_avx512_bf16_supported():
                baselines['bfloat16'] = _compiled(folded, torch.bfloat16, freeze=True)
            quantized = {f'int8, {backend}': quantize_ptq(model, [x], backend) for backend in backends}
            times = time_passes({**baselines, **quantized}, x, rounds=args.rounds)
            rates = throughput(len(x), times)
            fastest = max(baselines, key=rates.get)
            yield {
                **row,
                **{side: round(rate, 2) for side, rate in rates.items()},
                'fastest float': fastest,
                **{f'{side}: speedup': speedup(times[side], times[fastest]) for side in quantized},
                'layers in int8': {side: len(model.report.int8_layers) for side, model in quantized.items()},
                'spread (%)': timing_columns(times)['spread (%)'],
                **{
                    package: importlib.metadata.version(package)
                    for backend in backends for package in BACKENDS[backend].packages},
            }
