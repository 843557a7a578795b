"""The documentation site: it builds without a warning, and its reference has the whole public API."""
import doctest
import functools
import http.server
import importlib
import os
import re
import sys
import threading
from urllib.parse import unquote, urldefrag

import pytest
import timm
import torch

import timm_rep
from tests.browser import find_chromium, open_page
from tests.helpers import ROOT, run
from timm_rep import cli

pytest.importorskip('mkdocs', reason='the extra docs is not installed')


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp('docs') / 'timm-rep'  # the folder of site_url
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


def test_every_command_is_listed():
    page = (ROOT / 'docs' / 'reference' / 'commands.md').read_text()
    commands = [command.__name__.rpartition('.')[2].replace('_', '-') for command in cli._COMMANDS]
    assert re.findall(r'^\| `([\w-]+)` \|', page, re.MULTILINE) == commands


def _documented():
    """The functions and classes of the reference, but for what functions return, by name."""
    names = {}
    for page in ('index.md', 'extending.md'):
        text = (ROOT / 'docs' / 'reference' / page).read_text().partition('\n## Results')[0]
        for name in re.findall(r'^::: (\S+)', text, re.MULTILINE):
            module, _, attribute = name.rpartition('.')
            names[name] = getattr(importlib.import_module(module), attribute)
    return names


def test_every_name_is_in_an_example():
    """An example in its docstring, or on a page that test_how_to.py or test_readme.py runs."""
    pages = [ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'hub/README.md')]
    text = ''.join(page.read_text() for page in (*pages, *(ROOT / 'docs' / 'how-to').glob('*.md')))
    code = ''.join(re.findall(r'^```python\n(.*?)^```', text, re.MULTILINE | re.DOTALL))
    documented = _documented()
    assert len(documented) > 25
    for name, found in documented.items():
        assert '>>> ' in found.__doc__ or re.search(rf'\b{found.__name__}\b', code), f'{name} has no example'


@pytest.mark.parametrize('name', [name for name, found in _documented().items() if '>>> ' in found.__doc__])
def test_examples_of_docstrings(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = _documented()[name]
    names = {**vars(sys.modules[found.__module__]), 'timm': timm}
    torch.manual_seed(0)
    test = doctest.DocTestParser().get_doctest(found.__doc__, names, name, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    output = []
    runner.run(test, out=output.append)
    assert not runner.failures, ''.join(output)


def test_equations_are_drawn_without_scripts(site):
    page = (site / 'explanation' / 'conversion' / 'index.html').read_text()
    assert '<math' in page
    assert not re.search(r'EQUATION\d+PLACE|\$\$', page)


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob('*.html'):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [url for url in loaded if not url.startswith('https://timm-rep.github.io/')], page


def test_roles_of_docstrings_are_links(site):
    page = (site / 'reference' / 'index.html').read_text()
    assert not re.search(r':(?:func|class|meth|attr):', page)
    assert re.search(r'href="#timm_rep.convert_to_repa"[^>]*><code>', page)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def url(site):
    """Address of the site on loopback."""
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(_Quiet, directory=site.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_address[1]}/timm-rep/'
        server.shutdown()


@pytest.fixture
def page(tmp_path):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip('there is no Chromium here')
    with open_page(chromium, tmp_path) as page:
        yield page


# a browser asks GitHub for the stars of the repository, which fails here and does no harm
_STARS = 'https://api.github.com/'
_WIDER = """[...document.querySelectorAll('.md-content *')].filter(
    x => x.getBoundingClientRect().right > innerWidth + 1 && !x.closest('.md-typeset__scrollwrap, pre, math')
).map(x => x.outerHTML.slice(0, 80))"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_a_browser(site, url, page):
    """No errors, no link that leads nowhere, nothing wider than the window, on a desktop and on a phone."""
    links, anchors = {}, {}
    for path in sorted(site.rglob('*.html')):
        address = url + path.relative_to(site).as_posix().removesuffix('index.html')
        for width in (1280, 390):
            page.open(address, width)
            assert page.evaluate('document.documentElement.scrollWidth') <= width, (address, page.evaluate(_WIDER))
            broken = page.evaluate('[...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)')
            assert not broken, address
        anchors[address] = set(page.evaluate("[...document.querySelectorAll('[id]')].map(x => x.id)"))
        links[address] = page.evaluate('[...document.links].map(x => x.href)')
    assert not [error for error in page.errors if _STARS not in error]
    assert len(links) > 20
    for address, found in links.items():
        for link in found:
            if not link.startswith(url):
                continue
            target, anchor = urldefrag(link)
            if target in anchors:
                assert not anchor or unquote(anchor) in anchors[target], f'{address}: {link}'
            else:
                assert (site / unquote(target.removeprefix(url))).is_file(), f'{address}: {link}'


@pytest.mark.slow
def test_search(url, page):
    page.open(url, 1280)
    page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    page.call('Input.insertText', text='weight selection')
    found = page.wait_for("[...document.querySelectorAll('.md-search-result__link')].map(x => x.href).join(' ')")
    assert f'{url}results/weight-selection/' in found
    assert not [error for error in page.errors if _STARS not in error]
