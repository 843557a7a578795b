"""NaFlex models: batches of patches, and tokens that are padding by the attention masks of the blocks around FFNs.

The argument of a model is a tensor of images, or a dict of tensors with 'patches', 'patch_coord' and 'patch_valid'.
"""
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from .ffn import Ffn

__all__ = ['attended_tokens', 'image_count', 'image_hash', 'is_padded', 'take', 'watch_masks']


def image_count(images: Any) -> int:
    """Number of images in the argument of a model, a tensor or a dict of tensors."""
    return len(next(iter(images.values())) if isinstance(images, dict) else images)


def take(images: Any, part: slice, **kwargs) -> Any:
    """Some of the images in the argument of a model; kwargs: device, and dtype of floating-point numbers."""
    if isinstance(images, dict):
        return {name: take(x, part, **kwargs) for name, x in images.items()}
    if not images.is_floating_point():
        kwargs.pop('dtype', None)
    return images[part].to(**kwargs) if kwargs else images[part]


def image_hash(images: Any, index: int) -> int:
    """A hash of one of the images, without padding."""
    if isinstance(images, dict):
        valid = images['patch_valid'][index].bool()
        parts = [images[name][index][valid] for name in ('patches', 'patch_coord')]
    else:
        parts = [images[index]]
    return hash(tuple(part.contiguous().cpu().view(torch.uint8).numpy().tobytes() for part in parts))


def is_padded(images: Any) -> bool:
    """Whether some of the patches in the argument of a model are padding."""
    return isinstance(images, dict) and not images['patch_valid'].all()


def attended_tokens(attn_mask: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Tokens that at least one query attends to; the others are padding.

    Args:
        attn_mask: Mask of attention (N, heads or 1, queries, tokens): bool, or additive with the least value of its
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
    """Call a function with the attended tokens before each forward pass of the block around an FFN.

    Args:
        model: The model.
        ffns: FFNs of the model.
        callback: Function of the FFN and the result of :func:`attended_tokens` for the block's ``attn_mask``.

    Returns:
        Handles of the hooks.
    """
    def hook(ffn: Ffn, block: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        callback(ffn, attended_tokens(kwargs.get('attn_mask')))

    return [
        model.get_submodule(ffn.name.rpartition('.')[0]).register_forward_pre_hook(
            lambda *args, ffn=ffn: hook(ffn, *args), with_kwargs=True)
        for ffn in ffns]
