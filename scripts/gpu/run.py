#!/usr/bin/env python3
"""Run the jobs that need a GPU one after the other within a time limit.

Run it again until nothing is left: finished jobs are skipped, stopped ones are resumed. Jobs that failed, or were
stopped after most of the time of a run, come last. Requires this checkout (installed or not), torch, timm, and for
searches and experiments CIFAR-10 as folders of images or as an archive of them. Everything is written to --output: copy
the folder of the machine in results/ to scripts/results, and pass search/*.safetensors to scripts/scales.py package.
"""
import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from pathlib import Path
from typing import Callable, Dict, List, Optional

GPU = Path(__file__).resolve().parent
CHECKOUT = GPU.parents[1]
sys.path.insert(0, str(CHECKOUT))

_START = time.monotonic()  # the imports below take seconds

import torch  # noqa: E402

from timm_rep.paper import SPEEDUPS  # noqa: E402
from timm_rep.utils.atomic import locking_folder  # noqa: E402

UNFINISHED = 75  # exit status of a job to resume (EX_TEMPFAIL)

# function of the options and the deadline that returns arguments of Python
Job = Callable[[argparse.Namespace, float], List[str]]


def bench(*args: str) -> Job:
    def command(options: argparse.Namespace, deadline: float) -> List[str]:
        toy = [
            '--rounds', '1', '--batch-size', '2', '--dtype', 'float32', '--no-amp', '--models', options.toy,
        ] if options.toy else []
        return [str(GPU.parent / 'bench.py'), *args, '--resume', '--device', options.device, *toy]

    return command


def experiment(name: str) -> Job:
    def command(options: argparse.Namespace, deadline: float) -> List[str]:
        data = data_folder(options)  # before the remaining time is computed: unpacking takes some
        # torch 2.15 on a CPU crashes in the channels-last backward pass of a 1x1 convolution with stride 2, as in stems
        toy = [
            '--seeds', '0', '--set', 'epochs=1', 'warmup_epochs=0', 'batch_size=10', 'train_images=20', 'amp=False',
            'channels_last=False'] if options.toy else []
        return [
            str(GPU.parent / 'experiments' / 'run.py'), name, '--scale', 'gpu',
            '--output', str(options.output / 'experiments'), '--device', options.device, '--data-dir', str(data),
            '--val-split', options.val_split,
            '--minutes', str(max(0., deadline - time.monotonic() - 20) / 60), *toy]

    return command


def search(model: str, *args: str) -> Job:
    """Hyper-Search as in section 4.1 of the RepOptimizers paper, for RepOpt-GhostNet as in the released code."""

    def command(options: argparse.Namespace, deadline: float) -> List[str]:
        sizes = ['--epochs', '1', '--warmup-epochs', '0', '--batch-size', '10', '-j', '0'] if options.toy else [
            '--epochs', '240', '--amp', '--channels-last', '-j', '4']
        path = options.output / 'search' / f'{model}.safetensors'
        path.parent.mkdir(parents=True, exist_ok=True)
        return [
            '-m', 'timm_rep.cli', 'hyper-search', model, *args, *sizes, '--dataset', '', '--data-dir',
            str(data_folder(options)), '--val-split', options.val_split, '--device', options.device, '--preload',
            '--resume', '--checkpoint-epochs', '10', '-o', str(path)]

    return command


_BF16 = ('--batch-size', '128', '--dtype', 'bfloat16')


def infer(mode: str, *models: str) -> Job:
    return bench('repa-infer', *_BF16, '--modes', mode, '--models', *models)


_LARGE = 'repa_deit_base', 'repa_swin_base', 'repa_poolformer_s36', 'repa_mixer_l16', 'repa_vit_large'

# by importance; the jobs that begin with minutes of compilation are not among the first five
JOBS: Dict[str, Job] = {
    'repa-infer': infer('eager', *_LARGE),
    'repopt-train': bench('repopt-train', '--batch-size', '128', '--models', 'repopt_vgg_b1', 'repopt_vgg_a0'),
    'repa-train': bench('repa-train', '--batch-size', '128', '--amp', '--models', 'repa_deit_base', 'repa_swin_base',
                        'repa_poolformer_s36', 'repa_mixer_b16'),
    'ffn-train': bench('ffn-train', '--amp'),
    'deploy-ffn': bench('deploy-ffn', *_BF16),
    'optim': bench('optim', '--rounds', '51'),
    'repa-infer-compiled': infer('compile', *_LARGE),
    'scaling': bench('scaling', '--batch-size', '128'),
    'repopt-any': bench('repopt-any', '--batch-size', '128'),
    'converted-infer': bench('converted-infer', *_BF16),
    'repopt-parts': bench('repopt-parts', '--batch-size', '128'),
    'repa-infer-all': infer('eager', *SPEEDUPS),
    'repa-infer-all-compiled': infer('compile', *SPEEDUPS),
    'parts': bench('parts', *_BF16),
    **{f'search-{model}': search(model, *options) for model, options in {
        'repopt_vgg_b1': (), 'repopt_vgg_l1': (), 'repopt_vgg_b2': (), 'repopt_vgg_l2': (), 'repopt_vgg_a0': (),
        'repopt_vgg_a1': (), 'repopt_vgg_b0': (), 'repopt_ghostnet_050': ('--weight-decay', '1e-5')}.items()},
    **{name: experiment(name) for name in (
        'repoptimizers', 'depth', 'repa', 'hybrid', 'weight-selection', 'accelerate', 'linear-path', 'multi-branch',
        'quantization', 'packaged-scales', 'searches')},
}


