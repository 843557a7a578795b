"""The lists of wrong changes are of the present code."""
from pathlib import Path

import pytest

from tests.mutation.run import read_mutants


@pytest.mark.parametrize('name', ['mutants.yaml', 'independent.yaml'])
def test_texts_occur_once(name):
    """Every text that a mutant replaces occurs once in its file, or reading the list fails."""
    mutants = read_mutants(path=Path(__file__).with_name(name))
    assert len({str(mutant) for mutant in mutants}) == len(mutants)
