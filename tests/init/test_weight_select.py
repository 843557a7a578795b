import copy
import re
import weakref

import pytest
import timm
import torch
import torch.nn as nn
from safetensors.torch import save_file
from timm.models import VisionTransformer, adapt_input_conv
from timm.models.levit import Levit
from timm.models.metaformer import MetaFormer, Pooling

import timm_rep
from tests.helpers import needs_recorded_args, same_weights, save_model
from tests.hub.published import REPA as PUBLISHED
from tests.hub.published import publish
from timm_rep.init import evenly_spaced, open_teacher
from timm_rep.init.matching import COMPONENTS, component_of
from timm_rep.init.weight_select import ELEMENT_CHOICES

VIT = dict(img_size=32, patch_size=8, num_classes=5)
STUDENT = dict(VIT, embed_dim=24, depth=2, num_heads=3)
TEACHER = dict(VIT, embed_dim=48, depth=4, num_heads=6)


def vit(seed=0, name='vit_tiny_patch16_224', **kwargs):
    """A model in which no parameter is as initialized, biases and scales included."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=.1)
    return model


@pytest.fixture
def student():
    return vit(**STUDENT)


@pytest.fixture(scope='module')
def teacher():
    return vit(1, **TEACHER)


def selected(teacher_tensor, shape):
    for dim, length in enumerate(shape):
        teacher_tensor = teacher_tensor.index_select(dim, evenly_spaced(teacher_tensor.shape[dim], length))
    return teacher_tensor


def test_vit(student, teacher):
    """Every tensor but the classifier is a selection by hand of the teacher's, and the forward pass is theirs."""
    by_hand = vit(**STUDENT)
    theirs = teacher.state_dict()
    by_hand.load_state_dict({
        name: value if name.startswith('head.') else selected(theirs[name], value.shape)
        for name, value in by_hand.state_dict().items()})
    report = timm_rep.weight_select_init(student, teacher)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(student(x), by_hand(x))
    assert [s.name for s in report.selections] == list(student.state_dict())
    assert [s.name for s in report.not_selected] == ['head.weight', 'head.bias']
    numbers = sum(v.numel() for v in student.state_dict().values())
    assert report.coverage == pytest.approx(100 * (1 - (24 * 5 + 5) / numbers))
    lines = str(report).splitlines()
    assert (
        'blocks.1.attn.qkv.weight (72, 24) <- blocks.1.attn.qkv.weight (144, 48): '
        '[0, 2, 4, ..., 142] x [0, 2, 4, ..., 46]') in lines
    assert 'pos_embed (1, 17, 24) <- pos_embed (1, 17, 48): : x : x [0, 2, 4, ..., 46]' in lines
    assert 'head.bias (5,): not selected (classifier)' in lines
    assert lines[-1] == f"{report.coverage:.1f}% of the student's values were selected from the teacher."


@pytest.mark.parametrize('include,exclude,changed', [
    (None, None, set(COMPONENTS) - {'head', 'other'}),
    ('attention', None, {'attention'}),
    (['attention', 'mlp'], 'mlp', {'attention'}),
    (None, ['norm', 'pos_embed'], {'attention', 'mlp', 'patch_embed'}),
    ('blocks.0.*', 'blocks.*.norm?.*', {'attention', 'mlp'}),
])
def test_components(student, teacher, include, exclude, changed):
    before = copy.deepcopy(student.state_dict())
    report = timm_rep.weight_select_init(student, teacher, include=include, exclude=exclude)
    after = student.state_dict()
    differ = {component_of(name, ['head']) for name in after if not torch.equal(after[name], before[name])}
    assert differ == changed
    assert {s.name for s in report.not_selected} == {name for name in after if torch.equal(after[name], before[name])}


