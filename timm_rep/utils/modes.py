"""Training and eval mode."""
import contextlib
from typing import Iterator

import torch.nn as nn


@contextlib.contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Give all modules of a model their present mode again at the end, those that are replaced meanwhile included."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
