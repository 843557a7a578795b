from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import DropPath
from timm.optim import create_optimizer_v2

import timm_rep
from tests import helpers
from tests.helpers import images, randomize_, relative
from tests.models import contract
from tests.models.contract import RePaContract
from tests.reference import ffn


def tiny(name='repa_lvvit_s', **kwargs):
    return helpers.tiny(name, **kwargs)


def trained(name='repa_lvvit_s', **kwargs):
    return randomize_(tiny(name, **kwargs))


def test_additions_are_plain():
    """LiteRT does not convert additions with a factor."""
    nodes = torch.export.export(tiny().eval(), (images(1, 64),)).graph.nodes
    assert not any('alpha' in node.kwargs for node in nodes)


def test_registered():
    assert timm.list_models(module='repa_lvvit') == ['lvvit_m', 'lvvit_s', 'repa_lvvit_m', 'repa_lvvit_s']


@pytest.mark.parametrize('size', 'sm')
def test_the_repa_form_differs_in_the_ffns_only(size):
    model = timm.create_model(f'repa_lvvit_{size}', device='meta')
    vanilla = timm.create_model(f'lvvit_{size}', device='meta')

    def rest(m):
        return {k: v.shape for k, v in m.state_dict().items() if '.mlp.' not in k and '.norm2.' not in k}

    assert rest(model) == rest(vanilla)
    for ours, theirs in zip(model.blocks, vanilla.blocks):
        assert ours.mlp.fc1.weight.shape == theirs.mlp.fc1.weight.shape
        assert ours.residual_scale == theirs.residual_scale == .5
    # 1152 * (1 - 2 / 3) is a little over 384 in floating point, 1536 * (1 - 2 / 3) is 512
    assert model.blocks[0].mlp.act.active_channels == {'s': 385, 'm': 512}[size]
    assert model.no_weight_decay() == vanilla.no_weight_decay()


@pytest.mark.parametrize('skip_lam', [2., .7])
@torch.no_grad()
def test_block_scales_its_branches(skip_lam):
    """x + attn / skip_lam, then the FFN by its definition, divided by it too."""
    block = trained(skip_lam=skip_lam, dtype=torch.float64).blocks[1]
    x = torch.randn(2, 17, 48, dtype=torch.float64)
    y = (x + block.attn(block.norm1(x)) / skip_lam).flatten(0, 1)
    active = block.mlp.act.active_channels
    expected = y + ffn(y, block.mlp.state_dict(), F.gelu, active) / skip_lam
    assert relative(block(x).flatten(0, 1), expected) < 1e-11
    block = trained('lvvit_s', skip_lam=skip_lam, dtype=torch.float64).blocks[1]
    y = x + block.attn(block.norm1(x)) / skip_lam
    expected = y + block.mlp(block.norm2(y)) / skip_lam
    assert relative(block(x), expected) < 1e-11


@pytest.mark.parametrize('name', ['repa_lvvit_s', 'lvvit_s'])
@torch.no_grad()
def test_logits_are_of_all_tokens(name):
    model = trained(name)
    tokens = model.forward_features(images())
    assert tokens.shape == (2, 17, 48)
    aux = model.aux_head(tokens[:, 1:])
    assert torch.equal(model(images()), model.head(tokens[:, 0]) + .5 * aux.max(1)[0])
    model.train().set_token_labeling()
    logits, aux_logits = model(images())
    assert (logits.shape, aux_logits.shape) == ((2, 5), (2, 16, 5))
    assert model.eval()(images()).shape == (2, 5)
    model.set_token_labeling(False)
    assert model.train()(images()).shape == (2, 5)
    plain = tiny(name, return_dense=False).eval()
    assert not any('aux_head' in key for key in plain.state_dict())
    assert torch.equal(plain(images()), plain.head(plain.forward_features(images())[:, 0]))
    unpooled = trained(name, global_pool='')
    assert torch.equal(unpooled(images()), unpooled.head(unpooled.forward_features(images())))
    averaged = trained(name, global_pool='avg', class_token=False)
    tokens = averaged.forward_features(images())
    expected = averaged.head(averaged.fc_norm(tokens.mean(1)))
    expected = expected + .5 * averaged.aux_head(averaged.fc_norm(tokens)).max(1)[0]
    assert relative(averaged(images()), expected) < 1e-5


def test_initialization_and_drop_path_are_timms():
    model = tiny(embed_dim=192, drop_path_rate=.3, proj_drop_rate=.1)
    for fc in (model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2, model.aux_head):
        assert abs(fc.weight.std().item() - .02) < .002
        assert fc.bias.abs().max() == 0
    for block, rate in zip(model.blocks, (0., .15, .3)):
        for drop in (block.drop_path1, block.drop_path2):
            assert isinstance(drop, DropPath) == (rate > 0)
            assert rate == 0 or drop.drop_prob == pytest.approx(rate)
        assert block.mlp.drop1.p == .1
        assert block.attn.qkv.bias is None