def test_component_of():
    """The components of table 10, on the names of the families of the paper."""
    expected = {
        'vit_tiny_patch16_224': {
            'cls_token': 'pos_embed', 'pos_embed': 'pos_embed', 'patch_embed.proj.weight': 'patch_embed',
            'blocks.0.norm1.weight': 'norm', 'blocks.0.attn.qkv.bias': 'attention', 'blocks.0.mlp.fc2.weight': 'mlp',
            'norm.bias': 'norm', 'head.weight': 'head'},
        'convnext_femto': {
            'stem.0.weight': 'patch_embed', 'stages.0.blocks.0.conv_dw.weight': 'other', 'head.norm.weight': 'norm',
            'stages.0.blocks.0.norm.bias': 'norm', 'stages.0.blocks.0.mlp.fc1.bias': 'mlp', 'head.fc.weight': 'head'},
        'resnet18': {
            'conv1.weight': 'patch_embed', 'bn1.weight': 'norm', 'layer1.0.bn2.running_mean': 'norm',
            'layer2.0.conv1.weight': 'other', 'fc.bias': 'head'},
        'mixer_s32_224': {
            'stem.proj.weight': 'patch_embed', 'blocks.0.mlp_tokens.fc1.weight': 'mlp',
            'blocks.0.mlp_channels.fc1.weight': 'mlp'},
        'swin_tiny_patch4_window7_224': {
            'patch_embed.norm.weight': 'norm', 'layers.1.downsample.norm.weight': 'norm',
            'layers.0.blocks.0.attn.relative_position_bias_table': 'pos_embed', 'head.fc.weight': 'head'},
        'pvt_v2_b0': {
            'patch_embed.norm.weight': 'norm', 'stages.0.blocks.0.attn.kv.weight': 'attention',
            'stages.0.blocks.0.attn.sr.weight': 'attention', 'stages.0.blocks.0.mlp.dwconv.weight': 'mlp'},
    }
    expected.update({
        'efficientnet_b0': {'conv_stem.weight': 'patch_embed', 'bn1.weight': 'norm', 'conv_head.weight': 'other'},
        'maxvit_tiny_tf_224': {
            'stages.0.blocks.0.attn_block.mlp.fc1.weight': 'mlp', 'stages.0.blocks.0.attn_grid.mlp.fc2.bias': 'mlp',
            'stages.0.blocks.0.attn_block.attn.qkv.weight': 'attention', 'stem.conv1.weight': 'patch_embed'},
    })
    for name, components in expected.items():
        model = timm.create_model(name, device='meta')
        classifier = [model.pretrained_cfg['classifier']]
        assert components.keys() <= model.state_dict().keys()
        assert {n: component_of(n, classifier) for n in components} == components


@pytest.mark.parametrize('element', ['uniform', 'uniform_heads'])
def test_one_head(element):
    """A table for one head has as many axes as a table for two."""
    args = dict(img_size=56, depths=(1, 1), num_classes=5)
    student, teacher = (
        timm.create_model('swin_tiny_patch4_window7_224', embed_dim=12 * n, num_heads=(n, 2 * n), **args)
        for n in (1, 2))
    teacher.layers[0].blocks[0].attn.relative_position_bias_table.data.normal_()
    timm_rep.weight_select_init(student, teacher, element_selection=element)
    ours, theirs = (model.layers[0].blocks[0].attn.relative_position_bias_table for model in (student, teacher))
    assert torch.equal(ours, theirs[:, :1])


def test_report_of_fused_projections(student, teacher):
    """Columns are not listed where query, key and value have different ones."""
    report = timm_rep.weight_select_init(student, teacher, element_selection='l1')
    line, = (str(s) for s in report.selections if s.name == 'blocks.0.attn.qkv.weight')
    assert re.search(r': \[\d.*\] x \[\.\.\.\]$', line)
    report = timm_rep.weight_select_init(student, teacher, element_selection='magnitude')
    line, = (str(s) for s in report.selections if s.name == 'blocks.0.attn.qkv.weight')
    assert line.endswith(': [...] x [...]')


def test_head(student, teacher):
    timm_rep.weight_select_init(student, teacher, include_head=True)
    assert torch.equal(student.head.weight, selected(teacher.head.weight, (5, 24)))
    other = vit(**{**STUDENT, 'num_classes': 4})
    before = other.head.weight.clone()
    report = timm_rep.weight_select_init(other, teacher, include_head=True)
    assert torch.equal(other.head.weight, before)
    assert [s.reason for s in report.not_selected] == ['a classifier of 4 classes, the teacher has 5'] * 2


def levit(widths, classes=5):
    return Levit(
        img_size=64, stem_type='s8', embed_dim=widths, depth=(1, 1), num_heads=(2, 2), key_dim=8, num_classes=classes)


def metaformer(dims, classes=5):
    model = MetaFormer(token_mixers=Pooling, use_mlp_head=True, depths=(1,) * 4, dims=dims, num_classes=classes)
    model.pretrained_cfg = dict(classifier='head.fc')
    return model


@pytest.mark.parametrize('build, small, large, last', [
    (levit, (16, 24), (32, 48), 'head.linear.weight'),
    (metaformer, (8, 16, 16, 32), (16, 32, 32, 64), 'head.fc.fc2.weight')])
