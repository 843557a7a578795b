"""Models converted in place, saved with timm's own function and loaded as repa_any and repopt_any."""
import copy
import json
import pickle

import numpy as np
import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model

import timm_rep
from tests.convert.multi_branch import build as multi_branch
from tests.helpers import images, needs_recorded_args, normal_scales, randomize_, same_weights
from tests.models.contract import train
from timm_rep.convert import use_repa_ffns
from timm_rep.convert.record import is_folded
from timm_rep.layers import AnnealedActivation, RePaMlp, csla_layers

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
REPVIT = dict(embed_dim=(16, 24), depth=(1, 1), num_classes=5)
FASTVIT = dict(layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64), num_classes=5)
# base, its arguments, size of the images
BASES = {
    'vit': ('vit_tiny_patch16_224', VIT, 32),
    'repvit': ('repvit_m0_9', REPVIT, 32),
    'fastvit': ('fastvit_t8', FASTVIT, 64),
    'mobileone': ('mobileone_s0', dict(num_classes=5), 64),
    # its first layers have the method reparameterize(), and nothing to fold
    'lcnetv2': ('lcnetv2_small', dict(scale=.25, depths=(1, 1, 2, 2), num_classes=5), 64),
}
FOLDS = {
    'unfolded': lambda model: model,
    'method': lambda model: model.reparameterize(),
    'utility': reparameterize_model,
}


def build(kind, **kwargs):
    torch.manual_seed(0)
    name, args, size = BASES[kind]
    model = timm.create_model(name, **{**args, **kwargs})
    return randomize_(model).eval(), images(64, size)[:, :kwargs.get('in_chans', 3)]


def steps(model, x, count):
    """Training steps."""
    train(model.train(), create_optimizer_v2(model, opt='sgd', lr=.01), x[:10], torch.arange(10) % 5, count)


def annealed(model, x, count=5):
    timm_rep.convert_to_repa(model, .5, anneal_steps=4)
    steps(model, x, count)


def annealed_norms(model, x):
    timm_rep.convert_to_repa(
        model, [.5, .25, 1.], anneal_steps=2, norm='batch', anneal_schedule='cosine', bn_momentum=.3)
    steps(model, x, 3)


def from_scratch(model, x):
    timm_rep.convert_to_repa(model, .6, idle_schedule='linear', bn_momentum=.3, bn_eps=1e-3)
    steps(model, x, 2)


def own_scales(model, x):
    timm_rep.convert_to_repopt(model)
    timm_rep.attach_grad_mults(model, normal_scales(model, seed=1))


# base and conversion
CONVERSIONS = {
    'one ratio': ('vit', lambda model, x: timm_rep.convert_to_repa(model, calibration=[x])),
    'several ratios': ('vit', lambda model, x: timm_rep.convert_to_repa(model, [.5, None, 1.], calibration=[x])),
    'macs': ('vit', lambda model, x: timm_rep.convert_to_repa(model, calibration=[x], macs=.8)),
    'in a base that folds': ('repvit', lambda model, x: timm_rep.convert_to_repa(model, calibration=[x])),
    'from scratch': ('vit', from_scratch),
    'from scratch, several ratios': ('vit', lambda model, x: timm_rep.convert_to_repa(model, [.5, .25, 1.])),
    'annealed': ('vit', annealed),
    'annealed, norms': ('vit', annealed_norms),
    'annealed, base that folds': ('repvit', annealed),
    'init': ('fastvit', lambda model, x: timm_rep.convert_to_repopt(model)),
    'ones': ('mobileone', lambda model, x: timm_rep.convert_to_repopt(model, 'ones')),
    'other scales': ('fastvit', own_scales),
    'layers with nothing to fold': ('lcnetv2', lambda model, x: timm_rep.convert_to_repopt(model)),
}
# the others take half a minute
FAST = [
    *((name, 'unfolded') for name in CONVERSIONS if name != 'ones'),
    *((name, 'method') for name in (
        'one ratio', 'in a base that folds', 'from scratch', 'init', 'layers with nothing to fold')),
    ('one ratio', 'utility')]


