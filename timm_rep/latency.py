"""Latency of a model by part: patch embedding, token mixers, FFNs, head (RePaFormer, figure 3)."""
import statistics
import time
from typing import Any, Dict, List, Mapping, Tuple

import torch
import torch.nn as nn

from timm_rep.convert.ffn_classes import find_blocks
from timm_rep.utils.profiling import synchronize

__all__ = ['PARTS', 'profile_latency']

# figure 3 of the RePaFormer paper has the first three
PARTS = ('patch embedding', 'token mixers', 'FFNs', 'head')


class _Stopwatch:
    """Times the parts of a forward pass with hooks."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.marks: List[Tuple[str, Any]] = []
        blocks = list(find_blocks(model))
        if not blocks:
            raise ValueError(
                f'Expected blocks with a known FFN, but {type(model).__name__} has none: register their class with '
                'timm_rep.convert.register_block().')
        embed, mixer, mlp, _ = PARTS
        self.hooks = [
            handle for block in blocks for handle in (
                block.module.register_forward_pre_hook(lambda *args: self._mark(mixer)),
                getattr(block.module, block.norm).register_forward_pre_hook(lambda *args: self._mark(mlp)),
                block.module.register_forward_hook(lambda *args: self._mark(embed)),
            )
        ]

    def _mark(self, part: str) -> None:
        if self.device.type == 'cuda':  # kernels run asynchronously, so events on the stream measure the time
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
        self.marks[-1] = (head, self.marks[-1][1])  # the part after the last block is the head
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
    """Latency of a forward pass by part: patch embedding, token mixers, FFNs, head (RePaFormer, figure 3).

    Norms, layer scales and shortcuts are attributed to the token mixer or FFN they belong to. What is computed before
    the first block and between blocks counts as patch embedding: downsampling, position embeddings, and in hybrids such
    as MaxViT and MobileViT the stages of convolutions. The models take turns, and each part's latency is the median
    over the rounds.

    Args:
        models: Models in eval mode by name, on the device of the inputs: RePaFormers, folded or not, and timm models
            with blocks of a class registered with :func:`timm_rep.convert.register_block`.
        inputs: Batch of images (N, C, H, W).
        rounds: Number of timed passes of each model.
        warmup: Number of untimed passes of each model, before the timed ones.

    Returns:
        Milliseconds by part, by name of the model.

    Raises:
        ValueError: A model has no blocks with a known FFN, or rounds is less than 1.
    """
    if rounds < 1:
        raise ValueError(f'rounds must be an integer >= 1, got {rounds}.')
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