def test_heads_of_several_layers(build, small, large, last):
    """The number of classes is that of the last layer."""
    student, teacher = build(small), build(large)
    report = timm_rep.weight_select_init(student, teacher, include_head=True)
    assert not [s.name for s in report.not_selected if s.component == 'head']
    weight, given = (model.get_parameter(last) for model in (student, teacher))
    assert torch.equal(weight, selected(given, weight.shape))
    report = timm_rep.weight_select_init(build(small, classes=4), teacher, include_head=True)
    assert last in {s.name for s in report.not_selected if s.reason == 'a classifier of 4 classes, the teacher has 5'}


def test_what_has_no_counterpart(student):
    """Named before anything is changed; strict=False leaves it and reports it."""
    shallow = vit(1, **{**TEACHER, 'depth': 1, 'embed_dim': 24, 'num_heads': 3, 'mlp_ratio': 2, 'class_token': False,
                        'global_pool': 'avg'})
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ValueError, match='nothing was changed') as e:
        timm_rep.weight_select_init(student, shallow)
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())
    message = str(e.value)
    for line in (
            'cls_token (1, 1, 24): the teacher has none',
            'blocks.1.attn.qkv.weight (72, 24): the teacher has none',
            'blocks.0.mlp.fc1.weight (96, 24): blocks.0.mlp.fc1.weight of the teacher is (48, 24), smaller',
            'norm.weight (24,): the teacher has none',
    ):
        assert line in message
    report = timm_rep.weight_select_init(student, shallow, strict=False)
    after = student.state_dict()
    own = {s.name for s in report.not_selected}
    assert all(torch.equal(after[k], before[k]) for k in own)
    assert 'cls_token' in own
    assert torch.equal(student.blocks[0].attn.qkv.weight, shallow.blocks[0].attn.qkv.weight)
    assert all(s.problem == (not s.name.startswith('head.')) for s in report.not_selected)


@pytest.mark.parametrize('form', [
    'module', 'state dict', 'safetensors', 'pth', 'path object', pytest.param('local-dir', marks=needs_recorded_args)])
def test_sources(student, teacher, tmp_path, form):
    expected = vit(**STUDENT)
    timm_rep.weight_select_init(expected, teacher)
    source = teacher
    if form == 'state dict':
        source = teacher.state_dict()
    elif form == 'safetensors':
        source = str(tmp_path / 't.safetensors')
        save_file(teacher.state_dict(), source)
    elif form == 'local-dir':
        save_model(teacher, tmp_path / 'folder')
        source = f'local-dir:{tmp_path / "folder"}'
        with pytest.raises(ValueError, match=r'folder.*local-dir:'):
            timm_rep.weight_select_init(student, tmp_path / 'folder')
    elif form != 'module':
        source = tmp_path / 't.pth'
        torch.save({'state_dict': teacher.state_dict(), 'epoch': 3}, source)
        source = source if form == 'path object' else str(source)
    timm_rep.weight_select_init(student, source)
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in student.state_dict().items())


def test_safetensors_are_read_tensor_by_tensor(student, teacher, tmp_path, monkeypatch):
    """Only the tensors that are wanted are read, one at a time."""
    path = tmp_path / 't.safetensors'
    for value in teacher.state_dict().values():
        value.normal_()
    save_file(teacher.state_dict(), path)
    before = copy.deepcopy(student.state_dict())
    opened = open_teacher(path)
    read, alive = [], []
    monkeypatch.setattr('timm_rep.init.weight_select.open_teacher', lambda source, student: opened)
    one = opened.read

    def watched(name):
        # tensors read before are not kept: the student has been given their values
        assert not [tensor for tensor in alive if tensor() is not None][1:]
        assert not any(torch.equal(student.state_dict()[k], before[k]) for k in read)
        tensor = one(name)
        read.append(name)
        alive.append(weakref.ref(tensor))
        return tensor

    opened.read = watched
    timm_rep.weight_select_init(student, path)
    assert read == [s for s in student.state_dict() if not s.startswith('head.')]


