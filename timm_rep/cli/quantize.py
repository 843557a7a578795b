"""``timm-rep quantize``: an int8 model for inference on the CPU."""
from timm_rep.deploy import BACKENDS, CALIBRATORS

from ._arguments import add_model, count, create_from, folder, note_random_weights, positive_int, seed


def add_parser(commands) -> None:
    parser = commands.add_parser('quantize', help='fold a model, quantize it to int8, measure the accuracy, save')
    add_model(parser)
    parser.add_argument(
        '--data-dir', type=folder, required=True, metavar='DIR',
        help='folder of images: DIR/train/CLASS/IMAGE, DIR/val/CLASS/IMAGE')
    parser.add_argument('-o', '--output', required=True, metavar='DIR', help='folder to write')
    parser.add_argument('--backend', choices=BACKENDS, default='inductor', help='(default: %(default)s)')
    parser.add_argument('--per-tensor', action='store_true', help='one scale for a weight, not one for each channel')
    parser.add_argument(
        '--calibrator', choices=CALIBRATORS, default='minmax', help='ranges of the activations (default: %(default)s)')
    parser.add_argument(
        '--percentile', type=float, default=99.99, metavar='P',
        help='share of the values in the range of --calibrator percentile, in percent (default: %(default)s)')
    parser.add_argument(
        '--images', type=positive_int, default=512, metavar='N', help='calibration images (default: %(default)s)')
    parser.add_argument(
        '--qat-epochs', type=positive_int, default=0, metavar='N',
        help='epochs of quantization-aware training, distilled from MODEL (default: none); inductor, per channel')
    parser.add_argument('--lr', type=float, default=1e-4, help='learning rate of the training (%(default)s)')
    parser.add_argument('--resume', action='store_true', help='continue an interrupted training')
    parser.add_argument('--train-split', default='train', metavar='NAME', help='folder to calibrate on (%(default)s)')
    parser.add_argument('--val-split', default='val', metavar='NAME', help='folder for the accuracy (%(default)s)')
    parser.add_argument('--batch-size', type=positive_int, default=64, metavar='N', help='(default: %(default)s)')
    parser.add_argument(
        '--workers', type=count, default=0, metavar='N', help='processes that load images (%(default)s)')
    parser.add_argument('--seed', type=seed, default=0, help='(%(default)s)')
    parser.set_defaults(run=run)


def run(args) -> int:
    from timm_rep.deploy import check_settings, quantize_ptq, quantize_qat
    from timm_rep.utils.atomic import check_writable
    from timm_rep.utils.checkpoints import load_checkpoint
    from timm_rep.utils.data import Images

    check_settings(args.backend, args.calibrator, args.percentile)
    if args.qat_epochs and (args.backend != 'inductor' or args.per_tensor or args.calibrator != 'minmax'):
        raise ValueError(
            '--qat-epochs trains for the backend inductor, with a scale for each channel and moving averages of the '
            'smallest and largest values: leave out --backend, --per-tensor and --calibrator.')
    if args.resume and not args.qat_epochs:
        raise ValueError('--resume continues a training: pass its --qat-epochs.')
    model = create_from(args).eval()
    if args.checkpoint:
        load_checkpoint(model, args.checkpoint)
    images = Images(
        model, args.data_dir, args.train_split, args.val_split, args.batch_size, args.workers, seed=args.seed)
    output = check_writable(args.output)
    validation = images.validation()
    if args.qat_epochs:
        state = output / 'training.pth'
        if state.exists() and not args.resume:
            raise FileExistsError(
                f'{str(state)!r} of an interrupted training exists: --resume continues it; delete it to start anew.')
        args.interrupt_hint = '--resume continues the training.'
        quantized = quantize_qat(
            model, images, args.qat_epochs, args.lr, args.images, checkpoint=state, resume=args.resume,
            validation_loader=validation)
    else:
        quantized = quantize_ptq(
            model, images.calibration(args.images), args.backend, not args.per_tensor, args.calibrator, args.percentile,
            args.images, validation_loader=validation)
    quantized.save(output)
    if args.qat_epochs:
        state.unlink(missing_ok=True)
    print(f'{quantized.report}\n\nWritten: {output.resolve()}')
    print(f'\nmodel = timm_rep.deploy.load_quantized({str(output)!r})')
    note_random_weights(args, model)
    return 0
