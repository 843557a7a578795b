"""Training and eval mode."""
import contextlib
from typing import Iterator

import torch.nn as nn


@contextlib.contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module of a model on exit, including modules that were replaced in the meantime."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
