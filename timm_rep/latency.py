"""Latency of a model by part: patch embedding, token mixers, FFNs, head (RePaFormer, figure 3)."""
import statistics
import time
from typing import Any, Dict, Iterator, List, Mapping, Tuple

import torch
import torch.nn as nn

from timm_rep.convert import find_ffns
from timm_rep.layers import RePaMlp, RePaMlpDeploy
from timm_rep.utils.profiling import synchronize

__all__ = ['PARTS', 'profile_latency']

# of figure 3 of the RePaFormer paper, and the rest
PARTS = ('patch embedding', 'token mixers', 'FFNs', 'head')


def _blocks(model: nn.Module) -> Iterator[Tuple[nn.Module, nn.Module]]:
    """The blocks of a model, and what runs first in the FFN half of each."""
    for block in model.modules():
        for child in block.children():
            if isinstance(child, (RePaMlp, RePaMlpDeploy)):
                yield block, child
    for ffn in find_ffns(model):
        mlp = getattr(ffn.block, ffn.mlp)
        if mlp is not None and not isinstance(mlp, (RePaMlp, RePaMlpDeploy)):
            yield ffn.block, getattr(ffn.block, ffn.norm)


class _Stopwatch:
    """Passes through a model, timed part by part."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.marks: List[Tuple[str, Any]] = []
        blocks = list(_blocks(model))
        if not blocks:
            raise ValueError(f'{type(model).__name__} has no blocks of a token mixer and an FFN that are known here.')
        embed, mixer, ffn, _ = PARTS
        self.hooks = [
            handle for block, first in blocks for handle in (
                block.register_forward_pre_hook(lambda *args: self._mark(mixer)),
                first.register_forward_pre_hook(lambda *args: self._mark(ffn)),
                block.register_forward_hook(lambda *args: self._mark(embed)),
            )
        ]

    def _mark(self, part: str) -> None:
        if self.device.type == 'cuda':  # asynchronous: events keep the time there
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.device))
        else:
            synchronize(self.device)
            now = time.perf_counter()
        self.marks.append((part, now))

    def run(self, inputs: torch.Tensor) -> Dict[str, float]:
        """Seconds of one pass by part."""
        embed, *_, head = PARTS
        self.device, self.marks = inputs.device, []
        synchronize(self.device)
        self._mark(embed)
        self.model(inputs)
        self.marks[-1] = (head, self.marks[-1][1])  # what comes after the last block is no embedding
        self._mark('')
        synchronize(self.device)
        seconds = dict.fromkeys(PARTS, 0.)
        for (part, start), (_, end) in zip(self.marks, self.marks[1:]):
            seconds[part] += start.elapsed_time(end) / 1e3 if self.device.type == 'cuda' else end - start
        return seconds

    def close(self) -> None:
        for handle in self.hooks:
            handle.remove()


@torch.inference_mode()
def profile_latency(
        models: Mapping[str, nn.Module],
        inputs: torch.Tensor,
        rounds: int = 15,
        warmup: int = 3,
) -> Dict[str, Dict[str, float]]:
    """Where the time of a pass goes: patch embedding, token mixers, FFNs, head (RePaFormer, figure 3).

    Norms, layer scales and shortcuts count to the half of the block that they belong to, downsampling and positions to
    the embedding. The models take turns, and the median of the rounds counts, of each part by itself.

    Args:
        models: Models in eval mode on the device of the inputs, by name; RePaFormers, folded or not, and models of
            timm's that :func:`timm_rep.convert_to_repa` knows.
        inputs: One batch (N, C, H, W).
        rounds: Timed passes of each model.
        warmup: Passes before them.

    Returns:
        Milliseconds by part, by name.

    Raises:
        ValueError: A model has no blocks with an FFN that are known here, or rounds is not positive.
    """
    if rounds < 1:
        raise ValueError(f'rounds is the number of timed passes, 1 or more, got {rounds}.')
    watches: Dict[str, _Stopwatch] = {}
    passes: Dict[str, List[Dict[str, float]]] = {name: [] for name in models}
    try:
        for name, model in models.items():
            watches[name] = _Stopwatch(model)
        for i in range(warmup + rounds):
            for name, watch in watches.items():
                seconds = watch.run(inputs)
                if i >= warmup:
                    passes[name].append(seconds)
    finally:
        for watch in watches.values():
            watch.close()
    return {
        name: {part: 1e3 * statistics.median(seconds[part] for seconds in timed) for part in PARTS}
        for name, timed in passes.items()
    }
