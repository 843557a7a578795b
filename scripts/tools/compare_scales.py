#!/usr/bin/env python3
"""Compare searched scales by branch and depth, as figures 6 and 7 of the RepOptimizers paper.

Pairs are compared over the layers that both searches have and changed. All channels of a branch start with the same
value; where they still have it, no gradient has reached the branch. The start values agree between searches, so
correlations are also given for them, and for the changes: layer means minus start values.
"""
import argparse
import sys
from itertools import combinations
from pathlib import Path
from typing import Dict, Optional, Tuple

import timm
import torch

from timm_rep.scales import Scales

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import report


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'scales', nargs='+', metavar='MODEL[=SOURCE[=NAME]]',
        help='a model whose scales are packaged, or a model and a file or Hub repository of its scales')
    args = parser.parse_args()
    found = [read(argument) for argument in args.scales]
    report(
        'scales',
        "Pearson's correlation of layer means over depth: searched values; start values of the first with searched "
        'values of the other; changes of both. spread: standard deviation over the channels, moved: distance from the '
        'start values as a part of them, both as means over the layers. stage_means: first and other.',
        [row for a, b in combinations(found, 2) if a[1].keys() & b[1].keys() for row in compare(a, b)],
        torch.device('cpu'),
        {'searches': {name: scales.metadata for name, scales, _ in found}},
    )


if __name__ == '__main__':
    main()
