"""Experiments as data files: their rows, each with the settings of its procedure.

A data file, ``scripts/experiments/NAME.yaml``, has

    what:       what it compares
    claim:      what the paper reports, optional
    procedure:  default of the rows: train (the default), accelerate, compare, linear-path, quantize
    seeds:      default of the rows
    settings:   shared by all rows and trainings; each procedure takes its own and has defaults for the others
    trainings:  named trainings that settings of rows refer to, such as the teacher of weight selection, run once and
                kept. Their seed is the row's unless they name one, their procedure train unless they name search or
                pretrained: a file of weights in the folder --weights-dir
    rows:       by name, the settings that differ; also ``procedure``, ``seeds``, and ``each``: lists of values by
                setting, for a row of each combination
    cpu, gpu:   changes of all of these for the two sizes
"""
import itertools
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

import yaml
from experiments import convert, quantize, train

__all__ = ['EXPERIMENTS', 'PROCEDURES', 'Experiment', 'Row', 'load', 'names']

EXPERIMENTS = Path(__file__).parent
# functions of settings and workspace that return a row
PROCEDURES = {
    'train': train.train, 'accelerate': convert.accelerate, 'compare': train.compare,
    'linear-path': convert.linear_path, 'quantize': quantize.quantize}
# settings of the procedures and of named trainings, with their defaults
_SETTINGS = {
    'train': train.DEFAULTS, 'search': train.SEARCH, 'pretrained': train.PRETRAINED,
    'accelerate': convert.DEFAULTS, 'compare': train.COMPARISON, 'linear-path': convert.FORMS,
    'quantize': quantize.DEFAULTS}
_DEFAULTS = {key: value for known in _SETTINGS.values() for key, value in known.items()}
_KEYS = ('what', 'claim', 'procedure', 'seeds', 'settings', 'trainings', 'rows', 'cpu', 'gpu')
_ROW_KEYS = ('procedure', 'seeds', 'each')
# settings that refer to a training by name; ``scales`` may also be an argument of create_model
_REFERENCES = ('scales', 'other', 'teacher', 'trained')


class Row(NamedTuple):
    """A row of an experiment, for one seed.

    Attributes:
        name: Name of the row.
        seed: Seed.
        procedure: Name of the procedure.
        settings: Settings of the procedure, complete.
        identity: Columns that identify the row, except for the seed.
    """
    name: str
    seed: int
    procedure: str
    settings: Dict[str, Any]
    identity: Dict[str, Any]


class Experiment(NamedTuple):
    """An experiment at one size.

    Attributes:
        name: Name of the data file.
        document: Content of the file with the changes for the size and of the settings.
        rows: Rows in the order of the seeds.
    """
    name: str
    document: Dict[str, Any]
    rows: List[Row]

    @property
    def keys(self) -> List[str]:
        """Columns that identify a row, except for the seed."""
        return list(dict.fromkeys(key for row in self.rows for key in row.identity))


def names() -> List[str]:
    """Names of the data files."""
    return sorted(path.stem for path in EXPERIMENTS.glob('*.yaml'))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Dict[str, Any]:
    """A mapping updated with changes, nested mappings included."""
    both = {k: merged(base[k], v) if isinstance(v, Mapping) and isinstance(base.get(k), Mapping) else v
            for k, v in changes.items()}
    return {**base, **both}


