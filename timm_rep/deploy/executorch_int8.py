"""Int8 backend 'executorch': XNNPACK's quantizer. Imported only with its packages installed."""
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from executorch.runtime import Runtime
from torch.utils._pytree import tree_map
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from .observers import ACTIVATION_OBSERVERS
from .program import Program, QuantizationSettings, module_name, output_structure, restore_structure, trace_graph
from .runtimes import load_executorch, lower_to_executorch

# shortcuts stay in float, since their rounding errors accumulate from block to block
_LAYERS = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)


class ExecuTorchProgram(Program):
    """An ExecuTorch program for XNNPACK, which takes one image at a time."""

    def __init__(self, buffer: bytes, layers: Optional[Tuple[List[str], Dict[str, str]]] = None):
        self.buffer, self._layers = buffer, layers or ([], {})
        self._run = load_executorch(buffer)
        self._structure, = Runtime.get().load_program(buffer).load_method('structure').execute([])

    def __call__(self, images: torch.Tensor) -> Any:
        outputs = [restore_structure(self._run(image), self._structure) for image in images.detach().split(1)]
        return tree_map(lambda *parts: torch.cat(parts), *outputs)

    @classmethod
    def quantize(
            cls,
            model: nn.Module,
            batches: Sequence[torch.Tensor],
            settings: QuantizationSettings,
            keep_float: Sequence[str] = (),
    ) -> 'ExecuTorchProgram':
        example = (batches[0][:1],)
        structure = output_structure(model, *example)
        config = get_symmetric_quantization_config(is_per_channel=settings.per_channel)
        activation = replace(
            config.input_activation,
            observer_or_fake_quant_ctr=ACTIVATION_OBSERVERS[settings.calibrator].with_args(
                percentile=settings.percentile))
        # XNNPACK's own observers have an eps of 2 ** -12, which is too large a scale for small weights
        weight = replace(
            config.weight,
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver if settings.per_channel else MinMaxObserver)
        config = replace(config, input_activation=activation, output_activation=activation, weight=weight)
        quantizer = XNNPACKQuantizer().set_filter_function(lambda node: module_name(node) not in keep_float)
        for layer in _LAYERS:
            quantizer.set_operator_type(layer, config)
        with torch.no_grad():
            prepared = prepare_pt2e(trace_graph(model, *example, dynamic_batch=False), quantizer)
            for image in torch.cat(list(batches)).split(1):
                prepared(image)
        graph = convert_pt2e(prepared)
        int8: Dict[str, str] = {}
        other: Dict[str, str] = {}
        for node in graph.graph.nodes:
            if node.target in _LAYERS:
                is_int8 = all('dequantize' in str(x.target) for x in node.args[:2])
                (int8 if is_int8 else other)[module_name(node) or node.name] = node.target.overloadpacket.__name__
        lowered = lower_to_executorch(torch.export.export(graph, example), structure=structure)
        layers = [name for name in int8 if name not in other], other
        return cls(bytes(lowered.to_executorch().buffer), layers)

    def layers(self, images: torch.Tensor) -> Tuple[List[str], Dict[str, str]]:
        return self._layers

    def write(self, path: Path) -> None:
        path.write_bytes(self.buffer)

    @classmethod
    def read(cls, path: Path) -> 'ExecuTorchProgram':
        buffer = path.read_bytes()
        try:
            return cls(buffer)
        except Exception as e:  # ExecuTorch raises RuntimeErrors without the file
            raise RuntimeError(
                f'Expected an ExecuTorch program, but reading {str(path)!r} failed: {type(e).__name__}: {e}') from e
