"""Padding that FFNs see: NaFlexViT takes patches of images of several sizes, filled up to one number."""
import pytest
import timm
import torch

from tests.helpers import images, relative
from timm_rep.convert.ffn import find_ffns
from timm_rep.convert.masks import attended_tokens, watch_masks


def naflex(class_token, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(
        'naflexvit_base_patch16_gap', patch_size=8, embed_dim=24, depth=2, num_heads=3, pos_embed_grid_size=(4, 4),
        class_token=class_token, reg_tokens=1, num_classes=5, **kwargs).eval()


def patches(counts):
    """A batch in which image i has counts[i] patches in one row."""
    longest = max(counts)
    valid = torch.arange(longest)[None] < torch.tensor(counts)[:, None]
    coord = torch.stack([torch.zeros(longest, dtype=torch.long), torch.arange(longest)], 1).repeat(len(counts), 1, 1)
    return dict(
        patches=torch.randn(len(counts), longest, 8 * 8 * 3) * valid[..., None], patch_coord=coord, patch_valid=valid)


def watch(model, batch):
    seen = []
    handles = watch_masks(model, find_ffns(model)[0], lambda ffn, valid: seen.append((ffn.name, valid)))
    with torch.no_grad():
        y = model(batch)
    for handle in handles:
        handle.remove()
    assert not any(m._forward_pre_hooks for m in model.modules())
    return seen, y


@pytest.mark.parametrize('class_token', [False, True])
@pytest.mark.parametrize('key_only', [False, True])
def test_padded_patches(class_token, key_only):
    model, batch = naflex(class_token, use_key_only_attn_mask=key_only), patches([2, 4, 3])
    seen, y = watch(model, batch)
    assert [name for name, _ in seen] == ['blocks.0.mlp', 'blocks.1.mlp']
    prefix = torch.ones(3, 1 + class_token, dtype=torch.bool)  # class token and register
    for _, valid in seen:
        assert torch.equal(valid, torch.cat([prefix, batch['patch_valid']], 1))
    # what is masked does not matter to the outputs
    batch['patches'] = batch['patches'] + 5 * torch.randn(3, 4, 1) * ~batch['patch_valid'][..., None]
    assert relative(watch(model, batch)[1], y) < 1e-5


def test_images_have_no_padding():
    assert [valid for _, valid in watch(naflex(True), images(2, 32))[0]] == [None, None]


@pytest.mark.parametrize('dtype', [torch.bool, torch.float32, torch.bfloat16])
def test_kinds_of_masks(dtype):
    """Causal masks, and masks of one head, exclude no token that another query or head attends to."""
    mask = torch.ones(2, 2, 4, 4, dtype=torch.bool).tril()
    mask[0, 0, :, 1] = False
    mask[1, :, :, 2] = False
    expected = torch.tensor([[True] * 4, [True, True, False, True]])
    if dtype != torch.bool:
        for least in (-torch.inf, torch.finfo(dtype).min):
            additive = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, least)
            assert torch.equal(attended_tokens(additive), expected)
        biased = torch.randn(mask.shape).to(dtype).masked_fill(~mask, -torch.inf)
        assert torch.equal(attended_tokens(biased), expected)
    else:
        assert torch.equal(attended_tokens(mask), expected)
    with pytest.raises(ValueError, match='attn_mask'):
        attended_tokens(mask[0])
