"""Results of benchmarks and experiments: printed as tables and kept as JSON, one file for each section and machine."""
import json
import os
import re
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from timm_rep.utils.atomic import locking_folder, replacing_files
from timm_rep.utils.profiling import device_name, versions

__all__ = ['print_table', 'processor', 'read', 'report', 'result_file', 'rows_measured', 'save']

RESULTS = Path(os.environ.get('TIMM_REP_RESULTS') or Path(__file__).parents[1] / 'results')
# environment variables of timm and of this package that change what is measured
_SWITCHES = ('TIMM_FUSED_ATTN', 'TIMM_REP_FUSED_IDLE')


def result_file(section: str, device: torch.device) -> Path:
    """Path of the file of a section for the machine of a device."""
    return RESULTS / re.sub(r'[^a-z0-9]+', '-', device_name(device).lower()).strip('-') / f'{section}.json'


def processor(device: torch.device) -> Optional[str]:
    """Family, model and stepping of the CPU, which virtual machines leave out of its name; None where unknown."""
    info = Path('/proc/cpuinfo')
    if device.type != 'cpu' or not info.is_file():
        return None
    lines = (line.partition(':') for line in info.read_text().splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    keys = [key for key in ('cpu family', 'model', 'stepping') if key in found]
    return ', '.join(f'{key} {found[key]}' for key in keys) or None


def read(section: str, device: torch.device) -> Optional[Dict[str, Any]]:
    """Content of the file of a section, None if it does not exist."""
    path = result_file(section, device)
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except ValueError as e:
        raise ValueError(f'{path} is not valid JSON, move it away: {e}') from e


def _same_conditions(content: Dict[str, Any], settings: Dict[str, Any], device: torch.device) -> bool:
    is_known = content.get('processor') in (None, processor(device))
    return is_known and content['versions'] == versions() and all(content.get(k) == v for k, v in settings.items())


def rows_measured(section: str, device: torch.device, settings: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Rows in the file of a section, empty unless its versions and settings are the current ones."""
    content = read(section, device)
    return content['rows'] if content and _same_conditions(content, settings, device) else []


def save(
        section: str,
        what: str,
        rows: List[Dict[str, Any]],
        device: torch.device,
        settings: Dict[str, Any],
        keys: Sequence[str] = (),
        check: Optional[Callable[[Dict[str, Any]], None]] = None,
) -> Path:
    """Write scripts/results/<machine>/<section>.json; other processes may add rows at the same time.

    Args:
        section: Name of the section.
        what: Description of the rows.
        rows: Results, one dict for each row of the table.
        device: Device they were measured on.
        settings: Further conditions of the measurement. Versions and the command are added.
        keys: Columns that identify a row. Rows of the existing file with other values in these columns are kept if
            they were measured with the same versions, processor and settings. Default: replace the file.
        check: Called with the content of the existing file while no other process writes it: an error if the rows must
            not be added to it, otherwise all its rows are kept. For experiments, whose rows have settings of their own.

    Returns:
        Path of the file.
    """
    path = result_file(section, device)
    commands = [_command()]
    with locking_folder(path.parent):
        old = read(section, device)
        if check is not None and old:
            check(old)
        if keys and old:
            before, now = ({tuple(row.get(k) for k in keys): row for row in part} for part in (old['rows'], rows))
            others = len(before.keys() - now.keys())
            if check is not None or _same_conditions(old, settings, device):
                rows = list({**before, **now}.values())
                if others:
                    commands = list(dict.fromkeys([*old['commands'], *commands]))
            elif others:
                print(f'\nRemoved {others} rows of {path}: they were measured under other conditions.')
        content = {
            'section': section,
            'what': ' '.join(what.split()),
            'machine': device_name(device),
            'processor': processor(device),
            'date': date.today().isoformat(),
            'commands': commands,
            'versions': versions(),
            **settings,
            'rows': rows,
        }
        with replacing_files(path.parent) as temporary:
            (temporary / path.name).write_text(json.dumps(content, indent=2) + '\n')
    return path


def _command() -> str:
    switches = [f'{name}={os.environ[name]}' for name in _SWITCHES if name in os.environ]
    arguments = sys.argv[1:]
    if '--minutes' in arguments:  # the limit of a run, after which another one goes on
        limit = arguments.index('--minutes')
        del arguments[limit:limit + 2]
    return shlex.join([*switches, 'python', os.path.relpath(sys.argv[0]), *arguments])


def print_table(rows: List[Dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(k for row in rows for k in row))
    widths = {k: max(len(k), *(len(str(row.get(k, ''))) for row in rows)) for k in columns}
    print('\n' + '  '.join(k.ljust(w) for k, w in widths.items()))
    for row in rows:
        print('  '.join(str(row.get(k, '')).ljust(w) for k, w in widths.items()))


def report(section: str, what: str, rows: List[Dict[str, Any]], *args, **kwargs) -> None:
    """Print rows as a table and :func:`save` them."""
    print_table(rows)
    print(f'\n{save(section, what, rows, *args, **kwargs)}')
