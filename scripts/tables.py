#!/usr/bin/env python3
"""Write results/README.md: what the scripts of this folder measured, as tables, made of the JSON files beside it."""
import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, List

from timm_rep.utils.atomic import replacing_files

RESULTS = Path(os.environ.get('TIMM_REP_RESULTS') or Path(__file__).parent / 'results')

_HEAD = """# What was measured

Made by `python scripts/tables.py` of the JSON files beside it, which a script writes when it has measured something;
every number is from one of them. The sides of a comparison took turns in one process, and medians count: how many times
as fast one side is as another is the median over the rounds, not the quotient of the medians. Spread: half of what lies
between the quartiles of a side's rounds, in percent of its median.
"""
# of the machine and the run; what else a file has are settings, and belong to the table
_KNOWN = ('section', 'what', 'machine', 'date', 'commands', 'versions', 'rows', 'settings')


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ', '.join(f'{key} {_cell(item)}' for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (', ' if len(value) > 3 else ' x ').join(map(_cell, value))
    if value is None:
        return ''
    return ('yes' if value else 'no') if isinstance(value, bool) else str(value)


def _table(rows: List[Dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ['---'] * len(columns), *([_cell(row.get(key)) for key in columns] for row in rows)]
    return '\n'.join(f'| {" | ".join(cell.replace("|", "/") for cell in line)} |' for line in lines)


def _section(content: Dict[str, Any]) -> str:
    settings = {**content, **content.get('settings', {})}
    settings = [f'{key} {_cell(value)}' for key, value in settings.items() if key not in _KNOWN and _cell(value)]
    versions = [f'{name} {version}' for name, version in content['versions'].items()]
    commands = ', '.join(f'`{command}`' for command in content['commands'])
    run = [commands, content['date'], ', '.join(versions), ', '.join(settings)]
    return '\n\n'.join((
        f'### {content["section"]}',
        ' '.join(content['what'].split()),
        '; '.join(part for part in run if part) + '.',
        _table(content['rows']),
    ))


def tables(results: Path) -> str:
    """The text, of a folder with one folder a machine."""
    parts = [_HEAD.strip()]
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        contents = [json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))]
        if contents:
            parts += [f'## {contents[0]["machine"]}', *map(_section, contents)]
    return '\n\n'.join(parts) + '\n'


def write_tables(results: Path) -> None:
    """Write them into README.md of that folder."""
    text = tables(results)
    with replacing_files(results) as temporary:
        (temporary / 'README.md').write_text(text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_tables(RESULTS)
    print(RESULTS / 'README.md')


if __name__ == '__main__':
    main()
