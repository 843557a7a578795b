"""Int8 backend 'onnxruntime': static quantization. Imported only with its packages installed."""
import ast
import itertools
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence, Set, Tuple

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn as nn
from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType, TensorData, TensorsData

from .formats import onnx_runner, tracing_batch, write_onnx
from .observers import create_observer
from .program import Program, QuantizationSettings, output_structure, restore_structure

# operators with int8 kernels, and activations that are absorbed into the quantization of a convolution's output,
# whose range always holds 0
_OPERATORS = ('Conv', 'Gemm', 'MatMul')
_ACTIVATIONS = ('Relu', 'Clip')
_CALIBRATION_BATCH = 8  # all activations of a batch are in memory at once
_SCOPES = 'pkg.torch.onnx.name_scopes'  # torch's key for the modules around a node, from the outermost
_STRUCTURE = 'timm_rep.outputs'  # key for the structure of several outputs


class OnnxProgram(Program):
    """An ONNX file in QDQ format, run with torch's number of threads."""

    def __init__(self, folder: 'tempfile.TemporaryDirectory[str]'):
        self.folder = folder  # holds model.onnx, removed with the program
        self.path = Path(folder.name) / 'model.onnx'
        self._run = onnx_runner(self.path)
        properties = {x.key: x.value for x in onnx.load(self.path, load_external_data=False).metadata_props}
        self._structure = properties.get(_STRUCTURE, '')

    def __call__(self, images: torch.Tensor) -> Any:
        return restore_structure(self._run(images.detach()), self._structure)

    @classmethod
    def quantize(
            cls,
            model: nn.Module,
            batches: Sequence[torch.Tensor],
            settings: QuantizationSettings,
            keep_float: Sequence[str] = (),
    ) -> 'OnnxProgram':
        structure = output_structure(model, batches[0])
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name) / 'model.onnx'
        write_onnx(model, tracing_batch(batches[0]), path)
        exported = onnx.load(path)
        graph = exported.graph
        _name_layers(graph, model)
        _unshare(graph)
        weights = {x.name for x in graph.initializer}
        # products of activations, as in attention, stay in float: quantized, they cost most of the accuracy
        layers = [
            node for node in graph.node
            if node.op_type in _OPERATORS and node.input[1] in weights
            and _module(node, node.input[1]) not in keep_float]
        # ONNX Runtime replaces these activations by the range of their output, so nothing else may read their input
        uses = Counter([*(name for node in graph.node for name in node.input), *(x.name for x in graph.output)])
        following = {name for node in layers for name in node.output if uses[name] == 1}
        activations = [
            node for node in graph.node
            if node.op_type in _ACTIVATIONS and node.input[0] in following and _keeps_zero(node, graph)]
        tensors = dict.fromkeys(
            name for node in (*layers, *activations) for name in (node.input[0], node.output[0]))
        # torchao's calibrators, because ONNX Runtime's 'entropy' covers all values with its default settings
        ranges = _ranges(
            exported, list(tensors), batches,
            lambda: create_observer(settings.calibrator, settings.percentile))
        quantizer = QDQQuantizer(
            exported,
            per_channel=settings.per_channel,
            reduce_range=False,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, ranges),
            # an empty list would stand for all nodes
            nodes_to_quantize=[node.name for node in (*layers, *activations)] or [''],
            nodes_to_exclude=[],
            op_types_to_quantize=[*_OPERATORS, *_ACTIVATIONS],
            extra_options={'OpTypesToExcludeOutputQuantization': ['Gemm', 'MatMul']},
        )
        quantizer.quantize_model()
        _keep_float_inputs(quantizer.model.model.graph, {node.name for node in layers}, {
            name for node in (*layers, *activations) for name in node.output})
        if structure:
            onnx.helper.set_model_props(quantizer.model.model, {_STRUCTURE: structure})
        external = (path.parent / f'{path.name}.data').exists()
        for file in path.parent.iterdir():
            file.unlink()
        quantizer.model.save_model_to_file(str(path), external)
        return cls(folder)

    def layers(self, images: torch.Tensor) -> Tuple[List[str], Dict[str, str]]:
        with tempfile.TemporaryDirectory() as folder:
            optimized = Path(folder) / 'optimized.onnx'
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3  # do not warn that the optimized file is for this machine
            options.optimized_model_filepath = str(optimized)
            onnxruntime.InferenceSession(str(self.path), options, providers=['CPUExecutionProvider'])
            nodes = onnx.load(optimized, load_external_data=False).graph.node
        # int8 kernels take the integer weight as input; fused nodes lose their names
        used = {name: node.op_type for node in nodes for name in node.input if node.op_type.startswith(
            ('QLinear', 'QGemm', 'MatMulInteger', 'ConvInteger'))}
        int8, other = [], {}
        model = onnx.load(self.path, load_external_data=False)
        weights = {x.name for x in model.graph.initializer}
        integers = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == 'DequantizeLinear'}
        for node in model.graph.node:
            if node.op_type not in (*_OPERATORS, 'ConvTranspose', 'Einsum'):
                continue
            weight = integers.get(node.input[1], '')
            if weight in used and weight in weights:
                int8.append(_module(node, weight))
            else:
                other[_module(node, weight or node.input[1])] = node.op_type
        return list(dict.fromkeys(name for name in int8 if name not in other)), other

    def write(self, path: Path) -> None:
        for file in self.path.parent.iterdir():
            shutil.copyfile(file, path.with_name(file.name))

    @classmethod
    def read(cls, path: Path) -> 'OnnxProgram':
        folder = tempfile.TemporaryDirectory()
        for file in (path, *path.parent.glob(f'{path.name}.data')):
            shutil.copyfile(file, Path(folder.name) / file.name)
        try:
            return cls(folder)
        except Exception as e:  # ONNX Runtime raises its own types
            raise RuntimeError(
                f'Expected an ONNX file, but reading {str(path)!r} failed: {type(e).__name__}: {e}') from e


