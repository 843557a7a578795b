"""Parameters and complexities published in the papers, and the counts of this package's models."""
from functools import cache
from typing import Any, Dict, NamedTuple, Optional, Tuple

import timm

from timm_rep.utils.profiling import Macs, count_macs, count_params

__all__ = ['PAPER_ROWS', 'SPEEDUPS', 'VANILLA', 'Count', 'PaperRow', 'count_row']


class PaperRow(NamedTuple):
    """One row of a table of the papers.

    Attributes:
        table: Number of the table.
        label: Name of the row.
        model: Name of the model in timm: one of this package, or a vanilla backbone.
        params: Published parameters, in millions.
        gmacs: Published complexity, in 1e9 multiply-accumulates.
        folded: Whether the row is about the deploy structure. Default: False.
        model_args: Further arguments of ``create_model``.
        paper: 'RePaFormer' (the default) or 'RepOptimizers'.
        note: Reason for a complexity that agrees with neither count; empty if it agrees with one.
    """
    table: int
    label: str
    model: str
    params: float
    gmacs: float
    folded: bool = False
    model_args: Dict[str, Any] = {}  # noqa: RUF012, never modified
    paper: str = 'RePaFormer'
    note: str = ''


# timm's ViT-Huge has patch size 14 and, by the default of its first tag, no classifier
_VIT_HUGE_16 = dict(patch_size=16, num_classes=1000)
_HEADLESS = dict(num_classes=0)
_POOLFORMER_S12 = 'table 1 lists 1.8 for the unfolded RePa-PoolFormer-s12, which has the same layers'

# For each RePaFormer, the vanilla backbone that table 2 compares it with, and arguments of create_model
VANILLA: Dict[str, Tuple[str, Dict[str, Any]]] = {
    **{f'repa_deit_{size}': (f'deit_{size}_patch16_224', {}) for size in ('tiny', 'small', 'base')},
    **{f'repa_vit_{size}': (f'vit_{size}_patch16_224', {}) for size in ('small', 'base', 'large')},
    'repa_vit_huge': ('vit_huge_patch14_224', _VIT_HUGE_16),
    **{f'repa_swin_{size}': (f'swin_{size}_patch4_window7_224', {}) for size in ('tiny', 'small', 'base')},
    **{f'repa_lvvit_{size}': (f'lvvit_{size}', {}) for size in 'sm'},
    **{f'repa_poolformer_{size}': (f'poolformer_{size}', {}) for size in ('s12', 's24', 's36', 'm36', 'm48')},
    **{f'repa_mixer_{size}': (f'mixer_{size}_224', {}) for size in ('s32', 's16', 'b32', 'b16', 'l32', 'l16')},
}

# Throughput gain of folded models over their vanilla backbones (table 2)
SPEEDUPS: Dict[str, float] = {
    'repa_deit_tiny': 0.326,
    'repa_deit_small': 0.544,
    'repa_deit_base': 0.675,
    'repa_vit_large': 0.668,
    'repa_vit_huge': 0.687,
    'repa_swin_tiny': 0.365,
    'repa_swin_small': 0.412,
    'repa_swin_base': 0.496,
    'repa_lvvit_s': 0.282,
    'repa_lvvit_m': 0.400,
    'repa_poolformer_s12': 0.570,
    'repa_poolformer_s24': 0.675,
    'repa_poolformer_s36': 0.785,
    'repa_mixer_b16': 0.748,
    'repa_mixer_l16': 0.892,
}

