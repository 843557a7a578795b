"""Selection by heads, projections and positions, and the layouts of timm's attentions that it relies on."""
import copy
import re
from collections import OrderedDict
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import MultiQueryAttention2d, resample_abs_pos_embed, resize_rel_pos_bias_table
from timm.layers.halo_attn import HaloAttn

import timm_rep
from tests.helpers import randomize_, relative, same_weights
from timm_rep.init import evenly_spaced
from timm_rep.init.attention import AttentionLayout
from timm_rep.init.head_aware import ModelLayout, Unselectable, head_aware_indices, interpolate_positions

VIT = dict(img_size=32, patch_size=8, num_classes=5)
STUDENT = dict(VIT, embed_dim=24, depth=1, num_heads=2)  # 2 heads of 12
TEACHER = dict(VIT, embed_dim=80, depth=1, num_heads=5)  # 5 of 16


def build(seed, name='vit_tiny_patch16_224', **kwargs):
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model


def init(student, teacher, **kwargs):
    return timm_rep.weight_select_init(student, teacher, element_selection='uniform_heads', **kwargs)


@torch.no_grad()
@pytest.mark.parametrize('source', ['model', 'state dict'])
def test_whole_heads(source):
    """Head by head, entry by entry: queries only from queries, of the head, and its values into the same channels."""
    student, teacher = build(0, **dict(STUDENT, num_heads=2)), build(1, **dict(TEACHER, embed_dim=60, num_heads=5))
    if source == 'model':  # heads may be wider there
        teacher = build(1, **TEACHER)
    init(student, teacher if source == 'model' else teacher.state_dict())
    ours, theirs = student.blocks[0].attn, teacher.blocks[0].attn
    assert (ours.head_dim, theirs.head_dim) == (12, 16 if source == 'model' else 12)
    width, heads, channels = theirs.qkv.in_features, evenly_spaced(5, 2), evenly_spaced(theirs.head_dim, 12)
    inputs = evenly_spaced(width, 24)
    for part in range(3):
        for h in range(2):
            for c in range(12):
                row = part * width + heads[h] * theirs.head_dim + channels[c]
                assert torch.equal(ours.qkv.weight[part * 24 + h * 12 + c], theirs.qkv.weight[row][inputs])
                assert ours.qkv.bias[part * 24 + h * 12 + c] == theirs.qkv.bias[row]
                if part == 2:
                    column = row - 2 * width
                    assert torch.equal(ours.proj.weight[:, h * 12 + c], theirs.proj.weight[inputs][:, column])
    assert torch.equal(ours.proj.bias, theirs.proj.bias[inputs])
    hidden = evenly_spaced(4 * width, 96)
    assert torch.equal(student.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight[hidden][:, inputs])
    assert torch.equal(student.blocks[0].mlp.fc2.weight, teacher.blocks[0].mlp.fc2.weight[inputs][:, hidden])


@torch.no_grad()
def test_whole_heads_are_the_teachers_attention():
    """Given inputs in the channels that are kept, each head attends as the teacher's does."""
    student, teacher = build(0, **dict(STUDENT, num_heads=2)), build(1, **dict(VIT, embed_dim=48, depth=1, num_heads=4))
    init(student, teacher)
    x = torch.randn(1, 17, 24)
    wide = torch.zeros(1, 17, 48)
    kept = evenly_spaced(48, 24)
    wide[..., kept] = x

    def attention(attn, x):
        q, k, v = attn.qkv(x).reshape(17, 3, attn.num_heads, 12).permute(1, 2, 0, 3)
        return (q @ k.transpose(1, 2) / 12 ** .5).softmax(-1) @ v

    ours, theirs = attention(student.blocks[0].attn, x), attention(teacher.blocks[0].attn, wide)
    assert relative(ours, theirs[[0, 2]]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize('name, args', [
    ('vit_tiny_patch16_224', dict(scale_attn_norm=True)), ('beit3_base_patch16_224', {}),
    ('eva02_tiny_patch14_224', dict(scale_attn_inner=True))])
def test_a_norm_of_the_values_follows_them(name, args):
    """Whole heads, as the columns of the projection that it is before."""
    student, teacher = (
        build(seed, name, **{**VIT, **args, **kwargs}) for seed, kwargs in enumerate((
            dict(embed_dim=48, depth=1, num_heads=3), dict(embed_dim=96, depth=1, num_heads=6))))
    teacher.blocks[0].attn.norm.weight.copy_(torch.arange(96.))
    teacher.blocks[0].attn.proj.weight.copy_(torch.arange(96.).expand(96, 96))
    init(student, teacher, strict=False)
    kept = student.blocks[0].attn.norm.weight
    assert torch.equal(kept, student.blocks[0].attn.proj.weight[0])
    assert kept.tolist() == [float(i) for h in (0, 2, 4) for i in range(16 * h, 16 * h + 16)]


@torch.no_grad()
def test_within_heads():
    """Evenly over the channels of all heads, in each projection by itself."""
    student, teacher = build(0, **STUDENT), build(1, **TEACHER)
    init(student, teacher, heads='within')
    kept = evenly_spaced(80, 24)
    ours, theirs = student.blocks[0].attn.qkv.weight, teacher.blocks[0].attn.qkv.weight
    for a, b in zip(ours.chunk(3), theirs.chunk(3)):
        assert torch.equal(a, b[kept][:, kept])
    with pytest.raises(ValueError, match=r'blocks\.0\.attn\.qkv.* 6 heads of 4 channels, the teacher 5 of 16'):
        init(build(0, **dict(STUDENT, num_heads=6)), teacher)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ValueError, match='heads must be one of'):
        init(student, teacher, heads='all')
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())


