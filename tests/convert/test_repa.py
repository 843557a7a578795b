"""convert_to_repa: three ways to convert, and which argument belongs to which."""
import copy
import json
import pickle

import pytest
import timm
import torch
from timm.layers import Mlp, RmsNorm, SimpleNorm
from timm.models import nextvit

import timm_rep
from tests.convert.families import VIT, build
from tests.helpers import images, relative
from timm_rep.convert import ConversionReport, anneal_ffns, linearize_ffns, use_repa_ffns
from timm_rep.convert.ffn import find_ffns, replace_module
from timm_rep.layers import is_reparameterized

WAYS = {'to train': {}, 'from data': dict(calibration=[images(64, 32)]), 'annealed': dict(anneal_steps=3)}


def vit():
    torch.manual_seed(0)
    return timm.create_model('vit_tiny_patch16_224', **VIT, num_classes=5)


@pytest.mark.parametrize('way', WAYS)
def test_every_way_converts_in_place_and_returns_a_report(way):
    model = vit()
    report = timm_rep.convert_to_repa(model, .5, **WAYS[way])
    assert isinstance(report, ConversionReport)
    assert [(ffn.name, ffn.hidden_features) for ffn in report.ffns] == [(f'blocks.{i}.mlp', 96) for i in range(2)]
    assert report.kept == {}
    assert (report.macs is None) == (way != 'from data')
    assert json.loads(json.dumps(report.as_dict()))['ffns'][1]['name'] == 'blocks.1.mlp'
    assert all(ffn.name in str(report) for ffn in report.ffns)
    assert hasattr(model, 'reparameterize')


@pytest.mark.parametrize('convert', [
    use_repa_ffns, lambda model: linearize_ffns(model, [images(64, 32)]), lambda model: anneal_ffns(model, 2)])
