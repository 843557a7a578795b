"""``timm-rep models``: counted and published parameters and MACs of the papers' models; which timm models convert."""
import argparse
import fnmatch

from timm_rep.convert import survey_convertible
from timm_rep.paper import PAPER_ROWS, count_row

from ._arguments import Commands

_NOTES = """
MACs per image, counted by torch.utils.flop_counter. 'layers': linear layers and convolutions; 'all': also the matrix
products of attention (q k^T and its product with v). The papers use both counts. '=' marks the one that a published
value agrees with within 3%, '~' one that is further off but equal when rounded to the paper's one decimal, and '!' a
published value that agrees with neither.
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('models', help='print counted and published parameters and MACs')
    parser.add_argument('filter', nargs='?', default='*', help='pattern of model names, e.g. "repa_deit_*" (all)')
    parser.add_argument(
        '--convertible', action='store_true',
        help="list timm's architectures that match the pattern instead: FFNs that convert_to_repa() converts, parallel "
        'branches that convert_to_repopt() converts')
    parser.set_defaults(run=run)


def _run_convertible(pattern: str) -> None:
    layout = '{:<26} {:<44} {:>5}  {}'
    found, plain, count = 0, 0, 0
    for row in survey_convertible(pattern):
        if not count:
            print(layout.format('family', 'model', 'FFNs', 'classes; FFNs that stay; sums of branches'))
        notes = [', '.join(row.classes)] * bool(row.classes)
        notes += [f'{n} stay: each {reason}' for reason, n in row.others.items()]
        notes += [f'{n} {name} of linear branches' for name, n in row.sums.items()]
        if row.branches:
            notes.append(f'{row.branches} branches, {row.macs_ratio:.2f}x the MACs of the plain network')
        ffns = sum(row.classes.values())
        print(layout.format(row.family, row.model, ffns, '; '.join(notes) or 'no FFNs, no branches'), flush=True)
        count, found, plain = count + 1, found + (ffns > 0), plain + (row.branches > 0)
    if not count:
        raise ValueError(f'filter must match timm models, got {pattern!r}.')
    print(f'\n{found} of these {count} models have FFNs that convert_to_repa() converts, {plain} have parallel linear '
          'branches that convert_to_repopt() converts.')


def run(args: argparse.Namespace) -> None:
    if args.convertible:
        if args.filter == '*':
            raise ValueError('filter must be given with --convertible, which builds each model: try "convnext*".')
        _run_convertible(args.filter)
        return
    rows = [row for row in PAPER_ROWS if fnmatch.fnmatch(row.model, args.filter)]
    if not rows:
        raise ValueError(f"filter must match models of the papers' tables, got {args.filter!r}: see timm-rep models.")
    header = ('paper', 'table', 'row', 'model', 'folded', 'params M', 'paper', 'MACs G: layers', 'all', 'paper')
    layout = '{:<13} {:>5}  {:<26} {:<28} {:<6} {:>8} {:>6}  {:>15} {:>9} {:>6}'
    print(layout.format(*header))
    for row in rows:
        count = count_row(row)
        agrees = count.agrees or '!'
        sign = '~' if 'rounded' in agrees else '='
        print(layout.format(
            row.paper,
            row.table,
            row.label,
            row.model,
            'yes' if row.folded else 'no',
            f'{count.params / 1e6:.2f}',
            f'{row.params:.1f}',
            f'{count.macs.projections / 1e9:.2f} {sign if "without" in agrees else " "}',
            f'{count.macs.total / 1e9:.2f} {sign if agrees.startswith("with ") else " "}',
            f'{row.gmacs:.1f}' + (' !' if agrees == '!' else ''),
        ))
    print(_NOTES)
    for row in rows:
        if row.note:
            print(f'! {row.label} of table {row.table}, {row.gmacs} in the paper: {row.note}.')
