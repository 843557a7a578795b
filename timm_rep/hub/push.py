"""Publishing a folder on the Hub."""
import os
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash

from timm_rep.utils.network import hub_errors

from .files import CONFIG, sha256
from .folder import check_folder
from .sources import organization

__all__ = ['Change', 'push_folder']

# the Hub's own, in every repository
_OF_THE_HUB = ('.gitattributes',)


class Change(NamedTuple):
    """What a push does to a file of the repository.

    Attributes:
        file: Its path.
        what: 'add', 'change', 'delete' or 'same'.
        size: In bytes, of what is published; 0 of a deleted one.
    """
    file: str
    what: str
    size: int


def push_folder(
        folder: Union[str, os.PathLike],
        org: Optional[str] = None,
        revision: str = 'main',
        private: bool = False,
        dry_run: bool = False,
        token: Optional[str] = None,
        message: Optional[str] = None,
) -> List[Change]:
    """Make the repository ``<org>/<name of the folder>`` on the Hub hold what the folder does, in one commit.

    Files that are there already, by their hash, are not sent again; if all are there is no commit.

    Args:
        folder: As ``timm-rep card`` leaves it: config.json has the sha256 of every file.
        org: Whose repository; TIMM_REP_ORG or 'timm-rep' if None.
        revision: The branch.
        private: Of a repository that is not there yet.
        dry_run: Only say what would change.
        token: Instead of the one that ``hf auth login`` or HF_TOKEN left.
        message: Of the commit.

    Returns:
        What changes, by file.

    Raises:
        FileNotFoundError, RuntimeError: A file is missing, or is not the one of config.json; nothing is sent.
        ValueError: The folder is not named after the model in it.
        OSError: The Hub cannot be reached, or refuses.
    """
    folder = Path(folder).resolve()
    published = check_folder(folder)
    repository = f'{org or organization()}/{folder.name}'
    api = HfApi(token=token)
    with hub_errors():
        info, is_new = _what_is_there(api, repository, revision)
    there = {file.rfilename: file for file in info.siblings} if info else {}
    names = sorted({CONFIG, *published.hashes})
    changes = [_change(folder / name, name, there) for name in names]
    changes += [Change(name, 'delete', 0) for name in sorted(there) if name not in names and name not in _OF_THE_HUB]
    operations = [
        CommitOperationDelete(change.file) if change.what == 'delete' else
        CommitOperationAdd(change.file, folder / change.file)
        for change in changes if change.what != 'same'
    ]
    if operations and not dry_run:
        with hub_errors():
            api.create_repo(repository, private=private, exist_ok=True)
            if is_new and revision != 'main':
                api.create_branch(repository, branch=revision, exist_ok=True)
            api.create_commit(
                repository, operations, commit_message=message or f'{folder.name}, by timm-rep', revision=revision,
                parent_commit=info.sha if info else None)
    return changes


def _what_is_there(api: HfApi, repository: str, revision: str) -> Tuple[Optional[ModelInfo], bool]:
    """What the branch holds, or would start with, and whether it is new; None if there is no repository."""
    try:
        return api.model_info(repository, revision=revision, files_metadata=True), False
    except RepositoryNotFoundError:
        return None, True
    except RevisionNotFoundError:
        return api.model_info(repository, files_metadata=True), True


def _change(path: Path, name: str, there: Dict[str, RepoSibling]) -> Change:
    size = path.stat().st_size
    if name not in there:
        return Change(name, 'add', size)
    file = there[name]
    same = file.lfs.sha256 == sha256(path) if file.lfs else file.blob_id == git_hash(path.read_bytes())
    return Change(name, 'same' if same else 'change', size)
