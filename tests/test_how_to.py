"""The code of README.md and the how-to pages prints what stands below it; ``--update-examples`` rewrites that."""
import re
from itertools import groupby

import pytest

from tests.helpers import ROOT

pytest_examples = pytest.importorskip('pytest_examples', reason='pytest-examples is not installed')
PAGES = {
    path.stem: list(examples) for path, examples in groupby(
        pytest_examples.find_examples(str(ROOT / 'README.md'), str(ROOT / 'docs' / 'how-to')),
        key=lambda example: example.path)
    if path.stem != 'use-other-trainers'}  # run by test_other_trainers.py, if the trainers are installed
# run by default
_FAST = ('declare-a-block-of-your-own', 'search-for-scales', 'publish-a-model')
_NUMBER = re.compile(r'\d+(?:\.\d+)?')


@pytest.fixture
def account(hub):
    hub.tokens.add('hf_secret')
    hub.organizations.append('my-organization')
    return 'hf_secret'


@pytest.mark.parametrize(
    'page', [pytest.param(page, marks=[] if page in _FAST else pytest.mark.slow) for page in PAGES])
def test_page(page, request, eval_example, capsys, monkeypatch, tmp_path):
    """The blocks of a page share one namespace. Numbers may differ by 5%: processors round differently."""
    if page == 'publish-a-model':
        monkeypatch.setenv('HF_TOKEN', request.getfixturevalue('account'))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'hub').symlink_to(ROOT / 'hub')
    (tmp_path / 'examples').symlink_to(ROOT / 'examples')
    eval_example.set_config(line_length=120)
    names = {}
    for example in PAGES[page]:
        if eval_example.update_examples:
            names.update(eval_example.run_print_update(example, module_globals=names))
            continue
        names.update(eval_example.run(example, module_globals=names))
        printed, expected = capsys.readouterr().out, '\n'.join(re.findall(r'#> (.*)', example.source))
        assert _NUMBER.sub('0', printed).split() == _NUMBER.sub('0', expected).split()
        numbers = [[float(number) for number in _NUMBER.findall(text)] for text in (printed, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05)
