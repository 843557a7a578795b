#!/usr/bin/env python3
"""The papers' claims at a size that anyone can repeat, on CIFAR-10 as folders of images.

    python scripts/experiments/run.py                                           # list the experiments
    python scripts/experiments/run.py repoptimizers --data-dir CIFAR10
    python scripts/tables.py                                                    # then: tables of the documents

An experiment is a data file, scripts/experiments/NAME.yaml. Run it again after a stop: a training continues after its
last epoch, finished rows are skipped, and several processes may run the same experiment. ``--scale cpu`` is for two
cores (two processes with OMP_NUM_THREADS=1), ``--scale gpu`` for one GPU. Settings with ``amp`` train in bfloat16, and
Muon orthogonalizes in it; on CPUs without AVX512-BF16 both use float32, which is faster there. Results are written row
by row to scripts/results/<machine>/NAME.json.
"""
import argparse
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

import timm
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments import report as results
from experiments.experiment import PROCEDURES, Experiment, Row, load, names
from experiments.workspace import OutOfTime, Workspace, digest, weight_files

from timm_rep.cli._arguments import ModelKwargs
from timm_rep.cli._arguments import device as usable_device
from timm_rep.deploy import check_quantization
from timm_rep.utils.atomic import check_writable
from timm_rep.utils.profiling import versions

UNFINISHED = 75  # exit status if rows are left (EX_TEMPFAIL)


def is_finished(experiment: Experiment, row: Row, device: torch.device) -> bool:
    """Whether the file of results has a row with its present settings."""
    content = results.read(experiment.name, device) or {'rows': []}
    wanted = {**row.identity, 'seed': row.seed, 'settings': digest(row.settings)}
    return any(all(found.get(k) == v for k, v in wanted.items()) for found in content['rows'])


def check_results(content: Dict[str, Any], experiment: Experiment, workspace: Workspace) -> None:
    """Refuse the content of a file of results with rows of other settings, versions, images, weights or processors."""
    known = {digest(row.settings) for row in experiment.rows}
    other = sum(row.get('settings') not in known for row in content['rows'])
    others = []
    if other:
        before, now = content.get('settings') or {}, experiment.document.get('settings') or {}
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        which = ', '.join(f'{key}={before.get(key)!r} instead of {now.get(key)!r}' for key in changed)
        others.append(f'{other} rows of other settings' + (f' ({which})' if which else ''))
    others += [f'rows of {k} {v}' for k, v in content['versions'].items() if v != versions().get(k)]
    before = content.get('images') or {}
    if not before.keys() <= workspace.images.keys() or any(workspace.images[k] != v for k, v in before.items()):
        others.append(f'rows of other images, {before}, than these, {workspace.images}')
    weights = {name: digest for row in content['rows'] for name, digest in row.get('weights', {}).items()}
    others += [
        f'rows of another {name}, {weights[name]}, than this, {now}' for name, now in workspace.weights.items()
        if weights.get(name, now) != now]
    before, now = content.get('processor'), results.processor(workspace.device)
    if before not in (None, now):
        others.append(f'rows of another processor, {before}, than this, {now}')
    if others:
        raise ValueError(
            f'{results.result_file(experiment.name, workspace.device)} has {others[0]}. Move it away, or set '
            'TIMM_REP_RESULTS to another folder.')


def finish(experiment: Experiment, row: Row, workspace: Workspace) -> None:
    """Compute a row and add it to the file of results."""
    found = PROCEDURES[row.procedure](row.settings, workspace)
    weights = workspace.hashes(row.settings)
    found = {
        **row.identity, 'seed': row.seed, **found, **({'weights': weights} if weights else {}),
        'settings': digest(row.settings)}
    results.save(
        experiment.name, experiment.document['what'], [found], workspace.device,
        {'settings': experiment.document.get('settings') or {}, 'images': workspace.images}, [*experiment.keys, 'seed'],
        check=partial(check_results, experiment=experiment, workspace=workspace))
    results.print_table([{k: v for k, v in found.items() if k not in ('settings', 'weights')}])
    sys.stdout.flush()


