"""repa_any: converted timm models as a registered architecture."""
import copy
import json
import pickle

import pytest
import timm
import torch
from timm.models import PretrainedCfg
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model

import timm_rep
from tests.helpers import images, needs_recorded_args, relative, save_model, wild_
from tests.models.contract import train
from timm_rep.layers import RePaMlp, RePaMlpDeploy
from timm_rep.models._from_base import _resize

VIT = dict(base='vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=3, num_classes=5)
CONVNEXT = dict(base='convnext_atto', dims=(8, 16, 16, 24), depths=(1, 1, 1, 1), num_classes=5)


def plain(args):
    args = dict(args)
    torch.manual_seed(0)
    return timm.create_model(args.pop('base'), **args).eval()


@needs_recorded_args
@pytest.mark.parametrize('args', [VIT, CONVNEXT])
@torch.no_grad()
def test_it_is_what_the_conversion_makes(args, tmp_path):
    converted = plain(args)
    x = images(64, 32 if args is VIT else 128)
    report = timm_rep.convert_to_repa(converted, idle_ratio=.6, calibration=[x])
    model_args = {name: converted._model_args[name] for name in ('idle_ratio', 'linear_path')}
    model = timm.create_model('repa_any', **model_args, **args).eval()
    assert type(model) is type(converted)
    model.load_state_dict(converted.state_dict())
    assert torch.equal(model(x), converted(x))
    assert len(report.ffns) == sum(isinstance(m, RePaMlpDeploy) for m in model.modules()) == 4
    assert model.pretrained_cfg['architecture'] == 'repa_any'
    assert model.pretrained_cfg['input_size'] == timm.get_pretrained_cfg(args['base']).input_size
    assert model.reparameterize() is model  # nothing is left to fold

    save_model(model, tmp_path)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert torch.equal(loaded(x), model(x))
    assert loaded.pretrained_cfg['mean'] == model.pretrained_cfg['mean']
    assert timm.create_model(f'local-dir:{tmp_path}', pretrained=True, num_classes=3)(x).shape[1] == 3
    with torch.device('meta'):
        assert timm.create_model(f'local-dir:{tmp_path}').num_classes == 5

    name = f'local-dir:{tmp_path}'
    features = timm.create_model(name, pretrained=True, features_only=True, out_indices=(1, 2)).eval()
    expected = model.forward_intermediates(x, indices=(1, 2), intermediates_only=True)
    assert [torch.equal(a, b) for a, b in zip(features(x), expected)] == [True, True]
    names = {'model.'} if args is VIT else {'stem_0.', 'stages_1.'}
    assert all(any(k.startswith(name) for k in features.state_dict()) for name in names)
    assert not any('head' in k for k in features.state_dict())


@pytest.mark.parametrize('base,args,size', [
    ('vit_tiny_patch16_224', {**VIT, 'depth': 4}, 32),
    ('convnext_atto', CONVNEXT, 64),
    ('swin_tiny_patch4_window7_224',
     dict(img_size=64, patch_size=4, embed_dim=24, depths=(1, 1, 1), num_heads=(2, 4, 4), window_size=4), 64),
    ('pit_ti_224', dict(base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2), img_size=64), 64),
])
@pytest.mark.parametrize('indices', [{}, dict(out_indices=(0, 1))])
@torch.no_grad()
def test_features_match_timm_for_the_base(base, args, size, indices):
    args = {**args, 'base': base, 'norm': 'batch', 'idle_ratio': .5}
    torch.manual_seed(0)
    model = timm.create_model('repa_any', **args).eval()
    torch.manual_seed(0)
    features = timm.create_model('repa_any', features_only=True, **indices, **args).eval()
    for name in 'base', 'norm', 'idle_ratio':
        args.pop(name)
    expected = timm.create_model(base, features_only=True, **indices, **args)
    info = expected.feature_info
    assert type(features) is type(expected)
    assert features.output_fmt == expected.output_fmt
    assert features.feature_info.channels() == info.channels()
    assert features.feature_info.reduction() == info.reduction()
    x = images(2, size)
    outputs = model.forward_intermediates(x, indices=list(info.out_indices), intermediates_only=True)
    if features.output_fmt == 'NHWC':
        outputs = [y.permute(0, 2, 3, 1) for y in outputs]
    assert [torch.equal(y, z) for y, z in zip(features(x), outputs, strict=True)] == [True] * len(outputs)


