"""Annealing: the pretrained model at the first step, foldable at the last."""
import copy
import pickle
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.coat import CoaT
from timm.models.metaformer import MetaFormer
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, reparameterize_model

import timm_rep
from tests.convert.families import CLASSES, KINDS, build
from tests.convert.test_families import record
from tests.convert.test_to_train import build as build_to_train
from tests.helpers import images, needs_recorded_args, randomize_, relative, same_weights, save_model
from tests.models.contract import train
from tests.models.test_repa_any import CONVNEXT, VIT, plain
from timm_rep.convert import reparameterize
from timm_rep.convert.anneal import AnnealedFfn, anneal_ffns
from timm_rep.convert.ffn import find_ffns
from timm_rep.layers import AnnealedActivation, AnnealedNorm, RePaMlpDeploy, is_reparameterized

SWIN = dict(
    base='swin_tiny_patch4_window7_224', img_size=56, embed_dim=24, depths=(1, 1), num_heads=(2, 4), drop_path_rate=0.,
    num_classes=5)
RESMLP = dict(base='resmlp_12_224', img_size=32, num_classes=5)
BASES = {'vit': VIT, 'convnext': CONVNEXT, 'swin': SWIN, 'resmlp': RESMLP}


def annealed(args, **kwargs):
    torch.manual_seed(1)
    return timm.create_model('repa_any', **{'anneal_steps': 4, **args, **kwargs})


def annealed_from(model, args, **kwargs):
    other = annealed(args, **kwargs)
    other.load_state_dict(model.state_dict())
    return other


def layers(model):
    return [m for m in model.modules() if isinstance(m, AnnealedFfn)]


