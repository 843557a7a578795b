#!/usr/bin/env python3
"""Searched scales: compare them, or copy them into the package.

``compare``: by branch and depth, as figures 6 and 7 of the RepOptimizers paper, over the layers that both searches have
and changed. All channels of a branch start with the same value; where they still have it, no gradient has reached the
branch. Start values agree between searches, so correlations are also given for them and for the changes from them.
``package``: check files of ``timm-rep hyper-search``, copy them, and update timm_rep/scales/packaged/README.md.
"""
import argparse
import sys
from itertools import combinations
from pathlib import Path
from typing import Dict, Optional, Tuple

import timm
import torch
from experiments.report import report
from timm.utils import ParseKwargs

import timm_rep.scales.packaged as packaged
from timm_rep.layers import csla_layers
from timm_rep.scales import Scales, packaged_scales
from timm_rep.utils.atomic import replacing_files

FOLDER = Path(packaged.__file__).parent
CARD = FOLDER / 'README.md'
NEEDED = ('model', 'dataset', 'epochs', 'batch_size', 'accuracy', 'date', 'timm_rep')


def read(argument: str) -> Tuple[str, Scales, Scales]:
    """Parse MODEL[=SOURCE[=NAME]]: the name, the scales, and the values their search started from."""
    model, _, source = argument.partition('=')
    source, _, name = source.partition('=')
    scales = Scales.load(source or model)
    start = Scales.from_model(timm.create_model(model, structure='search', scales='init'))
    if scales.keys() != start.keys():
        raise SystemExit(f'{source or model} does not hold the scales of {model}.')
    moved = {n: {b: s for b, s in branches.items() if s.std(correction=0) > 1e-3} for n, branches in scales.items()}
    return name or source or model, Scales(moved, scales.metadata), start


def changes(scales: Scales, start: Scales) -> Scales:
    return Scales({n: {b: s - start[n][b] for b, s in branches.items()} for n, branches in scales.items()})


def same_parts(scales: Scales, other: Scales) -> Scales:
    return Scales({n: {b: scales[n][b] for b in branches} for n, branches in other.items()})


def spread(scales: Scales, branch: str) -> float:
    """Standard deviation over the channels, mean over the layers."""
    found = [b[branch].std(correction=0) for b in scales.values() if branch in b]
    return torch.stack(found).mean().item() if found else float('nan')


def rounded(x: float) -> Optional[float]:
    return None if x != x else round(x, 3)


def compare(a: Tuple[str, Scales, Scales], b: Tuple[str, Scales, Scales]) -> list:
    rows, moved = [], [scales.compare(start) for _, scales, start in (a, b)]
    comparisons: Dict[str, dict] = {
        'correlation': a[1].compare(b[1]),
        'start_with_other': same_parts(a[2], a[1]).compare(b[1]),
        'changes': changes(a[1], a[2]).compare(changes(b[1], b[2])),
    }
    for branch, comparison in comparisons['correlation'].items():
        rows.append({
            'scales': a[0], 'other': b[0], 'branch': branch,
            'layers': sum(branch in a[1][n] and branch in b[1].get(n, {}) for n in a[1]),
            **{what: rounded(found[branch].correlation) for what, found in comparisons.items()},
            'spread': rounded(spread(a[1], branch)), 'other_spread': rounded(spread(b[1], branch)),
            'moved': rounded(moved[0][branch].relative_change),
            'other_moved': rounded(moved[1][branch].relative_change),
            'stage_means': {
                stage: [round(mean, 3) for mean in means] for stage, means in comparison.stage_means.items()},
        })
    return rows


def layers_searched(scales: Scales) -> str:
    """Number of layers whose channels no longer have the same value: those that a gradient has reached."""
    moved = sum(branches['conv3x3'].std() > 1e-3 for branches in scales.values())
    return f'{moved} of {len(scales)}'


def card() -> str:
    """Text of the card with an up-to-date table."""
    head, separator, _ = CARD.read_text().partition('|---|---|---|---|---|---|---|---|\n')
    rows = []
    for name in packaged_scales():
        scales = Scales.load(name)
        row = '| `{model}` | {dataset} | {epochs} | {batch_size} | {accuracy}% | {searched} | {date} | {timm_rep} |\n'
        rows.append(row.format(**scales.metadata, searched=layers_searched(scales)))
    return head + separator + ''.join(rows)


def checked(path: Path, metadata: Dict[str, str]) -> Scales:
    """Load scales and order their layers and branches as in the model.

    Args:
        path: File of scales.
        metadata: Entries to set or to add.

    Raises:
        ValueError: The layers differ from the model's, or metadata is missing.
    """
    scales = Scales.load(path)
    metadata = {**scales.metadata, **metadata}
    missing = [key for key in NEEDED if key not in metadata]
    if missing:
        raise ValueError(f'{path} has no metadata for {", ".join(missing)}: pass --metadata.')
    layers = csla_layers(timm.create_model(metadata['model'], structure='search', device='meta'))
    if scales.keys() != layers.keys():
        raise ValueError(f'Expected the layers of {metadata["model"]} in {path}, but they differ.')
    for name, layer in layers.items():
        layer.csla.check_scales(scales[name])
    ordered = {name: {b.name: scales[name][b.name] for b in layer.csla.branches} for name, layer in layers.items()}
    return Scales(ordered, metadata, scales.history)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    comparison = commands.add_parser('compare')
    comparison.add_argument(
        'scales', nargs='+', metavar='MODEL[=SOURCE[=NAME]]',
        help='a model with packaged scales, or a model and a file or Hub repository of its scales')
    packaging = commands.add_parser('package')
    packaging.add_argument('scales', nargs='*', type=Path, help='files written by timm-rep hyper-search')
    packaging.add_argument(
        '--metadata', nargs='*', default={}, action=ParseKwargs, metavar='K=V', help='entries to set or add')
    args = parser.parse_args()
    if args.command == 'package':
        metadata = {key: str(value) for key, value in args.metadata.items()}
        for scales in [checked(path, metadata) for path in args.scales]:
            scales.save(packaged.locate_packaged(scales.metadata['model']))
        with replacing_files(FOLDER) as temporary:
            (temporary / CARD.name).write_text(card())
        print(card())
        return 0
    found = [read(argument) for argument in args.scales]
    report(
        'scales',
        "Pearson's correlation of layer means over depth: searched values; start values of the first with searched "
        'values of the other; changes of both. spread: standard deviation over the channels; moved: relative change '
        'from the start values; both as means over the layers. stage_means: first and other.',
        [row for a, b in combinations(found, 2) if a[1].keys() & b[1].keys() for row in compare(a, b)],
        torch.device('cpu'), {'searches': {name: scales.metadata for name, scales, _ in found}})
    return 0


if __name__ == '__main__':
    sys.exit(main())
