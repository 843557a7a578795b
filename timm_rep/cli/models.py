"""``timm-rep models``: every model of the papers' tables, counted beside the published figures."""
import fnmatch

from timm_rep.paper import PAPER_ROWS, count_row

_NOTES = """
MACs of one image, counted by torch.utils.flop_counter: 'layers' are linear layers and convolutions, 'all' adds the
products of attention (q k^T and its product with v). The papers' column mixes the two; '=' marks the count that it
agrees with, within 3%. '~' marks one that is further off but the same when rounded to the one decimal that the paper
prints, '!' a row that agrees with neither.
"""


def add_parser(commands) -> None:
    parser = commands.add_parser('models', help='count parameters and MACs beside the papers\' figures')
    parser.add_argument('filter', nargs='?', default='*', help='only models whose name matches, e.g. "repa_deit_*"')
    parser.set_defaults(run=run)


def run(args) -> int:
    rows = [row for row in PAPER_ROWS if fnmatch.fnmatch(row.model, args.filter)]
    if not rows:
        raise ValueError(f'no model of the papers\' tables matches {args.filter!r}; see timm-rep models.')
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
    return 0
