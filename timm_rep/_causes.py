"""Conditions that make a folded model differ from the given one, used by :func:`timm_rep.verify`."""
import copy
from contextlib import ExitStack
from typing import Any, Callable, Dict, List

import torch
import torch.nn as nn

from timm_rep.utils.compare import compare

# larger differences of statistics come from other data or other weights, not from sampling a few images
_MEAN_SHIFT = 3.  # in standard deviations, root mean square over the channels
_STD_RATIO = 4.


def find_causes(
        model: nn.Module,
        unfolded: nn.Module,
        folded: nn.Module,
        images: torch.Tensor,
        has_real_images: bool,
) -> Dict[str, str]:
    """Find conditions that make the folded model differ from the given one.

    Args:
        model: The given model, on its device, in its mode and dtype.
        unfolded: Copy in eval mode and float32 on the CPU.
        folded: Folded copy of ``unfolded``.
        images: A batch of finite images (N, channels, height, width), float32, on the CPU.
        has_real_images: Whether the images are real, so that statistics can be measured on them.

    Returns:
        The conditions that hold, with remedies, by name.
    """
    found = {
        'train mode': _train_mode(model, unfolded, images),
        'BatchNorm statistics': _statistics(unfolded, images) if has_real_images else '',
        'float16 overflow': _float16(model, unfolded, folded, images),
        'TF32': _tf32(model),
    }
    return {name: text for name, text in found.items() if text}


def _train_mode(model: nn.Module, unfolded: nn.Module, images: torch.Tensor) -> str:
    training = {name for name, module in model.named_modules() if module.training}
    if not training:
        return ''
    trained = copy.deepcopy(unfolded)
    for name, module in trained.named_modules():
        module.training = name in training
    with torch.random.fork_rng(devices=()):
        try:
            difference = compare(unfolded(images), trained(images)).relative_rms
            differ = f'differ by {difference:.2g} (relative rms) from eval mode' if difference >= 1e-6 else ''
        except ValueError:  # auxiliary outputs in train mode; BatchNorm with a single value per channel
            differ = 'cannot be compared with those of eval mode'
    if not differ:
        return ''
    return (
        f'the model is in train mode, in which its outputs {differ}. Folding reproduces eval mode: call model.eval() '
        'before comparing or deploying.')


def _statistics(unfolded: nn.Module, images: torch.Tensor) -> str:
    shifted: List[str] = []

    def measure(name: str) -> Callable[..., None]:
        def hook(norm: nn.Module, args: Any) -> None:
            x = args[0].transpose(0, 1).flatten(1).double()
            if norm.running_mean is None or x.shape[1] < 2:
                return
            std = (norm.running_var.double() + norm.eps).sqrt()
            shift = ((x.mean(1) - norm.running_mean) / std).square().mean().sqrt().item()
            ratio = ((x.var(1) + norm.eps).sqrt() / std).log().square().mean().sqrt().exp().item()
            if not (shift <= _MEAN_SHIFT and ratio <= _STD_RATIO):
                shifted.append(
                    f'{name} (mean by {shift:.2g} standard deviations, standard deviation by a factor of {ratio:.2g})')
        return hook

    _with_hooks(unfolded, images, {
        name: measure(name) for name, module in unfolded.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)}, before=True)
    if not shifted:
        return ''
    others = f' and {len(shifted) - 1} more' if len(shifted) > 1 else ''
    return (
        f'running statistics differ from the images in {shifted[0]}{others}. Folding uses them: check the '
        'normalization of the images, or, if weights changed after the last pass in train mode, measure them again by '
        'timm_rep.calibrate_batchnorm(model, loader) and fold again.')


def _float16(model: nn.Module, unfolded: nn.Module, folded: nn.Module, images: torch.Tensor) -> str:
    if not any(p.dtype == torch.float16 for p in model.parameters()):
        return ''
    largest = torch.finfo(torch.float16).max
    weights = [name for name, p in folded.named_parameters() if not (p.abs() <= largest).all()]
    outputs: List[str] = []

    def measure(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, y: Any) -> None:
            if isinstance(y, torch.Tensor) and not (y.abs() <= largest).all():
                outputs.append(name)
        return hook

    for net in (unfolded, folded):
        _with_hooks(net, images, {
            name: measure(name) for name, module in net.named_modules() if not any(module.children())})
    if not weights and not outputs:
        return ''
    where = f'the folded weight {weights[0]}' if weights else f'the outputs of {outputs[0]}'
    return (
        f'{where} exceeds {largest:g}, the largest number of float16: run the folded model in bfloat16 or float32.')


def _matmul_uses_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    # where fp32_precision (torch 2.9) was set, torch refuses to read allow_tf32
    return matmul.fp32_precision == 'tf32' if hasattr(matmul, 'fp32_precision') else matmul.allow_tf32


def _convolution_uses_tf32() -> bool:
    cudnn = torch.backends.cudnn
    return cudnn.conv.fp32_precision == 'tf32' if hasattr(cudnn, 'conv') else cudnn.allow_tf32


def _tf32(model: nn.Module) -> str:
    devices = [x.device for x in model.state_dict().values() if x.device.type == 'cuda']
    if not devices or torch.cuda.get_device_capability(devices[0]) < (8, 0):
        return ''
    names = [name for name, is_used in (
        ('torch.backends.cudnn.allow_tf32', _convolution_uses_tf32()),
        ('torch.backends.cuda.matmul.allow_tf32', _matmul_uses_tf32())) if is_used]
    if not names:
        return ''
    return (
        'this GPU computes float32 in TF32, with 10 bits of mantissa, so outputs before and after folding differ by '
        f'about 1e-3: set {" and ".join(names)} to False to compare them, or compare on the CPU.')


def _with_hooks(
        model: nn.Module,
        images: torch.Tensor,
        hooks: Dict[str, Callable[..., Any]],
        before: bool = False,
) -> None:
    """Compute the outputs of a model with a hook before or after some modules."""
    register = nn.Module.register_forward_pre_hook if before else nn.Module.register_forward_hook
    with ExitStack() as handles:
        for name, hook in hooks.items():
            handles.enter_context(register(model.get_submodule(name), hook))
        model(images)
