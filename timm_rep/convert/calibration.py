"""Calibration images: the part of each batch that this process runs, the held-out images, the tokens of the fits.

The argument of a model is a tensor of images, or for NaFlexViT a dict with 'patches', 'patch_coord' and 'patch_valid',
of whose patches some may be padding.
"""
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from timm_rep.utils.distributed import world_size_and_rank

from .ffn import Ffn
from .residual import Probe, image_count

# every HELD_OUT-th distinct image is held out, if that gives at least MIN_HELD_OUT
HELD_OUT, MIN_HELD_OUT = 5, 4
# largest number of batches that wait in the model at the same time, each in a thread
_MAX_BATCHES = 64


def take(images: Any, part: slice, **kwargs: Any) -> Any:
    """Slice a model input (tensor or NaFlex dict); kwargs go to Tensor.to(), dtype for floating-point tensors only."""
    if isinstance(images, dict):
        return {name: take(x, part, **kwargs) for name, x in images.items()}
    if not images.is_floating_point():
        kwargs.pop('dtype', None)
    images = images[part].to(**kwargs) if kwargs else images[part]
    return images.clone() if images.is_inference() else images  # autograd refuses inference tensors


def is_padded(images: Any) -> bool:
    """Whether some of the patches in the argument of a model are padding."""
    return isinstance(images, dict) and not images['patch_valid'].all()


def _hash(images: Any, index: int) -> int:
    """A hash of one of the images, without padding."""
    parts = [images]
    if isinstance(images, dict):
        valid = images['patch_valid'][index].bool()
        parts, index = [images['patches'][index], images['patch_coord'][index]], valid
    return hash(tuple(part[index].contiguous().cpu().view(torch.uint8).numpy().tobytes() for part in parts))


class Share(NamedTuple):
    """The part of a batch that this process runs.

    Attributes:
        batch: Index of the batch.
        size: Images of the batch, of all processes.
        part: Slice of the batch that this process runs.
        x: The images of this part, on the model's device and in its dtype.
        held_out: Whether each image of this part is held out.
    """
    batch: int
    size: int
    part: slice
    x: Any
    held_out: torch.Tensor


class CalibrationImages:
    """The calibration images of all processes.

    Attributes:
        count: Number of images.
        unique: Number of distinct images.
        batches: Number of batches.
        shares: The parts of the batches that this process runs, without empty ones.
    """

    def __init__(self, batches: Sequence[Any], like: torch.Tensor):
        """
        Args:
            batches: Batches of images.
            like: Tensor of the model's device and dtype.
        """
        if len(batches) > _MAX_BATCHES and all(isinstance(batch, torch.Tensor) for batch in batches) and len(
                {(batch.shape[1:], batch.dtype) for batch in batches}) == 1:
            all_images = torch.cat(list(batches))
            batches = all_images.split(math.ceil(len(all_images) / _MAX_BATCHES))
        sizes = [image_count(batch) for batch in batches]
        self.batches, self.count = len(batches), sum(sizes)
        self.world_size, self.rank = world_size_and_rank()
        if max(sizes) < self.world_size:
            raise ValueError(
                f'Expected a batch with an image for each of {self.world_size} processes, but the largest has '
                f'{max(sizes)}.')
        # duplicates must end up on the same side of the split
        first: Dict[int, int] = {}
        groups = [
            first.setdefault(_hash(batch, i), len(first))
            for size, batch in zip(sizes, batches) for i in range(size)]
        self.unique = len(first)
        held_out = torch.tensor(groups, device='cpu') % HELD_OUT == HELD_OUT - 1
        held_out &= self.unique // HELD_OUT >= MIN_HELD_OUT
        self._first, self._like = batches[0], dict(device=like.device, dtype=like.dtype)
        part = slice(self.rank, None, self.world_size)
        self.shares = [
            Share(i, size, part, take(batch, part, **self._like), held[part])
            for i, (size, batch, held) in enumerate(zip(sizes, batches, held_out.split(sizes))) if size > self.rank]

    def first(self, count: int) -> Any:
        """The first images of the first batch, as the model takes them."""
        return take(self._first, slice(count), **self._like)