def steps(model, count, size=32, seed=0):
    """Training steps on random images, with a learning rate that changes every weight."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=.02)
    for i in range(count):
        loss = F.cross_entropy(model(images(8, size, seed=seed + i)), torch.arange(8) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    'family', [f if f in KINDS else pytest.param(f, marks=pytest.mark.slow) for f in CLASSES])
def test_family(family):
    """Pretrained at first; at the end every FFN folds exactly."""
    model, x = build(family)
    x = x[:8]
    original = copy.deepcopy(model)
    ffns = find_ffns(model)[0]
    if any(ffn.hidden_norm is not None for ffn in ffns):
        with pytest.raises(ValueError, match='norm of their hidden features'):
            anneal_ffns(model, 2, .5)
        assert same_weights(model, original)
        return
    anneal_ffns(model, 2, .5)
    with torch.no_grad():
        assert torch.equal(model(x), original(x))
        seed = torch.get_rng_state()
        expected = copy.deepcopy(original).train()(x)
        torch.set_rng_state(seed)
        assert torch.equal(copy.deepcopy(model).train()(x), expected)
        model.train()
        model(x)
        with pytest.raises(ValueError, match='step 1 of 2'):
            layers(model)[0].fuse()
        model(x)
        model.eval()
        found = layers(model)
        for layer, seen in zip(found, record(model, found, lambda: model(x))):
            layer = copy.deepcopy(layer).double()
            folded = layer.fuse()
            for u in seen:
                assert relative(folded(u.double()), layer(u.double())) < 1e-9
            deploy = next(m for m in folded.modules() if isinstance(m, RePaMlpDeploy))
            assert deploy.has_idle
            assert deploy.has_active


@pytest.mark.parametrize('norm', ['keep', 'batch'])
@pytest.mark.parametrize('base', ['vit', 'convnext', 'swin', pytest.param('resmlp', marks=pytest.mark.slow)])
def test_training(base, norm):
    args, size = BASES[base], BASES[base].get('img_size', 64)
    original = plain(args)
    model = annealed_from(original, args, norm=norm, idle_ratio=.5).eval()
    x = images(4, size)
    with torch.no_grad():
        assert torch.equal(model(x), original(x))
        assert torch.equal(model.train()(x), original.train()(x))
    steps(model, 2, size)
    with pytest.raises(ValueError, match='step 3 of 4'):
        model.reparameterize()
    assert layers(model)
    steps(model, 1, size)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        utility = reparameterize_model(model)
        assert relative(utility(x), expected) < 1e-5
        model.reparameterize()
        assert not layers(model)
        assert relative(model(x), expected) < 1e-5
        assert not any(isinstance(m, AnnealedNorm) for m in model.modules())
    # the deploy structure has these weights, and no plain ones
    deployed = annealed(args, norm=norm, idle_ratio=.5, reparameterized=True).eval()
    deployed.load_state_dict(model.state_dict())
    assert torch.equal(deployed(x), model(x))
    with pytest.raises(RuntimeError):
        model.load_state_dict(original.state_dict())
    with pytest.raises(RuntimeError, match=r'annealing structure.*deploy structure'):
        annealed(args, norm=norm, idle_ratio=.5).load_state_dict(model.state_dict())


@pytest.mark.parametrize('norm', ['keep', 'batch'])
def test_state(norm, tmp_path):
    """Resuming, averages, copies and folders continue at the step they are at."""
    model = annealed_from(plain(VIT), VIT, norm=norm, anneal_steps=6)
    ema = ModelEmaV3(model, decay=.5)
    steps(model, 3)
    ema.update(model)
    torch.save(model.state_dict(), tmp_path / 'last.pth')
    save_model(model, tmp_path / 'folder')
    resumed = annealed(VIT, norm=norm, anneal_steps=6)
    resumed.load_state_dict(torch.load(tmp_path / 'last.pth', weights_only=True))
    others = [
        resumed, copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
        timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=True)]
    steps(model, 3, seed=3)
    for other in others:
        assert [layer.act.step.item() for layer in layers(other)] == [3] * 4
        steps(other, 3, seed=3)
        assert same_weights(other, model)
    assert [layer.act.step.item() for layer in layers(ema.module)] == [3] * 4
    with pytest.raises(ValueError, match='step 3 of 6'):
        ema.module.reparameterize()
    ema.update(model)
    x = images(2, 32)
    with torch.no_grad():
        expected = ema.module.eval()(x)
        assert relative(ema.module.reparameterize()(x), expected) < 1e-5
    assert torch.equal(layers(model)[0].act.idle, layers(others[0])[0].act.idle)


def test_an_average_of_equal_models_has_their_lines():
    """Also one that began before the first step."""
    model = annealed_from(plain(VIT), VIT, anneal_steps=6).train()
    ema = ModelEmaV3(model, decay=.9)
    for _ in range(6):
        model(images(8, 32))
        ema.update(model)
    averaged, found = (model.eval().reparameterize()(images(2, 32)) for model in (ema.module, model))
    assert relative(averaged, found) < 1e-3


@pytest.mark.parametrize('call', [
    lambda model, x: model.forward_head(model.forward_features(x)),  # of timm's FeatureDistillationTask
    lambda model, x: model.forward_intermediates(x),
])
def test_passes_that_do_not_count(call, recwarn):
    model = annealed_from(plain(VIT), VIT).train()
    for _ in range(2):
        call(model, images(4, 32))
    assert len({str(w.message) for w in recwarn if 'advance_annealing(model)' in str(w.message)}) == 1
    assert {layer.act.step.item() for layer in layers(model)} == {0}
    with pytest.raises(ValueError, match=r'step 0 of 4.*forward_features'):
        model.reparameterize()
    other = annealed_from(plain(VIT), VIT).train()
    recwarn.clear()
    for _ in range(4):
        timm_rep.layers.advance_annealing(other)
        call(other, images(4, 32))
    model(images(4, 32))
    assert not [w for w in recwarn if 'advance_annealing' in str(w.message)]
    other.reparameterize()


@pytest.mark.parametrize('norm', ['keep', 'batch'])
def test_gradient_checkpointing(norm):
    original = plain(VIT)
    a, b = (annealed_from(original, VIT, norm=norm) for _ in range(2))
    b.set_grad_checkpointing()
    for model in (a, b):
        steps(model, 3)
    # BatchNorms count a repeated pass; what is annealed does not
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items()):
        if 'running' not in name and 'num_batches' not in name:
            assert torch.equal(x, y), name


def test_idle_channels_come_from_the_first_batch():
    original = plain(VIT)
    model = annealed_from(original, VIT)
    ffn = find_ffns(original)[0][0]
    u, = record(original, [ffn.first], lambda: original(images(8, 32)))
    h = ffn.module.fc1(u[0]).flatten(0, 1).double()
    g = F.gelu(h)
    h, g = h - h.mean(0), g - g.mean(0)
    residual = g.square().mean(0) - (h * g).mean(0) ** 2 / h.square().mean(0)
    cost = residual * ffn.module.fc2.weight.square().sum(0)
    for _ in range(2):
        model.train()(images(8, 32))
    idle = layers(model)[0].act.idle
    assert set(cost.argsort()[:72].tolist()) == set(idle.nonzero().flatten().tolist())


def test_feature_extractor():
    model = annealed_from(plain(VIT), VIT)
    features = annealed(VIT, features_only=True, out_indices=(1, 3))
    assert [m.act.step.item() for m in layers(features)] == [0] * 4
    features.train()(images(4, 32))
    assert [m.act.step.item() for m in layers(features)] == [1] * 4
    hooked = timm.create_model(
        'repa_any', base='pit_ti_224', img_size=64, depth=(1, 1, 1), anneal_steps=9, features_only=True)
    assert hooked.feature_info.module_name()
    hooked.train()(images(4, 64))
    assert [m.act.step.item() for m in layers(hooked)] == [1] * 3
    others = annealed(VIT, anneal_steps=0, features_only=True, out_indices=(1, 3))
    assert not others._forward_pre_hooks  # they would walk over the modules in each pass
    model.eval()
    assert len(layers(model)) == 4


@pytest.mark.parametrize('num_classes', [5, 7])
def test_a_file_of_its_own(tmp_path, num_classes):
    """Not taken for one of the base, whose FFNs would then be random."""
    args = dict(VIT, num_classes=5, norm='batch')
    model = annealed(args)
    train(model.train(), create_optimizer_v2(model, opt='sgd', lr=.1), images(4, 32), torch.arange(4), 1)
    torch.save(model.state_dict(), tmp_path / 'own.pth')
    overlay = dict(file=str(tmp_path / 'own.pth'), num_classes=5)
    loaded = annealed({**args, 'num_classes': num_classes}, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    x = images(2, 32)
    assert torch.equal(loaded.forward_features(x), model.eval().forward_features(x))


@needs_recorded_args  # before, timm took weights of augreg for a NumPy archive
def test_pretrained_weights_come_from_the_base(tmp_path, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    original = plain(dict(VIT, num_classes=1000))
    torch.save(original.state_dict(), tmp_path / 'base.pth')
    model = annealed(
        VIT, pretrained=True, num_classes=1000, pretrained_cfg_overlay=dict(file=str(tmp_path / 'base.pth'))).eval()
    x = images(2, 32)
    assert torch.equal(model(x), original(x))
    advice = r'weights of repa_any(.|\n)*convert_to_repa\(timm.*calibration=loader\)'
    with pytest.raises(RuntimeError, match=advice):  # an annealing has to be trained
        annealed(VIT, pretrained=True, num_classes=1000, reparameterized=True)
    save_model(model, tmp_path / 'folder')
    (tmp_path / 'base.pth').unlink()
    loaded = timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=True).eval()
    assert torch.equal(loaded(x), original(x))


@pytest.mark.parametrize('kwargs,message', [
    (dict(anneal_steps=1), 'anneal_steps'),
    (dict(anneal_schedule='step'), "'linear' or 'cosine'"),
    (dict(norm='layer'), 'norm '),
    (dict(idle_schedule='linear'), 'idle_schedule'),
    (dict(idle_ratio=[.5]), 'one for each of the 4 FFNs'),
    (dict(idle_ratio=[.5] * 5), 'one for each of the 4 FFNs, but got 5'),
    (dict(idle_ratio=[None] * 4), 'at least one FFN'),
    (dict(idle_ratio=[.5, .5, .5, None], norm='batch'), r'idle_ratio .*blocks\.3\.mlp'),
    (dict(norm='batch', bn_eps=0.), 'bn_eps'),
    (dict(base='resnet18'), 'pointwise FFN, but ResNet has none'),
])
def test_refusals(kwargs, message):
    with pytest.raises(ValueError, match=message):
        annealed({} if 'base' in kwargs else VIT, device='meta', **kwargs)


def test_replaced_layers_are_not_folded():
    model = steps(annealed_from(plain(VIT), VIT, anneal_steps=2), 2)
    model.blocks[1].mlp.ffn.fc1 = torch.nn.Sequential(model.blocks[1].mlp.ffn.fc1, torch.nn.Tanh())
    with pytest.raises(ValueError, match=r'blocks\.1\.mlp cannot be folded: .*FFN, but it has a'):
        model.reparameterize()
    assert len(layers(model)) == 4


def test_convert_to_repa():
    model = plain(VIT)
    x = images(2, 32)
    expected = model(x)
    report = timm_rep.convert_to_repa(model, .5, anneal_steps=3)
    assert [(ffn.name, ffn.hidden_features, ffn.active_features) for ffn in report.ffns] == [
        (f'blocks.{i}.mlp', 96, 48) for i in range(4)]
    assert torch.equal(model(x), expected)
    steps(model, 3)
    expected = model.eval()(x)
    assert relative(model.reparameterize()(x), expected) < 1e-5


def test_it_trains():
    original = plain(VIT)
    x, target = images(10, 32), torch.arange(10) % 5
    model = annealed_from(original, VIT, anneal_steps=10, norm='batch')
    losses = train(model, create_optimizer_v2(model, opt='adamw', lr=3e-3, weight_decay=.05), x, target, steps=30)
    assert losses[-1] < .5 * losses[0]
    model.reparameterize()


@pytest.mark.slow
@pytest.mark.parametrize('count', [3, 6])  # of 4 steps
@pytest.mark.parametrize('norm', ['keep', 'batch'])
def test_compile(norm, count):
    original = plain(VIT)
    a, b = (annealed_from(original, VIT, norm=norm) for _ in range(2))
    steps(a, count)
    compiled = torch.compile(b, fullgraph=True)
    compiled.train()
    optimizer = torch.optim.SGD(b.parameters(), lr=.02)
    for i in range(count):
        loss = F.cross_entropy(compiled(images(8, 32, seed=i)), torch.arange(8) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items()):
        if name.endswith('importance') and count > 4:  # only the eager model stops to measure what chose the channels
            continue
        assert torch.allclose(x.float(), y.float(), rtol=1e-3, atol=1e-5), name


@torch.no_grad()
def randomized(model, seed=0):
    """A model with random norms, layer scales and biases."""
    torch.manual_seed(seed)
    for p in model.parameters():
        if p.numel() == max(p.shape, default=1):
            p.uniform_(.2, 1.2)
    return model.eval()


@pytest.mark.parametrize('family', ['poolformer', 'convnext', 'relpos', 'beit'])
def test_norms_and_layer_scales_fold(family):
    """Layer scales of images, of tokens, and parameters of a block."""
    model, x = build_to_train(family)
    randomized(model)
    timm_rep.convert_to_repa(model, .5, anneal_steps=2, norm='batch')
    steps(model, 3, x.shape[-1])
    expected = model.eval()(x)
    assert relative(model.reparameterize()(x), expected) < 1e-4


@pytest.mark.parametrize('args', [VIT, CONVNEXT, RESMLP])
def test_batch_norms_start_with_scale_and_shift_of_the_loaded_norms(args):
    original = randomized(plain(args))
    loaded = annealed_from(original, args, norm='batch')
    torch.manual_seed(1)
    converted = copy.deepcopy(original)
    timm_rep.convert_to_repa(converted, anneal_steps=4, norm='batch')
    for model in (loaded, converted):
        norms = {name: m for name, m in model.named_modules() if isinstance(m, AnnealedNorm)}
        assert norms
        for name, m in norms.items():
            path, _, _ = name.removesuffix('.norm').rpartition('.')
            block = original.get_submodule(path)
            old = block.norm2 if hasattr(block, 'norm2') else block.norm
            for ours, theirs in (('weight', 'alpha'), ('bias', 'beta')):
                value = getattr(old, ours, getattr(old, theirs, None))
                assert torch.equal(getattr(m.bn, ours), value.flatten())
                assert getattr(m.bn, ours).std() > .05


@pytest.mark.parametrize('registered', [False, True])
def test_arguments_reach_the_layers(registered):
    def convert(**kwargs):
        kwargs.update(anneal_steps=5, anneal_schedule='cosine')
        if registered:
            return annealed(VIT, **kwargs)
        model = plain(VIT)
        timm_rep.convert_to_repa(model, **kwargs)
        return model

    model = convert(norm='batch', bn_momentum=.3, bn_eps=1e-3)
    norms = [m for m in model.modules() if isinstance(m, AnnealedNorm)]
    assert {(m.bn.momentum, m.bn.eps, m.anneal_steps, m.anneal_schedule) for m in norms} == {(.3, 1e-3, 5, 'cosine')}
    for norm in ('keep', 'batch'):
        model = convert(norm=norm)
        acts = [layer.act for layer in layers(model)]
        assert {(act.anneal_steps, act.anneal_schedule, act.active_channels) for act in acts} == {(5, 'cosine', 24)}


@pytest.mark.parametrize('frozen', ['norms', 'all', 'none'])
def test_frozen_norms_stay_frozen(frozen):
    model = plain(VIT)
    for name, p in model.named_parameters():
        p.requires_grad_(not (frozen == 'all' or (frozen == 'norms' and 'norm' in name)))
    timm_rep.convert_to_repa(model, anneal_steps=5, norm='batch')
    for m in model.modules():
        if isinstance(m, AnnealedNorm):
            assert {p.requires_grad for p in (*m.bn.parameters(), m.alpha)} == {frozen == 'none'}


def test_a_batch_norm_of_the_model_stays():
    """The norm is not annealed: it folds as it is."""
    model = plain(VIT)
    for block in model.blocks:
        block.norm2 = _TokenNorm(24)
    norms = [block.norm2 for block in model.blocks]
    timm_rep.convert_to_repa(model, .5, anneal_steps=2, norm='batch')
    assert not any(isinstance(m, AnnealedNorm) for m in model.modules())
    assert [layer.norm for layer in layers(model)] == norms
    steps(model, 3)
    x = images(2, 32)
    expected = model.eval()(x)
    assert relative(model.reparameterize()(x), expected) < 1e-4


class _TokenNorm(nn.BatchNorm1d):
    """A BatchNorm of tokens in the last dimension but one."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def test_frozen_norms_keep_their_mode():
    model = timm.create_model('fastvit_t8', num_classes=5, layers=[1, 1, 1, 1]).train()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
    timm_rep.convert_to_repa(model, anneal_steps=5)
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert all(m.training for m in model.modules() if isinstance(m, (AnnealedFfn, AnnealedActivation)))


