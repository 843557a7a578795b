"""``timm-rep convert``: convert a released checkpoint or file of scales into a folder that loads."""
import argparse

from timm_rep.hub import split_name
from timm_rep.publish import convert_released
from timm_rep.utils.atomic import check_writable

from ._arguments import Commands, add_model_kwargs, check_name, output


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        'convert', help='convert a released checkpoint or file of scales into a folder that loads')
    parser.add_argument('file', metavar='FILE', help='released file of weights or scales')
    parser.add_argument('--model', required=True, metavar='MODEL', help='name of its model, e.g. repopt_vgg_b1')
    parser.add_argument(
        '-o', '--output', type=output, required=True, metavar='DIR',
        help='folder to write, named MODEL.TAG, e.g. repopt_vgg_b1.in1k')
    add_model_kwargs(parser, example='idle_ratio=0.5')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_name(args.model)
    split_name(args.output)
    folder = check_writable(args.output)
    written = convert_released(args.file, args.model, folder, args.model_kwargs)
    print(f'{written}: converted from {args.file!r}, checked by loading it.')
    if written.name == 'model.safetensors':
        overlay = f'dict(file={str(written)!r})'
        print(f'  timm.create_model({args.model!r}, pretrained=True, pretrained_cfg_overlay={overlay})')
        print(f"  timm.create_model('local-dir:{folder}', pretrained=True)")
    return 0
