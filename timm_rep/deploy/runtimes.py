"""Formats of other runtimes: OpenVINO and ExecuTorch, which are imported when they are used."""
from pathlib import Path
from typing import Any, Callable, Tuple

import torch

Runner = Callable[[torch.Tensor], Any]


def to_openvino(program: 'torch.export.ExportedProgram', images: torch.Tensor) -> Any:
    """OpenVINO model of a program of ``export_program``, for images of the given size; names input and output."""
    import openvino

    converted = openvino.convert_model(program, input=[openvino.PartialShape([-1, *images.shape[1:]])])
    converted.inputs[0].get_tensor().set_names({'input'})
    if len(converted.outputs) == 1:
        converted.outputs[0].get_tensor().set_names({'output'})
    return converted


def compile_openvino(model: Any) -> Tuple[Runner, Any]:
    """A function from images (N, channels, height, width) to the outputs, run by OpenVINO with torch's threads.

    Computes in float32 what is not quantized; OpenVINO's default on CPUs with AMX is bfloat16. The function returns the
    output, or a list of several. ``model`` is OpenVINO's, or a path; the second result is its compiled form.
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


def lower_to_executorch(program: 'torch.export.ExportedProgram', **constants: Any) -> Any:
    """ExecuTorch's edge program for XNNPACK, with constants that its methods of these names return."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=constants or None)


def load_executorch(buffer: bytes) -> Runner:
    """An ExecuTorch program as a function from images to the output, or to a list of several."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(buffer)
    method = program.load_method('forward')

    def run(images: torch.Tensor, program: Any = program) -> Any:  # the method refers to memory of the program
        outputs = [y.clone() for y in method.execute([images.contiguous()])]
        return outputs[0] if len(outputs) == 1 else outputs

    return run
