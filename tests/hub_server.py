"""A Hugging Face Hub in memory on loopback, for the unmodified huggingface_hub client, with faults on demand.

It holds model repositories only, and speaks the HTTP part of the protocol: downloads with ETags and ranges, large files
behind a redirect, uploads through the LFS endpoints and the commit endpoint, tokens and private repositories, and the
status codes and X-Error-Code headers that the client turns into its exceptions.
"""
import base64
import hashlib
import http.server
import json
import re
import threading
import time
import types
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple, Union
from urllib.parse import parse_qs, quote, unquote, urlsplit

_LFS_SUFFIXES = ('.safetensors', '.pth', '.bin')
_ATTRIBUTES = ''.join(f'*{suffix} filter=lfs diff=lfs merge=lfs -text\n' for suffix in _LFS_SUFFIXES).encode()


class Request(NamedTuple):
    """A request as answered: the path is unquoted and without its query."""
    method: str
    path: str
    status: int
    range: Optional[str]


class _Incoming(NamedTuple):
    method: str
    path: str
    query: Dict[str, List[str]]
    headers: Any
    body: bytes


@dataclass
class _Answer:
    status: int = 200
    body: bytes = b''
    headers: Dict[str, str] = field(default_factory=dict)
    file: Optional[Tuple[str, str]] = None  # (repository, path) of the file that the body is of
    cut: Optional[int] = None


class _Error(Exception):
    def __init__(self, status: int, message: str, code: Optional[str] = None, **headers: str) -> None:
        headers = {'X-Error-Message': message, **headers, **({'X-Error-Code': code} if code else {})}
        self.answer = _json({'error': message}, status, headers)


@dataclass
class _Fault:
    pattern: str
    times: int
    method: Optional[str]
    status: Optional[int] = None
    headers: Optional[Dict[str, str]] = None
    cut: Optional[int] = None
    content: Any = None


