"""Int8 backend 'openvino': NNCF. Imported only with its packages installed."""
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import nncf
import openvino
import torch
import torch.nn as nn
from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix, QuantizationParameters
from nncf.quantization.range_estimator import (
    AggregatorType,
    RangeEstimatorParameters,
    RangeEstimatorParametersSet,
    StatisticsCollectorParameters,
    StatisticsType,
)
from torchao.quantization.pt2e.utils import _fuse_conv_bn_

from .formats import export_program, tracing_batch
from .program import (
    PRODUCTS,
    Program,
    QuantizationSettings,
    module_name,
    operator_name,
    output_structure,
    restore_structure,
    trace_graph,
)
from .runtimes import compile_openvino, save_openvino, to_openvino

# elementwise products and sums, LayerNorms (MVN) and means, whose inputs hold the shortcuts: their rounding errors
# accumulate from block to block; not GroupNormalization, for which OpenVINO 2026.4 then computes the same outputs for
# all images
_FLOAT_TYPES = ['Add', 'Multiply', 'Subtract', 'Divide', 'MVN', 'AvgPool', 'ReduceMean']
_KERNELS = ('Convolution', 'Deconvolution', 'FullyConnected', 'MatMul')  # of convolutions and matrix products
_ATTENTION = 'ScaledDotProductAttention'  # fused with others into a kernel 'Subgraph'
_STRUCTURE = 'timm_rep_outputs'  # key for the structure of several outputs
_NAMES = 'timm_rep_layers'  # key for the names of modules, by name of the operation


class OpenVinoProgram(Program):
    """An OpenVINO model quantized by NNCF, run with torch's number of threads."""

    def __init__(self, model: openvino.Model):
        self.model = model
        self._run, self._compiled = compile_openvino(model)
        self._structure = str(model.get_rt_info([_STRUCTURE]).astype(str))

    def __call__(self, images: torch.Tensor) -> Any:
        return restore_structure(self._run(images), self._structure)

    @classmethod
    def quantize(
            cls,
            model: nn.Module,
            batches: Sequence[torch.Tensor],
            settings: QuantizationSettings,
            keep_float: Sequence[str] = (),
    ) -> 'OpenVinoProgram':
        structure = output_structure(model, batches[0])
        graph = trace_graph(model, batches[0])
        _fuse_conv_bn_(graph)  # OpenVINO fuses them too, but into convolutions without names
        program = export_program(graph, tracing_batch(batches[0]))
        names = _module_names(graph, program)
        converted = to_openvino(program, batches[0])
        modules = {x.get_friendly_name(): _module(x, names) for x in converted.get_ordered_ops()}
        missing = {*keep_float}.difference(modules.values())
        if missing:
            raise RuntimeError(f'The OpenVINO model has no operation of {", ".join(sorted(missing))}.')
        kept = [name for name, module in modules.items() if module in keep_float]
        nncf.set_log_level(logging.ERROR)  # else it lists all ignored operations
        quantized = nncf.quantize(
            converted,
            nncf.Dataset([image.numpy() for batch in batches for image in batch.split(1)]),
            preset=nncf.QuantizationPreset.MIXED,  # asymmetric activations, as the other backends
            subset_size=sum(map(len, batches)),
            ignored_scope=nncf.IgnoredScope(
                names=[*kept, *_products_of_activations(converted)], types=_FLOAT_TYPES, validate=False),
            advanced_parameters=AdvancedQuantizationParameters(
                overflow_fix=OverflowFix.DISABLE if torch.cpu._is_vnni_supported() else OverflowFix.ENABLE,
                weights_quantization_params=QuantizationParameters(per_channel=settings.per_channel),
                activations_range_estimator_params=_ranges(settings.calibrator, settings.percentile)))
        quantized.set_rt_info(structure, _STRUCTURE)
        quantized.set_rt_info(names, _NAMES)
        return cls(quantized)

    def layers(self, images: torch.Tensor) -> Tuple[List[str], Dict[str, str]]:
        names = {key: str(value.astype(str)) for key, value in self.model.get_rt_info([_NAMES]).astype(dict).items()}
        int8, other = [], {}
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            info = {key: str(value.astype(str)) for key, value in node.get_rt_info().items()}
            operations = re.split('[,/]', info['originalLayersNames'])
            operator = info.get('layerType')
            if operator not in _KERNELS:
                if _ATTENTION not in operations:
                    continue
                operator = _ATTENTION
            module = next((names[x] for x in operations if x in names), node.get_friendly_name())
            if info['runtimePrecision'] in ('i8', 'u8'):
                int8.append(module)
            else:
                other[module] = operator
        return list(dict.fromkeys(name for name in int8 if name not in other)), other

    def write(self, path: Path) -> None:
        save_openvino(self.model, path)

    @classmethod
    def read(cls, path: Path) -> 'OpenVinoProgram':
        try:
            return cls(openvino.Core().read_model(path))
        except Exception as e:  # OpenVINO raises its own types
            raise RuntimeError(
                f'Expected an OpenVINO model, but reading {str(path)!r} failed: {type(e).__name__}: {e}') from e


def _module_names(graph: torch.fx.GraphModule, program: 'torch.export.ExportedProgram') -> Dict[str, str]:
    """Names of modules in a graph by names of the operations of the same program, exported again, in OpenVINO."""
    names: Dict[str, str] = {}
    decomposed: Counter[str] = Counter()
    products = ([node for node in x.graph.nodes if operator_name(node) in PRODUCTS] for x in (graph, program))
    for node, exported in zip(*products, strict=True):
        name, operator = exported.name, operator_name(node)
        if operator.startswith('conv') or operator in ('bmm', 'matmul', 'einsum'):  # OpenVINO decomposes these
            kind = 'convolution' if operator.startswith('conv') else 'bmm'
            name = f'{kind}_{decomposed[kind]}' if decomposed[kind] else kind
            decomposed[kind] += 1
        names[name] = module_name(node) or node.name
    return names


def _module(node: openvino.Node, names: Mapping[str, str]) -> str:
    return names.get(node.get_friendly_name().split('/')[0], '')


def _products_of_activations(model: openvino.Model) -> List[str]:
    """Names of products such as attention's, which stay in float: quantized, they cost most of the accuracy."""
    return [
        node.get_friendly_name() for node in model.get_ordered_ops()
        if node.get_type_name() == _ATTENTION or (node.get_type_name() == 'MatMul' and not any(
            x.get_source_output().get_node().get_type_name() == 'Constant' for x in node.inputs()))]


def _ranges(calibrator: str, percentile: float) -> RangeEstimatorParameters:
    if calibrator == 'minmax':
        return RangeEstimatorParametersSet.MINMAX
    outliers = (1 - percentile / 100) / 2
    return RangeEstimatorParameters(*(
        StatisticsCollectorParameters(StatisticsType.QUANTILE, AggregatorType.MEAN, quantile_outlier_prob=p)
        for p in (outliers, outliers)))
