#!/usr/bin/env python3
"""Apply wrong changes of the package one at a time, and report those that the tests do not notice.

The changes are in mutants.yaml, or in another file of its form. They are made in a copy of the tracked files, in a
temporary folder, where the tests that should notice them have to pass before the first one. A change is caught if one
of its tests fails or hangs; those that hang are also counted apart, since a busy machine looks the same. The exit
status is 1 if less than 95% are caught.

    python tests/mutation/run.py -o tests/mutation/outcome.json
    python tests/mutation/run.py --only hub/
    python tests/mutation/run.py --mutants tests/mutation/independent.yaml -o tests/mutation/independent-outcome.json

The output is written after each mutant. Results in it of mutants that are not run again stay, so that a list can be run
in parts (--rest: those without a result). 'first' tells that a mutant was not noticed when it first ran.
"""
import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

os.environ.setdefault('OMP_NUM_THREADS', '1')

import pytest
import timm  # noqa: F401, for the forks
import torch  # noqa: F401
import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name('mutants.yaml')
GOAL = 95.
_LOG = 'pytest.txt'


class Mutant(NamedTuple):
    """A wrong change of the package.

    Attributes:
        file: Path in timm_rep.
        what: Behaviour with the change.
        tests: Tests that should notice it, as pytest takes them, relative to tests and separated by spaces.
        old: Text that the file holds exactly once.
        new: Its replacement.
    """
    file: str
    what: str
    tests: str
    old: str
    new: str

    def __str__(self) -> str:
        return f'{self.file}: {self.what}'

    def apply(self, root: Path) -> str:
        """The text of the file below ``root`` with the change.

        Raises:
            ValueError: The file does not hold the old text exactly once.
        """
        text = (root / 'timm_rep' / self.file).read_text(encoding='utf-8')
        if text.count(self.old) != 1:
            raise ValueError(f'{self}: the file holds {self.old!r} {text.count(self.old)} times, expected once.')
        return text.replace(self.old, self.new)


def read_mutants(pattern: str = '', path: Path = LIST) -> List[Mutant]:
    """The mutants of a list whose file or description matches a regular expression.

    Raises:
        ValueError: One cannot be applied, or none matches.
    """
    mutants = [Mutant(**fields) for fields in yaml.safe_load(path.read_text(encoding='utf-8'))]
    for mutant in mutants:
        mutant.apply(ROOT)
    mutants = [mutant for mutant in mutants if re.search(pattern, str(mutant))]
    if not mutants:
        raise ValueError(f'No mutant matches {pattern!r}.')
    return mutants


def copy_checkout(folder: Path) -> Path:
    """Copy the tracked files, as they are in the working tree, and link the folder of recorded outputs next to them."""
    names = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    copy = folder / ROOT.name
    for name in filter(None, names.split('\0')):
        if (ROOT / name).is_file():  # not deleted
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    if (ROOT.parent / 'shared').is_dir():
        (folder / 'shared').symlink_to(ROOT.parent / 'shared')
    return copy


def _pytest(root: Path, tests: Sequence[str]) -> None:
    os.setsid()  # a group with the processes that tests start
    os.chdir(root)
    # without bytecode: a change of the same second and length as the previous one would run the previous bytecode
    os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE='1')
    sys.dont_write_bytecode = True
    sys.path[0] = str(root)
    options = ['-x', '-q', '-n', '0', '-p', 'no:cacheprovider']
    with open(root.parent / _LOG, 'w', encoding='utf-8') as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.exit(int(pytest.main([*options, *(f'tests/{test}' for test in tests)])))


def run_tests(root: Path, tests: Sequence[str], timeout: Optional[float] = None) -> Optional[int]:
    """Exit status of ``python -m pytest`` on tests of a copy, until one fails; None if they take longer and are ended.

    It is a fork of this process, which has imported pytest, torch and timm, but not timm_rep. The output is in the
    folder of the copy.
    """
    process = multiprocessing.get_context('fork').Process(target=_pytest, args=(root, tests))
    process.start()
    try:
        process.join(timeout)
        return process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def outcome(root: Path, mutant: Mutant, timeout: float) -> str:
    """'failed', 'hung' or 'survived': the result of the tests of a mutant in a copy, which is restored."""
    path = root / 'timm_rep' / mutant.file
    original, changed = path.read_text(encoding='utf-8'), mutant.apply(root)
    path.write_text(changed, encoding='utf-8')
    try:
        status = run_tests(root, mutant.tests.split(), timeout)
    finally:
        path.write_text(original, encoding='utf-8')
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ValueError(f'{mutant.file}: {mutant.what}: none of {mutant.tests} is in the default run.')
    return {0: 'survived', None: 'hung'}.get(status, 'failed')


