"""Results of the benchmarks and experiments: printed as tables and kept as JSON, one file a section and machine."""
import json
import os
import re
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from tools.tables import KNOWN, RESULTS, write_tables

from timm_rep.utils.atomic import locking_folder, replacing_files
from timm_rep.utils.profiling import device_name, versions

# environment variables of timm and of this package that change what is measured
_SWITCHES = ('TIMM_FUSED_ATTN', 'TIMM_REP_FUSED_IDLE')

__all__ = ['add_row', 'print_table', 'read', 'report', 'result_file', 'rows_measured', 'save']


def result_file(section: str, device: torch.device) -> Path:
    """The file of a section, for the machine of a device."""
    return RESULTS / re.sub(r'[^a-z0-9]+', '-', device_name(device).lower()).strip('-') / f'{section}.json'


def read(section: str, device: torch.device) -> Optional[Dict[str, Any]]:
    """Content of the file of a section, None if there is no such file."""
    path = result_file(section, device)
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except ValueError as e:
        raise ValueError(f'{path} is no file of results, move it away: {e}') from e


def _same_conditions(content: Dict[str, Any], settings: Dict[str, Any]) -> bool:
    return content['versions'] == versions() and all(content.get(k) == v for k, v in settings.items())


def rows_measured(section: str, device: torch.device, settings: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Rows in the file of a section if its versions and settings are the current ones, else an empty list."""
    content = read(section, device)
    return content['rows'] if content and _same_conditions(content, settings) else []


def save(
        section: str,
        what: str,
        rows: List[Dict[str, Any]],
        device: torch.device,
        settings: Dict[str, Any],
        keys: Sequence[str] = (),
) -> Path:
    """Write results/<machine>/<section>.json and regenerate results/README.md.

    Args:
        section: Name of the section.
        what: Description of the rows.
        rows: Results, one dict for each row of the table.
        device: Device they were measured on.
        settings: Other conditions of the measurement. Versions and the command are added.
        keys: Columns that identify a row. Rows of the existing file with other values in these columns are kept if
            they were measured with the same versions and settings. The file is replaced if empty.

    Returns:
        Path of the file.
    """
    path = result_file(section, device)
    commands = [_command()]
    with locking_folder(path.parent):
        old = read(section, device)
        if keys and old:
            before, now = ({tuple(row.get(k) for k in keys): row for row in part} for part in (old['rows'], rows))
            others = len(before.keys() - now.keys())
            if _same_conditions(old, settings):
                rows = list({**before, **now}.values())
                if others:
                    commands = list(dict.fromkeys([*old['commands'], *commands]))
            elif others:
                print(f'\nRemoved {others} rows of {path}: they were measured with other settings or versions.')
        _write(path, section, what, rows, device, settings, commands)
    return path


def add_row(
        section: str,
        what: str,
        row: Dict[str, Any],
        device: torch.device,
        settings: Dict[str, Any],
        keys: Sequence[str],
        summarize: Callable[[List[Dict[str, Any]]], List[Dict[str, Any]]],
) -> Path:
    """Add the row of an experiment to the file of its section; other processes may do so at the same time.

    Args:
        section: Name of the section.
        what: Description of the rows.
        row: The row; it replaces the one with the same values in the columns ``keys``.
        device: Device it was measured on.
        settings: Settings that the rows share.
        keys: Columns that identify a row. All other rows are kept, with the settings that the file has and these lack.
        summarize: Function of all rows that gives those of the table.

    Returns:
        Path of the file.
    """
    path = result_file(section, device)
    with locking_folder(path.parent):
        old = read(section, device) or {'rows': [], 'commands': []}
        rows = {tuple(each.get(k) for k in keys): each for each in [*old['rows'], row]}
        commands = list(dict.fromkeys([*old['commands'], _command()]))
        settings = {**{k: v for k, v in old.items() if k not in KNOWN}, **settings}
        rows = list(rows.values())
        _write(path, section, what, rows, device, {**settings, 'summary': summarize(rows)}, commands)
    return path


def _command() -> str:
    switches = [f'{name}={os.environ[name]}' for name in _SWITCHES if name in os.environ]
    arguments = sys.argv[1:]
    if '--minutes' in arguments:  # the limit of a run, after which another one goes on
        limit = arguments.index('--minutes')
        del arguments[limit:limit + 2]
    return shlex.join([*switches, 'python', os.path.relpath(sys.argv[0]), *arguments])


def _write(
        path: Path,
        section: str,
        what: str,
        rows: List[Dict[str, Any]],
        device: torch.device,
        settings: Dict[str, Any],
        commands: List[str],
) -> None:
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
    with locking_folder(RESULTS):
        write_tables(RESULTS)


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
