"""The code in README.md does what it says."""
import re

import torch
import torch.nn.functional as F

from tests.fresh_environment import ROOT
from tests.reference.ffn import relative
from timm_rep.layers import CslaBlock


def example(containing):
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
    names = {}
    exec(next(block for block in blocks if containing in block), names)
    return names


def test_asymmetric_block():
    """The target operator of the worked example trains as its 1x3 + 3x1 + 3x3 block does."""
    names = example('Csla(64')
    block = CslaBlock(names['csla'], names['scales'])
    conv = names['conv']
    with torch.no_grad():
        conv.weight.copy_(block.equivalent_kernel())
    reference = torch.optim.SGD([p for p in block.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(10):
        x, y = torch.randn(2, 64, 8, 8), torch.randn(2, 64, 8, 8)
        for model, optimizer in ((block, reference), (conv, names['optimizer'])):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert relative(conv.weight, block.equivalent_kernel()) < 1e-5


def test_folding():
    example('timm.create_model(\'repa_deit_base\')             # train')
