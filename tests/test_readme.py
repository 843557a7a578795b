"""The code in README.md does what it says."""
import json
import re

import torch
import torch.nn.functional as F

from tests.helpers import ROOT, relative
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


def test_repopt():
    """What the example attaches last is what the optimizer, made before, multiplies by."""
    names = example("'repopt_vgg_a0', num_classes=10")
    model, conv = names['model'], names['model'].stages[2][1].conv
    assert conv.grad_mult.dense('squared')[0, :2, 1, 1].tolist() == [3., 2.]
    before = conv.weight.detach().clone()
    F.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([1, 2])).backward()
    names['optimizer'].step()
    grad = conv.weight.grad + 0.
    step = 0.1 * 1.9 * (conv.grad_mult.dense('squared') * grad + 4e-5 * before)  # Nesterov momentum 0.9, first step
    torch.testing.assert_close(conv.weight.detach(), before - step)


def _results(section, machine='amd-epyc'):
    path, = (ROOT / 'scripts' / 'results').glob(f'{machine}*-2-threads/{section}.json')
    return json.loads(path.read_text())['rows']


def test_speed():
    """Every number of its tables is one of the committed results."""
    section = re.search(r'\n## Speed\n(.*?)\n## ', (ROOT / 'README.md').read_text(), re.DOTALL)[1]
    tables = [[
        [cell.strip('` ') for cell in line.strip('|').split('|')] for line in table.splitlines()[2:]
    ] for table in re.findall(r'(?:^\|.*\|$\n?)+', section, re.MULTILINE)]
    inference, training, repopt = tables
    machines = 'amd-epyc', 'intel'
    epyc, xeon = (
        {(row['model'], row['mode']): str(row['folded / vanilla']) for row in _results('repa-infer', machine)}
        for machine in machines)
    paper = {row['model']: str(row['paper']) for row in _results('repa-infer')}
    assert inference == [
        [model, epyc[model, 'eager'], epyc[model, 'compile'], xeon[model, 'eager'], paper[model]] for model in paper]
    fused = [xeon[f'repa_swin_{size}', 'eager, TIMM_FUSED_ATTN=2'] for size in ('tiny', 'small', 'base')]
    text = ' '.join(section.split())
    assert '{}, {} and {} for T, S and B'.format(*fused) in text

    def compared(name, columns, ours, theirs):
        both = zip(*(_results(name, machine) for machine in machines))
        return [[
            *(str(row[k]) for k in ('model', 'img_size') if k in row),
            *(str(of[column]) for of in (row, other) for column in columns),
            str(round(row[f'{ours}, peak (MB)'] / row[f'{theirs}, peak (MB)'], 2)),
        ] for row, other in both]

    assert training == compared('repa-train', ('matrix', 'matrix / vanilla'), 'matrix', 'released')
    assert repopt == compared(
        'repopt-train', ('RepOpt-VGG', 'RepOpt-VGG, channels-last'), 'RepOpt-VGG', 'RepVGG')
    shares = []
    for machine in machines:
        step, = (
            row for row in _results('repopt-parts', machine)
            if (row['form'], row['img_size']) == ('RepOpt-VGG', 160))
        parts = [step[part] for part in ('convolutions', 'norms', 'optimizer', 'rest')]
        shares.append(f'{100 * parts[0] / sum(parts):.0f}%')
    assert "{} of B1's step at 160 pixels are convolutions on the EPYC, {} on the Xeon".format(*shares) in text
    less = {row['model']: row['arithmetic'] for row in _results('parts')}
    names = 'repa_deit_base', 'repa_vit_huge', 'repa_lvvit_s', 'repa_lvvit_m'
    assert '{} times less for DeiT-Base, {} for ViT-Huge, {} and {} for LV-ViT-S and M'.format(
        *(less[name] for name in names)) in text
