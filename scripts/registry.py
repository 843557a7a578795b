#!/usr/bin/env python3
"""Write the tables of docs/models.md from the registered models, which are built on the meta device.

Of timm, the first model of each family is built, and of a file with several families (byobnet, for example), the first
model of each kind of name: convnext, convnextv2.
"""
import argparse
import itertools
import re
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import timm
import torch

import timm_rep  # noqa: F401, registers the models
from timm_rep.convert import Convertibility, survey_convertible
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.profiling import count_macs, count_params, model_input_size

PAGE = Path(__file__).resolve().parents[1] / 'docs' / 'models.md'


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ['---'] * len(head), *rows]
    return ''.join(f'| {" | ".join(map(str, line))} |\n' for line in lines)


def own_models() -> Dict[str, str]:
    """The models of this package that can be built without arguments, by name: file that defines them."""
    files = {name: timm.models.model_entrypoint(name).__module__ for name in timm.list_models()}
    return {name: file.rpartition('.')[2] for name, file in files.items() if file.startswith('timm_rep.')}


def _counts(name: str, **kwargs) -> Tuple[str, str, int]:
    with torch.device('meta'):
        model = timm.create_model(name, **kwargs)
    return f'{count_params(model) / 1e6:.1f}', f'{count_macs(model).total / 1e9:.2f}', model_input_size(model)[-1]


def model_row(name: str) -> List[object]:
    """Name, input size, parameters and multiply-accumulates of a model, and of its folded form if it is smaller."""
    if name.endswith('_any'):  # their size is that of their base
        return [f'`{name}`', *5 * ['']]
    if name.startswith('repopt'):  # the plain network trains as it is deployed
        params, macs, size = _counts(name, scales=False)
        return [f'`{name}`', size, params, macs, 'same', 'same']
    params, macs, size = _counts(name)
    folded = _counts(name, reparameterized=True)[:2] if name.startswith('repa_') else ('', '')
    return [f'`{name}`', size, params, macs, *folded]


def examples() -> List[str]:
    """Models of timm, sorted by file: the first of each kind of name."""
    names = [(
        timm.models.model_entrypoint(name).__module__, re.match(r'[a-z]+?(?:v\d)?(?=[_\d]|$)', name)[0], name)
        for name in timm.list_models()]
    found = sorted(item for item in names if item[0].startswith('timm.models.') and item[1] != 'test')
    return [next(group)[-1] for _, group in itertools.groupby(found, key=lambda item: item[:2])]


def survey() -> Iterator[Convertibility]:
    """What can be converted in :func:`examples`."""
    for name in examples():
        yield from survey_convertible(name)


def ffn_row(found: Convertibility) -> Optional[List[str]]:
    """File of timm, example, FFNs that convert by class, FFNs that stay with the reason; None without FFNs."""
    if not found.classes and not found.others:
        return None
    return [
        found.family, f'`{found.model}`', ', '.join(f'{n} `{name}`' for name, n in found.classes.items()),
        '; '.join(f'{n}: {reason}' for reason, n in found.others.items())]


def branch_row(found: Convertibility) -> Optional[List[str]]:
    """File of timm, example, sums of branches by class, multiply-accumulates over the plain network's; None without."""
    if not found.sums:
        return None
    return [
        found.family, f'`{found.model}`', ', '.join(f'{n} `{name}`' for name, n in found.sums.items()),
        f'{found.macs_ratio:.2f}']


def tables() -> Dict[str, str]:
    """The tables of the page, by name."""
    surveyed = list(survey())
    ffns = [row for row in map(ffn_row, surveyed) if row]
    ffns = [row for i, row in enumerate(ffns) if (row[0], re.sub(r'\d+', '', row[2] + row[3])) not in [
        (other[0], re.sub(r'\d+', '', other[2] + other[3])) for other in ffns[:i]]]  # one of those alike
    return {
        'models': _table(
            ['model', 'pixels', 'parameters (M)', 'MACs (G)', 'folded, parameters', 'folded, MACs'],
            [model_row(name) for name in own_models()]),
        'ffns': _table(['file of timm', 'example', 'FFNs that convert', 'FFNs that stay'], ffns),
        'branches': _table(
            ['file of timm', 'example', 'sums of branches', 'MACs over the plain network'],
            [row for row in map(branch_row, surveyed) if row]),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = PAGE.read_text()
    for name, table in tables().items():
        text, found = re.subn(
            rf'(?<=<!-- registry: {name} -->\n).*?(?=<!-- end -->)', f'\n{table}\n', text,
            flags=re.DOTALL)
        if found != 1:
            raise ValueError(f'Expected one table {name!r} in {PAGE}, but found {found}.')
    with replacing_files(PAGE.parent) as temporary:
        (temporary / PAGE.name).write_text(text)


if __name__ == '__main__':
    main()