class TokenSampler:
    """Selects the tokens of each image that FFNs are fitted to: prefix tokens first, then a random sample of others.

    The choice depends only on the position of an image in the batches, so it is the same in every pass and process.
    Padding is not selected.

    Attributes:
        attended: Tokens that are not padding, (images, tokens), by the name of an FFN and the index of a batch.
    """

    def __init__(self, probes: Dict[str, Probe], counts: Dict[str, int]):
        """
        Args:
            probes: Result of :func:`timm_rep.convert.residual.probe`, by FFN.
            counts: Number of tokens to select per image and call, by FFN.
        """
        self.probes, self.counts = probes, counts
        self.attended: Dict[Tuple[str, int], torch.Tensor] = {}
        self._chosen: Dict[Tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, name: str, share: Share, tokens: int) -> torch.Tensor:
        """Indices of the selected rows in the token matrix, of this length, that an FFN receives in one call."""
        images = image_count(share.x)
        n = tokens // images
        attended = self.attended.get((name, share.batch))
        prefix, used = self.probes[name].prefix_tokens, min(self.counts[name], n)
        key = share.batch, n, used, prefix, None if attended is None else name
        if key not in self._chosen:
            generator = torch.Generator().manual_seed(share.batch)
            scores = torch.rand(share.size, n, generator=generator, dtype=torch.float32, device='cpu')
            scores[:, :prefix] += 1
            scores = scores[share.part]
            if attended is not None and attended.shape == scores.shape:
                scores.masked_fill_(~attended.cpu(), -1)
            elif is_padded(share.x):
                raise ValueError(
                    f'Expected images without padding, but {name} sees padded patches, and its block is called without '
                    'an attn_mask of its tokens. Nothing was changed.')
            best = scores.topk(used)
            rows = best.indices + n * torch.arange(images, device='cpu')[:, None]
            self._chosen[key] = rows[best.values >= 0].sort().values
        return self._chosen[key]

    def take(self, name: str, share: Share, x: torch.Tensor) -> torch.Tensor:
        """The selected rows of such a matrix."""
        return x[self(name, share, len(x)).to(x.device)]

    def held_out(self, name: str, share: Share, tokens: int) -> torch.Tensor:
        """Whether each of the selected rows is of a held-out image."""
        return share.held_out[self(name, share, tokens) // (tokens // image_count(share.x))]


def attended_tokens(attn_mask: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Tokens that at least one query attends to; the others are padding.

    Args:
        attn_mask: Attention mask (N, heads or 1, queries, tokens): bool, or additive with the least value of its
            dtype or -inf at masked positions. None without a mask.

    Returns:
        Bool tensor (N, tokens), None without a mask.
    """
    if attn_mask is None:
        return None
    if attn_mask.ndim != 4:
        raise ValueError(f'attn_mask must have the shape (N, heads, queries, tokens), got {tuple(attn_mask.shape)}.')
    if attn_mask.dtype != torch.bool:
        attn_mask = attn_mask > torch.finfo(attn_mask.dtype).min
    return attn_mask.any(1).any(1)


def watch_masks(
        model: nn.Module,
        ffns: Sequence[Ffn],
        callback: Callable[[Ffn, Optional[torch.Tensor]], None],
) -> List[RemovableHandle]:
    """Call a function with the attended tokens before each forward pass of the block around an FFN."""
    def hook(ffn: Ffn, block: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        callback(ffn, attended_tokens(kwargs.get('attn_mask')))

    return [
        model.get_submodule(ffn.name.rpartition('.')[0]).register_forward_pre_hook(
            lambda *args, ffn=ffn: hook(ffn, *args), with_kwargs=True)
        for ffn in ffns]
