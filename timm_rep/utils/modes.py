"""Training and eval mode, and torch's default dtype."""
import contextlib
from typing import Iterable, Iterator

import torch
import torch.nn as nn


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in a dtype, whatever torch's default is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module of a model on exit, including modules that were replaced in the meantime."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def set_mode_of_others(module: nn.Module, kept: Iterable[nn.Module], training: bool) -> None:
    """Set the mode of the modules in a module that are not among ``kept``, such as frozen BatchNorms."""
    kept = set(kept)
    for part in module.modules():
        if part not in kept:
            part.training = training
