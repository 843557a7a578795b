"""Exported models: onnx."""
import tempfile
from pathlib import Path

import timm
import torch

import timm_rep
from timm_rep.convert import folded_copy
from timm_rep.deploy import onnx_runner
from timm_rep.utils.profiling import model_input_size, throughput, time_passes

from .timing import speedup, timing_columns

__all__ = ['onnx']

_MODELS = ('repa_deit_small', 'repa_swin_tiny', 'repa_poolformer_s12', 'repopt_vgg_a0', 'repopt_vgg_b1')


def onnx(args):
    """Folded models in ONNX Runtime and in eager mode, on the CPU in float32: images per second.

    'images': batch size. Both use as many threads.
    """
    import onnxruntime  # an extra

    if args.device.type != 'cpu' or args.dtype != torch.float32:
        raise SystemExit('onnx is measured with --device cpu --dtype float32')
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
