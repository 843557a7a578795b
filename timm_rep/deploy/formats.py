"""The table of deploy formats and int8 backends.

A new format is one entry of :data:`FORMATS`: a function that writes a model and one that loads what was written.
:func:`timm_rep.export`, the command line and the tests take it from there.
"""
import importlib.metadata
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn as nn

from timm_rep.hub import check_timm_model, load_folder, scales_of, write_model
from timm_rep.utils.modes import default_dtype
from timm_rep.utils.profiling import versions

from .runtimes import (
    Runner,
    compile_openvino,
    load_executorch,
    lower_to_executorch,
    save_openvino,
    to_openvino,
)

__all__ = [
    'BACKENDS', 'FORMATS', 'Backend', 'Format', 'check_format', 'check_packages', 'export_program', 'onnx_runner',
    'package_versions', 'save_program', 'tracing_batch', 'write_onnx',
]

# largest total size of weights inside an ONNX file: protobuf's limit of 2 GiB, minus space for the graph
_MAX_ONNX_WEIGHTS = (2 << 30) - (16 << 20)


class Format(NamedTuple):
    """A deploy format.

    Attributes:
        description: One line for the documentation and the command line.
        suffix: Suffix of the file, None if the format is a folder.
        write: Function of a model in eval mode on the CPU, images to trace it with (N, channels, height, width), and
            the file or folder to write.
        load: Function from the file or folder to a function from images to outputs.
        packages: Modules to import besides torch.
        extra: Extra of this package that installs them.
        dynamic_batch: Whether the exported model takes any batch size; otherwise only that of the traced batch.
        check_machine: Raises if this machine cannot write the format.
        check_model: Raises if the format cannot hold a model.
    """
    description: str
    suffix: Optional[str]
    write: Callable[[nn.Module, torch.Tensor, Path], None]
    load: Callable[[Path], Runner]
    packages: Tuple[str, ...] = ()
    extra: str = ''
    dynamic_batch: bool = True
    check_machine: Optional[Callable[[], None]] = None
    check_model: Optional[Callable[[nn.Module], None]] = None


class Backend(NamedTuple):
    """An int8 backend.

    Attributes:
        runtime: Name of what runs the model, for model cards.
        program: Module of this package and class in it, a :class:`~timm_rep.deploy.program.Program`.
        files: Names of the files of a quantized model; the first one is loaded, the others hold its weights.
        packages: Modules to import besides torch; torchao has the calibrators.
        extra: Extra of this package that installs them.
        calibrators: Names of the calibrators that it has.
    """
    runtime: str
    program: Tuple[str, str]
    files: Tuple[str, ...]
    packages: Tuple[str, ...]
    extra: str
    calibrators: Tuple[str, ...] = ('minmax', 'entropy', 'percentile')


_DYNAMIC_BATCH = ({0: torch.export.Dim('batch')},)


def tracing_batch(images: torch.Tensor) -> torch.Tensor:
    """At least two images to trace a model with: torch.export specializes a batch size of 1."""
    return torch.cat([images, images])[:max(2, len(images))]


def export_program(model: nn.Module, images: torch.Tensor) -> 'torch.export.ExportedProgram':
    """``torch.export`` with a dynamic batch size of a model in eval mode, for images of :func:`tracing_batch`."""
    return torch.export.export(model, (images,), dynamic_shapes=_DYNAMIC_BATCH)


def save_program(program: 'torch.export.ExportedProgram', path: Path) -> None:
    """``torch.export.save`` that raises OSError on a full disk, where torch's writer would abort the process."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


def write_onnx(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    """Write an ONNX file with a dynamic batch size, by ``torch.onnx.export(dynamo=True)``.

    The input is named 'input', a single output 'output'. Weights of more than 2 GB are in PATH.data.

    Args:
        model: Model in eval mode on the CPU.
        images: At least two images (N, channels, height, width).
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
        dynamic_shapes=_DYNAMIC_BATCH,
        external_data=sum(x.nbytes for x in model.state_dict().values()) > _MAX_ONNX_WEIGHTS,
    )


