"""``timm-rep card``: make a folder that can be published: weights, measured figures, model card, hashes."""


def add_parser(commands) -> None:
    parser = commands.add_parser('card', help='make a folder that can be published: weights, figures, card, hashes')
    parser.add_argument('folder', metavar='DIR', help='named MODEL.TAG: hub/repa_deit_tiny.cifar10')
    parser.add_argument('--checkpoint', metavar='FILE', help='of a training run (the weights of the folder stay)')
    parser.add_argument('--recipe', metavar='FILE', help="train.py --config of that run (the folder's train.yaml)")
    parser.add_argument('--use-ema', action='store_true', help='of the checkpoint take the moving average')
    parser.add_argument('--half', action='store_true', help='write parameters as float16, in half the space')
    parser.add_argument('--data-dir', metavar='DIR', help='measure the accuracy on these folders of images')
    parser.add_argument('--val-split', default='val', metavar='NAME', help='the folder in it (%(default)s)')
    parser.add_argument('--dataset', metavar='NAME', help='name of these images, for the card: CIFAR-10')
    parser.add_argument('--device', default='cpu', help='to measure on (%(default)s)')
    parser.add_argument('--batch-size', type=int, default=8, metavar='N', help='of the throughput (%(default)s)')
    parser.add_argument('--measure', action='store_true', help='measure size and speed again, on this machine')
    parser.set_defaults(run=run)


def run(args) -> int:
    from timm_rep.hub.card import CARD
    from timm_rep.hub.folder import split_name
    from timm_rep.hub.publish import prepare_folder
    from timm_rep.utils.atomic import check_writable

    split_name(args.folder)
    folder = check_writable(args.folder)
    prepare_folder(
        folder,
        args.checkpoint,
        args.recipe,
        data_dir=args.data_dir,
        split=args.val_split,
        dataset=args.dataset,
        half=args.half,
        use_ema=args.use_ema,
        device=args.device,
        batch_size=args.batch_size,
        measure=args.measure,
    )
    print((folder / CARD).read_text(encoding='utf-8'))
    return 0
