"""Formats of other runtimes: OpenVINO and ExecuTorch, which are imported when they are used."""
from pathlib import Path
from typing import Any, Callable, Tuple

import torch
import torch.nn as nn

__all__ = [
    'Runner', 'compile_openvino', 'load_executorch', 'load_openvino', 'save_openvino', 'to_openvino',
    'write_executorch',
]

Runner = Callable[[torch.Tensor], Any]


def to_openvino(program: 'torch.export.ExportedProgram', images: torch.Tensor) -> Any:
    """OpenVINO model of an exported program, with a dynamic batch size. A single output is named 'output'.

    Args:
        program: Program of :func:`timm_rep.deploy.formats.export_program`.
        images: Images (N, channels, height, width) of the program's size.
    """
    import openvino

    converted = openvino.convert_model(program, input=[openvino.PartialShape([-1, *images.shape[1:]])])
    converted.inputs[0].get_tensor().set_names({'input'})
    if len(converted.outputs) == 1:
        converted.outputs[0].get_tensor().set_names({'output'})
    return converted


def compile_openvino(model: Any) -> Tuple[Runner, Any]:
    """A function from images (N, channels, height, width) to the outputs, run by OpenVINO with torch's threads.

    Computes in float32 what is not quantized; OpenVINO's default on CPUs with AMX is bfloat16.

    Args:
        model: OpenVINO model, or path of its XML file.

    Returns:
        The function, which returns the output, or a list of several, and OpenVINO's compiled model.
    """
    import openvino

    compiled = openvino.Core().compile_model(
        model, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32', 'INFERENCE_NUM_THREADS': torch.get_num_threads()})

    def run(images: torch.Tensor) -> Any:
        outputs = [torch.from_numpy(y.copy()) for y in compiled(images.detach().numpy()).to_tuple()]
        return outputs[0] if len(outputs) == 1 else outputs

    return run, compiled


def save_openvino(model: Any, path: Path) -> None:
    """Write an OpenVINO model as an XML file, and its weights in float32 as a file of the same name, .bin."""
    import openvino

    openvino.save_model(model, path, compress_to_fp16=False)


def load_openvino(folder: Path) -> Runner:
    """The model of a folder as a function from images to outputs."""
    return compile_openvino(folder / 'model.xml')[0]


def write_executorch(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    """Write an ExecuTorch program for XNNPACK, for batches of as many images as given."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(model, (images,))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    path.write_bytes(lowered.to_executorch().buffer)


def load_executorch(path: Path) -> Runner:
    """A program as a function from images to the output, or to a list of several."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path.read_bytes())
    method = program.load_method('forward')

    def run(images: torch.Tensor, program=program) -> Any:  # the method refers to memory of the program
        outputs = [y.clone() for y in method.execute([images.contiguous()])]
        return outputs[0] if len(outputs) == 1 else outputs

    return run
