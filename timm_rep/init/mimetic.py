"""Mimetic initialization, a baseline of the weight selection paper.

`Mimetic Initialization of Self-Attention Layers` - https://arxiv.org/abs/2305.09828
"""
from typing import Iterator, Optional, Tuple

import torch
import torch.nn as nn
from timm.layers import build_sincos2d_pos_embed
from timm.utils import unwrap_model

from .attention import AttentionLayout


def attentions(model: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """Names and modules of the attentions of a timm model with a ``qkv``, the queries of all heads first.

    Attentions whose inputs and outputs differ in width, and those with a different order of projections, are left out.
    """
    for name, module in model.named_modules():
        qkv, proj, layout = getattr(module, 'qkv', None), getattr(module, 'proj', None), AttentionLayout.of(module)
        if not (isinstance(qkv, nn.Linear) and isinstance(proj, nn.Linear) and hasattr(module, 'num_heads')):
            continue
        if layout is not None and not layout.head_first and (
                qkv.out_features == 3 * proj.in_features and qkv.in_features == proj.out_features):
            yield name, module


@torch.no_grad()
def attention_products(attention: nn.Module) -> Tuple[torch.Tensor, torch.Tensor]:
    """The weight products of a timm attention, for tokens x as rows: the query is ``x W_q``.

    Args:
        attention: A module with ``qkv``, ``proj`` and ``num_heads``.

    Returns:
        ``W_q W_k^T`` of each head (heads, C, C), and ``W_v W_proj`` summed over the heads (C, C).
    """
    heads, channels = attention.num_heads, attention.qkv.in_features
    q, k, v = attention.qkv.weight.detach().reshape(3, heads, -1, channels).unbind()
    return q.transpose(1, 2) @ k, v.reshape(-1, channels).T @ attention.proj.weight.detach().T


@torch.no_grad()
def mimetic_init_(
        model: nn.Module,
        qk: Tuple[float, float] = (0.7, 0.7),
        v_proj: Tuple[float, float] = (0.4, 0.4),
        pos_embed: bool = True,
        generator: Optional[torch.Generator] = None,
) -> nn.Module:
    """Initialize the attention of a Vision Transformer with the structure of pretrained ones, in place.

    With Z of independent entries N(0, 1 / C): ``W_q W_k^T`` of each head is the closest matrix of the head's rank to
    ``alpha Z + beta I``, and ``W_v W_proj = alpha Z - beta I``. The factors share the singular values equally. Biases
    are unchanged.

    Args:
        model: A timm model. Only the attentions that :func:`attentions` yields are initialized.
        qk: (alpha, beta) for queries and keys.
        v_proj: (alpha, beta) for values and projection.
        pos_embed: Replace a learned position embedding, (1, tokens, C) or (1, rows, columns, C) with the C channels of
            the first attention, by a sinusoidal one, with zeros for the tokens before the grid, as in the paper.
        generator: Random number generator on the CPU; torch's default one if None.

    Returns:
        The model.

    Raises:
        ValueError: The model has no such attention, one whose heads together are wider than its input, or a position
            embedding to replace whose channels are no multiple of 4 or whose grid is unknown. The model is unchanged.
    """
    inner = unwrap_model(model)
    found = dict(attentions(inner))
    if not found:
        raise ValueError(f'model must have an attention with a qkv, got {type(inner).__name__} without.')
    for name, attention in found.items():
        if attention.qkv.out_features > 3 * attention.qkv.in_features:
            raise ValueError(
                f'The heads of {name} together must be at most as wide as its input, got '
                f'{attention.qkv.out_features // 3} channels and an input of {attention.qkv.in_features}. Nothing was '
                'changed.')
    table = getattr(getattr(inner, 'embeds', inner), 'pos_embed', None) if pos_embed else None  # of a NaFlexViT
    channels = next(iter(found.values())).qkv.in_features
    if not isinstance(table, nn.Parameter) or table.dim() not in (3, 4) or table.shape[-1] != channels:
        table = None
    if table is not None and table.shape[-1] % 4:
        raise ValueError(
            f'model must have a number of channels that is a multiple of 4 for a sinusoidal position embedding, got '
            f'{table.shape[-1]}: pass pos_embed=False. Nothing was changed.')
    grid = getattr(getattr(inner, 'patch_embed', None), 'grid_size', None) or (0, 0)
    if table is not None and table.dim() == 4:
        grid, table = table.shape[1:3], table.view(1, -1, table.shape[3])
    if table is not None and not 0 < grid[0] * grid[1] <= table.shape[1]:
        raise ValueError(
            f'model must have a patch_embed with the grid_size of its {table.shape[1]} positions, got {grid}: pass '
            'pos_embed=False. Nothing was changed.')
    for attention in found.values():
        heads, channels = attention.num_heads, attention.qkv.in_features
        width = attention.qkv.out_features // 3 // heads
        factors = [_factors(channels, *qk, generator, width) for _ in range(heads)]
        q, k = (torch.cat(parts) for parts in zip(*factors))
        v, proj = _factors(channels, v_proj[0], -v_proj[1], generator, heads * width)
        attention.qkv.weight.copy_(torch.cat([q, k, v]))
        attention.proj.weight.copy_(proj.T)
    if table is not None:
        table.zero_()
        table[:, table.shape[1] - grid[0] * grid[1]:] = build_sincos2d_pos_embed(grid, table.shape[2]).to(table)
    return model


def _factors(
        channels: int,
        alpha: float,
        beta: float,
        generator: Optional[torch.Generator],
        rank: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Factors L and R (rank, channels): L^T R is the closest matrix of this rank to alpha Z + beta I."""
    z = torch.randn(channels, channels, generator=generator, dtype=torch.float32, device='cpu') / channels ** .5
    matrix = alpha * z + beta * torch.eye(channels, dtype=torch.float32, device='cpu')
    # the singular vectors on one side are enough: half the time of torch.linalg.svd()
    vectors = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -rank:]
    images = matrix @ vectors
    # not the eigenvalues, squares whose rounding exceeds those of the smallest singular values
    root = images.norm(dim=0).clamp(min=torch.finfo(matrix.dtype).tiny).sqrt()
    return (images / root).T, (vectors * root).T
