#!/usr/bin/env python3
"""Put searched scales into the package, and bring its card, timm_rep/scales/packaged/README.md, up to date."""
import argparse
import sys
from pathlib import Path

import timm

import timm_rep.scales.packaged as packaged
from timm_rep.atomic import replacing_files
from timm_rep.layers import csla_layers
from timm_rep.scales import Scales, packaged_scales

FOLDER = Path(packaged.__file__).parent
CARD = """\
# Searched scales

What `scales='default'` stands for, and `Scales.load(name)` loads: the constants that Hyper-Search found with this
package. Every other RepOpt model has none yet; for it `scales='default'` is `'init'`, the values that a search starts
from, which are not searched.

The paper searches on CIFAR-100 for 240 epochs; what was searched on what here is in the table, and in the metadata of
each file. The accuracy is that of the search structure, after the search, on the validation images of its data set.

| model | data set | epochs | batch size | accuracy | date | timm-rep |
|---|---|---|---|---|---|---|
"""


def card() -> str:
    rows = []
    for name in packaged_scales():
        found = Scales.load(packaged.locate_packaged(name)).metadata
        rows.append('| `{model}` | {dataset} | {epochs} | {batch_size} | {accuracy}% | {date} | {timm_rep} |'.format(
            **found))
    return CARD + ''.join(f'{row}\n' for row in rows)


def package(path: Path, dataset: str) -> None:
    scales = Scales.load(path)
    model = timm.create_model(scales.metadata['model'], structure='search', device='meta')
    layers = csla_layers(model)
    if scales.keys() != layers.keys():
        raise ValueError(f'{path} does not hold the scales of {scales.metadata["model"]}.')
    for name, layer in layers.items():
        layer.csla.check_scales(scales[name])
    ordered = {name: {b.name: scales[name][b.name] for b in layer.csla.branches} for name, layer in layers.items()}
    metadata = dict(scales.metadata, dataset=dataset or scales.metadata['dataset'])
    Scales(ordered, metadata, scales.history).save(packaged.locate_packaged(scales.metadata['model']))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('scales', nargs='*', type=Path, help='files that timm-rep hyper-search wrote')
    parser.add_argument('--dataset', default='', help='what to call the data set in the metadata')
    args = parser.parse_args()
    for path in args.scales:
        package(path, args.dataset)
    with replacing_files(FOLDER) as temporary:
        (temporary / 'README.md').write_text(card())
    print(card())
    return 0


if __name__ == '__main__':
    sys.exit(main())
