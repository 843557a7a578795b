"""Interface of the int8 backends."""
from abc import ABC, abstractmethod
from operator import attrgetter
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from .formats import export_program, tracing_batch

__all__ = [
    'PRODUCTS', 'Program', 'QuantizationSettings', 'layers_with_weights', 'module_name', 'operator_name',
    'output_structure', 'restore_structure', 'trace', 'trace_graph',
]

# operators of all convolutions and matrix products
PRODUCTS = (
    'conv1d', 'conv2d', 'conv3d', 'conv_transpose1d', 'conv_transpose2d', 'conv_transpose3d', 'convolution', 'linear',
    'matmul', 'mm', 'addmm', 'bmm', 'baddbmm', 'einsum', 'scaled_dot_product_attention')


class QuantizationSettings(NamedTuple):
    """Rounding of weights and activations.

    Attributes:
        per_channel: One scale for each output channel of a weight, instead of one for the weight.
        calibrator: Key of ``ACTIVATION_OBSERVERS``.
        percentile: Percentage of values covered by the calibrator 'percentile'.
    """
    per_channel: bool
    calibrator: str
    percentile: float


class Program(ABC):
    """A quantized model compiled by a backend; called like the model. Copies share it, as nothing changes it."""

    def __deepcopy__(self, memo: Any) -> 'Program':
        return self

    @abstractmethod
    def __call__(self, images: torch.Tensor) -> Any:
        """Compute the outputs for images (N, channels, height, width), float32, on the CPU."""

    @classmethod
    @abstractmethod
    def quantize(
            cls,
            model: nn.Module,
            batches: Sequence[torch.Tensor],
            settings: QuantizationSettings,
            keep_float: Sequence[str] = (),
    ) -> 'Program':
        """Post-training quantization.

        Args:
            model: Folded model in eval mode on the CPU.
            batches: Calibration batches of images (N, channels, height, width), float32.
            settings: Rounding of weights and activations.
            keep_float: Names of layers that are not quantized.
        """

    @abstractmethod
    def layers(self, images: torch.Tensor) -> Tuple[List[str], Dict[str, str]]:
        """Layers by precision, read from the program compiled for a batch.

        Returns:
            Names of the layers computed in int8, and operators of the other products by name of their module.
        """

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write a file for :meth:`read`, without pickled values, and a second one for weights it cannot hold."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> 'Program':
        """Read what :meth:`write` wrote.

        Raises:
            OSError: The file does not exist.
            RuntimeError: The file cannot be read, or holds pickled values.
        """


@torch.no_grad()
def output_structure(model: nn.Module, images: torch.Tensor) -> str:
    """Structure of the outputs for the first image, as JSON for :func:`restore_structure`; '' for a single tensor."""
    outputs = model(images[:1])
    leaves, structure = tree_flatten(outputs)
    others = {type(x).__name__ for x in leaves if not isinstance(x, torch.Tensor)}
    if others:
        raise TypeError(
            f'Expected a model whose outputs are tensors in lists, tuples and dicts, but got {", ".join(others)}.')
    return '' if isinstance(outputs, torch.Tensor) else treespec_dumps(structure)


def restore_structure(outputs: Any, structure: str) -> Any:
    """Outputs of a runtime, a tensor or a list of tensors, in the structure of :func:`output_structure`."""
    if not structure:
        return outputs
    return tree_unflatten(outputs if isinstance(outputs, list) else [outputs], treespec_loads(structure))


def module_name(node: torch.fx.Node) -> str:
    """Name of the innermost module that a node was traced in, '' outside of modules."""
    return next((path for path, _ in reversed(node.meta.get('nn_module_stack', {}).values())), '')


def operator_name(node: torch.fx.Node) -> str:
    """Name of the operator that a node calls, without its overload; '' for other nodes."""
    return getattr(getattr(node.target, 'overloadpacket', None), '__name__', '') if node.op == 'call_function' else ''


def trace(model: nn.Module, images: torch.Tensor, dynamic_batch: bool = True) -> 'torch.export.ExportedProgram':
    """``torch.export`` in which :func:`module_name` of a product is the module that holds its weight.

    The innermost module would be another one where a block calls ``F.linear`` with the weight of a child, as the
    attention of BEiT does.
    """
    program = export_program(model, tracing_batch(images)) if dynamic_batch else torch.export.export(model, (images,))
    parameters = program.graph_signature.inputs_to_parameters
    for node in program.graph.nodes:
        if operator_name(node) in PRODUCTS:
            name, _, parameter = parameters.get(str(node.args[1]), '').rpartition('.')
            if parameter == 'weight' and name not in ('', module_name(node)):
                layer = name, type(model.get_submodule(name)).__qualname__
                node.meta['nn_module_stack'] = {**node.meta.get('nn_module_stack', {}), name: layer}
    return program


def trace_graph(model: nn.Module, images: torch.Tensor, dynamic_batch: bool = True) -> torch.fx.GraphModule:
    """The graph of :func:`trace`, with separate parameters for each call of a layer, and numbers as padding.

    A layer that is called several times, such as the head of a detector, would stay in float: inductor computes its
    float weight once for all calls. XNNPACK would refuse it. And torchao would fold the BatchNorms after all calls into
    the one weight. And convolutions with padding='same' are another operator, without int8 kernels.
    """
    graph = trace(model, images, dynamic_batch).module()
    for node in graph.graph.nodes:
        if node.target == torch.ops.aten.conv2d.padding:
            _use_numeric_padding(node)
    used: Set[str] = set()
    for node in graph.graph.nodes:
        for x in node.all_input_nodes if operator_name(node) in PRODUCTS else ():
            if x.op == 'get_attr' and x.target in used:
                name = f'{x.target}_{len(used)}'
                module, _, parameter = name.rpartition('.')
                setattr(graph.get_submodule(module), parameter, attrgetter(x.target)(graph))
                with graph.graph.inserting_before(node):
                    own = graph.graph.get_attr(name)
                own.meta = dict(x.meta)
                node.replace_input_with(x, own)
                x = own
            used.add(str(x.target))
    graph.recompile()
    return graph


def _use_numeric_padding(node: torch.fx.Node) -> None:
    """Write the padding 'same' or 'valid' of a convolution in numbers, unless it is larger on one side."""
    given: List[Any] = [*node.args, *(None, [1, 1], 'valid', [1, 1], 1)[len(node.args) - 2:]]
    x, weight, bias, stride, padding, dilation, groups = given
    value = weight.meta.get('val')
    sizes = (attrgetter(weight.target)(node.graph.owning_module) if value is None else value).shape[2:]
    total = [d * (size - 1) if padding == 'same' else 0 for d, size in zip(dilation, sizes)]
    if not any(n % 2 for n in total):
        node.target = torch.ops.aten.conv2d.default
        node.args = (x, weight, bias, stride, [n // 2 for n in total], dilation, groups)


def layers_with_weights(graph: torch.fx.GraphModule) -> Dict[torch.fx.Node, str]:
    """The products of a graph with a factor that does not depend on the input, and the names of their modules."""
    varying: Set[torch.fx.Node] = set()
    found = {}
    for node in graph.graph.nodes:
        if node.op == 'placeholder' or varying.intersection(node.all_input_nodes):
            varying.add(node)
            factors = [x for x in tree_leaves(node.args) if isinstance(x, torch.fx.Node)][:2]
            if operator_name(node) in PRODUCTS and not varying.issuperset(factors):
                found[node] = module_name(node) or node.name
    return found
