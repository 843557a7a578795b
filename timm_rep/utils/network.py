"""Errors of the Hugging Face Hub's client."""
import contextlib
from typing import Iterator

from huggingface_hub.errors import HfHubHTTPError

__all__ = ['hub_errors']

# of the client's HTTP library, which has changed before; what is no answer of the Hub is this and no OSError
_HTTP_ERROR = HfHubHTTPError.__bases__[0]


@contextlib.contextmanager
def hub_errors() -> Iterator[None]:
    """
    Raises:
        OSError: Whatever is wrong with the connection, or with the answer.
    """
    try:
        yield
    except _HTTP_ERROR as e:
        if isinstance(e, OSError):
            raise
        raise ConnectionError(f'The Hub cannot be reached: {type(e).__name__}: {e}') from e
