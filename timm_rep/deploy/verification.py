"""verify.json: how far the exported files of a folder are from the models that they come from."""
import importlib.metadata
import json
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

import torch

from timm_rep.utils.files import MAPPING, check_fields, read_json
from timm_rep.utils.profiling import device_name, versions

__all__ = ['VERIFICATION', 'read_verifications', 'write_verification']

VERIFICATION = 'verify.json'


def read_verifications(folder: Path) -> Dict[str, Mapping[str, Any]]:
    """What verify.json of a folder says, by name of the file; empty if there is none.

    Raises:
        RuntimeError: It is not a file of :func:`write_verification`.
    """
    path = folder / VERIFICATION
    if not path.exists():
        return {}
    content = read_json(path)
    return dict(check_fields(content, repr(str(path)), {}, dict.fromkeys(content, MAPPING)))


def write_verification(
        folder: Path,
        others: Mapping[str, Mapping[str, Any]],
        name: str,
        measured: Mapping[str, Any],
        packages: Sequence[str] = (),
) -> None:
    """Write verify.json, with machine and versions.

    Args:
        folder: Folder to write to.
        others: Entries to keep, as of :func:`read_verifications`.
        name: Name of the file that was measured.
        measured: What was measured, of types that JSON knows.
        packages: Further packages whose versions matter.
    """
    entry = dict(
        measured,
        machine=device_name(torch.device('cpu')),
        versions={**versions(), **{package: importlib.metadata.version(package) for package in packages}},
    )
    (folder / VERIFICATION).write_text(json.dumps({**others, name: entry}, indent=2) + '\n', encoding='utf-8')