def test_fastvit_folds_twice():
    """timm's own folding of its RepMixer is not repeatable."""
    args = dict(num_classes=5, layers=[1, 1, 1, 1])
    model = timm.create_model('repa_any', base='fastvit_t8', reparameterized=True, **args).eval()
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    assert torch.equal(model.reparameterize()(x), expected)
    assert torch.equal(timm_rep.convert.reparameterize(reparameterize_model(model))(x), expected)


@torch.no_grad()
def test_positional_encodings_of_fastvit_fold_twice():
    model = randomize_(timm.create_model(
        'fastvit_sa12', num_classes=5, layers=[1, 1, 1, 1], embed_dims=[8, 8, 16, 32])).eval()
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    assert timm_rep.verify(reparameterize(model), x).passed
    torch.testing.assert_close(reparameterize(model)(x), expected, rtol=1e-4, atol=1e-4)


def small_fastvit():
    """An annealed FastViT that can be folded, with random statistics."""
    model = timm.create_model('fastvit_t8', num_classes=5, layers=[1, 1, 1, 1])
    timm_rep.convert_to_repa(model, anneal_steps=2)
    model.train()
    for _ in range(2):
        model(torch.randn(4, 3, 64, 64))
    return model.eval()


def test_statistics_are_checked_before_anything_is_folded():
    """Also those of the blocks that timm folds, after the layers of this package."""
    model = small_fastvit()
    layer = model.stages[2].blocks[0].token_mixer.mixer.identity
    for running_mean, running_var in ((None, None), (layer.running_mean, torch.full_like(layer.running_var, -1))):
        broken = copy.deepcopy(model)
        layer = broken.stages[2].blocks[0].token_mixer.mixer.identity
        layer.running_mean, layer.running_var = running_mean, running_var
        before = copy.deepcopy(broken)
        with pytest.raises(ValueError, match=r'stages\.2\.blocks\.0\.token_mixer\.mixer\.identity cannot be folded'):
            broken.reparameterize()
        assert [type(m) for m in broken.modules()] == [type(m) for m in before.modules()]
        assert same_weights(broken, before)


