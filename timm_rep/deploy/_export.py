"""Export of models for inference, checked against eager mode."""
import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.utils import unwrap_model

from timm_rep.convert import folded_copy
from timm_rep.layers import AnnealedActivation, AnnealedNorm, foldable_layers
from timm_rep.utils.atomic import check_writable, is_empty, recover, replacing_files
from timm_rep.utils.compare import Difference, check_finite, check_images, check_tolerance, compare
from timm_rep.utils.files import Sidecar, StrPath
from timm_rep.utils.profiling import device_name, model_input_size

from .formats import FORMATS, Format, check_format, package_versions
from .report import REPORT_NAME, is_quantized_file

# name of the JSON file with the measured differences; for a single file, after its name and a dot
VERIFICATION_NAME = 'verify.json'


@dataclass(frozen=True)
class Exported(Sidecar):
    """Result of :func:`export`, and contents of its JSON file.

    Attributes:
        format: Key of ``timm_rep.deploy.FORMATS``.
        model: Architecture, or class of a model that timm did not create.
        reparameterized: Whether the model was folded first.
        input: Shape of the images; 'batch' stands for any batch size.
        tolerance: Largest ``relative_rms`` that passes.
        images: Number of images by kind: 'random' and, with the argument ``images``, 'real'.
        differences: Differences between the outputs of the file and of the model, by kind of images.
        machine: Processor.
        versions: Versions of the packages.
        path: Written file or folder; not in the JSON file.
    """
    format: str
    model: str
    reparameterized: bool
    input: List[Union[int, str]]
    tolerance: float
    images: Dict[str, int]
    differences: Dict[str, Difference]
    machine: str
    versions: Dict[str, str]
    path: Optional[Path] = None

    def __str__(self) -> str:
        return '\n'.join([
            f'{self.path}: {self.format}, {"" if self.reparameterized else "not "}folded'
            + ('' if FORMATS[self.format].dynamic_batch else ', batch size 1 only'),
            *(f'{self.images[kind]} {kind} images: relative rms difference {difference.relative_rms:.2g}, '
              f'at most {difference.max_difference:.2g}' for kind, difference in self.differences.items()),
        ])


def check_target(path: StrPath, format: str) -> Format:
    """Check, before any model is loaded, that this machine can write a format to a path; raises as :func:`export`."""
    target, path = check_format(format), Path(path)
    if target.suffix is None:
        others = [f'format={name!r}' for name, other in FORMATS.items() if path.suffix and other.suffix == path.suffix]
        if others or path.suffix == '.safetensors' or path.is_file():
            raise ValueError(
                f'path must be a folder for format={format!r}, got the file {str(path)!r}: name a folder'
                + (f', or pass {" or ".join(others)}.' if others else '.'))
        recover(path)
        if path.is_dir() and not is_empty(path):
            raise FileExistsError(f'The folder {str(path)!r} is not empty: choose a new one.')
    elif path.suffix != target.suffix:
        raise ValueError(f'path must end with {target.suffix} for format={format!r}, got {str(path)!r}.')
    elif path.is_dir():
        raise IsADirectoryError(f'path must be a file for format={format!r}, got the folder {str(path)!r}.')
    elif is_quantized_file(path):
        raise FileExistsError(
            f'{str(path)!r} is the int8 model that {REPORT_NAME} beside it describes: choose another name.')
    return target


