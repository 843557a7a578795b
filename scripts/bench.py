#!/usr/bin/env python3
"""Measure this package, section by section.

Each section prints a table and writes scripts/results/<machine>/<section>.json with the machine, the versions and the
command, row by row. The sides of a comparison alternate in one process; numbers are medians over the rounds. Spread:
half of the interquartile range, in percent of the median.
"""
import argparse
import itertools

import torch
from benchmarks.conversion import conversion
from benchmarks.dense import NETWORKS, dense
from benchmarks.deploy import int8, onnx
from benchmarks.inference import (
    converted_infer,
    deploy_ffn,
    fold_precision,
    import_time,
    parts,
    poolformer,
    prepbn,
    repa_infer,
)
from benchmarks.optim import optim
from benchmarks.repa_train import ffn_train, repa_train
from benchmarks.repopt_train import repopt_any, repopt_depth, repopt_parts, repopt_train
from benchmarks.scaling import scaling
from benchmarks.search_step import search_step
from experiments.report import print_table, rows_measured, save

# each yields the rows of its table; args.pending() are the cases without one
SECTIONS = {
    'import': import_time,
    'fold-precision': fold_precision,
    'deploy-ffn': deploy_ffn,
    'repa-infer': repa_infer,
    'conversion': conversion,
    'converted-infer': converted_infer,
    'prepbn': prepbn,
    'parts': parts,
    'poolformer': poolformer,
    'onnx': onnx,
    'int8': int8,
    'dense': dense,
    'repa-train': repa_train,
    'ffn-train': ffn_train,
    'repopt-train': repopt_train,
    'repopt-depth': repopt_depth,
    'repopt-any': repopt_any,
    'repopt-parts': repopt_parts,
    'search-step': search_step,
    'optim': optim,
    'scaling': scaling,
}
# columns that identify a row
KEYS = (
    'model', 'mode', 'images', 'img_size', 'pool_size', 'memory', 'optimizer', 'form', 'C', 'tokens', 'cost', 'along',
    'backbone', 'network', 'convolutions')


def pending(rows, **columns):
    """Combinations of the values of these columns, as dicts, that none of the rows has."""
    for values in itertools.product(*columns.values()):
        case = dict(zip(columns, values))
        if not any(case.items() <= row.items() for row in rows):
            yield case


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog='\n'.join(f'{k}: {v.__doc__.splitlines()[0]}' for k, v in SECTIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sections', nargs='+', choices=SECTIONS, metavar='SECTION', help='one or more of those below')
    parser.add_argument('--models', nargs='*', help='only these models; dense: backbones such as swin_small')
    parser.add_argument('--device', default='cpu', type=torch.device, help='(%(default)s)')
    parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16', 'float16'], help='(%(default)s)')
    parser.add_argument(
        '--amp', action=argparse.BooleanOptionalAction, default=False,
        help='autocast training and dense to bfloat16')
    parser.add_argument(
        '--modes', nargs='+', default=['eager'], choices=['eager', 'compile', 'onnx'],
        help='repa-infer and converted-infer only (eager)')
    parser.add_argument(
        '--batch-size', type=int,
        help='images a pass (8; search-step and repopt-depth 128; conversion 64; onnx, int8 and converted-infer 1, 8; '
             'dense 1)')
    parser.add_argument('--rounds', default=11, type=int, help='(%(default)s)')
    parser.add_argument(
        '--networks', nargs='+', choices=NETWORKS, default=list(NETWORKS), help='dense only (all)')
    parser.add_argument(
        '--img-size', nargs=2, type=int, default=[512, 512], metavar=('H', 'W'),
        help='dense only, multiples of 32 (%(default)s)')
    parser.add_argument(
        '--resume', action='store_true', help='skip rows that the file has for the same versions and settings')
    args = parser.parse_args()
    if any(side % 32 for side in args.img_size):
        parser.error(f'--img-size: UPerNet takes multiples of 32, got {args.img_size}')
    dtype, args.dtype = args.dtype, getattr(torch, args.dtype)
    if args.device == torch.device('cuda'):
        args.device = torch.device('cuda', torch.cuda.current_device())
    settings = dict(device=args.device.type, dtype=dtype, rounds=args.rounds, amp='bfloat16' if args.amp else None)
    if args.device.type == 'cuda':  # as in timm's train.py
        torch.set_float32_matmul_precision('high')
        torch.backends.cudnn.benchmark = True
        settings.update(float32='TF32', cudnn=torch.backends.cudnn.version(), cuda=torch.version.cuda)
    batch_size = args.batch_size
    for section in args.sections:
        defaults = {
            'search-step': 128, 'repopt-depth': 128, 'conversion': 64, 'onnx': None, 'int8': None,
            'converted-infer': None}
        args.batch_size = 1 if section == 'dense' else batch_size or defaults.get(section, 8)
        settings['batch_size'] = args.batch_size
        of_section = {**settings, 'img_size': args.img_size} if section == 'dense' else settings
        before = rows_measured(section, args.device, of_section) if args.resume else []
        args.pending = lambda before=before, **columns: pending(before, **columns)
        rows, path = [], None
        for row in SECTIONS[section](args):
            rows.append(row)
            print(row, flush=True)
            # saved row by row: an interrupted run keeps what it has measured
            path = save(
                section, SECTIONS[section].__doc__, rows, args.device, of_section, [k for k in KEYS if k in row])
        if rows:
            print_table(rows)
        print(f'\n{section}: {path or "nothing is left to measure"}')


if __name__ == '__main__':
    main()
