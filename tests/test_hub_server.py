import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, create_repo, hf_hub_download, model_info, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

REPO = 'owner/name'
CONFIG = b'{"architecture": "resnet18"}'
WEIGHTS = bytes(range(256)) * 20
LFS = r'^/lfs/.*model\.safetensors'


@pytest.fixture
def repo(hub):
    hub.add(REPO, {'config.json': CONFIG, 'model.safetensors': WEIGHTS, 'folder/notes.txt': b'notes'})
    return hub


@pytest.fixture
def api(hub):
    hub.tokens.add('hf_secret')
    return HfApi(token='hf_secret')


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / 'folder'
    folder.mkdir()
    (folder / 'config.json').write_bytes(CONFIG)
    (folder / 'model.safetensors').write_bytes(WEIGHTS)
    return folder


def read(*args, **kwargs):
    return Path(hf_hub_download(REPO, *args, **kwargs)).read_bytes()


def asked(hub, *methods):
    return [request.path.split('/')[-1] for request in hub.requests if request.method in methods]


def test_download(repo, tmp_path):
    assert read('config.json') == CONFIG
    assert read('notes.txt', subfolder='folder') == b'notes'
    assert read('model.safetensors') == WEIGHTS
    assert asked(repo, 'GET') == ['config.json', 'notes.txt', 'model.safetensors']
    assert repo.bytes_served(REPO, 'model.safetensors') == len(WEIGHTS)
    assert Path(hf_hub_download(REPO, 'config.json')).is_relative_to(tmp_path / 'home' / 'hub')
    assert asked(repo, 'GET') == ['config.json', 'notes.txt', 'model.safetensors']  # from the cache


def test_revisions(repo, api):
    repo.organizations.append('owner')
    first = repo.commits(REPO)[0]
    repo.tag(REPO, 'v1.0')
    second = repo.add(REPO, {'config.json': b'{}', 'folder/notes.txt': None})
    assert repo.commits(REPO) == [first, second]
    assert read('config.json') == b'{}'
    assert read('config.json', revision='v1.0') == CONFIG
    repo.clear_requests()
    assert read('config.json', revision=first) == CONFIG
    assert not repo.requests  # this commit is in the cache
    assert set(repo.files(REPO)) == {'config.json', 'model.safetensors'}
    api.create_branch(REPO, branch='a/b', revision=first)
    api.create_tag(REPO, tag='v2.0')
    assert read('config.json', revision='a/b') == CONFIG
    assert model_info(REPO, revision='v2.0').sha == second


def test_not_found(repo):
    with pytest.raises(EntryNotFoundError) as error:
        read('nothing.json')
    assert not isinstance(error.value, LocalEntryNotFoundError)
    with pytest.raises(RevisionNotFoundError):
        read('config.json', revision='v0.0')
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download('owner/nothing', 'config.json')
    with pytest.raises(RepositoryNotFoundError):
        model_info('owner/nothing')
    api = HfApi()
    assert api.repo_exists(REPO)
    assert not api.repo_exists('owner/nothing')
    assert api.file_exists(REPO, 'config.json')
    assert api.file_exists(REPO, 'model.safetensors')
    assert not api.file_exists(REPO, 'nothing.json')
    assert {request.status for request in repo.requests} == {200, 302, 401, 404}


def test_private(hub, monkeypatch, tmp_path):
    hub.tokens.add('hf_secret')
    hub.add(REPO, {'config.json': CONFIG, 'model.safetensors': WEIGHTS}, private=True)
    assert hub.is_private(REPO)
    with pytest.raises(RepositoryNotFoundError):
        read('config.json')
    with pytest.raises(HfHubHTTPError, match='Invalid credentials') as error:
        read('config.json', token='hf_wrong')
    assert error.value.response.status_code == 401
    assert read('config.json', token='hf_secret') == CONFIG
    assert HfApi(token='hf_secret').whoami()['name'] == 'tester'
    hub.use(monkeypatch, tmp_path / 'other', token='hf_secret')
    assert read('model.safetensors') == WEIGHTS
    assert model_info(REPO).private