@torch.no_grad()
def export(
        model: nn.Module,
        path: StrPath,
        format: str = 'safetensors',
        reparameterize: bool = True,
        images: Optional[torch.Tensor] = None,
        input_size: Optional[Tuple[int, int, int]] = None,
        tolerance: float = 1e-4,
) -> Exported:
    """Export a model for inference on the CPU, and compare what was written with the model in eager mode.

    =============  =========================================================  ==================================
    format         written                                                    loaded by
    =============  =========================================================  ==================================
    'safetensors'  folder: model.safetensors, config.json                     ``timm.create_model('local-dir:')``
    'onnx'         file.onnx, of ``torch.onnx.export(dynamo=True)``           ONNX Runtime
    'pt2'          file.pt2, of ``torch.export.save``                         ``torch.export.load``
    'aoti'         file.pt2, compiled by AOTInductor for this kind of CPU     ``torch._inductor.aoti_load_package``
    'openvino'     folder: model.xml, model.bin                               OpenVINO
    'executorch'   file.pte, for XNNPACK                                      ExecuTorch
    =============  =========================================================  ==================================

    The batch size is dynamic, except for 'executorch', which takes one image at a time. The image size is fixed, except
    for 'safetensors'. A copy of the model is exported in eval mode and loaded again. For a batch and for a single
    image, the outputs must match those of the given, unfolded model within the tolerance. The differences are written
    as JSON: ``FILE.verify.json``, or ``verify.json`` in a folder. An existing file is replaced; a folder must be new or
    empty. OpenVINO is compared in float32; by default it computes in bfloat16 on CPUs with AMX, so set its
    ``INFERENCE_PRECISION_HINT`` to 'f32' to reproduce these outputs.

    Args:
        model: Model of this package or of timm, or a network around one, with float32 parameters. Its input is one
            tensor (N, channels, height, width), its output a tensor or a nesting of tensors. Not modified.
        path: File with the suffix of the format, or folder.
        format: Key of ``timm_rep.deploy.FORMATS``.
        reparameterize: Fold the copy first, as :func:`timm_rep.convert.folded_copy`.
        images: Real images (N, channels, height, width) to compare on, normalized as the model expects. Default:
            normally distributed values only.
        input_size: (channels, height, width) of the images. Default: from ``images``, else from the model.
        tolerance: Largest root mean square of the difference, relative to the outputs' own.

    Returns:
        The differences; ``print()`` shows them.

    Raises:
        ModuleNotFoundError: The format requires a package that is not installed.
        OSError: The path cannot be written, is a folder where a file is expected, a folder that is not empty, or the
            file of a quantized model.
        RuntimeError: The exporter fails; the outputs differ by more than the tolerance; or the format requires a newer
            torch or a C++ compiler.
        TypeError: model is not a module, or images is not a tensor.
        ValueError: An argument is invalid; the model is quantized, compiled, wrapped, on the meta device, not in
            float32, not yet annealed, not a timm model (format 'safetensors') or, with ``reparameterize=False``, in a
            training-only structure; or it cannot be folded, or its outputs are not finite.
            Nothing is written if an error is raised.
    """
    target = check_target(path, format)
    path = Path(path)
    check_model(model, reparameterize)
    if target.check_model is not None:
        target.check_model(model)
    check_tolerance(tolerance)
    batches = _batches(model, images, input_size)
    is_folder = target.suffix is None
    folder = path if is_folder else path.parent

    original = copy.deepcopy(model).cpu().eval()
    example = batches['random'][:2 if target.dynamic_batch else 1]
    check_finite(original, example)
    deployed = folded_copy(original) if reparameterize else original
    check_writable(folder)
    with replacing_files(folder) as draft:
        written = draft if is_folder else draft / path.name
        try:
            target.write(deployed, example, written)
            exported = target.load(written)
            differences = {
                kind: _measure(original, exported, batch, target.dynamic_batch) for kind, batch in batches.items()}
        except OSError:
            raise
        except Exception as e:  # exporters raise many types
            cause = e.__cause__ if format == 'onnx' and e.__cause__ else e
            raise RuntimeError(
                f'Cannot export {type(model).__name__} as {format!r}: {type(cause).__name__}: {str(cause).strip()}'
            ) from e
        for kind, difference in differences.items():
            if not difference.relative_rms <= tolerance:
                raise RuntimeError(
                    f'{type(model).__name__} as {format!r} must be within the tolerance {tolerance:g} of the model, '
                    f'got {difference.relative_rms:.2g} (relative rms) on {kind} images: choose another format or '
                    'tolerance. Nothing was written.')
        result = Exported(
            format=format,
            model=(getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__,
            reparameterized=reparameterize,
            input=['batch' if target.dynamic_batch else 1, *example.shape[1:]],
            tolerance=tolerance,
            images={kind: len(batch) for kind, batch in batches.items()},
            differences=differences,
            machine=device_name(torch.device('cpu')),
            versions=package_versions(target),
        )
        result.to_json(draft / (VERIFICATION_NAME if is_folder else f'{path.name}.{VERIFICATION_NAME}'))
    return replace(result, path=path)


def _measure(model: nn.Module, exported: Callable[..., Any], images: torch.Tensor, dynamic_batch: bool) -> Difference:
    """Difference on a batch and on its first image alone; or on each image alone, if the batch size is fixed."""
    batches = (images, images[:1]) if dynamic_batch else images.split(1)
    return compare([model(x) for x in batches], [exported(x) for x in batches])


def _batches(
        model: nn.Module,
        images: Optional[torch.Tensor],
        input_size: Optional[Tuple[int, int, int]],
) -> Dict[str, torch.Tensor]:
    """Random images and, if given, the real ones."""
    if images is not None:
        check_images(images)
    if input_size is None:
        if images is None and getattr(model, 'pretrained_cfg', None) is None:
            raise ValueError(
                f'Expected a pretrained_cfg with an input size, but {type(model).__name__} has none: pass input_size.')
        input_size = model_input_size(model) if images is None else images.shape[1:]
    sizes = input_size if isinstance(input_size, Sequence) else ()
    if len(sizes) != 3 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f'input_size must be (channels, height, width), got {input_size!r}.')
    if images is not None and tuple(images.shape[1:]) != tuple(input_size):
        raise ValueError(
            f'images must be of input_size {tuple(input_size)}, got {tuple(images.shape[1:])}: leave input_size out.')
    batches = {'random': torch.randn(
        3, *input_size, generator=torch.Generator().manual_seed(0), device='cpu', dtype=torch.float32)}
    return batches if images is None else {**batches, 'real': images.detach().float().cpu()}


