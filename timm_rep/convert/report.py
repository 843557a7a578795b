"""Report of a conversion from data: what each FFN lost and saved."""
import dataclasses
from typing import Any, Dict, List, Tuple

__all__ = ['ConversionReport', 'ConvertedFfn']


@dataclasses.dataclass(frozen=True)
class ConvertedFfn:
    """What the conversion of one FFN did.

    Attributes:
        name: Name of the module.
        hidden_features: Hidden channels before the conversion.
        active_features: Hidden channels that keep the activation.
        linear_path: Whether the idle ones became a matrix; if not, they are dropped for more active ones.
        lost_variance: Share of the variance of the FFN's output that the converted one does not reproduce, on the
            calibration images, from 0 to 1.
        macs: Multiply-accumulates of the FFN for one image, before and after.
    """
    name: str
    hidden_features: int
    active_features: int
    linear_path: bool
    lost_variance: float
    macs: Tuple[int, int]

    @property
    def idle_ratio(self) -> float:
        """Share of the hidden channels that are idle."""
        return 1 - self.active_features / self.hidden_features

    @property
    def matrices(self) -> int:
        """Number of matrices of the converted FFN."""
        return 2 * (self.active_features > 0) + (self.linear_path and self.active_features < self.hidden_features)


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What :func:`timm_rep.convert.linearize_ffns` did; ``print`` shows it as a table.

    Attributes:
        ffns: The converted FFNs.
        kept: Names of the FFNs that are as they were, with the reason.
        images: Number of calibration images.
        macs: Multiply-accumulates of the model for one image, before and after.
    """
    ffns: List[ConvertedFfn]
    kept: Dict[str, str]
    images: int
    macs: Tuple[int, int]

    def as_dict(self) -> Dict[str, Any]:
        """The report as data that JSON can hold."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(len(ffn.name) for ffn in self.ffns)
        rows = [f'{"FFN":{width}}  hidden  active  idle  matrices  lost variance  MACs']
        rows += [
            f'{ffn.name:{width}}  {ffn.hidden_features:6}  {ffn.active_features:6}  {ffn.idle_ratio:4.0%}  '
            f'{ffn.matrices:8}  {ffn.lost_variance:13.2%}  '
            f'{ffn.macs[0] / 1e6:.1f} M -> {ffn.macs[1] / 1e6:.1f} M' for ffn in self.ffns]
        rows += [f'{name} is as it was: it {reason}.' for name, reason in self.kept.items()]
        before, after = self.macs
        return '\n'.join([
            *rows, f'Model: {before / 1e6:.1f} M -> {after / 1e6:.1f} M MACs ({after / before:.0%}), from '
            f'{self.images} images.'])
