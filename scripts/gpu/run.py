#!/usr/bin/env python3
"""The jobs that wait for a GPU, one after the other, within a time limit.

Run it again until it says that nothing is left: a job that is finished is not repeated, one that was stopped goes on,
or starts anew where it has nothing to go on from. It needs this checkout, torch, timm and, to search and to train,
CIFAR-10 as folders of images or the archive of them. Everything is written under --output: results/ is to be copied to
scripts/results, search/ is for scripts/package_scales.py, train/ for timm-rep card.
"""
import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Callable, Dict, List, Sequence

from timm_rep.paper import SPEEDUPS

GPU = Path(__file__).parent
UNFINISHED = 75  # a job's exit status that says so (EX_TEMPFAIL)


def bench(*args: str) -> Callable[[argparse.Namespace, float], List[str]]:
    def command(options: argparse.Namespace, seconds: float) -> List[str]:
        toy = [
            '--rounds', '1', '--batch-size', '2', '--dtype', 'float32', '--no-amp', '--models', options.toy,
        ] if options.toy else []
        return [str(GPU.parent / 'bench.py'), *args, '--device', options.device, *toy]

    return command


def on_images(
        script: str, folder: str, toy: List[str], full: Sequence[str] = (),
) -> Callable[[argparse.Namespace, float], List[str]]:
    def command(options: argparse.Namespace, seconds: float) -> List[str]:
        return [
            str(GPU / f'{script}.py'), '--output', str(options.output / folder), '--device', options.device,
            '--data-dir', str(data_folder(options)), '--val-split', options.val_split,
            '--minutes', str(max(0., seconds - 20) / 60),
            *(toy if options.toy else full),
        ]

    return command


_BF16 = ('--batch-size', '128', '--dtype', 'bfloat16')

# short ones, so that one run finishes some of them: what a stopped benchmark has measured is lost
JOBS: Dict[str, Callable[[argparse.Namespace, float], List[str]]] = {
    'optim': bench('optim'),
    **{f'repa-infer-{model}': bench('repa-infer', *_BF16, '--modes', 'eager', 'compile', '--models', model)
       for model in SPEEDUPS},
    **{f'repopt-train-{model}': bench('repopt-train', '--batch-size', '32', '--models', model)
       for model in ('repopt_vgg_b1', 'repopt_vgg_a0')},
    **{f'repa-train-{model}': bench('repa-train', '--batch-size', '128', '--amp', '--models', model)
       for model in ('repa_deit_base', 'repa_swin_base', 'repa_poolformer_s36', 'repa_mixer_b16')},
    'ffn-train': bench('ffn-train', '--amp'),
    'scaling': bench('scaling', '--batch-size', '128'),
    'search': on_images('hyper_search', 'search', toy=[
        '--models', 'repopt_ghostnet_050', '--epochs', '1', '--warmup-epochs', '0', '--batch-size', '10',
        '--workers', '0']),
    'train': on_images(
        'train', 'train', toy=['repopt_vgg_a0.cifar10', '--epochs', '1', '--batch-size', '10', '--workers', '1'],
        full=['--epochs', '100', '--amp']),
}


def data_folder(options: argparse.Namespace) -> Path:
    """The folders of images; unpacked from the archive if they are not there.

    Raises:
        FileNotFoundError: There is no archive either.
    """
    if options.data_dir.is_dir():
        return options.data_dir
    folder = options.output / 'data'
    if not (folder / 'train').is_dir():
        if not options.archive.is_file():
            raise FileNotFoundError(f'there are no images in {options.data_dir}, and no archive {options.archive}')
        with tarfile.open(options.archive) as archive:
            archive.extractall(folder, filter='data')
    return folder


def run(name: str, options: argparse.Namespace, seconds: float) -> int:
    """Run a job for so long at most, and return its exit status, UNFINISHED if it was stopped."""
    environment = {**os.environ, 'TIMM_REP_RESULTS': str(options.output / 'results')}
    with (options.output / f'{name}.log').open('a') as log:
        process = subprocess.Popen(
            [sys.executable, *JOBS[name](options, seconds)], stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return UNFINISHED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, required=True, help='of this run')
    parser.add_argument('--output', type=Path, default=Path('output/gpu'), help='folder (%(default)s)')
    parser.add_argument('--jobs', nargs='+', default=list(JOBS), choices=list(JOBS), metavar='JOB', help='(all)')
    parser.add_argument('--device', default='cuda', help='(%(default)s)')
    parser.add_argument('--data-dir', type=Path, default=Path('data/cifar10'), help='(%(default)s)')
    parser.add_argument('--archive', type=Path, default=Path('cifar10.tar.gz'), help='of the same (%(default)s)')
    parser.add_argument('--val-split', default='val', help='(%(default)s)')
    parser.add_argument('--toy', metavar='MODEL', help='benchmarks of this model only, next to nothing of each job')
    options = parser.parse_args()
    options.output = options.output.resolve()
    (options.output / 'done').mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    left, failed = [], []
    for name in options.jobs:
        done = options.output / 'done' / name
        seconds = deadline - time.monotonic()
        if done.exists():
            state = 'finished before'
        elif seconds <= 0:
            state = 'not begun'
        else:
            try:
                status = run(name, options, seconds)
            except OSError as e:
                print(f'{name}: {e}', file=sys.stderr)
                status = 1
            state = {0: 'finished', UNFINISHED: 'stopped'}.get(status, f'failed, see {options.output / name}.log')
            if status == 0:
                done.touch()
            elif status != UNFINISHED:
                failed.append(name)
        if not done.exists() and name not in failed:
            left.append(name)
        print(f'{name}: {state}', flush=True)
    print(f'left: {", ".join(left)}; run this again' if left else 'nothing is left')
    return 1 if failed else UNFINISHED if left else 0


if __name__ == '__main__':
    sys.exit(main())
