"""Text and JSON files, read with errors that name the file, and dataclasses that are stored as JSON."""
import contextlib
import dataclasses
import json
import math
import os
import reprlib
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Dict,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from safetensors import SafetensorError

StrPath = Union[str, os.PathLike[str]]
SidecarType = TypeVar('SidecarType', bound='Sidecar')


def read_text(path: StrPath) -> str:
    """Read a text file; RuntimeError if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding='utf-8')
    except UnicodeDecodeError as e:
        raise RuntimeError(f'{os.fspath(path)!r} must be a text file in UTF-8: {e}') from e


def parse_json(text: str) -> Any:
    """``json.loads``, which also raises ValueError if the text is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError('JSON that is nested too deeply') from e


def read_json(path: StrPath) -> Any:
    """Read a JSON file; RuntimeError if it is not JSON in UTF-8."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as e:
        raise RuntimeError(f'{os.fspath(path)!r} must be valid JSON: {e}') from e


def parse(kind: Any, value: Any, source: str) -> Any:
    """Check a value that was read from JSON or YAML, and convert it to a type; RuntimeError if it has the wrong one.

    Args:
        kind: ``str``, ``bool``, ``int``, ``float`` (finite), ``Any``, a dataclass, or ``Optional``, ``Union``,
            ``Literal``, ``Sequence``, ``Tuple`` or ``Dict`` of these.
        value: Value to check.
        source: File, and place in it, for the message.

    Returns:
        The value: mappings as dataclasses where a dataclass is expected, without their unknown fields.
    """
    origin, args = get_origin(kind), get_args(kind)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        values, hints = parse(Mapping[str, Any], value, source), get_type_hints(kind)
        fields = [field for field in dataclasses.fields(kind) if field.init]
        missing = [
            field.name for field in fields
            if field.name not in values and field.default is field.default_factory is dataclasses.MISSING]
        if missing:
            raise RuntimeError(f'{source} must have {", ".join(map(repr, missing))}.')
        try:
            return kind(**{
                field.name: parse(hints[field.name], values[field.name], f'{source}: {field.name}')
                for field in fields if field.name in values
            })
        except ValueError as e:  # from __post_init__
            raise RuntimeError(f'{source}: {e}') from e
    if origin is Union:
        if value is None and type(None) in args:
            return None
        options = [option for option in args if option is not type(None)]
        for option in options[:-1]:
            with contextlib.suppress(RuntimeError):
                return parse(option, value, source)
        return parse(options[-1], value, source)
    elif origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)) and len(value) == len(args):
            return tuple(parse(arg, item, source) for arg, item in zip(args, value))
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {name: parse(args[1], item, f'{source}: {name}') for name, item in value.items()}
    elif origin is not None and issubclass(origin, Sequence):
        if isinstance(value, (list, tuple)):
            return [parse(args[0], item, source) for item in value]
    elif kind is Any or (kind is float and is_number and math.isfinite(value)) or (
            kind in (str, bool, type(None)) and isinstance(value, kind)) or (
            kind is int and is_number and isinstance(value, int)):
        return value
    expected = getattr(kind, '__name__', kind) if origin is None else str(kind).replace('typing.', '')
    raise RuntimeError(f'{source} must be {expected}, got {reprlib.repr(value)}.')


class Sidecar:
    """Base of dataclasses that are stored as a JSON file, with the fields as keys."""
    __dataclass_fields__: ClassVar[Dict[str, Any]]

    @classmethod
    def from_json(cls: Type[SidecarType], path: StrPath) -> SidecarType:
        """Read the dataclass from a file."""
        return parse(cls, read_json(path), repr(os.fspath(path)))

    def to_json(self, path: StrPath) -> None:
        """Write the dataclass to a file; fields that are None are left out. ValueError if a number is not finite."""
        def without_none(items: List[Tuple[str, Any]]) -> Dict[str, Any]:
            return {name: value for name, value in items if value is not None}

        content = dataclasses.asdict(self, dict_factory=without_none)
        try:
            text = json.dumps(content, indent=2, allow_nan=False)
        except ValueError as e:
            raise ValueError(f'Expected finite numbers to write to {os.fspath(path)!r}: {e}') from e
        Path(path).write_text(text + '\n', encoding='utf-8')


# fields of timm's config.json that this package reads or adds
_CONFIG = {
    'num_classes': Optional[int],
    'label_names': Union[None, Sequence[str], Dict[str, str]],
    'model_args': Dict[str, Any],
    'pretrained_cfg': Dict[str, Any],
    'sha256': Dict[str, str],
}


def read_config(path: StrPath) -> Dict[str, Any]:
    """Read a config.json of timm's ``save_for_hf``; RuntimeError if a field is missing or of the wrong type."""
    source = repr(os.fspath(path))
    config = parse(Dict[str, Any], read_json(path), source)
    if 'architecture' not in config:
        raise RuntimeError(f"{source} must have 'architecture', the name of a timm model.")
    parse(str, config['architecture'], f'{source}: architecture')
    for name, kind in _CONFIG.items():
        if name in config:
            parse(kind, config[name], f'{source}: {name}')
    return config


@contextlib.contextmanager
def argument_errors(source: str) -> Iterator[None]:
    """Raise a ValueError that begins with the origin of a model's arguments if they cannot be used."""
    try:
        yield
    except OSError:
        raise
    except Exception as e:  # constructors raise many types
        raise ValueError(f'{source} cannot be used: {type(e).__name__}: {e}') from e


@contextlib.contextmanager
def config_errors(name: str) -> Iterator[None]:
    """Name the model, 'local-dir:FOLDER' or 'hf-hub:ID', in errors of ``timm.create_model`` about a config.json."""
    source, _, folder = name.partition(':')
    if source == 'local-dir' and (Path(folder) / 'config.json').exists():
        read_config(Path(folder) / 'config.json')
    try:
        yield
    except SafetensorError as e:
        raise RuntimeError(f'The weights of {name!r} cannot be read: {e}') from e
    except (ArithmeticError, AssertionError, LookupError) as e:
        if e.args == ('architecture',):
            raise ValueError(f"Expected a timm model, but the config.json of {name!r} has no 'architecture'.") from e
        if source not in ('local-dir', 'hf-hub'):
            raise
        raise ValueError(
            f'Expected a timm model, but the config.json of {name!r} cannot be used: {type(e).__name__}: {e}') from e
