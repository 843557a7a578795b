"""Padding that FFNs see: NaFlexViT takes patches of images of several sizes, filled up to one number."""
import copy

import pytest
import timm
import torch

import timm_rep
from tests.helpers import images, relative
from timm_rep.convert import anneal_ffns, linearize_ffns, use_repa_ffns
from timm_rep.convert._reparameterize import folded_copy
from timm_rep.convert.calibration import Share, TokenSampler, attended_tokens, watch_masks
from timm_rep.convert.ffn import find_ffns
from timm_rep.convert.residual import probe
from timm_rep.convert.streaming import record_original


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
    # masked patches do not change the outputs
    batch['patches'] = batch['patches'] + 5 * torch.randn(3, 4, 1) * ~batch['patch_valid'][..., None]
    assert relative(watch(model, batch)[1], y) < 1e-5


def test_an_interrupted_forward_pass_leaves_no_mask():
    """In training, the mask of the padding is for the next forward pass of the FFN, which may not come."""
    def interrupt(*args):
        raise KeyboardInterrupt

    model = naflex(False, init_values=.5)
    timm_rep.convert_to_repa(model)
    handle = model.blocks[1].attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.train()(patches([2, 4]))
    handle.remove()
    batch = patches([4, 4])
    outputs = [model.eval()(batch) for _ in range(2)]
    assert torch.equal(*outputs)


def test_images_have_no_padding():
    assert [valid for _, valid in watch(naflex(True), images(2, 32))[0]] == [None, None]


def garbage(batch):
    """The batch with random padding."""
    noise = 5 * torch.randn(*batch['patch_valid'].shape, 1, dtype=torch.float64)
    return dict(batch, patches=batch['patches'] + noise * ~batch['patch_valid'][..., None])


def assert_same_state(model, other):
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-6, atol=1e-9)


def assert_same_training(model, other):
    """Same parameters, statistics and gradients."""
    assert_same_state(model, other)
    for p, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, rtol=1e-6, atol=1e-9)


def calibration(*lengths):
    """Batches of 15 images of each length, which stay the same whatever the padding."""
    torch.manual_seed(1)
    counts = [length for length in lengths for _ in range(15)]
    batch = patches(counts)
    batch['patches'] = batch['patches'].double()
    batch['patch_coord'] = batch['patch_coord'] * batch['patch_valid'][..., None]  # the grid is as large as they say
    return batch


@pytest.mark.parametrize('kwargs', [dict(idle_ratio=.7), dict(macs=.8)])
@pytest.mark.parametrize('class_token, key_only', [(True, False), (False, True)])
def test_padding_does_not_change_a_conversion(class_token, key_only, kwargs):
    batch, models, reports = calibration(3, 9, 5), [], []
    whole = {name: x.clone() for name, x in batch.items()}
    batches = {
        'zeros': [batch], 'garbage': [(garbage(batch), torch.zeros(45))],
        'no padding': [{name: x[i:i + 15, :n] for name, x in whole.items()} for i, n in ((0, 3), (15, 9), (30, 5))]}
    if 'macs' in kwargs:  # these are counted for the first image
        del batches['no padding']
    for loader in batches.values():
        models.append(naflex(class_token, use_key_only_attn_mask=key_only, init_values=.5).double())
        for i, block in enumerate(models[-1].blocks):
            with torch.no_grad():
                block.norm2.weight.copy_(torch.linspace(.5, 2, 24))
                block.mlp.fc1.weight.mul_(30 + i)
        reports.append(linearize_ffns(models[-1], loader, tokens_per_image=32, **kwargs))
    for model, report in zip(models[1:], reports[1:]):
        assert [ffn.active_features for ffn in report.ffns] == [ffn.active_features for ffn in reports[0].ffns]
        assert [ffn.held_out for ffn in report.ffns] == pytest.approx([ffn.held_out for ffn in reports[0].ffns])
        assert_same_state(model, models[0])
    assert min(ffn.held_out for ffn in reports[0].ffns) > 1e-4


def test_few_of_the_tokens():
    """As many tokens of each image as are asked for, or as there are."""
    batch, model = calibration(3, 9), naflex(True).double()
    ffns, _ = find_ffns(model)
    probes = probe(model, ffns, {name: x[:4] for name, x in batch.items()})
    sampler = TokenSampler(probes, {ffn.name: 6 for ffn in ffns})
    share = Share(0, 30, slice(None), batch, torch.zeros(30, dtype=torch.bool))
    record_original(model, ffns, [share], sampler)
    rows = sampler(ffns[1].name, share, 30 * 11)
    images, tokens = rows // 11, rows % 11  # class token and register first
    assert images.bincount().tolist() == 15 * [5] + 15 * [6]
    assert (tokens[images < 15] < 5).all()
    assert ((tokens == 0).sum(), (tokens == 1).sum()) == (30, 30)
    assert tokens.max() == 10


def test_duplicates_with_other_padding():
    batch, model = calibration(3, 9), naflex(True).double()
    with pytest.warns(UserWarning, match='Only 30 of the 60'):
        linearize_ffns(model, [batch, garbage(batch)], .7)


