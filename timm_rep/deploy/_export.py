"""Exporting a model for inference: safetensors, ONNX, torch.export or AOTInductor, checked against the model."""
import copy
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.utils import unwrap_model

from timm_rep.convert import folded_copy
from timm_rep.layers import AnnealedActivation, AnnealedNorm, foldable_layers
from timm_rep.utils.atomic import check_writable, locking_folder, replacing_files
from timm_rep.utils.profiling import model_input_size
from timm_rep._verify import Difference, check_finite, compare

from .formats import FORMATS, Format, check_format
from .verification import read_verifications, write_verification

__all__ = ['Exported', 'check_model', 'check_target', 'export']


@dataclass(frozen=True)
class Exported:
    """What :func:`export` wrote.

    Attributes:
        path: File, or folder of the format 'safetensors'.
        format: Format.
        reparameterized: Whether the model was folded first.
        differences: Differences of the outputs from those of the model, by 'random' and, with images, 'real'.
    """
    path: Path
    format: str
    reparameterized: bool
    differences: Dict[str, Difference]

    def __str__(self) -> str:
        return '\n'.join([
            f'{self.path}: {self.format}, {"" if self.reparameterized else "not "}folded',
            *(f'{difference.images} {kind} images: relative rms difference {difference.relative_rms:.2g}, '
              f'at most {difference.max_difference:.2g}' for kind, difference in self.differences.items()),
        ])


def check_target(path: Union[str, os.PathLike], format: str) -> Format:
    """Check that a format can be written here, and to this path; before a model is loaded.

    Raises:
        ModuleNotFoundError, OSError, RuntimeError, ValueError: As :func:`export`.
    """
    target, path = check_format(format), Path(path)
    if not target.suffix:
        if path.suffix in ('.safetensors', '.onnx', '.pt2') or path.is_file():
            others = [f'format={name!r}' for name, other in FORMATS.items() if other.suffix == path.suffix != '']
            raise ValueError(
                f'{format!r} writes a folder, got the file {str(path)!r}: name a folder'
                + (f', or pass {" or ".join(others)}.' if others else '.'))
        if path.is_dir() and any(path.iterdir()):
            raise FileExistsError(f'The folder {str(path)!r} holds files: name a new one.')
    elif path.suffix != target.suffix:
        raise ValueError(f'A file of the format {format!r} is named *{target.suffix}, got {str(path)!r}.')
    elif path.is_dir():
        raise IsADirectoryError(f'{str(path)!r} is a folder: name a file to write.')
    return target


