"""Publishing a folder on the Hub."""
import re
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.sha import git_hash

from timm_rep.deploy import BACKENDS, FORMATS
from timm_rep.hub import CARD_NAME, CONFIG_NAME, organization, sha256, verify_folder
from timm_rep.utils.files import StrPath, read_text
from timm_rep.utils.network import hub_errors

_WEIGHT_SUFFIXES = frozenset({
    '.safetensors', '.bin', '.pth', '.pt', '.ckpt', '.pkl', '.tar', '.npy', '.npz', '.h5', '.msgpack', '.gguf',
    '.tflite',
    *(Path(name).suffix for backend in BACKENDS.values() for name in backend.files),
    *(format.suffix for format in FORMATS.values() if format.suffix)})


class Change(NamedTuple):
    """Change of a file by a push: ``action`` is 'add', 'change', 'delete' or 'same', ``size`` is in bytes."""
    file: str
    action: str
    size: int


def push_folder(
        folder: StrPath,
        org: Optional[str] = None,
        revision: str = 'main',
        private: bool = False,
        dry_run: bool = False,
        token: Optional[str] = None,
        message: Optional[str] = None,
        delete: Sequence[str] = (),
) -> List[Change]:
    """Make the repository ``<org>/<name of the folder>`` on the Hub equal to the folder, in one commit.

    Unchanged files are not sent again; without changes nothing is committed, but a new branch is created. A commit by
    someone else in the meantime is not overwritten: the push fails. Files of weights are deleted only if they are
    named.

    Args:
        folder: Folder written by ``timm-rep card``: config.json has the sha256 of every file.
        org: User or organization on the Hub. Default: TIMM_REP_ORG, or 'timm-rep'.
        revision: Branch to commit to.
        private: Make the repository private if it does not exist yet.
        dry_run: Only return what would change.
        token: Access token. Default: the token of ``hf auth login`` or HF_TOKEN.
        message: Message of the commit.
        delete: Names of files of weights that may be deleted.

    Returns:
        The change of every file.

    Raises:
        FileNotFoundError, RuntimeError: A file is missing, or differs from its hash in config.json; nothing is sent.
        ValueError: The folder is not named after its model, or has subfolders or links to files elsewhere; its card
            names another repository; or a file of weights would be deleted. Nothing is sent.
        OSError: The Hub cannot be reached, or refuses.
    """
    folder = Path(folder).resolve()
    names = sorted({CONFIG_NAME, *verify_folder(folder).hashes})
    org = org or organization()
    repository = f'{org}/{folder.name}'
    _check_card(folder, org)
    api = HfApi(token=token)
    with hub_errors():
        info, is_new = _branch(api, repository, revision)
    published = {file.rfilename: file for file in info.siblings} if info else {}
    changes = [_change(folder / name, name, published.get(name)) for name in names]
    changes += [Change(name, 'delete', 0) for name in sorted(published) if name not in [*names, '.gitattributes']]
    deleted = [change.file for change in changes if change.action == 'delete']
    kept = [name for name in deleted if Path(name).suffix.lower() in _WEIGHT_SUFFIXES and name not in delete]
    if kept:
        raise ValueError(
            f'{str(folder)!r} must have the weights of {repository}, but lacks {", ".join(kept)}: to delete them '
            f'there, name them (--delete {" ".join(kept)}).')
    # upload_folder() may split its work into several commits
    operations = [
        CommitOperationDelete(change.file) if change.action == 'delete' else
        CommitOperationAdd(change.file, folder / change.file)
        for change in changes if change.action != 'same'
    ]
    if (operations or is_new) and not dry_run:
        with hub_errors():
            api.create_repo(repository, private=private, exist_ok=True)
            if is_new and revision != 'main':
                api.create_branch(repository, branch=revision, exist_ok=True)
            if operations:
                api.create_commit(
                    repository, operations, commit_message=message or f'{folder.name}, by timm-rep', revision=revision,
                    parent_commit=info.sha if info else None)
    return changes


def _check_card(folder: Path, org: str) -> None:
    """Raise ValueError if the code in the card of a folder loads the model from another organization."""
    card = read_text(folder / CARD_NAME) if (folder / CARD_NAME).is_file() else ''
    others = {*re.findall(rf'hf-hub:([\w.-]+)/{re.escape(folder.name)}(?![\w.-]*\w)', card)} - {org}
    if others:
        raise ValueError(
            f'{CARD_NAME} must load hf-hub:{org}/{folder.name}, but it loads {others.pop()}/{folder.name}: write it '
            f'for this organization with timm-rep card {folder} --org {org}.')


def _branch(api: HfApi, repository: str, revision: str) -> Tuple[Optional[ModelInfo], bool]:
    """Content of a branch, or what a new one would start with, and whether it is new; None without a repository."""
    try:
        return api.model_info(repository, revision=revision, files_metadata=True), False
    except RepositoryNotFoundError:
        return None, True
    except RevisionNotFoundError:
        return api.model_info(repository, files_metadata=True), True


def _change(path: Path, name: str, published: Optional[RepoSibling]) -> Change:
    if published is None:
        return Change(name, 'add', path.stat().st_size)
    same = (published.lfs.sha256 == sha256(path) if published.lfs else
            published.blob_id == git_hash(path.read_bytes()))
    return Change(name, 'same' if same else 'change', path.stat().st_size)
