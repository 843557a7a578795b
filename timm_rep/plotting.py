"""Figures of the papers: scales, kernels, latency by part, and products of attention weights."""
import itertools
import math
import re
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence

import torch
import torch.nn as nn

from timm_rep.init import attention_products, attentions
from timm_rep.scales import Scales, stage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    'diagonal_strength',
    'kernel_layer',
    'plot_accuracy',
    'plot_attention',
    'plot_kernels',
    'plot_latency',
    'plot_scales',
    'style_axes',
]

_COLORS = (
    '#2f6fde', '#e08a3c', '#4a9a5b', '#9d5bb5', '#c94f4f', '#7a5c3e', '#d77ab1', '#7f7f7f', '#a8a032', '#2aa5b5')

# stages of timm, of the authors' checkpoints and of ResNets, also behind a prefix
_STAGE = re.compile(r'(stages\.\d+|stage\d+|layer\d+)\.')
# names of the models of a sweep, before the idle ratio
_SWEPT = 'idle ratio '


def _figure(columns: int, rows: int) -> 'Figure':
    from matplotlib.figure import Figure

    return Figure(figsize=(1.5 + 5.5 * columns, 3.6 * rows), layout='constrained')


def style_axes(axes: 'Axes', title: str, x: str = '', y: str = '') -> None:
    """Set the title and labels of matplotlib axes and hide the upper and right spines."""
    axes.set_title(title.replace('$', r'\$'), fontsize=10)  # a file name, not a formula
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[['top', 'right']].set_visible(False)


def plot_scales(scales: Mapping[str, Scales]) -> 'Figure':
    """Draw the mean scales by block, and by epoch of the search if known (RepOptimizers, figures 7 and 6).

    One column per set of scales with shared axes, one line per branch, interrupted between stages.

    Args:
        scales: Scales by title.

    Returns:
        A matplotlib Figure.
    """
    from matplotlib.lines import Line2D

    branches = list(dict.fromkeys(
        branch for s in scales.values()
        for branch in (*s.branches(), *(b for means in s.history.values() for b in means))))
    colors = {branch: _COLORS[i % len(_COLORS)] for i, branch in enumerate(branches)}
    rows = 1 + any(s.history for s in scales.values())
    figure = _figure(len(scales), rows)
    grid = figure.subplots(rows, len(scales), squeeze=False, sharey='row')
    for column, (name, each) in zip(grid.T, scales.items()):
        _plot_by_depth(column[0], each, colors)
        style_axes(column[0], name, 'block', 'mean of the scales')
        if rows > 1:
            layer = _plot_history(column[1], each, colors)
            style_axes(column[1], layer or f'{name}: history not in the file', 'epoch', 'mean of the scales')
    handles = [Line2D([], [], color=color, marker='.', label=branch) for branch, color in colors.items()]
    grid[0, 0].legend(handles=handles, frameon=False, fontsize=8)
    return figure


def _plot_by_depth(axes: 'Axes', scales: Scales, colors: Mapping[str, str]) -> None:
    index = {layer: i + 1 for i, layer in enumerate(scales)}
    for branch, color in colors.items():
        for layers in scales.stages().values():
            layers = [layer for layer in layers if branch in scales[layer]]
            if layers:
                means = [scales[layer][branch].mean().item() for layer in layers]
                axes.plot([index[layer] for layer in layers], means, color=color, marker='.')


def _plot_history(axes: 'Axes', scales: Scales, colors: Mapping[str, str]) -> Optional[str]:
    """Draw the history of the last layer of the longest stage, and return its name; None without a history."""
    longest = max(scales.stages().values(), key=len)[-1]
    if longest not in scales.history:
        return None
    for branch, means in scales.history[longest].items():
        axes.plot(range(1, len(means) + 1), means, color=colors[branch])
    return longest


