"""How the scripts of this folder print what they measured and keep it."""
import json
import os
import re
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any, Dict, List, Sequence

import torch
from tables import RESULTS, write_tables

from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.profiling import device_name, versions

# variables of timm and of this package that a measurement depends on
_SWITCHES = ('TIMM_FUSED_ATTN', 'TIMM_REP_FUSED_IDLE')

__all__ = ['measured', 'print_table', 'report', 'save']


def _path(section: str, device: torch.device) -> Path:
    return RESULTS / re.sub(r'[^a-z0-9]+', '-', device_name(device).lower()).strip('-') / f'{section}.json'


def _depends_on(content: Dict[str, Any], settings: Dict[str, Any]) -> bool:
    """Whether these versions and settings are what a file was measured with."""
    return content['versions'] == versions() and all(content.get(k) == v for k, v in settings.items())


def measured(section: str, device: torch.device, settings: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The rows of the file of a section, if these versions and settings measured them."""
    path = _path(section, device)
    content = json.loads(path.read_text()) if path.is_file() else None
    return content['rows'] if content and _depends_on(content, settings) else []


def save(
        section: str,
        what: str,
        rows: List[Dict[str, Any]],
        device: torch.device,
        settings: Dict[str, Any],
        keys: Sequence[str] = (),
) -> Path:
    """Write results/<machine>/<section>.json, and the tables of all of them.

    Args:
        section: Name of the measurement.
        what: What the rows say.
        rows: The results.
        device: Where they were measured.
        settings: What they depend on besides the versions and the commands, which are kept too.
        keys: Columns that name a row: rows of the file with other names stay, if they depend on the same. Without any
            the file is replaced.

    Returns:
        The path of the file.
    """
    path = _path(section, device)
    switches = [f'{name}={os.environ[name]}' for name in _SWITCHES if name in os.environ]
    commands = [shlex.join([*switches, 'python', os.path.relpath(sys.argv[0]), *sys.argv[1:]])]
    if keys and path.is_file():
        old = json.loads(path.read_text())
        before, now = ({tuple(row.get(k) for k in keys): row for row in of} for of in (old['rows'], rows))
        others = len(before.keys() - now.keys())
        if _depends_on(old, settings):
            rows = list({**before, **now}.values())
            if others:  # measured by what was run before
                commands = list(dict.fromkeys([*old['commands'], *commands]))
        elif others:
            print(f'\n{others} rows of {path}, measured with other settings or versions, are no longer there')
    content = {
        'section': section,
        'what': what,
        'machine': device_name(device),
        'date': date.today().isoformat(),
        'commands': commands,
        'versions': versions(),
        **settings,
        'rows': rows,
    }
    with replacing_files(path.parent) as temporary:
        (temporary / path.name).write_text(json.dumps(content, indent=2) + '\n')
    write_tables(RESULTS)
    return path


def print_table(rows: List[Dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(k for row in rows for k in row))
    widths = {k: max(len(k), *(len(str(row.get(k, ''))) for row in rows)) for k in columns}
    print('\n' + '  '.join(k.ljust(w) for k, w in widths.items()))
    for row in rows:
        print('  '.join(str(row.get(k, '')).ljust(w) for k, w in widths.items()))


def report(section: str, what: str, rows: List[Dict[str, Any]], *args, **kwargs) -> None:
    """Print rows as a table, and :func:`save` them."""
    print_table(rows)
    print(f'\n{save(section, what, rows, *args, **kwargs)}')
