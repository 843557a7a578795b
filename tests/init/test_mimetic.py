import copy

import pytest
import timm
import torch
import torch.nn as nn

import timm_rep
from tests.helpers import relative, same_weights
from timm_rep.init import attention_products, attentions

VIT = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)


def vit(**kwargs):
    torch.manual_seed(0)
    return timm.create_model('vit_tiny_patch16_224', **{**VIT, **kwargs})


@torch.no_grad()
def test_attention_products():
    """Entry by entry, by what they do to tokens: logits of a head, and outputs of uniform attention."""
    model = vit()
    attention = model.blocks[0].attn
    attention.qkv.bias.zero_()
    attention.proj.bias.zero_()
    qk, v_proj = attention_products(attention)
    x, y = torch.randn(48), torch.randn(48)
    for head in range(3):
        rows = slice(head * 16, head * 16 + 16)
        query = attention.qkv.weight[:48][rows] @ x
        key = attention.qkv.weight[48:96][rows] @ y
        torch.testing.assert_close(x @ qk[head] @ y, query @ key)
    torch.testing.assert_close(attention(x.expand(1, 5, 48))[0, 0], x @ v_proj)


@torch.no_grad()
def test_products_are_near_the_identity():
    """alpha Z - beta I exactly, and alpha Z + beta I as near as a head's rank allows."""
    model = vit(embed_dim=96, num_heads=3)
    g = torch.Generator().manual_seed(5)
    assert timm_rep.mimetic_init_(model, generator=g) is model
    g = torch.Generator().manual_seed(5)
    for block in model.blocks:
        qk, v_proj = attention_products(block.attn)
        for head in range(3):
            full = .7 * torch.randn(96, 96, generator=g) / 96 ** .5 + .7 * torch.eye(96)
            u, s, vh = torch.linalg.svd(full)
            assert relative(qk[head], u[:, :32] @ torch.diag(s[:32]) @ vh[:32]) < 1e-4
            assert torch.linalg.matrix_rank(qk[head]) == 32
        expected = .4 * torch.randn(96, 96, generator=g) / 96 ** .5 - .4 * torch.eye(96)
        assert relative(v_proj, expected) < 1e-4
        # queries and keys are of the same size
        q, k = block.attn.qkv.weight[:192].chunk(2)
        assert abs(q.norm() / k.norm() - 1) < 1e-3
    assert timm_rep.mimetic_init_(vit(), qk=(0., 1.)).blocks[0].attn.qkv.weight.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize('seed', range(4))
def test_almost_singular_products_are_shared_equally(seed):
    """With beta an eigenvalue of alpha Z, so that rounding decides on the smallest singular value of the product."""
    model = vit(embed_dim=96, depth=1, num_heads=1)
    z = torch.randn(2, 96, 96, generator=torch.Generator().manual_seed(seed))[1] / 96 ** .5
    eigenvalues = torch.linalg.eigvals(.4 * z.double())
    real = eigenvalues.real[eigenvalues.imag == 0].tolist()
    assert real
    for beta in real:
        timm_rep.mimetic_init_(model, v_proj=(.4, beta), generator=torch.Generator().manual_seed(seed))
        attention = model.blocks[0].attn
        values, outputs = attention.qkv.weight[192:].norm(dim=1), attention.proj.weight.norm(dim=0)
        torch.testing.assert_close(values, outputs, rtol=1e-3, atol=1e-4)
        assert relative(attention_products(attention)[1], .4 * z - beta * torch.eye(96)) < 1e-4


