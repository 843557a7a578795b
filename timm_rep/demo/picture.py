"""Picture of the demo's results."""
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List

from timm_rep.plotting import style_axes
from timm_rep.utils.atomic import replacing_files

from .repa import RePaResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from . import DemoResult

_COLORS = {'SGD': '#66717e', 'SGD, kernels of RepSGD': '#e08a3c', 'RepSGD': '#2f6fde'}


def draw(result: 'DemoResult', path: Path) -> None:
    """Draw the results into a PNG file, one message per panel, to be read at a width of 700 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.5), layout='constrained')
    axes = figure.subplot_mosaic([['rates', 'speed'], ['branches', 'branches']], height_ratios=(6, 5))
    _draw_rates(axes['rates'], result.repopt.accuracy)
    _draw_branches(axes['branches'], result.repopt.csla_difference)
    _draw_speed(axes['speed'], result.repa)
    with replacing_files(path.parent) as draft:
        figure.savefig(draft / path.name, dpi=200)


def _draw_rates(axes: 'Axes', accuracy: Dict[str, Dict[float, float]]) -> None:
    for label, found in accuracy.items():
        axes.semilogx(list(found), list(found.values()), marker='o', label=label, color=_COLORS[label])
    axes.set_xticks(list(found), [f'{lr:g}' for lr in found])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, loc='upper center', bbox_to_anchor=(.5, -.2))
    plain, kernels, rep = (max(found.values()) for found in accuracy.values())
    title = (f'Plain net of 28 convolutions, best rate:\nSGD {plain:.0f}%, from the kernels that RepSGD\n'
             f'starts from {kernels:.0f}%, RepSGD {rep:.0f}%')
    style_axes(axes, title, 'learning rate', 'validation accuracy (%)')


def _draw_branches(axes: 'Axes', difference: Dict[str, List[float]]) -> None:
    for label, values in difference.items():
        # a logarithmic axis cannot show 0
        axes.semilogy(range(1, len(values) + 1), [max(d, 1e-17) for d in values], label=label, color=_COLORS[label])
        axes.annotate(
            label, (len(values), max(values[-1], 1e-17)), xytext=(-4, 8), textcoords='offset points', ha='right',
            color=_COLORS[label])
    axes.set_ylim(1e-17, 10)
    largest = max(difference['RepSGD'])
    title = ('With RepSGD, one convolution a layer trains as three parallel branches do:\n'
             f'the outputs differ by {largest:.0e} at most, in float64')
    style_axes(axes, title, 'training step', 'relative difference\nfrom the multi-branch net')


def _draw_speed(axes: 'Axes', result: RePaResult) -> None:
    rows = result.rows
    for label, row in rows.items():
        before = label in ('plain ViT', 'RePa-DeiT')
        axes.plot(
            row['throughput'], row['accuracy'], marker='o', markersize=8, linestyle='none',
            color=_COLORS['SGD' if before else 'RepSGD'])
        axes.annotate(
            label.replace(', ', ',\n'), (row['throughput'], row['accuracy']), xytext=(0, 8), textcoords='offset points',
            ha='center', fontsize=9)
    for pair in (('plain ViT', 'plain ViT, converted'), ('RePa-DeiT', 'RePa-DeiT, folded')):
        start, end = ((rows[label]['throughput'], rows[label]['accuracy']) for label in pair)
        axes.annotate('', end, start, arrowprops=dict(arrowstyle='->', color='#9aa5b1', shrinkA=6, shrinkB=6))
    axes.margins(0.3, 0.35)
    folded, converted = (
        rows[after]['throughput'] / rows[before]['throughput']
        for before, after in (('RePa-DeiT', 'RePa-DeiT, folded'), ('plain ViT', 'plain ViT, converted')))
    title = (f'Folding: {folded:.1f} times as fast,\nequal outputs ({result.logits_difference:.0e});\n'
             f'converting: {converted:.1f} times, {result.agreement:.1f}% equal')
    style_axes(axes, title, 'images per second', 'validation accuracy (%)')
