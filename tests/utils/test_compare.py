"""Comparison of outputs."""
import math

import pytest
import torch
import torch.nn as nn

from timm_rep.utils.compare import check_finite, check_images, compare


def test_compare():
    expected = {'a': torch.tensor([[3., 0.]]), 'b': [torch.tensor([4.])]}
    difference = compare(expected, [torch.tensor([3., .3]), torch.tensor([[3.6]])])
    assert difference.max_difference == pytest.approx(.4)
    assert difference.relative_rms == pytest.approx(.5 / 5)
    assert math.isnan(compare(expected, [torch.tensor([3., 0., float('nan')])]).relative_rms)
    assert compare(torch.zeros(2, 0), torch.zeros(0)).max_difference == 0
    with pytest.raises(ValueError, match='3 values, but got 2'):
        compare(expected, torch.zeros(2))


@pytest.mark.parametrize('images, error, expected', [
    ([1], TypeError, 'list'), (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), TypeError, 'uint8'),
    (torch.zeros(3, 8, 8), ValueError, r'\(3, 8, 8\)'),
    (torch.zeros(0, 3, 8, 8), ValueError, r'\(0, 3, 8, 8\)'),
    (torch.full((2, 3, 8, 8), float('nan')), ValueError, 'NaN'),
    (torch.full((1, 3, 8, 8), float('inf')), ValueError, 'NaN'),
])
def test_images(images, error, expected):
    with pytest.raises(error, match=expected):
        check_images(images)


def test_the_first_layer_with_outputs_that_are_not_finite():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(model[1].weight, float('inf'))
    with pytest.raises(ValueError, match='outputs of 1 '):
        check_finite(model, torch.ones(1, 2))


def test_a_model_that_fails():
    """Whatever the type of the error, the message has the size; an error of the system stays as it is."""
    class Net(nn.Module):
        def forward(self, x):
            raise self.error

    for error in IndexError('far out'), KeyError('x'), AssertionError(''):
        Net.error = error
        with pytest.raises(ValueError, match=r'Net cannot process images of size \(3, 8, 8\)'):
            check_finite(Net(), torch.ones(1, 3, 8, 8))
    Net.error = OSError('no space')
    with pytest.raises(OSError, match='no space'):
        check_finite(Net(), torch.ones(1, 3, 8, 8))