def kernel_layer(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Name of the kernel that the paper draws: the middle 3 x 3 one of the stage that has the most of them (8th of 16
    in B1).
    """
    stages: Dict[str, List[str]] = {}
    for name, value in state_dict.items():
        if _is_kernel(value):
            stage = _STAGE.search(name)
            stages.setdefault(stage.group() if stage else stage_of(name), []).append(name)
    if not stages:
        raise ValueError('The checkpoint must have a 3 x 3 kernel, got none.')
    layers = max(stages.values(), key=len)
    return layers[(len(layers) - 1) // 2]


def _is_kernel(value: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 4 and tuple(value.shape[2:]) == (3, 3)


def plot_kernels(
        state_dicts: Mapping[str, Mapping[str, torch.Tensor]],
        layers: Optional[Sequence[str]] = None,
) -> 'Figure':
    """Draw the distribution of the entries of a 3 x 3 kernel, centre and surroundings (RepOptimizers, figures 3, 5).

    One column per checkpoint, on one axis that spans 99.5% of the entries of the widest. The legends show the standard
    deviations of all entries (table 11), which a few outliers may dominate.

    Args:
        state_dicts: State dicts by title.
        layers: Names of the kernels, one for each state dict. Default: :func:`kernel_layer` of each.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: A state dict has no such kernel, or there are fewer or more layers than state dicts.
    """
    layers = layers or [kernel_layer(state_dict) for state_dict in state_dicts.values()]
    if len(layers) != len(state_dicts):
        raise ValueError(f'layers must name a kernel for each of the {len(state_dicts)} state dicts, got {layers!r}.')
    for (name, state_dict), layer in zip(state_dicts.items(), layers):
        if not _is_kernel(state_dict.get(layer)):
            raise ValueError(f'{layer!r} must be a 3 x 3 kernel of {name}.')
    figure = _figure(len(state_dicts), 1)
    columns = figure.subplots(1, len(state_dicts), squeeze=False, sharex=True)[0]
    centre = torch.zeros(9, dtype=torch.bool)
    centre[4] = True
    kernels = [state_dict[layer].detach().float().cpu() for state_dict, layer in zip(state_dicts.values(), layers)]
    limit = max(kernel.abs().flatten().kthvalue(math.ceil(.995 * kernel.numel()))[0].item() for kernel in kernels)
    for axes, name, layer, kernel in zip(columns, state_dicts, layers, kernels):
        entries = kernel.flatten(2).flatten(0, 1)
        parts = {'surroundings': entries[:, ~centre].flatten(), 'centre': entries[:, centre].flatten()}
        for (label, values), color in zip(parts.items(), _COLORS):
            axes.hist(
                values.numpy(), bins=100, range=(-limit, limit) if limit else None, density=True, alpha=.6, color=color,
                label=f'{label}, std {values.std():.4f}')
        axes.legend(frameon=False, fontsize=8, title=f'std {entries.std():.4f}', title_fontsize=8)
        style_axes(axes, f'{name}\n{layer}', 'value', 'density')
    return figure


def plot_latency(profiles: Mapping[str, Mapping[str, Mapping[str, float]]]) -> 'Figure':
    """Draw the latency of the parts of models as stacked bars (RePaFormer, figure 3).

    Args:
        profiles: By title of a group of bars and by label of a bar: milliseconds by part.

    Returns:
        A matplotlib Figure.
    """
    figure = _figure(len(profiles), 1)
    for axes, (title, bars) in zip(figure.subplots(1, len(profiles), squeeze=False)[0], profiles.items()):
        parts = dict.fromkeys(part for bar in bars.values() for part in bar)
        bottom = [0.] * len(bars)
        for part, color in zip(parts, itertools.cycle(_COLORS)):
            values = [bar.get(part, 0.) for bar in bars.values()]
            axes.bar(list(bars), values, bottom=bottom, label=part, color=color, width=.6)
            bottom = [b + v for b, v in zip(bottom, values)]
        for i, total in enumerate(bottom):
            axes.text(i, total, f'{total:.1f}', ha='center', va='bottom', fontsize=8)
        axes.margins(y=.12)
        style_axes(axes, title, y='milliseconds')
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc='outside right upper')
    return figure


def plot_accuracy(figures: Mapping[str, Mapping[str, Any]]) -> 'Figure':
    """Draw accuracy against measured throughput of an original model and of models converted from it.

    One plot for each batch size. Models of a sweep are a line, labelled by their idle ratio and their throughput
    relative to the original.

    Args:
        figures: By name of the model, the original first: 'top1' in percent, and 'images_per_second' by batch size.
            Models of a sweep are named 'idle ratio R'.

    Returns:
        A matplotlib Figure.
    """
    first, *names = figures
    swept = [name for name in names if name.startswith(_SWEPT)]
    sizes = list(figures[first]['images_per_second'])
    figure = _figure(len(sizes), 1)
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0], sizes):
        points = {name: (row['images_per_second'][size], row['top1']) for name, row in figures.items()}
        speed, top1 = points[first]
        axes.axhline(top1, color='#999999', linewidth=.8, linestyle=':')
        axes.plot(speed, top1, '*', color='black', markersize=12, linestyle='', label=f'{first} model')
        if swept:
            axes.plot(
                *zip(*(points[name] for name in swept)), '.-', color=_COLORS[0], linewidth=1,
                label='conversions at other idle ratios: ratio, speed-up')
        for name in swept:
            axes.annotate(
                f'{name.removeprefix(_SWEPT)}, {points[name][0] / speed:.2f}x', points[name], xytext=(-6, -13),
                ha='right', textcoords='offset points', fontsize=7)
        for name, marker in zip((name for name in names if name not in swept), itertools.cycle('osD')):
            axes.plot(
                *points[name], marker, color=_COLORS[1], fillstyle='none', markersize=9, linestyle='',
                label=f'{name} model')
        axes.margins(x=.2, y=.12)
        style_axes(axes, f'batch size {size}', 'throughput, images/s', 'top-1 accuracy, %')
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), frameon=False, fontsize=8)
    return figure


def diagonal_strength(product: torch.Tensor) -> float:
    """Strength of the diagonal of a square matrix: its mean, divided by the standard deviation of the other entries."""
    on = torch.eye(len(product), dtype=torch.bool)
    return (product[on].mean() / product[~on].std()).item()


def plot_attention(models: Mapping[str, nn.Module], block: int = 0, clip: int = 64) -> 'Figure':
    """Draw the products of attention weights of models (weight selection, figure 5).

    One column per model, ``W_q W_k^T`` (mean over heads) above ``W_v W_proj``. In pretrained models the first often has
    a positive diagonal and the second a negative one; the titles show their strength, see
    :func:`diagonal_strength`.

    Args:
        models: timm models with ``qkv`` attention, by title.
        block: Index of the attention in each model, from 0.
        clip: Largest number of channels to draw.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: A model has no such attention.
    """
    products = {}
    for name, model in models.items():
        found = [attention for _, attention in attentions(model)]
        if not -len(found) <= block < len(found):
            raise ValueError(
                f'block must be the index of an attention with a qkv, got {block}: {name} has {len(found)} of them.')
        qk, v_proj = attention_products(found[block])
        products[name] = {'W_q W_k^T': qk.mean(0).float().cpu(), 'W_v W_proj': v_proj.float().cpu()}
    figure = _figure(len(products), 2)
    for column, (name, matrices) in zip(figure.subplots(2, len(products), squeeze=False).T, products.items()):
        for axes, (product, matrix) in zip(column, matrices.items()):
            limit = 3 * matrix.std().item()
            axes.imshow(matrix[:clip, :clip], cmap='RdBu_r', vmin=-limit, vmax=limit)
            style_axes(axes, f'{name}\n{product}, diagonal {diagonal_strength(matrix):+.1f}')
            axes.set_axis_off()
    return figure