def check(model, x, folder, architecture):
    """The models loaded from timm's folder and from timm_rep.export's equal the model."""
    model.eval()
    save_for_hf(model, str(folder / 'saved'), safe_serialization=True)
    with torch.no_grad():
        loaded = timm.create_model(f'local-dir:{folder / "saved"}', pretrained=True).eval()
        assert torch.equal(loaded(x), model(x))
        assert same_weights(loaded, model)
    config = json.loads((folder / 'saved' / 'config.json').read_text())
    assert config['architecture'] == architecture
    assert type(loaded) is type(model)
    return config, loaded


@needs_recorded_args
@pytest.mark.parametrize('conversion,fold', [
    pytest.param(
        conversion, fold, marks=() if (conversion, fold) in FAST else pytest.mark.slow)
    for conversion in CONVERSIONS for fold in FOLDS])
def test_folders(conversion, fold, tmp_path):
    kind, convert = CONVERSIONS[conversion]
    if not timm.is_model(BASES[kind][0]):
        pytest.skip(f'this timm has no {BASES[kind][0]}')
    model, x = build(kind)
    convert(model, x)
    unfolded = set(model.state_dict())
    model = FOLDS[fold](model.eval())
    repopt = kind in ('fastvit', 'mobileone', 'lcnetv2')
    config, loaded = check(model, x, tmp_path, 'repopt_any' if repopt else 'repa_any')
    assert config['model_args']['base'] == BASES[kind][0]
    assert config['model_args'].get('reparameterized', False) == (set(model.state_dict()) != unfolded)
    if repopt and fold == 'unfolded':
        scales = {'other scales': False, 'ones': 'ones'}.get(conversion, 'init')
        assert config['model_args']['scales'] == scales
        attached = [layer.grad_mult for layer in csla_layers(loaded).values()]
        assert all((m is None) == (scales is False) for m in attached)
    elif repopt:
        assert 'scales' not in config['model_args']
    elif conversion == 'from scratch' and fold == 'unfolded':
        mlps = [m for m in loaded.modules() if isinstance(m, RePaMlp)]
        assert [m.act.active_channels for m in mlps] == [m.mlp.act.active_channels for m in model.blocks]
        assert {(m.norm1.momentum, m.norm2.eps) for m in mlps} == {(.3, 1e-3)}
    timm_rep.export(model, tmp_path / 'exported', reparameterize=fold != 'unfolded', images=x[:2])
    exported = timm.create_model(f'local-dir:{tmp_path / "exported"}', pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(exported(x), model(x))


@needs_recorded_args
def test_between_two_steps_of_an_annealing(tmp_path):
    """The training goes on where it was."""
    model, x = build('vit')
    annealed(model, x, count=2)
    assert {m.step.item() for m in model.modules() if isinstance(m, AnnealedActivation)} == {2}
    loaded = check(model, x, tmp_path, 'repa_any')[1]
    outputs = []
    for m in (model, loaded):
        steps(m, x, 3)
        outputs.append(m.eval().reparameterize()(x))
    assert torch.equal(*outputs)


@needs_recorded_args
@pytest.mark.parametrize('kind', ['vit', 'fastvit'])
@pytest.mark.parametrize('fold', ['unfolded', 'utility'])
def test_other_inputs_and_classes(kind, fold, tmp_path):
    model, x = build(kind, in_chans=1)
    if kind == 'vit':
        timm_rep.convert_to_repa(model, calibration=[x])
    else:
        timm_rep.convert_to_repopt(model)
    model.reset_classifier(3)
    config, loaded = check(FOLDS[fold](model), x, tmp_path, 'repa_any' if kind == 'vit' else 'repopt_any')
    assert (config['num_classes'], loaded.num_classes, loaded.in_chans) == (3, 3, 1)
    colours = timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=True, in_chans=3)
    assert colours(x.expand(-1, 3, -1, -1)).shape == (64, 3)


@needs_recorded_args
@pytest.mark.parametrize(
    'convert', [annealed, lambda model, x: timm_rep.convert_to_repopt(model)], ids=['repa', 'repopt'])
@pytest.mark.parametrize('fold', FOLDS)
@torch.no_grad()
def test_other_classes_where_folding_renames_the_classifier(fold, convert, tmp_path):
    """RepViT has two, with BatchNorms, which fold into one linear layer."""
    model, x = build('repvit')
    with torch.enable_grad():
        convert(model, x)
    model = FOLDS[fold](model.eval())
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, num_classes=7).eval()
    assert torch.equal(loaded.forward_features(x), model.forward_features(x))
    assert loaded(x).shape == (64, 7)
    assert (model.pretrained_cfg['classifier'] == 'head') == (fold != 'unfolded')  # for other readers of config.json