@needs_recorded_args
@pytest.mark.parametrize('base,args,change', [
    ('vit_tiny_patch16_224', VIT, dict(img_size=48)),
    ('vit_tiny_patch16_224', VIT, dict(patch_size=4)),
    ('deit3_small_patch16_224', VIT, dict(img_size=48)),
    ('eva02_tiny_patch14_224', VIT, dict(img_size=48)),
    ('beit_base_patch16_224', VIT, dict(img_size=48)),
    ('swin_tiny_patch4_window7_224',
     dict(img_size=64, patch_size=4, embed_dim=24, depths=(1, 1), num_heads=(2, 4), window_size=4, num_classes=5),
     dict(img_size=128, window_size=8)),
])
@torch.no_grad()
def test_other_sizes(base, args, change, tmp_path):
    """Tensors that depend on the size of images, patches or windows are resized as timm does it for the base."""
    original = plain({**args, 'base': base})
    for p in original.parameters():
        p.normal_(std=.1)
    save_model(original, tmp_path / 'plain')
    converted = copy.deepcopy(original)
    timm_rep.convert_to_repa(converted, calibration=[images(32, args['img_size'])])
    save_model(converted, tmp_path / 'converted')
    resized, expected = (timm.create_model(
        f'local-dir:{tmp_path / name}', pretrained=True, **change).state_dict() for name in ('converted', 'plain'))
    shared = resized.keys() & expected.keys()
    assert all(torch.equal(resized[name], expected[name]) for name in shared)
    own = converted.state_dict()
    assert any(own[name].shape != resized[name].shape for name in shared)
    assert all(torch.equal(resized[name], own[name]) for name in resized.keys() - shared)
    assert resized.keys() == own.keys()


@pytest.mark.parametrize('name,base', [('repa_any', 'VisionTransformer'), ('repopt_any', 'ByobNet')])
def test_a_base_is_not_needed(name, base):
    assert type(timm.create_model(name, device='meta')).__name__ == base


def test_weights_of_another_base(tmp_path):
    save_model(timm.create_model('repa_any', **VIT), tmp_path)
    with pytest.raises(ValueError, match=r"base must be 'vit_tiny_patch16_224'.*'deit_tiny_patch1"):
        timm.create_model(f'local-dir:{tmp_path}', pretrained=True, base='deit_tiny_patch16_224')


def test_filters_only_resize():
    """A filter of timm may rename by the order of the keys, as NextViT's did: it takes any weights for the authors'."""
    model = torch.nn.Linear(3, 2)
    given = dict(weight=torch.ones(2, 5), bias=torch.ones(2), other=torch.ones(2))

    def filter_fn(state_dict, model):
        return dict(weight=state_dict['weight'][:, :3], bias=state_dict['other'] * 2, other=state_dict['bias'])

    resized = _resize(filter_fn, given, model)
    assert resized['weight'].shape == (2, 3)
    assert all(resized[name] is given[name] for name in ('bias', 'other'))


@pytest.mark.parametrize('base,args', [
    ('beit_base_patch16_224', {}),
    ('eva02_tiny_patch14_224', dict(swiglu_mlp=True)),
    ('naflexvit_base_patch16_gap', dict(fix_init=True)),
])
def test_weights_initialized_again(base, args):
    """timm's init_weights() divides the weight of the i-th FFN's last layer by sqrt(2 i)."""
    args = dict(args, img_size=32, patch_size=16) if 'naflex' not in base else args
    model = timm.create_model('repa_any', base=base, embed_dim=48, depth=8, num_heads=3, num_classes=5, **args)
    torch.manual_seed(0)
    model.init_weights()
    spread = [block.mlp.fc_out.weight.std().item() for block in model.blocks]
    assert spread[0] / spread[-1] == pytest.approx(8 ** .5, rel=.1)


def test_one_ratio_for_each_ffn():
    ratios = [.5, None, 1., 0.]
    model = timm.create_model('repa_any', idle_ratio=ratios, device='meta', **VIT)
    assert [getattr(getattr(b.mlp, 'fc_in', None), 'out_features', None) for b in model.blocks] == [48, None, None, 96]
    assert type(model.blocks[1].mlp) is timm.layers.Mlp
    assert [getattr(b.mlp, 'has_idle', None) for b in model.blocks] == [True, None, True, False]


def test_one_linear_path_for_each_ffn():
    paths = [True, False, False, True]
    model = timm.create_model('repa_any', idle_ratio=[.5, .5, None, 0.], linear_path=paths, device='meta', **VIT)
    mlps = [model.blocks[i].mlp for i in (0, 1, 3)]
    assert [(m.fc_in.out_features, m.has_idle, m.fc_out.bias is None) for m in mlps] == [
        (48, True, True), (48, False, False), (96, False, False)]
    model = timm.create_model('repa_any', linear_path=False, device='meta', **VIT)
    assert not any(m.has_idle for m in model.modules() if isinstance(m, RePaMlpDeploy))


