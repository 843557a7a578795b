"""``timm-rep plot-attention-weights``: draw the products of attention weights of several models."""
import argparse
from typing import Dict

import timm
import torch
import torch.nn as nn

from timm_rep.init import attentions, open_teacher
from timm_rep.plotting import plot_attention

from ._arguments import Commands, check_name
from ._picture import add_picture, check_picture, save_picture


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        'plot-attention-weights', help='draw the products of attention weights of several models')
    parser.add_argument(
        'models', nargs='+', metavar='MODEL[=CHECKPOINT]',
        help='timm models: freshly initialized (name), pretrained (name.tag), or with weights of a checkpoint')
    add_picture(parser, 'attention.png')
    parser.add_argument('--block', type=int, default=0, metavar='N', help='index of the block (%(default)s)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    output = check_picture(args.output, 'plot-attention-weights')
    models: Dict[str, nn.Module] = {}
    for source in args.models:
        if source in models:
            raise ValueError(f'Expected each model once, but got {source!r} twice.')
        models[source] = _model(source)
    save_picture(plot_attention(models, args.block), output)


def _model(source: str) -> nn.Module:
    name, equals, checkpoint = source.partition('=')
    check_name(name)
    torch.manual_seed(0)
    if not equals:
        return timm.create_model(name, pretrained='.' in name)
    if not checkpoint:
        raise ValueError(f'Expected a checkpoint after {source!r}, but the name is empty.')
    teacher = open_teacher(checkpoint)
    model = timm.create_model(name)
    attention = {
        f'{place}.{k}': v for place, layer in attentions(model) for k, v in layer.state_dict().items()}
    missing = [k for k, v in attention.items() if teacher.shapes.get(k) != tuple(v.shape)]
    if missing:
        raise ValueError(f'Expected a checkpoint of {name}, but {checkpoint!r} has no {missing[0]} of the same shape.')
    model.load_state_dict({k: teacher.read(k) for k in attention}, strict=False)
    return model