def run(experiment: Experiment, rows: List[Row], workspace: Workspace) -> Tuple[int, List[Row]]:
    """Finish rows; those that another process runs come last.

    Returns:
        Number of rows left after the deadline, and the rows that failed, whose errors are printed.
    """
    left, failed = list(rows), []
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
                except OutOfTime:
                    raise
                except Exception:  # go on with the other rows
                    traceback.print_exc()
                    failed.append(row)
                left.remove(row)
                workspace.wait = False
            workspace.wait = len(left) == before
    except OutOfTime:
        pass
    return sum(not is_finished(experiment, row, workspace.device) for row in left), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', nargs='?', metavar='NAME', help='an experiment (list all)')
    parser.add_argument('--scale', choices=('cpu', 'gpu'), default='cpu', help='(%(default)s)')
    parser.add_argument('--data-dir', default='data/cifar10', metavar='DIR', help='(%(default)s)')
    parser.add_argument('--val-split', default='val', help='(%(default)s)')
    parser.add_argument('--weights-dir', type=Path, default=Path('data/weights'), metavar='DIR',
                        help='folder of pretrained weights that rows name (%(default)s)')
    parser.add_argument('--output', type=Path, default=Path('output/experiments'), metavar='DIR',
                        help='folder of the trainings, shared by all experiments (%(default)s)')
    parser.add_argument('--rows', nargs='+', metavar='ROW', help='(all)')
    parser.add_argument('--seeds', nargs='+', type=int, metavar='N', help='(as in the data file)')
    parser.add_argument('--device', type=usable_device, help='(cuda at --scale gpu, otherwise cpu)')
    parser.add_argument('--minutes', type=float, default=float('inf'), help='time limit of this run (none)')
    parser.add_argument('--set', nargs='+', action=ModelKwargs, default={}, metavar='K=V',
                        help='settings of all rows and trainings, overriding the data file')
    args = parser.parse_args()
    try:
        if args.name is None:
            for name in names():
                experiment = load(name)
                print(f'{name} ({len(experiment.rows)} rows): {" ".join(experiment.document["what"].split())}')
            return 0
        experiment, rows, workspace = prepared(args)
    except (argparse.ArgumentTypeError, ImportError, OSError, ValueError) as e:
        parser.error(str(e))
    left, failed = run(experiment, rows, workspace)
    if left or not failed:
        print(f'{left} of {len(rows)} rows are left; run this again' if left else 'nothing is left')
    for row in failed:
        print(f'failed: {row.name}, seed {row.seed}', file=sys.stderr)
    return UNFINISHED if left else 1 if failed else 0


def prepared(args: argparse.Namespace) -> Tuple[Experiment, List[Row], Workspace]:
    """Experiment, rows and workspace of a run, checked before anything is written."""
    device = args.device or usable_device('cuda' if args.scale == 'gpu' else 'cpu')
    if device.type == 'cpu' and not torch.cpu._is_avx512_bf16_supported():
        args.set.setdefault('amp', False)
    experiment = load(args.name, args.scale, args.set)
    rows = chosen(experiment, args.rows, args.seeds)
    workspace = Workspace(
        args.output, args.data_dir, device, args.val_split, args.weights_dir, time.monotonic() + 60 * args.minutes,
        wait=False)
    trainings = [row.settings if 'model' in row.settings else _first_training(row.settings) for row in rows]
    unknown = [settings['model'] for settings in trainings if not timm.is_model(settings['model'])]
    if unknown:
        raise ValueError(f'model must be a model of timm, got {unknown[0]!r}.')
    for name in sorted({name for row in rows for name in weight_files(row.settings)}):
        if not (args.weights_dir / name).is_file():
            raise ValueError(
                f'--weights-dir must be a folder with {name}, got {str(args.weights_dir)!r}. scripts/results/README.md '
                'says where the weights are from.')
    for row in rows:
        workspace.hashes(row.settings)
    checked = []
    for settings in trainings:
        images = {key: settings[key] for key in ('data', 'img_size', 'num_classes')}
        if images not in checked:
            workspace.check_images(settings)
            checked.append(images)
    content = results.read(experiment.name, device)
    if content is not None:
        check_results(content, experiment, workspace)
    quantized = [row.settings for row in rows if row.procedure == 'quantize' and row.settings['backend'] is not None]
    for setting in {(settings['backend'], settings['calibrator']) for settings in quantized}:
        check_quantization(*setting)
    check_writable(args.output)
    check_writable(results.result_file(experiment.name, device).parent)
    return experiment, rows, workspace


def _first_training(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The training or search that a quantization or a comparison begins with."""
    return next(value for value in settings.values() if isinstance(value, Mapping) and 'model' in value)


def chosen(experiment: Experiment, rows, seeds) -> List[Row]:
    """Rows by name and seed."""
    known = list(dict.fromkeys(row.name for row in experiment.rows))
    unknown = [name for name in rows or () if name not in known]
    if unknown:
        raise ValueError(f'Rows of {experiment.name} must be among {", ".join(known)}, got {unknown[0]!r}.')
    found = [row for row in experiment.rows if row.name in (rows or known)]
    expected = list(dict.fromkeys(row.seed for row in found))
    unknown = [seed for seed in seeds or () if seed not in expected]
    if unknown:
        raise ValueError(f'Seeds of these rows must be among {", ".join(map(str, expected))}, got {unknown[0]}.')
    return [row for row in found if row.seed in (seeds or expected)]


if __name__ == '__main__':
    sys.exit(main())