PAPER_ROWS = (
    PaperRow(1, 'RePa-DeiT-Tiny', 'repa_deit_tiny', 5.7, 1.1),
    PaperRow(1, 'RePa-DeiT-Tiny', 'repa_deit_tiny', 3.5, 0.6, folded=True),
    PaperRow(1, 'RePa-DeiT-Small', 'repa_deit_small', 22.1, 4.3),
    PaperRow(1, 'RePa-DeiT-Small', 'repa_deit_small', 13.2, 2.5, folded=True),
    PaperRow(1, 'RePa-DeiT-Base', 'repa_deit_base', 86.6, 16.9),
    PaperRow(1, 'RePa-DeiT-Base', 'repa_deit_base', 51.1, 10.6, folded=True),
    PaperRow(1, 'RePa-ViT-Large', 'repa_vit_large', 304.5, 59.8),
    PaperRow(1, 'RePa-ViT-Large', 'repa_vit_large', 178.4, 34.9, folded=True),
    PaperRow(1, 'RePa-ViT-Huge', 'repa_vit_huge', 632.5, 124.4),
    PaperRow(1, 'RePa-ViT-Huge', 'repa_vit_huge', 369.9, 72.6, folded=True),
    PaperRow(1, 'RePa-Swin-Tiny', 'repa_swin_tiny', 28.3, 4.4),
    PaperRow(1, 'RePa-Swin-Tiny', 'repa_swin_tiny', 17.5, 2.6, folded=True),
    PaperRow(1, 'RePa-Swin-Small', 'repa_swin_small', 49.7, 8.6),
    PaperRow(1, 'RePa-Swin-Small', 'repa_swin_small', 29.9, 5.1, folded=True),
    PaperRow(1, 'RePa-Swin-Base', 'repa_swin_base', 87.9, 15.2),
    PaperRow(1, 'RePa-Swin-Base', 'repa_swin_base', 52.8, 9.0, folded=True),
    PaperRow(1, 'RePa-LV-ViT-S', 'repa_lvvit_s', 26.2, 6.1),
    PaperRow(1, 'RePa-LV-ViT-S', 'repa_lvvit_s', 19.1, 4.7, folded=True),
    PaperRow(1, 'RePa-LV-ViT-M', 'repa_lvvit_m', 55.9, 11.9),
    PaperRow(1, 'RePa-LV-ViT-M', 'repa_lvvit_m', 40.1, 8.8, folded=True),
    PaperRow(1, 'RePa-PoolFormer-s12', 'repa_poolformer_s12', 11.9, 1.8),
    PaperRow(1, 'RePa-PoolFormer-s12', 'repa_poolformer_s12', 6.0, 0.8, folded=True),
    PaperRow(1, 'RePa-PoolFormer-s24', 'repa_poolformer_s24', 21.4, 3.4),
    PaperRow(1, 'RePa-PoolFormer-s24', 'repa_poolformer_s24', 9.6, 1.4, folded=True),
    PaperRow(1, 'RePa-PoolFormer-s36', 'repa_poolformer_s36', 30.9, 5.1),
    PaperRow(1, 'RePa-PoolFormer-s36', 'repa_poolformer_s36', 13.1, 2.0, folded=True),
    PaperRow(1, 'RePa-MLPMixer-b16', 'repa_mixer_b16', 59.9, 12.7),
    PaperRow(1, 'RePa-MLPMixer-b16', 'repa_mixer_b16', 24.4, 5.7, folded=True),
    PaperRow(1, 'RePa-MLPMixer-l16', 'repa_mixer_l16', 208.4, 44.7),
    PaperRow(1, 'RePa-MLPMixer-l16', 'repa_mixer_l16', 82.2, 20.0, folded=True),
    PaperRow(2, 'DeiT-Tiny', 'deit_tiny_patch16_224', 5.7, 1.3),
    PaperRow(2, 'RePa-DeiT-Tiny', 'repa_deit_tiny', 3.5, 0.8, folded=True),
    PaperRow(2, 'DeiT-Small', 'deit_small_patch16_224', 22.1, 4.6),
    PaperRow(2, 'RePa-DeiT-Small', 'repa_deit_small', 13.2, 2.9, folded=True),
    PaperRow(2, 'DeiT-Base', 'deit_base_patch16_224', 86.6, 17.6),
    PaperRow(2, 'RePa-DeiT-Base', 'repa_deit_base', 51.1, 10.6, folded=True),
    PaperRow(2, 'ViT-Large', 'vit_large_patch16_224', 304.3, 59.7),
    PaperRow(2, 'RePa-ViT-Large', 'repa_vit_large', 178.4, 34.9, folded=True),
    PaperRow(2, 'ViT-Huge', 'vit_huge_patch14_224', 632.2, 124.3, model_args=_VIT_HUGE_16),
    PaperRow(2, 'RePa-ViT-Huge', 'repa_vit_huge', 369.9, 72.6, folded=True),
    PaperRow(2, 'Swin-Tiny', 'swin_tiny_patch4_window7_224', 28.3, 4.5),
    PaperRow(2, 'RePa-Swin-Tiny', 'repa_swin_tiny', 17.5, 2.6, folded=True),
    PaperRow(2, 'Swin-Small', 'swin_small_patch4_window7_224', 49.6, 8.7),
    PaperRow(2, 'RePa-Swin-Small', 'repa_swin_small', 29.9, 5.1, folded=True),
    PaperRow(2, 'Swin-Base', 'swin_base_patch4_window7_224', 87.8, 15.2),
    PaperRow(2, 'RePa-Swin-Base', 'repa_swin_base', 52.8, 9.0, folded=True),
    PaperRow(2, 'LV-ViT-S', 'lvvit_s', 26.2, 6.1),
    PaperRow(2, 'RePa-LV-ViT-S', 'repa_lvvit_s', 19.1, 4.7, folded=True),
    PaperRow(2, 'LV-ViT-M', 'lvvit_m', 55.8, 11.9),
    PaperRow(2, 'RePa-LV-ViT-M', 'repa_lvvit_m', 40.1, 8.8, folded=True),
    PaperRow(2, 'PoolFormer-s12', 'poolformer_s12', 12.0, 1.9, note=_POOLFORMER_S12),
    PaperRow(2, 'RePa-PoolFormer-s12', 'repa_poolformer_s12', 6.0, 0.8, folded=True),
    PaperRow(2, 'PoolFormer-s24', 'poolformer_s24', 21.4, 3.4),
    PaperRow(2, 'RePa-PoolFormer-s24', 'repa_poolformer_s24', 9.6, 1.4, folded=True),
    PaperRow(2, 'PoolFormer-s36', 'poolformer_s36', 30.9, 5.0),
    PaperRow(2, 'RePa-PoolFormer-s36', 'repa_poolformer_s36', 13.1, 2.0, folded=True),
    PaperRow(2, 'MLPMixer-b16', 'mixer_b16_224', 59.9, 12.6),
    PaperRow(2, 'RePa-MLPMixer-b16', 'repa_mixer_b16', 24.4, 5.7, folded=True),
    PaperRow(2, 'MLPMixer-l16', 'mixer_l16_224', 208.2, 44.6),
    PaperRow(2, 'RePa-MLPMixer-l16', 'repa_mixer_l16', 82.2, 20.0, folded=True),
    PaperRow(3, 'RePa-DeiT-Base (25%)', 'repa_deit_base', 79.5, 15.5, folded=True, model_args=dict(idle_ratio=0.25)),
    PaperRow(3, 'RePa-Swin-Base (25%)', 'repa_swin_base', 80.8, 14.0, folded=True, model_args=dict(idle_ratio=0.25)),
    PaperRow(4, 'RePa-DeiT-Base (100%)', 'repa_deit_base', 37.0, 7.1, folded=True, model_args=dict(idle_ratio=1.0)),
    PaperRow(4, 'RePa-DeiT-Base (75%)', 'repa_deit_base', 51.1, 10.6, folded=True, model_args=dict(idle_ratio=0.75)),
    PaperRow(4, 'RePa-DeiT-Base (50%)', 'repa_deit_base', 65.3, 12.7, folded=True, model_args=dict(idle_ratio=0.5)),
    PaperRow(4, 'RePa-DeiT-Base (25%)', 'repa_deit_base', 79.5, 15.5, folded=True, model_args=dict(idle_ratio=0.25)),
    PaperRow(4, 'DeiT-Base (vanilla)', 'deit_base_patch16_224', 86.6, 17.6),
    PaperRow(4, 'RePa-Swin-Base (100%)', 'repa_swin_base', 38.8, 6.5, folded=True, model_args=dict(idle_ratio=1.0)),
    PaperRow(4, 'RePa-Swin-Base (75%)', 'repa_swin_base', 52.8, 9.0, folded=True, model_args=dict(idle_ratio=0.75)),
    PaperRow(4, 'RePa-Swin-Base (50%)', 'repa_swin_base', 66.8, 11.5, folded=True, model_args=dict(idle_ratio=0.5)),
    PaperRow(4, 'RePa-Swin-Base (25%)', 'repa_swin_base', 80.8, 14.0, folded=True, model_args=dict(idle_ratio=0.25)),
    PaperRow(4, 'Swin-Base (vanilla)', 'swin_base_patch4_window7_224', 87.8, 15.2),
    PaperRow(5, 'ViT-Small', 'vit_small_patch16_224', 21.7, 4.3, model_args=_HEADLESS),
    PaperRow(5, 'RePa-ViT-Small', 'repa_vit_small', 12.8, 2.5, folded=True, model_args=_HEADLESS),
    PaperRow(5, 'ViT-Base', 'vit_base_patch16_224', 85.8, 16.9, model_args=_HEADLESS),
    PaperRow(5, 'RePa-ViT-Base', 'repa_vit_base', 50.4, 9.9, folded=True, model_args=_HEADLESS),
    PaperRow(8, 'RePa-DeiT-Tiny (75%)', 'repa_deit_tiny', 3.5, 0.8, folded=True, model_args=dict(idle_ratio=0.75)),
    PaperRow(8, 'RePa-DeiT-Tiny (50%)', 'repa_deit_tiny', 4.4, 1.0, folded=True, model_args=dict(idle_ratio=0.5)),
    PaperRow(8, 'RePa-DeiT-Tiny (25%)', 'repa_deit_tiny', 5.3, 1.2, folded=True, model_args=dict(idle_ratio=0.25)),
    PaperRow(8, 'DeiT-Tiny (vanilla)', 'deit_tiny_patch16_224', 5.7, 1.3),
    PaperRow(8, 'RePa-Swin-Tiny (75%)', 'repa_swin_tiny', 17.5, 2.6, folded=True, model_args=dict(idle_ratio=0.75)),
    PaperRow(8, 'RePa-Swin-Tiny (50%)', 'repa_swin_tiny', 21.8, 3.3, folded=True, model_args=dict(idle_ratio=0.5)),
    PaperRow(8, 'RePa-Swin-Tiny (25%)', 'repa_swin_tiny', 26.1, 4.0, folded=True, model_args=dict(idle_ratio=0.25)),
    PaperRow(8, 'Swin-Tiny (vanilla)', 'swin_tiny_patch4_window7_224', 28.3, 4.5),
    PaperRow(
        8, 'RePa-PoolFormer-s12 (75%)', 'repa_poolformer_s12', 6.0, 0.8, folded=True, model_args=dict(idle_ratio=0.75)),
    PaperRow(
        8, 'RePa-PoolFormer-s12 (50%)', 'repa_poolformer_s12', 8.4, 1.2, folded=True, model_args=dict(idle_ratio=0.5)),
    PaperRow(
        8, 'RePa-PoolFormer-s12 (25%)', 'repa_poolformer_s12', 10.7, 1.6, folded=True,
        model_args=dict(idle_ratio=0.25)),
    PaperRow(8, 'PoolFormer-s12 (vanilla)', 'poolformer_s12', 12.0, 1.9, note=_POOLFORMER_S12),
    PaperRow(1, 'RepOpt-VGG-B1', 'repopt_vgg_b1', 51.8, 11.9, paper='RepOptimizers'),
    PaperRow(1, 'RepOpt-VGG-B2', 'repopt_vgg_b2', 80.3, 18.4, paper='RepOptimizers'),
    PaperRow(1, 'RepOpt-VGG-L1', 'repopt_vgg_l1', 76.0, 21.0, paper='RepOptimizers'),
    PaperRow(1, 'RepOpt-VGG-L2', 'repopt_vgg_l2', 118.1, 32.8, paper='RepOptimizers'),
)


