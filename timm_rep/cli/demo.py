"""``timm-rep demo``: small models on handwritten digits, trained, folded and converted within minutes."""
import argparse

from timm_rep.demo import run_demo

from ._arguments import Commands, add_device, add_seed, default_device, output, positive_int


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        'demo', help='train a small RePaFormer and a small RepOpt-VGG on handwritten digits, convert a small ViT')
    parser.add_argument(
        '-o', '--output', type=output, default='timm-rep-demo', metavar='DIR', help='folder to write (%(default)s)')
    add_device(parser)
    add_seed(parser)
    parser.add_argument(
        '--epochs', type=positive_int, default=10, metavar='N',
        help='training epochs of the first part; the second part trains half as many (%(default)s)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    result = run_demo(args.output, device=args.device or default_device(), seed=args.seed, epochs=args.epochs)
    layout = '{:<22}{:>12}{:>14}{:>16}{:>12}'
    print()
    print(layout.format('', 'accuracy', 'parameters', 'MACs per image', 'images/s'))
    for label, row in result.repa.rows.items():
        print(layout.format(
            label,
            f'{row["accuracy"]:.1f}%',
            f'{row["params"]:,.0f}',
            f'{row["macs"]:,.0f}',
            f'{row["throughput"]:,.0f}',
        ))
    plain, converted, repa, folded = (result.repa.rows[label]['throughput'] for label in (
        'plain ViT', 'plain ViT, converted', 'RePa-DeiT', 'RePa-DeiT, folded'))
    print(
        f'\nThroughput of the folded RePa-DeiT: {folded / repa:.2f}x the unfolded model, '
        f'{folded / plain:.2f}x the plain ViT.\n'
        f'Largest relative difference of the logits after folding: {result.repa.logits_difference:.1e}.')
    accuracy, difference = result.repopt
    print('\nAccuracy of a stack of 28 plain convolutions by learning rate:')
    for label, found in accuracy.items():
        print(f'{label:<24}' + ''.join(f'{lr:>6g}: {top1:.1f}%' for lr, top1 in found.items()))
    print(
        f'Relative difference from the logits of the multi-branch (CSLA) net after {len(difference["SGD"])} steps in '
        f"float64:\n{difference['RepSGD'][-1]:.1e} with RepSGD, {difference['SGD'][-1]:.1e} with SGD.")
    before, after = (result.repa.rows[label]['accuracy'] for label in ('plain ViT', 'plain ViT, converted'))
    print(
        f'\nThe plain ViT, converted from {result.repa.conversion.images} training images, without labels or training: '
        f'accuracy {before:.1f}% -> {after:.1f}%,\n'
        f'{result.repa.agreement:.1f}% equal predictions, {converted / plain:.2f}x the throughput.')
    print(f'\nPicture: {result.picture}\nModel:   {result.model_folder}\n\nLoad and use it:\n\n{result.usage}')
