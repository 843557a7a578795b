"""Model folders: timm's config.json with the sha256 of every other file, weights, and scales."""
import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from timm.models._hub import save_config_for_hf  # save_for_hf() writes contiguous weights in their own dtype only
from torch.utils._pytree import tree_leaves

from timm_rep.convert.record import is_folded, is_timm_model
from timm_rep.scales import Scales, attached_scales
from timm_rep.scales.files import SCALES_IN_FOLDER, SCALES_NAME
from timm_rep.utils.atomic import replacing_files
from timm_rep.utils.checkpoints import write_safetensors
from timm_rep.utils.files import StrPath, read_config
from timm_rep.utils.labels import recorded_labels
from timm_rep.utils.modes import default_dtype
from timm_rep.utils.profiling import model_input_size

from ._repository import CONFIG_NAME, WEIGHTS_NAME, ModelRepository, read_folder, sha256


def split_name(folder: StrPath) -> Tuple[str, str]:
    """Split the name of a folder, ``repa_any.cifar10``, into model and tag; ValueError if it is not MODEL.TAG."""
    variant, _, tag = Path(folder).resolve().name.partition('.')
    if not tag or not timm.is_model(variant):
        raise ValueError(
            f'The name of a published folder must be MODEL.TAG, as in repa_any.cifar10, got {str(folder)!r}'
            + (f': timm has no model {variant!r}.' if tag else '.'))
    return variant, tag


def save_folder(
        model: nn.Module,
        folder: StrPath,
        *,
        model_args: Optional[Mapping[str, Any]] = None,
        scales: Optional[Scales] = None,
        label_names: Optional[Sequence[str]] = None,
        tag: Optional[str] = None,
        half: bool = False,
        extra: Optional[Callable[[Path], None]] = None,
        outdated: Iterable[Path] = (),
) -> None:
    """Write a folder that ``timm.create_model('local-dir:FOLDER', pretrained=True)`` and transformers' AutoModel load.

    Unless ``half``, the folder is loaded and its outputs compared with the model's before its files replace earlier
    ones. Other files of the folder stay.

    Args:
        model: Model of this package or of timm.
        folder: Folder, created if it does not exist.
        model_args: Arguments of ``create_model`` that determine the structure. Default: those that timm recorded.
        scales: Scales of the model's GradMults, to train it further. Default: none; the scales of
            an earlier model in the folder are removed.
        label_names: Names of the classes, by index. Default: from the model's pretrained_cfg, if it has any.
        tag: Tag of the weights, as in MODEL.TAG.
        half: Write parameters as float16; the statistics of a BatchNorm stay float32.
        extra: Called with the temporary folder before its files replace earlier ones, to write further files.
        outdated: Files of the folder, made from earlier weights, to remove.

    Raises:
        OSError: The folder cannot be written to.
        OverflowError: A parameter is too large for float16.
        ValueError: ``create_model`` cannot build the model from config.json. In all cases, nothing is written.
    """
    with replacing_files(folder, outdated=[*outdated, *_earlier_scales(Path(folder))]) as draft:
        write_model(model, draft, model_args=model_args, scales=scales, label_names=label_names, tag=tag, half=half)
        if not half:
            dtype = next(model.parameters()).dtype
            with default_dtype(torch.promote_types(dtype, torch.float32)):
                rebuilt = load_folder(draft)
            _check_rebuilt(model, rebuilt.to(dtype))
        if extra is not None:
            extra(draft)


def _earlier_scales(folder: Path) -> List[Path]:
    try:
        recorded = read_folder(folder).config.get('sha256') or {}
    except (FileNotFoundError, RuntimeError):  # it holds no model
        return []
    return [folder / SCALES_NAME] if SCALES_NAME in recorded else []


def scales_of(model: nn.Module) -> Optional[Scales]:
    """The scales of a model's GradMults, to train it further; None for a folded model, or one without scales."""
    return None if is_folded(model) else attached_scales(model)


