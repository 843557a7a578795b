"""How the scripts of this folder print what they measured and keep it."""
import json
import os
import re
import shlex
import sys
from datetime import date
from typing import Any, Dict, List, Sequence

import torch
from tables import RESULTS, write_tables

from timm_rep.atomic import replacing_files
from timm_rep.profiling import machine, versions

__all__ = ['report']


def report(
        section: str,
        what: str,
        rows: List[Dict[str, Any]],
        device: torch.device,
        settings: Dict[str, Any],
        keys: Sequence[str] = (),
) -> None:
    """Print rows of one form as a table, write results/<machine>/<section>.json, and the tables of all of them.

    Args:
        section: Name of the measurement.
        what: What the rows say.
        rows: The results.
        device: Where they were measured.
        settings: What they depend on besides the versions and the commands, which are kept too.
        keys: Columns that name a row: rows of the file with other names stay, if they depend on the same. Without any
            the file is replaced.
    """
    widths = {k: max(len(k), *(len(str(row[k])) for row in rows)) for k in rows[0]}
    print('\n' + '  '.join(k.ljust(w) for k, w in widths.items()))
    for row in rows:
        print('  '.join(str(row[k]).ljust(w) for k, w in widths.items()))
    where = machine(device)
    folder = RESULTS / re.sub(r'[^a-z0-9]+', '-', where.lower()).strip('-')
    path = folder / f'{section}.json'
    commands = [shlex.join(['python', os.path.relpath(sys.argv[0]), *sys.argv[1:]])]
    if keys and path.is_file():
        old = json.loads(path.read_text())
        names = {tuple(row[k] for k in keys) for row in rows}
        others = [row for row in old['rows'] if tuple(row.get(k) for k in keys) not in names]
        if old['versions'] == versions() and all(old.get(k) == v for k, v in settings.items()):
            rows = others + rows
            if others:  # measured by what was run before
                commands = list(dict.fromkeys([*old['commands'], *commands]))
        elif others:
            print(f'\n{len(others)} rows of {path}, measured with other settings or versions, are no longer there')
    content = {
        'section': section,
        'what': what,
        'machine': where,
        'date': date.today().isoformat(),
        'commands': commands,
        'versions': versions(),
        **settings,
        'rows': rows,
    }
    with replacing_files(folder) as temporary:
        (temporary / path.name).write_text(json.dumps(content, indent=2) + '\n')
    write_tables(RESULTS)
    print(f'\n{path}')
