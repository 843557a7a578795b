"""The lists of wrong changes are of the present code."""
from pathlib import Path

import pytest

from tests.mutation.run import Mutant, merge, read_mutants


@pytest.mark.parametrize('name', ['mutants.yaml', 'independent.yaml', 'unseen.yaml'])
def test_texts_occur_once(name):
    """Every text that a mutant replaces occurs once in its file, or reading the list fails."""
    mutants = read_mutants(path=Path(__file__).with_name(name))
    assert len({mutant.what for mutant in mutants}) == len(mutants)


def test_a_list_that_runs_in_parts():
    """Results of earlier runs stay; that a mutant was not caught at first is kept."""
    a, b, c, d = (Mutant('x.py', what, 'tests', 'old', 'new') for what in 'abcd')
    rows = [dict(file='x.py', what=what, outcome=outcome) for what, outcome in (
        ('a', 'survived'), ('b', 'failed'), ('gone', 'failed'))]
    rows[1]['file'] = 'moved.py'
    content = merge(rows, [dict(file='x.py', what='a', outcome='failed')], [a, b, c])
    assert [(row['what'], row['outcome']) for row in content['mutants']] == [('a', 'failed'), ('b', 'failed')]
    assert {row['file'] for row in content['mutants']} == {'x.py'}
    assert (content['caught'], content['caught_at_first'], content['not_run']) == (2, 1, ['x.py: c'])
    again = merge(
        content['mutants'],
        [dict(file='x.py', what=what, outcome=outcome) for what, outcome in (('a', 'failed'), ('d', 'hung'))],
        [a, b, c, d])
    assert (again['caught'], again['caught_at_first'], again['not_run']) == (3, 2, ['x.py: c'])
    assert (content['hung'], again['hung']) == (0, 1)