def load(name: str, scale: str = 'cpu', changes: Optional[Mapping[str, Any]] = None) -> Experiment:
    """Read an experiment.

    Args:
        name: Name of the data file.
        scale: 'cpu' or 'gpu'.
        changes: Settings of all rows and trainings that take precedence over the file.

    Raises:
        FileNotFoundError: The experiment does not exist.
        ValueError: The file is not valid YAML; a key, setting, procedure or training is unknown or missing; no row or
            training takes a setting of ``changes``; or a row sets its own seed.
    """
    document = _read(name)
    document = merged(document, document.get(scale) or {})
    missing = [key for key in ('what', 'seeds', 'rows') if not document.get(key)]
    if missing:
        raise ValueError(f'{name}.yaml lacks {missing[0]!r}.')
    if 'seed' in (changes or {}):
        raise ValueError(f'seed cannot be set for all rows: choose from {document["seeds"]} with --seeds.')
    rows = []
    for row_name, row in _expanded(document['rows']).items():
        where = f'{name}.yaml: row {row_name!r}'
        procedure = row.get('procedure', document.get('procedure', 'train'))
        own = {k: v for k, v in row.items() if k not in _ROW_KEYS}
        if 'seed' in own:
            raise ValueError(f"{where}: expected 'seeds', but got 'seed'.")
        if procedure not in PROCEDURES:
            raise ValueError(f'{where}: procedure must be one of {", ".join(PROCEDURES)}, got {procedure!r}.')
        for seed in row.get('seeds', document['seeds']):
            settings = _resolved(procedure, own, seed, document, changes or {}, where)
            identity = {'row': row_name}
            if procedure == 'accelerate':
                identity = {column: settings[column] for column in convert.COLUMNS}
            rows.append(Row(row_name, seed, procedure, settings, identity))
    taken = {key for row in rows for key in _keys(row.settings)}
    unknown = [key for key in changes or {} if key not in taken]
    if unknown:
        raise ValueError(
            f'Settings of {name} must be among {", ".join(sorted(taken - {"seed"}))}, got {unknown[0]!r}.')
    for key, value in (changes or {}).items():
        if isinstance(_DEFAULTS[key], bool) and not isinstance(value, bool):
            raise ValueError(f'{key} must be True or False, got {value!r}.')
    identities = [(*row.identity.values(), row.seed) for row in rows]
    twice = [identity for identity in identities if identities.count(identity) > 1]
    if twice:
        raise ValueError(f'{name}.yaml has two rows {", ".join(map(str, twice[0]))}, expected one.')
    rows.sort(key=lambda row: document['seeds'].index(row.seed) if row.seed in document['seeds'] else -1)
    return Experiment(name, merged(document, {'settings': changes or {}}), rows)


def _keys(settings: Mapping[str, Any]) -> List[str]:
    """Keys of settings and of the trainings that they refer to."""
    nested = (settings.get(key) for key in (*_REFERENCES, 'start'))
    return [*settings, *(key for value in nested if isinstance(value, Mapping) for key in _keys(value))]


def _read(name: str) -> Dict[str, Any]:
    """Content of a data file."""
    path = EXPERIMENTS / f'{name}.yaml'
    if not path.is_file():
        raise FileNotFoundError(f'Experiment must be one of {", ".join(names())}, got {name!r}.')
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise ValueError(f'{path.name} is not valid YAML: {" ".join(str(e).split())}') from e
    _check_keys(document, _KEYS, path.name)
    for scale in 'cpu', 'gpu':
        _check_keys(document.get(scale) or {}, _KEYS, f'{path.name}: {scale}')
    return document


def _check_keys(mapping: Mapping[str, Any], known, where: str) -> None:
    unknown = [key for key in mapping if key not in known]
    if unknown:
        raise ValueError(f'{where}: keys must be among {", ".join(known)}, got {", ".join(map(repr, unknown))}.')


def _expanded(rows: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Rows by name, one for each combination of the values in ``each``."""
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
    """Complete settings of a procedure, with settings of trainings in place of their names."""
    defaults = _SETTINGS[procedure]
    common = document.get('settings') or {}
    _check_keys(own, defaults, where)
    _check_keys(common, _DEFAULTS, where)
    settings = merged(defaults, {k: v for k, v in common.items() if k in defaults})
    settings = merged(settings, {'seed': seed, **own} if 'seed' in defaults else own)
    settings = merged(settings, {k: v for k, v in changes.items() if k in defaults})
    missing = [key for key in ('model', 'trained', 'file') if key in defaults and settings[key] is None]
    if missing:
        raise ValueError(f'{where} lacks {missing[0]!r}.')

    trainings = document.get('trainings') or {}

    def with_trainings(settings: Dict[str, Any]) -> Dict[str, Any]:
        settings = dict(settings)
        for key, value in settings.items():
            if isinstance(value, Mapping):
                settings[key] = with_trainings(value)
            elif key in _REFERENCES and isinstance(value, str) and value in trainings:
                training = dict(trainings[value])
                kind, place = training.pop('procedure', 'train'), f'{where}, training {value!r}'
                if kind not in ('train', 'search', 'pretrained'):
                    raise ValueError(f"{place}: procedure must be 'train', 'search' or 'pretrained', got {kind!r}.")
                if key == 'trained' and kind != 'train':
                    raise ValueError(f"{place}: procedure must be 'train' for {key!r}, got {kind!r}.")
                settings[key] = _resolved(kind, training, settings.get('seed', seed), document, changes, place)
            elif key in ('teacher', 'trained') and value is not None:
                raise ValueError(f'{where}: {key} must be one of {", ".join(trainings)}, got {value!r}.')
        return settings

    return with_trainings(settings)
