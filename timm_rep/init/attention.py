"""The order of heads and projections along the axes of timm's attention layers."""
from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.layers import MultiQueryAttention2d
from timm.layers.halo_attn import HaloAttn

# layers and parameters of an attention, and the projections along their first axis
_PROJECTIONS = {
    'qkv': 'qkv', 'in_proj_weight': 'qkv', 'in_proj_bias': 'qkv', 'kv': 'kv', 'qk': 'qk',
    **{name: name[0] for name in ('q', 'k', 'v', 'q_bias', 'k_bias', 'v_bias', 'q_proj', 'k_proj', 'v_proj')},
    **{name: name[1] for name in ('wq', 'wk', 'wv')},
    **{f'{name}.proj': name[0] for name in ('query', 'key', 'value')},  # MultiQueryAttention2d, also with convolutions
}
# layers whose inputs are the outputs of the heads
_OUTPUTS = ('proj', 'out_proj', 'o_proj', 'output.proj')


def fused_projections(name: str) -> int:
    """Number of projections along the first axis of a tensor, by its name: 3 for a qkv, 2 for a kv or qk, otherwise 1.
    """
    return next((len(_PROJECTIONS[part]) for part in name.split('.') if len(_PROJECTIONS.get(part, '')) > 1), 1)


class AttentionLayout(NamedTuple):
    """Order of heads and projections along the axes of an attention's tensors.

    A projection is one of the letters q, k and v, or o for the outputs of the heads.

    Attributes:
        heads: Number of heads.
        head_first: Whether fused projections are ordered by head first, as in TinyViT and LeViT, instead of by
            projection first, as in ViT.
        widths: Channels of the queries and keys, and of the values, of a head; None if they follow from the tensor.
        fused: The projections of the layer ``qkv``.
        outputs: Layers, apart from the last projection, with an entry for each output channel of the heads.
        queries: Heads of queries that share a head of keys and values (grouped-query attention).
    """
    heads: int
    head_first: bool = False
    widths: Optional[Tuple[int, int]] = None
    fused: str = 'qkv'
    outputs: Tuple[str, ...] = ()
    queries: int = 1

    @classmethod
    def of(cls, module: nn.Module) -> Optional['AttentionLayout']:
        """The layout of an attention of timm or torch, None for other modules."""
        heads = next((n for n in (getattr(module, a, None) for a in ('num_heads', 'heads')) if isinstance(n, int)), 0)
        if not heads:
            return None
        key, value = getattr(module, 'key_dim', None), getattr(module, 'val_dim', None)
        # LeViT, TinyViT, EfficientFormer
        widths = (key, value) if isinstance(key, int) and isinstance(value, int) else None
        if isinstance(module, HaloAttn):
            widths = module.dim_head_qk, module.dim_head_v
        # timm's own attentions and EVA's; other layers of these names are elsewhere (attn_pool.norm)
        outputs: Tuple[str, ...] = ()
        if hasattr(module, 'q_norm') and not hasattr(module, 'latent'):
            outputs = ('norm', 'gate')
        if isinstance(getattr(module, 'attn', None), nn.Linear):
            outputs = ('attn',)  # VOLO: the weights of each head's window
        return cls(
            heads,
            head_first=widths is not None or getattr(module, 'head_first', False) is True,
            widths=widths,
            outputs=outputs,
            fused='kv' if getattr(module, 'use_global', False) is True else 'qkv',  # GCViT: queries of the image
            queries=heads if isinstance(module, MultiQueryAttention2d) else getattr(module, 'num_kv_groups', 1),
        )

    def projections(self, parts: Sequence[str], dim: int) -> str:
        """The projections along an axis of a tensor, '' if it has none.

        Args:
            parts: Name of the tensor within the attention, split at the dots.
            dim: The axis.
        """
        layers = parts[0], '.'.join(parts[:2])
        if dim == 0:
            known = {**_PROJECTIONS, 'qkv': self.fused, **dict.fromkeys(self.outputs, 'o')}
            return next((known[layer] for layer in layers if layer in known), '')
        return 'o' if dim == 1 and {*layers} & {*_OUTPUTS} and parts[-1] == 'weight' else ''

    def positions(self, projections: str, length: int) -> Optional[List[torch.Tensor]]:
        """Positions along an axis of each projection; None if the length does not fit.

        Each is (heads of keys and values, heads that share one of these, channels of a head).
        """
        counts = [self.heads // (1 if projection in 'qo' else self.queries) for projection in projections]
        if self.widths is None:
            sizes = [length // sum(counts)] * len(projections)
        else:
            sizes = [self.widths[projection in 'vo'] for projection in projections]
        if sum(count * size for count, size in zip(counts, sizes)) != length:
            return None
        every = torch.arange(length)
        if self.head_first:
            parts = every.reshape(self.heads, -1).split(sizes, dim=1)
        else:
            parts = every.split([count * size for count, size in zip(counts, sizes)])
        return [part.reshape(self.heads // self.queries, -1, size) for part, size in zip(parts, sizes)]

    def scaled(self, projections: str, length: int, other: int, queries: int) -> 'AttentionLayout':
        """The layout of a larger attention, guessed from the length of one axis in this one and in the larger one.

        Its heads are assumed to be as wide, if that divides the axis; otherwise there are as many.

        Args:
            projections: The projections along the axis.
            length: Entries along the axis in this attention.
            other: Entries along the axis in the larger one.
            queries: ``queries`` of the larger one.
        """
        groups = self.heads // self.queries
        if projections[0] in 'qo':  # to the length of the keys, on which all projections have to agree
            length, other = length // self.queries, other // queries
        width = length // groups
        if width and other % width == 0:
            return self._replace(heads=other // width * queries, queries=queries)
        return self._replace(heads=groups * queries, widths=None, queries=queries)