def data_folder(options: argparse.Namespace) -> Path:
    """Path of the folders of images, unpacked from the archive if --data-dir does not exist."""
    if options.data_dir.is_dir():
        return options.data_dir
    folder = options.output / 'cifar10'  # searches record its name as the dataset
    if not folder.is_dir():
        if not options.archive.is_file():
            raise FileNotFoundError(
                f'Expected images in {options.data_dir} or the archive {options.archive}, but neither exists.')
        with tempfile.TemporaryDirectory(dir=options.output) as temporary:
            try:
                with tarfile.open(options.archive) as archive:
                    # missing in early releases of Python 3.10 and 3.11
                    archive.extraction_filter = getattr(tarfile, 'data_filter', lambda member, path: member)
                    archive.extractall(f'{temporary}/images')
            except (EOFError, zlib.error) as e:
                raise tarfile.ReadError(f'{options.archive}: {e}') from e
            Path(temporary, 'images').rename(folder)  # atomic: a stopped run leaves no partial folder
    return folder


def run(name: str, options: argparse.Namespace, deadline: float) -> int:
    """Run a job until the deadline at most. Returns the exit status, UNFINISHED if the job was stopped."""
    path = [str(CHECKOUT), *filter(None, [os.environ.get('PYTHONPATH')])]
    environment = {
        **os.environ, 'TIMM_REP_RESULTS': str(options.output / 'results'), 'PYTHONPATH': os.pathsep.join(path)}
    with (options.output / f'{name}.log').open('a') as log:
        process = subprocess.Popen(
            [sys.executable, *JOBS[name](options, deadline)], stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True)
        try:
            return process.wait(max(0., deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return UNFINISHED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main(start: Optional[float] = None) -> int:
    start = time.monotonic() if start is None else start
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seconds', type=float, required=True, help='time limit of this run')
    parser.add_argument('--output', type=Path, default=Path('output/gpu'), help='folder (%(default)s)')
    parser.add_argument('--jobs', nargs='+', default=list(JOBS), choices=list(JOBS), metavar='JOB', help='(all)')
    parser.add_argument('--device', default='cuda', help='(%(default)s)')
    parser.add_argument('--data-dir', type=Path, default=Path('data/cifar10'), help='(%(default)s)')
    parser.add_argument('--archive', type=Path, default=Path('cifar10.tar.gz'), help='archive of them (%(default)s)')
    parser.add_argument('--val-split', default='val', help='(%(default)s)')
    parser.add_argument('--toy', metavar='MODEL', help='benchmarks of this model only, every job at minimal size')
    options = parser.parse_args()
    if options.device.startswith('cuda') and not torch.cuda.is_available():
        parser.error('torch finds no GPU; --device cpu --toy MODEL tries the jobs without one')
    deadline = start + options.seconds
    options.output = (options.output / 'toy' if options.toy else options.output).resolve()
    finished, tried = options.output / 'done', options.output / 'tried'  # one file for each job
    for folder in (finished, tried):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with locking_folder(options.output, wait=False):
            return run_all(options, deadline, finished, tried)
    except BlockingIOError as e:
        parser.error(str(e))


def run_all(options: argparse.Namespace, deadline: float, finished: Path, tried: Path) -> int:
    """Run the jobs of the options until the deadline; those that failed or took longest come last.

    Args:
        options: Command-line arguments.
        deadline: Time, as of ``time.monotonic()``.
        finished: Folder with a file for each finished job.
        tried: Folder with a file for each job that failed or was stopped, one byte for each time.

    Returns:
        Exit status.
    """

    def times_tried(name: str) -> int:
        return (tried / name).stat().st_size if (tried / name).exists() else 0

    left, failed = [], []
    for name in sorted(options.jobs, key=times_tried):
        if (finished / name).exists():
            state = 'finished before'
        elif time.monotonic() >= deadline:
            state = 'not begun'
            left.append(name)
        else:
            begun = time.monotonic()
            try:
                status = run(name, options, deadline)
            except (OSError, tarfile.TarError) as e:
                print(f'{name}: {e}', file=sys.stderr)
                status = 1
            if status == 0:
                state = 'finished'
                (finished / name).touch()
            elif status == UNFINISHED:
                state = 'stopped'
                left.append(name)
            else:
                state = f'failed, see {options.output / name}.log'
                failed.append(name)
            if name in failed or (name in left and time.monotonic() - begun > options.seconds / 2):
                with (tried / name).open('a') as file:
                    file.write('.')
        print(f'{name}: {state}', flush=True)
    print(f'left: {", ".join(left)}; run this again' if left else 'nothing is left' if not failed else
          f'nothing is left but what failed: {", ".join(failed)}')
    return 1 if failed else UNFINISHED if left else 0


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # run() kills the job
    sys.exit(main(_START))