@pytest.mark.parametrize('kwargs', [
    dict(), dict(idle_ratio=0.), dict(idle_ratio=1.), dict(idle_ratio=.4, mlp_ratio=2.5), dict(skip_lam=3.),
    dict(idle_schedule='linear'), dict(init_values=.3), dict(return_dense=False),
], ids=str)
def test_reparameterize_is_exact(kwargs):
    contract.check_reparameterize(trained(**kwargs), partial(tiny, **kwargs), images())


@torch.no_grad()
def test_recorded_outputs(recorded):
    """Outputs of the vanilla backbone: no RePa-LV-ViT was released."""
    tensors, config = recorded('lvvit_vanilla')
    model = timm.create_model('lvvit_s', **config)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    assert timm_rep.load_released(model, weights) is model
    assert relative(model.eval()(tensors['input']), tensors['output']) < 1e-5
    with pytest.raises(TypeError, match=r'\bLvVit\b.*got RePaLvVit'):
        timm_rep.load_released(tiny(), weights)


def test_refusals():
    for name in ('lvvit_s', 'repa_lvvit_s'):
        with pytest.raises(ValueError, match=r'skip_lam must be positive, got 0'):
            tiny(name, skip_lam=0)
        for patch_size in (7, (8, 7)):
            with pytest.raises(ValueError, match=r'patch_size must be even .* got \(?[78]'):
                tiny(name, img_size=56, patch_size=patch_size)
    for patch_size in ((8, 8), [8, 8], 8):
        with pytest.raises(ValueError, match=r'patch_size must be \(16, 16\)'):
            tiny().set_input_size(patch_size=patch_size)
    tiny().set_input_size(patch_size=16)


@pytest.mark.slow
def test_training_lowers_the_loss_of_the_vanilla_backbone():
    model = tiny('lvvit_s', drop_path_rate=.1).train()
    optimizer = create_optimizer_v2(model, opt='adamw', lr=2e-3, weight_decay=.05)
    x, target = images(10), torch.arange(10) % 5
    losses = contract.train(model, optimizer, x, target, steps=25)
    assert losses[-1] < .5 * losses[0]


class TestContract(RePaContract):
    """The interface of timm's Vision Transformer, plain and in both structures."""
    variants = ('lvvit_m', 'lvvit_s', 'repa_lvvit_m', 'repa_lvvit_s')
    tiny, trained_form = map(staticmethod, (tiny, trained))
    kinds = scriptable = ('vanilla', 'training', 'deploy')
    learning_rate = 2e-3
    block = 'blocks.1'
    layers = 1 + 3 + 1  # stem, blocks, heads
    timms = 'deit_tiny_patch16_224'
    taps = ((2, 48, 4, 4),) * 3
    features = ((48, 16, (2, 48, 4, 4)),) * 3
    arguments = (
        (dict(num_classes=0), (2, 48)),
        (dict(num_classes=0, global_pool=''), (2, 17, 48)),
        (dict(global_pool='', return_dense=False), (2, 17, 5)),
        (dict(in_chans=1), (2, 5)),
        (dict(drop_rate=.1, proj_drop_rate=.1, attn_drop_rate=.1, drop_path_rate=.2), (2, 5)),
    )

    @classmethod
    def build(cls, kind, **kwargs):
        return tiny('lvvit_s', **kwargs) if kind == 'vanilla' else super().build(kind, **kwargs)

    @classmethod
    def trained(cls, kind):
        return trained('lvvit_s') if kind == 'vanilla' else super().trained(kind)

    def test_meta(self, kind, model):
        meta = self.build(kind, device='meta')
        assert all(t.is_meta for t in meta.state_dict().values())
        meta.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(meta.eval()(self.images()), model(self.images()))
        assert meta(torch.empty(2, 3, 64, 64)).shape == (2, 5)

    @torch.no_grad()
    def test_image_sizes(self, model, kind):
        model.set_input_size(img_size=(96, 64))
        assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5)
        dynamic = self.build(kind, dynamic_img_size=True).eval()
        assert dynamic(images(size=96)).shape == (2, 5)

    def test_classifiers(self, kind, model):
        """Both classifiers are replaced."""
        assert model.get_classifier() == (model.head, model.aux_head)
        model.reset_classifier(7)
        assert model.head.out_features == model.aux_head.out_features == 7
        model.reset_classifier(0)
        assert isinstance(model.aux_head, nn.Identity)
        assert model(images()).shape == (2, 48)
