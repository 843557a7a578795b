"""Students of weight selection: sizes, ``weight_select=``, and timm's own distillation (the paper's last table)."""
import pytest
import timm
import torch
import torch.nn as nn
from safetensors.torch import save_file
from timm.optim import create_optimizer_v2
from timm.task import FeatureDistillationTask, LogitDistillationTask

import timm_rep
from tests.helpers import images


@pytest.mark.parametrize('name,millions,teacher', [
    ('mixer_t32', 5.4, 'mixer_s32_224'), ('swin_femto', 7.5, 'swin_tiny_patch4_window7_224')])
def test_sizes_and_teachers(name, millions, teacher):
    """The sizes of the paper, which counts the buffers of Swin's windows; every tensor but the head has a teacher's."""
    student = timm.create_model(name, num_classes=10)
    counted = timm.create_model(name, device='meta')
    numbers = sum(t.numel() for t in (*counted.parameters(), *counted.buffers()))
    assert abs(numbers / 1e6 - millions) < .05
    report = timm_rep.weight_select_init(student, timm.create_model(teacher))
    assert {s.component for s in report.not_selected} == {'head'}
    assert student.eval()(images(1, 224)).shape == (1, 10)
    assert student.pretrained_cfg['classifier'].split('.')[0] in {s.name.split('.')[0] for s in report.not_selected}
    assert isinstance(counted.get_submodule(counted.pretrained_cfg['first_conv']), torch.nn.Conv2d)


@pytest.mark.parametrize('name,args', [
    ('repa_deit_tiny', dict(img_size=32, patch_size=8, depth=1, num_heads=2)),
    ('repa_swin_tiny', dict(img_size=56, depths=(1, 1), num_heads=(2, 2))),
    ('repa_poolformer_s12', dict(depths=(1, 1))),
    ('repa_mixer_s32', dict(img_size=64, num_blocks=1)),
    ('repa_lvvit_s', dict(img_size=32, depth=1, num_heads=2)),
    ('repopt_vgg_a0', dict(depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8)),
    pytest.param('repopt_ghostnet_050', dict(), marks=pytest.mark.slow),
])
def test_create_model_from_a_teacher(name, args):
    width = {'repa_poolformer_s12': 'dims', 'repopt_vgg_a0': None, 'repopt_ghostnet_050': None}.get(name, 'embed_dim')
    small, large = ({} if width is None else {width: values} for values in ((8, 16), (16, 32)))
    if width == 'embed_dim':
        small, large = {width: 16}, {width: 32}
    if name == 'repopt_vgg_a0':
        large = dict(widths=(16, 16, 16, 16), stem_width=16)
    teacher = timm.create_model(name, num_classes=3, **{**args, **large})
    student = timm.create_model(name, num_classes=5, weight_select=teacher, **{**args, **small})
    expected = timm.create_model(name, num_classes=5, **{**args, **small})
    timm_rep.weight_select_init(expected, teacher)
    classifiers = ('head', 'aux_head', 'classifier')
    assert all(
        torch.equal(v, expected.state_dict()[k]) for k, v in student.state_dict().items()
        if not k.startswith(classifiers))
    # not what another create_model() has to repeat
    assert 'weight_select' not in student._model_args


def test_refusals():
    for kwargs in (dict(features_only=True), dict(pretrained=True)):
        with pytest.raises(ValueError, match=rf'{next(iter(kwargs))} must .* weight_select'):
            timm.create_model('repa_deit_tiny', weight_select={}, **kwargs)


ARGS = dict(img_size=32, patch_size=8, depth=2, num_heads=3, num_classes=4)


def teacher():
    torch.manual_seed(1)
    model = timm.create_model('vit_small_patch16_224', embed_dim=48, **ARGS)
    nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize('kind', ['logit', 'feature'])
@pytest.mark.parametrize('student', ['vit_tiny_patch16_224', 'repa_vit_small'])
def test_distillation(kind, student):
    """Distillation as by train.py --kd-model-name: the student comes nearer to the teacher that it starts from."""
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


@pytest.mark.parametrize('other', [dict(img_size=256, window_size=8), dict(img_size=192)])
def test_weights_of_another_window(other, tmp_path):
    """As timm's Swins, swin_femto fits its tables of relative positions to the window."""
    args = dict(embed_dim=24, num_heads=(1, 2), depths=(1, 1), num_classes=5)
    save_file(timm.create_model('swin_femto', **args).state_dict(), tmp_path / 'model.safetensors')
    models = [
        timm.create_model(
            name, **args, **other, pretrained=True,
            pretrained_cfg_overlay=dict(file=str(tmp_path / 'model.safetensors'), num_classes=5))
        for name in ('swin_femto', 'swin_tiny_patch4_window7_224')]
    ours, timms = (model.state_dict() for model in models)
    assert all(torch.equal(value, ours[name]) for name, value in timms.items())
