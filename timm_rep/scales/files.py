"""Files of scales: sources and layouts."""
import json
import os
import re
from pathlib import Path
from typing import Dict, Mapping, Tuple

import torch
from safetensors import SafetensorError, safe_open

from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.checkpoints import read_state_dict, write_safetensors
from timm_rep.utils.files import StrPath, parse_json
from timm_rep.utils.network import hub_download

from .packaged import locate_packaged, packaged_scales
from .released import RELEASED_PREFIX, locate_released

Layers = Mapping[str, Mapping[str, torch.Tensor]]

# metadata key of the branches of each layer from input to output, as JSON, since safetensors sorts its tensors
ORDER = 'layers'

SCALES_NAME = 'scales.safetensors'
# model_args['scales'] of a folder with scales. Libraries that create the model from model_args alone get one without
# scales, which RepSGD refuses; if the argument was left out, it would train with other scales
SCALES_IN_FOLDER = 'folder'
_HUB_ID = re.compile(r'(?:hf-hub:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?')
_PICKLED = ('.pth', '.pt')
# names in the authors' code; stage0 of RepOpt-VGG is the stem
_RELEASED_VGG = re.compile(r'stage(?P<stage>\d)(?:\.(?P<block>\d+))?\.(?P<scale>scale_\w+)\.weight')
_RELEASED_GHOST = re.compile(
    r'(?P<ghost>blocks\.\d+\.\d+\.ghost\d)\.(?P<scale>fusion_scale|cheap_operation\.1)\.weight')
_RELEASED_BRANCHES = {
    'scale_conv': 'conv3x3', 'scale_1x1': 'conv1x1', 'scale_identity': 'identity',
    'cheap_operation.1': 'conv3x3', 'fusion_scale': 'identity',
}


def locate(source: StrPath) -> str:
    """The path of a file of scales, of packaged or released scales by their name, or of a download in the Hub's cache.
    """
    source = os.fspath(source)
    if source in packaged_scales():
        return locate_packaged(source)
    if source.startswith(RELEASED_PREFIX):
        return locate_released(source[len(RELEASED_PREFIX):])
    if os.path.isfile(source):
        return source
    hub_id = _HUB_ID.fullmatch(source)
    if not hub_id or os.path.exists(source) or source.endswith(('.safetensors', *_PICKLED)):
        what = 'is a folder' if os.path.isdir(source) else 'does not exist'
        raise FileNotFoundError(
            f"scales must be a file, a Hub repository (owner/name), 'ones', 'init', False for no scales, or a model "
            f"with packaged scales ({', '.join(packaged_scales())}), but {source!r} {what}.")
    try:
        return hub_download(hub_id['repo'], SCALES_NAME, hub_id['revision'])
    except (OSError, ValueError) as e:
        raise FileNotFoundError(
            f'Expected a file of scales, or a Hub repository with a {SCALES_NAME}, but {source!r} is neither, or the '
            f'Hub cannot be reached: {e}') from e


def read(path: str) -> Tuple[Layers, Mapping[str, str]]:
    """Read the layers and the metadata of a file of scales; ValueError if its layout is unknown."""
    return _read_released(path) if path.endswith(_PICKLED) else _read_safetensors(path)


def write(layers: Layers, metadata: Mapping[str, str], path: StrPath) -> None:
    """Write a safetensors file; a failure leaves an existing one intact."""
    path = Path(path)
    if path.suffix != '.safetensors':
        raise ValueError(f'The path of scales must end in .safetensors, got {str(path)!r}.')
    tensors = {f'{layer}.{branch}': scale for layer, branches in layers.items() for branch, scale in branches.items()}
    order = json.dumps({layer: list(branches) for layer, branches in layers.items()})
    with replacing_files(path.parent) as temporary:
        write_safetensors(tensors, temporary / path.name, metadata={**metadata, ORDER: order})


def _read_safetensors(path: str) -> Tuple[Layers, Mapping[str, str]]:
    layers: Dict[str, Dict[str, torch.Tensor]] = {}
    try:
        with safe_open(path, 'pt') as file:
            metadata = dict(file.metadata() or {})
            keys = [
                f'{layer}.{branch}' for layer, branches in parse_json(metadata.pop(ORDER, '{}')).items()
                for branch in branches
            ]
            if sorted(keys) != sorted(file.keys()):
                keys = file.keys()
            for key in keys:
                layer, _, branch = key.rpartition('.')
                layers.setdefault(layer, {})[branch] = file.get_tensor(key)
            return layers, metadata
    except (SafetensorError, ValueError, AttributeError, TypeError) as e:
        raise ValueError(f'{path!r} must be a safetensors file of scales: {e}') from e


def _read_released(path: str) -> Tuple[Layers, Mapping[str, str]]:
    try:
        state_dict = read_state_dict(path, use_ema=False)
    except (RuntimeError, TypeError) as e:
        raise ValueError(str(e)) from e
    layers: Dict[str, Dict[str, torch.Tensor]] = {}
    for key, value in state_dict.items():
        match = _RELEASED_VGG.fullmatch(key) or _RELEASED_GHOST.fullmatch(key)
        if match and match['scale'] in _RELEASED_BRANCHES:
            layers.setdefault(_layer(match), {})[_RELEASED_BRANCHES[match['scale']]] = value
    # without an identity, cheap_operation.1 is the BatchNorm of a RepGhostNet
    layers = {n: branches for n, branches in layers.items() if 'ghost' not in n or 'identity' in branches}
    if not layers:
        raise ValueError(
            f'{path!r} must hold scales in a released layout, of RepOpt-VGG (stage1.0.scale_conv.weight, ...) or '
            'RepOpt-GhostNet (blocks.0.0.ghost1.fusion_scale.weight, ...).')
    return layers, {'source': os.path.basename(path)}


def _layer(released: 're.Match[str]') -> str:
    if released.re is _RELEASED_GHOST:
        return f'{released["ghost"]}.cheap_operation.0'
    stage = int(released['stage'])
    return f'stages.{stage - 1}.{released["block"]}.conv.0' if stage else 'stem.conv.0'
