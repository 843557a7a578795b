"""Updating all kernels that have a GradMult in one launch of a Triton kernel."""
import functools
import os
import warnings
from typing import Iterable, List, NamedTuple, Optional

import torch
from torch.torch_version import TorchVersion

from timm_rep.layers.grad_mult import BranchScale, GradMult, get_grad_mult, local, set_grad_mult

from ._chunks import fused_of, match_strides
from ._tables import ALIGNMENT, BLOCK, Tables, memory_order

__all__ = ['Launch', 'Launches', 'has_numbers_only', 'kernels_run_on', 'launched_together', 'runs_kernels']


def kernels_run_on() -> str:
    """The type of the devices that Triton's kernels run on now, '' if it is none.

    A GPU; in Triton's interpreter (``TRITON_INTERPRET=1``) the CPU and nothing else.
    """
    if torch.compiler.is_compiling():  # which sees what torch's parts do, and not what a kernel writes
        return ''
    if os.environ.get('TRITON_INTERPRET') == '1':
        return 'cpu'
    # a graph would keep the addresses of a table that is not its own
    return 'cuda' if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing() else ''


def has_numbers_only(group: dict) -> bool:
    """Whether a kernel takes all hyper-parameters of a group: of tensors the learning rate only."""
    return not any(
        torch.is_tensor(x) for name, value in group.items() if name not in ('params', 'lr')
        for x in (value if isinstance(value, (tuple, list)) else (value,)))


def runs_kernels(param: torch.Tensor, grad: torch.Tensor, states: Iterable[torch.Tensor], group: dict) -> bool:
    """Whether a Triton kernel can update a parameter, on a device of :func:`kernels_run_on`, and is wanted to."""
    return (
        fused_of(group) is not False
        and param.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and 0 < param.numel() < 2 ** 31 - BLOCK and param[0].numel() < 2 ** 24
        and memory_order(param) is not None
        # a kernel believes its table; torch's own parts say what is wrong with other tensors, or convert them
        and all(x.dtype == param.dtype and x.device == param.device and x.shape == param.shape for x in (grad, *states))
        and _has_triton()
        and (param.device.type == 'cpu' or _works_on(param.device))
    )


@functools.cache
def _has_triton() -> bool:
    """One that the kernels are tested with; it comes with torch, but not on every machine."""
    try:
        import triton
    except ImportError:
        return False
    return TorchVersion(triton.__version__) >= (3, 2)


@functools.cache
def _works_on(device: torch.device) -> bool:
    """Whether a kernel runs there, tried once: Triton needs a C compiler, and a GPU that is not too old."""
    param = torch.nn.Parameter(torch.zeros(1, 1, 1, 1, device=device))
    param.grad = torch.zeros_like(param)
    set_grad_mult(param, GradMult((1, 1, 1, 1), [BranchScale((1, 1), torch.ones(1))]))
    try:
        Launches()(
            'sgd_kernel', 'squared', Launch([param], [], [False], True), lr=0., momentum=0., new_weight=1.,
            weight_decay=0., grad_scale=None, found_inf=None, has_momentum=False, nesterov=False, maximize=False)
        torch.cuda.synchronize(device)
    except Exception as e:  # of compilers, linkers and drivers
        warnings.warn(
            f'Triton cannot run a kernel on {device}, so that a step of RepSGD or RepAdamW takes several there: '
            f'{type(e).__name__}: {e}', stacklevel=2)
        return False
    return True


def launched_together(param: torch.Tensor) -> tuple:
    """What parameters of one launch have in common; one of an odd size slows down the others."""
    return param.device, param.dtype, param.numel() % ALIGNMENT == 0


class Launch(NamedTuple):
    """What one launch is for.

    Attributes:
        params: Parameters with a GradMult that :func:`runs_kernels` is true of, that :func:`launched_together` puts
            together.
        states: Up to three lists of as many tensors, what this process holds, in the layouts of the parameters.
        first: Whether the state of each parameter is new.
        as_is: Whether parameters and gradients can be taken as they are: no shards, and of the same strides.
    """
    params: List[torch.Tensor]
    states: List[List[torch.Tensor]]
    first: List[bool]
    as_is: bool


class Launches:
    """Launches a kernel on lists of tensors, and keeps its tables."""

    def __init__(self):
        self.tables = Tables()

    def __call__(
            self,
            kernel: str,
            rule: str,
            launch: Launch,
            *args: torch.Tensor,
            grad_scale: Optional[torch.Tensor],
            found_inf: Optional[torch.Tensor],
            lr,
            **kwargs,
    ) -> None:
        """Launch it once.

        Args:
            kernel: Its name in :mod:`timm_rep.optim._triton_kernels`.
            rule: Of the GradMults.
            launch: The tensors.
            args: More tensors that the kernel takes after its tables, wherever they are.
            grad_scale: What the gradients are to be divided by, of GradScaler.
            found_inf: Of GradScaler, 1 if the step is to be skipped.
            lr: Learning rate, a number or a tensor.
            kwargs: The other numbers and switches of the kernel.
        """
        import triton.language as tl

        from . import _triton_kernels

        shards, grads = launch.params, [p.grad for p in launch.params]
        if not launch.as_is:
            shards = [local(p) for p in shards]
            # held until the launch: a gradient in another layout is copied
            grads = [match_strides(shard, local(grad)) for shard, grad in zip(shards, grads)]
        device, dtype = shards[0].device, shards[0].dtype
        grad_mults = [get_grad_mult(p) for p in launch.params]
        table = self.tables.of(rule, [shards, grads, *launch.states], grad_mults, launch.first)
        # Triton compiles anew for the values of integers: those of switches, and not those of rates
        numbers = {
            k: x if isinstance(x, (bool, torch.Tensor)) else float(x) for k, x in {**kwargs, 'lr': lr}.items()}
        tensors = dict(numbers, grad_scale=grad_scale, found_inf=found_inf)
        *args, = (x.to(device, torch.float32, non_blocking=True) for x in args)
        with torch.cuda.device_of(shards[0]):
            getattr(_triton_kernels, kernel)[(len(table.blocks),)](
                table.tensors,
                table.blocks,
                *args,
                dtype=getattr(tl, str(dtype).removeprefix('torch.')),
                aligned=table.aligned,
                lr_is_tensor=torch.is_tensor(lr),
                **{k: x.to(device, torch.float32) if torch.is_tensor(x) else x for k, x in tensors.items()},
            )
