import pytest
import torch

from timm_rep.init import evenly_spaced, select_elements
from timm_rep.utils.modes import default_dtype

CONSISTENT = ('uniform', 'consecutive', 'random')


def test_recorded_selections(recorded):
    tensors, config = recorded('weight_selection_uniform')
    for i, (teacher, student) in enumerate(config['cases']):
        assert list(tensors[f'{i}.teacher'].shape) == teacher
        selected, _ = select_elements(tensors[f'{i}.teacher'], student)
        assert torch.equal(selected, tensors[f'{i}.student'])


def test_evenly_spaced():
    assert evenly_spaced(6, 3).tolist() == [0, 2, 4]
    assert evenly_spaced(7, 3).tolist() == [0, 3, 6]
    assert evenly_spaced(5, 5).tolist() == list(range(5))
    expected = evenly_spaced(3072, 1000)
    with default_dtype(torch.bfloat16):
        assert torch.equal(evenly_spaced(3072, 1000), expected)
    assert evenly_spaced(9, 1).tolist() == [0]
    assert evenly_spaced(9, 4).tolist() == [0, 3, 5, 8]  # of 0, 2.67, 5.33, 8
    for teacher in range(1, 40):
        for student in range(1, teacher + 1):
            positions = evenly_spaced(teacher, student)
            assert len(set(positions.tolist())) == student
            assert 0 <= positions.min() <= positions.max() < teacher


@pytest.mark.parametrize('element', ['uniform', 'consecutive', 'random', 'random_inconsistent', 'l1'])
def test_selection_is_by_position_along_each_axis(element):
    teacher = torch.randn(12, 7, 3, 3)
    selected, indices = select_elements(teacher, (5, 7, 3, 2), element, seed=3, key='a')
    assert indices[1] is indices[2] is None
    rows, columns = indices[0], indices[3]
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert torch.equal(selected, teacher[rows][..., columns])
    again, _ = select_elements(teacher, (5, 7, 3, 2), element, seed=3, key='a')
    assert torch.equal(again, selected)
    same, indices = select_elements(teacher, teacher.shape, element)
    assert torch.equal(same, teacher)
    assert indices == [None] * 4


def test_consecutive():
    teacher = torch.arange(24.).view(6, 4)
    assert torch.equal(select_elements(teacher, (3, 2), 'consecutive')[0], teacher[:3, :2])


@pytest.mark.parametrize('element', CONSISTENT)
def test_connected_layers_agree(element):
    """The outputs that a layer keeps are the inputs that the next one keeps; each choice of seed is another."""
    (_, rows), (_, columns) = (
        select_elements(torch.randn(shape), student, element, seed=5, key=key)
        for shape, student, key in [((20, 9), (8, 9), 'a'), ((9, 20), (9, 8), 'b')])
    assert torch.equal(rows[0], columns[1])
    (_, other) = select_elements(torch.randn(20, 9), (8, 9), element, seed=6, key='a')
    assert torch.equal(other[0], rows[0]) == (element != 'random')


def test_inconsistent():
    taken = {
        tuple(select_elements(torch.randn(20, 20), (8, 8), 'random_inconsistent', key=key)[1][dim].tolist())
        for key in 'ab' for dim in (0, 1)}
    assert len(taken) == 4


def test_l1_keeps_the_largest_norms():
    teacher = torch.randn(9, 6)
    _, (rows, columns) = select_elements(teacher, (4, 3), 'l1')
    norms = [sum(abs(x) for x in row) for row in teacher.tolist()]
    assert rows.tolist() == sorted(sorted(range(9), key=lambda i: norms[i])[5:])
    norms = [sum(abs(x) for x in column) for column in teacher.T.tolist()]
    assert columns.tolist() == sorted(sorted(range(6), key=lambda i: norms[i])[3:])


@pytest.mark.parametrize('element', ['uniform', 'consecutive', 'random', 'random_inconsistent', 'l1', 'magnitude'])
def test_vectors(element):
    """Biases and norms."""
    teacher = torch.tensor([3., -5., 1., 0., -2., 4.])
    selected, _ = select_elements(teacher, (3,), element)
    assert len(selected) == len({*selected.tolist()}) == 3
    if element in ('l1', 'magnitude'):
        assert selected.tolist() == [3., -5., 4.]


def test_magnitude_keeps_the_largest_entries_in_their_order():
    teacher = torch.randn(7, 5)
    selected, indices = select_elements(teacher, (3, 4), 'magnitude')
    entries = teacher.flatten().tolist()
    kept = sorted(sorted(range(35), key=lambda i: abs(entries[i]))[-12:])
    assert selected.flatten().tolist() == [entries[i] for i in kept]
    assert indices == [None, None]


@pytest.mark.parametrize('element', ['consecutive', 'random', 'random_inconsistent', 'l1', 'magnitude'])
def test_fused_projections_are_selected_apart(element):
    q, k, v = torch.randn(3, 8, 6).unbind()
    k = k * 100  # of which nothing may get into q and v
    selected, indices = select_elements(torch.cat([q, k, v]), (12, 6), element, parts=3)
    for part, projection in zip(selected.chunk(3), (q, k, v)):
        expected = set(projection.flatten().tolist())
        assert set(part.flatten().tolist()) <= expected
    if indices[0] is not None:
        assert torch.equal(selected, torch.cat([q, k, v])[indices[0]])
    narrow, positions = select_elements(torch.cat([q, k, v]), (12, 4), element, parts=3)
    if element in CONSISTENT:
        assert torch.equal(narrow, torch.cat([q, k, v])[positions[0]][:, positions[1]])
    else:  # the projections have columns of their own
        assert positions[1] is None
    if element in CONSISTENT:
        rows = indices[0].view(3, 4) - torch.tensor([[0], [8], [16]])
        assert (rows == rows[0]).all()
        assert torch.equal(rows[0], select_elements(torch.randn(8), (4,), element)[1][0])


def test_uniform_treats_fused_projections_as_one_axis():
    teacher = torch.randn(24, 6)
    for student in (12, 9):
        assert torch.equal(
            select_elements(teacher, (student, 6), parts=3)[0], teacher[evenly_spaced(24, student)])


def test_dtypes():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for element in ('uniform', 'l1', 'magnitude'):
            assert select_elements(torch.randn(8, 8).to(dtype), (4, 4), element)[0].dtype == dtype
    assert select_elements(torch.tensor(7), ())[0] == 7


def test_refusals():
    for shape in ((5, 3), (4,), (4, 3, 1)):
        with pytest.raises(ValueError, match=r'^shape must .*\(4, 3\)'):
            select_elements(torch.zeros(4, 3), shape)
    with pytest.raises(ValueError, match=r"element_selection must .*, got 'even'"):
        select_elements(torch.zeros(4), (2,), 'even')
