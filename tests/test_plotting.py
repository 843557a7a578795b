import re

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.helpers import normal_scales, tiny
from timm_rep.cli import main
from timm_rep.init import attention_products, attentions, mimetic_init_
from timm_rep.plotting import (
    diagonal_strength,
    kernel_layer,
    plot_accuracy,
    plot_attention,
    plot_kernels,
    plot_latency,
    plot_scales,
)
from timm_rep.scales import Scales

pytest.importorskip('matplotlib', reason='matplotlib draws the figures')


def model():
    return tiny('repopt_vgg_a0', depths=(1, 3, 2, 1))


def points(axes):
    """Points of the lines, a list of lines for each color."""
    found = {}
    for line in axes.lines:
        found.setdefault(line.get_color(), []).append([(x, pytest.approx(y)) for x, y in zip(*line.get_data())])
    return found


def test_figure_7():
    """A line for each branch of each stage, through the layer means."""
    scales = normal_scales(model(), seed=0)
    for name in ('stages.1.1.conv.0', 'stages.1.2.conv.0'):
        scales = Scales({**scales, name: {**scales[name], 'identity': torch.randn(16)}})
    figure = plot_scales({'a': scales, 'b': Scales.ones(model())})
    a, b = figure.axes
    assert (a.get_title(), b.get_title()) == ('a', 'b')
    assert a.get_ylim() == b.get_ylim()
    lines = points(a)
    names = list(scales)
    assert [len(stages) for stages in lines.values()] == [5, 5, 1]
    for branch, stages in zip(('conv3x3', 'conv1x1', 'identity'), lines.values()):
        drawn = [(x, y) for line in stages for x, y in line]
        expected = [(i + 1, scales[n][branch].mean().item()) for i, n in enumerate(names) if branch in scales[n]]
        assert drawn == expected
    assert [[x for x, _ in line] for line in next(iter(lines.values()))] == [[1], [2], [3, 4, 5], [6, 7], [8]]
    assert [text.get_text() for text in a.get_legend().get_texts()] == ['conv3x3', 'conv1x1', 'identity']


def test_figure_6():
    """Scales of the last layer of the longest stage by epoch."""
    scales = normal_scales(model(), seed=0)
    history = {
        'stages.1.2.conv.0': {'conv3x3': [1., .5, .25], 'conv1x1': [1., 2., 3.]}, 'stem.conv.0': {'conv3x3': [0.]}}
    figure = plot_scales({'a': Scales(scales, history=history), 'b': scales})
    course, without = figure.axes[2:]
    assert course.get_title() == 'stages.1.2.conv.0'
    assert [line for lines in points(course).values() for line in lines] == [
        [(1, 1.), (2, .5), (3, .25)], [(1, 1.), (2, 2.), (3, 3.)]]
    assert not without.lines
    assert 'not in the file' in without.get_title()


def test_figures_3_and_5():
    """Both histograms contain every entry once; the legends have the standard deviations."""
    state_dict = model().state_dict()
    assert kernel_layer(state_dict) == 'stages.1.1.conv.0.weight'
    blocks = ['stem', 'stage1.0', 'stage1.1', *(f'stage2.{i}' for i in range(5))]
    released = {f'{name}.conv.weight': torch.zeros(4, 4, 3, 3) for name in blocks}
    assert kernel_layer(released) == 'stage2.2.conv.weight'
    assert kernel_layer({f'module.{name}': value for name, value in released.items()}) == 'module.stage2.2.conv.weight'
    assert kernel_layer({f'module.{name}': value for name, value in state_dict.items()}) == (
        'module.stages.1.1.conv.0.weight')
    kernel = torch.zeros(5, 4, 3, 3)
    kernel[:, :, 1, 1] = torch.arange(20.).view(5, 4)
    axes, = plot_kernels({'b1': {**state_dict, 'x': kernel}}, ['x']).axes
    assert axes.get_legend().get_title().get_text() == f'std {kernel.std():.4f}'
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ['surroundings, std 0.0000', f'centre, std {torch.arange(20.).std():.4f}']
    for bars in axes.containers:
        width = bars[0].get_width()
        assert sum(bar.get_height() for bar in bars) * width == pytest.approx(1, rel=1e-4)


def test_an_outlier_does_not_hide_the_others():
    kernel = torch.randn(16, 16, 3, 3, generator=torch.Generator().manual_seed(0))
    kernel[0, 0, 1, 1] = 1000
    axes, = plot_kernels({'b1': {'x': kernel}}, ['x']).axes
    assert 2 < axes.get_xlim()[1] < 5
    assert f'centre, std {kernel[..., 1, 1].std():.4f}' in [text.get_text() for text in axes.get_legend().get_texts()]


def test_legend_names_the_branches_of_all():
    searched = Scales({'a': {'conv3x3': torch.ones(2), 'identity': torch.ones(2)}}, history={'a': {'other': [1.]}})
    figure = plot_scales({'start': Scales({'a': {'conv3x3': torch.ones(2)}}), 'searched': searched})
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ['conv3x3', 'identity', 'other']


