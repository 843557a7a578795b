from collections import Counter

import pytest

from timm_rep.paper import PAPER_ROWS, _agreement, _count, count_row
from timm_rep.utils.profiling import Macs

# the first table's rows of these models; building the others takes a minute
QUICK = ('deit_tiny', 'swin_tiny', 'poolformer_s12', 'repopt_vgg_b1')


@pytest.mark.parametrize('row', [
    pytest.param(
        row, id=f'{row.paper}-{row.table}-{row.label}-{row.folded}',
        marks=() if row.table == 1 and any(name in row.model for name in QUICK) else pytest.mark.slow)
    for row in PAPER_ROWS])
def test_every_row(row):
    """Parameters agree within 0.1 M, and MACs with one of the two counts: within 3%, or when rounded.

    Rows with other MACs have a note.
    """
    count = count_row(row)
    assert abs(count.params / 1e6 - row.params) <= 0.1
    assert (count.agrees is None) == bool(row.note)
    if row.note:
        return
    nearest = count.macs.total if count.agrees.startswith('with ') else count.macs.projections
    if count.agrees.endswith('rounded'):
        assert round(nearest / 1e9, 1) == row.gmacs
    else:
        assert abs(nearest / 1e9 - row.gmacs) <= 0.03 * row.gmacs


def test_tables_are_covered():
    """The numbers of rows are as in the papers' tables."""
    tables = {
        paper: Counter(row.table for row in PAPER_ROWS if row.paper == paper)
        for paper in {row.paper for row in PAPER_ROWS}
    }
    assert tables == {'RePaFormer': {1: 30, 2: 30, 3: 2, 4: 10, 5: 4, 8: 12}, 'RepOptimizers': {1: 4}}
    assert len({(row.paper, row.table, row.label, row.folded) for row in PAPER_ROWS}) == len(PAPER_ROWS)


def test_only_one_model_disagrees():
    assert {row.model for row in PAPER_ROWS if row.note} == {'poolformer_s12'}


def test_agreement():
    macs = Macs(projections=1_000_000_000, attention=200_000_000)
    assert _agreement(1.02, macs) == 'without attention'
    assert _agreement(1.19, macs) == 'with attention'
    assert _agreement(1.1, macs) is None
    assert _agreement(0.6, Macs(640_000_000, 180_000_000)) == 'without attention, rounded'


def test_counting_downloads_nothing(hub):
    _count.cache_clear()
    for row in [row for row in PAPER_ROWS if row.model.startswith('repopt_')]:
        count_row(row)
    assert not hub.requests
