"""The multiplier of a convolution kernel's gradient or update, in compact form.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), equation 3 and appendix A.
"""
import weakref
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
import torch.nn as nn

from .csla import Csla

_ATTRIBUTE = 'grad_mult'

# kernel size, multiplier of each output channel (out_channels, 1, 1, 1), whether only the diagonal is reached
Region = Tuple[Tuple[int, int], torch.Tensor, bool]


class MultipliedLayers(weakref.WeakValueDictionary[str, nn.Module]):
    """Target operators of a model that were given a GradMult together, by name.

    The optimizers compare these layers with the parameters they are given. The layers are not kept alive. A copied or
    unpickled model gets an empty mapping, to which its layers add themselves.

    Attributes:
        scales: What the layers were given, vectors by branch by name of the layer; None for no scales.
    """

    def __init__(self, scales: Optional[Mapping[str, Mapping[str, torch.Tensor]]] = None):
        super().__init__()
        self.scales = scales

    def add(self, name: str, layer: nn.Module) -> None:
        """Add a layer whose weight has a GradMult."""
        self[name] = layer
        layer.grad_mult.name, layer.grad_mult.layers = name, self

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.scales,)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        return type(self)(self.scales)


class GradMult:
    """Multiplier of a convolution kernel's gradient or update, stored as O(out_channels) numbers.

    Entry (c, d, p, q) is multiplied by a sum over the branches that reach it:

    ============  ===================  ==============================================================
    rule          sum of               for updates that are
    ============  ===================  ==============================================================
    'squared'     ``scale[c] ** 2``    linear in the gradient (SGD)
    'absolute'    ``abs(scale[c])``    independent of the gradient's magnitude (Adam, AdamW)
    ============  ===================  ==============================================================

    The scales stay on the CPU in their own dtype, whatever happens to the parameter. The sums are computed in float64
    and cached for each device and dtype; the cache is not pickled or copied.

    Attributes:
        name: Name of the layer in ``layers``.
        layers: Layers that were given a GradMult together by :func:`timm_rep.attach_grad_mults`, None if there are
            none.
    """
    name: str = ''
    layers: Optional[MultipliedLayers] = None

    def __init__(self, csla: Csla, scales: Mapping[str, torch.Tensor], rows: slice = slice(None)):
        """
        Args:
            csla: Branches of the block.
            scales: Constant scale of each conv branch, signed, (out_channels,). The values are copied.
            rows: Rows of the kernel that this multiplier is for, all by default. A shard on dim 0 has fewer.

        Raises:
            ValueError: A scale is missing, has the wrong shape or is not finite.
        """
        self.csla = csla
        self.start, self.stop, _ = rows.indices(csla.out_channels)
        self.scales = {name: scale.to('cpu', copy=True) for name, scale in csla.check_scales(scales).items()}
        for name, scale in self.scales.items():
            if not scale.isfinite().all():
                raise ValueError(f'The scales of the branch {name!r} must be finite.')
        self._cache: Dict[Tuple[Any, ...], List[Region]] = {}

    def __repr__(self) -> str:
        return f'{type(self).__name__}(shape={self.shape}, branches={[branch.name for branch in self.csla.branches]})'

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, '_cache': {}}

    @property
    def shape(self) -> Tuple[int, int, int, int]:
        """Shape of the kernel, or of its rows: (rows, in_channels / groups, height, width)."""
        return (self.stop - self.start, *self.csla.kernel_shape[1:])

    def rows(self, start: int, stop: int) -> 'GradMult':
        """The multiplier of the rows ``start:stop`` of the kernel, for a shard on dim 0."""
        return GradMult(self.csla, self.scales, slice(self.start + start, self.start + stop))

    def vectors(self, rule: str, device: torch.device, dtype: torch.dtype) -> List[Region]:
        """The summed multipliers of each region of the whole kernel, cached.

        Args:
            rule: 'squared' or 'absolute'.
            device: Device of the vectors.
            dtype: Dtype of the vectors.

        Returns:
            (kernel size, vector of shape (out_channels, 1, 1, 1), diagonal) of each region, the largest region first
            and the diagonal last. Branches that reach the same region are summed.

        Raises:
            OverflowError: A sum exceeds the range of the dtype.
        """
        key = (rule, device, dtype)
        if key not in self._cache:
            power = {'squared': torch.square, 'absolute': torch.abs}[rule]
            regions: Dict[Tuple[bool, Any], torch.Tensor] = {}  # by being diagonal and kernel size
            for branch in self.csla.branches:
                diagonal = branch.name not in self.scales  # an identity branch, whose constant scale is 1
                scale = torch.ones(self.csla.out_channels, device='cpu') if diagonal else self.scales[branch.name]
                region = (diagonal, branch.kernel_size)
                regions[region] = regions.get(region, 0) + power(scale.double())
            largest = max(x.max().item() for x in regions.values())
            if largest > torch.finfo(dtype).max:
                raise OverflowError(
                    f'The multiplier of a kernel of shape {self.shape} must be in the range of {dtype}, got '
                    f'{largest:.3g}: keep the parameters in float32 or bfloat16, or use smaller scales.')
            ordered = sorted(regions, key=lambda r: (r[0], -r[1][0] * r[1][1]))
            self._cache[key] = [
                (kernel_size, regions[diagonal, kernel_size].to(device, dtype)[:, None, None, None], diagonal)
                for diagonal, kernel_size in ordered
            ]
        return self._cache[key]

    def multiply(
            self,
            x: torch.Tensor,
            rule: str,
            out: Optional[torch.Tensor] = None,
            start: int = 0,
    ) -> torch.Tensor:
        """``x`` times the multiplier's rows from ``start`` on.

        Args:
            x: Rows of a gradient or update, (rows, in_channels / groups, height, width).
            rule: 'squared' or 'absolute'.
            out: Output tensor, not x itself; a new tensor if None.
            start: Index of the first row of x within the kernel.

        Returns:
            The product, of the shape and dtype of x.
        """
        out = torch.empty_like(x) if out is None else out
        (kernel_size, vector, diagonal), *others = regions = self._rows_of_vectors(x, rule, start)
        if kernel_size == self.csla.kernel_size and not diagonal:
            torch.mul(x, vector, out=out)
            self._add_regions(out, x, others, start)
        else:
            self._add_regions(out.zero_(), x, regions, start)
        return out

    def add_product(self, target: torch.Tensor, x: torch.Tensor, rule: str, start: int = 0) -> None:
        """Add ``x`` times the multiplier's rows from ``start`` on to ``target``, in place; arguments of multiply()."""
        self._add_regions(target, x, self._rows_of_vectors(x, rule, start), start)

    def _rows_of_vectors(self, x: torch.Tensor, rule: str, start: int) -> List[Region]:
        first = self.start + start
        return [(size, vector[first:first + x.shape[0]], diagonal)
                for size, vector, diagonal in self.vectors(rule, x.device, x.dtype)]

    def _add_regions(self, target: torch.Tensor, x: torch.Tensor, regions: List[Region], start: int) -> None:
        (height, width), first = self.csla.kernel_size, self.start + start
        for (h, w), vector, diagonal in regions:
            if diagonal:
                centre = (..., height // 2, width // 2)
                if first + x.shape[0] <= x.shape[1]:
                    target[centre].diagonal(first).addcmul_(x[centre].diagonal(first), vector[:, 0, 0, 0])
                else:  # the diagonal of a grouped kernel starts again in each group
                    rows = torch.arange(x.shape[0], device=x.device)
                    entries = rows, (rows + first) % x.shape[1]
                    target[centre][entries] += x[centre][entries] * vector[:, 0, 0, 0]
            else:
                rows, columns = (slice((whole - part) // 2, (whole + part) // 2)
                                 for whole, part in ((height, h), (width, w)))
                target[..., rows, columns].addcmul_(x[..., rows, columns], vector)

    def dense(self, rule: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The multiplier of every entry, of the kernel's shape, on the CPU, for inspection."""
        return self.multiply(torch.ones(self.shape, dtype=dtype, device='cpu'), rule)


def set_grad_mult(param: torch.Tensor, grad_mult: Optional[GradMult]) -> None:
    """Attach a multiplier to a parameter, where RepSGD and RepAdamW find it.

    Args:
        param: A convolution kernel. A shard on dim 0 (a DTensor of FSDP2) gets the multiplier's rows.
        grad_mult: Multiplier of the whole kernel; None removes the attached one.

    Raises:
        ValueError: The shapes differ, or the parameter is sharded on a dim other than 0.
    """
    if grad_mult is not None and tuple(param.shape) != grad_mult.shape:
        raise ValueError(
            f'Expected a GradMult of shape {tuple(param.shape)}, the shape of the parameter, but got {grad_mult}.')
    if grad_mult is not None and to_local(param) is not param:
        grad_mult = _rows_of_shard(param, grad_mult)
    setattr(param, _ATTRIBUTE, grad_mult)


def get_grad_mult(param: torch.Tensor) -> Optional[GradMult]:
    """The multiplier attached to a parameter, or None."""
    return getattr(param, _ATTRIBUTE, None)


def to_local(x: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that this process holds; any other tensor itself."""
    if type(x) in (torch.Tensor, nn.Parameter):
        return x
    return x.to_local() if hasattr(x, 'to_local') else x


def _rows_of_shard(param: torch.Tensor, grad_mult: GradMult) -> GradMult:
    sharded = [dim for dim, placement in enumerate(param.placements) if placement.is_shard()]
    if len(sharded) > 1 or not all(param.placements[dim].is_shard(0) for dim in sharded):
        raise ValueError(
            'Expected a kernel sharded on dim 0 over one dim of the mesh for a GradMult, but one of shape '
            f'{tuple(param.shape)} has the placements {param.placements}.')
    start, rows = 0, param.to_local().shape[0]
    for dim in sharded:  # as torch.chunk() splits, so that only the last shards are smaller
        in_each = -(-param.shape[0] // param.device_mesh.size(dim))
        start = min(in_each * param.device_mesh.get_local_rank(dim), param.shape[0])
    return grad_mult.rows(start, start + rows)