def test_info(repo):
    info = model_info(REPO, files_metadata=True)
    assert info.sha == repo.commits(REPO)[-1]
    siblings = {sibling.rfilename: sibling for sibling in info.siblings}
    config, weights = siblings['config.json'], siblings['model.safetensors']
    assert (config.lfs, config.size, len(config.blob_id)) == (None, len(CONFIG), 40)
    assert (weights.lfs.sha256, weights.lfs.size) == (hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS))
    assert model_info(REPO).siblings[0].size is None
    api = HfApi()
    assert api.list_repo_files(REPO) == ['config.json', 'folder/notes.txt', 'model.safetensors']
    assert [entry.path for entry in api.list_repo_tree(REPO, 'folder', recursive=True)] == ['folder/notes.txt']
    found, = api.get_paths_info(REPO, ['model.safetensors', 'nothing'])
    assert found.lfs.sha256 == weights.lfs.sha256
    assert len(list(Path(snapshot_download(REPO)).rglob('*.*'))) == 3


@pytest.mark.parametrize('name, after, resumed', [('model.safetensors', 1200, 1000), ('config.json', 0, None)])
def test_cut(repo, name, after, resumed):
    """The client keeps whole chunks of what it received, and asks for the rest."""
    repo.cut(name, after=after)
    assert read(name) == repo.files(REPO)[name]
    ranges = [request.range for request in repo.requests if request.method == 'GET']
    assert ranges == [None, f'bytes={resumed}-' if resumed else None]
    size = len(repo.files(REPO)[name])
    assert repo.bytes_served(REPO, name) == after + size - (resumed or 0)


def test_cut_for_good(repo):
    repo.cut(LFS, after=0, times=100)
    with pytest.raises(Exception, match='peer closed connection'):
        read('model.safetensors')
    assert asked(repo, 'GET') == ['model.safetensors'] * 6
    repo.clear_faults()
    assert read('model.safetensors') == WEIGHTS


@pytest.mark.parametrize('status', [500, 503])
def test_server_errors(repo, status):
    """HEAD is tried again if nothing is in the cache, but not GET."""
    repo.fail('/resolve/.*config', status=status, times=2)
    assert read('config.json') == CONFIG
    assert [(request.method, request.status) for request in repo.requests] == [
        ('HEAD', status), ('HEAD', status), ('HEAD', 200), ('GET', 200)]
    repo.clear_requests()
    repo.fail('config', status=status)
    assert read('config.json') == CONFIG  # from the cache
    assert [request.status for request in repo.requests] == [status]
    repo.fail(LFS, status=status)
    with pytest.raises(HfHubHTTPError) as error:
        read('model.safetensors')
    assert error.value.response.status_code == status
    assert read('model.safetensors') == WEIGHTS
    repo.fail('folder/notes', status=status, times=100)
    with pytest.raises(LocalEntryNotFoundError):
        read('folder/notes.txt')


def test_other_faults(repo):
    repo.fail('config', status=403, headers={'X-Error-Code': 'GatedRepo'})
    with pytest.raises(GatedRepoError):
        read('config.json')
    repo.fail('config', status=429, method='GET')  # the client tries again
    assert read('config.json') == CONFIG
    repo.corrupt(REPO, 'model.safetensors', lambda data: bytes(len(data)))
    assert read('model.safetensors') == bytes(len(WEIGHTS))  # the client compares the size and nothing else
    repo.corrupt(REPO, 'model.safetensors', lambda data: data[:-1])
    with pytest.raises(OSError, match='Consistency check failed'):
        read('model.safetensors', force_download=True)


def test_stopped(repo):
    assert read('config.json') == CONFIG
    repo.stop()
    assert read('config.json') == CONFIG
    with pytest.raises(LocalEntryNotFoundError):
        read('model.safetensors')


def test_upload(hub, api, folder, tmp_path):
    repo_id = api.create_repo('name', private=True).repo_id  # of the user
    assert repo_id == 'tester/name'
    assert hub.is_private(repo_id)
    (folder / 'README.md').write_text('---\nlicense: mit\n---\n')
    (folder / 'empty.bin').write_bytes(b'')
    commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message='All of it')
    assert hub.commits(repo_id)[1:] == [commit.oid]
    assert hub.message(repo_id) == 'All of it'
    uploaded = {path.name: path.read_bytes() for path in folder.iterdir()}
    files = hub.files(repo_id)
    assert files.pop('.gitattributes')
    assert files == uploaded
    assert sum(request.method == 'PUT' for request in hub.requests) == 1
    copy = Path(snapshot_download(repo_id, token='hf_secret'))
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.name in uploaded} == uploaded


