#!/usr/bin/env python3
"""Compare searched scales with others, by branch and depth, as figures 6 and 7 of the RepOptimizers paper do.

Every pair is compared over the layers that both have (of RepOpt-VGG: by stage and place in it) and both searched: where
the channels, which start alike, are still alike, no gradient has reached a branch. Much of any agreement is that of the
values both searches started from, so the correlations are there for those too, and for what the searches changed: the
mean of each layer minus where it started.
"""
import argparse
from itertools import combinations
from typing import Dict, Optional, Tuple

import timm
import torch
from _report import report

from timm_rep.scales import Scales


def read(argument: str) -> Tuple[str, Scales, Scales]:
    """A name, the scales and what their search started from, of MODEL or MODEL=SOURCE[=NAME]."""
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


def same_parts(scales: Scales, of: Scales) -> Scales:
    return Scales({n: {b: scales[n][b] for b in branches} for n, branches in of.items()})


def spread(scales: Scales, branch: str) -> float:
    """Mean over the layers of the standard deviation over the channels."""
    found = [b[branch].std(correction=0) for b in scales.values() if branch in b]
    return torch.stack(found).mean().item() if found else float('nan')


def rounded(x: float) -> Optional[float]:
    return None if x != x else round(x, 3)


def compare(a: Tuple[str, Scales, Scales], b: Tuple[str, Scales, Scales]) -> list:
    rows = []
    comparisons: Dict[str, dict] = {
        'correlation': a[1].compare(b[1]),
        'start_with_other': same_parts(a[2], a[1]).compare(b[1]),
        'changes': changes(a[1], a[2]).compare(changes(b[1], b[2])),
    }
    for branch, comparison in comparisons['correlation'].items():
        rows.append({
            'scales': a[0], 'other': b[0], 'branch': branch,
            'layers': sum(branch in a[1][n] and branch in b[1].get(n, {}) for n in a[1]),
            **{what: rounded(of[branch].correlation) for what, of in comparisons.items()},
            'spread': rounded(spread(a[1], branch)), 'other_spread': rounded(spread(b[1], branch)),
            'stage_means': {
                stage: [round(mean, 3) for mean in means] for stage, means in comparison.stage_means.items()},
        })
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'scales', nargs='+', metavar='MODEL[=SOURCE[=NAME]]',
        help='a model whose scales are packaged, or a model and a file or Hub repository of its scales')
    args = parser.parse_args()
    found = [read(argument) for argument in args.scales]
    report(
        'scales',
        "Pearson's correlation of the layers' mean scales over depth: of the searched values, of the values the first "
        "search started from with the other's searched ones, and of what the two searches changed. spread: standard "
        'deviation over the channels, mean over the layers. stage_means: of the one and of the other.',
        [row for a, b in combinations(found, 2) if a[1].keys() & b[1].keys() for row in compare(a, b)],
        torch.device('cpu'),
        {'searches': {name: scales.metadata for name, scales, _ in found}},
    )


if __name__ == '__main__':
    main()
