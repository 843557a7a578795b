"""Weight selection with timm's own distillation, the last table of the paper."""
import pytest
import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2
from timm.task import FeatureDistillationTask, LogitDistillationTask

import timm_rep

ARGS = dict(img_size=32, patch_size=8, depth=2, num_heads=3, num_classes=4)


def teacher():
    torch.manual_seed(1)
    model = timm.create_model('vit_small_patch16_224', embed_dim=48, **ARGS)
    nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize('kind', ['logit', 'feature'])
@pytest.mark.parametrize('student', ['vit_tiny_patch16_224', 'repa_vit_small'])
def test_distillation(kind, student):
    """What train.py makes of --kd-model-name: the student comes nearer to the teacher that it is from."""
    larger = teacher()
    torch.manual_seed(0)
    args = dict(ARGS, embed_dim=24, **({'pre_norm': False} if student.startswith('repa') else {}))
    model = timm.create_model(student, **args)
    timm_rep.weight_select_init(model, larger, include_head=True)
    before = {k: v.clone() for k, v in larger.state_dict().items()}
    if kind == 'logit':
        task = LogitDistillationTask(model, larger, criterion=nn.CrossEntropyLoss(), verbose=False)
    else:
        task = FeatureDistillationTask(model, larger, criterion=nn.CrossEntropyLoss(), verbose=False)
    parameters = [p for p in task.parameters() if p.requires_grad]
    assert {id(p) for p in model.parameters()} <= {id(p) for p in parameters}
    optimizer = create_optimizer_v2(parameters, opt='adamw', lr=3e-3, weight_decay=.05)
    task.train()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, 32, 32, generator=g)
    with torch.no_grad():
        target = larger.eval()(x).argmax(1)
    losses = []
    for _ in range(25):
        loss = task(x, target)['loss']
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < .7 * losses[0]
    assert all(torch.equal(v, before[k]) for k, v in larger.state_dict().items())
    if student.startswith('repa'):
        expected = model.eval()(x)
        assert torch.allclose(model.reparameterize()(x), expected, atol=1e-4 * expected.abs().max().item())