@torch.no_grad()
def test_structure_of_the_paper(tmp_path):
    model = timm.create_model('repa_any', norm='batch', idle_ratio=.5, bn_momentum=.2, **VIT).eval()
    mlps = [m for m in model.modules() if isinstance(m, RePaMlp)]
    assert len(mlps) == 4
    assert {(m.norm1.momentum, m.act.active_channels) for m in mlps} == {(.2, 48)}
    for i, mlp in enumerate(mlps):
        wild_(mlp, i, log_var=(-1, 1))
    x = images(3, 32)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert relative(other.reparameterize()(x), expected) < 1e-4
    assert relative(reparameterize_model(model)(x), expected) < 1e-4
    assert torch.equal(model(x), expected)
    save_model(model, tmp_path / 'training')
    save_model(model.reparameterize(), tmp_path / 'folded')
    folded = model(x)
    for name, given in (('training', dict(reparameterized=True)), ('folded', {})):
        loaded = timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True, **given).eval()
        assert torch.equal(loaded(x), folded)
    loaded = timm.create_model(f'local-dir:{tmp_path / "training"}', pretrained=True).eval()
    assert torch.equal(loaded(x), expected)
    with pytest.raises(RuntimeError, match='has the deploy structure'):
        loaded.load_state_dict(model.state_dict())


REPVIT = dict(base='repvit_m0_9', embed_dim=(16, 24), depth=(1, 1), num_classes=5)
NEXTVIT = dict(base='nextvit_small', stem_chs=(8, 8, 8), depths=(1, 1, 5, 1), head_dim=8, num_classes=5)
IFORMER = dict(base='iformer_t', dims=(8, 16, 24, 24), depths=(1, 1, 3, 3), attn_groups=(0, 0, 1, 1), num_classes=5)


@pytest.mark.parametrize('args', [
    dict(REPVIT), dict(REPVIT, anneal_steps=2), pytest.param(dict(NEXTVIT, anneal_steps=2), marks=pytest.mark.slow),
    dict(IFORMER, anneal_steps=2), dict(VIT, anneal_steps=2)])
@torch.no_grad()
def test_bases_that_timm_folds(args, tmp_path):
    """Folded by either function, all of the model is, and its folder says so."""
    if not timm.is_model(args['base']):
        pytest.skip('the oldest supported timm lacks it')
    model, x = timm.create_model('repa_any', **args).train(), images(4, 64 if args['base'] == 'iformer_t' else 32)
    for _ in range(3):
        model(x)
    expected = model.eval()(x)
    save_model(model, tmp_path / 'unfolded')
    assert relative(timm.create_model(f'local-dir:{tmp_path / "unfolded"}', pretrained=True).eval()(x), expected) < 1e-6
    for name, folded in (('own', copy.deepcopy(model).reparameterize()), ('timm', reparameterize_model(model))):
        assert len(folded.state_dict()) < len(model.state_dict())
        assert relative(folded(x), expected) < 1e-5
        save_model(folded, tmp_path / name)
        loaded = timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True).eval()
        assert relative(loaded(x), folded(x)) < 1e-6


