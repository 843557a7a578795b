import pytest
import timm
import torch

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
    assert {s.component for s in report.own} == {'head'}
    assert student.eval()(images(1, 224)).shape == (1, 10)
    assert student.pretrained_cfg['classifier'].split('.')[0] in {s.name.split('.')[0] for s in report.own}
    assert isinstance(counted.get_submodule(counted.pretrained_cfg['first_conv']), torch.nn.Conv2d)


@pytest.mark.parametrize('name,args', [
    ('repa_deit_tiny', dict(img_size=32, patch_size=8, depth=1, num_heads=2)),
    ('repa_swin_tiny', dict(img_size=56, depths=(1, 1), num_heads=(2, 2))),
    ('repa_poolformer_s12', dict(depths=(1, 1))),
    ('repa_mixer_s32', dict(img_size=64, num_blocks=1)),
    ('repa_lvvit_s', dict(img_size=32, depth=1, num_heads=2)),
    ('repopt_vgg_a0', dict(depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8)),
    ('repopt_ghostnet_050', dict()),
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
        with pytest.raises(ValueError, match=rf'weight_select .*{next(iter(kwargs))}=True'):
            timm.create_model('repa_deit_tiny', weight_select={}, **kwargs)