@needs_recorded_args
def test_copies(tmp_path):
    model, x = build('repvit')
    timm_rep.convert_to_repa(model, calibration=[x])
    for i, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        check(other.reparameterize(), x, tmp_path / str(i), 'repa_any')
    assert 'reparameterized' not in model._model_args
    check(model, x, tmp_path, 'repa_any')


@needs_recorded_args
def test_what_describes_the_weights_is_kept():
    model, x = build('vit')
    before = copy.deepcopy(model.pretrained_cfg)
    assert before['license']
    assert before['hf_hub_id']
    given = model.pretrained_cfg
    timm_rep.convert_to_repa(model, calibration=[x])
    assert given == before
    assert model.pretrained_cfg['license'] == before['license']
    assert model.pretrained_cfg['mean'] == before['mean']
    assert not any(model.pretrained_cfg.get(name) for name in ('url', 'file', 'hf_hub_id', 'tag'))
    assert model.default_cfg is model.pretrained_cfg


def _calibrated(model, loader, **kwargs):
    timm_rep.convert_to_repa(model, calibration=loader, **kwargs)


@pytest.mark.parametrize('kind,convert,message', [
    ('vit', lambda model: _calibrated(model, [images(1, 32)]), 'at least'),
    ('vit', lambda model: _calibrated(model, [images(64, 32)], macs=.01), r'macs must be .* got 0\.01'),
    ('vit', lambda model: _calibrated(model, [images(64, 32) * float('nan')]), 'finite'),
    ('vit', lambda model: timm_rep.convert_to_repa(model, 1.5), r'idle.ratio'),
    ('vit', lambda model: timm_rep.convert_to_repa(model, [.5, 1.5, .5]), r'idle.ratio'),
    ('vit', lambda model: timm_rep.convert_to_repa(model, [.5]), 'one for each of the 3 FFNs'),
    ('vit', lambda model: timm_rep.convert_to_repa(model, [.5] * 3, idle_schedule='linear'), "'constant'"),
    ('vit', lambda model: timm_rep.convert_to_repa(model, bn_eps=-1), 'bn_eps'),
    ('vit', lambda model: timm_rep.convert_to_repa(model, anneal_steps=3, norm='none'), 'norm '),
    ('vit', lambda model: timm_rep.convert_to_repa(model, [.5], anneal_steps=3), 'one for each'),
    ('fastvit', lambda model: timm_rep.convert_to_repopt(model, 3), 'got 3'),
    ('fastvit', lambda model: timm_rep.convert_to_repopt(model, {'stem': {}}), 'stem'),
    ('vit', timm_rep.convert_to_repopt, 'VisionTransformer'),
])
def test_failed_conversions_record_nothing(kind, convert, message):
    model, _ = build(kind)
    names, recorded = set(vars(model)), ('pretrained_cfg', 'default_cfg', '_model_args', '_traits')
    before = copy.deepcopy({name: getattr(model, name, None) for name in recorded})
    with pytest.raises((TypeError, ValueError), match=message):
        convert(model)
    assert {name: getattr(model, name, None) for name in recorded} == before
    assert set(vars(model)) == names
    assert not model._state_dict_pre_hooks
    assert not model._load_state_dict_pre_hooks


@pytest.mark.parametrize('cfg', [None, {}, dict(architecture='my_vit', url='here')])
@pytest.mark.parametrize('kwargs', [dict(calibration=[images(64, 32)]), dict(anneal_steps=2), {}])
def test_models_of_other_origin(cfg, kwargs):
    """Models not from create_model() convert and fold; their pretrained_cfg and arguments stay."""
    model, args = timm.models.VisionTransformer(**VIT), dict(depth=3)
    assert not hasattr(model, 'pretrained_cfg')
    if cfg is not None:
        model.pretrained_cfg, model._model_args = cfg, args
    before = copy.deepcopy((cfg, args))
    timm_rep.convert_to_repa(model, **kwargs)
    for _ in range(3):
        model(images(8, 32))
    model.eval().reparameterize().state_dict()
    assert (cfg, args) == before
    if cfg is None:
        assert not hasattr(model, 'pretrained_cfg')
        assert not hasattr(model, '_model_args')
    else:
        assert model.pretrained_cfg is cfg
        assert model._model_args is args