@pytest.mark.parametrize('file', ['model.safetensors', 'pytorch_model.bin'])
def test_a_pretrained_model_by_its_name(hub, monkeypatch, tmp_path, file):
    """The model's file on the Hub, read tensor by tensor if it is safetensors in the model's layout."""
    torch.manual_seed(1)
    teacher = timm.create_model('test_vit.r160_in1k')
    (save_file if file.endswith('s') else torch.save)(teacher.state_dict(), tmp_path / file)
    hub.add('timm/test_vit.r160_in1k', {file: (tmp_path / file).read_bytes()})
    create_model, loaded = timm.create_model, []
    monkeypatch.setattr(
        timm, 'create_model',
        lambda *args, **kwargs: loaded.append(kwargs.get('pretrained')) or create_model(*args, **kwargs))
    small = dict(embed_dim=32, num_heads=1, num_classes=3)
    for element in ('uniform', 'uniform_heads'):
        student, expected = (create_model('test_vit', **small) for _ in range(2))
        loaded.clear()
        expected.load_state_dict(student.state_dict())
        timm_rep.weight_select_init(student, 'test_vit.r160_in1k', element_selection=element)
        assert any(loaded) == (file == 'pytorch_model.bin')
        timm_rep.weight_select_init(expected, teacher, element_selection=element)
        assert all(torch.equal(v, expected.state_dict()[k]) for k, v in student.state_dict().items())


def test_chain(student, teacher):
    """The first is the teacher of a copy of the second."""
    middle = vit(2, **dict(VIT, embed_dim=36, depth=3, num_heads=6))
    before = copy.deepcopy(middle.state_dict())
    timm_rep.weight_select_init(student, [teacher, middle], element_selection='random', seed=4)
    assert all(torch.equal(v, before[k]) for k, v in middle.state_dict().items())
    expected = vit(**STUDENT)
    timm_rep.weight_select_init(middle, teacher, element_selection='random', seed=4)
    timm_rep.weight_select_init(expected, middle, element_selection='random', seed=4)
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in student.state_dict().items())
    timm_rep.weight_select_init(student, [teacher, middle], include_head=True)
    assert torch.equal(student.head.weight, selected(selected(teacher.head.weight, (5, 36)), (5, 24)))
    with pytest.raises(ValueError, match='all but the first'):
        timm_rep.weight_select_init(student, [teacher, middle.state_dict()])


def test_seed_and_fused_projections(student, teacher):
    """Another seed takes other rows; queries, keys and values take different ones where nothing is consistent."""
    def rows(seed):
        report = timm_rep.weight_select_init(student, teacher, element_selection='random_inconsistent', seed=seed)
        qkv = next(s for s in report.selections if s.name == 'blocks.0.attn.qkv.weight')
        return [tuple((part - i * 48).tolist()) for i, part in enumerate(qkv.indices[0].chunk(3))]

    assert len({*rows(0), *rows(1)}) == 6
    assert rows(0) == rows(0)


@pytest.mark.parametrize('element', ELEMENT_CHOICES)
@pytest.mark.parametrize('depth', ['first', 'uniform', 'mid', 'last'])
def test_every_choice(student, teacher, element, depth):
    """Every tensor but the classifier is made of entries of the teacher's tensor of that name, of the block chosen."""
    report = timm_rep.weight_select_init(student, teacher, element_selection=element, layer_selection=depth, seed=2)
    blocks = {'first': [0, 1], 'uniform': [0, 2], 'mid': [1, 2], 'last': [2, 3]}[depth]
    theirs, ours = teacher.state_dict(), student.state_dict()
    for s in report.selections:
        if s.component == 'head':
            continue
        expected = s.name
        if s.name.startswith('blocks.'):
            _, i, rest = s.name.split('.', 2)
            expected = f'blocks.{blocks[int(i)]}.{rest}'
        assert s.teacher_name == expected
        assert set(ours[s.name].flatten().tolist()) <= set(theirs[expected].flatten().tolist())


FAMILIES = {
    'convnext': ('convnext_femto', 'convnext_tiny', dict(depths=(1, 1, 2, 1)), dict(depths=(2, 1, 3, 1))),
    'resnet': ('resnet18', 'resnet34', {}, {}),
    'mixer': ('mixer_s32_224', 'mixer_b32_224', dict(img_size=64), dict(img_size=96)),
    'swin': ('swin_tiny_patch4_window7_224', 'swin_small_patch4_window7_224',
             dict(embed_dim=24, depths=(1, 2), num_heads=(3, 6)), dict(embed_dim=48, depths=(2, 4), num_heads=(3, 6))),
    'pvt': ('pvt_v2_b0', 'pvt_v2_b1', {}, {}),
    'repopt': ('repopt_vgg_a0', 'repopt_vgg_b0', {}, {}),
    'repa': ('repa_deit_tiny', 'repa_deit_small', dict(depth=2), dict(depth=3)),
}


@pytest.mark.parametrize('family', [
    pytest.param(name, marks=pytest.mark.slow if name == 'mixer' else ()) for name in FAMILIES])
