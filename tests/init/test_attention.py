"""The layouts of timm's attentions: what the channels that are taken for values and for heads do."""
import copy

import pytest
import timm
import torch

import timm_rep
from timm_rep.init.attention import AttentionLayout
from timm_rep.init.head_aware import ModelLayout, Unselectable, head_aware_indices, interpolate_positions

DEFAULT = ('convit_tiny', 'eva02_tiny_patch14_224', 'gcvit_xxtiny', 'levit_128s', 'tiny_vit_5m_224')
# not DaViT, whose channels attend to queries, nor MViTv2, which adds the queries to the values
SLOW = (
    'beit_base_patch16_224', 'caformer_s18', 'cait_xxs24_224', 'coat_lite_tiny', 'coatnet_0_rw_224',
    'coatnet_nano_cc_224', 'crossvit_9_240', 'edgenext_small', 'efficientformer_l1', 'efficientformerv2_s0',
    'fastvit_sa12', 'hiera_tiny_224', 'levit_conv_128s', 'maxvit_rmlp_pico_rw_256', 'nextvit_small', 'pvt_v2_b0',
    'swin_tiny_patch4_window7_224', 'swinv2_tiny_window8_256', 'tnt_s_patch16_224', 'twins_svt_small',
    'vit_tiny_patch16_224', 'volo_d1_224', 'xcit_nano_12_p8_224')


def attentions(model):
    """The first attention of each class and order of layers, by name, with its layout."""
    found = {}
    for name, module in model.named_modules():
        layout, children = AttentionLayout.of(module), dict(module.named_children())
        values = [child for child in children if 'v' in getattr(layout, 'projections', lambda *_: '')([child], 0)]
        if values and 'proj' in children:
            found.setdefault((type(module), layout.fused, layout.head_first, *children), (name, layout))
    return dict(found.values())


def zero(module, layout, select, dim):
    """Set the channels that ``select`` takes from the positions (heads, channels) of the values to zero."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        projections = layout.projections(name.split('.'), dim) if tensor.ndim > dim else ''
        if 'v' in projections:
            positions = layout.positions(projections, tensor.shape[dim])[projections.index('v')]
            tensor.index_fill_(dim, select(positions).flatten(), 0.)


@torch.no_grad()
@pytest.mark.parametrize('name', [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_values_and_heads(name):
    """Without values nothing is attended to; values of one head reach the inputs of ``proj`` that are that head's."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=2).eval()
    layouts = attentions(model)
    assert layouts
    calls = {}
    for path in layouts:
        model.get_submodule(path).register_forward_hook(
            lambda _, args, kwargs, y, path=path: calls.update({path: (args, kwargs)}), with_kwargs=True)
    model(torch.randn(1, *model.default_cfg['input_size']))
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


@pytest.mark.parametrize('heads', ['whole', 'within'])
@pytest.mark.parametrize('head_first', [False, True])
def test_indices_of_projections(heads, head_first):
    """Queries from queries, keys from keys, values from values, of the same head, in both orders."""
    def layout(heads, key, value):
        attention = AttentionLayout(heads, head_first, (key, value))
        length = heads * (2 * key + value)
        shapes = {'attn.qkv.weight': (length, 8), 'attn.qkv.bias': (length,), 'attn.proj.weight': (8, heads * value)}
        return ModelLayout({'attn': attention}, {}, {}, shapes)

    def rows(layout):
        """(head, projection, channel) of each row, and (head, channel) of each input of proj."""
        count, _, (key, value), _ = layout.attentions['attn']
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


def test_other_layouts_are_refused():
    shapes = [{'attn.qkv.weight': (length, 8)} for length in (24, 48)]
    student, *teachers = (ModelLayout({'attn': layout}, {}, {}, shape) for layout, shape in (
        (AttentionLayout(2), shapes[0]),
        (AttentionLayout(2, fused='kv'), shapes[1]),
        (AttentionLayout(5), shapes[1]),
    ))
    for teacher, message in zip(teachers, ('other projections than qkv', 'not 5 heads of equal width')):
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
    """Its tables are (heads, height, width)."""
    student, teacher = ({'rel_pos.relative_position_bias_table': shape} for shape in ((2, 5, 5), (4, 9, 9)))
    layouts = [ModelLayout({'rel_pos': AttentionLayout(n)}, {}, {}, s) for n, s in ((2, student), (4, teacher))]
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
    assert {s.component for s in report.own} == {'head'}
    assert student.eval()(torch.randn(1, *student.default_cfg['input_size'])).isfinite().all()
