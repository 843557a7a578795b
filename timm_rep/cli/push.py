"""``timm-rep push``: publish a folder on the Hub."""
import argparse
import tempfile
from pathlib import Path

from timm_rep.hub import organization
from timm_rep.publish import push_folder, write_folded

from ._arguments import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser('push', help='publish a folder on the Hub, in one commit')
    parser.add_argument('folder', metavar='DIR', help='folder of timm-rep card, e.g. hub/repa_any.cifar10')
    parser.add_argument('--org', metavar='NAME', help='user or organization (default: TIMM_REP_ORG, or timm-rep)')
    parser.add_argument('--revision', default='main', metavar='NAME', help='branch to commit to (%(default)s)')
    parser.add_argument('--private', action='store_true', help='create the repository as private')
    parser.add_argument('--folded', action='store_true', help='publish the folded form instead, as DIR_folded')
    parser.add_argument('--dry-run', action='store_true', help='only print what would change')
    parser.add_argument(
        '--delete', nargs='+', default=[], metavar='FILE',
        help='weight files that are on the Hub but not in DIR, to delete there (default: such files are an error)')
    parser.add_argument('--message', metavar='TEXT', help='message of the commit')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    org = args.org or organization()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folded(args.folder, Path(temporary), org) if args.folded else Path(args.folder).resolve()
        changes = push_folder(
            folder, org, revision=args.revision, private=args.private, dry_run=args.dry_run, message=args.message,
            delete=args.delete)
    for change in changes:
        print(f'{change.action:<8}{change.file}' + (f' ({change.size} bytes)' if change.size else ''))
    changed = [change for change in changes if change.action != 'same']
    state = 'has no changed files' if not changed else f'would have {len(changed)} changes' if args.dry_run else (
        f'has {len(changed)} changes in one commit')
    print(f'{org}/{folder.name}: {state}.')
