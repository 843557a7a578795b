"""Experiments as data files: their rows, each with the settings of its procedure.

A data file, ``scripts/experiments/NAME.yaml``, has

    what:       what it shows
    claim:      what the paper says, with its own figures; or null
    like:       an experiment whose procedure, seeds, settings and trainings, those of both sizes included, are also
                those of this one, with the changes that follow
    procedure:  of the rows that name none: train, search, accelerate, quantize
    seeds:      of the rows that name none
    settings:   those that all rows and trainings share; each procedure takes its own, and has defaults for the others
    trainings:  trainings that rows name in a setting, such as the teacher of weight selection: done once and kept. They
                have the seed of the row, unless they name one
    rows:       by name, what differs from ``settings``; besides ``what``, ``paper`` (the paper's figure), ``columns``
                (further columns of its results), ``procedure``, ``seeds``, and ``each``: lists of values by setting,
                for a row of each combination
    picture:    what is drawn: ``rows`` whose curves are (all), or ``x``, ``y`` and ``by``, columns of the results
    cpu, gpu:   what the two sizes change of all of these
"""
import itertools
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

import yaml
from procedures import accelerate, quantize, train

__all__ = ['EXPERIMENTS', 'PROCEDURES', 'Experiment', 'Row', 'load', 'names']

EXPERIMENTS = Path(__file__).parents[1] / 'experiments'
# function of settings and workspace that returns a row, and the settings that it takes
PROCEDURES = {
    'train': (train.train, train.DEFAULTS),
    'search': (train.search, train.SEARCH),
    'accelerate': (accelerate.accelerate, accelerate.DEFAULTS),
    'quantize': (quantize.quantize, quantize.DEFAULTS),
}
_KEYS = ('what', 'claim', 'like', 'procedure', 'seeds', 'settings', 'trainings', 'rows', 'picture', 'cpu', 'gpu')
_SHARED = ('procedure', 'seeds', 'settings', 'trainings')  # with an experiment that is like this one
_ROW_KEYS = ('what', 'paper', 'columns', 'procedure', 'seeds', 'each')
# settings that may name a training
_REFERENCES = ('scales', 'teacher', 'trained')


class Row(NamedTuple):
    """
    Attributes:
        name: Name of the row.
        seed: Its seed.
        procedure: Name of its procedure.
        settings: Settings of the procedure, complete.
        identity: The columns that tell the row from others, the seed aside.
        columns: Further columns of the results.
        what: What the row is; None if its name says it.
        paper: The paper's figure, None if there is none.
    """
    name: str
    seed: int
    procedure: str
    settings: Dict[str, Any]
    identity: Dict[str, Any]
    columns: Dict[str, Any]
    what: Optional[str]
    paper: Optional[Any]


class Experiment(NamedTuple):
    """
    Attributes:
        name: Name of the data file.
        document: Its content, with the changes of the size and of the settings.
        rows: Its rows, by seed.
    """
    name: str
    document: Dict[str, Any]
    rows: List[Row]

    @property
    def keys(self) -> List[str]:
        """The columns that tell rows from others, the seed aside."""
        return list(dict.fromkeys(key for row in self.rows for key in row.identity))


def names() -> List[str]:
    """Names of all experiments."""
    return sorted(path.stem for path in EXPERIMENTS.glob('*.yaml'))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Dict[str, Any]:
    """A mapping with changes, and so its mappings."""
    both = {k: merged(base[k], v) if isinstance(v, Mapping) and isinstance(base.get(k), Mapping) else v
            for k, v in changes.items()}
    return {**base, **both}


