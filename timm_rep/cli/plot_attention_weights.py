"""``timm-rep plot-attention-weights``: draw the products of attention weights of several models."""
from typing import Dict


def add_parser(commands) -> None:
    parser = commands.add_parser(
        'plot-attention-weights', help='draw the products of attention weights of several models')
    parser.add_argument(
        'models', nargs='+', metavar='MODEL[=CHECKPOINT]',
        help='timm models: freshly initialized (name), pretrained (name.tag), or with weights of a checkpoint')
    parser.add_argument(
        '-o', '--output', default='attention.png', metavar='FILE',
        help='.png, .svg or .pdf file to write (%(default)s in the current directory)')
    parser.add_argument('--block', type=int, default=0, metavar='N', help='index of the block (%(default)s)')
    parser.set_defaults(run=run)


def run(args) -> int:
    from timm_rep.plotting import plot_attention

    from ._picture import check_picture, save_picture

    output = check_picture(args.output, 'plot-attention-weights')
    models: Dict = {}
    for source in args.models:
        if source in models:
            raise ValueError(f'{source!r} is given twice.')
        models[source] = _model(source)
    save_picture(plot_attention(models, args.block), output)
    return 0


def _model(source: str):
    import timm
    import torch

    from timm_rep.init import open_teacher

    name, _, checkpoint = source.partition('=')
    if not timm.is_model(name):
        raise ValueError(f'There is no model {name!r}.')
    torch.manual_seed(0)
    if not checkpoint:
        return timm.create_model(name, pretrained='.' in name)
    teacher = open_teacher(checkpoint)
    model = timm.create_model(name)
    attention = {k: v for k, v in model.state_dict().items() if '.attn' in k}
    missing = [k for k, v in attention.items() if teacher.shapes.get(k) != tuple(v.shape)]
    if missing:
        raise ValueError(f'{checkpoint!r} is not a checkpoint of {name}: it has no {missing[0]} of the same shape.')
    model.load_state_dict({k: teacher.read(k) for k in attention}, strict=False)
    return model