@pytest.mark.parametrize('mode', [False, True])
def test_folded_layers_have_the_mode_of_the_model(mode):
    """And kept layers their own, such as frozen BatchNorms inside of an FFN."""
    model = small_fastvit().train(mode)
    kept = [m for block in model.stages for m in block.blocks[0].mlp.pointwise.module.conv.modules()]
    for m in kept:
        m.training = not mode
    ffn = model.stages[0].blocks[0].mlp.fuse()
    assert {m.training for m in ffn.modules() if m in kept} == {not mode}
    model.reparameterize()
    found = {m: m.training for m in model.modules()}
    assert {found[m] for m in kept if m in found} == {not mode}
    assert {found[m] for m in found if m not in kept} == {mode}


@pytest.mark.parametrize('name, kwargs', [
    ('levit_128s', dict(depth=(1, 1, 1))), ('repghostnet_050', {}),
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ('repvit_m0_9', 'mobileone_s0'))])
def test_folded_layers_have_the_dtype_of_the_model_and_stay_frozen(name, kwargs):
    """Those that timm folds too, which it creates trainable and in float32."""
    model = timm.create_model(name, **kwargs).eval()
    x = torch.randn(1, *model.pretrained_cfg['input_size'])
    for dtype in torch.bfloat16, torch.float64:
        frozen = copy.deepcopy(model).to(dtype).requires_grad_(False)
        expected = frozen(x.to(dtype))
        reparameterize(frozen)
        assert {p.dtype for p in frozen.parameters()} == {dtype}
        assert not any(p.requires_grad for p in frozen.parameters())
        assert relative(frozen(x.to(dtype)), expected) < (.1 if dtype == torch.bfloat16 else 1e-6)
    model.requires_grad_(False)
    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    first.weight.requires_grad_()
    trainable = [n for n, p in reparameterize(model).named_parameters() if p.requires_grad]
    assert 1 <= len(trainable) <= 2  # the weight that it becomes a part of, and a bias
    assert trainable[0] == next(n for n, _ in model.named_parameters())


