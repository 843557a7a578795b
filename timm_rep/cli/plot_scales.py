"""``timm-rep plot-scales``: draw scales by block, or the kernels of checkpoints."""
import argparse
from pathlib import Path
from typing import List

from timm_rep.plotting import plot_kernels, plot_scales
from timm_rep.scales import Scales
from timm_rep.utils.checkpoints import read_state_dict

from ._arguments import Commands
from ._picture import add_picture, check_picture, save_picture


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('plot-scales', help='draw scales by block, or the kernels of checkpoints')
    parser.add_argument(
        'sources', nargs='+', metavar='SCALES',
        help='files of scales, models with packaged scales, or Hub repositories; with --kernels, checkpoints')
    add_picture(parser, 'scales.png')
    parser.add_argument(
        '--kernels', action='store_true',
        help='draw the entries of a 3x3 kernel of each checkpoint, centre against surroundings')
    parser.add_argument('--layer', action='append', metavar='NAME', help='kernel to draw, once or for each checkpoint')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    output = check_picture(args.output, 'plot-scales')
    if args.layer and not args.kernels:
        raise ValueError('--kernels must be given with --layer.')
    if args.layer and len(args.layer) not in (1, len(args.sources)):
        raise ValueError(f'Expected --layer once, or once for each of the {len(args.sources)} checkpoints, but got it '
            f'{len(args.layer)} times.')
    titles = _titles(args.sources)
    if args.kernels:
        missing = [source for source in args.sources if not Path(source).is_file()]
        if missing:
            raise FileNotFoundError(f'Expected a checkpoint, but {missing[0]!r} does not exist.')
        checkpoints = {title: read_state_dict(source) for title, source in zip(titles, args.sources)}
        layers = args.layer * len(checkpoints) if args.layer and len(args.layer) == 1 else args.layer
        figure = plot_kernels(checkpoints, layers)
    else:
        scales = {title: Scales.load(source) for title, source in zip(titles, args.sources)}
        for title, each in scales.items():
            print(f'{title}\n{each.summary()}\n')
        figure = plot_scales(scales)
    save_picture(figure, output)


def _titles(sources: List[str]) -> List[str]:
    """Unique titles: file names, else paths, numbered where these are equal too."""
    titles = [Path(source).name for source in sources]
    if len(set(titles)) < len(titles):
        titles = list(sources)
    seen = {title: titles.count(title) > 1 for title in titles}
    return [f'{title} ({i + 1})' if seen[title] else title for i, title in enumerate(titles)]
