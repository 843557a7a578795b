"""Tokens that are padding: attention masks of the blocks around FFNs, as NaFlexViT passes them."""
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from torch.utils.hooks import RemovableHandle

from .ffn import Ffn

__all__ = ['attended_tokens', 'watch_masks']


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