def test_folded_weights_that_the_dtype_cannot_hold():
    model = timm.create_model('mobileone_s0').half()
    norm = model.stages[0][0].conv_kxk[0].bn
    with torch.no_grad():
        norm.running_var.zero_()
        norm.weight.fill_(60000.)
    before = copy.deepcopy(model)
    with pytest.raises(OverflowError, match=r'stages\.0\.0\..* must be in the range of torch\.float16'):
        reparameterize(model)
    assert same_weights(model, before)


def test_batch_norms_without_weights():
    """timm's folding needs them, and would fail half-way."""
    model = timm.create_model('repvit_m0_9')
    norm = model.stages[3].blocks[1].channel_mixer.conv2.bn
    norm.weight = norm.bias = None
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r'channel_mixer\.conv2\.bn cannot be folded: .*affine=True'):
        reparameterize(model)
    assert same_weights(model, before)


class Neck(nn.Module):
    """Its method is not for folding."""

    def fuse(self, a, b):
        return a + b


class NeckWithLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fuse = nn.Linear(3, 3)


@pytest.mark.parametrize('neck', [Neck, NeckWithLayer])
def test_other_attributes_with_the_names_of_methods_that_fold(neck):
    """timm would call them, after some layers have been folded."""
    net = timm.create_model('repa_deit_tiny', img_size=32, embed_dim=24, num_heads=3, depth=1)
    model = nn.ModuleDict({'net': net, 'neck': neck()})
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r'neck\.fuse must be a method that folds'):
        reparameterize(model)
    assert same_weights(model, before)
    assert reparameterize(model['net']).reparameterized


