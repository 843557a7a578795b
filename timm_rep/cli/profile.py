"""``timm-rep profile``: latency by part, vanilla, RePa and folded (figure 3 of the RePaFormer paper)."""
import argparse
import inspect
from typing import Any, Dict, Mapping, Tuple

import timm
import torch
import torch.nn as nn

from timm_rep.convert import anneal_ffns, convert_to_repa, folded_copy, use_repa_ffns
from timm_rep.latency import profile_latency
from timm_rep.paper import VANILLA
from timm_rep.plotting import plot_latency
from timm_rep.utils.compare import check_finite
from timm_rep.utils.profiling import model_input_size

from ._arguments import Commands, add_device, add_model_kwargs, check_name, create_model, default_device, positive_int
from ._picture import add_picture, check_picture, save_picture


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('profile', help='time the parts of a model: vanilla, RePa and folded')
    parser.add_argument(
        'models', nargs='+', metavar='MODEL',
        help='RePa models, or timm models whose FFNs are plain MLPs in known blocks')
    add_picture(parser, 'profile.png')
    add_device(parser)
    parser.add_argument('--batch-size', type=positive_int, default=1, metavar='N', help='batch size (%(default)s)')
    parser.add_argument('--img-size', type=positive_int, metavar='N', help="image size in pixels (the model's own)")
    add_model_kwargs(
        parser, of='the models; arguments of RePaFormers are not passed to vanilla models', example='idle_ratio=0.5')
    parser.add_argument(
        '--dtype', choices=('float32', 'bfloat16', 'float16'), default='float32', help='dtype (%(default)s)')
    parser.add_argument('--channels-last', action='store_true', help='use channels-last memory')
    parser.add_argument('--rounds', type=positive_int, default=15, metavar='N', help='timed passes (%(default)s)')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    output = check_picture(args.output, 'profile')
    args.device = args.device or default_device()
    profiles = {}
    for name in args.models:
        torch.manual_seed(0)
        vanilla, repa = _build(name, args)
        models = {'vanilla': vanilla, 'RePa': repa, 'folded': folded_copy(repa)}
        like = dict(device=args.device, dtype=getattr(torch, args.dtype))
        images = torch.randn(args.batch_size, *_input_size(vanilla, args), **like)
        check_finite(vanilla, images[:1])
        if args.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
            models = {key: model.to(memory_format=torch.channels_last) for key, model in models.items()}
        profiles[name] = profile_latency(models, images, rounds=args.rounds)
        _print(name, profiles[name])
    save_picture(plot_latency(profiles), output)


def _build(name: str, args: argparse.Namespace) -> Tuple[nn.Module, nn.Module]:
    """Vanilla timm model and RePa model, both with initial weights."""
    architecture, _, tag = name.partition('.')
    if ':' in name or (tag and architecture in (*VANILLA, 'repa_any')):
        raise ValueError(
            f'Expected an architecture such as repa_deit_tiny, but got {name!r}: times do not depend on weights, '
            "leave out the tag. For a converted model, pass 'repa_any' and --model-kwargs base=NAME.")
    both, own = _split(args.model_kwargs)
    base = own.pop('base', None)
    if not isinstance(base, str if name == 'repa_any' else type(None)):
        raise ValueError(
            f"--model-kwargs base=NAME must be given for 'repa_any', and only for it, got base={base!r} for {name!r}.")
    check_name(base or name)
    fixed = timm.get_pretrained_cfg(base or name).fixed_input_size
    if args.img_size and fixed:
        both['img_size'] = args.img_size
    if base is not None:
        vanilla = create_model(base, both)
        repa = create_model(name, {**both, **own, 'base': base})
    elif name in VANILLA:
        vanilla_name, vanilla_args = VANILLA[name]
        vanilla = create_model(vanilla_name, {**vanilla_args, **both})
        repa = create_model(name, {**both, **own})
    else:
        vanilla = create_model(name, both)
        repa = create_model(name, both)
        convert_to_repa(repa, **own)
    dtype = getattr(torch, args.dtype)
    return vanilla.to(args.device, dtype).eval(), repa.to(args.device, dtype).eval()


def _split(model_kwargs: Mapping[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Split arguments into common ones and RePaFormers' own."""
    args = (name for f in (use_repa_ffns, anneal_ffns) for name in inspect.signature(f).parameters)
    only = {*args, 'base', 'linear_path'}
    own = {k: v for k, v in model_kwargs.items() if k in only}
    return {k: v for k, v in model_kwargs.items() if k not in own}, own


def _input_size(model: nn.Module, args: argparse.Namespace) -> Tuple[int, ...]:
    channels, *size = model_input_size(model)
    return (channels, *([args.img_size] * 2 if args.img_size else size))


def _print(name: str, profile: Dict[str, Dict[str, float]]) -> None:
    rows = {**{part: [bar[part] for bar in profile.values()] for part in next(iter(profile.values()))},
            'all': [sum(bar.values()) for bar in profile.values()]}
    print(f'{name:<28}' + ''.join(f'{bar + ", ms":>16}' for bar in profile) + '   vanilla / folded')
    for part, times in rows.items():
        shares = ''.join(f'{time:>9.2f} ({time / total:>4.0%})' for time, total in zip(times, rows['all']))
        print(f'{part:<28}{shares}{times[0] / times[-1]:>19.2f}')
    print()