def test_only_attention_and_positions():
    model = vit()
    before = copy.deepcopy(model.state_dict())
    timm_rep.mimetic_init_(model)
    after = model.state_dict()
    assert {k for k in after if not torch.equal(after[k], before[k])} == {
        'pos_embed', *(f'blocks.{i}.attn.{name}.weight' for i in (0, 1) for name in ('qkv', 'proj'))}
    assert after['pos_embed'][:, 0].abs().max() == 0
    assert after['pos_embed'][0, 1:].norm(dim=-1).std() < 1e-5  # sines and cosines of a position
    assert len({tuple(row.tolist()) for row in after['pos_embed'][0]}) == 17
    wide = vit(img_size=(16, 32))  # a grid of 2 x 4, row by row
    positions = timm_rep.mimetic_init_(wide).pos_embed[0, 1:].detach().reshape(2, 4, 48)
    by_row = (positions == positions[:, :1]).all(0).all(0)
    by_column = (positions == positions[:1]).all(0).all(0)
    assert (by_row ^ by_column).sum() > 40  # each channel depends on the row or on the column
    assert by_row.sum() >= 24 <= by_column.sum()
    model = vit()
    timm_rep.mimetic_init_(model, pos_embed=False)
    assert torch.equal(model.pos_embed, before['pos_embed'])
    assert timm_rep.mimetic_init_(vit(dtype=torch.bfloat16)).blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    swin = timm.create_model('swin_tiny_patch4_window7_224', embed_dim=24, depths=(1, 1), num_heads=(2, 2))
    assert timm_rep.mimetic_init_(swin).layers[1].blocks[0].attn.qkv.weight.isfinite().all()
    with pytest.raises(ValueError, match=r'qkv.*ResNet'):
        timm_rep.mimetic_init_(timm.create_model('resnet18'))


def test_other_attentions_are_left_alone():
    """TinyViT's attention is ordered head by head, and some of GCViT's have no queries."""
    with pytest.raises(ValueError, match=r'qkv.*TinyVit'):
        timm_rep.mimetic_init_(timm.create_model('tiny_vit_5m_224', num_classes=0))
    model = timm.create_model('gcvit_xxtiny', num_classes=0)
    names = [name for name, _ in attentions(model)]
    assert names
    assert not any(model.get_submodule(name).use_global for name in names)
    before = copy.deepcopy(model.state_dict())
    timm_rep.mimetic_init_(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f'{name}.{layer}.weight' for name in names for layer in ('qkv', 'proj')}


def test_heads_wider_than_the_input_are_refused():
    model = nn.Sequential(timm.layers.Attention(12, num_heads=3), timm.layers.Attention(12, num_heads=3))
    model[1].qkv, model[1].proj = nn.Linear(12, 54), nn.Linear(18, 12)
    assert [name for name, _ in attentions(model)] == ['0', '1']
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r'heads of 1 together .*18 channels and an input of 12'):
        timm_rep.mimetic_init_(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_refused_position_embedding_changes_nothing():
    model = vit(embed_dim=54)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r'multiple of 4.*54'):
        timm_rep.mimetic_init_(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    timm_rep.mimetic_init_(model, pos_embed=False)
    assert torch.equal(model.pos_embed, before['pos_embed'])


def test_the_table_of_a_naflexvit_by_rows_and_columns():
    model = timm.create_model('naflexvit_base_patch16_gap', embed_dim=48, depth=1, num_heads=3, num_classes=5)
    rows, columns = model.embeds.pos_embed.shape[1:3]
    timm_rep.mimetic_init_(model)
    same = vit(img_size=(8 * rows, 8 * columns))
    table = timm_rep.mimetic_init_(same).pos_embed[:, 1:]
    assert torch.equal(model.embeds.pos_embed.flatten(1, 2), table)


def test_wrapped_models():
    wrapped = nn.DataParallel(vit())
    assert timm_rep.mimetic_init_(wrapped, generator=torch.Generator().manual_seed(1)) is wrapped
    expected = timm_rep.mimetic_init_(vit(), generator=torch.Generator().manual_seed(1))
    assert same_weights(wrapped.module, expected)


@pytest.mark.parametrize('patch_embed', [None, (100, 100)])
def test_a_position_embedding_without_a_grid_is_refused(patch_embed):
    model = vit(embed_dim=24)
    if patch_embed is None:
        model.patch_embed = nn.Identity()
    else:
        model.patch_embed.grid_size = patch_embed
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r'grid_size .* pass pos_embed=False'):
        timm_rep.mimetic_init_(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    timm_rep.mimetic_init_(model, pos_embed=False)
    assert not torch.equal(model.blocks[0].attn.proj.weight, before['blocks.0.attn.proj.weight'])


@torch.no_grad()
def test_another_layout_of_position_embeddings():
    """PiT's has its channels first: it stays, and the attention is initialized."""
    model = timm.create_model(
        'pit_ti_224', img_size=232, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 1, 1), num_classes=0)
    before = copy.deepcopy(model)
    timm_rep.mimetic_init_(model)
    assert torch.equal(model.pos_embed, before.pos_embed)
    assert not torch.equal(next(attentions(model))[1].qkv.weight, next(attentions(before))[1].qkv.weight)