def environment() -> Dict[str, Any]:
    """The machine and the versions, asked of another process, since the forks must not find timm_rep imported."""
    code = (
        'import json, torch; from timm_rep.utils.profiling import device_name, versions; '
        'print(json.dumps(dict(machine=device_name(torch.device("cpu")), versions=versions())))')
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    return json.loads(subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True).stdout)


def merge(
        earlier: Sequence[Dict[str, str]],
        rows: Sequence[Dict[str, str]],
        mutants: Sequence[Mutant],
) -> Dict[str, Any]:
    """The results of this run, and of those mutants of the list that ran earlier.

    Args:
        earlier: Rows of the output before.
        rows: Rows of this run.
        mutants: The whole list.
    """
    results = {row['what']: row for row in earlier}  # files move
    for row in rows:
        old = results.get(row['what'], row)
        survived = 'survived' in (old.get('first'), old['outcome'])
        results[row['what']] = {**row, 'first': 'survived'} if survived and row['outcome'] != 'survived' else row
    merged = [{**results[mutant.what], 'file': mutant.file} for mutant in mutants if mutant.what in results]
    return dict(
        caught=sum(row['outcome'] != 'survived' for row in merged),
        hung=sum(row['outcome'] == 'hung' for row in merged),
        caught_at_first=sum(row.get('first', row['outcome']) != 'survived' for row in merged),
        mutants=merged, not_run=[str(mutant) for mutant in mutants if mutant.what not in results])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--only', default='', metavar='REGEX', help='only mutants whose file or description matches')
    parser.add_argument('--rest', action='store_true', help='only mutants that have no result in the output')
    parser.add_argument('--mutants', type=Path, default=LIST, metavar='FILE', help='the changes (%(default)s)')
    parser.add_argument('--list', action='store_true', help='print the mutants')
    parser.add_argument('--timeout', type=float, default=300, metavar='S', help='seconds for one mutant (%(default)s)')
    parser.add_argument('-o', '--output', type=Path, metavar='FILE', help='JSON file to write or continue')
    args = parser.parse_args()
    mutants, every = read_mutants(args.only, args.mutants), read_mutants(path=args.mutants)
    earlier = json.loads(args.output.read_text(encoding='utf-8')) if args.output and args.output.exists() else {}
    if args.rest:
        done = {row['what'] for row in earlier.get('mutants', [])}
        mutants = [mutant for mutant in mutants if mutant.what not in done]
    if args.list or not mutants:
        print(*mutants, sep='\n')
        return 0
    rows: List[Dict[str, str]] = []
    command = shlex.join(['python', *sys.argv])
    header = dict(
        commands=[*(x for x in earlier.get('commands', []) if x != command), command], date=date.today().isoformat(),
        **environment())
    with tempfile.TemporaryDirectory() as folder:
        root = copy_checkout(Path(folder))
        tests = sorted({test for mutant in mutants for test in mutant.tests.split()})
        status, output = run_tests(root, tests), (root.parent / _LOG).read_text(encoding='utf-8')
        if status:
            print(output[-4000:], 'The tests fail without any change.', sep='\n', file=sys.stderr)
            return 1
        print('Unchanged:', output.splitlines()[-1], flush=True)
        for mutant in mutants:
            start = time.perf_counter()
            try:
                found = outcome(root, mutant, args.timeout)
            except KeyboardInterrupt:  # the finished mutants are reported
                break
            rows.append(dict(file=mutant.file, what=mutant.what, outcome=found))
            seconds = time.perf_counter() - start
            print(f'{found:8} {seconds:5.0f} s  {mutant}', flush=True)
            if args.output is not None:
                content = {**header, **merge(earlier.get('mutants', []), rows, every)}
                draft = args.output.with_suffix('.tmp')
                draft.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
                draft.replace(args.output)
    counts = merge([], rows, mutants)
    share = 100 * counts['caught'] / max(1, len(rows))
    print(f'{counts["caught"]} of {len(rows)} caught, {share:.1f}%, {counts["hung"]} of them hung; '
          f'{len(mutants)} chosen.')
    return 0 if share >= GOAL else 1


if __name__ == '__main__':
    sys.exit(main())
