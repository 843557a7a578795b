"""Int8 backend 'inductor': torchao's export-based quantization. Imported only with torchao installed."""
import copy
import json
import re
import warnings
import zipfile
from operator import attrgetter
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torchao.quantization.pt2e import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
from torchao.quantization.pt2e.utils import _fuse_conv_bn_

from .formats import export_program, save_program
from .observers import ACTIVATION_OBSERVERS, PerTensorWeightObserver
from .program import PRODUCTS, Program, QuantizationSettings, module_name, operator_name, trace_graph

aten = torch.ops.aten
# layers with int8 kernels in inductor; those of conv1d have outputs of a wrong size
_LAYERS = (aten.conv2d.default, aten.linear.default)

# names of tensors in an archive of torch.export.save; objects of other names are unpickled
_TENSORS = re.compile(r'(weight|tensor)_\d+')


class _LayerQuantizer(X86InductorQuantizer):
    """Quantizes inputs and weights of all convolutions and linear layers.

    torchao's X86InductorQuantizer finds layers by the exact class of the module, so it misses timm's subclasses of
    nn.Conv2d and nn.Linear; and it quantizes shortcuts, whose rounding errors accumulate from block to block.
    """

    def __init__(self, activation: QuantizationSpec, weight: QuantizationSpec, keep_float: Sequence[str]):
        super().__init__()
        self.activation, self.weight, self.keep_float = activation, weight, {*keep_float}

    def transform_for_annotation(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        # inductor has no int8 kernel for linear layers with transposed inputs, as in an MLP-Mixer
        contiguous: Dict[torch.fx.Node, torch.fx.Node] = {}
        for node in list(model.graph.nodes):
            if node.target == aten.linear.default:
                x = node.args[0]
                if x not in contiguous:
                    with model.graph.inserting_after(x):
                        contiguous[x] = model.graph.call_function(aten.contiguous.default, (x,))
                    contiguous[x].meta = {**node.meta, 'val': x.meta['val'].contiguous()}
                node.replace_input_with(x, contiguous[x])
            elif node.target == aten.conv2d.default and node.args[0].meta['val'].shape[1] == 1:
                _repeat_channel(model, node)
        model.recompile()
        return model

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in model.graph.nodes:
            is_layer = node.target in _LAYERS and node.args[1].op == 'get_attr'
            if is_layer and module_name(node) not in self.keep_float:
                node.meta['quantization_annotation'] = QuantizationAnnotation(
                    input_qspec_map={node.args[0]: self.activation, node.args[1]: self.weight}, _annotated=True)
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        pass


def _repeat_channel(model: torch.fx.GraphModule, layer: torch.fx.Node) -> None:
    """Give a convolution of one channel a second one, a copy with weights of 0.

    The strides of one channel are ambiguous, and inductor's kernels refuse them when the batch size varies.
    """
    x, weight = layer.args[:2]
    value = attrgetter(weight.target)(model)
    module, _, parameter = weight.target.rpartition('.')
    setattr(model.get_submodule(module), parameter, nn.Parameter(torch.cat([value, torch.zeros_like(value)], 1)))
    weight.meta['val'] = torch.cat([weight.meta['val']] * 2, 1)
    with model.graph.inserting_before(layer):
        twice = model.graph.call_function(aten.cat.default, ([x, x], 1))
    twice.meta = {**layer.meta, 'val': torch.cat([x.meta['val']] * 2, 1)}
    layer.replace_input_with(x, twice)


def _quantizer(activation: Any, weight: Any, keep_float: Sequence[str] = ()) -> _LayerQuantizer:
    # Without VNNI, kernels add pairs of products in 16 bits, which saturate with 8-bit inputs but not with 7 bits
    # (torchao's reduce_range). Its default eps, 2 ** -12, would be the smallest scale, too large for small weights.
    return _LayerQuantizer(
        QuantizationSpec(
            dtype=torch.uint8, quant_min=0, quant_max=255 if torch.cpu._is_vnni_supported() else 127,
            qscheme=torch.per_tensor_affine, observer_or_fake_quant_ctr=activation),
        QuantizationSpec(
            dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_channel_symmetric, ch_axis=0,
            observer_or_fake_quant_ctr=weight),
        keep_float)


class _Kernels(CustomGraphPass):
    """Collects the weight scales of the int8 kernels from the graph that inductor generates code for."""

    def __init__(self) -> None:
        self.scales: List[torch.Tensor] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            name = getattr(node.target, '__name__', '')
            if node.op == 'call_function' and name.startswith(('qconv', 'qlinear')) and 'prepack' not in name:
                tensors = [getattr(graph.owning_module, x.target) for x in node.all_input_nodes if x.op == 'get_attr']
                self.scales += [x.flatten() for x in tensors if not x.is_mkldnn and x.dtype == torch.float32]

    def uuid(self) -> None:
        return None  # do not take the code from a cache, without a call of this pass


class InductorProgram(Program):
    """An exported model with int8 layers, compiled by inductor for the first batch size, then for any."""

    def __init__(self, graph: torch.fx.GraphModule, input_size: Sequence[int]):
        self.graph, self.input_size = graph, tuple(input_size)
        self._compiled = torch.compile(graph)

    def __call__(self, images: torch.Tensor) -> Any:
        # a fixed mode, because torch compiles for each; weights are constants only without gradients
        with torch.inference_mode(False), torch.no_grad(), inductor_config.patch(freezing=True):
            return self._compiled(images.clone() if images.is_inference() else images)

    @classmethod
    @torch.no_grad()
    def quantize(
            cls,
            model: nn.Module,
            batches: Sequence[torch.Tensor],
            settings: QuantizationSettings,
            keep_float: Sequence[str] = (),
    ) -> 'InductorProgram':
        prepared = prepare_pt2e(trace_graph(model, batches[0]), _quantizer(
            ACTIVATION_OBSERVERS[settings.calibrator].with_args(percentile=settings.percentile),
            PerChannelMinMaxObserver if settings.per_channel else PerTensorWeightObserver,
            keep_float))
        for images in batches:
            prepared(images)
        return cls(convert_pt2e(prepared), batches[0].shape[1:])

    def layers(self, images: torch.Tensor) -> Tuple[List[str], Dict[str, str]]:
        kernels = _Kernels()
        self._compiled = torch.compile(copy.deepcopy(self.graph))  # a graph that was called is not compiled again
        with inductor_config.patch(post_grad_custom_post_pass=kernels):
            self(images)
        int8, other = [], {}
        for node in self.graph.graph.nodes:
            operator = operator_name(node)
            if operator not in PRODUCTS:
                continue
            name = module_name(node) or node.name
            if node.target in _LAYERS and _take(kernels.scales, _weight_scale(self.graph, node)):
                int8.append(name)
            else:
                other[name] = operator
        return list(dict.fromkeys(name for name in int8 if name not in other)), other

    def write(self, path: Path) -> None:
        program = export_program(self.graph, torch.zeros(2, *self.input_size, dtype=torch.float32))
        program.example_inputs = None  # torch pickles them
        save_program(program, path)

    @classmethod
    def read(cls, path: Path) -> 'InductorProgram':
        _check_archive(path)
        try:
            program = torch.export.load(path)
            graph = program.module()
        except Exception as e:  # many types for damaged files
            raise RuntimeError(
                f'Expected an exported program, but reading {str(path)!r} failed: {type(e).__name__}: {e}') from e
        if not torch.cpu._is_vnni_supported() and _input_levels(graph) > 127:
            warnings.warn(
                f'{str(path)!r} was quantized on a CPU with VNNI. Its 8-bit inputs saturate on this CPU: quantize the '
                'model here.', stacklevel=3)
        images = next(node for node in graph.graph.nodes if node.op == 'placeholder')
        return cls(graph, images.meta['val'].shape[1:])


def _input_levels(graph: torch.fx.GraphModule) -> int:
    """Largest integer of the quantized activations."""
    return max((node.args[4] for node in graph.graph.nodes if '.quantize_per_tensor' in str(node.target)), default=0)


def _weight_scale(graph: torch.fx.GraphModule, layer: torch.fx.Node) -> Optional[torch.Tensor]:
    weight = layer.args[1]
    if 'dequantize_per_channel' not in str(weight.target):
        return None
    return attrgetter(weight.args[1].target)(graph).flatten()


def _take(scales: List[torch.Tensor], scale: Optional[torch.Tensor]) -> bool:
    """Remove the first equal tensor from a list; whether one was found."""
    for i, other in enumerate(scales):
        if scale is not None and torch.equal(other, scale):
            del scales[i]
            return True
    return False


def _check_archive(path: Path) -> None:
    """Raise RuntimeError if ``torch.export.load`` would unpickle something in an archive, or load machine code."""
    refusal = f'{str(path)!r} must be a quantized program of this package'
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            roots, names = zip(*(entry.filename.split('/', 1) for entry in entries))
            if len({*roots}) > 1 or len({*names}) < len(names):
                raise RuntimeError(f'{refusal}, but has several folders, or several entries of the same name.')
            for name, entry in zip(names, entries):
                if name.startswith('data/aotinductor/'):
                    raise RuntimeError(f'{refusal}, but {name!r} is machine code.')
                if name.endswith(('.pt', '.pkl')) and entry.file_size:
                    raise RuntimeError(f'{refusal}, but {name!r} is pickled.')
                if name.endswith('_config.json'):
                    for value in json.loads(archive.read(entry))['config'].values():
                        if value['use_pickle'] is not False or not _TENSORS.fullmatch(value['path_name']):
                            raise RuntimeError(f'{refusal}, but {value["path_name"]!r} is pickled.')
    except (zipfile.BadZipFile, AttributeError, LookupError, TypeError, ValueError) as e:
        raise RuntimeError(f'{refusal}: {type(e).__name__}: {e}') from e


def prepare_training(model: nn.Module, images: torch.Tensor) -> torch.fx.GraphModule:
    """Graph of a folded model for quantization-aware training, with inputs and weights rounded to int8 values.

    Computes the model in eval mode: without dropout, and with the running statistics of BatchNorms.
    """
    graph = trace_graph(model, images)
    _fuse_conv_bn_(graph)  # as in prepare_pt2e; prepare_qat_pt2e would use batch statistics
    # torchao's default, FusedMovingAvgObsFakeQuantize, rounds with a different scale than the converted graph
    prepared = prepare_qat_pt2e(graph, _quantizer(
        FakeQuantize.with_args(observer=MovingAverageMinMaxObserver),
        FakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver, averaging_constant=1.)))
    # torchao's switch to train mode would set every dropout rate to 0.5, and eps and momentum of BatchNorms to its own
    prepared.train = lambda mode=True: prepared
    prepared.eval = lambda: prepared
    return prepared


def finish_training(prepared: torch.fx.GraphModule, input_size: Sequence[int]) -> InductorProgram:
    """Quantized model of a trained graph of :func:`prepare_training`."""
    return InductorProgram(convert_pt2e(prepared), input_size)
