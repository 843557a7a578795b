"""The default process group."""
from typing import Tuple

import torch


def world_size_and_rank() -> Tuple[int, int]:
    """Number of processes in the default process group and index of this one, (1, 0) without a group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0