class Count(NamedTuple):
    """Counted parameters and multiply-accumulates of the model of a row.

    Attributes:
        params: Number of parameters.
        macs: Multiply-accumulates per image.
        agrees: The count that the published complexity agrees with: 'without attention' or 'with attention' (the
            nearer one, within 3%), the same followed by ', rounded' (further off, but equal when rounded to the
            paper's one decimal), or None.
    """
    params: int
    macs: Macs
    agrees: Optional[str]


def count_row(row: PaperRow) -> Count:
    """Count the parameters and multiply-accumulates of a row's model, built on the 'meta' device."""
    args = dict(row.model_args)
    if row.model.startswith('repopt_'):  # counts do not depend on scales, which may have to be downloaded
        args['scales'] = False
    params, macs = _count(row.model, row.folded, tuple(args.items()))
    return Count(params=params, macs=macs, agrees=_agreement(row.gmacs, macs))


@cache
def _count(name: str, folded: bool, model_args: Tuple[Tuple[str, Any], ...]) -> Tuple[int, Macs]:
    model = timm.create_model(name, device='meta', **dict(model_args))
    if folded:
        model.reparameterize()
    return count_params(model), count_macs(model)


def _agreement(gmacs: float, macs: Macs) -> Optional[str]:
    counts = {'without attention': macs.projections / 1e9, 'with attention': macs.total / 1e9}
    nearest = min(counts, key=lambda name: abs(counts[name] - gmacs))
    if abs(counts[nearest] - gmacs) <= 0.03 * gmacs:
        return nearest
    if round(counts[nearest], 1) == gmacs:
        return f'{nearest}, rounded'
    return None