@torch.no_grad()
def export(
        model: nn.Module,
        path: Union[str, os.PathLike],
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
    =============  =========================================================  ==================================

    The batch size is dynamic, the other sizes are fixed (not in a folder). A copy of the model is exported, in eval
    mode, and loaded again; its outputs for a batch and for a single image are those of the given model, unfolded, up to
    the tolerance. The differences are in verify.json beside the file, by its name. An existing file is replaced;
    a folder is to be new or empty.

    Args:
        model: Model with parameters in float32: of this package, of timm, or a network that has one inside. Its input
            is one tensor (N, channels, height, width), its output a tensor or a nesting of tensors. Unchanged.
        path: File with the suffix of the format, or a folder.
        format: 'safetensors', 'onnx', 'pt2' or 'aoti'.
        reparameterize: Fold the copy first, as :func:`timm_rep.convert.folded_copy`.
        images: Real images to compare on (N, channels, height, width), normalized as the model expects. Default: only
            images of normally distributed values are compared.
        input_size: (channels, height, width) of the images. Default: that of ``images``, or else of the model.
        tolerance: Largest difference, root mean square relative to that of the outputs.

    Returns:
        The differences; ``print()`` shows them.

    Raises:
        ModuleNotFoundError: The format needs a package that is not installed (extra ``deploy``).
        OSError: The path cannot be written to, is a folder where a file is written, or a folder that holds files.
        RuntimeError: The model cannot be written in this format, the message has the reason; its outputs there differ
            by more than the tolerance; or the format needs a newer torch or a C++ compiler.
        TypeError: model is not a module.
        ValueError: There is no such format, or the path has another suffix; the model is quantized, compiled, wrapped,
            on the meta device, of another dtype, in the middle of an annealing, no model of timm ('safetensors') or, if
            it is not to be folded, of a structure for training only; it cannot be folded, or has outputs that are not
            finite.

        Where an error is raised, no file is written.
    """
    target = check_target(path, format)
    path = Path(path)
    check_model(model, reparameterize)
    if not target.suffix and not (getattr(model, 'pretrained_cfg', None) or {}).get('architecture'):
        raise ValueError(
            f'{type(model).__name__} is no model of timm, which the format {format!r} is for: name another format.')
    if not target.suffix and not hasattr(model, 'num_classes'):
        raise ValueError(
            f'{type(model).__name__} is made by features_only, which config.json cannot say: export the whole model, '
            'or name another format.')
    if not tolerance >= 0:
        raise ValueError(f'tolerance is a relative error of at least 0, got {tolerance!r}.')
    batches = _batches(model, images, input_size)
    file = path if target.suffix else path / 'model.safetensors'

    original = copy.deepcopy(model).cpu().eval()
    example = batches['random'][:2]
    check_finite(original, example)
    deployed = folded_copy(original) if reparameterize else original
    check_writable(file.parent)
    # the lock is for verify.json, which has an entry for each file of the folder
    with locking_folder(file.parent), replacing_files(file.parent) as draft:
        others = read_verifications(file.parent)
        try:
            target.write(deployed, example, draft / file.name)
            exported = target.read(draft / file.name)
            differences = {kind: _measure(original, exported, batch) for kind, batch in batches.items()}
        except Exception as e:  # exporters raise many types, over many lines
            cause = e.__cause__ if format == 'onnx' and e.__cause__ else e
            reason = next(iter(str(cause).strip().splitlines()), '')
            raise RuntimeError(
                f'{type(model).__name__} cannot be exported as {format!r}: {type(cause).__name__}: {reason}') from e
        for kind, difference in differences.items():
            if not difference.relative_rms <= tolerance:
                raise RuntimeError(
                    f'{type(model).__name__} as {format!r} differs from the model by {difference.relative_rms:.2g} '
                    f'(relative rms) on {kind} images, more than the tolerance {tolerance:g}: nothing is written.')
        write_verification(draft, others, file.name, dict(
            format=format,
            model=(getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__,
            reparameterized=reparameterize,
            input=['batch', *example.shape[1:]],
            tolerance=tolerance,
            differences={kind: asdict(difference) for kind, difference in differences.items()},
        ), target.packages)
    return Exported(path, format, reparameterize, differences)


def _measure(model: nn.Module, exported, images: torch.Tensor) -> Difference:
    """Difference on a batch, and on its first image alone: the batch size is no constant."""
    batches = images, images[:1]
    return compare([model(x) for x in batches], [exported(x) for x in batches], len(images))


def _batches(
        model: nn.Module,
        images: Optional[torch.Tensor],
        input_size: Optional[Tuple[int, int, int]],
) -> Dict[str, torch.Tensor]:
    """Random images, and the real ones."""
    if images is not None and (images.ndim != 4 or not len(images) or not images.isfinite().all()):
        raise ValueError(f'images are finite, of shape (N, channels, height, width), got {tuple(images.shape)}.')
    if input_size is None:
        if images is None and getattr(model, 'pretrained_cfg', None) is None:
            raise ValueError(f'{type(model).__name__} has no pretrained_cfg with an input size: pass input_size.')
        input_size = model_input_size(model) if images is None else images.shape[1:]
    sizes = input_size if isinstance(input_size, Sequence) else ()
    if len(sizes) != 3 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f'input_size is (channels, height, width), got {input_size!r}.')
    if images is not None and tuple(images.shape[1:]) != tuple(input_size):
        raise ValueError(f'images are of size {tuple(images.shape[1:])}, input_size is {tuple(input_size)}.')
    batches = {'random': torch.randn(3, *input_size, generator=torch.Generator().manual_seed(0))}
    return batches if images is None else {**batches, 'real': images.detach().float().cpu()}


def check_model(model: nn.Module, reparameterize: bool = True) -> None:
    """Refuse what is no float32 model for inference.

    Args:
        model: The model.
        reparameterize: Whether it is to be folded.

    Raises:
        TypeError: model is not a module.
        ValueError: As :func:`export`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f'model is a module, got {model!r:.100}: create it with timm.create_model.')
    name = type(model).__name__
    if unwrap_model(model) is not model:
        raise ValueError(f'{name} wraps another model (DDP, torch.compile): take the model inside.')
    if _is_quantized(model):
        raise ValueError(f'{name} is quantized: take the float model; quantized models have their own formats.')
    tensors = [x for x in model.state_dict().values() if x.is_floating_point()]
    if any(x.is_meta for x in tensors):
        raise ValueError(f'{name} is on the meta device and has no weights: load them first.')
    others = {str(x.dtype) for x in tensors} - {'torch.float32'}
    if others:
        raise ValueError(f'{name} has weights in {", ".join(sorted(others))}: take model.float().')
    for module in model.modules():
        if isinstance(module, (AnnealedActivation, AnnealedNorm)):
            module.check_end()
    structures = {layer.structure for _, layer in foldable_layers(model)} & {'search', 'csla'}
    if structures and not reparameterize:
        raise ValueError(
            f'{name} has the {structures.pop()} structure, which is for training: export it with reparameterize=True.')


def _is_quantized(model: nn.Module) -> bool:
    """Whether a model holds weights of torchao, layers of torch.ao, or the graph of an exported quantization."""
    tensors = model.state_dict(keep_vars=True).values()
    if any(type(x) not in (torch.Tensor, nn.Parameter) or x.is_quantized for x in tensors):
        return True
    return any(
        re.match(r'(torch|torchao|timm_rep)\..*quantize', type(module).__module__)
        or (isinstance(module, torch.fx.GraphModule) and any(
            'quantize' in str(node.target) for node in module.graph.nodes))
        for module in model.modules())