@torch.no_grad()
def test_families(family):
    """Every tensor of the student but the classifier is a selection by hand, its statistics too.

    convnext_femto has 1 x 1 convolutions where convnext_tiny has linear layers.
    """
    name, teacher_name, args, teacher_args = FAMILIES[family]
    student = vit(name=name, num_classes=3, **args)
    teacher = vit(1, name=teacher_name, num_classes=3, **teacher_args)
    for module in teacher.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(.5, 2)
            module.num_batches_tracked.fill_(7)
    by_hand, theirs = copy.deepcopy(student), teacher.state_dict()
    classifier = student.pretrained_cfg['classifier']
    weights = {}
    for key, value in by_hand.state_dict().items():
        if key.startswith(f'{classifier}.'):
            weights[key] = value
        else:  # the first blocks of each stage have the names of the student's
            other = theirs[key]
            weights[key] = selected(other.reshape(other.shape + (1,) * (value.dim() - other.dim())), value.shape)
    by_hand.load_state_dict(weights)
    report = timm_rep.weight_select_init(student, teacher)
    assert {s.name for s in report.not_selected} == {f'{classifier}.weight', f'{classifier}.bias'}
    size = args.get('img_size', 224 if family == 'swin' else 64)
    x = torch.randn(1, 3, size, size) if 'repa' not in family else torch.randn(1, 3, 224, 224)
    assert torch.equal(student(x), by_hand(x))


REPA = {
    'deit': ('repa_deit_tiny', 'deit_tiny_patch16_224', dict(VIT, embed_dim=24, num_heads=3), 'depth', (2, 3), dict(
        pre_norm=False)),
    'swin': ('repa_swin_tiny', 'swin_tiny_patch4_window7_224', dict(
        img_size=56, embed_dim=24, num_heads=(2, 2), num_classes=5), 'depths', ((1, 2), (2, 3)), {}),
    'lvvit': ('repa_lvvit_s', 'lvvit_s', dict(VIT, img_size=64, patch_size=16, embed_dim=24, num_heads=3), 'depth',
              (2, 3), {}),
}


@pytest.mark.parametrize('family', REPA)
@pytest.mark.parametrize('way', ['repa from plain', 'plain from repa', 'converted from plain'])
def test_between_plain_models_and_repaformers(family, way):
    """Models of other depths too: FFNs, and norms by the names that they have there."""
    repa, plain, args, depth, (shallow, deep), more = REPA[family]
    torch.manual_seed(0)
    if way == 'plain from repa':
        student = timm.create_model(plain, **args, **{depth: shallow})
        teacher = timm.create_model(repa, **args, **{depth: deep}, **more)
    else:
        teacher = timm.create_model(plain, **args, **{depth: deep})
        if way == 'repa from plain':
            student = timm.create_model(repa, **args, **{depth: shallow}, **more)
        else:
            student = timm.create_model(plain, **args, **{depth: shallow})
            timm_rep.convert_to_repa(student)
    with torch.no_grad():
        for p in teacher.parameters():
            p.normal_()
    report = timm_rep.weight_select_init(student, teacher)
    assert {s.component for s in report.not_selected if 'BatchNorm' not in s.reason} == {'head'}
    kinds = {s.name.split('.')[-2] for s in report.not_selected if 'BatchNorm' in s.reason}
    assert kinds == (set() if way == 'plain from repa' else {'norm1', 'norm2'})

    def ffn(model):
        block = model.layers[1].blocks[1] if family == 'swin' else model.blocks[1]
        return (block.mlp.norm1 if hasattr(block.mlp, 'norm1') else block.norm2), block.mlp.fc1, block.mlp.fc2

    for ours, theirs in zip(ffn(student), ffn(teacher)):
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize('name', [
    'convnext_atto',
    *(pytest.param(name, marks=pytest.mark.slow) for name in ('resmlp_12_224', 'mixer_s32_224', 'caformer_s18'))])
def test_what_convert_to_repa_makes_starts_from_the_plain_model(name):
    """All of it: the statistics are not there, and a shift where the norms have none."""
    student, teacher = (timm.create_model(name) for _ in range(2))
    timm_rep.convert_to_repa(student)
    report = timm_rep.weight_select_init(student, teacher, include_head=True)
    assert all('BatchNorm' in s.reason or 'no shift' in s.reason for s in report.not_selected)
    assert any('no shift' in s.reason for s in report.not_selected) == (name == 'caformer_s18')
    assert not timm_rep.weight_select_init(timm.create_model(name), student, include_head=True).not_selected


