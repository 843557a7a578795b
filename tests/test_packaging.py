"""The source distribution and the wheel: what they contain, and that the wheel works without a checkout."""
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.helpers import ROOT, run

URL = 'https://github.com/timm-rep/timm-rep'
pytest.importorskip('setuptools', minversion='77', reason='builds the distributions')


def tracked():
    """Paths of the files that belong to the repository."""
    if not (ROOT / '.git').exists():
        pytest.skip('git knows which files belong to the repository, and this is no clone')
    return subprocess.run(
        ['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip('\0').split('\0')


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """Folder with an sdist of the repository, a wheel made from it, and the unpacked sdist in 'source'."""
    folder = tmp_path_factory.mktemp('packaging')
    for path in tracked():
        (folder / 'clone' / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / 'clone' / path)
    (folder / 'clone' / 'stray.py').touch()
    (folder / 'clone' / 'tests' / 'stray.pyc').touch()
    build = 'from setuptools import build_meta; build_meta.build_{}({!r})'
    run([sys.executable, '-c', build.format('sdist', str(folder))], cwd=folder / 'clone')
    sdist, = folder.glob('*.tar.gz')
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, 'data_filter', None)  # Python < 3.11.4 has none
        archive.extractall(folder)
    (folder / sdist.name.removesuffix('.tar.gz')).rename(folder / 'source')
    run([sys.executable, '-c', build.format('wheel', str(folder))], cwd=folder / 'source')
    return folder


@pytest.fixture(scope='module')
def installed(built):
    """Folder of the installed wheel, and an environment that has it in place of the checkout."""
    wheel, = built.glob('*.whl')
    target = built / 'site'
    run([sys.executable, '-m', 'pip', 'install', '--no-deps', '--no-index', '--target', target, wheel])
    env = {name: value for name, value in os.environ.items() if not name.startswith('TIMM_REP_')}
    # of the other folders, those in which the dependencies may be
    path = [str(target), *(p for p in env.get('PYTHONPATH', '').split(os.pathsep) if p and p != str(ROOT))]
    return target, {**env, 'PYTHONPATH': os.pathsep.join(path), 'HF_HUB_OFFLINE': '1'}


def test_sdist(built):
    """The files of the repository, with all tests and what they need, and those that setuptools generates."""
    sdist, = built.glob('*.tar.gz')
    with tarfile.open(sdist) as archive:
        files = {member.name.partition('/')[2] for member in archive if member.isfile()}
    generated = {path for path in files if path.startswith('timm_rep.egg-info/')} | {'PKG-INFO', 'setup.cfg'}
    assert files - generated == {path for path in tracked() if not path.startswith('.')}
    assert {'tests/conftest.py', 'tests/helpers.py', 'CHANGELOG.md', 'hub/README.md', 'scripts/bench.py'} <= files


def test_wheel(built):
    """The files of the package, and nothing else."""
    wheel, = built.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if '.dist-info/' not in name}
    assert files == {path for path in tracked() if path.startswith('timm_rep/')}
    assert wheel.stat().st_size < 1e6


def test_metadata(built):
    """Author, addresses, and README.md with links to files of the repository in place of relative ones."""
    wheel, = built.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        name, = (name for name in archive.namelist() if name.endswith('/METADATA'))
        text = archive.read(name).decode()
    metadata = email.message_from_string(text)
    assert metadata['Author'] == 'timm-rep developers'
    urls = dict(url.split(', ') for url in metadata.get_all('Project-URL'))
    assert urls == {'Repository': URL, 'Issues': f'{URL}/issues', 'Changelog': f'{URL}/blob/main/CHANGELOG.md'}
    assert metadata['Description-Content-Type'] == 'text/markdown'
    description = text.partition('\n\n')[2]
    assert re.findall(r'\]\((?!https://)(.*?)\)', description) == []
    for path in re.findall(rf'\]\({URL}/(?:raw|blob)/main/(.*?)\)', description):
        assert (ROOT / path).is_file()
    readme = (ROOT / 'README.md').read_text()
    pictures = re.findall(r'!\[[^\]]*\]\((?!https://)(.*?)\)', readme)
    assert pictures
    assert all(f']({URL}/raw/main/{path})' in description for path in pictures)
    assert re.sub(rf'\]\({URL}/(?:raw|blob)/main/', '](', description).strip() == readme.strip()


def test_twine(built):
    pytest.importorskip('twine')
    distributions = [*built.glob('*.whl'), *built.glob('*.tar.gz')]
    out = run([sys.executable, '-m', 'twine', 'check', '--strict', *distributions])
    assert out.count('PASSED') == 2


_WITHOUT_CHECKOUT = '''
import sys
from pathlib import Path
import timm, timm_rep
assert Path(timm_rep.__file__).is_relative_to(sys.argv[1]), timm_rep.__file__
timm.create_model('repopt_vgg_a0', num_classes=10)
assert timm_rep.Scales.load('repopt_vgg_a0').summary()
try:
    timm.create_model('repa_any.cifar10', pretrained=True)
except RuntimeError as e:
    assert 'TIMM_REP_HUB: not set' in str(e), e
else:
    raise AssertionError('there is no folder of weights')
'''


@pytest.mark.slow
def test_without_checkout(installed, tmp_path):
    """Packaged scales, the advice on weights in hub/, and the command, in an empty directory."""
    target, env = installed
    run([sys.executable, '-c', _WITHOUT_CHECKOUT, target], cwd=tmp_path, env=env)
    load = "import timm, timm_rep; timm.create_model('repa_any.cifar10', pretrained=True)"
    run([sys.executable, '-c', load], cwd=tmp_path, env={**env, 'TIMM_REP_HUB': str(ROOT / 'hub')})
    command = [sys.executable, target / 'bin' / 'timm-rep', 'models', 'repa_deit_base']
    assert 'repa_deit_base' in run(command, cwd=tmp_path, env=env)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_readme_without_checkout(built, installed, tmp_path):
    """The Python blocks of README.md run with the wheel, by the test of the sdist, whose own package is removed."""
    _, env = installed
    tests = tmp_path / 'sdist'
    shutil.copytree(built / 'source', tests, ignore=shutil.ignore_patterns('build', 'timm_rep', '*.egg-info'))
    out = run([
        sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-n', '0', 'tests/test_readme.py::test_readme'],
        cwd=tests, env=env)
    assert '1 passed' in out
