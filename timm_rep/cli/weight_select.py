"""``timm-rep weight-select``: write the weights that a model starts from, selected from a larger one's."""
from pathlib import Path

from timm.utils import ParseKwargs

from timm_rep.init.head_aware import HEADS
from timm_rep.init.matching import DEPTHS
from timm_rep.init.weight_select import CHOICES


def add_parser(commands) -> None:
    parser = commands.add_parser(
        'weight-select', help="write the weights that a model starts from, selected from a larger one's")
    parser.add_argument('--student', required=True, metavar='MODEL', help='name of the model to initialize')
    parser.add_argument(
        '--teacher', required=True, nargs='+', metavar='MODEL',
        help='a timm model with pretrained weights or a checkpoint; of several each starts the next')
    parser.add_argument('-o', '--output', required=True, metavar='FILE', help='.safetensors file to write')
    parser.add_argument('--num-classes', type=int, metavar='N', help="of the student (the model's own)")
    parser.add_argument(
        '--model-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='K=V', help='arguments of the student')
    parser.add_argument('--element', choices=CHOICES, default='uniform', help='elements of a tensor (%(default)s)')
    parser.add_argument('--heads', choices=HEADS, default='whole', help='of uniform_heads (%(default)s)')
    parser.add_argument('--depth', choices=DEPTHS, default='first', help='blocks of a stage (%(default)s)')
    parser.add_argument('--include', nargs='+', metavar='WHAT', help='only these roles, or patterns of names')
    parser.add_argument('--exclude', nargs='+', metavar='WHAT', help='all but these roles, or patterns of names')
    parser.add_argument('--include-head', action='store_true', help='the classifier too, if classes match')
    parser.add_argument(
        '--partial', action='store_true', help='leave what the teacher has nothing for at its own initialization')
    parser.add_argument('--seed', type=int, default=0, help='of the random selections (%(default)s)')
    parser.add_argument('--plan', action='store_true', help='print where each tensor is from')
    parser.set_defaults(run=run)


def run(args) -> int:
    import timm
    import torch
    from safetensors.torch import save_file

    from timm_rep.init import weight_select_init
    from timm_rep.utils.atomic import check_writable, replacing_files

    output = Path(args.output)
    if output.suffix != '.safetensors' or output.is_dir():
        raise ValueError(f'--output is a .safetensors file to write, got {args.output!r}.')
    if not timm.is_model(args.student):
        raise ValueError(f'There is no model {args.student!r}.')
    check_writable(output.parent)
    classes = {} if args.num_classes is None else {'num_classes': args.num_classes}
    torch.manual_seed(args.seed)
    student = timm.create_model(args.student, **classes, **args.model_kwargs)
    report = weight_select_init(
        student,
        args.teacher if len(args.teacher) > 1 else args.teacher[0],
        element=args.element,
        depth=args.depth,
        include=args.include,
        exclude=args.exclude,
        include_head=args.include_head,
        strict=not args.partial,
        seed=args.seed,
        heads=args.heads,
    )
    if args.plan:
        print(report)
    else:
        print('\n'.join(str(s) for s in report.own) + f'\n{report.coverage:.1f}% of the student is from the teacher.')
    with replacing_files(output.parent) as temporary:
        tensors = {name: value.contiguous() for name, value in student.state_dict().items()}
        save_file(tensors, temporary / output.name)
    print(f'{output}: start from it with train.py --initial-checkpoint {output}')
    return 0
