"""The JSON files of a model folder: measured figures of a model card, and the report of an acceleration."""
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from timm_rep.hub import WEIGHTS_NAME, sha256
from timm_rep.utils.files import Sidecar

__all__ = [
    'METRICS_NAME', 'PREDICTIONS_NAME', 'REPORT_NAME', 'AccelerationReport', 'Accuracy', 'Cited', 'Cost', 'Form',
    'Metrics', 'read_metrics',
]

METRICS_NAME = 'metrics.json'
PREDICTIONS_NAME = 'predictions.csv'
REPORT_NAME = 'report.json'


@dataclass(frozen=True)
class Accuracy:
    """Measured accuracy, in percent.

    Attributes:
        split: Name of the folder of the images.
        date: Date in ISO format.
        weights: SHA-256 of the weights.
        of: Name of the measured folder, if another form of the model was measured.
    """
    top1: float
    top5: float
    images: int
    split: str
    machine: str
    date: str
    versions: Dict[str, str]
    weights: str = ''
    of: Optional[str] = None


@dataclass(frozen=True)
class Form:
    """Parameters, multiply-accumulates of one image in 1e9, and throughput of a model, unfolded, folded or in int8."""
    params: int
    gmacs: float
    images_per_second: float

    def __post_init__(self) -> None:
        if self.images_per_second <= 0:
            raise ValueError(f'images_per_second must be positive, got {self.images_per_second!r}.')


@dataclass(frozen=True)
class Cost:
    """Measured size and speed.

    Attributes:
        forms: Figures by form, including 'folded'.
        img_size: Height and width of the images.
        date: Date in ISO format.
        versions: Versions of the software, including 'torch'.
        weights: SHA-256 of the weights.
    """
    forms: Dict[str, Form]
    batch_size: int
    img_size: Sequence[int]
    dtype: str
    machine: str
    date: str
    versions: Dict[str, str]
    weights: str = ''

    def __post_init__(self) -> None:
        for name, key in ('forms', 'folded'), ('versions', 'torch'):
            if key not in getattr(self, name):
                raise ValueError(f'{name} must have {key!r}, got {list(getattr(self, name))}.')


@dataclass(frozen=True)
class Cited:
    """A figure from another source."""
    what: str
    value: Union[float, str]
    source: str


@dataclass(frozen=True)
class Metrics(Sidecar):
    """Figures of a model card; ``dataset`` is the name of the images."""
    dataset: Optional[str] = None
    accuracy: Optional[Accuracy] = None
    cost: Optional[Cost] = None
    cited: Optional[List[Cited]] = None


def read_metrics(folder: Path) -> Metrics:
    """Figures in metrics.json of a folder, without those measured with other weights than the present ones.

    Raises:
        RuntimeError: The file cannot be read, or a field is missing or of another type.
    """
    path = folder / METRICS_NAME
    if not path.is_file():
        return Metrics()
    metrics = Metrics.from_json(path)
    weights = sha256(folder / WEIGHTS_NAME) if (folder / WEIGHTS_NAME).is_file() else None
    stale = {name: None for name in ('accuracy', 'cost')
             if getattr(metrics, name) is not None and getattr(metrics, name).weights != weights}
    return replace(metrics, **stale)


@dataclass(frozen=True)
class AccelerationReport(Sidecar):
    """Results of ``timm-rep accelerate``.

    Attributes:
        figures: Accuracy, size and speed by model, see :func:`timm_rep.accelerate.measure`.
        conversion: Report of the conversion, as a mapping.
        command: Command that repeats it.
    """
    figures: Dict[str, Dict[str, Any]]
    conversion: Dict[str, Any]
    command: str
    machine: str
    versions: Mapping[str, str]
