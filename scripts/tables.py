#!/usr/bin/env python3
"""Write the tables and pictures of README.md and docs/ from the files of scripts/results.

``--csv DIR`` writes these files as CSV instead.

A table stands between the lines ``<!-- results: NAME -->`` and ``<!-- end -->`` of a document. What is in it is
declared in scripts/results/tables.yaml, by NAME:

    columns:  by heading, what the cells of the column are
    rows:     by label, what the cells of the row are; or a list of values of the column ``by``, which are the labels
    by:       column that tells the rows of a list apart
    heading:  heading of the labels (empty)
    ...       what all cells are

A cell is a figure of a file of results. It is described by what is said of its table, column and row together:

    file:     path in scripts/results, without the suffix; or a list of them, whose rows have different seeds
    where:    values of columns, which choose rows of the file; ``{label}`` in them is the label of the table's row
    get:      column of the figure, or the keys of a nested one: the mean over the rows chosen, and the standard
              deviation where there are several
    over:     column by which each is divided
    minus:    ``where`` of the rows that are subtracted, paired by file and seed
    reach:    ``where`` of rows whose last figure is to be reached, for a ``get`` of lists, such as the accuracy after
              each epoch: the cell is the number of figures until then, paired by file and seed
    digits:   decimals (as in the file)
    spread:   whether to state the standard deviation (true)
    value:    a figure of a paper or another text, in place of all of the above

A row may describe a single cell by ``{HEADING: {...}}``, give its text by ``{HEADING: TEXT}``, or leave it empty by
``{HEADING: null}``.

scripts/results/pictures.yaml declares the pictures by their path: ``title``, ``x`` and ``y`` (labels), ``log`` (of x),
``limits`` (of y), and ``series``: by label and x, the figure as for a cell, or only the row (``where: {row: ...}``); or
by label a list of points, each a pair of figures, x and y.
"""
import argparse
import csv
import functools
import itertools
import json
import operator
import os
import re
import statistics
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import yaml

from timm_rep.plotting import style_axes
from timm_rep.utils.atomic import replacing_files

ROOT = Path(__file__).parents[1]
RESULTS = Path(os.environ.get('TIMM_REP_RESULTS') or ROOT / 'scripts' / 'results')
DECLARATIONS = ROOT / 'scripts' / 'results' / 'tables.yaml'
PICTURES = DECLARATIONS.with_name('pictures.yaml')
_CELL_KEYS = ('file', 'where', 'get', 'over', 'minus', 'reach', 'digits', 'spread', 'value')
_TABLE = re.compile(r'(<!-- results: (\S+) -->\n).*?(<!-- end -->)', re.DOTALL)


def documents() -> List[Path]:
    """The documents that may have tables."""
    return [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]


def _figures(cell: Mapping[str, Any], where: Mapping[str, Any], name: str) -> Dict[Tuple[int, str], float]:
    """The figures of the chosen rows, by seed and file."""
    files = [cell['file']] if isinstance(cell['file'], str) else cell['file']
    keys = [cell['get']] if isinstance(cell['get'], str) else cell['get']
    found: Dict[Tuple[int, str], float] = {}
    for file in files:
        for row in json.loads((RESULTS / f'{file}.json').read_text())['rows']:
            if any(row.get(key) != value for key, value in where.items()):
                continue
            seed = row.get('seed', 0)
            if any(seed == other for other, _ in found):
                raise ValueError(f'Table {name}: two rows of {_json(files)} have {where} and the seed {seed}.')
            figure = functools.reduce(lambda part, key: part[key], keys, row)
            found[seed, file] = figure / row[cell['over']] if 'over' in cell else figure
    if not found:
        raise ValueError(f'Table {name}: no row of {_json(files)} has {where}.')
    return dict(sorted(found.items()))


def _json(files: Sequence[str]) -> str:
    return ', '.join(f'{file}.json' for file in files)


def _steps_to_reach(curve: Sequence[float], other: Sequence[float], name: str) -> int:
    """Number of figures of a curve until it reaches the last one of another curve."""
    reached = [i for i, figure in enumerate(curve, 1) if figure >= other[-1]]
    if not reached:
        raise ValueError(f'Table {name}: a curve up to {max(curve)} never reaches {other[-1]}.')
    return reached[0]


def _text(cell: Mapping[str, Any], name: str) -> str:
    """The text of a cell."""
    if 'value' in cell:
        return '' if cell['value'] is None else str(cell['value'])
    where = cell.get('where', {})
    by_seed = _figures(cell, where, name)
    others = cell.get('minus') or cell.get('reach')
    if others:
        found = _figures(cell, {**where, **others}, name)
        if by_seed.keys() != found.keys():
            expected, got = (', '.join(f'{seed} of {file}' for seed, file in part) for part in (by_seed, found))
            raise ValueError(f'Table {name}: seeds must be {expected} for {others}, got {got}.')
        combine = operator.sub if 'minus' in cell else functools.partial(_steps_to_reach, name=name)
        by_seed = {key: combine(figure, found[key]) for key, figure in by_seed.items()}
    figures = list(by_seed.values())
    sign = '+' if 'minus' in cell else ''
    if len(figures) > 1:
        digits = cell.get('digits', 2)
        mean = f'{statistics.fmean(figures):{sign}.{digits}f}'
        return f'{mean} ± {statistics.stdev(figures):.{digits}f}' if cell.get('spread', True) else mean
    return f'{figures[0]:{sign}.{cell["digits"]}f}' if 'digits' in cell else str(figures[0])