class Unmasked(torch.nn.Module):
    """A block that finds its mask elsewhere."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, attn_mask=None):
        self.block.attn_mask = attn_mask
        return self.block(x)


def test_padding_that_cannot_be_told_is_refused_by_name():
    batch = calibration(3, 9, 5)
    model = naflex(True).double()
    model.blocks[1] = Unmasked(model.blocks[1])
    before = repr(model)
    with pytest.raises(ValueError, match=r'blocks\.1\.block\.mlp'):
        linearize_ffns(model, [batch], .7)
    assert repr(model) == before
    assert linearize_ffns(model, [{name: x[15:30] for name, x in batch.items()}], .7).ffns  # of one length


@pytest.mark.parametrize('norm', ['keep', 'batch'])
@pytest.mark.parametrize('class_token, key_only', [(True, False), (False, True)])
def test_padding_does_not_change_an_annealing(class_token, key_only, norm):
    batch, models = calibration(3, 9, 5), []
    longer = garbage({name: torch.cat([x, torch.zeros_like(x[:, :3])], 1) for name, x in batch.items()})
    for call in (
            lambda model: model(batch),
            lambda model: model(garbage(batch)),
            lambda model: model(longer['patches'], **{k: x for k, x in longer.items() if k != 'patches'}),
    ):
        models.append(naflex(class_token, use_key_only_attn_mask=key_only).double())
        anneal_ffns(models[-1], 3, .7, norm=norm)
        models[-1].train()
        for _ in range(5):
            call(models[-1]).square().sum().backward()
    for model in models[1:]:
        assert_same_training(model, models[0])
    # evaluation after a step with padding, and batches without padding, another number of images included
    model = models[0]
    steps = {name: x[15:30] for name, x in batch.items()}
    with torch.no_grad():
        assert model.eval()(steps).isfinite().all()
    model.train()({name: x[:15, :3] for name, x in batch.items()})
    expected = model.eval()(batch)
    assert relative(folded_copy(model)(batch), expected) < 1e-5


@pytest.mark.parametrize('kwargs', [{}, dict(pos_embed='none', rope_type='axial')], ids=['plain', 'rotary'])
@pytest.mark.parametrize('class_token, key_only', [(True, False), (False, True)])
def test_padding_does_not_change_a_training(class_token, key_only, kwargs):
    """The padding has no effect whichever method of the model is called."""
    batch, models = calibration(3, 9, 5), []
    longer = garbage({name: torch.cat([x, torch.zeros_like(x[:, :3])], 1) for name, x in batch.items()})
    for call in (
            lambda model: model(batch),
            lambda model: model(garbage(batch)),
            lambda model: model.forward_head(**model.forward_features(**longer)),
    ):
        models.append(naflex(class_token, use_key_only_attn_mask=key_only, init_values=.5, **kwargs).double())
        use_repa_ffns(models[-1], .7)
        models[-1].train()
        for _ in range(3):
            call(models[-1]).square().sum().backward()
    for model in models[1:]:
        assert_same_training(model, models[0])
    # copies, images without padding, and folded models
    model = copy.deepcopy(models[0])
    model(batch)
    assert not torch.equal(model.blocks[0].mlp.norm1.running_mean, models[0].blocks[0].mlp.norm1.running_mean)
    model({name: x[:15, :3] for name, x in batch.items()})
    model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
    expected = model.eval()(batch)
    assert relative(model.reparameterize()(batch), expected) < 1e-5


def test_annealing_with_padding_that_cannot_be_told_is_refused():
    batch = calibration(3, 9, 5)
    model = naflex(True, patch_drop_rate=.2).double()
    anneal_ffns(model, 3, .7)
    model.train()
    with pytest.raises(ValueError, match='patch_drop_rate'):
        model(batch)
    model({name: x[15:30] for name, x in batch.items()})  # of one length
    model = naflex(True).double()
    anneal_ffns(model, 3, .7)
    model.blocks[1].mlp.register_forward_pre_hook(lambda mlp, args: (args[0][:, :5],))
    with pytest.raises(ValueError, match='padding'):
        model.train()(batch)


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


@pytest.mark.parametrize('call', [
    lambda model, batch: model(batch['patches'], batch['patch_coord'], batch['patch_valid']),
    lambda model, batch: model(batch['patches'], batch['patch_coord'], patch_valid=batch['patch_valid']),
    lambda model, batch: model(x=batch),
    lambda model, batch: model(**{'x' if name == 'patches' else name: value for name, value in batch.items()}),
])
def test_padding_does_not_count_in_annealing_however_it_is_passed(call):
    batch = garbage(calibration(3, 9))
    fits = []
    for how in (lambda model, batch: model(batch)), call:
        model = naflex(False).train()
        anneal_ffns(model, 4)
        for _ in range(2):
            how(model, {name: x.float() if x.is_floating_point() else x for name, x in batch.items()})
        fits.append(torch.stack([torch.stack(m.linear_fit()) for m in model.modules() if hasattr(m, 'linear_fit')]))
    assert fits[0].abs().max() > 0
    assert torch.equal(*fits)
