"""``timm-rep weight-select``: write initial weights of a model, selected from a larger model's weights."""
import argparse
from pathlib import Path

import torch

from timm_rep.init import weight_select_init
from timm_rep.init.head_aware import HEADS
from timm_rep.init.matching import LAYER_SELECTIONS
from timm_rep.init.weight_select import ELEMENT_CHOICES
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.checkpoints import write_safetensors

from ._arguments import Commands, add_model_kwargs, add_seed, check_name, check_output_file, create_model, positive_int


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        'weight-select', help="write initial weights of a model, selected from a larger model's weights")
    parser.add_argument('--student', required=True, metavar='MODEL', help='name of the model to initialize')
    parser.add_argument(
        '--teacher', required=True, nargs='+', metavar='MODEL',
        help='a timm model with pretrained weights or a checkpoint; of several, each initializes the next')
    parser.add_argument('-o', '--output', required=True, metavar='FILE', help='.safetensors file to write')
    parser.add_argument(
        '--num-classes', type=positive_int, metavar='N', help="classes of the student (the model's default)")
    add_model_kwargs(parser, of='the student')
    parser.add_argument(
        '--element-selection', choices=ELEMENT_CHOICES, default='uniform',
        help='choice of the elements of a tensor (%(default)s)')
    parser.add_argument(
        '--heads', choices=HEADS, default='whole',
        help='unit of uniform_heads: whole heads, or channels within all heads (%(default)s)')
    parser.add_argument(
        '--layer-selection', choices=LAYER_SELECTIONS, default='first',
        help='choice of the blocks of a stage (%(default)s)')
    parser.add_argument('--include', nargs='+', metavar='PART', help='components or patterns of names to select (all)')
    parser.add_argument('--exclude', nargs='+', metavar='PART', help='components or patterns of names to leave out')
    parser.add_argument('--include-head', action='store_true', help='select the classifier too, if the classes match')
    parser.add_argument(
        '--no-strict', dest='strict', action='store_false',
        help='keep the initialization of tensors without a counterpart in the teacher, instead of an error')
    add_seed(parser)
    parser.add_argument('-v', '--verbose', action='store_true', help='print the origin of every tensor')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_output_file(args.output, '.safetensors')
    output = Path(args.output)
    check_name(args.student)
    classes = {} if args.num_classes is None else {'num_classes': args.num_classes}
    if classes and 'num_classes' in args.model_kwargs:
        raise ValueError('Expected the number of classes once, but got --num-classes and --model-kwargs num_classes.')
    torch.manual_seed(args.seed)
    student = create_model(args.student, args.model_kwargs, **classes)
    report = weight_select_init(
        student,
        args.teacher if len(args.teacher) > 1 else args.teacher[0],
        element_selection=args.element_selection,
        layer_selection=args.layer_selection,
        include=args.include,
        exclude=args.exclude,
        include_head=args.include_head,
        strict=args.strict,
        seed=args.seed,
        heads=args.heads,
    )
    if args.verbose:
        print(report)
    else:
        print(
            '\n'.join(str(s) for s in report.not_selected)
            + f"\n{report.coverage:.1f}% of the student's values were selected from the teacher.")
    with replacing_files(output.parent) as draft:
        write_safetensors(student.state_dict(), draft / output.name)
    print(f'{output}: start from it with train.py --initial-checkpoint {output}')
