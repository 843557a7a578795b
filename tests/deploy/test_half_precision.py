"""bfloat16 and float16: a folded model, folded in float64 and rounded once, loses no more than the unfolded one."""
import copy

import pytest
import torch

from tests.deploy.models import MODELS, build
from tests.helpers import images
from timm_rep.convert import folded_copy

QUICK = ('repa_vit', torch.bfloat16)


def error(model, x, expected):
    """Relative root mean square."""
    return ((model(x).double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


@pytest.mark.parametrize('kind,dtype', [
    pytest.param(kind, dtype, marks=() if (kind, dtype) == QUICK else pytest.mark.slow, id=f'{kind}, {dtype}')
    for kind in MODELS for dtype in (torch.bfloat16, torch.float16)])
@torch.no_grad()
def test_folding_loses_no_precision(kind, dtype):
    """Mean over ten sets of weights; each is rounded by chance, so that means over ten still vary by about a tenth."""
    unfolded_error = folded_error = 0.
    trained, (_, size, _) = build(kind)
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        model = copy.deepcopy(trained)
        for p in model.parameters():
            p.mul_(1 + torch.randn(p.shape, generator=g) / 8)
        x = images(4, size, seed).to(dtype)
        folded = folded_copy(model).to(dtype)
        expected = copy.deepcopy(model).double()(x.double())
        unfolded_error += error(model.to(dtype), x, expected) / 10
        folded_error += error(folded, x, expected) / 10
    assert 1e-5 < unfolded_error < .1
    assert folded_error < 1.25 * unfolded_error