def test_multi_branch_models_of_other_origin():
    model = multi_branch('byobnet, RepVGG')
    timm_rep.convert_to_repopt(model)
    model.reparameterize().state_dict()
    assert not hasattr(model, 'pretrained_cfg')
    assert not hasattr(model, '_model_args')


@needs_recorded_args
def test_unknown_arguments_and_other_changes(tmp_path):
    """timm's function without create_model() records no arguments; layers that are put in by hand are not known."""
    by_function = timm.models.vit_tiny_patch16_224(**VIT)
    timm_rep.convert_to_repa(by_function)
    assert by_function.pretrained_cfg['architecture'] == 'vit_tiny_patch16_224'
    by_hand = build('vit')[0]
    use_repa_ffns(by_hand)
    for model in (by_function, by_hand):
        with pytest.raises(RuntimeError, match=r'builds another structure.*convert_to_repa'):
            timm_rep.export(model, tmp_path / 'folder')


@pytest.mark.parametrize('ratio', [torch.tensor(.5), torch.tensor([.5, .75, .5]), [torch.tensor(.5)] * 3])
@pytest.mark.parametrize('kwargs', [{}, dict(anneal_steps=2), dict(anneal_steps=np.int64(2))])
def test_ratios_are_recorded_as_numbers(ratio, kwargs):
    model, _ = build('vit')
    timm_rep.convert_to_repa(model, ratio, **kwargs)
    plain, _ = build('vit')
    timm_rep.convert_to_repa(plain, ratio.tolist() if hasattr(ratio, 'tolist') else [.5] * 3, **kwargs)
    assert json.dumps(getattr(model, '_model_args', {}), sort_keys=True) == json.dumps(
        getattr(plain, '_model_args', {}), sort_keys=True)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}


@pytest.mark.parametrize('kind', ['vit', 'repvit', 'fastvit'])
def test_folded_models_are_created_folded(kind):
    """Also where timm's folded layers look like unfolded ones."""
    name, args, _ = BASES[kind]
    for reparameterized in (False, True):
        model = timm.create_model('repa_any', base=name, reparameterized=reparameterized, **args)
        model.state_dict()
        assert is_folded(model) == (reparameterized or kind == 'vit')  # of which nothing is left to fold
        assert model._model_args['reparameterized'] == reparameterized


@needs_recorded_args
@pytest.mark.parametrize('kwargs', [{}, dict(anneal_steps=2), dict(anneal_steps=2, idle_ratio=[.25, None])])
def test_ffns_kept_for_their_hooks_are_kept_where_the_model_is_loaded(kwargs, tmp_path):
    model, x = build('vit')
    hook = model.blocks[1].mlp.register_forward_hook(lambda *args: None)
    if 'anneal_steps' in kwargs:
        timm_rep.convert_to_repa(model, **kwargs)
        steps(model, x, 3)
    else:
        timm_rep.convert_to_repa(model, calibration=[x])
    assert 'blocks.1.mlp.fc1.weight' in model.state_dict()
    hook.remove()
    check(model, x, tmp_path, 'repa_any')


@needs_recorded_args
@pytest.mark.parametrize('conversion', ['in a base that folds', 'from scratch', 'init'])
@pytest.mark.parametrize('fold', FOLDS)
def test_reading_the_weights_changes_nothing(conversion, fold, tmp_path):
    """A model's records are the same before and after state_dict() and a save, and its copies have their own."""
    kind, convert = CONVERSIONS[conversion]
    model, x = build(kind)
    convert(model, x)
    unfolded, cfg = model, model.pretrained_cfg
    model = FOLDS[fold](model.eval())
    if fold == 'utility':
        model.state_dict()  # records that timm's function has folded it
    before = {name: (id(value), copy.deepcopy(value)) for name, value in vars(model).items() if name in (
        'pretrained_cfg', 'default_cfg', '_model_args', '_traits')}
    assert len(before) == 4
    model.state_dict()
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    assert before == {name: (id(getattr(model, name)), getattr(model, name)) for name in before}
    if fold == 'utility':
        assert unfolded.pretrained_cfg is cfg
        assert 'reparameterized' not in unfolded._model_args
        assert not is_folded(unfolded)
    elif fold == 'unfolded':
        assert model.pretrained_cfg is cfg
    assert is_folded(model) == (fold != 'unfolded')