def test_a_shift_is_excused_by_its_scale_only():
    student = timm.create_model('vit_tiny_patch16_224', **STUDENT)
    timm_rep.convert_to_repa(student)
    teacher = timm.create_model('vit_tiny_patch16_224', **TEACHER)
    weights = {name: value for name, value in teacher.state_dict().items() if '.norm2.' not in name}
    report = timm_rep.weight_select_init(student, weights, strict=False)
    reasons = {s.name: s.reason for s in report.not_selected}
    assert {reasons[f'blocks.0.mlp.norm1.{kind}'] for kind in ('weight', 'bias')} == {'the teacher has none'}


def test_wrapped_models(student, teacher):
    """DDP's and torch.compile's."""
    expected = vit(**STUDENT)
    timm_rep.weight_select_init(expected, teacher)
    for wrap in (torch.nn.DataParallel, lambda model: torch.compile(model, backend='eager')):
        student = vit(**STUDENT)
        timm_rep.weight_select_init(wrap(student), wrap(teacher))
        assert all(torch.equal(v, expected.state_dict()[k]) for k, v in student.state_dict().items())


@pytest.mark.parametrize('in_chans', [1, 4])
def test_students_of_other_images(teacher, in_chans):
    """As from the teacher that timm adapts to these images; a teacher of grayscale images has too few channels."""
    student, expected = (vit(**STUDENT, in_chans=in_chans) for _ in range(2))
    adapted = vit(**TEACHER, in_chans=in_chans)
    adapted.load_state_dict({
        **teacher.state_dict(), 'patch_embed.proj.weight': adapt_input_conv(in_chans, teacher.patch_embed.proj.weight)})
    for settings in (dict(), dict(element_selection='l1'), dict(element_selection='uniform_heads')):
        timm_rep.weight_select_init(expected, adapted, **settings)
        for source in (teacher, teacher.state_dict()):
            report = timm_rep.weight_select_init(student, source, **settings)
            assert same_weights(student, expected)
            assert str(report) == str(timm_rep.weight_select_init(expected, adapted, **settings))
    with pytest.raises(ValueError, match=r'patch_embed\.proj\.weight .*smaller'):
        timm_rep.weight_select_init(vit(**STUDENT), vit(**TEACHER, in_chans=1))


def test_layouts_of_teachers(student, teacher, tmp_path):
    """DINO's training checkpoint, MAE's, CLIP's vision tower, a training run of timm with its moving average."""
    expected = vit(**STUDENT)
    timm_rep.weight_select_init(expected, teacher)
    state = teacher.state_dict()
    others = {k: torch.zeros_like(v) for k, v in state.items()}
    backbone = {k: v for k, v in state.items() if not k.startswith('head.')}
    clip = {}
    for k, v in backbone.items():
        for ours, theirs in [
            ('patch_embed.proj.', 'conv1.'), ('pos_embed', 'positional_embedding'), ('cls_token', 'class_embedding'),
            ('blocks.', 'transformer.resblocks.'), ('norm1.', 'ln_1.'), ('norm2.', 'ln_2.'),
            ('attn.qkv.', 'attn.in_proj_'), ('attn.proj.', 'attn.out_proj.'), ('mlp.fc1.', 'mlp.c_fc.'),
            ('mlp.fc2.', 'mlp.c_proj.'),
        ]:
            k = k.replace(ours, theirs)
        k = f'visual.{k}'.replace('visual.norm.', 'visual.ln_post.')
        clip[k] = v[0, 0] if 'class' in k else v[0] if 'positional' in k else v
    clip.update({'visual.proj': torch.zeros(48, 8), 'transformer.resblocks.0.ln_1.weight': torch.zeros(8)})
    layouts = {
        'dino': {'student': others, 'teacher': {
            **{f'backbone.{k}': v for k, v in backbone.items()}, 'head.mlp.0.weight': torch.zeros(2)}},
        'mae': {'model': {**backbone, 'decoder_pos_embed': torch.zeros(1, 2, 3), 'mask_token': torch.zeros(1)}},
        'clip': clip,
        'timm': {'state_dict': others, 'state_dict_ema': state, 'epoch': 3},
    }
    for name, checkpoint in layouts.items():
        torch.save(checkpoint, tmp_path / f'{name}.pth')
        for source in (checkpoint, tmp_path / f'{name}.pth'):
            student = vit(**STUDENT)
            timm_rep.weight_select_init(student, source)
            for k, v in student.state_dict().items():
                assert torch.equal(v, expected.state_dict()[k]), (name, k)


