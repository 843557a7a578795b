"""What a conversion did to each FFN of a model."""
import dataclasses
from typing import Any, Dict, List, Optional, Tuple

__all__ = ['ConversionReport', 'ConvertedFfn']


@dataclasses.dataclass(frozen=True)
class ConvertedFfn:
    """A converted FFN.

    Attributes:
        name: Name of the module.
        hidden_features: Hidden channels before the conversion.
        active_features: Hidden channels that keep the activation.
        linear_path: Whether the idle ones became a matrix; if not, they are dropped for more active ones.
        lost_variance: Share of the variance of the FFN's output that the converted one does not reproduce, on the
            calibration images, from 0 to 1. None for a conversion without them.
        macs: Multiply-accumulates of the FFN for one image, before and after. None for a conversion without images.
    """
    name: str
    hidden_features: int
    active_features: int
    linear_path: bool = True
    lost_variance: Optional[float] = None
    macs: Optional[Tuple[int, int]] = None
    held_out_loss: Optional[float] = None
    linear_share: Optional[float] = None
    correction_ridge: Optional[float] = None

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
    """Report of :func:`timm_rep.convert_to_repa`; ``print`` shows it as a table.

    Attributes:
        ffns: The converted FFNs.
        kept: Names of the FFNs that were not converted, with the reason.
        images: Number of calibration images. None for a conversion without them.
        macs: Multiply-accumulates of the model for one image, before and after. None for a conversion without images.
    """
    ffns: List[ConvertedFfn]
    kept: Dict[str, str]
    images: Optional[int] = None
    macs: Optional[Tuple[int, int]] = None

    def as_dict(self) -> Dict[str, Any]:
        """The report as JSON-serializable data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(len(ffn.name) for ffn in self.ffns)
        rows = [f'{"FFN":{width}}  hidden  active  idle  matrices  lost variance  MACs']
        for ffn in self.ffns:
            lost = '-' if ffn.lost_variance is None else f'{ffn.lost_variance:.2%}'
            macs = '-' if ffn.macs is None else f'{ffn.macs[0] / 1e6:.1f} M -> {ffn.macs[1] / 1e6:.1f} M'
            rows.append(
                f'{ffn.name:{width}}  {ffn.hidden_features:6}  {ffn.active_features:6}  {ffn.idle_ratio:4.0%}  '
                f'{ffn.matrices:8}  {lost:>13}  {macs}')
        rows += [f'kept {name}: {reason}' for name, reason in self.kept.items()]
        if self.macs is not None:
            before, after = self.macs
            rows.append(
                f'Model: {before / 1e6:.1f} M -> {after / 1e6:.1f} M MACs ({after / before:.0%}), from {self.images} '
                'images.')
        return '\n'.join(rows)
