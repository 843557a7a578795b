"""Exported and quantized models: onnx, int8."""
import copy
import importlib.metadata
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


def int8(args):
    """Folded models in int8 and in float32, on the CPU: images per second.

    'images': batch size. 'compiled': ``torch.compile``; 'frozen': with weights as constants, as for int8. Speedups are
    over 'compiled'.
    """
    from torch._inductor import config  # brings the compiler

    _check_cpu('int8', args)
    for name in args.models or _INT8_MODELS:
        for row in args.pending(model=[name], images=[args.batch_size] if args.batch_size else [1, 8]):
            torch.manual_seed(0)
            model = timm.create_model(name).eval()
            x = torch.randn(row['images'], *model_input_size(model))
            folded = folded_copy(model)
            compiled = {mode: torch.compile(copy.deepcopy(folded), dynamic=False) for mode in ('compiled', 'frozen')}

            def frozen(x, model=compiled['frozen']):
                with torch.inference_mode(False), torch.no_grad(), config.patch(freezing=True):
                    return model(x)

            quantized = {f'int8, {backend}': quantize_ptq(model, [x], backend) for backend in BACKENDS}
            sides = {'eager': folded, **compiled, 'frozen': frozen, **quantized}
            times = time_passes(sides, x, rounds=args.rounds)
            yield {
                **row,
                **{side: round(rate, 2) for side, rate in throughput(len(x), times).items()},
                **{f'{side}: speedup': speedup(times[side], times['compiled']) for side in ('frozen', *quantized)},
                'layers in int8': {side: len(model.report.int8_layers) for side, model in quantized.items()},
                'spread (%)': timing_columns(times)['spread (%)'],
                **{package: importlib.metadata.version(package) for package in ('torchao', 'onnxruntime')},
            }