def test_refusals():
    with pytest.raises(ValueError, match='columns'):
        plot_scales({})
    with pytest.raises(ValueError, match='columns'):
        plot_kernels({})
    with pytest.raises(ValueError, match='3 x 3 kernel'):
        kernel_layer({'fc.weight': torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"'head.fc.weight' must be a 3 x 3 kernel of m"):
        plot_kernels({'m': model().state_dict()}, ['head.fc.weight'])
    with pytest.raises(ValueError, match='each of the 2 state dicts'):
        plot_kernels({'a': {'x': torch.ones(4, 4, 3, 3)}, 'b': {'x': torch.ones(4, 4, 3, 3)}}, ['x'])


def test_command(tmp_path, capsys):
    scales = normal_scales(model(), seed=0)
    for folder in ('a', 'b'):
        scales.save(tmp_path / folder / 's.safetensors')
    output = tmp_path / 'new' / 'figure.svg'
    assert main(['plot-scales', *(str(tmp_path / f / 's.safetensors') for f in 'ab'), '-o', str(output)]) == 0
    assert output.stat().st_size > 5000
    out = capsys.readouterr().out
    assert scales.summary() in out
    assert out.splitlines()[-1] == f'Picture: {output}'
    save_file(model().state_dict(), tmp_path / 'm.safetensors')
    torch.save({'state_dict': model().state_dict()}, tmp_path / 'm.pth')
    output = tmp_path / 'figure.png'
    checkpoints = [str(tmp_path / 'm.safetensors'), str(tmp_path / 'm.pth')]
    assert main(['plot-scales', '--kernels', *checkpoints, '-o', str(output)]) == 0
    assert output.stat().st_size > 5000


def test_command_draws_one_checkpoint_twice(tmp_path, monkeypatch):
    save_file(model().state_dict(), tmp_path / 'm.safetensors')
    drawn = []
    monkeypatch.setattr(
        'timm_rep.cli.plot_scales.plot_kernels', lambda *args: drawn.append(plot_kernels(*args)) or drawn[-1])
    layers = ['stages.2.1.conv.0.weight', 'stages.2.0.conv.0.weight']
    assert main([
        'plot-scales', '--kernels', *[str(tmp_path / 'm.safetensors')] * 2, '-o', str(tmp_path / 'x.png'),
        '--layer', layers[0], '--layer', layers[1]]) == 0
    assert [axes.get_title().splitlines()[1] for axes in drawn[0].axes] == layers


@pytest.mark.parametrize('args,message', [
    (['{tmp}/nothing.safetensors'], 'nothing.safetensors'),
    (['nothing'], 'a model with packaged scales'),
    (['--kernels', '{tmp}/nothing.pth'], 'Expected a checkpoint'),
    (['--kernels', __file__], __file__),
    (['--kernels', '{tmp}/s.safetensors'], '3 x 3 kernel'),
    (['--kernels', '{tmp}/s.safetensors', '--layer', 'a', '--layer', 'b'], 'Expected --layer once'),
    (['{tmp}/s.safetensors', '--layer', 'a'], '--kernels must be given with --layer'),
    (['{tmp}/s.safetensors', '-o', '{tmp}/figure.txt'], '--output must be a .png'),
], ids=str)
def test_command_refuses(tmp_path, capsys, args, message):
    normal_scales(model(), seed=0).save(tmp_path / 's.safetensors')
    args = ['-o', '{tmp}/figure.png', *args]
    assert main(['plot-scales', *(a.format(tmp=tmp_path) for a in args)]) == 1
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ['s.safetensors']


def test_latency():
    """Stacked bars of the parts, with their sums above."""
    bars = {'vanilla': {'embedding': 1., 'FFNs': 5.}, 'folded': {'embedding': 1., 'FFNs': 2.}}
    figure = plot_latency({'a': bars, 'b': bars})
    a, b = figure.axes
    assert (a.get_title(), b.get_title()) == ('a', 'b')
    drawn = [(bar.get_y(), bar.get_height()) for bar in a.patches]
    assert drawn == [(0., 1.), (0., 1.), (1., 5.), (1., 2.)]
    assert [text.get_text() for text in a.texts] == ['6.0', '3.0']
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['FFNs', 'embedding']
    with pytest.raises(ValueError, match='columns'):
        plot_latency({})
    parts = {f'part {i}': i + .5 for i in range(12)}  # more than there are colours, and not in every bar
    axes, = plot_latency({'a': {'few': {'part 0': 2.}, 'many': parts}}).axes
    assert [text.get_text() for text in axes.texts] == ['2.0', '72.0']


def test_figure_5(tmp_path, capsys):
    """Figure 5 of weight selection: the products of a block and the strength of their diagonals."""
    torch.manual_seed(0)
    args = dict(img_size=32, patch_size=8, embed_dim=96, depth=2, num_heads=3)
    models = {kind: timm.create_model('vit_tiny_patch16_224', **args) for kind in ('random', 'mimetic')}
    mimetic_init_(models['mimetic'])
    figure = plot_attention(models, block=1, clip=40)
    drawn = [axes.images[0].get_array() for axes in figure.axes]
    expected = [
        product for i in (0, 1) for model in models.values()
        for product in [attention_products(model.blocks[1].attn)[i]]]
    for array, matrix in zip(drawn, expected):
        matrix = matrix.mean(0) if matrix.dim() == 3 else matrix
        torch.testing.assert_close(torch.from_numpy(array.data), matrix[:40, :40].detach())
    titles = [axes.get_title() for axes in figure.axes]
    assert [title.splitlines()[0] for title in titles] == ['random', 'mimetic'] * 2
    strength = [float(title.split()[-1]) for title in titles]
    assert abs(strength[0]) < 1
    assert abs(strength[2]) < 1
    assert strength[1] > 5
    assert strength[3] < -5
    assert diagonal_strength(torch.tensor([[3., 1.], [-1., 5.]])) == pytest.approx(4 / 2 ** .5)
    with pytest.raises(ValueError, match=r'block must .*got 2: random has 2'):
        plot_attention(models, block=2)
    with pytest.raises(ValueError, match='columns'):
        plot_attention({})


def test_plot_attention_weights(tmp_path, capsys, monkeypatch):
    create_model = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda name, **kwargs: create_model(
        name, embed_dim=48, depth=2, num_heads=3, **kwargs))
    other = create_model('vit_tiny_patch16_224', embed_dim=48, depth=2, num_heads=3, num_classes=3)
    path, output = tmp_path / 'w.safetensors', tmp_path / 'a.png'
    save_file(other.state_dict(), path)
    sources = ['vit_tiny_patch16_224', f'vit_tiny_patch16_224={path}']
    assert main(['plot-attention-weights', *sources, '--block', '-1', '-o', str(output)]) == 0
    assert output.read_bytes().startswith(b'\x89PNG')
    save_file({'blocks.0.attn.qkv.weight': torch.zeros(3, 3)}, path)
    for args, message in [
        ([sources[1]], 'has no blocks.0.attn.qkv.weight of the same'),
        (['vit_tinny'], "'vit_tinny'"), ([sources[0]] * 2, 'twice'),
        ([sources[0], '--block', '9'], 'got 9'),
    ]:
        assert main(['plot-attention-weights', *args, '-o', str(output)]) == 1
        assert message in capsys.readouterr().err


