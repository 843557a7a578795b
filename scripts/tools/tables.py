#!/usr/bin/env python3
"""Write the tables of results/README.md from the JSON files beside it, which the benchmark scripts write."""
import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, List

from timm_rep.utils.atomic import replacing_files

RESULTS = Path(os.environ.get('TIMM_REP_RESULTS') or Path(__file__).parents[1] / 'results')

# README.md is written by hand up to this line, and by this script below it
_GENERATED = '<!-- Below this line: written by scripts/tools/tables.py from the JSON files in this folder. -->'
# keys of a file with a place of their own; all others are settings
KNOWN = ('section', 'what', 'machine', 'date', 'commands', 'versions', 'rows', 'summary', 'settings')


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ', '.join(f'{key} {_cell(item)}' for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return (', ' if len(value) > 3 else ' x ').join(map(_cell, value))
    if value is None:
        return ''
    return ('yes' if value else 'no') if isinstance(value, bool) else str(value)


def table(rows: List[Dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ['---'] * len(columns), *([_cell(row.get(key)) for key in columns] for row in rows)]
    return '\n'.join(f'| {" | ".join(cell.replace("|", "/") for cell in line)} |' for line in lines)


def _section(content: Dict[str, Any]) -> str:
    settings = {**content, **content.get('settings', {})}
    settings = [f'{key} {_cell(value)}' for key, value in settings.items() if key not in KNOWN and _cell(value)]
    versions = [f'{name} {version}' for name, version in content['versions'].items()]
    commands = ', '.join(f'`{command}`' for command in content['commands'])
    run = [commands, content['date'], ', '.join(versions), ', '.join(settings)]
    return '\n\n'.join((
        f'### {content["section"]}',
        ' '.join(content['what'].split()),
        '; '.join(part for part in run if part) + '.',
        table(content.get('summary') or content['rows']),
    ))


def tables(results: Path) -> str:
    """The new text of README.md: its part written by hand, then one table per JSON file, by machine.

    Args:
        results: Folder with one subfolder per machine.
    """
    readme = results / 'README.md'
    head = readme.read_text().partition(_GENERATED)[0].strip() if readme.is_file() else '# Results'
    parts = [head, _GENERATED]
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        contents = [json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))]
        if contents:
            parts += [f'## {contents[0]["machine"]}', *map(_section, contents)]
    return '\n\n'.join(parts) + '\n'


def write_tables(results: Path) -> None:
    """Bring README.md in the folder up to date with the JSON files of its subfolders."""
    text = tables(results)
    with replacing_files(results) as temporary:
        (temporary / 'README.md').write_text(text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_tables(RESULTS)
    print(RESULTS / 'README.md')


if __name__ == '__main__':
    main()