@torch.no_grad()
def test_position_embeddings_are_interpolated():
    """Also to a larger grid; tokens before the grid stay."""
    teacher = build(1, **TEACHER)
    kept = evenly_spaced(80, 24)
    for size in (16, 48):
        student = build(0, **dict(STUDENT, img_size=size))
        init(student, teacher)
        expected = resample_abs_pos_embed(teacher.pos_embed, [size // 8] * 2)[..., kept]
        assert torch.equal(student.pos_embed, expected)
        assert torch.equal(student.pos_embed[:, 0], teacher.pos_embed[:, 0][:, kept])


@pytest.mark.parametrize('element_selection', ['uniform', 'consecutive', 'random', 'l1', 'uniform_heads'])
@torch.no_grad()
def test_positions_are_interpolated_by_every_selection(element_selection):
    """Only channels and heads are selected, by index."""
    teacher = build(1, **TEACHER)
    for size in (16, 48):
        student = build(0, **dict(STUDENT, img_size=size))
        resized = build(1, **dict(TEACHER, img_size=size))
        resized.load_state_dict({
            **teacher.state_dict(), 'pos_embed': resample_abs_pos_embed(teacher.pos_embed, [size // 8] * 2)})
        expected = build(0, **dict(STUDENT, img_size=size))
        timm_rep.weight_select_init(expected, resized, element_selection)
        report = timm_rep.weight_select_init(student, teacher, element_selection)
        assert same_weights(student, expected)
        assert next(s for s in report.selections if s.name == 'pos_embed').indices[1] is None
    no_grid = build(0, **dict(STUDENT, img_size=(32, 16), reg_tokens=1))
    with pytest.raises(ValueError, match='10 positions cannot be interpolated to 10: expected grids'):
        timm_rep.weight_select_init(no_grid, build(1, **dict(TEACHER, img_size=24)), element_selection)


@torch.no_grad()
def test_windows_are_interpolated_by_every_selection():
    student, teacher = (randomize_(timm.create_model(
        'swin_tiny_patch4_window7_224', img_size=64, depths=(1, 1), num_heads=(heads, 2 * heads), embed_dim=8 * heads,
        window_size=window, num_classes=0)) for heads, window in ((1, 4), (2, 8)))
    name = 'layers.0.blocks.0.attn.relative_position_bias_table'
    timm_rep.weight_select_init(student, teacher)
    expected = resize_rel_pos_bias_table(teacher.get_parameter(name), (4, 4), (49, 2))[:, :1]
    assert torch.equal(student.get_parameter(name), expected)


@pytest.mark.parametrize('size,known', [((48, 96), True), ((48, 96), False), ((72, 32), True)])
@torch.no_grad()
def test_position_embeddings_of_other_shapes(size, known):
    """The grids of models are known: 6 x 12 and 9 x 4 from 6 x 6; without a model a grid is a square."""
    teacher = build(1, **dict(TEACHER, img_size=48))
    student = build(0, **dict(STUDENT, img_size=size))
    init(student, teacher if known else teacher.state_dict())
    expected = resample_abs_pos_embed(teacher.pos_embed, [size[0] // 8, size[1] // 8])[..., evenly_spaced(80, 24)]
    assert torch.equal(student.pos_embed, expected)
    larger = build(1, **dict(TEACHER, img_size=size))
    for source in (larger, larger.state_dict()):
        init(student, source)  # of equal length, the same grid
        assert torch.equal(student.pos_embed, larger.pos_embed[..., evenly_spaced(80, 24)])
    small = build(0, **dict(STUDENT, img_size=48))
    init(small, larger)
    assert torch.equal(
        small.pos_embed,
        resample_abs_pos_embed(larger.pos_embed, [6, 6], [size[0] // 8, size[1] // 8])[..., evenly_spaced(80, 24)])


@torch.no_grad()
def test_grids_that_do_not_fit():
    """2 tokens and 4 x 2 positions are not 1 and 3 x 3, although there are 10 of each; a grid of other size neither."""
    student = build(0, **dict(STUDENT, img_size=24))
    teacher = build(1, 'deit_tiny_distilled_patch16_224', **dict(TEACHER, img_size=(32, 16)))
    init(student, teacher)
    assert torch.equal(student.pos_embed[:, 0], teacher.pos_embed[:, 0, evenly_spaced(80, 24)])
    student = build(0, **dict(STUDENT, img_size=(32, 16), reg_tokens=1))
    teacher = build(1, **dict(TEACHER, img_size=24))
    with pytest.raises(ValueError, match='10 positions cannot be interpolated to 10: expected grids'):
        init(student, teacher)


@torch.no_grad()
def test_other_tokens_before_the_grid():
    """The first of them are kept."""
    def grid(kwargs, seed=0):
        return build(seed, **dict(STUDENT, embed_dim=24, **kwargs))

    plain, distilled = grid({}), build(1, 'deit_tiny_distilled_patch16_224', **dict(STUDENT, embed_dim=24))
    init(plain, distilled)
    assert torch.equal(plain.pos_embed, torch.cat([distilled.pos_embed[:, :1], distilled.pos_embed[:, 2:]], dim=1))
    headless = grid(dict(class_token=False, global_pool='avg', fc_norm=False))
    init(headless, plain)
    assert torch.equal(headless.pos_embed, plain.pos_embed[:, 1:])
    registers = grid(dict(reg_tokens=3), seed=2)
    init(plain, registers)
    assert torch.equal(plain.pos_embed, torch.cat([registers.pos_embed[:, :1], registers.pos_embed[:, 4:]], dim=1))


@torch.no_grad()
def test_active_and_idle_channels_are_apart():
    args = dict(img_size=32, patch_size=8, depth=1, num_heads=2, num_classes=5)
    student = build(0, 'repa_deit_tiny', embed_dim=16, idle_ratio=.75, **args)
    teacher = build(1, 'repa_deit_tiny', embed_dim=32, idle_ratio=.5, **args)
    init(student, teacher)
    ours, theirs = student.blocks[0].mlp, teacher.blocks[0].mlp
    hidden = torch.cat([evenly_spaced(64, 16), 64 + evenly_spaced(64, 48)])
    kept = evenly_spaced(32, 16)
    assert torch.equal(ours.fc1.weight, theirs.fc1.weight[hidden][:, kept])
    assert torch.equal(ours.norm2.running_var, theirs.norm2.running_var[hidden])
    assert torch.equal(ours.fc2.weight, theirs.fc2.weight[kept][:, hidden])
    assert torch.equal(ours.fc2.bias, theirs.fc2.bias[kept])
    idle = build(1, 'repa_deit_tiny', embed_dim=32, idle_ratio=1., **args)
    with pytest.raises(ValueError, match=r'the student has 16 activated hidden channels, the teacher 0'):
        init(student, idle)
    active = build(1, 'repa_deit_tiny', embed_dim=32, idle_ratio=.25, **args)
    with pytest.raises(ValueError, match=r'the student has 48 idle hidden channels, the teacher 32'):
        init(student, active)


def test_what_cannot_be_selected_is_listed():
    """All of it, and with strict=False it keeps its own initialization."""
    student, teacher = build(0, **dict(STUDENT, num_heads=6)), build(1, **TEACHER)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ValueError, match=r'(?s)but 3 of 20 .*attn\.qkv\.weight.*attn\.qkv\.bias.*attn\.proj\.weight'):
        init(student, teacher)
    report = init(student, teacher, strict=False)
    assert {s.name for s in report.not_selected if s.problem} == {
        f'blocks.0.attn.{name}' for name in ('qkv.weight', 'qkv.bias', 'proj.weight')}
    assert torch.equal(student.blocks[0].attn.qkv.weight, before['blocks.0.attn.qkv.weight'])
    assert torch.equal(student.norm.bias, teacher.norm.bias[evenly_spaced(80, 24)])
    wide = build(0, **dict(STUDENT, mlp_ratio=20))
    with pytest.raises(ValueError, match=r'(?s)but 3 of 20 .*mlp\.fc1\.weight .* smaller.*mlp\.fc2\.weight .* smaller'):
        init(wide, teacher)
    with pytest.raises(ValueError, match=r'of the teacher is \(72, 24\)'):
        init(teacher, student, heads='within')


@torch.no_grad()
def test_swin():
    """Tables of relative positions: the heads that are kept, and another window by interpolation."""
    args = dict(depths=(1, 1), num_classes=5)
    student = build(0, 'swin_tiny_patch4_window7_224', embed_dim=24, num_heads=(2, 4), img_size=56, **args)
    teacher = build(1, 'swin_tiny_patch4_window7_224', embed_dim=48, num_heads=(4, 8), img_size=56, **args)
    report = init(student, teacher)
    ours, theirs = student.layers[0].blocks[0].attn, teacher.layers[0].blocks[0].attn
    table = 'relative_position_bias_table'
    assert torch.equal(getattr(ours, table), getattr(theirs, table)[:, [0, 2]])
    assert torch.equal(ours.qkv.bias[:12], theirs.qkv.bias[:12])
    assert torch.equal(ours.qkv.bias[12:24], theirs.qkv.bias[24:36])
    assert {s.component for s in report.not_selected} == {'head'}
    wider = build(
        0, 'swin_tiny_patch4_window7_224', embed_dim=24, num_heads=(2, 4), window_size=8, img_size=64, **args)
    constant = copy.deepcopy(teacher)
    for layer in constant.layers:
        getattr(layer.blocks[0].attn, table).copy_(torch.arange(layer.blocks[0].attn.num_heads).float().expand(169, -1))
    init(wider, constant)
    grown = getattr(wider.layers[0].blocks[0].attn, table)
    assert grown.shape == (225, 2)
    torch.testing.assert_close(grown, torch.tensor([0., 2.]).expand(225, -1))


@torch.no_grad()
def test_pvt():
    """Queries, and keys with values, of which each has its heads."""
    student, teacher = build(0, 'pvt_v2_b0', num_classes=5), build(1, 'pvt_v2_b1', num_classes=5)
    init(student, teacher)
    ours, theirs = student.stages[2].blocks[0].attn, teacher.stages[2].blocks[0].attn
    assert (ours.num_heads, theirs.num_heads) == (5, 5)
    width, narrow = 320, 160
    channels = (torch.arange(5)[:, None] * 64 + evenly_spaced(64, 32)).flatten()
    inputs = evenly_spaced(width, narrow)
    assert torch.equal(ours.q.weight, theirs.q.weight[channels][:, inputs])
    assert torch.equal(ours.kv.weight[narrow:], theirs.kv.weight[width:][channels][:, inputs])
    assert torch.equal(ours.proj.weight, theirs.proj.weight[inputs][:, channels])


@torch.no_grad()
def test_gates_and_values_are_apart():
    """A GLU has gates and values one after the other in one layer."""
    args = dict(VIT, depth=1, class_token=True, mlp_ratio=2, num_heads=2)
    student = build(0, 'eva02_tiny_patch14_224', embed_dim=24, **args)
    teacher = build(1, 'eva02_tiny_patch14_224', embed_dim=40, **args)
    assert type(student.blocks[0].mlp).__name__ == 'GluMlp'
    init(student, teacher)
    ours, theirs = student.blocks[0].mlp, teacher.blocks[0].mlp
    inputs = evenly_spaced(40, 24)
    hidden = evenly_spaced(theirs.fc2.in_features, ours.fc2.in_features)
    for a, b in zip(ours.fc1.weight.chunk(2), theirs.fc1.weight.chunk(2)):
        assert torch.equal(a, b[hidden][:, inputs])
    assert torch.equal(ours.fc2.weight, theirs.fc2.weight[inputs][:, hidden])


def bottleneck(net, groups, width, seed):
    """A bottleneck of a ResNeXt, a RegNet or a RegNetZ, with a norm that is not the identity."""
    inner = groups * width
    if net == 'resnext':  # squeeze-and-excitation of the outputs of the block
        block = timm.models.resnet.Bottleneck(
            48, 12, cardinality=groups, base_width=(width + .5) * 64 / 12, attn_layer=timm.layers.SEModule)
    elif net == 'regnet':
        block = timm.models.regnet.Bottleneck(48, 48, bottle_ratio=inner / 48, group_size=width, se_ratio=.25)
    else:
        layers = timm.models.byobnet.LayerFn(attn=partial(timm.layers.SEModule, rd_channels=8))
        block = timm.models.byobnet.BottleneckBlock(48, 48, bottle_ratio=inner / 48, group_size=width, layers=layers)
    generator = torch.Generator().manual_seed(seed)
    for value in block.state_dict().values():
        if value.dtype.is_floating_point:
            value.copy_(torch.rand(value.shape, generator=generator) + .5)
    return block.eval()


@pytest.mark.parametrize('groups,width', [((2, 4), (4, 8)), ((3, 8), (6, 8)), ((2, 4), (2, 8)), ((4, 2), (8, 3))])
@pytest.mark.parametrize('net', ['resnext', 'regnet', 'regnetz'])
@torch.no_grad()
def test_groups(net, groups, width):
    """Whole groups, and channels in them, in all layers with these channels: the student is a part of the teacher."""
    (number, size), (their_number, their_size) = groups, width
    student, teacher = bottleneck(net, number, size, 0), bottleneck(net, their_number, their_size, 1)
    kept = (evenly_spaced(their_number, number)[:, None] * their_size + evenly_spaced(their_size, size)).flatten()
    ours = {}
    for source in (teacher, teacher.state_dict()):
        report = init(student, source)
        ours = {s.name: s.indices for s in report.selections}
        of_groups = {
            'resnext': ('conv1.weight', 'bn1.bias', 'conv2.weight', 'bn2.running_mean', 'conv3.weight'),
            'regnet': ('conv1.conv.weight', 'conv1.bn.weight', 'conv2.conv.weight', 'conv2.bn.running_var',
                       'se.fc2.weight', 'se.fc2.bias', 'conv3.conv.weight', 'se.fc1.weight'),
            'regnetz': ('conv1_1x1.conv.weight', 'conv1_1x1.bn.bias', 'conv2_kxk.conv.weight', 'conv2_kxk.bn.weight',
                        'attn.fc2.weight', 'attn.fc2.bias', 'conv3_1x1.conv.weight', 'attn.fc1.weight'),
        }[net]
        for name in of_groups:
            positions = ours[name][bool(re.search('conv3|fc1', name))]
            assert torch.equal(torch.arange(their_number * their_size) if positions is None else positions, kept), name
    if net == 'resnext':
        assert not any(positions is not None for name in ('se.fc1.weight', 'se.fc2.bias') for positions in ours[name])


@pytest.mark.parametrize('name,tensor', [
    ('efficientvit_b0', 'stages.2.blocks.1.context_module.main.qkv.conv.weight'),
    ('shvit_s1', 'stages.1.blocks.0.mixer.m.qkv.c.weight')])
def test_attentions_of_unknown_heads(name, tensor):
    """Queries are not selected from keys; tensors of equal size are copied."""
    student, teacher = (timm.create_model(n, num_classes=2) for n in (name, name[:-1] + str(int(name[-1]) + 1)))
    report = init(student, teacher, strict=False)
    reason = next(s.reason for s in report.selections if s.name == tensor)
    assert "an attention whose heads are unknown; exclude it, or use element_selection='uniform'" in reason
    report = init(student, copy.deepcopy(student))
    assert all(s.reason in ('', 'classifier') for s in report.selections)


@torch.no_grad()
def test_heads_of_outlook_attention():
    """A head's weights of its windows of 3 x 3, 9 from each position, are selected whole (VOLO)."""
    student, teacher = (nn.Sequential(timm.models.volo.OutlookAttention(12 * n, n)) for n in (2, 5))
    for source in (teacher, teacher.state_dict()):
        report = init(student, source)
        rows = {s.name: s.indices for s in report.selections}['0.attn.weight'][0]
        assert rows.tolist() == [*range(81), *range(4 * 81, 5 * 81)]


@torch.no_grad()
def test_groups_of_too_few_channels():
    student, teacher = bottleneck('resnext', 4, 3, 0), bottleneck('resnext', 3, 8, 1)
    with pytest.raises(ValueError, match=r'bn1\.weight .* the student has 4 groups of 3 channels, the teacher 3 of 8'):
        init(student, teacher)
    init(student, teacher, heads='within', include='bn1.*')


@pytest.mark.parametrize('pair', [
    ('mixer_t32', 'mixer_s32_224'), ('swin_femto', 'swin_tiny_patch4_window7_224'),
    *(pytest.param(pair, marks=pytest.mark.slow) for pair in (
        ('convnext_femto', 'convnext_tiny'), ('resnet18', 'resnet34'), ('pvt_v2_b0', 'pvt_v2_b1'),
        ('vit_tiny_patch16_224', 'vit_small_patch16_224')))])
def test_the_pairs_of_the_paper(pair):
    student, teacher = (timm.create_model(name, num_classes=2) for name in pair)
    report = init(student, teacher)
    assert {s.component for s in report.not_selected} == {'head'}
    assert student.eval()(torch.randn(1, 3, 224, 224)).isfinite().all()


@torch.no_grad()
def test_tables_of_beit():
    """The table of relative positions is resized, but for the three entries of the class token, which are copied."""
    args = dict(patch_size=8, depth=1, num_classes=5)
    student = build(0, 'beit_base_patch16_224', img_size=32, embed_dim=24, num_heads=2, **args)
    teacher = build(1, 'beit_base_patch16_224', img_size=48, embed_dim=48, num_heads=4, **args)
    init(student, teacher)
    table, larger = (model.blocks[0].attn.relative_position_bias_table for model in (student, teacher))
    assert (table.shape, larger.shape) == ((7 ** 2 + 3, 2), (11 ** 2 + 3, 4))
    assert torch.equal(table[-3:], larger[-3:, [0, 2]])
    assert torch.equal(table, resize_rel_pos_bias_table(larger, (4, 4), (52, 4))[:, [0, 2]])


DEFAULT = ('convit_tiny', 'eva02_tiny_patch14_224', 'gcvit_xxtiny', 'levit_128s', 'tiny_vit_5m_224')
# not DaViT, whose channels attend to queries, nor MViTv2, which adds the queries to the values
SLOW = (
    'beit_base_patch16_224', 'caformer_s18', 'cait_xxs24_224', 'coat_lite_tiny', 'coatnet_0_rw_224',
    'coatnet_nano_cc_224', 'crossvit_9_240', 'edgenext_small', 'efficientformer_l1', 'efficientformerv2_s0',
    'fastvit_sa12', 'hiera_tiny_224', 'levit_conv_128s', 'maxvit_rmlp_pico_rw_256', 'nextvit_small', 'pvt_v2_b0',
    'swin_tiny_patch4_window7_224', 'swinv2_tiny_window8_256', 'tnt_s_patch16_224', 'twins_svt_small',
    'vit_tiny_patch16_224', 'volo_d1_224', 'xcit_nano_12_p8_224')


GROUPED = {  # grouped-query attention, in newer versions of timm
    'gemma4_vit_167m': dict(img_size=48, embed_dim=32, depth=1, num_heads=4, num_kv_heads=2, head_dim=16),
    'vit_base_patch16_sapiens2': dict(img_size=32, embed_dim=48, depth=1, num_heads=6, num_kv_heads=(2,)),
}


def attentions(model):
    """The first attention of each class and order of layers, by name, with its layout."""
    found = {}
    for name, module in model.named_modules():
        layout, children = AttentionLayout.of(module), dict(module.named_children())
        values = [child for child in children if 'v' in getattr(layout, 'projections', lambda *_: '')([child], 0)]
        if values and {'proj', 'o_proj'} & children.keys():
            found.setdefault((type(module), layout.fused, layout.head_first, *children), (name, layout))
    return dict(found.values())


def zero(module, layout, select, dim):
    """Set the channels that ``select`` takes from the positions (heads, ...) of values and outputs to zero."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        projections = layout.projections(name.split('.'), dim) if tensor.ndim > dim else ''
        if not {*'vo'} & {*projections}:
            continue
        for projection, positions in zip(projections, layout.positions(projections, tensor.shape[dim])):
            if projection in 'vo':
                tensor.index_fill_(dim, select(positions).flatten(), 0.)


@torch.no_grad()
@pytest.mark.parametrize('name', [
    *DEFAULT, *sorted(GROUPED.keys() & timm.list_models()), *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_values_and_heads(name):
    """Without values nothing is attended to; values of one head reach the inputs of ``proj`` that are that head's."""
    torch.manual_seed(0)
    args = GROUPED.get(name, {})
    model = timm.create_model(name, num_classes=2, **args).eval()
    layouts = attentions(model)
    assert layouts
    calls = {}
    for path in layouts:
        model.get_submodule(path).register_forward_hook(
            lambda _, args, kwargs, y, path=path: calls.update({path: (args, kwargs)}), with_kwargs=True)
    size = args.get('img_size')
    model(torch.randn(1, 3, size, size) if size else torch.randn(1, *model.default_cfg['input_size']))
    for path, layout in layouts.items():
        module, (args, kwargs) = copy.deepcopy(model.get_submodule(path)), calls[path]
        for key, p in module.named_parameters():
            if p.ndim > 1:
                p.normal_(std=p[0].numel() ** -.5)
            else:
                p.fill_(float(key.endswith('weight')))  # timm starts the last norm of some at 0
        module._forward_hooks.clear()
        module._forward_hooks_with_kwargs.clear()
        whole = module(*args, **kwargs)
        changed = {}
        for what, select, dim in (
                ('no values', lambda positions: positions, 0),
                ('values of the others', lambda positions: positions[1:], 0),
                ('inputs of the others', lambda positions: positions[1:], 1)):
            changed[what] = copy.deepcopy(module)
            zero(changed[what], layout, select, dim)
            changed[what] = changed[what](*args, **kwargs)
        whole, *changed = (y[0] if isinstance(y, tuple) else y for y in (whole, *changed.values()))
        scale = whole.abs().max().item()
        assert scale > 0
        empty, of_values, of_inputs = (y / scale for y in changed)
        assert empty.abs().max() < 1e-5, path
        assert (of_values - of_inputs).abs().max() < 1e-5, path


@torch.no_grad()
@pytest.mark.parametrize('source', ['model', 'state dict'])
def test_multi_query_attention(source):
    """Heads of queries that share keys and values, in convolutions: heads of the student are the teacher's."""
    student, teacher = (nn.Sequential(OrderedDict(attn=MultiQueryAttention2d(
        dim, num_heads=heads, key_dim=6, value_dim=10, query_strides=2, kv_stride=2, use_bias=True)))
        for dim, heads in ((16, 2), (32, 5)))
    for p in teacher.parameters():
        p.normal_()
    init(student, teacher if source == 'model' else teacher.state_dict())
    ours, theirs = student[0], teacher[0]
    kept, heads = evenly_spaced(32, 16), evenly_spaced(5, 2)
    for name, chosen, width in ('query', heads, 6), ('key', [0], 6), ('value', [0], 10):
        small, large = (m.get_submodule(f'{name}.proj') for m in (ours, theirs))
        a, b = (layer.weight.flatten(1).reshape(-1, width, layer.in_channels) for layer in (small, large))
        assert torch.equal(a, b[chosen][..., kept])
        assert torch.equal(small.bias.reshape(-1, width), large.bias.reshape(-1, width)[chosen])
    a, b = (m.output.proj.weight.flatten(1).reshape(len(m.output.proj.weight), -1, 10) for m in (ours, theirs))
    assert torch.equal(a, b[kept][:, heads])
    assert torch.equal(ours.query.norm.weight, theirs.query.norm.weight[kept])


@torch.no_grad()
def test_halo_attention():
    """Keys and values of a head side by side; queries of another width."""
    student, teacher = (nn.Sequential(OrderedDict(attn=HaloAttn(
        dim, num_heads=heads, dim_head=8, block_size=4, halo_size=1))) for dim, heads in ((24, 2), (60, 5)))
    for p in teacher.parameters():
        p.normal_()
    init(student, teacher)
    ours, theirs = student[0], teacher[0]
    assert (ours.dim_head_qk, ours.dim_head_v, theirs.dim_head_v) == (8, 12, 12)
    kept, heads = evenly_spaced(60, 24), evenly_spaced(5, 2)
    for name, width in (('q', 8), ('kv', 20)):
        a, b = (getattr(m, name).weight.flatten(1).reshape(-1, width, m.q.in_channels) for m in (ours, theirs))
        assert torch.equal(a, b[heads][..., kept])


@pytest.mark.parametrize('heads', ['whole', 'within'])
@pytest.mark.parametrize('head_first', [False, True])
def test_indices_of_projections(heads, head_first):
    """Queries from queries, keys from keys, values from values, of the same head, in both orders."""
    def layout(heads, key, value):
        attention = AttentionLayout(heads, head_first, (key, value))
        length = heads * (2 * key + value)
        shapes = {'attn.qkv.weight': (length, 8), 'attn.qkv.bias': (length,), 'attn.proj.weight': (8, heads * value)}
        return ModelLayout({'attn': attention}, {}, shapes)

    def rows(layout):
        """(head, projection, channel) of each row, and (head, channel) of each input of proj."""
        count, _, (key, value), *_ = layout.attentions['attn']
        sizes = dict(q=key, k=key, v=value)
        entries = [(h, p, c) for h in range(count) for p in 'qkv' for c in range(sizes[p])]
        if not head_first:
            entries = [(h, p, c) for p in 'qkv' for h in range(count) for c in range(sizes[p])]
        return entries, [(h, c) for h in range(count) for c in range(value)]

    student, teacher = layout(2, 4, 6), layout(5, 8, 9)
    (ours, inputs), (theirs, their_inputs) = rows(student), rows(teacher)
    chosen = {}
    for name in ('attn.qkv.weight', 'attn.qkv.bias'):
        indices, *_ = head_aware_indices(name, name, teacher.shapes[name], student, teacher, heads)
        chosen = {row: theirs[i] for row, i in zip(ours, indices.tolist())}
        assert all(row[1] == other[1] for row, other in chosen.items())
        if heads == 'whole':
            assert {(row[0], other[0]) for row, other in chosen.items()} == {(0, 0), (1, 4)}
            assert [other[2] for row, other in chosen.items() if row[:2] == (0, 'k')] == [0, 2, 4, 6]
        assert len(set(chosen.values())) == len(ours)
    name = 'attn.proj.weight'
    _, indices = head_aware_indices(name, name, teacher.shapes[name], student, teacher, heads)
    for (head, channel), i in zip(inputs, indices.tolist()):
        other = chosen[head, 'v', channel]
        assert their_inputs[i] == (other[0], other[2])


needs_grouped = pytest.mark.skipif(
    not timm.is_model('vit_base_patch16_sapiens2'), reason='no grouped-query attention in this timm')


def grouped(seed, heads, groups):
    """A ViT of gated heads of 8 channels, of which each group shares keys and values."""
    torch.manual_seed(seed)
    model = timm.create_model('vit_tiny_patch16_224', **VIT, depth=1, embed_dim=8 * heads, num_heads=heads)
    model.blocks[0].attn = timm.layers.AttentionRope(
        8 * heads, heads, num_kv_heads=groups, qkv_fused=False, gated=True)
    return model


@needs_grouped
@pytest.mark.parametrize('source', ['model', 'state dict'])
@pytest.mark.parametrize('ours, theirs', [((4, 2), (8, 4)), ((2, 1), (12, 4)), ((4, 4), (8, 4)), ((4, 2), (12, 3))])
def test_heads_that_share_keys_and_values(ours, theirs, source):
    """Whole heads of keys and values, and heads of queries that attend to these."""
    (heads, groups), (their_heads, their_groups) = ours, theirs
    student, teacher = grouped(0, *ours), grouped(1, *theirs)
    report = init(student, teacher if source == 'model' else teacher.state_dict())
    found = {s.name.split('attn.')[1]: s.indices for s in report.selections if 'attn.' in s.name}
    rows = {name: found[f'{name}_proj.weight'][0] for name in 'qkv' if found[f'{name}_proj.weight'][0] is not None}
    kept = evenly_spaced(their_groups, groups)
    for name in 'kv':
        expected = (kept[:, None] * 8 + torch.arange(8)).flatten()
        assert torch.equal(rows.get(name, torch.arange(their_groups * 8)), expected)
    queries = rows['q'].reshape(heads, 8)
    assert (queries % 8 == torch.arange(8)).all()
    chosen = queries[:, 0] // 8
    assert len({*chosen.tolist()}) == heads
    assert torch.equal(chosen // (their_heads // their_groups), kept.repeat_interleave(heads // groups))
    for tensor, dim in (('proj.weight', 1), ('gate.weight', 0), ('gate.bias', 0), ('q_proj.bias', 0)):
        assert torch.equal(found[tensor][dim], rows['q'])


@needs_grouped
def test_wider_heads_that_share_keys_and_values():
    """Of a state dict, whose 2 heads of keys could also be 3 of another width in the queries alone."""
    student = grouped(0, 2, 2)
    lengths = dict(q_proj=80, k_proj=20, v_proj=20)
    teacher = {
        f'blocks.0.attn.{layer}.{name}': torch.randn(length, *shape)
        for layer, length in lengths.items() for name, shape in (('weight', (16,)), ('bias', ()))}
    report = init(student, teacher, strict=False)
    found = {s.name.split('attn.')[1]: s.indices[0] for s in report.selections if '_proj.weight' in s.name}
    assert torch.equal(found['k_proj.weight'], torch.cat([evenly_spaced(10, 8), 10 + evenly_spaced(10, 8)]))
    assert torch.equal(found['q_proj.weight'], torch.cat([evenly_spaced(10, 8), 40 + evenly_spaced(10, 8)]))


@needs_grouped
def test_too_few_heads_of_a_group_are_refused():
    student, teacher = grouped(0, 4, 2), grouped(1, 8, 8)
    with pytest.raises(ValueError, match='4 heads of 8 channels in 2 groups, the teacher 8 of 8 in 8 groups'):
        init(student, teacher)
    init(student, teacher, heads='within')


def test_other_layouts_are_refused():
    shapes = [{'attn.qkv.weight': (length, 8)} for length in (24, 48)]
    student, *teachers = (ModelLayout({'attn': layout}, {}, shape) for layout, shape in (
        (AttentionLayout(2), shapes[0]),
        (AttentionLayout(2, fused='kv'), shapes[1]),
        (AttentionLayout(5), shapes[1]),
    ))
    for teacher, message in zip(teachers, ('projections other than qkv', 'into 5 heads of equal width')):
        name = 'attn.qkv.weight'
        with pytest.raises(Unselectable, match=message):
            head_aware_indices(name, name, (48, 8), student, teacher)


@torch.no_grad()
def test_fused_queries_and_keys():
    """The keys of ConViT are the teacher's keys, whichever way the elements are selected."""
    args = dict(num_classes=2, depth=1, local_up_to_layer=1, img_size=32)
    student = timm.create_model('convit_tiny', embed_dim=6, num_heads=2, **args)
    teacher = timm.create_model('convit_tiny', embed_dim=12, num_heads=4, **args)
    for selection in ('consecutive', 'random', 'uniform_heads'):
        report = timm_rep.weight_select_init(student, teacher, element_selection=selection)
        chosen, = (s for s in report.selections if s.name == 'blocks.0.attn.qk.weight')
        queries, keys = chosen.indices[0].chunk(2)
        assert torch.equal(keys, queries + chosen.teacher_shape[0] // 2)


@torch.no_grad()
def test_windows_of_maxvit():
    """MaxViT's tables are (heads, height, width)."""
    student, teacher = ({'rel_pos.relative_position_bias_table': shape} for shape in ((2, 5, 5), (4, 9, 9)))
    layouts = [ModelLayout({'rel_pos': AttentionLayout(n)}, {}, s) for n, s in ((2, student), (4, teacher))]
    name, = student
    assert head_aware_indices(name, name, (4, 9, 9), *layouts)[0].tolist() == [0, 2]
    table = torch.arange(4.)[:, None, None].expand(4, 9, 9)
    torch.testing.assert_close(interpolate_positions(table, name, (2, 5, 5)), table[:, :5, :5])


@pytest.mark.slow
@pytest.mark.parametrize('pair', [
    ('tiny_vit_5m_224', 'tiny_vit_11m_224'), ('gcvit_xxtiny', 'gcvit_small'),
    ('coatnet_0_rw_224', 'coatnet_1_rw_224'), ('maxvit_tiny_tf_224', 'maxvit_small_tf_384'),
    ('tnt_s_patch16_224', 'tnt_b_patch16_224')])
def test_pairs(pair):
    student, teacher = (timm.create_model(name, num_classes=2) for name in pair)
    report = timm_rep.weight_select_init(student, teacher, element_selection='uniform_heads')
    assert {s.component for s in report.not_selected} == {'head'}
    assert student.eval()(torch.randn(1, *student.default_cfg['input_size'])).isfinite().all()


@pytest.mark.parametrize('heads', ['whole', 'within'])
def test_the_norm_of_attention_pooling_is_after_its_projection(heads):
    """Unlike the norms of timm's other attentions, whose channels are those of the heads."""
    args = dict(img_size=32, depth=1)
    student, teacher = (
        build(i, 'vit_base_patch16_siglip_224', **args, embed_dim=width, num_heads=n)
        for i, (width, n) in enumerate([(16, 2), (32, 4)]))
    report = init(student, teacher, heads=heads)
    indices = {s.name: s.indices for s in report.selections}
    expected = indices['attn_pool.proj.weight'][0]
    assert expected.tolist() == list(range(0, 32, 2))
    assert torch.equal(indices['attn_pool.norm.weight'][0], expected)
    assert torch.equal(student.attn_pool.norm.bias, teacher.attn_pool.norm.bias[expected])