def test_plot_attention_weights_of_another_name(tmp_path, monkeypatch):
    """The attentions of EdgeNeXt are called xca; titles are names of files, not formulas."""
    drawn = []
    monkeypatch.setattr('timm_rep.cli.plot_attention_weights.plot_attention', lambda models, block: drawn.append(
        (models, plot_attention(models, block))) or drawn[0][1])
    other = timm.create_model('edgenext_xx_small')
    path = tmp_path / r'a$\b$.safetensors'
    save_file(other.state_dict(), path)
    source = f'edgenext_xx_small={path}'
    assert main(['plot-attention-weights', source, '-o', str(tmp_path / 'a.svg')]) == 0
    (models, figure), found = *drawn, dict(attentions(other))
    assert found
    for name, attention in attentions(models[source]):
        for expected, actual in zip(attention_products(found.pop(name)), attention_products(attention)):
            assert torch.equal(actual, expected)
    assert not found
    assert source in {axes.get_title().replace(r'\$', '$').partition('\n')[0] for axes in figure.axes}
    assert not any(re.search(r'(?<!\\)\$', axes.get_title()) for axes in figure.axes)


@pytest.mark.parametrize('swept', [True, False])
def test_accuracy(swept):
    top1 = {'original': 90., 'converted': 88., **({'idle ratio 0.5': 89.5, 'idle ratio 1': 80.} if swept else {})}
    figures = {
        name: dict(top1=y, images_per_second={'1': 10 + 5. * i, '16': 100 + 10. * i})
        for i, (name, y) in enumerate(top1.items())}
    figure = plot_accuracy(figures)
    assert len(figure.axes) == 2
    for axes, size in zip(figure.axes, ('1', '16')):
        low, high = axes.get_ylim()
        assert low < min(top1.values()) < max(top1.values()) < high
        assert high - low < 1.3 * (90 - min(top1.values()))  # no wider than the data
        drawn = {tuple(point) for line in axes.lines for point in line.get_xydata()}
        assert {(row['images_per_second'][size], row['top1']) for row in figures.values()} <= drawn
        labels = [text.get_text() for text in axes.texts]
        assert len(labels) == 2 * swept
        if swept:
            assert labels[0].startswith('0.5,')
            assert '2.00x' in labels[0] if size == '1' else '1.20x' in labels[0]
    assert 'original' in figure.legends[0].get_texts()[0].get_text()