@pytest.mark.parametrize('idle_ratio', [.25, .75])
def test_checkpoints_of_another_idle_ratio_are_refused(idle_ratio):
    def create(idle_ratio):
        model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=24, num_heads=3, depth=1)
        timm_rep.convert_to_repa(model, idle_ratio=idle_ratio, anneal_steps=2)
        return model

    model = create(.5)
    for _ in range(2):
        model(torch.randn(2, 3, 32, 32))
    create(.5).load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r'blocks\.0\.mlp.*idle must have .* got 48: .*idle_ratio'):
        create(idle_ratio).load_state_dict(model.state_dict())


def shared_vit():
    torch.manual_seed(0)
    model = timm.create_model('test_vit', num_classes=5)
    model.blocks[1].mlp = model.blocks[0].mlp
    return model


def small_coat():
    """Its parallel blocks have one FFN under three names."""
    torch.manual_seed(0)
    return CoaT(
        img_size=64, patch_size=4, embed_dims=(16,) * 4, serial_depths=(1,) * 4, parallel_depth=1, mlp_ratios=(2,) * 4,
        num_classes=5)


@torch.no_grad()
@pytest.mark.parametrize('build_model, size, names', [
    (shared_vit, 160, ['blocks.0.mlp', 'blocks.1.mlp']),
    (small_coat, 64, [f'parallel_blocks.0.mlp{i}' for i in (2, 3, 4)])])
