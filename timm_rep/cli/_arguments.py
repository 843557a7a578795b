"""Types of command-line arguments."""
import argparse

from timm.utils import ParseKwargs

__all__ = ['ModelKwargs', 'default_device', 'positive_int']


def default_device() -> str:
    """Device of a command without ``--device``: 'cuda' if torch finds a GPU, otherwise 'cpu'."""
    import torch

    return 'cuda' if torch.cuda.is_available() else 'cpu'


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f'expected an integer of at least 1, got {text!r}')
    return value


class ModelKwargs(ParseKwargs):
    """timm's action for NAME=VALUE pairs, whose values are read as Python; other words are an error."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            name, equals, _ = value.partition('=')
            if not equals or not name.isidentifier():
                parser.error(f'argument {option_string}: expected NAME=VALUE, got {value!r}')
        super().__call__(parser, namespace, values, option_string)
