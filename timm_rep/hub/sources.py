"""Where a model's weights are looked for, in order."""
import logging
import os
from pathlib import Path
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple, Union

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .files import WEIGHTS, Published
from .release import RELEASE

__all__ = ['FoundWeights', 'find_weights', 'local_folder', 'local_tags', 'organization']

_logger = logging.getLogger(__name__)


class FoundWeights(NamedTuple):
    """Weights of a model.

    Attributes:
        path: Of a safetensors file.
        published: What it was published with; None of the authors' release.
    """
    path: str
    published: Optional[Published]


def local_folder() -> Optional[Path]:
    """The folder of published models on this machine: TIMM_REP_HUB, or ``hub/`` of a checkout of this package."""
    if os.environ.get('TIMM_REP_HUB'):
        return Path(os.environ['TIMM_REP_HUB']).expanduser()
    checkout = Path(__file__).parents[2]
    folder = checkout / 'hub'
    return folder if folder.is_dir() and (checkout / 'pyproject.toml').is_file() else None


def local_tags(variant: str) -> Iterator[Tuple[str, Published]]:
    """The tags of a model that are published in the local folder."""
    folder = local_folder()
    for path in sorted(folder.glob(f'{variant}.*')) if folder else ():
        try:
            yield path.name.partition('.')[2], Published.in_folder(path)
        except FileNotFoundError:  # no published model
            continue
        except (OSError, RuntimeError) as e:  # importing this package is no moment to fail
            _logger.warning('%s', e)


def organization() -> str:
    """Whose repositories on the Hub are looked in: TIMM_REP_ORG, or this package's."""
    return os.environ.get('TIMM_REP_ORG') or 'timm-rep'


def find_weights(
        name: str,
        repository: str = '',
        released: Optional[Callable[[], str]] = None,
        cache_dir: Optional[Union[str, os.PathLike]] = None,
) -> FoundWeights:
    """Find published weights: in the local folder, on the Hub, in the authors' release, in this order.

    Args:
        name: Of the model and its tag, 'repa_deit_base.in1k'.
        repository: On the Hub, 'owner/name' or 'owner/name@revision', the only place to look at if given.
        released: The path of the authors' weights, where there are some.
        cache_dir: Instead of the Hub's own.

    Raises:
        RuntimeError: There are none, or the Hub is out of reach; the message has every place and what was wrong there.
            Or what was found is damaged.
        ValueError: Several files of the release may be it.
    """
    folder = local_folder()
    steps: List[Tuple[str, Callable[[], FoundWeights]]] = []
    if not repository:
        steps.append((
            f'the folder {os.fspath(folder / name)!r}' if folder else "a 'hub' folder (TIMM_REP_HUB is not set)",
            lambda: _in_folder(folder, name)))
    on_hub = repository or f'{organization()}/{name}'
    steps.append((f'the Hub repository {on_hub}', lambda: _with_weights(Published.on_hub(on_hub, cache_dir))))
    if released and not repository:
        steps.append((f"the authors' release, {RELEASE}", lambda: FoundWeights(released(), None)))

    reasons: List[str] = []
    out_of_reach = False
    for where, find in steps:
        if out_of_reach:
            # other weights than usual, because the Hub failed for a moment, would be a surprise
            reasons.append(f'{where}: not tried')
            continue
        try:
            return find()
        except OSError as e:
            out_of_reach = not _is_absent(e)
            reasons.append(f'{where}: {" ".join(str(e).split())}')
    raise RuntimeError(
        f'There are no weights of {name}:\n  ' + '\n  '.join(f'{i}. {reason}' for i, reason in enumerate(reasons, 1)))


def _in_folder(folder: Optional[Path], name: str) -> FoundWeights:
    if folder is None:
        raise FileNotFoundError('there is none')
    return _with_weights(Published.in_folder(folder / name))


def _with_weights(published: Published) -> FoundWeights:
    return FoundWeights(published.file(WEIGHTS), published)


def _is_absent(e: OSError) -> bool:
    """Whether the error says that there is no such thing, and not that nobody knows."""
    if isinstance(e, LocalEntryNotFoundError):
        return constants.HF_HUB_OFFLINE
    return isinstance(
        e, (FileNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError))
