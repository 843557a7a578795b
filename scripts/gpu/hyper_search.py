#!/usr/bin/env python3
"""Hyper-Search of the models whose scales this package ships, on one GPU, in runs of a few minutes.

Run it again until it reports that nothing is left: searches resume from their last epoch, finished ones are skipped.
Several run at the same time, since a network on 32 x 32 images does not fill a GPU. Images are kept on the device,
autocast is to bfloat16. OUTPUT/<model>.safetensors are packaged by scripts/tools/package_scales.py.
"""
import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from timm_rep.scales import Scales

# section 4.1 for RepOpt-VGG, the released code for RepOpt-GhostNet
SEARCHES = {
    'repopt_vgg_b1': [],
    'repopt_vgg_l1': [],
    'repopt_vgg_b2': [],
    'repopt_vgg_l2': [],
    'repopt_vgg_a0': [],
    'repopt_vgg_a1': [],
    'repopt_vgg_b0': [],
    'repopt_ghostnet_050': ['--weight-decay', '1e-5'],
}


def start(model: str, args) -> subprocess.Popen:
    command = [
        sys.executable, '-m', 'timm_rep.cli', 'hyper-search', model, *SEARCHES[model],
        '--dataset', args.dataset, '--data-dir', args.data_dir, '--val-split', args.val_split,
        '--epochs', str(args.epochs), '--warmup-epochs', str(args.warmup_epochs), '--batch-size', str(args.batch_size),
        '--device', args.device, '-j', str(args.workers), '--preload', '--amp', '--channels-last', '--resume',
        '--checkpoint-epochs', '10', '-o', str(output(model, args)),
    ]
    log = (args.output / f'{model}.log').open('a')
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def output(model: str, args) -> Path:
    return args.output / f'{model}.safetensors'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--output', type=Path, default=Path('output/search'), help='folder (%(default)s)')
    parser.add_argument('--models', nargs='+', default=list(SEARCHES), choices=list(SEARCHES), metavar='MODEL')
    parser.add_argument('--dataset', default='', help="as timm names them, '' for folders (the default)")
    parser.add_argument('--data-dir', default='data/cifar10', metavar='DIR', help='(%(default)s)')
    parser.add_argument('--val-split', default='val', help='(%(default)s)')
    parser.add_argument('--epochs', type=int, default=240, help='(%(default)s)')
    parser.add_argument('--warmup-epochs', type=int, default=5, help='(%(default)s)')
    parser.add_argument('--batch-size', type=int, default=256, help='(%(default)s)')
    parser.add_argument('--minutes', type=float, default=8, help='time limit of this run (%(default)s)')
    parser.add_argument('--jobs', type=int, default=4, help='searches at the same time (%(default)s)')
    parser.add_argument('--workers', type=int, default=4, help='data loading processes of each (%(default)s)')
    parser.add_argument('--device', default='cuda', help='(%(default)s)')
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    waiting = [model for model in args.models if not output(model, args).is_file()]
    running, failed = {}, []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < args.jobs:
                model = waiting.pop(0)
                running[model] = start(model, args)
            for model, process in list(running.items()):
                if process.poll() is not None:
                    del running[model]
                    if process.returncode:
                        failed.append(model)
            time.sleep(.2)
    finally:
        for process in running.values():  # safe at any time: checkpoints are written atomically
            process.kill()
            process.wait()
        for temporary in args.output.glob('.writing-*'):  # left by a process killed while writing
            shutil.rmtree(temporary, ignore_errors=True)
    for model in args.models:
        done = output(model, args).is_file()
        log = args.output / f'{model}.log'
        last = log.read_text().replace('\r', '\n').strip().splitlines()[-1:] if log.is_file() else []
        print(f'{model}: {Scales.load(output(model, args))!r}' if done else f'{model}: not finished; {" ".join(last)}')
    if failed:
        print(f'failed: {", ".join(failed)}; see their logs in {args.output}', file=sys.stderr)
        return 1
    left = [model for model in args.models if not output(model, args).is_file()]
    print(f'left: {", ".join(left)}; run this again' if left else 'nothing is left')
    return 75 if left else 0  # EX_TEMPFAIL


if __name__ == '__main__':
    sys.exit(main())