class _Detector(nn.Module):
    """A model whose names begin with the prefix of a wrapper."""

    def __init__(self, dim):
        super().__init__()
        self.backbone = vit(**VIT, embed_dim=dim, depth=1, num_heads=3)
        self.neck = nn.Linear(dim, 8)


def test_names_with_the_prefix_of_a_wrapper(tmp_path):
    """They stay, if the student has them too: in a model, a state dict, a file, and of wrappers."""
    teacher, students = _Detector(48), []
    state = teacher.state_dict()
    torch.save({'state_dict': {f'module.{k}': v for k, v in state.items()}}, tmp_path / 't.pth')
    for source in teacher, state, tmp_path / 't.pth':
        students.append(_Detector(24))
        assert timm_rep.weight_select_init(students[-1], source, include_head=True).coverage == 100
    assert same_weights(students[0], students[1])
    assert same_weights(students[0], students[2])


@pytest.mark.parametrize('element', ['consecutive', 'random', 'random_inconsistent', 'l1', 'magnitude'])
def test_counters_of_fused_projections(element):
    """The number of batches of a norm after a qkv has no axis to split."""
    student, teacher = (timm.create_model('shvit_s1', embed_dim=dims, partial_dim=partial) for dims, partial in (
        ((32, 48, 64), (8, 12, 16)), ((48, 64, 96), (12, 16, 24))))
    teacher.stages[1].blocks[0].mixer.m.qkv.bn.num_batches_tracked.fill_(7)
    timm_rep.weight_select_init(student, teacher, element)
    assert student.stages[1].blocks[0].mixer.m.qkv.bn.num_batches_tracked == 7


@torch.no_grad()
def test_tied_parameters_are_restored():
    """Each tensor is written twice before the error."""
    class Tied(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(dim, dim) for _ in range(3))
            self.b.weight = self.a.weight

    student, teacher = Tied(4), Tied(8)
    before = student.a.weight.clone()
    teacher.b.weight = nn.Parameter(teacher.b.weight + 1)
    teacher.c.weight.fill_(float('nan'))
    with pytest.raises(ValueError, match=r'c\.weight'):
        timm_rep.weight_select_init(student, teacher)
    assert torch.equal(student.a.weight, before)


def test_dtypes_and_devices(teacher):
    student = vit(**STUDENT).bfloat16()
    timm_rep.weight_select_init(student, teacher)
    assert student.norm.weight.dtype == torch.bfloat16
    assert torch.equal(student.norm.weight, teacher.norm.weight[::2].bfloat16())


def test_bad_arguments(student, teacher, tmp_path):
    before = copy.deepcopy(student.state_dict())
    for kwargs, message in [
        (dict(element_selection='even'), 'element_selection must be'),
        (dict(layer_selection='all'), 'layer_selection must be one of'),
        (dict(include='head'), 'include_head must be True'),
        (dict(include='attn'), r"components .* got 'attn'"), (dict(exclude=['heads']), r"got 'heads'"),
    ]:
        with pytest.raises(ValueError, match=message):
            timm_rep.weight_select_init(student, teacher, **kwargs)
    for word in ('blocks.*.attention.*', 'blocks.9.*'):
        with pytest.raises(ValueError, match=r'blocks.* must match a tensor of the student'):
            timm_rep.weight_select_init(student, teacher, include=word)
    with pytest.raises(ValueError, match=r"'other' must match a tensor of the student"):
        timm_rep.weight_select_init(student, teacher, include=['norm', 'other'])
    timm_rep.weight_select_init(vit(**STUDENT), teacher, exclude='other')
    with pytest.raises(ValueError, match='features_only'):
        timm_rep.weight_select_init(vit(**STUDENT, features_only=True, out_indices=(0,)), teacher)
    with pytest.raises(ValueError, match=r"student .* on 'meta'"):
        timm_rep.weight_select_init(timm.create_model('vit_tiny_patch16_224', device='meta', **STUDENT), teacher)
    with pytest.raises(ValueError, match=r'teacher .* empty list'):
        timm_rep.weight_select_init(student, [])
    other = timm.create_model('resnet10t')
    with pytest.raises(ValueError, match=r'student, but 30 of 32 .* nothing was changed') as e:
        timm_rep.weight_select_init(student, other)
    assert len(str(e.value).splitlines()) == 22
    assert str(e.value).splitlines()[-1] == '  and 10 more'
    with pytest.raises(FileNotFoundError, match=r'^teacher must'):
        timm_rep.weight_select_init(student, tmp_path / 'nowhere.safetensors')
    with pytest.raises(ValueError, match=r"^teacher must have pretrained weights .*'mixer_s32_224'"):
        timm_rep.weight_select_init(student, 'mixer_s32_224')
    with pytest.raises(TypeError, match="values that are not tensors: 'epoch'"):
        timm_rep.weight_select_init(student, {**teacher.state_dict(), 'epoch': 3})
    for name in ('bad.pth', 'bad.safetensors'):
        (tmp_path / name).write_bytes(b'neither')
        with pytest.raises(RuntimeError, match=name):
            timm_rep.weight_select_init(student, tmp_path / name)
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())


