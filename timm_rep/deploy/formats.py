"""The formats that a model is exported to: how a file is written, and how it is run."""
import importlib.util
import os
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Tuple

import timm
import torch
import torch.nn as nn
from timm.models import save_for_hf

from timm_rep.utils.checkpoints import contiguous_copy

__all__ = ['FORMATS', 'Format', 'check_format', 'export_program', 'onnx_runner', 'tracing_batch', 'write_onnx']

# largest file that protobuf reads, less what the graph takes
_MAX_ONNX_WEIGHTS = (2 << 30) - (16 << 20)

Runner = Callable[[torch.Tensor], Any]


def _dynamic_batch() -> Tuple[Dict[int, Any]]:
    return {0: torch.export.Dim('batch')},


def tracing_batch(images: torch.Tensor) -> torch.Tensor:
    """A batch to trace a model with: at least two images, since torch.export takes a size of 1 for a constant."""
    return torch.cat([images, images])[:max(2, len(images))]


def export_program(model: nn.Module, images: torch.Tensor) -> 'torch.export.ExportedProgram':
    """``torch.export`` of a model for any batch size.

    Args:
        model: Model in eval mode, on the CPU.
        images: As for :func:`write_onnx`.
    """
    return torch.export.export(model, (images,), dynamic_shapes=_dynamic_batch())


def write_onnx(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    """Write a model as an ONNX file, of any batch size, with ``torch.onnx.export(dynamo=True)``.

    The input is named 'input', an output that is one tensor 'output'. Weights of more than 2 GB go into PATH.data.

    Args:
        model: Model in eval mode, on the CPU.
        images: Images (N, channels, height, width) to trace the model with, see :func:`tracing_batch`.
        path: File to write.
    """
    with torch.no_grad():
        single = isinstance(model(images), torch.Tensor)
    torch.onnx.export(
        model,
        (images,),
        os.fspath(path),
        dynamo=True,
        verbose=False,
        input_names=['input'],
        output_names=['output'] if single else None,
        dynamic_shapes=_dynamic_batch(),
        external_data=sum(x.nbytes for x in model.state_dict().values()) > _MAX_ONNX_WEIGHTS,
    )


def onnx_runner(path: Path) -> Runner:
    """An ONNX file as a function from images to outputs, with ONNX Runtime on the CPU.

    Args:
        path: File with one input.

    Returns:
        A function of images (N, ...), float32, on the CPU; it returns the output, or a list if there are several. It
        uses as many threads as torch.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry('session.x64quantprecision', '1')  # int8 that does not saturate without VNNI
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=['CPUExecutionProvider'])
    name = session.get_inputs()[0].name

    def run(images: torch.Tensor) -> Any:
        outputs = [torch.from_numpy(y) for y in session.run(None, {name: images.numpy()})]
        return outputs[0] if len(outputs) == 1 else outputs

    return run


def _write_pt2(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    torch.export.save(export_program(model, images), path)


def _pt2_runner(path: Path) -> Runner:
    return torch.export.load(path).module()


def _write_aoti(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    torch._inductor.aoti_compile_and_package(export_program(model, images), package_path=os.fspath(path))


def _aoti_runner(path: Path) -> Runner:
    return torch._inductor.aoti_load_package(os.fspath(path))


def _write_safetensors(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    save_for_hf(contiguous_copy(model), os.fspath(path.parent), safe_serialization=True)


def _folder_runner(path: Path) -> Runner:
    try:
        return timm.create_model(f'local-dir:{path.parent}', pretrained=True).eval()
    except RuntimeError as e:
        raise ValueError(
            'timm.create_model builds another structure. It knows models of timm whose arguments timm recorded (since '
            '1.0.31, in create_model) and what timm_rep.convert_to_repa and convert_to_repopt make of them, not what '
            'timm folds itself, as in MobileOne and RepVGG, or what was changed otherwise: export it with '
            'reparameterize=False (--no-reparam), convert it first, or choose another format') from e


class Format(NamedTuple):
    """A format of :func:`timm_rep.export`.

    Attributes:
        suffix: Suffix of the file; '' for a folder.
        write: Function of a model in eval mode, images to trace it with and the file to write.
        read: Function from the file to a function from images to outputs.
        packages: Packages that it needs beside torch.
    """
    suffix: str
    write: Callable[[nn.Module, torch.Tensor, Path], None]
    read: Callable[[Path], Runner]
    packages: Tuple[str, ...] = ()


FORMATS = {
    'safetensors': Format('', _write_safetensors, _folder_runner),
    'onnx': Format('.onnx', write_onnx, onnx_runner, ('onnx', 'onnxscript', 'onnxruntime')),
    'pt2': Format('.pt2', _write_pt2, _pt2_runner),
    'aoti': Format('.pt2', _write_aoti, _aoti_runner),
}


def check_format(format: str) -> Format:
    """Check that this machine can write and run a format.

    Raises:
        ModuleNotFoundError: A package is missing.
        RuntimeError: torch is too old, or there is no C++ compiler.
        ValueError: There is no such format.
    """
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f'format is one of {", ".join(map(repr, FORMATS))}, got {format!r}.')
    missing = [name for name in FORMATS[format].packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"The format {format!r} needs {', '.join(missing)}: pip install {' '.join(missing)}.")
    if format == 'aoti':
        _check_compiler()
    return FORMATS[format]


def _check_compiler() -> None:
    if not hasattr(torch._inductor, 'aoti_load_package'):
        raise RuntimeError(f"The format 'aoti' needs torch 2.6 or newer, this is {torch.__version__}.")
    from torch._inductor.cpp_builder import get_cpp_compiler  # nothing else here loads the compiler

    try:
        get_cpp_compiler()
    except RuntimeError as e:
        raise RuntimeError(
            "The format 'aoti' compiles C++, and torch finds no compiler: install g++ or clang, or set CXX.") from e
