"""The multiplier of a convolution kernel's gradient or update, in compact form.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), equation 3 and appendix A.
"""
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch

__all__ = ['BranchScale', 'GradMult', 'get_grad_mult', 'set_grad_mult', 'to_local']

_ATTRIBUTE = 'grad_mult'


class BranchScale(NamedTuple):
    """One branch of a block, as its multiplier needs it.

    Attributes:
        kernel_size: (height, width) of the branch's kernel, centred in the target's kernel.
        scale: Constant scale of each output channel, signed, (out_channels,).
        diagonal: Whether the branch reaches only the entries from a channel to itself, as an identity branch does.
    """
    kernel_size: Tuple[int, int]
    scale: torch.Tensor
    diagonal: bool = False


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
    """

    def __init__(self, shape: Iterable[int], terms: Iterable[BranchScale], row_offset: int = 0):
        """
        Args:
            shape: (out_channels, in_channels / groups, height, width) of the kernel.
            terms: The branches, at least one. Their scales are copied.
            row_offset: Index of the first row of a shard within the whole kernel; the diagonal depends on it.

        Raises:
            ValueError: There is no term, a term does not fit the shape, or a scale is not finite.
        """
        self.shape = tuple(shape)
        self.row_offset = row_offset
        self.terms: List[BranchScale] = []
        for term in terms:
            scale = term.scale.detach().to('cpu', copy=True)
            fits = len(self.shape) == 4 and all(
                0 < part <= whole and (whole - part) % 2 == 0 for part, whole in zip(term.kernel_size, self.shape[2:]))
            if not fits or scale.shape != self.shape[:1]:
                raise ValueError(
                    f'A branch with kernel {tuple(term.kernel_size)} and {tuple(scale.shape)} scales does not fit a '
                    f'kernel of shape {self.shape}: it needs one scale for each output channel, and a kernel that can '
                    'be centred in it.')
            if not scale.isfinite().all():
                raise ValueError(f'The scales of the branch with kernel {tuple(term.kernel_size)} are not all finite.')
            self.terms.append(BranchScale(tuple(term.kernel_size), scale, term.diagonal))
        if not self.terms:
            raise ValueError('A GradMult needs at least one term: without any nothing would be trained.')
        self._cache: Dict[tuple, list] = {}

    def __repr__(self) -> str:
        terms = ', '.join(f'{h}x{w}{" diagonal" if diagonal else ""}' for (h, w), _, diagonal in self.terms)
        return f'{type(self).__name__}(shape={self.shape}, terms=[{terms}])'

    def __getstate__(self):
        return {**self.__dict__, '_cache': {}}

    def rows(self, start: int, stop: int) -> 'GradMult':
        """The multiplier of the rows ``start:stop`` of the kernel, as a shard on dim 0 needs it."""
        terms = [term._replace(scale=term.scale[start:stop]) for term in self.terms]
        return GradMult((len(terms[0].scale), *self.shape[1:]), terms, self.row_offset + start)

    def vectors(
            self,
            rule: str,
            device: torch.device,
            dtype: torch.dtype,
    ) -> List[Tuple[Tuple[int, int], torch.Tensor, bool]]:
        """The summed multipliers of each region of the kernel, cached.

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
            regions = {}
            for kernel_size, scale, diagonal in self.terms:
                region = (diagonal, kernel_size)
                regions[region] = regions.get(region, 0) + power(scale.double())
            largest = max((x.max().item() for x in regions.values() if x.numel()), default=0.)
            if largest > torch.finfo(dtype).max:
                raise OverflowError(
                    f'The multiplier of a kernel of shape {self.shape} reaches {largest:.3g}, which exceeds the range '
                    f'of {dtype}: keep the parameters in float32 or bfloat16, or use smaller scales.')
            ordered = sorted(regions, key=lambda r: (r[0], -r[1][0] * r[1][1]))
            self._cache[key] = [
                (kernel_size, regions[diagonal, kernel_size].to(device, dtype)[:, None, None, None], diagonal)
                for diagonal, kernel_size in ordered
            ]
        return self._cache[key]

    def table(self, rule: str, device: torch.device) -> torch.Tensor:
        """The summed multipliers by position in the window, for a kernel on a GPU, cached.

        Args:
            rule: 'squared' or 'absolute'.
            device: Device of the table.

        Returns:
            (out_channels, height * width + 1), float32: a multiplier for each position, and last what the entry on the
            diagonal has in addition.
        """
        key = ('table', rule, device)
        if key not in self._cache:
            height, width = self.shape[2:]
            table = torch.zeros(self.shape[0], height * width + 1, dtype=torch.float32, device='cpu')
            window = table[:, :-1].unflatten(1, (height, width))
            for (h, w), vector, diagonal in self.vectors(rule, torch.device('cpu'), torch.float32):
                if diagonal:
                    table[:, -1] += vector[:, 0, 0, 0]
                else:
                    window[:, (height - h) // 2:(height + h) // 2, (width - w) // 2:(width + w) // 2] += vector[..., 0]
            self._cache[key] = [table.to(device)]
        return self._cache[key][0]

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
        if kernel_size == self.shape[2:] and not diagonal:
            torch.mul(x, vector, out=out)
            self._add_regions(out, x, others, start)
        else:
            self._add_regions(out.zero_(), x, regions, start)
        return out

    def add_product(self, target: torch.Tensor, x: torch.Tensor, rule: str, start: int = 0) -> None:
        """Add ``x`` times the multiplier's rows from ``start`` on to ``target``, in place; arguments of multiply()."""
        self._add_regions(target, x, self._rows_of_vectors(x, rule, start), start)

    def _rows_of_vectors(self, x: torch.Tensor, rule: str, start: int) -> List[tuple]:
        stop = start + x.shape[0]
        return [(size, vector[start:stop], diagonal)
                for size, vector, diagonal in self.vectors(rule, x.device, x.dtype)]

    def _add_regions(self, target: torch.Tensor, x: torch.Tensor, regions: List[tuple], start: int) -> None:
        for kernel_size, vector, diagonal in regions:
            if diagonal:
                centre, first = (..., self.shape[2] // 2, self.shape[3] // 2), self.row_offset + start
                if first + x.shape[0] <= self.shape[1]:
                    target[centre].diagonal(first).addcmul_(x[centre].diagonal(first), vector[:, 0, 0, 0])
                else:  # the diagonal of a grouped kernel starts again in each group
                    rows = torch.arange(x.shape[0], device=x.device)
                    entries = rows, (rows + first) % self.shape[1]
                    target[centre][entries] += x[centre][entries] * vector[:, 0, 0, 0]
            else:
                region = (..., *(slice((w - k) // 2, (w + k) // 2) for w, k in zip(self.shape[2:], kernel_size)))
                target[region].addcmul_(x[region], vector)

    def dense(self, rule: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The multiplier of every entry, of the kernel's shape, on the CPU; for inspection only."""
        return self.multiply(torch.ones(self.shape, dtype=dtype, device='cpu'), rule)


def set_grad_mult(param: torch.Tensor, grad_mult: Optional[GradMult]) -> None:
    """Attach a multiplier to a parameter, where RepSGD and RepAdamW find it.

    Args:
        param: A convolution kernel. A shard on dim 0 (a DTensor, as FSDP2 makes them) gets the multiplier's rows.
        grad_mult: Multiplier of the whole kernel; None removes the attached one.

    Raises:
        ValueError: The shapes differ, or the parameter is sharded on another dim than 0.
    """
    if grad_mult is not None and tuple(param.shape) != grad_mult.shape:
        raise ValueError(
            f'A GradMult for the shape {grad_mult.shape} does not fit a parameter of shape {tuple(param.shape)}.')
    if grad_mult is not None and to_local(param) is not param:
        grad_mult = _rows_of_shard(param, grad_mult)
    setattr(param, _ATTRIBUTE, grad_mult)


def get_grad_mult(param: torch.Tensor) -> Optional[GradMult]:
    """The multiplier attached to a parameter, or None."""
    return getattr(param, _ATTRIBUTE, None)


def to_local(x: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that this process holds; any other tensor itself."""
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return x
    return x.to_local() if hasattr(x, 'to_local') else x


def _rows_of_shard(param: torch.Tensor, grad_mult: GradMult) -> GradMult:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    if tuple(shape[1:]) != grad_mult.shape[1:]:
        raise ValueError(
            f'A GradMult needs a kernel that is sharded on dim 0; this one of shape {tuple(param.shape)} has the '
            f'placements {param.placements}.')
    return grad_mult.rows(offset[0], offset[0] + shape[0])
