"""Picture of the demo's results."""
from pathlib import Path
from typing import List

from timm_rep.plotting import tidy
from timm_rep.utils.atomic import replacing_files

from .training import Images

_COLORS = ('#9aa5b1', '#66717e', '#7c9ed9', '#2f6fde')
_PANELS = (
    ('accuracy', 'validation accuracy (%)', 1., '{:.1f}'),
    ('params', 'parameters (thousands)', 1e-3, '{:.0f}'),
    ('macs', 'MACs per image (millions)', 1e-6, '{:.2f}'),
    ('throughput', 'images per second', 1., '{:,.0f}'),
)


def draw(result, samples: Images, predictions: List[int], path: Path) -> None:
    """Draw a DemoResult, and the first validation images with predicted classes, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout='constrained')
    top, middle, bottom = figure.subfigures(3, height_ratios=(5, 5, 3))
    _draw_repa(top, result.repa)
    _draw_repopt(middle, result.repopt)
    _draw_samples(bottom, samples, predictions)
    with replacing_files(path.parent) as draft:
        figure.savefig(draft / path.name, dpi=120)


def _bars(axes, values, form: str, title: str) -> None:
    labels = [label.replace(', ', ',\n') for label in values]
    bars = axes.bar(labels, list(values.values()), color=_COLORS[-len(values):])
    axes.bar_label(bars, fmt=form.format)
    axes.margins(y=0.12)
    tidy(axes, title)


def _draw_repa(figure, result) -> None:
    figure.suptitle(
        'RePaFormer: train, then fold '
        f'(largest relative difference of the logits: {result.logits_difference:.1e}); or convert a trained ViT '
        f'({result.agreement:.1f}% equal predictions)', fontsize=11)
    for axes, (key, title, unit, form) in zip(figure.subplots(1, len(_PANELS)), _PANELS):
        _bars(axes, {label: row[key] * unit for label, row in result.rows.items()}, form, title)


def _draw_repopt(figure, repopt) -> None:
    figure.suptitle('RepOptimizer: one plain stack of 28 convolutions, trained with SGD and with RepSGD', fontsize=11)
    accuracy, losses, difference = figure.subplots(1, 3)
    _bars(accuracy, repopt.accuracy, '{:.1f}', 'validation accuracy (%)')
    for (label, values), color in zip(repopt.losses.items(), _COLORS[-2:]):
        losses.plot(values, label=label, color=color)
    losses.legend(frameon=False, fontsize=8)
    tidy(losses, 'training loss', x='step')
    for label, color in zip(repopt.accuracy, _COLORS[-2:]):
        # a logarithmic axis cannot show 0
        difference.semilogy([max(d, 1e-17) for d in repopt.csla_difference[label]], label=label, color=color)
    difference.legend(frameon=False, fontsize=8)
    tidy(
        difference, 'CSLA = GR: logits against the multi-branch net\n(relative difference, float64)', x='step')


def _draw_samples(figure, samples: Images, predictions: List[int]) -> None:
    figure.suptitle('Validation images and predictions of the folded model', fontsize=11)
    for axes, image, target, prediction in zip(
            figure.subplots(1, len(predictions)), samples.images, samples.targets, predictions):
        axes.imshow(image, cmap='gray_r')
        axes.set_title(str(prediction), fontsize=10, color='black' if prediction == target else 'red')
        axes.axis('off')