def onnx_runner(path: Path) -> Runner:
    """An ONNX file as a function from images to outputs, run by ONNX Runtime on the CPU with torch's threads.

    The function takes float32 images (N, ...) on the CPU, and returns the output, or a list of several.
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
    save_program(export_program(model, images), path)


def _load_pt2(path: Path) -> Runner:
    return torch.export.load(path).module()


def _write_aoti(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # torch's writer would abort the process on a full disk
        package = Path(folder) / path.name
        torch._inductor.aoti_compile_and_package(export_program(model, images), package_path=os.fspath(package))
        shutil.copyfile(package, path)


def _load_aoti(path: Path) -> Runner:
    return torch._inductor.aoti_load_package(os.fspath(path))


def _check_compiler() -> None:
    if not hasattr(torch._inductor, 'aoti_load_package'):
        raise RuntimeError(f"format='aoti' requires torch >= 2.6, but found {torch.__version__}.")
    from torch._inductor.cpp_builder import get_cpp_compiler  # imports the compiler, which nothing else here needs

    try:
        get_cpp_compiler()
    except RuntimeError as e:
        raise RuntimeError(
            "format='aoti' requires a C++ compiler, but torch found none: install g++ or clang, or set CXX.") from e


def _write_openvino(model: nn.Module, images: torch.Tensor, folder: Path) -> None:
    save_openvino(to_openvino(export_program(model, images), images), folder / 'model.xml')


def _load_openvino(folder: Path) -> Runner:
    return compile_openvino(folder / 'model.xml')[0]


def _write_executorch(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    path.write_bytes(lower_to_executorch(torch.export.export(model, (images,))).to_executorch().buffer)


def _load_executorch(path: Path) -> Runner:
    return load_executorch(path.read_bytes())


def _write_folder(model: nn.Module, images: torch.Tensor, folder: Path) -> None:
    write_model(model, folder, scales=scales_of(model))


def _load_folder(folder: Path) -> Runner:
    try:
        with default_dtype(torch.float32):
            return load_folder(folder)
    except RuntimeError as e:
        raise ValueError(
            'Expected a model that timm.create_model builds from config.json, but it builds another structure. It '
            'rebuilds timm models whose arguments timm recorded (timm >= 1.0.31) and what timm_rep.convert_to_repa and '
            'convert_to_repopt make of them, but not blocks that timm folds itself, for example in MobileOne and '
            'RepVGG, nor models that were changed after their creation: export with reparameterize=False '
            '(--no-reparam), convert the model first, or choose another format') from e


FORMATS: Dict[str, Format] = {
    'safetensors': Format(
        "folder for timm.create_model('local-dir:FOLDER')", None, _write_folder, _load_folder,
        check_model=check_timm_model),
    'onnx': Format(
        'ONNX', '.onnx', write_onnx, onnx_runner, packages=('onnx', 'onnxscript', 'onnxruntime'), extra='deploy'),
    'pt2': Format('torch.export', '.pt2', _write_pt2, _load_pt2),
    'aoti': Format(
        'compiled by AOTInductor for this kind of CPU', '.pt2', _write_aoti, _load_aoti, check_machine=_check_compiler),
    'openvino': Format(
        'folder with model.xml and model.bin for OpenVINO', None, _write_openvino, _load_openvino,
        packages=('openvino',), extra='openvino'),
    'executorch': Format(
        'ExecuTorch program for XNNPACK, one image at a time', '.pte', _write_executorch, _load_executorch,
        packages=('executorch',), extra='executorch', dynamic_batch=False),
}

BACKENDS: Dict[str, Backend] = {
    'inductor': Backend('torch on x86', ('inductor', 'InductorProgram'), ('model.pt2',), ('torchao',), 'deploy'),
    'onnxruntime': Backend(
        'ONNX Runtime', ('ort', 'OnnxProgram'), ('model.onnx', 'model.onnx.data'),
        ('onnx', 'onnxscript', 'onnxruntime', 'torchao'), 'deploy'),
    'openvino': Backend(
        'OpenVINO', ('openvino_int8', 'OpenVinoProgram'), ('model.xml', 'model.bin'), ('openvino', 'nncf', 'torchao'),
        'openvino', calibrators=('minmax', 'percentile')),
    'executorch': Backend(
        'ExecuTorch', ('executorch_int8', 'ExecuTorchProgram'), ('model.pte',), ('executorch', 'torchao'),
        'executorch'),
}


def package_versions(entry: Union[Format, Backend]) -> Dict[str, str]:
    """Versions of what an entry of the table depends on."""
    return {**versions(), **{name: _version(name) for name in entry.packages}}


def _version(module: str) -> str:
    """Version of the distribution that holds a module, which may have another name (onnxruntime-gpu)."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(importlib.metadata.packages_distributions()[module][0])


def check_format(format: str) -> Format:
    """Check that this machine can write and load a format.

    Raises:
        ModuleNotFoundError: A package is not installed.
        RuntimeError: torch is too old, or a C++ compiler is missing.
        ValueError: The format is unknown.
    """
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f'format must be one of {", ".join(map(repr, FORMATS))}, got {format!r}.')
    found = FORMATS[format]
    check_packages(f'format={format!r}', found)
    if found.check_machine is not None:
        found.check_machine()
    return found


def check_packages(name: str, entry: Union[Format, Backend]) -> None:
    """Raise ModuleNotFoundError, for ``name``, unless the packages of an entry of the table are installed."""
    missing = [package for package in entry.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{name} requires {', '.join(missing)}: pip install {' '.join(missing)}, or 'timm-rep[{entry.extra}]'.")