def _merged(*parts: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    parts = [part or {} for part in parts]
    found = {key: value for part in parts for key, value in part.items() if key in _CELL_KEYS}
    return {**found, 'where': {key: value for part in parts for key, value in part.get('where', {}).items()}}


def _labelled(cell: Mapping[str, Any], label: str) -> Dict[str, Any]:
    """A cell with the label of its row in the values of ``where``, ``minus`` and ``reach``."""
    choices = {part: {
        key: value.replace('{label}', label) if isinstance(value, str) else value
        for key, value in cell[part].items()} for part in ('where', 'minus', 'reach') if part in cell}
    return {**cell, **choices}


def table(name: str, declared: Mapping[str, Any]) -> str:
    """A table as Markdown.

    Raises:
        ValueError: No row of a file is as the cell says.
    """
    columns, rows = declared['columns'], declared['rows']
    if isinstance(rows, list):
        rows = {f'`{value}`': {'where': {declared['by']: value}} for value in rows}
    lines = [[declared.get('heading', ''), *columns], ['---'] * (1 + len(columns))]
    for label, row in rows.items():
        row, cells = row or {}, []
        for heading, column in columns.items():
            own = row.get(heading, {})
            if not isinstance(own, Mapping):
                own = {'value': own}
            cells.append(_text(_labelled(_merged(declared, column, row, own), label), name))
        lines.append([label, *cells])
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


@functools.cache
def _declarations() -> Dict[str, Dict[str, Any]]:
    return yaml.safe_load(DECLARATIONS.read_text())


def updated(text: str) -> str:
    """A document with its tables as of the files of results."""
    declared = _declarations()

    def replace(match: re.Match) -> str:
        name = match[2]
        if name not in declared:
            raise ValueError(f'scripts/results/tables.yaml has no table {name!r}, expected one of {list(declared)}.')
        return f'{match[1]}\n{table(name, declared[name])}\n{match[3]}'

    return _TABLE.sub(replace, text)


def draw(name: str, declared: Mapping[str, Any]):
    """A picture as a matplotlib Figure: means over the seeds and their standard deviations."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(6.5, 4), layout='constrained')
    axes = figure.subplots()
    for (label, series), marker in zip(declared['series'].items(), itertools.cycle('osD^v')):
        points = []
        for x, cell in series.items() if isinstance(series, Mapping) else series:
            if isinstance(x, Mapping):
                x = statistics.fmean(_figures(x, x.get('where', {}), name).values())
            cell = _merged(declared, cell if isinstance(cell, Mapping) else {'where': {'row': cell}})
            figures = [*_figures(cell, cell['where'], name).values()]
            points.append((x, statistics.fmean(figures), statistics.stdev(figures) if len(figures) > 1 else 0.))
        axes.errorbar(*zip(*points), label=label, marker=marker, capsize=3)
    if declared.get('log'):
        axes.set_xscale('log')
    axes.set_ylim(declared.get('limits'))
    style_axes(axes, declared['title'], declared['x'], declared['y'])
    axes.legend(frameon=False, fontsize=8)
    return figure


def _flat(row: Mapping[str, Any], prefix: str = '') -> Dict[str, Any]:
    """A row with nested figures under names joined by points."""
    found: Dict[str, Any] = {}
    for key, value in row.items():
        found.update(_flat(value, f'{prefix}{key}.') if isinstance(value, Mapping) else {prefix + key: value})
    return found


def write_csv(folder: Path) -> None:
    """Write the rows of each file of results as MACHINE.SECTION.csv; lists become JSON."""
    with replacing_files(folder) as temporary:
        for path in sorted(RESULTS.glob('*/*.json')):
            rows = [_flat(row) for row in json.loads(path.read_text())['rows']]
            with (temporary / f'{path.parent.name}.{path.stem}.csv').open('w', newline='') as f:
                writer = csv.DictWriter(f, dict.fromkeys(key for row in rows for key in row))
                writer.writeheader()
                writer.writerows(
                    {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
                    for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--csv', type=Path, metavar='DIR', help='write the files of results there, as CSV')
    args = parser.parse_args()
    if args.csv is not None:
        return write_csv(args.csv)
    for path in documents():
        before = path.read_text()
        after = updated(before)
        if after != before:
            with replacing_files(path.parent) as temporary:
                (temporary / path.name).write_text(after)
            print(path.relative_to(ROOT))
    for name, declared in yaml.safe_load(PICTURES.read_text()).items():
        path = ROOT / name
        with replacing_files(path.parent) as temporary:
            draw(name, declared).savefig(temporary / path.name, dpi=100)


if __name__ == '__main__':
    main()
