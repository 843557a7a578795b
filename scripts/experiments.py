#!/usr/bin/env python3
"""The papers' claims, tested at a size that anyone can repeat, on CIFAR-10 as folders of images.

    python scripts/experiments.py list
    python scripts/experiments.py run repoptimizers --data-dir CIFAR10
    python scripts/experiments.py report

``list``: the experiments, which are the data files scripts/experiments/NAME.yaml. ``run``: go on with an experiment; a
training that was stopped continues after its last epoch, finished rows are skipped, and several processes may run the
same experiment. ``--scale cpu`` is for two cores (two processes with OMP_NUM_THREADS=1), ``--scale gpu`` for one GPU.
Settings with ``amp`` train in bfloat16, on CPUs without AVX512-BF16 in float32, which is faster there.
Results are written to scripts/results/<machine>/NAME.json, row by row. ``report``: write scripts/results/experiments.md
and pictures from the results.
"""
import argparse
import sys
import time
from pathlib import Path
from typing import List

import report as results
import torch
from procedures.experiment import PROCEDURES, Experiment, Row, load, names
from procedures.page import picture_name, summarize, write_page
from procedures.workspace import OutOfTime, Workspace, digest
from timm.utils import ParseKwargs

from timm_rep.utils.atomic import replacing_files

UNFINISHED = 75  # exit status if rows are left (EX_TEMPFAIL)


def is_finished(experiment: Experiment, row: Row, device: torch.device) -> bool:
    """Whether the file of results has a row, of these settings if it says of which it is."""
    content = results.read(experiment.name, device) or {'rows': []}
    wanted, settings = {**row.identity, 'seed': row.seed}, digest(row.settings)
    return any(
        all(found.get(k) == v for k, v in wanted.items()) and found.get('settings', settings) == settings
        for found in content['rows'])


def finish(experiment: Experiment, row: Row, workspace: Workspace) -> None:
    """Compute a row and add it to the file of results."""
    found = PROCEDURES[row.procedure][0](row.settings, workspace)
    figure = found.pop('picture', None)
    found = {**row.identity, 'seed': row.seed, **row.columns, **found, 'settings': digest(row.settings)}
    path = results.add_row(
        experiment.name, experiment.document['what'], found, workspace.device,
        {'settings': experiment.document.get('settings') or {}}, [*experiment.keys, 'seed'],
        lambda rows: summarize(rows, experiment.keys))
    if figure is not None:
        with replacing_files(path.parent) as temporary:
            figure.savefig(temporary / picture_name(experiment.name, row.name), dpi=110)
    results.print_table([{k: v for k, v in found.items() if k != 'settings'}])
    sys.stdout.flush()


def run(experiment: Experiment, rows: List[Row], workspace: Workspace) -> int:
    """Finish rows; those that another process is busy with come last. Returns how many are left after the deadline."""
    left = list(rows)
    try:
        while left:
            before = len(left)
            for row in list(left):
                try:
                    with workspace.training_folder({'model': experiment.name, 'row': row.name, 'seed': row.seed}):
                        if not is_finished(experiment, row, workspace.device):
                            workspace.check_time()
                            finish(experiment, row, workspace)
                except BlockingIOError:
                    continue
                left.remove(row)
                workspace.wait = False
            workspace.wait = len(left) == before
    except OutOfTime:
        pass
    return len(left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True, metavar='list | run | report')
    commands.add_parser('list', help='names of the experiments and what they show')
    commands.add_parser('report', help='write the page of all results')
    runner = commands.add_parser('run', help='go on with an experiment')
    runner.add_argument('name', metavar='NAME')
    runner.add_argument('--scale', choices=('cpu', 'gpu'), default='cpu', help='(%(default)s)')
    runner.add_argument('--data-dir', default='data/cifar10', metavar='DIR', help='(%(default)s)')
    runner.add_argument('--val-split', default='val', help='(%(default)s)')
    runner.add_argument('--output', type=Path, default=Path('output/experiments'), metavar='DIR',
                        help='folder of the trainings, shared by all experiments (%(default)s)')
    runner.add_argument('--rows', nargs='+', metavar='ROW', help='(all)')
    runner.add_argument('--seeds', nargs='+', type=int, metavar='N', help='(those of the data file)')
    runner.add_argument('--device', type=torch.device, help='(cuda at --scale gpu, otherwise cpu)')
    runner.add_argument('--minutes', type=float, default=float('inf'), help='time limit of this run (none)')
    runner.add_argument('--set', nargs='+', action=ParseKwargs, default={}, metavar='K=V',
                        help='settings of all rows and trainings, instead of those of the data file')
    args = parser.parse_args()
    if args.command == 'list':
        for name in names():
            experiment = load(name)
            print(f'{name}: {" ".join(experiment.document["what"].split())} ({len(experiment.rows)} rows with seeds)')
        return 0
    if args.command == 'report':
        print(write_page(results.RESULTS))
        return 0
    device = args.device or torch.device('cuda' if args.scale == 'gpu' else 'cpu')
    if device.type == 'cpu' and not torch.cpu._is_avx512_bf16_supported():
        args.set.setdefault('amp', False)
    try:
        experiment = load(args.name, args.scale, args.set)
        rows = chosen(experiment, args.rows, args.seeds)
        workspace = Workspace(
            args.output, args.data_dir, device, args.val_split, time.monotonic() + 60 * args.minutes, wait=False)
        left = run(experiment, rows, workspace)
    except (FileNotFoundError, ValueError) as e:
        parser.error(str(e))
    print(f'{left} of {len(rows)} rows are left; run this again' if left else 'nothing is left')
    return UNFINISHED if left else 0


def chosen(experiment: Experiment, rows, seeds) -> List[Row]:
    """The rows of these names and seeds.

    Raises:
        ValueError: There is no such row, or none with such a seed.
    """
    known = list(dict.fromkeys(row.name for row in experiment.rows))
    unknown = [name for name in rows or () if name not in known]
    if unknown:
        raise ValueError(f'{experiment.name} has no row {unknown[0]!r}, expected some of {", ".join(known)}.')
    found = [row for row in experiment.rows if row.name in (rows or known) and row.seed in (seeds or [row.seed])]
    if not found:
        raise ValueError(f'{experiment.name} has no row with a seed of {seeds}.')
    return found


if __name__ == '__main__':
    sys.exit(main())
