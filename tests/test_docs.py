"""The documentation site: it builds without a warning, and its reference has the whole public API."""
import os
import re
import sys

import pytest

import timm_rep
from tests.helpers import ROOT, run

pytest.importorskip('mkdocs', reason='the extra docs is not installed')


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp('docs') / 'site'
    env = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
    run([sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', folder], cwd=ROOT, env=env)
    return folder


def test_builds_without_warnings(site):
    """Strict mode fails for links, anchors and names that lead nowhere."""
    assert (site / 'index.html').is_file()


def test_reference_is_complete(site):
    page = (site / 'reference' / 'index.html').read_text()
    documented = set(re.findall(r'id="timm_rep\.(\w+)"', page))
    assert documented == {name for name in timm_rep.__all__ if not name.startswith('__')}


def test_every_function_is_in_an_example():
    """Examples are run by test_how_to.py and test_readme.py."""
    pages = [ROOT / 'README.md', ROOT / 'hub' / 'README.md', *(ROOT / 'docs' / 'how-to').glob('*.md')]
    text = ''.join(page.read_text() for page in pages)
    code = ''.join(re.findall(r'^```python\n(.*?)^```', text, re.MULTILINE | re.DOTALL))
    missing = [name for name in timm_rep.__all__ if name != '__version__' and f'timm_rep.{name}' not in code]
    assert not missing


def test_equations_are_drawn_without_scripts(site):
    page = (site / 'explanation' / 'conversion' / 'index.html').read_text()
    assert '<math' in page
    assert not re.search(r'EQUATION\d+PLACE|\$\$', page)


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob('*.html'):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [url for url in loaded if not url.startswith('https://timm-rep.github.io/')], page
