"""Reading text files, and checking what they hold, so that every error names the file."""
import contextlib
import json
import math
import os
import reprlib
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Optional, Union

__all__ = [
    'COUNT', 'MAPPING', 'NUMBER', 'POSITIVE', 'STRING', 'TEXT', 'Kind', 'argument_errors', 'check_fields',
    'check_model_args', 'config_errors', 'list_of', 'one_of', 'parse_json', 'read_json', 'read_text',
]

_MAX_BYTES = 1 << 24  # label names and descriptions of ImageNet-21k take 3 MB
_MAX_NUMBER = 1_000_000
_MAX_VALUES = 10_000
_MAX_DEPTH = 1_000


def read_text(path: Union[str, os.PathLike], limit: int = _MAX_BYTES) -> str:
    """Read a text file in UTF-8.

    Args:
        path: Path of the file.
        limit: Largest size in bytes.

    Raises:
        OSError: The file cannot be opened.
        RuntimeError: The file is larger, or not UTF-8.
    """
    with open(path, 'rb') as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise RuntimeError(f'{os.fspath(path)!r} is too large: expected a text file of at most {limit >> 10} KiB.')
    try:
        return data.decode('utf-8')
    except UnicodeDecodeError as e:
        raise RuntimeError(f'{os.fspath(path)!r} is not a text file in UTF-8: {e}') from e


def parse_json(text: str) -> Any:
    """``json.loads`` of at most 16 MiB.

    Raises:
        ValueError: The text is longer, is not JSON, or is nested too deeply.
    """
    if len(text) > _MAX_BYTES:
        raise ValueError(f'expected JSON of at most {_MAX_BYTES >> 20} MiB, got {len(text)} characters')
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError('JSON that is nested too deeply') from e


def read_json(path: Path) -> Any:
    """Read a JSON file of at most 16 MiB.

    Raises:
        OSError: The file cannot be opened.
        RuntimeError: The file is larger, or is not JSON in UTF-8.
    """
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as e:
        raise RuntimeError(f'{os.fspath(path)!r} is not valid JSON: {e}') from e


class Kind(NamedTuple):
    """What a field of a file holds.

    Attributes:
        text: Description, for the error message.
        test: Whether a value is of this kind.
    """
    text: str
    test: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


STRING = Kind('a string', lambda value: isinstance(value, str))
NUMBER = Kind('a number', _is_number)
POSITIVE = Kind('a positive number', lambda value: _is_number(value) and value > 0)
COUNT = Kind(
    f'an integer from 0 to {_MAX_NUMBER:,}',
    lambda value: _is_number(value) and isinstance(value, int) and 0 <= value <= _MAX_NUMBER)
TEXT = Kind('a string or a number', lambda value: isinstance(value, str) or _is_number(value))
MAPPING = Kind(
    'a mapping with strings as keys', lambda value: isinstance(value, dict) and all(isinstance(k, str) for k in value))


def list_of(kind: Kind, length: Optional[int] = None) -> Kind:
    """A list of values of a kind, of any length if that is None."""
    return Kind(
        f'a list of {"values" if length is None else length}, each {kind.text}',
        lambda value: isinstance(value, (list, tuple)) and length in (None, len(value)) and all(map(kind.test, value)))


def one_of(*values: str) -> Kind:
    """One of some strings."""
    return Kind(f'one of {", ".join(values)}', lambda value: isinstance(value, str) and value in values)


def check_fields(
        values: Any,
        source: str,
        required: Mapping[str, Kind],
        optional: Optional[Mapping[str, Kind]] = None,
) -> Mapping[str, Any]:
    """Check the fields of a mapping that was read from a file.

    Args:
        values: The mapping.
        source: File, and place in it, for the message.
        required: Kinds of the fields that it has.
        optional: Kinds of the fields that it may have; None passes as well.

    Returns:
        The mapping.

    Raises:
        RuntimeError: It is not a mapping, or a field is missing or of another kind.
    """
    if not MAPPING.test(values):
        raise RuntimeError(f'{source} has to be {MAPPING.text}, got {reprlib.repr(values)}.')
    for name, kind in {**(optional or {}), **required}.items():
        value = values.get(name)
        if name in required and name not in values:
            raise RuntimeError(f'{source} has no {name!r}, expected {kind.text}.')
        if (name in required or value is not None) and not kind.test(value):
            raise RuntimeError(f'{source}: {name!r} has to be {kind.text}, got {reprlib.repr(value)}.')
    return values


def check_model_args(args: Mapping[str, Any], source: str) -> None:
    """Check that arguments of a model, read from a file, are of a size that some model has.

    A ``depth`` of 1e9 would occupy the machine for minutes before it fails.

    Args:
        args: Arguments of ``create_model``, by name.
        source: File, and place in it, for the message.

    Raises:
        RuntimeError: They are not a mapping; a number exceeds 1,000,000, or 1,000 in a number of blocks; or there are
            more than 10,000 values.
    """
    check_fields(args, source, {})
    count = 0
    for name, value in args.items():
        limit = _MAX_DEPTH if name.startswith(('depth', 'num_block')) else _MAX_NUMBER
        remaining: List[Any] = [value]
        while remaining:
            item = remaining.pop()
            if isinstance(item, dict):
                remaining += item.values()
            elif isinstance(item, (list, tuple)):
                remaining += item
            elif isinstance(item, (int, float)) and not abs(item) <= limit:
                raise RuntimeError(f'{source}: {name!r} is {item!r:.100}, expected numbers up to {limit:,}.')
            count += 1
            if count + len(remaining) > _MAX_VALUES:
                raise RuntimeError(f'{source} holds too much in {name!r}: expected at most {_MAX_VALUES:,} values.')


@contextlib.contextmanager
def argument_errors(source: str) -> Iterator[None]:
    """Raise what a model's constructor raises for wrong arguments as a ValueError that names where they come from.

    Args:
        source: Origin of the arguments, the beginning of the message.

    Raises:
        ValueError: Arguments have wrong names, types or values, or do not fit together.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
            ValueError) as e:
        raise ValueError(f'{source} cannot be used: {type(e).__name__}: {e}') from e


@contextlib.contextmanager
def config_errors(name: str) -> Iterator[None]:
    """Raise timm's KeyError for a config.json of another library as a ValueError that names the model.

    Args:
        name: Name for ``timm.create_model``, 'local-dir:FOLDER' or 'hf-hub:ID'.

    Raises:
        ValueError: The config.json has no 'architecture'.
    """
    try:
        yield
    except KeyError as e:
        if e.args != ('architecture',):
            raise
        raise ValueError(f"{name!r} is no model of timm: its config.json has no 'architecture'.") from e
