import json
from dataclasses import dataclass
from typing import Any, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, Union

import pytest

from timm_rep.utils.files import (
    Sidecar,
    argument_errors,
    config_errors,
    parse,
    parse_json,
    read_config,
    read_json,
    read_text,
)


def test_text_in_utf8(tmp_path):
    path = tmp_path / 'x.txt'
    path.write_text('ä', encoding='utf-8')
    assert read_text(path) == 'ä'
    path.write_bytes(b'\xff')
    with pytest.raises(RuntimeError, match=r'x\.txt.*UTF-8'):
        read_text(path)


@pytest.mark.parametrize('text', ['{', '', '[' * 100_000, '{"a":' * 100_000])
def test_invalid_json(tmp_path, text):
    with pytest.raises(ValueError):  # noqa: PT011, json has messages of its own
        parse_json(text)
    (tmp_path / 'x.json').write_text(text)
    with pytest.raises(RuntimeError, match=r'x\.json'):
        read_json(tmp_path / 'x.json')


@dataclass
class Inner:
    x: float

    def __post_init__(self):
        if self.x <= 0:
            raise ValueError(f'x must be positive, got {self.x}.')


@dataclass
class Outer(Sidecar):
    inner: Inner
    by_name: Dict[str, Inner]
    size: Tuple[int, int] = (1, 2)
    note: Optional[str] = None


@pytest.mark.parametrize('kind, values, others', [
    (str, ['', 'x'], [1, None]),
    (bool, [True], [0, 'true', None]),
    (int, [0, -3], [True, 1., '1', None]),
    (float, [1, .5], [True, float('nan'), float('inf'), '1', None]),
    (Any, [None, [1]], []),
    (Literal['a', 'b'], ['a'], ['c', None, []]),
    (Optional[int], [None, 1], ['x']),
    (Union[float, str], [1., 'x'], [None, []]),
    (Sequence[int], [[], [1, 2]], [[1.], (1, None), 'ab', 1]),
    (Tuple[int, int], [(1, 2)], [(1,), (1, 2, 3), 'ab']),
    (Dict[str, int], [{}, {'a': 1}], [{1: 1}, {'a': 'b'}, [], None]),
    (Mapping[str, Any], [{'a': None}], [{None: 1}]),
    (List[Inner], [], [[{'x': -1}], [{}], [1]]),
], ids=str)
def test_types(kind, values, others):
    for value in values:
        assert parse(kind, value, 'file') == value
    for value in others:
        with pytest.raises(RuntimeError, match=r'^file'):
            parse(kind, value, 'file')


def test_sidecar(tmp_path):
    value, path = Outer(Inner(1.), {'a': Inner(2.)}, size=(3, 4)), tmp_path / 'x.json'
    value.to_json(path)
    assert 'note' not in json.loads(path.read_text())
    assert Outer.from_json(path) == value
    path.write_text(json.dumps({**json.loads(path.read_text()), 'unknown': 1}))
    assert Outer.from_json(path) == value
    for change, where in [
            ({'inner': None}, 'inner'), ({'inner': {}}, "inner must have 'x'"), ({'by_name': {'b': {'x': 0}}}, 'b: x'),
            ({'size': [1]}, 'size'), ({'note': 3}, 'note')]:
        path.write_text(json.dumps({'inner': {'x': 1}, 'by_name': {}, **change}))
        with pytest.raises(RuntimeError, match=rf'x\.json.*{where}'):
            Outer.from_json(path)
    path.write_text('{}')
    with pytest.raises(RuntimeError, match="'inner', 'by_name'"):
        Outer.from_json(path)


@pytest.mark.parametrize('content, name', [
    ('[]', 'config'), ('null', 'config'), ('{', 'config'), ({}, 'architecture'), ({'architecture': 5}, 'architecture'),
    ({'model_args': None}, 'model_args'), ({'pretrained_cfg': None}, 'pretrained_cfg'), ({'sha256': 5}, 'sha256'),
    ({'sha256': {'x': 5}}, 'sha256'), ({'num_classes': 'x'}, 'num_classes'),
], ids=str)
def test_configs(tmp_path, content, name):
    """Also before timm reads it."""
    path = tmp_path / 'config.json'
    if isinstance(content, dict):
        content = json.dumps({'architecture': 'resnet18', **content} if content else {})
    path.write_text(content)
    with pytest.raises(RuntimeError, match=rf'config\.json.*{name}|config\.json'):
        read_config(path)
    with pytest.raises(RuntimeError, match=r'config\.json'), config_errors(f'local-dir:{tmp_path}'):
        pytest.fail('too late')


def test_errors_of_arguments():
    with pytest.raises(ValueError, match='file cannot be used: ZeroDivisionError: 1'), argument_errors('file'):
        raise ZeroDivisionError('1')
    with pytest.raises(OSError, match='of its own'), argument_errors('file'):
        raise OSError('of its own')


@pytest.mark.parametrize('x', [float('nan'), float('inf')])
def test_figures_that_are_not_finite_are_not_written(tmp_path, x):
    path = tmp_path / 'x.json'
    path.write_text('old')
    with pytest.raises(ValueError, match=r'finite.*x\.json'):
        Outer(Inner(x), {}).to_json(path)
    assert path.read_text() == 'old'
