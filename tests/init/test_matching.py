import pytest
import timm

from timm_rep.init import map_names, select_blocks


def shapes(name, **kwargs):
    model = timm.create_model(name, device='meta', **kwargs)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def blocks(names, prefix):
    """The teacher's block of each of the student's."""
    found = {}
    for name, other in names.items():
        if name.startswith(prefix):
            ours, theirs = name[len(prefix):].split('.')[0], other[len(prefix):].split('.')[0]
            assert found.setdefault(int(ours), int(theirs)) == int(theirs)
    return [found[i] for i in range(len(found))]


def test_select_blocks():
    assert select_blocks(9, 6) == [0, 1, 2, 3, 4, 5]
    assert select_blocks(9, 6, 'last') == [3, 4, 5, 6, 7, 8]
    assert select_blocks(9, 6, 'mid') == [1, 2, 3, 4, 5, 6]
    assert select_blocks(9, 6, 'uniform') == [0, 2, 3, 5, 6, 8]
    assert select_blocks(24, 12, 'uniform') == list(range(0, 24, 2))
    with pytest.raises(ValueError, match=r"layer_selection must be .*, got 'all'"):
        select_blocks(9, 6, 'all')


@pytest.mark.parametrize('depth,expected', [
    ('first', list(range(12))), ('last', list(range(12, 24))), ('mid', list(range(6, 18))),
    ('uniform', list(range(0, 24, 2)))])
def test_isotropic(depth, expected):
    names = map_names(shapes('vit_small_patch16_224'), shapes('vit_large_patch16_224'), depth)
    assert blocks(names, 'blocks.') == expected
    assert names['pos_embed'] == 'pos_embed'
    assert None not in names.values()


@pytest.mark.parametrize('depth,expected', [
    ('first', ([0, 1], [0, 1, 2, 3, 4, 5])), ('last', ([1, 2], [3, 4, 5, 6, 7, 8])),
    ('uniform', ([0, 2], [0, 2, 3, 5, 6, 8]))])
def test_stage_by_stage(depth, expected):
    names = map_names(shapes('convnext_femto'), shapes('convnext_tiny'), depth)
    assert (blocks(names, 'stages.0.blocks.'), blocks(names, 'stages.2.blocks.')) == expected
    assert names['stages.1.downsample.1.weight'] == 'stages.1.downsample.1.weight'
    assert names['stem.0.weight'] == 'stem.0.weight'
    assert None not in names.values()


@pytest.mark.parametrize('depth', ['first', 'last', 'mid', 'uniform'])
def test_blocks_with_a_stride_are_from_blocks_with_one(depth):
    """layer1 has none; in the others the first block maps to the first, and the rest among themselves."""
    names = map_names(shapes('resnet18'), shapes('resnet34'), depth)
    assert None not in names.values()
    for stage, blocks_there in ((1, 3), (2, 4), (3, 6), (4, 3)):
        found = blocks(names, f'layer{stage}.')
        if stage == 1:
            assert found == select_blocks(3, 2, depth)
        else:
            assert found == [0, 1 + select_blocks(blocks_there - 1, 1, depth)[0]]
    # where only the teacher's first block changes the width
    names = map_names(shapes('repopt_vgg_a0'), shapes('repopt_vgg_b1'), depth)
    assert None not in names.values()
    assert blocks(names, 'stages.0.') == [0, 1 + select_blocks(3, 1, depth)[0]]
    assert blocks(names, 'stages.1.')[0] == 0


def test_swin_and_pvt():
    names = map_names(shapes('swin_tiny_patch4_window7_224'), shapes('swin_small_patch4_window7_224'))
    assert blocks(names, 'layers.2.blocks.') == list(range(6))
    names = map_names(shapes('pvt_v2_b1'), shapes('pvt_v2_b2'), 'last')
    assert blocks(names, 'stages.2.blocks.') == [4, 5]
    assert names['stages.2.norm.weight'] == 'stages.2.norm.weight'


@pytest.mark.parametrize('ours,theirs,lacking', [
    ({}, dict(init_values=1e-5), set()),
    (dict(init_values=1e-5), {}, {'ls1.gamma', 'ls2.gamma'}),
    (dict(qkv_bias=False), {}, set()),
    ({}, dict(qkv_bias=False), {'attn.qkv.bias'}),
])
def test_blocks_of_similar_kinds(ours, theirs, lacking):
    """Blocks with a layer scale or a bias more or less have the other tensors in common, at any depth."""
    for depth in (4, 12):
        teacher = shapes('vit_small_patch16_224', depth=depth, **theirs)
        names = map_names(shapes('vit_tiny_patch16_224', depth=4, **ours), teacher, 'last')
        assert {name for name, other in names.items() if other is None} == {
            f'blocks.{i}.{name}' for i in range(4) for name in lacking}
        found = {name: other for name, other in names.items() if other is not None}
        assert blocks(found, 'blocks.') == list(range(depth - 4, depth))
    # both kinds of ResNet blocks are without biases, but this teacher's blocks have them
    with_biases = {
        name: (64,) if name.endswith('conv1.bias') else shape
        for name, shape in shapes('resnet34').items() for name in (name, name.replace('conv1.weight', 'conv1.bias'))}
    expected = map_names(shapes('resnet18'), shapes('resnet34'))
    assert map_names(shapes('resnet18'), with_biases) == expected


def test_what_the_teacher_lacks():
    """A deeper student has blocks without counterpart, and so are tensors of other names."""
    names = map_names(shapes('vit_base_patch16_224'), shapes('vit_tiny_patch16_224', depth=9))
    assert [names[f'blocks.{i}.attn.qkv.weight'] is None for i in range(12)] == [False] * 9 + [True] * 3
    names = map_names({'a': (2,), 'b': (3,)}, {'a.weight': (2,)})
    assert names == {'a': None, 'b': None}
    assert map_names({'a.weight': (2,)}, {'a': (2,)}) == {'a.weight': None}
    # a head of one's own
    names = map_names(shapes('deit_tiny_distilled_patch16_224'), shapes('deit_base_patch16_224'))
    assert {name for name, other in names.items() if other is None} == {
        'dist_token', 'head_dist.weight', 'head_dist.bias'}


@pytest.mark.parametrize('student, teacher, prefix, last', [
    ('regnetx_002', 'regnetx_004', 's3.b', [1, 5, 6, 7]),
    ('densenet121', 'densenet169', 'features.denseblock3.denselayer', [1, *range(10, 33)]),
    ('dpn68', 'dpn92', 'features.conv4_', [1, 2, *range(11, 21)]),
])
def test_blocks_whose_names_are_more_than_numbers(student, teacher, prefix, last):
    """Those of a different kind, the first of a stage, are matched first."""
    def number(name):
        return int(name[len(prefix):].partition('.')[0])

    small, large = shapes(student), shapes(teacher)
    for selection, expected in ('first', range(1, len(last) + 1)), ('last', last):
        found = {name: other for name, other in map_names(small, large, selection).items() if name.startswith(prefix)}
        assert all(other.startswith(prefix) for other in found.values())
        assert {number(name): number(other) for name, other in found.items()} == dict(enumerate(expected, 1))
