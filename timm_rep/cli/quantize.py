"""``timm-rep quantize``: an int8 model for inference on the CPU."""
import argparse

from timm_rep.deploy import BACKENDS, CALIBRATORS, check_quantization, quantize_ptq, quantize_qat
from timm_rep.utils.atomic import check_writable
from timm_rep.utils.data import Images
from timm_rep.utils.training import check_distillation

from ._arguments import (
    Commands,
    add_loading,
    add_model,
    add_seed,
    create_from,
    folder,
    load_from,
    note_random_weights,
    output,
    positive_int,
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('quantize', help='fold a model, quantize it to int8, measure the accuracy, save')
    add_model(parser)
    parser.add_argument(
        '--data-dir', type=folder, required=True, metavar='DIR',
        help='folder of images: DIR/train/IMAGE, or in folders by class, and DIR/val/CLASS/IMAGE for the accuracy')
    parser.add_argument('-o', '--output', type=output, required=True, metavar='DIR', help='folder to write')
    parser.add_argument('--backend', choices=BACKENDS, default='inductor', help='int8 backend (%(default)s)')
    parser.add_argument('--per-tensor', action='store_true', help='one scale per weight, instead of one per channel')
    parser.add_argument(
        '--calibrator', choices=CALIBRATORS, default='minmax', help='choice of the ranges of activations (%(default)s)')
    parser.add_argument(
        '--percentile', type=float, metavar='P',
        help='percentage of values covered by --calibrator percentile (99.99)')
    parser.add_argument(
        '--images', type=positive_int, default=512, metavar='N', help='number of calibration images (%(default)s)')
    parser.add_argument(
        '--keep-float', nargs='+', default=(), metavar='LAYER',
        help="layers that stay in float; 'auto': the most sensitive ones, for --max-error or --max-accuracy-loss")
    parser.add_argument('--max-error', type=float, metavar='X', help='largest relative rms difference of the outputs')
    parser.add_argument(
        '--max-accuracy-loss', type=float, metavar='P', help='largest loss of accuracy, in percentage points')
    parser.add_argument('--diagnose', action='store_true', help='measure the error that each layer adds alone')
    parser.add_argument(
        '--equalize', action='store_true', help='equalize the ranges of weights between consecutive layers first')
    parser.add_argument(
        '--qat-epochs', type=positive_int, default=0, metavar='N',
        help='epochs of quantization-aware training, distilled from MODEL (none); inductor, per channel')
    parser.add_argument('--lr', type=float, metavar='X', help='initial learning rate of the training (0.0001)')
    parser.add_argument('--resume', action='store_true', help='continue an interrupted training')
    add_loading(parser)
    add_seed(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    percentile = {} if args.percentile is None else {'percentile': args.percentile}
    check_quantization(args.backend, args.calibrator, **percentile)
    if percentile and args.calibrator != 'percentile':
        raise ValueError(f'--percentile must be given with --calibrator percentile, got {args.calibrator}.')
    if args.qat_epochs and (
            args.backend != 'inductor' or args.per_tensor or args.calibrator != 'minmax' or args.keep_float
            or args.max_error is not None or args.max_accuracy_loss is not None or args.diagnose or args.equalize):
        raise ValueError(
            '--qat-epochs must be given without --backend, --per-tensor, --calibrator, --keep-float, --max-error, '
            '--max-accuracy-loss, --diagnose and --equalize: it is for the backend inductor, a scale per channel, '
            'moving averages of the smallest and largest values, and all layers in int8.')
    keep_float = 'auto' if args.keep_float == ['auto'] else args.keep_float
    if args.resume and not args.qat_epochs:
        raise ValueError('--qat-epochs must be given with --resume: pass the value of the interrupted training.')
    lr = {} if args.lr is None else {'lr': args.lr}
    if lr and not args.qat_epochs:
        raise ValueError('--qat-epochs must be given with --lr, which is the learning rate of that training.')
    check_distillation(args.qat_epochs, **lr)
    output = check_writable(args.output)
    model = create_from(args).eval()
    load_from(args, model)
    images = Images(
        model, args.data_dir, args.train_split, args.val_split, args.batch_size, args.workers, seed=args.seed)
    state = output / 'training.pth'
    if args.qat_epochs:
        if state.exists() and not args.resume:
            raise FileExistsError(
                f'{str(state)!r} of an interrupted training exists: pass --resume to continue it, or delete it.')
        args.interrupt_hint = '--resume continues the training.'
        quantized = quantize_qat(
            model, images, args.qat_epochs, max_images=args.images, checkpoint=state, resume=args.resume,
            validation_loader=images.validation(), **lr)
    else:
        quantized = quantize_ptq(
            model, images.calibration(args.images), args.backend, not args.per_tensor, args.calibrator,
            max_images=args.images, validation_loader=images.validation(), keep_float=keep_float,
            max_error=args.max_error, max_accuracy_loss=args.max_accuracy_loss, diagnose=args.diagnose,
            equalize=args.equalize, **percentile)
    quantized.save(output)
    if args.qat_epochs:
        state.unlink(missing_ok=True)
    print(f'{quantized.report}\n\nWritten: {output.resolve()}')
    print(f'\nmodel = timm_rep.deploy.load_quantized({str(output)!r})')
    note_random_weights(args, model)