def test_wrong_types():
    model = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3)
    for args, error, name in [
        (('x', model), TypeError, 'student'), ((model, None), TypeError, 'teacher'), ((model, 5), TypeError, 'teacher'),
        ((model, copy.deepcopy(model).to('meta')), ValueError, 'meta'),
    ]:
        with pytest.raises(error, match=name):
            timm_rep.weight_select_init(*args)
    with pytest.raises(ValueError, match='include'):
        timm_rep.weight_select_init(model, model, include=[5])


@pytest.mark.parametrize('dtype,value', [
    (torch.float32, float('nan')), (torch.float32, float('inf')), (torch.float16, 1e30)])
@pytest.mark.parametrize('element_selection', ['uniform', 'uniform_heads', 'consecutive'])
@torch.no_grad()
def test_weights_that_are_not_finite_in_the_student(dtype, value, element_selection):
    """The tensor is named and nothing is written; entries that are not selected may be anything."""
    args = dict(img_size=32, patch_size=8, depth=2, num_heads=3, num_classes=5)
    student = timm.create_model('vit_tiny_patch16_224', embed_dim=24, **args).to(dtype)
    teacher = timm.create_model('vit_tiny_patch16_224', embed_dim=48, **args)
    before = {name: x.clone() for name, x in student.state_dict().items()}
    teacher.blocks[1].mlp.fc1.weight[0, 0] = value
    with pytest.raises(ValueError, match=r'blocks\.1\.mlp\.fc1\.weight'):
        timm_rep.weight_select_init(student, teacher, element_selection)
    assert all(torch.equal(x, before[name]) for name, x in student.state_dict().items())
    teacher.blocks[1].mlp.fc1.weight[0, 0] = 0.
    teacher.blocks[1].mlp.fc1.weight[-1, -1] = value if element_selection == 'consecutive' else 0.
    timm_rep.weight_select_init(student, teacher, element_selection)
    assert all(x.isfinite().all() for x in student.state_dict().values())


def test_the_classifier_of_a_model_without_a_cfg_is_left():
    args = dict(img_size=32, patch_size=8, num_heads=3, depth=2)
    teacher = VisionTransformer(embed_dim=48, num_classes=10, **args)
    torch.nn.init.normal_(teacher.head.bias)
    for classes, include_head in ((5, True), (10, False)):
        student = VisionTransformer(embed_dim=24, num_classes=classes, **args)
        before = copy.deepcopy(student.head.state_dict())
        timm_rep.weight_select_init(student, teacher, include_head=include_head)
        assert all(torch.equal(v, before[k]) for k, v in student.head.state_dict().items())
    timm_rep.weight_select_init(student, teacher, include_head=True)
    assert torch.equal(student.head.bias, teacher.head.bias)


def test_names_that_create_model_knows(tmp_path, monkeypatch):
    """A tag of TIMM_REP_HUB, and a model of timm beside a folder of its name."""
    published, _ = publish(tmp_path / 'hub' / 'repa_deit_tiny.mine')
    monkeypatch.setenv('TIMM_REP_HUB', str(tmp_path / 'hub'))
    student = timm.create_model('repa_deit_tiny', num_classes=5, **PUBLISHED[1])
    timm_rep.weight_select_init(student, 'repa_deit_tiny.mine')
    assert same_weights(student.blocks, published.blocks)
    with pytest.raises(RuntimeError, match='other'):
        timm_rep.weight_select_init(student, 'repa_deit_tiny.other')
    monkeypatch.chdir(tmp_path)
    for name in ('test_vit', 'no_model'):
        (tmp_path / name).mkdir()
    asked = []
    monkeypatch.setattr('timm_rep.init.teachers._open_cached', asked.append)
    monkeypatch.setattr(timm, 'create_model', lambda name, pretrained: published)
    open_teacher('test_vit')
    assert asked == ['test_vit']
    with pytest.raises(ValueError, match='got the folder'):
        open_teacher('no_model')
