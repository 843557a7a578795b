import copy

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table

import timm_rep
from tests.helpers import relative
from timm_rep.init import evenly_spaced

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
    """Of inputs in the channels that are kept, each head attends as the teacher's does."""
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
    with pytest.raises(ValueError, match='smaller'):  # by index it cannot be larger
        timm_rep.weight_select_init(student, teacher)


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
    with pytest.raises(ValueError, match=r'(?s)^3 of 20 .*attn\.qkv\.weight.*attn\.qkv\.bias.*attn\.proj\.weight'):
        init(student, teacher)
    report = init(student, teacher, strict=False)
    assert {s.name for s in report.own if s.problem} == {
        f'blocks.0.attn.{name}' for name in ('qkv.weight', 'qkv.bias', 'proj.weight')}
    assert torch.equal(student.blocks[0].attn.qkv.weight, before['blocks.0.attn.qkv.weight'])
    assert torch.equal(student.norm.bias, teacher.norm.bias[evenly_spaced(80, 24)])
    wide = build(0, **dict(STUDENT, mlp_ratio=20))
    with pytest.raises(ValueError, match=r'(?s)^3 of 20 .*mlp\.fc1\.weight .*, smaller.*mlp\.fc2\.weight .*, smaller'):
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
    assert {s.component for s in report.own} == {'head'}
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
    """Of a GLU, which has them one behind the other."""
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


@torch.no_grad()
def test_groups():
    """Whole groups, and channels in them."""
    def net(groups, width):
        return nn.Sequential(nn.Conv2d(groups * width, groups * width, 3, groups=groups))

    torch.manual_seed(0)
    student, teacher = net(2, 3), net(4, 6)
    for source in (teacher, teacher.state_dict()):
        init(student, source)
        groups = evenly_spaced(4, 2)
        for g in range(2):
            rows = groups[g] * 6 + evenly_spaced(6, 3)
            assert torch.equal(student[0].weight[3 * g:3 * g + 3], teacher[0].weight[rows][:, evenly_spaced(6, 3)])
            assert torch.equal(student[0].bias[3 * g:3 * g + 3], teacher[0].bias[rows])

    # more outputs for each input of a group than in the student, so that only the model says how many groups there are
    teacher = nn.Sequential(nn.Conv2d(24, 48, 3, groups=4))
    init(student, teacher)
    for g in range(2):
        rows = evenly_spaced(4, 2)[g] * 12 + evenly_spaced(12, 3)
        assert torch.equal(student[0].bias[3 * g:3 * g + 3], teacher[0].bias[rows])


@pytest.mark.parametrize('pair', [
    ('mixer_t32', 'mixer_s32_224'), ('swin_femto', 'swin_tiny_patch4_window7_224'),
    *(pytest.param(pair, marks=pytest.mark.slow) for pair in (
        ('convnext_femto', 'convnext_tiny'), ('resnet18', 'resnet34'), ('pvt_v2_b0', 'pvt_v2_b1'),
        ('vit_tiny_patch16_224', 'vit_small_patch16_224')))])
def test_the_pairs_of_the_paper(pair):
    student, teacher = (timm.create_model(name, num_classes=2) for name in pair)
    report = init(student, teacher)
    assert {s.component for s in report.own} == {'head'}
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
