"""The multiplier that puts a structure's prior into the optimizer, in compact form.

`Re-parameterizing Your Optimizers rather than Architectures` (RepOptimizers), equation 3 and appendix A.
"""
from typing import Iterable, List, NamedTuple, Optional, Tuple

import torch

__all__ = ['BranchScale', 'GradMult', 'get_grad_mult', 'local', 'set_grad_mult']

_ATTRIBUTE = 'grad_mult'


class BranchScale(NamedTuple):
    """What one branch adds to the multiplier.

    Attributes:
        kernel_size: (height, width) of the branch's kernel, centred in the target's.
        scale: Its constant scale, signed, (out_channels,).
        diagonal: Whether it reaches only the entries from a channel to itself, as an identity branch does.
    """
    kernel_size: Tuple[int, int]
    scale: torch.Tensor
    diagonal: bool = False


class GradMult:
    """The multiplier of a convolution kernel's gradient or update, O(channels) numbers.

    Entry (c, d, p, q) is multiplied by the sum over the branches that reach it of ``scale[c] ** 2`` (rule 'squared',
    for updates linear in the gradient: SGD) or of ``abs(scale[c])`` (rule 'absolute', for updates that ignore the
    gradient's magnitude: Adam, AdamW).

    The scales stay as they are on the CPU, whatever happens to the parameter; each device and dtype that asks for the
    sums gets a copy of its own, made once.
    """

    def __init__(self, shape: Iterable[int], terms: Iterable[BranchScale], row_offset: int = 0):
        """
        Args:
            shape: (out_channels, in_channels / groups, height, width) of the kernel.
            terms: The branches.
            row_offset: Where the rows of a shard start in the whole kernel: the diagonal depends on it.

        Raises:
            ValueError: There is no term, or one does not fit the shape or is not finite.
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
            raise ValueError('A GradMult has at least one term: without any nothing would be trained.')
        self._vectors = {}

    def __repr__(self) -> str:
        terms = ', '.join(f'{h}x{w}{" diagonal" if diagonal else ""}' for (h, w), _, diagonal in self.terms)
        return f'{type(self).__name__}(shape={self.shape}, terms=[{terms}])'

    def __getstate__(self):
        return {**self.__dict__, '_vectors': {}}

    def rows(self, start: int, stop: int) -> 'GradMult':
        """The multiplier of the rows ``start:stop`` of the kernel, as a shard on dim 0 needs it."""
        terms = [term._replace(scale=term.scale[start:stop]) for term in self.terms]
        return GradMult((len(range(*slice(start, stop).indices(self.shape[0]))), *self.shape[1:]), terms,
                        self.row_offset + start)

    def vectors(
            self,
            rule: str,
            device: torch.device,
            dtype: torch.dtype,
    ) -> List[Tuple[Tuple[int, int], torch.Tensor, bool]]:
        """For each region of the kernel (kernel size, vector (out_channels, 1, 1, 1), diagonal), the largest first.

        Branches that reach the same region are summed.

        Raises:
            OverflowError: A sum is more than the dtype holds.
        """
        key = (rule, device, dtype)
        if key not in self._vectors:
            power = {'squared': torch.square, 'absolute': torch.abs}[rule]
            regions = {}
            for kernel_size, scale, diagonal in self.terms:
                region = (diagonal, kernel_size)
                regions[region] = regions.get(region, 0) + power(scale.double())
            largest = max(x.max().item() for x in regions.values())
            if largest > torch.finfo(dtype).max:
                raise OverflowError(
                    f'The multiplier of a kernel of shape {self.shape} reaches {largest:.3g}, more than {dtype} holds: '
                    'keep the parameters in float32 or bfloat16.')
            ordered = sorted(regions, key=lambda r: (r[0], -r[1][0] * r[1][1]))
            self._vectors[key] = [
                (kernel_size, regions[diagonal, kernel_size].to(device, dtype)[:, None, None, None], diagonal)
                for diagonal, kernel_size in ordered
            ]
        return self._vectors[key]

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
            out: Where to write the product, x itself excluded; a new tensor if None.
            start: The first row of x within the kernel.

        Returns:
            The product.
        """
        out = torch.empty_like(x) if out is None else out
        (kernel_size, vector, diagonal), *others = self._rows_of_vectors(x, rule, start)
        if kernel_size == self.shape[2:] and not diagonal:
            torch.mul(x, vector, out=out)
            self._add_regions(out, x, others, start)
        else:
            self._add_regions(out.zero_(), x, [(kernel_size, vector, diagonal), *others], start)
        return out

    def add_product(self, target: torch.Tensor, x: torch.Tensor, rule: str, start: int = 0) -> None:
        """Add ``x`` times the multiplier's rows from ``start`` on to ``target``, in place; see multiply()."""
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
                else:  # in each group it starts anew
                    rows = torch.arange(x.shape[0], device=x.device)
                    entries = rows, (rows + first) % self.shape[1]
                    target[centre][entries] += x[centre][entries] * vector[:, 0, 0, 0]
            else:
                region = (..., *(slice((w - k) // 2, (w + k) // 2) for w, k in zip(self.shape[2:], kernel_size)))
                target[region].addcmul_(x[region], vector)

    def dense(self, rule: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The multiplier of every entry, of the kernel's shape; for inspection, the optimizers never build it."""
        return self.multiply(torch.ones(self.shape, dtype=dtype), rule)


def set_grad_mult(param: torch.Tensor, grad_mult: Optional[GradMult]) -> None:
    """Attach a multiplier to a parameter, where an optimizer of this package finds it; None takes it off.

    Args:
        param: A kernel. Of a shard on dim 0 (a DTensor, as FSDP2 makes them) the multiplier's rows are attached.
        grad_mult: For the whole kernel.

    Raises:
        ValueError: It is for a kernel of another shape, or the parameter is sharded otherwise.
    """
    if grad_mult is not None and tuple(param.shape) != grad_mult.shape:
        raise ValueError(
            f'A GradMult for the shape {grad_mult.shape} does not fit a parameter of shape {tuple(param.shape)}.')
    if grad_mult is not None and local(param) is not param:
        grad_mult = _rows_of_shard(param, grad_mult)
    setattr(param, _ATTRIBUTE, grad_mult)


def get_grad_mult(param: torch.Tensor) -> Optional[GradMult]:
    """The multiplier attached to a parameter, or None."""
    return getattr(param, _ATTRIBUTE, None)


def local(x: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: the shard of a DTensor, any other tensor itself."""
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return x
    return x.to_local() if hasattr(x, 'to_local') else x


def _rows_of_shard(param: torch.Tensor, grad_mult: GradMult) -> GradMult:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    if tuple(shape[1:]) != grad_mult.shape[1:]:
        raise ValueError(
            f'A GradMult goes to a kernel that is sharded on dim 0, this one of shape {tuple(param.shape)} has the '
            f'placements {param.placements}.')
    return grad_mult.rows(offset[0], offset[0] + shape[0])