class _File:
    """A file of a commit, with the ids that git and LFS give it."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data, self.size = path, data, len(data)
        blob, self.sha256, self.pointer_size = data, None, 0
        if path.endswith(_LFS_SUFFIXES) and data:  # the client uploads an empty file as a regular one
            self.sha256 = hashlib.sha256(data).hexdigest()
            blob = f'version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n'.encode()
            self.pointer_size = len(blob)
        self.blob_id = hashlib.sha1(b'blob %d\0' % len(blob) + blob).hexdigest()
        self.etag = self.sha256 or self.blob_id

    def entry(self) -> Dict[str, Any]:
        entry = {'type': 'file', 'path': self.path, 'oid': self.blob_id, 'size': self.size}
        if self.sha256:
            entry['lfs'] = {'oid': self.sha256, 'size': self.size, 'pointerSize': self.pointer_size}
        return entry

    def sibling(self) -> Dict[str, Any]:
        lfs = {'sha256': self.sha256, 'size': self.size, 'pointerSize': self.pointer_size} if self.sha256 else None
        return {'rfilename': self.path, 'blobId': self.blob_id, 'size': self.size, 'lfs': lfs}


class _Commit(NamedTuple):
    sha: str
    parent: Optional[str]
    message: str
    files: Dict[str, _File]


class _Repo:
    def __init__(self, repo_id: str, private: bool) -> None:
        self.id, self.private = repo_id, private
        self._commits: Dict[str, _Commit] = {}
        self.branches: Dict[str, str] = {}
        self.tags: Dict[str, str] = {}
        self.objects: Dict[str, bytes] = {}  # what was uploaded as LFS, by sha256

    def commit(self, revision: str) -> _Commit:
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        if sha not in self._commits:
            raise _Error(404, f'Invalid rev id: {revision}', 'RevisionNotFound')
        return self._commits[sha]

    def push(self, branch: str, changes: Dict[str, Optional[bytes]], message: str) -> str:
        """A commit on top of a branch, a new branch starting at main; None deletes a file."""
        parent = self.branches.get(branch) or self.branches.get('main')
        files = dict(self._commits[parent].files) if parent else {}
        for path, data in changes.items():
            if data is None:
                del files[path]
            else:
                files[path] = _File(path, data)
                if files[path].sha256:
                    self.objects[files[path].sha256] = data
        tree = [(path, file.etag) for path, file in sorted(files.items())]
        # the number of commits, so that the same change twice is two commits
        sha = hashlib.sha1(repr((self.id, parent, len(self._commits), message, tree)).encode()).hexdigest()
        self._commits[sha] = _Commit(sha, parent, message, files)
        self.branches[branch] = sha
        return sha

    def file(self, revision: str, path: str) -> Tuple[_Commit, _File]:
        commit = self.commit(revision)
        if path not in commit.files:
            # with the commit, by which the client remembers that the file does not exist
            raise _Error(404, 'Entry not found', 'EntryNotFound', **{'X-Repo-Commit': commit.sha})
        return commit, commit.files[path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True  # else a delayed acknowledgement costs 40 ms for each answer with a body

    def _handle(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        request = _Incoming(self.command, url.path, parse_qs(url.query), self.headers, body)
        answer = self.server.hub._answer(request)
        self.send_response(answer.status)
        for name, value in {'Content-Length': str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(answer.body[:answer.cut])
        if answer.cut is not None:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, *args: Any) -> None:
        pass


def _json(value: Any, status: int = 200, headers: Optional[Dict[str, str]] = None) -> _Answer:
    return _Answer(status, json.dumps(value).encode(), {'Content-Type': 'application/json', **(headers or {})})


class HubServer:
    """Runs in a with statement. Reading needs a token for private repositories only; writing needs a
    token, and a namespace that is the user or one of the organizations."""

    def __init__(self) -> None:
        self.user = 'tester'
        self.organizations: List[str] = []
        self.tokens: Set[str] = set()
        self._repos: Dict[str, _Repo] = {}
        self._faults: List[_Fault] = []
        self._corrupted: Dict[Tuple[str, str], Callable[[bytes], bytes]] = {}
        self._requests: List[Request] = []
        self._served: Counter = Counter()
        self._lock = threading.RLock()
        self._exit = ExitStack()
        self.url = ''

    def __enter__(self) -> 'HubServer':
        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Handler)
        server.hub = self
        self.url = f'http://127.0.0.1:{server.server_port}'
        # another origin than url, as the storage of the Hub: the client does not send its token there
        self._storage = f'http://localhost:{server.server_port}'
        threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True).start()
        self._exit.callback(server.server_close)
        self._exit.callback(server.shutdown)
        return self

    def __exit__(self, *args: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Before the end of the with statement: from now on connections are refused."""
        self._exit.close()

    # The contents

    def add(
            self,
            repo_id: str,
            files: Dict[str, Optional[bytes]],
            revision: str = 'main',
            private: Optional[bool] = None,
            message: str = 'Add files',
    ) -> str:
        """Commit files on top of a branch, None to delete one; a new repository is public unless private. The sha."""
        with self._lock:
            repo = self._repos.setdefault(repo_id, _Repo(repo_id, False))
            if private is not None:
                repo.private = private
            return repo.push(revision, files, message)

    def tag(self, repo_id: str, tag: str, revision: str = 'main') -> None:
        with self._lock:
            self._repos[repo_id].tags[tag] = self._repos[repo_id].commit(revision).sha

    def files(self, repo_id: str, revision: str = 'main') -> Dict[str, bytes]:
        with self._lock:
            return {path: file.data for path, file in self._repos[repo_id].commit(revision).files.items()}

    def commits(self, repo_id: str, revision: str = 'main') -> List[str]:
        """The commits of a revision, oldest first."""
        with self._lock:
            repo = self._repos[repo_id]
            shas = [repo.commit(revision).sha]
            while parent := repo.commit(shas[0]).parent:
                shas.insert(0, parent)
            return shas

    def message(self, repo_id: str, revision: str = 'main') -> str:
        with self._lock:
            return self._repos[repo_id].commit(revision).message

    def is_private(self, repo_id: str) -> bool:
        return self._repos[repo_id].private

    @property
    def repos(self) -> List[str]:
        return list(self._repos)

    # Faults: patterns are searched in the unquoted path, and the first fault that is left and matches is used

    def fail(
            self,
            pattern: str,
            status: int = 500,
            times: int = 1,
            method: Optional[str] = None,
            headers: Optional[Dict[str, str]] = None,
            content: Any = None,
    ) -> None:
        """Answer requests with a status and JSON, e.g. with headers={'X-Error-Code': 'EntryNotFound'}."""
        self._faults.append(_Fault(pattern, times, method, status=status, headers=headers, content=content))

    def cut(self, pattern: str, after: int, times: int = 1) -> None:
        """Close the connection after so many bytes of the body that GET announced."""
        self._faults.append(_Fault(pattern, times, 'GET', cut=after))

    def corrupt(self, repo_id: str, path: str, change: Callable[[bytes], bytes]) -> None:
        """Serve other bytes for a file than the ones its ETag and size are of."""
        self._corrupted[repo_id, path] = change

    def clear_faults(self) -> None:
        self._faults.clear()
        self._corrupted.clear()

    # Requests received

    @property
    def requests(self) -> List[Request]:
        with self._lock:
            return list(self._requests)

    def clear_requests(self) -> None:
        with self._lock:
            self._requests.clear()
            self._served.clear()

    def bytes_served(self, repo_id: str, path: str) -> int:
        """How many bytes of a file were sent, over all requests."""
        return self._served[repo_id, path]

    # The client

    @staticmethod
    def _paths(home: Union[str, Path]) -> Dict[str, str]:
        names = {'HF_HOME': '', 'HF_HUB_CACHE': 'hub', 'HF_ASSETS_CACHE': 'assets', 'HF_TOKEN_PATH': 'token'}
        return {name: str(Path(home, part)) for name, part in names.items()}

    def environment(self, home: Union[str, Path], token: Optional[str] = None) -> Dict[str, str]:
        """The environment variables for a subprocess, to be laid over the present ones."""
        return {
            **self._paths(home),
            'HF_ENDPOINT': self.url,
            'HF_TOKEN': token or '',
            'HUGGING_FACE_HUB_TOKEN': '',
            'HF_OIDC_RESOURCE': '',
            'HF_HUB_OFFLINE': '0',
            'HF_HUB_DISABLE_XET': '1',
            'HF_HUB_DISABLE_TELEMETRY': '1',
            'HF_HUB_DISABLE_IMPLICIT_TOKEN': '0',
            'HF_HUB_DISABLE_UPDATE_CHECK': '1',
            'NO_PROXY': '127.0.0.1,localhost',
            'no_proxy': '127.0.0.1,localhost',
        }

    def client_settings(self, home: Union[str, Path], chunk_size: int = 500) -> Dict[str, Any]:
        """Values by dotted name: what the client read from the environment when it was imported, and its pauses."""
        paths = self._paths(home)
        constants = {
            **paths,
            'HUGGINGFACE_HUB_CACHE': paths['HF_HUB_CACHE'],
            'HUGGINGFACE_ASSETS_CACHE': paths['HF_ASSETS_CACHE'],
            'HF_STORED_TOKENS_PATH': str(Path(home, 'stored_tokens')),
            'AGENT_HARNESSES_PATH': str(Path(home, '.agent_harnesses.json')),
            'ENDPOINT': self.url,
            'HUGGINGFACE_CO_URL_TEMPLATE': self.url + '/{repo_id}/resolve/{revision}/{filename}',
            'HF_HUB_OFFLINE': False,
            'HF_HUB_DISABLE_XET': True,
            'HF_HUB_DISABLE_TELEMETRY': True,
            'HF_HUB_DISABLE_IMPLICIT_TOKEN': False,
            # a cut download resumes after the last whole chunk, and chunks are of 10 MB
            'DOWNLOAD_CHUNK_SIZE': chunk_size,
        }
        no_pauses = types.SimpleNamespace(**{**vars(time), 'sleep': lambda seconds: None})
        return {
            **{f'huggingface_hub.constants.{name}': value for name, value in constants.items()},
            'huggingface_hub.utils._cache_manager.HF_HUB_CACHE': paths['HF_HUB_CACHE'],
            'huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE': paths['HF_ASSETS_CACHE'],
            'huggingface_hub.hf_api.api.endpoint': self.url,  # used by huggingface_hub.model_info() and others
            'huggingface_hub.utils._http.time': no_pauses,
            'huggingface_hub.file_download.time': no_pauses,
        }

    def use(self, monkeypatch: Any, home: Union[str, Path], token: Optional[str] = None, chunk_size: int = 500) -> None:
        """Let the client of this process talk to this server, with its cache in home and without pauses."""
        from huggingface_hub import close_session

        for name, value in self.environment(home, token).items():
            monkeypatch.setenv(name, value)
        for name, value in self.client_settings(home, chunk_size).items():
            monkeypatch.setattr(name, value, raising=False)
        close_session()  # the proxies were read when the session was made
        self._exit.callback(close_session)

    # Answering

    def _answer(self, request: _Incoming) -> _Answer:
        path, asked_range = unquote(request.path), request.headers.get('Range')
        with self._lock:
            fault = next((
                f for f in self._faults
                if f.times and f.method in (None, request.method) and re.search(f.pattern, path)
            ), None)
            if fault:
                fault.times -= 1
            if fault and fault.status:
                content = {'error': 'a fault on demand'} if fault.content is None else fault.content
                answer = _json(content, fault.status, fault.headers)
            else:
                try:
                    answer = self._route(request)
                except _Error as e:
                    answer = e.answer
                answer.cut = fault.cut if fault else None
            if answer.file and request.method == 'GET':
                self._served[answer.file] += len(answer.body[:answer.cut])
            self._requests.append(Request(request.method, path, answer.status, asked_range))
        return answer

    def _route(self, request: _Incoming) -> _Answer:
        authorization = request.headers.get('Authorization')
        known = authorization is not None and authorization.removeprefix('Bearer ') in self.tokens
        if authorization is not None and not known:
            raise _Error(401, 'Invalid credentials in Authorization header')
        for methods, pattern, access, endpoint in _ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match is None or request.method not in methods.split():
                continue
            arguments = [unquote(group) if group else None for group in match.groups()]
            if access in ('token', 'write') and not known:
                raise _Error(401, 'Invalid username or password.')
            if access == 'signed' and known:  # tokens must not be sent to signed addresses
                raise _Error(400, 'Only one auth mechanism allowed')
            if access != 'token':
                repo = self._repos.get(arguments[0])
                if repo is None or (repo.private and access != 'signed' and not known):
                    raise _Error(404 if known else 401, 'Repository not found', 'RepoNotFound')
                if access == 'write':
                    self._check_namespace(repo.id)
                arguments[0] = repo
            return endpoint(self, request, *arguments)
        raise _Error(404, f'Not implemented: {request.method} {request.path}')

    def _check_namespace(self, repo_id: str) -> None:
        namespace = repo_id.split('/')[0]
        if namespace not in (self.user, *self.organizations):
            raise _Error(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')

    def _serve(self, request: _Incoming, repo: _Repo, path: str, data: bytes, headers: Dict[str, str]) -> _Answer:
        size = len(data)
        if request.method == 'GET':
            data = self._corrupted.get((repo.id, path), bytes)(data)
        headers = {**headers, 'Accept-Ranges': 'bytes'}
        match = re.fullmatch(r'bytes=(\d+)-(\d*)', request.headers.get('Range', ''))
        if match is None:
            return _Answer(200, data, headers, (repo.id, path))
        start, end = int(match[1]), min(int(match[2] or size - 1), size - 1)
        if start > end:
            raise _Error(416, 'Range not satisfiable', **{'Content-Range': f'bytes */{size}'})
        headers['Content-Range'] = f'bytes {start}-{end}/{size}'
        return _Answer(206, data[start:end + 1], headers, (repo.id, path))

    def _resolve(self, request: _Incoming, repo: _Repo, revision: str, path: str) -> _Answer:
        commit, file = repo.file(revision, path)
        headers = {'X-Repo-Commit': commit.sha, 'ETag': f'"{file.etag}"'}
        if not file.sha256:
            return self._serve(request, repo, path, file.data, headers)
        location = f'{self._storage}/lfs/{repo.id}/{file.sha256}/{quote(path)}'
        headers.update({'X-Linked-ETag': f'"{file.sha256}"', 'X-Linked-Size': str(file.size), 'Location': location})
        return _Answer(302, b'', headers)

    def _download(self, request: _Incoming, repo: _Repo, sha256: str, path: str) -> _Answer:
        return self._serve(request, repo, path, repo.objects[sha256], {'ETag': f'"{sha256}"'})

    def _upload(self, request: _Incoming, repo: _Repo, sha256: str) -> _Answer:
        if hashlib.sha256(request.body).hexdigest() != sha256:
            raise _Error(400, 'The content is not of this sha256')
        repo.objects[sha256] = request.body
        return _Answer()

    def _whoami(self, request: _Incoming) -> _Answer:
        return _json({'type': 'user', 'name': self.user, 'orgs': [{'name': name} for name in self.organizations]})

    def _validate_yaml(self, request: _Incoming) -> _Answer:
        return _json({'errors': [], 'warnings': []})

    def _create(self, request: _Incoming) -> _Answer:
        payload = json.loads(request.body)
        repo_id = f"{payload.get('organization') or self.user}/{payload['name']}"
        self._check_namespace(repo_id)
        answer = {'url': f'{self.url}/{repo_id}', 'name': repo_id}
        if repo_id in self._repos:
            return _json({**answer, 'error': 'You already created this model repo'}, 409)
        private = payload.get('visibility') == 'private' or payload.get('private', False)
        self.add(repo_id, {'.gitattributes': _ATTRIBUTES}, private=private, message='initial commit')
        return _json(answer)

    def _info(self, request: _Incoming, repo: _Repo, revision: Optional[str]) -> _Answer:
        commit = repo.commit(revision or 'main')
        return _json({
            'id': repo.id,
            'modelId': repo.id,
            'author': repo.id.split('/')[0],
            'sha': commit.sha,
            'private': repo.private,
            'gated': False,
            'tags': [],
            'siblings': [
                file.sibling() if 'blobs' in request.query else {'rfilename': path}
                for path, file in commit.files.items()
            ],
        })

    def _tree(self, request: _Incoming, repo: _Repo, revision: str, folder: Optional[str]) -> _Answer:
        files = repo.commit(revision).files.items()  # of all folders, as recursive=True asks
        return _json([file.entry() for path, file in sorted(files) if path.startswith(f'{folder}/' if folder else '')])

    def _paths_info(self, request: _Incoming, repo: _Repo, revision: str) -> _Answer:
        files, paths = repo.commit(revision).files, parse_qs(request.body.decode()).get('paths', [])
        return _json([files[path].entry() for path in paths if path in files])

    def _create_ref(self, request: _Incoming, repo: _Repo, kind: str, name: str) -> _Answer:
        body = json.loads(request.body)
        refs, name, source = {
            'branch': (repo.branches, name, body.get('startingPoint', 'main')),
            'tag': (repo.tags, body.get('tag'), name),
        }[kind]
        if name in refs:
            raise _Error(409, f'Reference already exists: {name}')
        refs[name] = repo.commit(source).sha
        return _json({})

    def _preupload(self, request: _Incoming, repo: _Repo, revision: str) -> _Answer:
        present = repo.commit(revision).files
        return _json({'files': [{
            'path': file['path'],
            'uploadMode': 'lfs' if file['path'].endswith(_LFS_SUFFIXES) else 'regular',
            'shouldIgnore': False,
            **({'oid': present[file['path']].etag} if file['path'] in present else {}),
        } for file in json.loads(request.body)['files']]})

    def _batch(self, request: _Incoming, repo: _Repo) -> _Answer:
        objects = json.loads(request.body)['objects']
        for item in objects:
            if item['oid'] not in repo.objects:
                item['actions'] = {'upload': {'href': f"{self._storage}/lfs/{repo.id}/{item['oid']}"}}
        return _json({'transfer': 'basic', 'objects': objects})

    def _commit(self, request: _Incoming, repo: _Repo, branch: str) -> _Answer:
        if branch not in repo.branches:
            raise _Error(404, f'Invalid rev id: {branch}', 'RevisionNotFound')
        head, changes, message = repo.commit(branch), {}, ''
        for line in request.body.splitlines():
            key, value = (json.loads(line)[name] for name in ('key', 'value'))
            path = value.get('path', '').rstrip('/')
            if key == 'header':
                message = value['summary']
                if value.get('parentCommit', head.sha) != head.sha:
                    raise _Error(412, 'A commit has happened since. Please refresh and try again.')
            elif key == 'file':
                changes[path] = base64.b64decode(value['content'])
            elif key == 'lfsFile':
                if value['oid'] not in repo.objects:
                    raise _Error(400, 'An LFS pointer pointed to a file that does not exist')
                changes[path] = repo.objects[value['oid']]
            else:
                folder = key == 'deletedFolder'
                deleted = [name for name in head.files if name == path or (folder and name.startswith(f'{path}/'))]
                if not deleted:
                    raise _Error(404, "A file with this name doesn't exist", 'EntryNotFound')
                changes.update(dict.fromkeys(deleted))
        sha = repo.push(branch, changes, message)
        return _json({'success': True, 'commitOid': sha, 'commitUrl': f'{self.url}/{repo.id}/commit/{sha}'})


_REPO, _REVISION, _REST = '([^/]+/[^/]+)', '([^/]+)', '(.+)'
# who may: anyone who may read the repository, or write to it; anyone with a token; anyone who was given the address
_ROUTES = (
    ('GET HEAD', f'/{_REPO}/resolve/{_REVISION}/{_REST}', 'read', HubServer._resolve),
    ('GET HEAD', f'/lfs/{_REPO}/([0-9a-f]{{64}})/{_REST}', 'signed', HubServer._download),
    ('PUT', f'/lfs/{_REPO}/([0-9a-f]{{64}})', 'signed', HubServer._upload),
    ('POST', f'/{_REPO}.git/info/lfs/objects/batch', 'write', HubServer._batch),
    ('GET', '/api/whoami-v2', 'token', HubServer._whoami),
    ('POST', '/api/validate-yaml', 'token', HubServer._validate_yaml),
    ('POST', '/api/repos/create', 'token', HubServer._create),
    ('GET', f'/api/models/{_REPO}(?:/revision/{_REVISION})?', 'read', HubServer._info),
    ('GET', f'/api/models/{_REPO}/tree/{_REVISION}(?:/{_REST})?', 'read', HubServer._tree),
    ('POST', f'/api/models/{_REPO}/paths-info/{_REVISION}', 'read', HubServer._paths_info),
    ('POST', f'/api/models/{_REPO}/(branch|tag)/{_REVISION}', 'write', HubServer._create_ref),
    ('POST', f'/api/models/{_REPO}/preupload/{_REVISION}', 'write', HubServer._preupload),
    ('POST', f'/api/models/{_REPO}/commit/{_REVISION}', 'write', HubServer._commit),
)
