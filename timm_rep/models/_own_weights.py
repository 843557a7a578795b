"""Whether weights are of a converted model of timm, or of the base that it was converted from."""
import contextlib
import sys
from typing import Any, Callable, Collection, Dict, Mapping, Optional, Set

import timm
import torch
import torch.nn as nn
from timm.models import model_entrypoint

from timm_rep.hub import published_architecture
from timm_rep.utils.checkpoints import read_state_dict, state_dict_of

FilterFn = Callable[[Dict[str, Any], nn.Module], Dict[str, Any]]


def filter_of(base: str) -> Optional[FilterFn]:
    """timm's ``checkpoint_filter_fn`` of a base, which renames tensors and resizes position embeddings, or None."""
    return getattr(sys.modules[model_entrypoint(base).__module__], 'checkpoint_filter_fn', None)


def are_own_weights(
        variant: str,
        create: Callable[..., nn.Module],
        own_args: Collection[str],
        overlay: Mapping[str, Any],
        reparameterized: bool = False,
        cache_dir: Optional[str] = None,
) -> bool:
    """Whether a ``pretrained_cfg_overlay`` names weights of the converted model, and not of its base.

    Args:
        variant: Name of the architecture of the converted model.
        create: Function that creates the converted model, with further arguments if given.
        own_args: Names of arguments of the converted model that its base does not take.
        overlay: The overlay.
        reparameterized: Whether the folded model is to be created.
        cache_dir: Folder of the Hub's cache. Default: the client's.

    Raises:
        ValueError: The weights are of the model before folding, but the folded one is to be created.
        RuntimeError: The weights are of neither model, or of another structure of the converted one.
        OSError: The file does not exist, or the Hub cannot be reached.
    """
    given, file, repo_id = (overlay.get(key) for key in ('state_dict', 'file', 'hf_hub_id'))
    if not given and not file:
        return bool(repo_id) and published_architecture(str(repo_id), cache_dir) == variant
    source = 'the state_dict of pretrained_cfg_overlay' if given else repr(file)
    try:
        state_dict = state_dict_of(given) if given else read_state_dict(str(file))
    except TypeError:  # nested in a way that timm's filter of the base may know; own checkpoints are not
        return False

    target = create(device='meta')
    name = target._model_args['base']
    base = timm.create_model(
        name, device='meta', **{k: v for k, v in target._model_args.items() if k not in own_args})
    base_keys = _keys(base)

    def is_of(model: nn.Module) -> bool:
        # the base can have all tensors of the converted model, and those of its branches
        own_keys = _keys(model)
        return own_keys <= state_dict.keys() and not (base_keys - own_keys) & state_dict.keys()

    if is_of(target):
        if reparameterized:
            raise ValueError(
                f'reparameterized must be False with {source}, weights of {variant} before folding: fold the model by '
                'model.reparameterize().')
        return True
    model = create(device='meta', reparameterized=True) if reparameterized else target
    if is_of(model):
        return True
    if _is_of_base(state_dict, base, _keys(target), filter_of(name)):
        return False
    _refuse_structure(model, state_dict)
    raise RuntimeError(f'Expected weights of {variant} or of its base, {name}, but {source} has those of neither.')


def _keys(model: nn.Module) -> Set[str]:
    """Names of the tensors of a model, without its classifier, which fine-tuning replaces."""
    names = model.pretrained_cfg.get('classifier') or ()
    classifiers = tuple(f'{name}.' for name in ([names] if isinstance(names, str) else names))
    return {name for name in model.state_dict() if not name.startswith(classifiers)}


def _is_of_base(
        state_dict: Dict[str, torch.Tensor],
        base: nn.Module,
        own_keys: Set[str],
        filter_fn: Optional[FilterFn],
) -> bool:
    base_keys = _keys(base)
    # where the models differ, everything must be there; elsewhere timm decides, which can start a norm anew
    changed = tuple(f'{name.rsplit(".", 2)[0]}.' for name in base_keys ^ own_keys)
    needed = {name for name in base_keys if name.startswith(changed)}
    found = [state_dict.keys()]
    if filter_fn is not None and not needed <= state_dict.keys():
        with contextlib.suppress(Exception):  # filters raise many types for checkpoints that they do not know
            found.append(filter_fn(dict(state_dict), base).keys())
    return any(needed <= keys for keys in found)


def _refuse_structure(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Raise the RuntimeError of a converted model that knows which of its other structures the weights have."""
    try:
        model.load_state_dict(state_dict, strict=False, assign=True)
    except RuntimeError as e:
        if not str(e).startswith('Error(s) in loading state_dict'):
            raise