def _name_layers(graph: onnx.GraphProto, model: nn.Module) -> None:
    """Name the layer that holds a weight where a block around it computes the product, as :func:`.program.trace`."""
    weights = {x.name: x for x in graph.initializer}
    blocks = dict(model.named_modules())
    for node in graph.node:
        block = blocks.get(_module(node))
        if node.op_type not in _OPERATORS or node.input[1] not in weights or block is None or hasattr(block, 'weight'):
            continue
        value = torch.from_numpy(onnx.numpy_helper.to_array(weights[node.input[1]]).copy())
        for name, parameter in block.named_parameters(_module(node)):
            if name.endswith('.weight') and any(torch.equal(parameter, x) for x in (value, value.T)):
                scopes = next(x for x in node.metadata_props if x.key == _SCOPES)
                *modules, own = ast.literal_eval(scopes.value)
                scopes.value = str([*modules, name[:-len('.weight')], own])
                break


def _unshare(graph: onnx.GraphProto) -> None:
    """Give each use of a layer separate weights: ONNX Runtime cannot load weights that are quantized and shared."""
    initializers = {x.name: x for x in graph.initializer}
    used: Set[str] = set()
    for node in graph.node:
        for i, name in enumerate(node.input if node.op_type in _OPERATORS else ()):
            if name in used:
                graph.initializer.add().CopyFrom(initializers[name])
                node.input[i] = graph.initializer[-1].name = f'{name}_{len(graph.initializer)}'
            elif name in initializers:
                used.add(name)


def _keep_float_inputs(graph: onnx.GraphProto, quantized: Set[str], outputs: Set[str]) -> None:
    """Reconnect all unquantized nodes to the float tensors: ONNX Runtime rounds a quantized input for all consumers.

    A shortcut next to a layer would be rounded in each block. Tensors that the int8 kernels write stay rounded.

    Args:
        graph: The quantized graph.
        quantized: Names of the quantized nodes.
        outputs: Names of tensors that int8 kernels write.
    """
    rounded = {node.output[0]: node.input[0] for node in graph.node if node.op_type == 'QuantizeLinear'}
    originals = {
        node.output[0]: rounded[node.input[0]] for node in graph.node
        if node.op_type == 'DequantizeLinear' and node.input[0] in rounded}
    for node in graph.node:
        if node.name in quantized or node.op_type in ('QuantizeLinear', 'DequantizeLinear'):
            continue
        for i, name in enumerate(node.input):
            if name in originals and originals[name] not in outputs:
                node.input[i] = originals[name]


def _keeps_zero(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    """Whether an activation maps 0 to 0; not, or not for certain, if 0 is outside of the bounds of a Clip."""
    constants = {x.name: x for x in graph.initializer if x.name in node.input}
    return all(
        not name or (name in constants and sign * onnx.numpy_helper.to_array(constants[name]) >= 0)
        for name, sign in zip(node.input[1:], (-1, 1)))


def _ranges(
        exported: onnx.ModelProto,
        tensors: List[str],
        batches: Iterable[torch.Tensor],
        observer: Any,
) -> Dict[str, TensorData]:
    """Ranges of tensors of a graph, chosen by one observer each."""
    model = onnx.ModelProto()
    model.CopyFrom(exported)
    present = {x.name for x in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(x) for x in tensors if x not in present)
    inputs = {x.name for x in model.graph.input}
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder) / 'model.onnx', save_as_external_data=model.ByteSize() > 1 << 30)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # keeps every tensor
        session = onnxruntime.InferenceSession(
            str(Path(folder) / 'model.onnx'), options, providers=['CPUExecutionProvider'])
        observers = {name: observer() for name in tensors}
        computed = [name for name in tensors if name not in inputs]
        for images in itertools.chain.from_iterable(batch.split(_CALIBRATION_BATCH) for batch in batches):
            values = session.run(computed, {name: images.numpy() for name in inputs})
            for name, value in zip(computed, values):
                observers[name](torch.from_numpy(value))
            for name in inputs.intersection(tensors):
                observers[name](images)
    ranges = {}
    for name, x in observers.items():
        scale, zero = (value.item() for value in x.calculate_qparams())
        low, high = -zero * scale, (255 - zero) * scale
        ranges[name] = TensorData(lowest=np.float32(low), highest=np.float32(high))
    return ranges


def _module(node: onnx.NodeProto, weight: str = '') -> str:
    """Name of the module of a node, else of the node; where a BatchNorm was folded, only the weight has a name."""
    module, found, _ = weight.rpartition('.weight')
    if found:
        return module
    scopes = next((x.value for x in node.metadata_props if x.key == _SCOPES), '[]')
    *modules, _ = ast.literal_eval(scopes) or ['']
    return next((name for name in reversed(modules) if name), node.name)