def test_each_function_adds_reparameterize(convert):
    """Also of copies."""
    model, x = vit(), images(4, 32)
    convert(model)
    for _ in range(2):
        model.train()(x)
    expected = model.eval()(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert other.reparameterize() is other
        assert relative(other(x), expected) < 1e-5
        assert is_reparameterized(other)


@pytest.mark.parametrize('way', ['from data', 'annealed'])
def test_ffns_without_a_ratio_are_kept(way):
    model = vit()
    mlp = model.blocks[1].mlp
    report = timm_rep.convert_to_repa(model, [.5, None], **WAYS[way])
    assert [ffn.name for ffn in report.ffns] == ['blocks.0.mlp']
    assert list(report.kept) == ['blocks.1.mlp']
    assert 'blocks.1.mlp' in str(report)
    assert model.blocks[1].mlp is mlp


# arguments of one or two ways, with a value that these take
ARGS = {
    'idle_schedule': ('linear', {'to train'}),
    'bn_momentum': (.2, {'to train', 'annealed'}),
    'bn_eps': (1e-3, {'to train', 'annealed'}),
    'macs': (.9, {'from data'}),
    'max_images': (64, {'from data'}),
    'ridge': (1e-3, {'from data'}),
    'progress': (False, {'from data'}),
    'norm': ('keep', {'annealed'}),
    'anneal_schedule': ('cosine', {'annealed'}),
    'nonsense': (1, set()),
    'reparameterized': (True, set()),
}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('arg', ARGS)
def test_arguments_of_another_way_are_refused(arg, way):
    model, (value, ways) = vit(), ARGS[arg]
    before = repr(model)
    if way in ways:
        timm_rep.convert_to_repa(model, **WAYS[way], **{arg: value})
        assert repr(model) != before
        return
    with pytest.raises(TypeError, match=arg) as error:
        timm_rep.convert_to_repa(model, **WAYS[way], **{arg: value})
    assert ('with calibration' in str(error.value).split(', but')[0]) == ('from data' in ways)
    assert repr(model) == before


@pytest.mark.parametrize('kwargs,message', [
    (dict(calibration=[], anneal_steps=2), 'calibration or anneal_steps'),
    (dict(anneal_steps=0), 'anneal_steps'),
    (dict(calibration=[images(64, 32)], idle_ratio=.75, macs=.7), 'idle_ratio or macs'),
])
def test_contradictions(kwargs, message):
    model = vit()
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        timm_rep.convert_to_repa(model, **kwargs)
    assert repr(model) == before


def compiled(module):
    module.compile(backend='eager')
    return module


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('compile_', [lambda module: torch.compile(module, backend='eager'), compiled])
def test_compiled_ffns_are_refused_by_name(way, compile_):
    """The compiled wrapper would go on to run the old weights."""
    model = vit()
    model.blocks[1].mlp = mlp = compile_(model.blocks[1].mlp)
    with pytest.raises(ValueError, match=r'blocks\.1\.mlp'):
        timm_rep.convert_to_repa(model, .5, **WAYS[way])
    assert model.blocks[1].mlp is mlp


def _tie_two_ffns(model):
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight


def _tie_to_another_layer(model):
    model.embedding = torch.nn.Embedding(24, 96)
    model.embedding.weight = model.blocks[0].mlp.fc2.weight


def _share_a_layer(model):
    model.probe = model.blocks[0].mlp.fc1


def _share_a_bias(model):
    model.blocks[0].mlp.fc2.bias = model.blocks[0].norm2.bias


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('tie, name', [
    (_tie_two_ffns, r'blocks\.1\.mlp\.fc1\.weight'), (_tie_to_another_layer, r'embedding\.weight'),
    (_share_a_layer, r'probe\.weight'), (_share_a_bias, r'norm2\.bias')])
def test_tied_parameters_are_refused_by_name(way, tie, name):
    """The other layer would keep the old value."""
    model = vit()
    tie(model)
    before = repr(model)
    with pytest.raises(ValueError, match=rf'blocks\.0\.mlp\.fc.*{name}'):
        timm_rep.convert_to_repa(model, .5, **WAYS[way])
    assert repr(model) == before
    assert not hasattr(model, 'reparameterize')


@pytest.mark.parametrize('way', ['from data', 'annealed'])
def test_an_ffn_in_two_places_is_converted_in_both(way):
    model = vit()
    model.blocks[1].mlp = model.blocks[0].mlp
    report = timm_rep.convert_to_repa(model, .5, **WAYS[way])
    assert [ffn.name for ffn in report.ffns] == ['blocks.0.mlp']
    assert model.blocks[1].mlp is model.blocks[0].mlp
    assert not isinstance(model.blocks[0].mlp, Mlp)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('norm', [SimpleNorm, RmsNorm])
def test_other_norms_of_the_hidden_features(way, norm):
    """Only a LayerNorm can be refitted, or become a BatchNorm."""
    model = vit()
    model.blocks[1].mlp.norm = kept = norm(96)
    if way == 'to train':
        with pytest.raises(ValueError, match=rf'blocks\.1\.mlp has a {norm.__name__}'):
            timm_rep.convert_to_repa(model)
        assert type(model.blocks[0].mlp) is Mlp
        return
    report = timm_rep.convert_to_repa(model, .5, **WAYS[way])
    assert [ffn.name for ffn in report.ffns] == ['blocks.0.mlp']
    assert norm.__name__ in report.kept['blocks.1.mlp']
    assert model.blocks[1].mlp.norm is kept


def test_nextvit_blocks_get_their_method_back():
    """The method folds the norm into the FFN; a conversion replaces the method, a failed one restores it."""
    model = nextvit.NextViT(3, stem_chs=(8, 8, 8), depths=(1, 1, 5, 1), head_dim=8)
    attributes = {m: set(vars(m)) for m in model.modules()}
    for ffn in find_ffns(model)[0]:
        new = ffn.replacement(2)
        replace_module(model, ffn.module, new)
        assert model.get_submodule(ffn.name) is new
        parent = model.get_submodule(ffn.name.rpartition('.')[0])
        assert 'reparameterize' in vars(parent)
        replace_module(model, new, ffn.module)
        assert model.get_submodule(ffn.name) is ffn.module
    assert {m: set(vars(m)) for m in model.modules()} == attributes


@pytest.mark.parametrize('kwargs,message', [
    (dict(bn_momentum='x'), 'bn_momentum'),
    (dict(bn_momentum=1.5), 'bn_momentum'),
    (dict(bn_eps='x'), 'bn_eps'),
    (dict(bn_eps=0.), 'bn_eps'),
    (dict(bn_eps=float('nan')), 'bn_eps'),
    (dict(bn_eps=True), 'bn_eps'),
    (dict(idle_ratio='x'), 'idle_ratio'),
    (dict(idle_ratio=[.5, 'x']), 'idle_ratio'),
    (dict(idle_ratio=[.5, 2.]), 'idle_ratio'),
    (dict(idle_ratio=[.5, None]), 'idle_ratio'),
    (dict(idle_ratio=[.5, .5], idle_schedule='linear'), 'idle_schedule'),
    (dict(idle_schedule='step'), 'idle_schedule'),
    (dict(anneal_steps=2, norm='batch', bn_momentum='x'), 'bn_momentum'),
    (dict(anneal_steps=2, norm='batch', idle_ratio=[.5, None]), r'idle_ratio .*blocks\.1\.mlp'),
    (dict(anneal_steps=2.5), 'anneal_steps'),
])
def test_wrong_values(kwargs, message):
    model = vit()
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        timm_rep.convert_to_repa(model, **kwargs)
    assert repr(model) == before
    assert not hasattr(model, 'reparameterize')


def test_momentum_none_is_a_cumulative_average():
    model = vit()
    timm_rep.convert_to_repa(model, bn_momentum=None)
    assert {m.momentum for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)} == {None}


@torch.no_grad()
@pytest.mark.parametrize('family', [
    'LevitMlp: levit', 'LevitMlp with convolutions: levit', 'RepVitMlp: repvit', 'NormMlp: tiny_vit'])
def test_layers_that_timm_folds_keep_float64(family):
    """timm creates them in the default dtype, which is as before afterwards."""
    model, x = build(family)
    timm_rep.convert_to_repa(model, calibration=[x])
    expected = model.double()(x.double())
    assert relative(model.reparameterize()(x.double()), expected) < 1e-12
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32
