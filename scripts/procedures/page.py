"""Tables and pictures of experiments, made from their results: one page, and a picture beside each file of results."""
import json
import re
import statistics
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from procedures.experiment import Experiment, load, names
from tools.tables import table

from timm_rep.plotting import plot_curves, plot_means
from timm_rep.utils.atomic import locking_folder, replacing_files

__all__ = ['summarize', 'write_page']

PAGE = 'experiments.md'
# columns that have a deviation over the seeds
_MEASURED = ('top-1', 'top-1 change', 'change')
_NOT_SHOWN = ('seed', 'settings', 'curve')
_HEAD = """# Experiments

The claims of the papers at a size that anyone can repeat: `scripts/experiments.py run NAME`. An experiment is a data
file, `scripts/experiments/NAME.yaml`. Accuracies are top-1 in percent of the 10,000 validation images of CIFAR-10, if
nothing else is said, as mean over the seeds ± standard deviation. Figures of the papers are marked as theirs: other
data, larger models, longer trainings; only differences between rows compare. Minutes are CPU time of the training, on a
GPU wall-clock time.

Written by `scripts/experiments.py report` from the JSON files in the folders beside it.
"""


def summarize(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> List[Dict[str, Any]]:
    """The rows of all seeds as one: numbers as means, accuracies also with their standard deviation.

    Args:
        rows: Rows of the results.
        keys: Columns that tell rows from others, the seed aside.
    """
    summary = []
    for group in _groups(rows, keys):
        mean: Dict[str, Any] = {key: group[0].get(key) for key in keys if group[0].get(key) is not None}
        mean['seeds'] = len(group)
        for column in dict.fromkeys(column for row in group for column in row):
            if column in _NOT_SHOWN or column in keys:
                continue
            values = [row[column] for row in group if column in row]
            mean[column] = _mean(values)
            if column in _MEASURED and len(values) > 1:
                mean[f'{column} ±'] = round(statistics.stdev(values), 2)
        summary.append(mean)
    return summary


def _groups(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> List[List[Mapping[str, Any]]]:
    groups: Dict[tuple, List[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return list(groups.values())


def _mean(values: Sequence[Any]) -> Any:
    if all(isinstance(value, Mapping) for value in values):
        return {key: _mean([value[key] for value in values if key in value]) for key in values[0]}
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return values[0] if len(set(values)) == 1 else float(f'{statistics.fmean(values):.4g}')
    return values[0]


def write_page(results: Path) -> Path:
    """Write the page of all experiments that have results, and their pictures.

    Args:
        results: Folder with one subfolder for each machine.
    """
    parts = [_HEAD]
    for name in names():
        experiment = load(name)
        files = sorted(results.glob(f'*/{name}.json'))
        if files:
            parts += [f'## {name}', _text(experiment.document['what'])]
            claim = experiment.document.get('claim')
            parts += [f'The paper: {_text(claim)}'] if claim else []
            for path in files:
                parts += _section(experiment, path, results)
    with locking_folder(results), replacing_files(results) as temporary:
        (temporary / PAGE).write_text('\n\n'.join(part.strip() for part in parts) + '\n')
    return results / PAGE


def _text(text: str) -> str:
    return ' '.join(text.split())


def _section(experiment: Experiment, path: Path, results: Path) -> List[str]:
    """Heading, table and pictures of one file of results; the picture is drawn."""
    content = json.loads(path.read_text())
    rows = content['rows']
    keys = experiment.keys
    described = _descriptions(experiment)
    order = list(described)
    shown = sorted(summarize(rows, keys), key=lambda row: _index(order, tuple(row.get(key) for key in keys)))
    cells = []
    for row in shown:
        what, paper = described.get(tuple(row.get(key) for key in keys), (None, None))
        row = _with_deviations(row)
        first = {key: row.pop(key) for key in keys if key in row}
        about = {'what': what, "the paper's": paper}
        cells.append({**first, **{k: v for k, v in about.items() if v is not None}, **row})
    columns = list(dict.fromkeys([*keys, 'what', "the paper's", *(column for row in cells for column in row)]))
    columns = [column for column in columns if any(column in row for row in cells)]
    commands = ', '.join(f'`{command}`' for command in content['commands'])
    parts = [
        f'### {content["machine"]}', f'{commands}; {content["date"]}.',
        table([{column: row.get(column) for column in columns} for row in cells])]
    figure = _figure(experiment.document.get('picture') or {}, rows, keys)
    if figure is not None:
        with replacing_files(path.parent) as temporary:
            figure.savefig(temporary / f'{experiment.name}.png', dpi=110)
    pictures = [path.with_suffix('.png'), *sorted(path.parent.glob(f'{experiment.name}--*.png'))]
    return [*parts, *(f'![{p.stem}]({p.relative_to(results).as_posix()})' for p in pictures if p.is_file())]


def _index(order: Sequence[tuple], key: tuple) -> int:
    return order.index(key) if key in order else len(order)


def _descriptions(experiment: Experiment) -> Dict[tuple, tuple]:
    """By the columns that identify a row, in the order of the data file: what it is, and the paper's figure."""
    return {
        tuple(row.identity.get(key) for key in experiment.keys): (row.what, row.paper) for row in experiment.rows}


def _with_deviations(row: Mapping[str, Any]) -> Dict[str, Any]:
    """A row with 'mean ± deviation' in one cell."""
    cells = {k: v for k, v in row.items() if not k.endswith(' ±')}
    for column in _MEASURED:
        if f'{column} ±' in row:
            cells[column] = f'{row[column]:.2f} ± {row[f"{column} ±"]:.2f}'
    return cells


def _figure(
        picture: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        keys: Sequence[str],
) -> Optional[Any]:
    if 'x' in picture:
        points: Dict[str, Dict[float, List[float]]] = {}
        shown = [row for row in rows if all(row.get(picture[axis]) is not None for axis in ('x', 'y', 'by'))]
        for group in _groups(shown, keys):
            series = points.setdefault(str(group[0][picture['by']]), {})
            x = _mean([row[picture['x']] for row in group])  # a measured one differs between the seeds
            series.setdefault(x, []).extend(row[picture['y']] for row in group)
        return plot_means(points, picture['x'], picture['y']) if points else None
    chosen = picture.get('rows') or list(dict.fromkeys(row.get('row') for row in rows if 'curve' in row))
    curves: Dict[str, List] = {}
    for name in chosen:
        found = [(row['minutes'], row['curve']) for row in rows if row.get('row') == name and 'curve' in row]
        longest = max((len(curve) for _, curve in found), default=0)
        found = [run for run in found if len(run[1]) == longest]
        if found:
            curves[name] = found
    return plot_curves(curves) if curves else None


def picture_name(section: str, row: str) -> str:
    """File name of a picture that a row brings."""
    return f'{section}--{re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")}.png'