@pytest.mark.parametrize('args,message', [
    (dict(base='repa_deit_tiny'), r"base must be .*got 'repa_deit_tiny'"),
    (dict(base='vit_tiny_patch16_224.augreg_in21k'), 'without tag'),
    (dict(base='hf-hub:timm/resnet18.a1_in1k'), 'without tag'),
    (dict(base='resnet18'), 'base must have a pointwise FFN'),
    (dict(base='resnet18', norm='batch'), 'ResNet'),
    (dict(VIT, idle_ratio=[.5, .5]), r'4 FFNs.* 2: blocks.0.mlp'),
    *((dict(VIT, linear_path=path), 'linear_path') for path in ([True], 5, 'x', ['x'] * 4)),
    (dict(VIT, idle_schedule='linear'), 'idle_schedule'),
    (dict(VIT, norm='batch', linear_path=False), 'linear_path'),
    (dict(VIT, anneal_steps=4, linear_path=False), 'linear_path'),
    (dict(VIT, idle_ratio=1.5), 'idle_ratio .*1.5'),
    (dict(VIT, linear_path=['x'] * 4), 'linear_path'),
    (dict(VIT, linear_path=5), 'linear_path'),
    (dict(VIT, anneal_schedule='x'), 'anneal_schedule'),
    (dict(VIT, idle_ratio=1., linear_path=False), 'hidden channel'),
    (dict(VIT, reparameterized='yes'), 'reparameterized'),
    (dict(VIT, norm='layer'), r"norm must .*'layer'"),
])
def test_refusals(args, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('repa_any', device='meta', **args)


@pytest.mark.parametrize('variant', ['repa_any', 'repopt_any'])
def test_unknown_tags(variant):
    """As of every model of timm; a folder of that name would be found first."""
    for given in dict(model_name=f'{variant}.unknown'), dict(model_name=variant, pretrained_cfg='unknown'):
        with pytest.raises(RuntimeError, match=rf'Invalid pretrained tag \(unknown\) for {variant}'):
            timm.create_model(**given)


@pytest.mark.parametrize('variant,base', [
    ('repa_any', 'mixer_s32_224'), pytest.param('repopt_any', 'mobileone_s1', marks=pytest.mark.slow)])
def test_the_tag_of_no_weights(variant, base):
    """timm lists it, and its own tests create every model of the list."""
    assert f'{variant}.untrained' in timm.list_models(f'{variant}*', include_tags=True)
    for args in {}, dict(base=base):
        expected = timm.create_model(variant, device='meta', **args)
        model = timm.create_model(f'{variant}.untrained', device='meta', **args)
        assert model.pretrained_cfg == expected.pretrained_cfg
        assert str(model) == str(expected)


@pytest.mark.parametrize('given', [
    dict(base='repa_deit_tiny', weight_select='teacher.pth'),
    dict(checkpoint_path='other.pth'), dict(weight_select='teacher.pth'), dict(pretrained_cfg={'file': 'other.pth'}),
])
def test_a_config_cannot_name_other_files(tmp_path, given):
    model = timm.create_model('repa_any', **VIT)
    save_model(model, tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    config['model_args'].update(given)
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r'not allowed|multiple values|weight_select'):
        timm.create_model(f'local-dir:{tmp_path}', pretrained=True)


def test_weights_of_the_base_are_not_its_own():
    assert timm.list_pretrained('vit_tiny_patch16_224*')
    assert timm.list_pretrained('repa_any*') == ['repa_any.cifar10', 'repa_any.cifar10_converted']
    cfg = timm.create_model('repa_any', device='meta', **VIT).pretrained_cfg
    assert not any(cfg.get(name) for name in ('url', 'file', 'hf_hub_id', 'tag'))


def test_it_trains_as_any_model():
    model = timm.create_model('repa_any', **VIT)
    optimizer = create_optimizer_v2(model, opt='adamw', lr=3e-3, weight_decay=.05)
    losses = train(model, optimizer, images(10, 32), torch.arange(10) % 5, steps=25)
    assert losses[-1] < .5 * losses[0]


@pytest.mark.parametrize('anneal_steps', [0, 9])
def test_settings_of_the_batch_norms(anneal_steps):
    model = timm.create_model(
        'repa_any', **VIT, norm='batch', anneal_steps=anneal_steps, bn_momentum=.03, bn_eps=1e-3)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 8 - 4 * (anneal_steps > 0)
    assert {(norm.momentum, norm.eps) for norm in norms} == {(.03, 1e-3)}


@pytest.mark.parametrize('norm', ['keep', 'batch'])
def test_schedule_of_the_annealing(norm):
    model = timm.create_model('repa_any', **VIT, norm=norm, anneal_steps=5, anneal_schedule='cosine')
    layers = [m for m in model.modules() if hasattr(m, 'anneal_schedule')]
    assert len(layers) == (4 if norm == 'keep' else 8)
    assert {layer.anneal_schedule for layer in layers} == {'cosine'}
    assert model._model_args['anneal_schedule'] == 'cosine'


@pytest.mark.parametrize('given', [dict(mean=None, std=(.1, .2, .3)), PretrainedCfg(input_size=None, std=(.1, .2, .3))])
def test_a_given_cfg_without_a_value_leaves_the_bases(given):
    base = timm.get_pretrained_cfg(VIT['base'])
    cfg = timm.create_model('repa_any', **VIT, pretrained_cfg=given).pretrained_cfg
    assert cfg['std'] == (.1, .2, .3)
    assert cfg['input_size'] == base.input_size
    assert cfg['mean'] is not None


@needs_recorded_args
def test_another_annealing_of_published_weights(tmp_path):
    """Their idle channels would be activated again."""
    model = timm.create_model('repa_any', **VIT, anneal_steps=2)
    save_model(model, tmp_path)
    for given in (dict(anneal_steps=9), dict(anneal_schedule='cosine')):
        with pytest.raises(ValueError, match=f'{next(iter(given))} must be'):
            timm.create_model(f'local-dir:{tmp_path}', pretrained=True, **given)
    assert timm.create_model(f'local-dir:{tmp_path}', pretrained=True, anneal_steps=2)
