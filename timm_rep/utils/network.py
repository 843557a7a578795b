"""Downloads from the Hugging Face Hub."""
import contextlib
import socket
import threading
from typing import Iterator, Optional
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .files import StrPath

# base error of the client's HTTP library (requests, then httpx); a failed connection raises it, not OSError
HTTP_ERROR = HfHubHTTPError.__bases__[0]
_TIMEOUT = 1.5  # seconds


@contextlib.contextmanager
def hub_errors() -> Iterator[None]:
    """Raise every error of the connection to the Hub, or of its answer, as an OSError."""
    try:
        yield
    except HFValidationError:
        raise
    except HTTP_ERROR as e:
        if isinstance(e, OSError):
            raise
        raise ConnectionError(f'The Hub cannot be reached: {type(e).__name__}: {e}') from e
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise ConnectionError(f'The Hub gave an unexpected answer: {type(e).__name__}: {e}') from e


def is_reachable(address: str) -> bool:
    """Whether the server of a URL accepts connections; True with a proxy. Clients would wait or retry for minutes."""
    url = urlsplit(address)
    if url.scheme in getproxies() or 'all' in getproxies():
        return True
    connected = []

    def connect() -> None:
        port = url.port or (443 if url.scheme == 'https' else 80)
        with contextlib.suppress(OSError), socket.create_connection((url.hostname, port), _TIMEOUT):
            connected.append(True)

    # in a thread, since create_connection() has no limit on the time of the name lookup
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    return bool(connected)


def hub_download(
        repo_id: str,
        filename: str,
        revision: Optional[str] = None,
        cache_dir: Optional[StrPath] = None,
) -> str:
    """``hf_hub_download``, which takes the file from the Hub's cache at once if the Hub cannot be reached."""
    with hub_errors():
        offline = constants.HF_HUB_OFFLINE or not is_reachable(constants.ENDPOINT)
        try:
            return hf_hub_download(repo_id, filename, revision=revision, cache_dir=cache_dir, local_files_only=offline)
        except LocalEntryNotFoundError as e:
            raise LocalEntryNotFoundError(
                f"{constants.ENDPOINT} cannot be reached, and {filename} of {repo_id} is not in its cache.") from e
