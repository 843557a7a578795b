"""Experiments as data files: their rows, each with the settings of its procedure.

A data file, ``scripts/experiments/NAME.yaml``, has

    what:       what it shows
    claim:      what the paper says, with its own figures; or null
    like:       an experiment whose procedure, seeds, settings and trainings, those of both sizes included, are also
                those of this one, with the changes that follow
    procedure:  of the rows that name none: train, accelerate, quantize
    seeds:      of the rows that name none
    settings:   those that all rows and trainings share; each procedure takes its own, and has defaults for the others
    trainings:  trainings that rows name in a setting, such as the teacher of weight selection: done once and kept. They
                have the seed of the row, unless they name one; their procedure is train, unless they name search
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
# functions of settings and workspace that return a row
PROCEDURES = {'train': train.train, 'accelerate': accelerate.accelerate, 'quantize': quantize.quantize}
# the settings that a procedure takes, and the trainings of ``trainings``
_SETTINGS = {
    'train': train.DEFAULTS, 'search': train.SEARCH, 'accelerate': accelerate.DEFAULTS, 'quantize': quantize.DEFAULTS}
_DEFAULTS = {key: value for known in _SETTINGS.values() for key, value in known.items()}  # of any of these
_KEYS = ('what', 'claim', 'like', 'procedure', 'seeds', 'settings', 'trainings', 'rows', 'picture', 'cpu', 'gpu')
_SHARED = ('procedure', 'seeds', 'settings', 'trainings')  # with an experiment that is like this one
_ROW_KEYS = ('what', 'paper', 'columns', 'procedure', 'seeds', 'each')
_PICTURE_KEYS = ('rows', 'x', 'y', 'by')
# settings that name a training; ``scales`` may
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
        ValueError: The file is not valid YAML; a key, a setting, a procedure or a training is unknown, or missing; a
            change is of a setting that no row and no training has; or a row has a seed of its own, whose row it would
            not be.
    """
    document = _read(name)
    document = merged(document, document.get(scale) or {})
    missing = [key for key in ('what', 'seeds', 'rows') if not document.get(key)]
    if missing:
        raise ValueError(f'{name}.yaml has no {missing[0]!r}.')
    if 'seed' in (changes or {}):
        raise ValueError(f'seed is of a row, choose among {", ".join(map(str, document["seeds"]))} with --seeds.')
    rows = []
    for row_name, row in _expanded(document['rows']).items():
        where = f'{name}.yaml: row {row_name!r}'
        procedure = row.get('procedure', document.get('procedure', 'train'))
        own = {k: v for k, v in row.items() if k not in _ROW_KEYS}
        if 'seed' in own:
            raise ValueError(f"{where} has 'seed', expected 'seeds'.")
        if procedure not in PROCEDURES:
            raise ValueError(f'{where} has the procedure {procedure!r}, expected one of {", ".join(PROCEDURES)}.')
        for seed in row.get('seeds', document['seeds']):
            settings = _resolved(procedure, own, seed, document, changes or {}, where)
            identity = {'row': row_name}
            if procedure == 'accelerate':
                identity = {column: settings[column] for column in accelerate.COLUMNS}
            rows.append(Row(
                row_name, seed, procedure, settings, identity, row.get('columns') or {}, row.get('what'),
                row.get('paper')))
    taken = {key for row in rows for key in _keys(row.settings)}
    unknown = [key for key in changes or {} if key not in taken]
    if unknown:
        raise ValueError(
            f'{name} takes no setting {unknown[0]!r}, expected some of {", ".join(sorted(taken - {"seed"}))}.')
    for key, value in (changes or {}).items():
        if isinstance(_DEFAULTS[key], bool) and not isinstance(value, bool):
            raise ValueError(f'{key} is True or False, got {value!r}.')
    identities = [(*row.identity.values(), row.seed) for row in rows]
    twice = [identity for identity in identities if identities.count(identity) > 1]
    if twice:
        raise ValueError(f'{name}.yaml has two rows {", ".join(map(str, twice[0]))} with these settings.')
    rows.sort(key=lambda row: document['seeds'].index(row.seed) if row.seed in document['seeds'] else -1)
    return Experiment(name, merged(document, {'settings': changes or {}}), rows)


def _keys(settings: Mapping[str, Any]) -> List[str]:
    """The keys of settings, those of the trainings among them included."""
    nested = (settings.get(key) for key in (*_REFERENCES, 'start'))
    return [*settings, *(key for value in nested if isinstance(value, Mapping) for key in _keys(value))]


def _read(name: str) -> Dict[str, Any]:
    """The data file of an experiment, with what it shares with another one."""
    path = EXPERIMENTS / f'{name}.yaml'
    if not path.is_file():
        raise FileNotFoundError(f'there is no experiment {name!r}: expected one of {", ".join(names())}')
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise ValueError(f'{path.name} is not valid YAML: {" ".join(str(e).split())}') from e
    _check_keys(document, _KEYS, path.name)
    _check_keys(document.get('picture') or {}, _PICTURE_KEYS, f'{path.name}: picture')
    for scale in 'cpu', 'gpu':
        _check_keys(document.get(scale) or {}, _KEYS, f'{path.name}: {scale}')
    if 'like' in document:
        other = _read(document.pop('like'))
        shared = {k: v for k, v in other.items() if k in _SHARED}
        for scale in 'cpu', 'gpu':  # of the other experiment's size first, then for both sizes of this one
            size = {k: v for k, v in (other.get(scale) or {}).items() if k in _SHARED}
            shared[scale] = merged(size, {k: document[k] for k in _SHARED if k in document})
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
    defaults = _SETTINGS[procedure]
    common = document.get('settings') or {}
    _check_keys(own, defaults, where)
    _check_keys(common, _DEFAULTS, where)
    settings = merged(defaults, {k: v for k, v in common.items() if k in defaults})
    settings = merged(settings, {'seed': seed, **own})
    settings = merged(settings, {k: v for k, v in changes.items() if k in defaults})
    missing = [key for key in ('model', 'trained') if key in defaults and settings[key] is None]
    if missing:
        raise ValueError(f'{where} has no {missing[0]!r}.')

    trainings = document.get('trainings') or {}

    def with_trainings(settings: Dict[str, Any]) -> Dict[str, Any]:
        settings = dict(settings)
        for key, value in settings.items():
            if isinstance(value, Mapping):
                settings[key] = with_trainings(value)
            elif key in _REFERENCES and value in trainings:
                training = dict(trainings[value])
                kind, place = training.pop('procedure', 'train'), f'{where}, training {value!r}'
                if kind not in ('train', 'search'):
                    raise ValueError(f"{place} has the procedure {kind!r}, expected 'train' or 'search'.")
                settings[key] = _resolved(kind, training, settings.get('seed', seed), document, changes, place)
            elif key in ('teacher', 'trained') and value is not None:
                raise ValueError(f'{where} has no training {value!r}, expected one of {", ".join(trainings)}.')
        return settings

    return with_trainings(settings)
