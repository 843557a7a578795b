"""A copy of a published folder, which replaces it when all of its files are written."""
from pathlib import Path
from typing import ContextManager, Optional

from timm_rep.deploy import VERIFICATION_NAME, quantized_files
from timm_rep.hub import CARD_NAME, SCALES_NAME, WEIGHTS_NAME, organization, published_files, write_hashes
from timm_rep.utils.atomic import replacing_files

from ._card import write_card
from ._metrics import METRICS_NAME, PICTURE_NAME, PREDICTIONS_NAME, REPORT_NAME, Metrics


def draft_of(folder: Path) -> ContextManager[Path]:
    """A copy of a folder of published files, in whose place it comes at the end of the context."""
    if folder.is_dir():
        published_files(folder)  # refuses links and subfolders
    return replacing_files(folder, copy=True)


def write_documents(folder: Path, metrics: Metrics, org: Optional[str]) -> None:
    """Write the figures, the model card and the hashes."""
    metrics.to_json(folder / METRICS_NAME)
    if metrics.accuracy is None:
        (folder / PREDICTIONS_NAME).unlink(missing_ok=True)
    write_card(folder, org or organization())
    write_hashes(folder)


def drop_weights(folder: Path) -> None:
    """Remove weights, and what was made from them: scales, int8 form, comparison, report of a conversion, and card."""
    for name in WEIGHTS_NAME, SCALES_NAME, REPORT_NAME, PICTURE_NAME, CARD_NAME:
        (folder / name).unlink(missing_ok=True)
    drop_measured(folder)


def drop_measured(folder: Path) -> None:
    """Remove the int8 form, and the comparison of an export."""
    for path in quantized_files(folder):
        path.unlink()
    (folder / VERIFICATION_NAME).unlink(missing_ok=True)