def check_model(model: nn.Module, reparameterize: bool = True) -> None:
    """Raise TypeError or ValueError, as :func:`export`, unless a model is an unwrapped float32 model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f'model must be a module, got {model!r:.100}: create it with timm.create_model.')
    name = type(model).__name__
    if unwrap_model(model) is not model:
        raise ValueError(f'Expected an unwrapped model, but {name} wraps one (DDP, torch.compile): pass that one.')
    if _is_quantized(model):
        raise ValueError(f'Expected a float model, but {name} is quantized: quantized models have their own formats.')
    tensors = [x for x in model.state_dict().values() if x.is_floating_point()]
    if any(x.is_meta for x in tensors):
        raise ValueError(f'Expected weights, but {name} is on the meta device: load them first.')
    others = {str(x.dtype) for x in tensors} - {'torch.float32'}
    if others:
        raise ValueError(f'{name} must be in float32, got weights in {", ".join(sorted(others))}: pass model.float().')
    for module in model.modules():
        if isinstance(module, (AnnealedActivation, AnnealedNorm)):
            module.check_end()
    structures = {layer.structure for _, layer in foldable_layers(model)} & {'search', 'csla'}
    if structures and not reparameterize:
        raise ValueError(
            f'reparameterize must be True for the {structures.pop()} structure of {name}, which is for training only, '
            'got False.')


def _is_quantized(model: nn.Module) -> bool:
    """Whether a model holds torchao tensors, quantized layers of torch.ao, or the graph of an exported quantization."""
    tensors = model.state_dict(keep_vars=True).values()
    if any(type(x) not in (torch.Tensor, nn.Parameter) or x.is_quantized for x in tensors):
        return True
    return any(
        re.match(r'(torch|torchao|timm_rep)\..*quantize', type(module).__module__)
        or (isinstance(module, torch.fx.GraphModule) and any(
            'quantize' in str(node.target) for node in module.graph.nodes))
        for module in model.modules())
