"""Report of a conversion."""
import dataclasses
from typing import Any, Dict, List, Optional, Tuple


@dataclasses.dataclass(frozen=True)
class ConvertedFfn:
    """A converted FFN.

    Attributes:
        name: Name of the module.
        hidden_features: Hidden channels before the conversion.
        active_features: Hidden channels that keep the activation.
        linear_path: Whether a matrix replaces the idle channels; if False they were dropped in exchange for more active
            channels.
        lost_variance: Share of the variance of the target that the converted FFN does not reproduce, on the calibration
            images. The target is the FFN's output, with ``compensated`` the output that restores the residual stream of
            the original model. None for a conversion without images.
        macs: Multiply-accumulates of the FFN for one image, before and after. None for a conversion without images.
        held_out: ``lost_variance`` on the held-out calibration images, of the fit to the remaining images; the choice
            between two and three matrices minimizes it. None if no images were held out.
        other_held_out: The same for the alternative that was not chosen, three matrices or two with as many
            multiply-accumulates. None if there was no alternative.
        linear_share: Share of the variance of the target that a linear map of the input explains.
        compensated: Whether the target includes the errors that earlier FFNs left in the residual stream.
        correction_ridge: Damping of the fit to these errors, relative to the variance of every variable. None if only
            their mean is fitted.
    """
    name: str
    hidden_features: int
    active_features: int
    linear_path: bool = True
    lost_variance: Optional[float] = None
    macs: Optional[Tuple[int, int]] = None
    held_out: Optional[float] = None
    other_held_out: Optional[float] = None
    linear_share: Optional[float] = None
    compensated: bool = False
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
        recommended_images: Number of calibration images beyond which more images make little difference.
    """
    ffns: List[ConvertedFfn]
    kept: Dict[str, str]
    images: Optional[int] = None
    macs: Optional[Tuple[int, int]] = None
    recommended_images: Optional[int] = None

    def as_dict(self) -> Dict[str, Any]:
        """The report as JSON-serializable data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(len(ffn.name) for ffn in self.ffns)
        measured = [
            ('lost', 'lost_variance'), ('held out', 'held_out'), ('other form', 'other_held_out'),
            ('linear', 'linear_share')]
        measured = [(title, name) for title, name in measured if any(
            getattr(ffn, name) is not None for ffn in self.ffns)]
        titles = ''.join(f'  {title:>10}' for title, _ in measured)
        rows = [f'{"FFN":{width}}  hidden  active  idle  matrices{titles}  MACs']
        for ffn in self.ffns:
            values = (getattr(ffn, name) for _, name in measured)
            shares = ''.join('           -' if value is None else f'  {value:>10.2%}' for value in values)
            macs = '-' if ffn.macs is None else f'{ffn.macs[0] / 1e6:.1f} M -> {ffn.macs[1] / 1e6:.1f} M'
            rows.append(
                f'{ffn.name:{width}}  {ffn.hidden_features:6}  {ffn.active_features:6}  {ffn.idle_ratio:4.0%}  '
                f'{ffn.matrices:8}{shares}  {macs}')
        if measured:
            rows.append(
                "lost, held out: share of the target's variance that is not reproduced, on all and on held-out images; "
                'other form: held out, with two matrices in place of three or the reverse; linear: share that a linear '
                'map explains')
        plain = [ffn.name for ffn in self.ffns if ffn.lost_variance is not None and not ffn.compensated]
        if plain:
            rows.append(f'without compensation of earlier errors: {", ".join(plain)}')
        rows += [f'kept {name}: {reason}' for name, reason in self.kept.items()]
        if self.macs is not None:
            before, after = self.macs
            rows.append(
                f'Model: {before / 1e6:.1f} M -> {after / 1e6:.1f} M MACs ({after / before:.0%}), from {self.images} '
                f'images; {self.recommended_images} are recommended.')
        return '\n'.join(rows)
