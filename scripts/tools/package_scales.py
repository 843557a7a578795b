#!/usr/bin/env python3
"""Copy searched scales into the package and update their card, timm_rep/scales/packaged/README.md."""
import argparse
import sys
from pathlib import Path
from typing import Dict

import timm
from timm.utils import ParseKwargs

import timm_rep.scales.packaged as packaged
from timm_rep.layers import csla_layers
from timm_rep.scales import Scales, packaged_scales
from timm_rep.utils.atomic import replacing_files

FOLDER = Path(packaged.__file__).parent
CARD = FOLDER / 'README.md'
NEEDED = ('model', 'dataset', 'epochs', 'batch_size', 'accuracy', 'date', 'timm_rep')


def layers_searched(scales: Scales) -> str:
    """Number of layers whose channels no longer have the same value: those that a gradient has reached."""
    moved = sum(branches['conv3x3'].std() > 1e-3 for branches in scales.values())
    return f'{moved} of {len(scales)}'


def card() -> str:
    """Text of the card with an up-to-date table."""
    head, separator, _ = CARD.read_text().partition('|---|---|---|---|---|---|---|---|\n')
    rows = []
    for name in packaged_scales():
        scales = Scales.load(name)
        row = '| `{model}` | {dataset} | {epochs} | {batch_size} | {accuracy}% | {searched} | {date} | {timm_rep} |\n'
        rows.append(row.format(**scales.metadata, searched=layers_searched(scales)))
    return head + separator + ''.join(rows)


def checked(path: Path, metadata: Dict[str, str]) -> Scales:
    """Load scales and order their layers and branches as in the model.

    Args:
        path: File of scales.
        metadata: Entries to set or to add.

    Raises:
        ValueError: The layers are not those of the model, or metadata is missing.
    """
    scales = Scales.load(path)
    metadata = {**scales.metadata, **metadata}
    missing = [key for key in NEEDED if key not in metadata]
    if missing:
        raise ValueError(f'{path} has no metadata for {", ".join(missing)}: pass --metadata.')
    layers = csla_layers(timm.create_model(metadata['model'], structure='search', device='meta'))
    if scales.keys() != layers.keys():
        raise ValueError(f'The layers of {path} are not those of {metadata["model"]}.')
    for name, layer in layers.items():
        layer.csla.check_scales(scales[name])
    ordered = {name: {b.name: scales[name][b.name] for b in layer.csla.branches} for name, layer in layers.items()}
    return Scales(ordered, metadata, scales.history)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('scales', nargs='*', type=Path, help='files written by timm-rep hyper-search')
    parser.add_argument('--metadata', nargs='*', default={}, action=ParseKwargs, metavar='K=V', help='to set or to add')
    args = parser.parse_args()
    metadata = {key: str(value) for key, value in args.metadata.items()}
    for scales in [checked(path, metadata) for path in args.scales]:
        scales.save(packaged.locate_packaged(scales.metadata['model']))
    with replacing_files(FOLDER) as temporary:
        (temporary / CARD.name).write_text(card())
    print(card())
    return 0


if __name__ == '__main__':
    sys.exit(main())