def test_an_ffn_with_several_names(build_model, size, names):
    """Weights of the plain model load, and folding replaces it under every name, by one layer."""
    original, model = build_model().eval(), build_model()
    for p in original.parameters():
        p.add_(torch.randn_like(p), alpha=.02)
    timm_rep.convert_to_repa(model, anneal_steps=2, idle_ratio=.5)
    model.load_state_dict(original.state_dict())
    x = images(2, size)
    assert relative(model.eval()(x), original(x)) < 1e-5
    for _ in range(2):
        model.train()(x)
    expected = model.eval()(x)
    model.reparameterize()
    assert len({model.get_submodule(name) for name in names}) == 1
    assert is_reparameterized(model)
    assert not [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, AnnealedFfn)]
    assert relative(model(x), expected) < 1e-5


@pytest.mark.parametrize('build_model, size, calls, checkpointing', [
    (shared_vit, 160, 2, False), (shared_vit, 160, 2, True), (small_coat, 64, 3, False)])
def test_all_calls_of_a_step_are_measured_once(build_model, size, calls, checkpointing):
    """Of an FFN with several names, which has other tokens and other numbers of tokens in each."""
    model = build_model()
    timm_rep.convert_to_repa(model, anneal_steps=5, idle_ratio=.5)
    if checkpointing:
        model.set_grad_checkpointing()
    counts = {}
    for module in model.modules():
        if isinstance(module, AnnealedActivation):
            module.register_forward_pre_hook(lambda m, args: counts.setdefault(m, []).append(args[0].detach()))
    model.train()(images(4, size)).sum().backward()
    layer, inputs = max(counts.items(), key=lambda item: len(item[1]))
    inputs = inputs[:calls]
    if checkpointing:
        assert len(counts[layer]) == 2 * calls  # repeated in the backward pass
    h = torch.cat([x.flatten(0, -2) for x in inputs]).double()
    y = layer.act(h)
    d, e = h - h.mean(0), y - y.mean(0)
    expected = torch.stack([
        h.mean(0), y.mean(0), d.square().mean(0), e.square().mean(0), (d * e).mean(0), torch.ones_like(h[0])])
    torch.testing.assert_close(layer.pending.double(), expected, rtol=1e-4, atol=1e-5)
    model(images(4, size))
    torch.testing.assert_close(layer.moments.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_arguments_of_other_models():
    """The third one of a NaFlexViT says which patches are padding; a ViT has another one."""
    model = plain(VIT)
    x = images(2, 32)
    expected = model(x, None, False)
    timm_rep.convert_to_repa(model, anneal_steps=5, idle_ratio=.5)
    assert relative(model.train()(x, None, False), expected) < 1e-4


def test_evaluation_waits_for_no_other_process(monkeypatch):
    """After a backward pass that repeated the forward pass; the other processes may not evaluate."""
    calls = []
    monkeypatch.setattr('timm_rep.layers.annealing.dist', SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda *args: 2,
        all_reduce=lambda tensor, *args, **kwargs: calls.append(tensor)))
    model = annealed_from(plain(VIT), VIT).train()
    model.set_grad_checkpointing()
    model(images(4, 32)).sum().backward()
    assert calls
    calls.clear()
    model.eval()(images(4, 32))
    assert not calls
    model.train()(images(4, 32))
    assert calls