def write_model(
        model: nn.Module,
        folder: Path,
        *,
        model_args: Optional[Mapping[str, Any]] = None,
        scales: Optional[Scales] = None,
        label_names: Optional[Sequence[str]] = None,
        tag: Optional[str] = None,
        half: bool = False,
) -> None:
    """Write the files of :func:`save_folder`, without a check, to a temporary folder."""
    tensors = dict(model.state_dict())
    if half:
        tensors.update(_halved(model))
    write_safetensors(tensors, folder / WEIGHTS_NAME, metadata={'format': 'pt'})  # transformers asks for it
    hashes = {WEIGHTS_NAME: sha256(folder / WEIGHTS_NAME)}
    if scales is not None:
        scales.save(folder / SCALES_NAME)
        hashes[SCALES_NAME] = sha256(folder / SCALES_NAME)
    config = _config(model, folder, model_args, scales is not None, label_names, tag)
    _write_config(folder, {**config, 'sha256': hashes})


def _config(
        model: nn.Module,
        folder: Path,
        model_args: Optional[Mapping[str, Any]] = None,
        has_scales: bool = False,
        label_names: Optional[Sequence[str]] = None,
        tag: Optional[str] = None,
) -> Dict[str, Any]:
    """Contents of timm's config.json for a model, completed. Side effect: timm's version is written to the folder."""
    check_timm_model(model)
    # timm writes num_classes and global_pool of the model: reset_classifier() may have changed them since its creation
    args = {k: v for k, v in getattr(model, '_model_args', {}).items() if k not in ('num_classes', 'global_pool')}
    args.update(model_args or {})
    if has_scales:
        args['scales'] = SCALES_IN_FOLDER
    if is_folded(model) and not is_timm_model(model.pretrained_cfg['architecture']):
        args['reparameterized'] = True
        args.pop('scales', None)
    for name, value in args.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as e:
            raise ValueError(
                f'The model argument {name} must be a JSON value to be written to config.json, got {value!r}.') from e
    if label_names is None:
        label_names = recorded_labels(model)
    labels = {'label_names': list(label_names)} if label_names else None
    # not a str: timm 1.0.26 writes by Path.open()
    save_config_for_hf(model, folder / CONFIG_NAME, model_args=args, model_config=labels)
    config = read_config(folder / CONFIG_NAME)
    config['pretrained_cfg']['input_size'] = list(model_input_size(model))
    if tag is not None:
        config['pretrained_cfg']['tag'] = tag
    config['model_args'] = {**config.get('model_args', {}), **args}
    # num_classes is at the top level; in model_args too, transformers would pass it to create_model() twice
    config['model_args'].pop('num_classes', None)
    return config


def check_timm_model(model: nn.Module) -> None:
    """Raise ValueError unless config.json can describe a model."""
    if not (getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or not hasattr(model, 'num_classes'):
        raise ValueError(
            f'Expected a timm model, but got {type(model).__name__}, which config.json cannot describe: create it with '
            'timm.create_model(), without features_only.')


@torch.no_grad()
def _check_rebuilt(model: nn.Module, rebuilt: nn.Module) -> None:
    """Compare a model, in eval mode on the CPU, with the model built from its config.json by their outputs."""
    generator, size = torch.Generator().manual_seed(0), model_input_size(model)
    images = torch.randn(2, *size, generator=generator, dtype=torch.float32, device='cpu')
    model = copy.deepcopy(model).cpu().eval()
    expected, found = (tree_leaves(m(images.to(next(m.parameters()).dtype))) for m in (model, rebuilt.eval()))
    is_equal = len(expected) == len(found) and all(
        x.shape == y.shape and torch.allclose(x.float(), y.float(), rtol=1e-3, atol=1e-4 * x.abs().max().item())
        for x, y in zip(expected, found))
    if not is_equal:
        raise ValueError(
            f'{type(model).__name__} must be built by timm.create_model() from its arguments, but the model built from '
            'them gives different outputs: it was changed after its creation, by a hook or a replaced layer.')


def _first_places(model: nn.Module) -> Dict[str, str]:
    """Names of the modules of a model, with the first name of each."""
    first: Dict[nn.Module, str] = {}
    return {name: first.setdefault(m, name) for name, m in model.named_modules(remove_duplicate=False)}


def check_saveable(model: nn.Module) -> None:
    """Check, before any long work, that :func:`save_folder` can describe a model: ``create_model`` builds it again.

    Raises ValueError if an argument is not a JSON value, or the model was changed after its creation.
    """
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder), _config(model, Path(folder)))
        rebuilt = timm.create_model(f'local-dir:{folder}')
    state_dict, other = model.state_dict(), rebuilt.state_dict()
    shapes, others = ({(name, value.shape) for name, value in x.items()} for x in (state_dict, other))
    differing = sorted({name for name, _ in shapes ^ others})
    if differing:
        raise ValueError(
            f'{type(model).__name__} must be built by timm.create_model() from its arguments, which timm records since '
            f'1.0.31, but has other tensors than the model built from them: {", ".join(differing[:5])}.')
    places = [_first_places(m) for m in (model, rebuilt)]
    shared = [name for name, first in places[0].items() if places[1].get(name, first) != first]
    if shared:
        raise ValueError(
            f'{type(model).__name__} must be built by timm.create_model() from its arguments, but {shared[0]} is the '
            f'same module as {places[0][shared[0]]}, which it is not in the model built from them: assign a copy.')
    rebuilt.load_state_dict({name: value.cpu() for name, value in state_dict.items()})
    _check_rebuilt(model, rebuilt.to(next(model.parameters()).dtype))


