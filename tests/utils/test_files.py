import pytest

from timm_rep.utils.files import (
    COUNT,
    STRING,
    argument_errors,
    check_fields,
    check_model_args,
    list_of,
    parse_json,
    read_json,
    read_text,
)


def test_text_of_bounded_size(tmp_path):
    path = tmp_path / 'x.txt'
    path.write_text('ä' * 10, encoding='utf-8')
    assert read_text(path, limit=20) == 'ä' * 10
    with pytest.raises(RuntimeError, match=r"x\.txt' is too large"):
        read_text(path, limit=19)
    path.write_bytes(b'\xff')
    with pytest.raises(RuntimeError, match=r"x\.txt' is not a text file in UTF-8"):
        read_text(path)


@pytest.mark.parametrize('text', ['{', '', '[' * 100_000, '{"a":' * 100_000, ' ' * (1 << 24) + '1'])
def test_json(tmp_path, text):
    with pytest.raises(ValueError):  # noqa: PT011, json has messages of its own
        parse_json(text)
    (tmp_path / 'x.json').write_text(text)
    with pytest.raises(RuntimeError, match=r'x\.json'):
        read_json(tmp_path / 'x.json')


def test_fields():
    fields = dict(required={'a': STRING}, optional={'b': COUNT, 'c': list_of(COUNT, 2)})
    for values in {'a': ''}, {'a': 'x', 'b': None, 'other': 1}, {'a': 'x', 'b': 0, 'c': [1, 2]}:
        assert check_fields(values, 'file', **fields) is values
    for values, message in [
            ([], r'file has to be a mapping .*, got \[\]'),
            ({1: 'x'}, 'file has to be a mapping'),
            ({}, "file has no 'a', expected a string"),
            ({'a': None}, "file: 'a' has to be a string, got None"),
            ({'a': 'x', 'b': True}, "'b' has to be an integer from 0 to 1,000,000, got True"),
            ({'a': 'x', 'b': 1.}, "'b' has to be an integer"),
            ({'a': 'x', 'b': float('nan')}, "'b' has to be an integer"),
            ({'a': 'x', 'c': [1]}, "'c' has to be a list of 2"),
            ({'a': ['x' * 1000] * 1000}, r"'a' has to be a string, got .{,300}$"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            check_fields(values, 'file', **fields)


def test_arguments_of_a_model():
    check_model_args({'depth': 1000, 'depths': (3, 3), 'embed_dim': 4096, 'act_layer': 'gelu', 'bn_eps': 1e-5}, 'file')
    for args, message in [
            ({'depth': 1001}, "file: 'depth' is 1001, expected numbers up to 1,000"),
            ({'depths': [3, [1e9]]}, "'depths' is 1000000000.0"),
            ({'num_blocks': -2000}, "'num_blocks' is -2000"),
            ({'embed_dim': 10 ** 400}, "'embed_dim' is 1000"),
            ({'drop_rate': float('nan')}, "'drop_rate' is nan"),
            ({'attn_kwargs': {'x': 10 ** 7}}, "'attn_kwargs' is 10000000"),
            ({'cfgs': [[1] * 100] * 101}, "holds too much in 'cfgs'"),
            ([1], 'file has to be a mapping'),
    ]:
        with pytest.raises(RuntimeError, match=message):
            check_model_args(args, 'file')


def test_errors_of_arguments():
    with pytest.raises(ValueError, match='file cannot be used: ZeroDivisionError: 1'), argument_errors('file'):
        raise ZeroDivisionError('1')
    with pytest.raises(OSError, match='of its own'), argument_errors('file'):
        raise OSError('of its own')