@torch.no_grad()
@pytest.mark.parametrize('name', ['test_vit', pytest.param('repvgg_a0', marks=pytest.mark.slow)])
def test_norms_in_float32_beside_other_weights(name):
    model = timm.create_model(name, num_classes=5).eval()
    if name == 'test_vit':
        timm_rep.convert_to_repa(model)
    model.bfloat16()
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.float()
    x = images(2, 160).bfloat16()
    expected = model(x)
    reparameterize(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert relative(model(x), expected) < .1


@pytest.mark.parametrize('norm', ['keep', 'batch'])
def test_a_frozen_batch_norm_of_the_model_stays_frozen(norm):
    model = MetaFormer(depths=(1,) * 4, dims=(8, 16, 16, 16), num_classes=5, norm_layers=nn.BatchNorm2d).train()
    frozen = [m.eval() for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    timm_rep.convert_to_repa(model, anneal_steps=3, norm=norm)
    assert not any(m.training for m in frozen)


@pytest.mark.parametrize('kind', ['annealed', 'plain'])
@pytest.mark.parametrize('norm', ['keep', 'batch'])
@pytest.mark.parametrize('base', ['vit', 'convnext'])
def test_a_model_on_meta_takes_the_tensors_it_loads(base, norm, kind):
    """load_state_dict(assign=True), with weights of another dtype; annealing is at its beginning, or where it was."""
    args = {**BASES[base], 'norm': norm}
    source = plain(BASES[base]) if kind == 'plain' else steps(annealed(args), 2)
    expected = annealed(args)
    expected.load_state_dict(source.state_dict())
    model = annealed(args, device='meta')
    model.load_state_dict(source.state_dict(), assign=True)
    assert same_weights(model, expected)
    assert same_weights(steps(model, 3), steps(expected, 3))
    half = annealed(args, device='meta', dtype=torch.bfloat16)
    half.load_state_dict(copy.deepcopy(source).bfloat16().state_dict(), assign=True)
    assert same_weights(half, annealed_from(source, args).bfloat16())


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_folded_models_are_scripted(tmp_path):
    """Without the hooks of annealing, which TorchScript refuses; also in a part of a network. Others' hooks stay."""
    model = annealed(VIT)
    kept = model.register_forward_pre_hook(lambda *args: None)
    steps(model, 4)
    network = torch.nn.Sequential(model.eval())
    folded = reparameterize(network)
    assert [*folded[0]._forward_pre_hooks] == [kept.id]
    assert not folded[0]._forward_hooks
    kept.remove()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(torch.jit.script(folded)(x), folded(x))


@pytest.mark.parametrize('args', [
    VIT, dict(base='fastvit_t8', layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64))], ids=['vit', 'fastvit'])
def test_folding_inside_another_module(args):
    """The hooks of annealing go with it; after an error they are there as before."""
    model = annealed({**args, 'num_classes': 5}, anneal_steps=2).train()
    x = images(4, 64 if args is not VIT else 32)
    for _ in range(2):
        model(x)
    averaged = torch.optim.swa_utils.AveragedModel(model.eval())
    network = torch.nn.Sequential(copy.deepcopy(averaged), timm.create_model('mobileone_s0').eval())
    expected, folded = model(x), reparameterize(averaged)
    assert not layers(folded)
    assert relative(folded(x), expected) < 1e-5
    network[1].stem.conv_kxk.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match='hooks'):  # found after the annealed model is folded
        reparameterize(network)
    inner = network[0].module
    assert len(inner._forward_pre_hooks) == len(inner._forward_hooks) == 1
    for layer in layers(inner):
        layer.act.step.zero_()
        layer.act.update_end()
    inner.train()(x)
    assert {layer.act.step.item() for layer in layers(inner)} == {1}


def test_frozen_norms_fold_with_timm():
    """timm's own function, too, folds the batch norms that its ``freeze()`` replaces."""
    model = timm.create_model('fasternet_t0', depths=(1, 1, 1, 1), embed_dim=16, num_classes=5)
    timm_rep.convert_to_repa(model, anneal_steps=2)
    timm.utils.freeze(randomize_(steps(model, 3)).eval())
    x = torch.randn(2, 3, 64, 64)
    folded = reparameterize_model(model)
    assert not layers(folded)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-4)


def test_traced_features():
    """By torch.fx, as those of the base."""
    features = timm.create_model(
        'repa_any', base='test_convnext', anneal_steps=3, features_only=True, feature_cls='fx').train()
    assert len(features(images(2, 64))) == 4
    assert {m.act.step.item() for m in layers(features)} == {1}


@pytest.mark.parametrize('base, kwargs', [
    ('beit_base_patch16_224', {}), ('vit_tiny_patch16_224', {'fix_init': True})])
def test_initialization_of_timm(base, kwargs):
    """``init_weights()`` scales the last layer of an FFN by its depth in some models."""
    args = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5, **kwargs)
    model, expected = timm.create_model('repa_any', base=base, anneal_steps=5, **args), timm.create_model(base, **args)
    for m in (model, expected):
        torch.manual_seed(0)
        m.init_weights()
    for layer, block in zip(layers(model), expected.blocks):
        assert torch.equal(layer.ffn.fc2.weight, block.mlp.fc2.weight)


@pytest.mark.parametrize('norm', ['keep', 'batch'])
def test_to_empty(norm):
    """The state of annealing is initialized, and takes plain weights."""
    model = annealed({**VIT, 'norm': norm}, device='meta').to_empty(device='cpu')
    expected = annealed({**VIT, 'norm': norm})
    for name, value in expected.state_dict().items():
        if name.rpartition('.')[2] in ('step', 'idle', 'moments', 'pending', 'importance', 'alpha', 'running_var'):
            assert torch.equal(model.state_dict()[name], value), name
    source = plain(VIT).state_dict()
    model.load_state_dict(source)
    expected.load_state_dict(source)
    assert same_weights(model, expected)
