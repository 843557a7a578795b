"""Errors of the Hugging Face Hub's client."""
import contextlib
from typing import Iterator

from huggingface_hub.errors import HfHubHTTPError

__all__ = ['hub_errors']

# base error of the client's HTTP library (requests, then httpx); a failed connection raises it, and no OSError
_HTTP_ERROR = HfHubHTTPError.__bases__[0]


@contextlib.contextmanager
def hub_errors() -> Iterator[None]:
    """Raise every error of the connection to the Hub, or of its answer, as an OSError.

    Raises:
        OSError: The Hub cannot be reached, or answers with an error.
    """
    try:
        yield
    except _HTTP_ERROR as e:
        if isinstance(e, OSError):
            raise
        raise ConnectionError(f'The Hub cannot be reached: {type(e).__name__}: {e}') from e
