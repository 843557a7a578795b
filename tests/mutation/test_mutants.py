"""The list of wrong changes is of the present code."""
from tests.mutation.run import read_mutants


def test_texts_occur_once():
    """Every text that a mutant replaces occurs once in its file, or reading the list fails."""
    mutants = read_mutants()
    assert len({str(mutant) for mutant in mutants}) == len(mutants)
