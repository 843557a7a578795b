"""Updating one parameter with a GradMult by one Triton kernel, where a group asks for it with ``fused=True``.

The kernels have not been measured on a GPU yet, so that they are opt-in: without ``fused=True`` torch's own kernels do
the update, on every device.
"""
import functools
import math
import os
import warnings
from typing import Optional, Sequence

import torch
from torch.autograd.graph import increment_version
from torch.torch_version import TorchVersion

from ._chunks import match_strides

__all__ = ['launch', 'use_triton']

_TILE = 2048  # entries that one program updates


def use_triton(param: torch.Tensor, others: Sequence[torch.Tensor], group: dict) -> bool:
    """Whether a Triton kernel updates a parameter.

    True if all of the following hold:

    - The group has ``fused=True`` and no hyper-parameter of it is a tensor.
    - The parameter is on a GPU where Triton (3.2 or newer) works; or on a CPU, with ``TRITON_INTERPRET=1``.
    - It is float32, bfloat16 or float16, contiguous or channels-last, not empty, and has fewer than 2 ** 31 entries.
    - The gradient and the state have its dtype, device and shape.
    - The step is not being compiled: the compiler does not see what a kernel writes.

    Args:
        param: A parameter, or the local shard of one.
        others: Gradient and state of it.
        group: Its parameter group.
    """
    numbers = [value for name, value in group.items() if name not in ('params', 'betas')]
    return (
        bool(group['fused'])
        and not torch.compiler.is_compiling()
        and param.device.type == ('cpu' if os.environ.get('TRITON_INTERPRET') == '1' else 'cuda')
        and param.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and 0 < param.numel() < 2 ** 31 - _TILE and param[0].numel() < 2 ** 24
        and (param.is_contiguous() or param.is_contiguous(memory_format=torch.channels_last))
        and all(x.dtype == param.dtype and x.device == param.device and x.shape == param.shape for x in others)
        and not any(torch.is_tensor(x) for x in (*numbers, *group.get('betas', ())))
        and _triton_works(param.device)
    )


@functools.cache
def _triton_works(device: torch.device) -> bool:
    """Whether a kernel runs on a device, tried once: Triton needs a C compiler and a recent GPU."""
    param = torch.zeros(1, 1, 1, 1, device=device)
    try:
        import triton
        if TorchVersion(triton.__version__) < (3, 2):
            return False
        launch(
            'sgd_kernel', param, param.clone(), [None], torch.zeros(1, 2, device=device), 0,
            dict(lr=0., weight_decay=0., maximize=False), momentum=0., new_weight=1., NESTEROV=False)
        if device.type == 'cuda':
            torch.cuda.synchronize(device)
    except ImportError:
        return False
    except Exception as e:  # errors of compilers, linkers and drivers
        warnings.warn(
            f"Triton cannot run a kernel on {device}; RepSGD and RepAdamW use torch's own kernels there. "
            f'{type(e).__name__}: {e}', stacklevel=2)
        return False
    return True


def launch(
        kernel: str,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Sequence[Optional[torch.Tensor]],
        table: torch.Tensor,
        row_offset: int,
        group: dict,
        grad_scale: Optional[torch.Tensor] = None,
        found_inf: Optional[torch.Tensor] = None,
        **kwargs,
) -> None:
    """Update a parameter and its state in place.

    Args:
        kernel: Name of the kernel in :mod:`timm_rep.optim._triton_kernels`.
        param: Parameter, or its local shard, for which :func:`use_triton` is true.
        grad: Gradient of the parameter.
        state: State of the parameter, as the kernel takes it, with the strides of the parameter.
        table: :meth:`GradMult.table` of the parameter.
        row_offset: ``GradMult.row_offset`` of the parameter.
        group: Parameter group.
        grad_scale: GradScaler's scale, by which the gradient is divided.
        found_inf: GradScaler's flag; the step is skipped unless it is 0.
        kwargs: Further arguments of the kernel: numbers, and switches as bool.
    """
    from . import _triton_kernels

    out_channels, in_channels, height, width = param.shape
    row_size = param[0].numel()
    columns = min(_TILE, 1 << (row_size - 1).bit_length())
    rows = _TILE // columns
    numbers = dict(lr=group['lr'], weight_decay=group['weight_decay'], **kwargs)
    with torch.cuda.device_of(param):
        getattr(_triton_kernels, kernel)[math.ceil(out_channels / rows), math.ceil(row_size / columns)](
            param,
            match_strides(param, grad),
            *state,
            table,
            out_channels,
            in_channels,
            row_offset,
            *(x if x is None else x.to(param.device, torch.float32) for x in (grad_scale, found_inf)),
            # bool switches are compile-time constants; Triton would compile anew for some values of an int
            **{name: x if isinstance(x, bool) else float(x) for name, x in numbers.items()},
            MAXIMIZE=group['maximize'],
            WINDOW=height * width,
            CENTRE=height // 2 * width + width // 2,
            CHANNELS_LAST=not param.is_contiguous(),
            ROWS=rows,
            COLUMNS=columns,
        )
    increment_version(param)  # as torch's in-place operations do: autograd detects a backward pass that comes too late