def load(name: str, scale: str = 'cpu', changes: Optional[Mapping[str, Any]] = None) -> Experiment:
    """Read an experiment.

    Args:
        name: Name of the data file.
        scale: 'cpu' or 'gpu'.
        changes: Settings of all rows and trainings, before all others.

    Raises:
        FileNotFoundError: There is no such experiment.
        ValueError: A key, a setting or a procedure is unknown, or a setting is missing.
    """
    document = _read(name)
    document = merged(document, document.get(scale) or {})
    rows = []
    for row_name, row in _expanded(document['rows']).items():
        where = f'{name}.yaml: row {row_name!r}'
        procedure = row.get('procedure', document.get('procedure', 'train'))
        for seed in row.get('seeds', document['seeds']):
            own = {k: v for k, v in row.items() if k not in _ROW_KEYS}
            settings = _resolved(procedure, own, seed, document, changes or {}, where)
            identity = {'row': row_name}
            if procedure == 'accelerate':
                identity = {column: settings[column] for column in accelerate.COLUMNS}
            rows.append(Row(
                row_name, seed, procedure, settings, identity, row.get('columns') or {}, row.get('what'),
                row.get('paper')))
    rows.sort(key=lambda row: document['seeds'].index(row.seed) if row.seed in document['seeds'] else -1)
    return Experiment(name, merged(document, {'settings': changes or {}}), rows)


def _read(name: str) -> Dict[str, Any]:
    """The data file of an experiment, with what it shares with another one."""
    path = EXPERIMENTS / f'{name}.yaml'
    if not path.is_file():
        raise FileNotFoundError(f'there is no experiment {name!r}: expected one of {", ".join(names())}')
    document = yaml.safe_load(path.read_text())
    _check_keys(document, _KEYS, path.name)
    if 'like' in document:
        other = _read(document.pop('like'))
        shared = {k: v for k, v in other.items() if k in _SHARED}
        for scale in 'cpu', 'gpu':
            shared[scale] = {k: v for k, v in (other.get(scale) or {}).items() if k in _SHARED}
        document = merged(shared, document)
    return document


def _check_keys(mapping: Mapping[str, Any], known, where: str) -> None:
    unknown = [key for key in mapping if key not in known]
    if unknown:
        raise ValueError(f'{where} has {", ".join(map(repr, unknown))}, expected {", ".join(known)}.')


def _expanded(rows: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Rows without ``each``, by name."""
    found = {}
    for name, row in rows.items():
        each = (row or {}).get('each') or {}
        for values in itertools.product(*each.values()):
            chosen = dict(zip(each, values))
            words = (str(v) if not isinstance(v, bool) else k if v else f'not {k}' for k, v in chosen.items())
            found[', '.join([name, *words])] = {**(row or {}), **chosen}
    return found


def _resolved(
        procedure: str,
        own: Mapping[str, Any],
        seed: int,
        document: Mapping[str, Any],
        changes: Mapping[str, Any],
        where: str,
) -> Dict[str, Any]:
    """The complete settings of a procedure, those of the trainings that it names in their places."""
    if procedure not in PROCEDURES:
        raise ValueError(f'{where}: procedure is one of {", ".join(PROCEDURES)}, got {procedure!r}.')
    defaults = PROCEDURES[procedure][1]
    common = document.get('settings') or {}
    _check_keys(own, defaults, where)
    _check_keys({**common, **changes}, {k for _, known in PROCEDURES.values() for k in known}, where)
    settings = merged(defaults, {k: v for k, v in common.items() if k in defaults})
    settings = merged(settings, {'seed': seed, **own})
    settings = merged(settings, {k: v for k, v in changes.items() if k in defaults})
    missing = [key for key in ('model', 'trained') if key in defaults and settings[key] is None]
    if missing:
        raise ValueError(f'{where} has no {missing[0]!r}.')

    def with_trainings(settings: Dict[str, Any]) -> Dict[str, Any]:
        settings = dict(settings)
        for key, value in settings.items():
            if isinstance(value, Mapping):
                settings[key] = with_trainings(value)
            elif key in _REFERENCES and value in (document.get('trainings') or {}):
                training = dict(document['trainings'][value])
                settings[key] = _resolved(
                    training.pop('procedure', 'train'), training, settings.get('seed', seed), document, changes,
                    f'{where}, training {value!r}')
        return settings

    return with_trainings(settings)
