"""Passes of calibration images through a model, and what its FFNs see in them."""
from typing import Any, Callable, Dict, Optional, Sequence

import torch
import torch.nn as nn

from .ffn import Ffn

__all__ = ['Recorder', 'wide']


class _AllSeen(Exception):
    """Ends a forward pass after the last FFN of interest."""


class Recorder:
    """Runs a model on images and hands input and hidden features of an FFN, (tokens, channels), to a function."""

    def __init__(self, model: nn.Module, batches: Sequence[torch.Tensor]):
        self.model, self.batches = model, batches
        self.like = next(model.parameters())

    def __call__(self, batch: torch.Tensor) -> Any:
        """The outputs of the model."""
        return self.model(batch.to(device=self.like.device, dtype=self.like.dtype))

    def run(
            self,
            ffns: Sequence[Ffn],
            see: Callable[[Ffn, torch.Tensor, torch.Tensor], None],
            calls: Optional[int] = None,
            batches: Optional[int] = None,
    ) -> None:
        """Call ``see(ffn, u, g)`` for every pass through an FFN.

        Args:
            ffns: FFNs to record.
            see: Function of the FFN, its input and its hidden features.
            calls: Number of passes through the FFNs after which the model need not go on; None to run it to its end.
            batches: Number of batches, all if None.
        """
        inputs: Dict[str, torch.Tensor] = {}
        count = 0

        def tokens(ffn: Ffn, x: torch.Tensor) -> torch.Tensor:
            x = x.movedim(1, -1) if ffn.use_conv else x
            return x.reshape(-1, x.shape[-1])

        def at_first(ffn: Ffn, x: torch.Tensor) -> None:
            inputs[ffn.name] = tokens(ffn, x).clone()  # the activation may work in place

        def at_last(ffn: Ffn, x: torch.Tensor) -> None:
            nonlocal count
            see(ffn, inputs.pop(ffn.name), tokens(ffn, x))
            count += 1
            if count == calls:
                raise _AllSeen

        hooks = [
            layer.register_forward_pre_hook(lambda _, args, ffn=ffn, record=record: record(ffn, args[0]))
            for ffn in ffns for layer, record in ((ffn.first, at_first), (ffn.last, at_last))
        ]
        try:
            for batch in self.batches[:batches]:
                count = 0
                try:
                    self(batch)
                except _AllSeen:
                    pass
        finally:
            for hook in hooks:
                hook.remove()


def wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in float64, on the CPU if its device has none."""
    return (x.cpu() if x.device.type == 'mps' else x).to(torch.float64)  # mps has no float64