def load_folder(folder: StrPath, **kwargs: Any) -> nn.Module:
    """Create the model of a folder with its weights, in eval mode.

    Args:
        folder: Folder with config.json and weights.
        kwargs: Further arguments of ``timm.create_model``.

    Raises:
        FileNotFoundError, RuntimeError: config.json or the file of weights is missing, or cannot be read.
    """
    architecture = read_folder(folder).config['architecture']  # timm's errors do not name the file
    if not timm.is_model(architecture):
        raise RuntimeError(
            f"{str(Path(folder) / CONFIG_NAME)!r}: 'architecture' must be the name of a timm model, got "
            f'{architecture!r}: import the package that has it.')
    return timm.create_model(f'local-dir:{os.fspath(folder)}', pretrained=True, **kwargs).eval()


def _halved(model: nn.Module) -> Dict[str, torch.Tensor]:
    halved = {name: value.detach().half() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        if not torch.isfinite(halved[name]).all() and torch.isfinite(value).all():
            raise OverflowError(
                f'{name} must be in the range of float16, got {value.abs().max().item():g}: leave out half.')
    return halved


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    temporary = folder / f'.{CONFIG_NAME}'
    temporary.write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    temporary.replace(folder / CONFIG_NAME)


def write_hashes(folder: StrPath) -> None:
    """Write the sha256 of every file of the folder, except hidden ones, into its config.json.

    Raises:
        FileNotFoundError, RuntimeError: config.json is missing, or cannot be read.
        ValueError: The folder has subfolders, or links to files elsewhere.
    """
    repo = read_folder(folder)
    hashes = {name: sha256(repo.folder / name) for name in published_files(repo.folder)}
    config = {**repo.config, 'sha256': hashes}
    config.pop('transformers_version', None)  # its hashes would be taken for those of other files
    if SCALES_NAME in hashes:
        config['model_args'] = {**repo.model_args, 'scales': SCALES_IN_FOLDER}
    _write_config(repo.folder, config)


def published_files(folder: Path) -> List[str]:
    """Names of the files of a published folder, except config.json and hidden ones; refuses subfolders and links."""
    paths = sorted(path for path in folder.iterdir() if path.name != CONFIG_NAME and not path.name.startswith('.'))
    for path in paths:
        if not path.is_file() or path.resolve().parent != folder.resolve():
            raise ValueError(
                'A published folder must hold files only, and no links to files elsewhere, got '
                f'{os.fspath(path)!r}: remove it, or replace the link by the file.')
    return [path.name for path in paths]


def verify_folder(folder: StrPath) -> ModelRepository:
    """Check that a folder is complete and unchanged since ``timm-rep card`` wrote it.

    Raises:
        FileNotFoundError: config.json, the file of weights, or a file that config.json names is missing.
        RuntimeError: A file differs from its hash in config.json, or has none there.
        ValueError: The folder is not named after its model, or has subfolders or links to files elsewhere.
    """
    variant, _ = split_name(folder)
    repo = read_folder(folder)
    if repo.config['architecture'] != variant:
        raise ValueError(f'Expected a {variant} in {os.fspath(folder)!r}, but got a {repo.config["architecture"]}.')
    for name in {WEIGHTS_NAME, *repo.hashes}:
        repo.file(name)
    missing = [name for name in published_files(repo.folder) if name not in repo.hashes]
    if missing:
        raise RuntimeError(
            f'{CONFIG_NAME} in {os.fspath(folder)!r} must have the sha256 of {", ".join(missing)}: run timm-rep card '
            'on the folder.')
    return repo