def test_upload_again(hub, api, folder):
    """Nothing is uploaded and nothing committed if nothing changed."""
    api.create_repo('tester/name')
    first = api.upload_folder(repo_id='tester/name', folder_path=folder)
    assert api.create_repo('tester/name', exist_ok=True).repo_id == 'tester/name'
    hub.clear_requests()
    assert api.upload_folder(repo_id='tester/name', folder_path=folder).oid == first.oid
    assert asked(hub, 'POST', 'PUT') == ['main', 'batch']  # 'main' as in .../preupload/main
    assert len(hub.commits('tester/name')) == 2
    (folder / 'model.safetensors').write_bytes(WEIGHTS[::-1])
    api.upload_folder(repo_id='tester/name', folder_path=folder)
    assert hub.files('tester/name')['model.safetensors'] == WEIGHTS[::-1]
    assert hub.files('tester/name', revision=first.oid)['model.safetensors'] == WEIGHTS


def test_delete_patterns(hub, api, folder):
    api.create_repo('tester/name')
    hub.add('tester/name', {'old.safetensors': b'old', 'config.json': b'old', 'folder/a.txt': b'', 'folder/b.txt': b''})
    api.upload_folder(repo_id='tester/name', folder_path=folder, delete_patterns=['*.safetensors', '*.json'])
    assert set(hub.files('tester/name')) == {
        '.gitattributes', 'config.json', 'model.safetensors', 'folder/a.txt', 'folder/b.txt'}
    assert hub.files('tester/name')['config.json'] == CONFIG
    assert len(hub.commits('tester/name')) == 3
    api.delete_folder('folder', 'tester/name')
    api.upload_folder(repo_id='tester/name', folder_path=folder, allow_patterns='nothing', delete_patterns='*')
    assert set(hub.files('tester/name')) == {'.gitattributes'}
    with pytest.raises(EntryNotFoundError):
        api.delete_file('config.json', 'tester/name')


def test_upload_faults(hub, api, folder):
    api.create_repo('tester/name')
    head = hub.commits('tester/name')[-1]
    hub.fail('^/lfs/', times=2)  # tried again
    hub.fail('/commit/', status=503)  # not tried again
    with pytest.raises(HfHubHTTPError):
        api.upload_folder(repo_id='tester/name', folder_path=folder)
    assert hub.commits('tester/name') == [head]
    api.upload_folder(repo_id='tester/name', folder_path=folder)
    assert [request.status for request in hub.requests if request.method == 'PUT'] == [500, 500, 200]
    (folder / 'config.json').write_text('{}')
    with pytest.raises(HfHubHTTPError, match='A commit has happened since'):
        api.upload_folder(repo_id='tester/name', folder_path=folder, parent_commit=head)
    assert len(hub.commits('tester/name')) == 2


def test_rights(hub, api, folder):
    with pytest.raises(HfHubHTTPError, match='401'):
        create_repo('tester/name')
    with pytest.raises(HfHubHTTPError, match='namespace "owner"'):
        api.create_repo(REPO)
    hub.add(REPO, {'config.json': CONFIG})
    with pytest.raises(HfHubHTTPError, match='namespace "owner"'):
        api.upload_folder(repo_id=REPO, folder_path=folder)
    hub.organizations.append('owner')
    api.upload_folder(repo_id=REPO, folder_path=folder)
    assert [organization['name'] for organization in api.whoami()['orgs']] == ['owner']
    with pytest.raises(HfHubHTTPError, match='409'):
        api.create_repo(REPO)
    with pytest.raises(RepositoryNotFoundError):
        api.upload_folder(repo_id='tester/nothing', folder_path=folder)


def test_subprocess(repo, tmp_path):
    code = f"import huggingface_hub; print(huggingface_hub.hf_hub_download('{REPO}', 'model.safetensors'))"
    env = {**os.environ, **repo.environment(tmp_path / 'process')}
    path = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True).stdout
    assert Path(path.strip()).read_bytes() == WEIGHTS
    assert Path(path.strip()).is_relative_to(tmp_path / 'process')
