"""convert_to_repopt: sums of linear branches of timm as plain convolutions."""
import copy
import json
import pickle
import re

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.byobnet import MobileOneBlock
from timm.utils import reparameterize_model

import timm_rep
from tests.convert.multi_branch import FAMILIES, build
from tests.helpers import images, normal_scales, randomize_, relative, same_weights, save_model
from timm_rep.convert import folded_copy
from timm_rep.convert.linear_sums import find_linear_sums
from timm_rep.convert.repopt import use_repopt_convs
from timm_rep.layers import CslaBlock, CslaConv2d, RepOptConv, csla_layers
from timm_rep.optim import RepAdamW, RepSGD
from timm_rep.scales import Scales
from timm_rep.utils.modes import default_dtype

KINDS = ('byobnet, RepVGG', 'byobnet, MobileOne', 'fastvit', 'repvit', 'repghost', 'ghostnet, v3')
FASTVIT = dict(layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64), num_classes=5)


@pytest.mark.parametrize('family', [
    family if family in KINDS else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES])
@torch.no_grad()
def test_function_and_fold(family):
    """The plain network computes the same, and folds into timm's folded model, key for key."""
    original, x = build(family), images(2, 64)
    before = original(x)
    folded = reparameterize_model(original)
    model = copy.deepcopy(original)
    report = timm_rep.convert_to_repopt(model)
    assert type(model) is type(original)
    assert not model.training
    assert relative(model(x), before) < 1e-5
    assert {layer.name for layer in report.layers} == csla_layers(model).keys()
    assert not find_linear_sums(model)[0]
    for name, layer in csla_layers(model).items():
        assert type(layer) is CslaConv2d
        assert layer.grad_mult is not None, name
    for other in (reparameterize_model(model), copy.deepcopy(model).reparameterize(), model.reparameterize()):
        state, expected = other.state_dict(), folded.state_dict()
        assert state.keys() == expected.keys()
        assert all(relative(state[k].float(), v.float()) < 1e-4 for k, v in expected.items() if v.abs().max() > 0)
        assert relative(other(x), before) < 1e-5
    timms = reparameterize_model(build(family, seed=1))
    timms.load_state_dict(model.state_dict())
    assert relative(timms(x), before) < 1e-5


def new_norms(model):
    return [module[1] for module in model.modules() if isinstance(module, RepOptConv)]


@pytest.mark.parametrize('family', [
    family if family in (*KINDS, 'repvit, legacy') else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES if family not in (
        'repvit',  # whose sums have a norm of their own
        'iformer', 'fastvit')])  # whose position encodings have none
@pytest.mark.parametrize('active', [0, -1])
@torch.no_grad()
def test_function_in_training(family, active):
    """A new norm has the mean and variance of a sum with one branch that is not constant, so that the first step of a
    training meets the same function.
    """
    original, x = build(family).double(), images(8, 64).double()
    for linear_sum in find_linear_sums(original)[0]:
        norms = [term.norm for term in linear_sum.terms if term.norm is not None]
        for norm in norms:
            if len(norms) < len(linear_sum.terms) or norm is not norms[active]:
                norm.weight.zero_()
    timm_rep.calibrate_batchnorm(original, [x])
    model = copy.deepcopy(original)
    timm_rep.convert_to_repopt(model, scales=False)
    before = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in new_norms(model)]
    for norm in new_norms(model):
        norm.momentum = 1.
    expected = original.train()(x)
    assert relative(expected, expected.roll(1, dims=0)) > .01  # it depends on the images
    assert relative(model.train()(x), expected) < 1e-2
    for norm, (mean, variance) in zip(new_norms(model), before):
        std = variance.sqrt().clamp(min=1e-2)
        assert ((norm.running_mean - mean).abs() < 1e-2 * std).all()
        assert ((norm.running_var - variance).abs() < 1e-2 * std ** 2).all()


def depthwise_branches(model):
    return [module.conv1 for module in model.modules() if type(module).__name__ == 'RepVggDw']


@torch.no_grad()
def test_dead_channels_of_a_depthwise_branch():
    """Of which nothing is left but residues of the statistics: they tell nothing of the input."""
    model, x = build('repvit, legacy'), images(2, 64)
    convs = depthwise_branches(model)
    for conv in convs:
        conv.c.weight[:3] = torch.tensor([0., 1e-30, -1e-12])[:, None, None, None]
        conv.bn.running_mean[:3] = 1e-3
        conv.bn.running_var[:3] = 1e-15
    expected = model(x)
    timm_rep.convert_to_repopt(model)
    assert len(convs) > 1
    assert all(norm.running_mean.abs().max() < 100 for norm in new_norms(model))
    assert relative(model(x), expected) < 1e-5


@torch.no_grad()
def test_small_channels_of_a_depthwise_branch():
    """They tell the same of the input as large ones."""
    statistics = []
    for is_small in False, True:
        model = build('repvit, legacy')
        for conv in depthwise_branches(model):
            conv.bn.weight.zero_()
            if is_small:
                factor = (.01 * conv.bn.eps / conv.bn.running_var).sqrt()
                conv.c.weight *= factor[:, None, None, None]
                conv.bn.running_mean *= factor
                conv.bn.running_var *= factor.square()
        timm_rep.convert_to_repopt(model)
        statistics.append(torch.cat([x for norm in new_norms(model) for x in (norm.running_mean, norm.running_var)]))
    assert relative(statistics[1], statistics[0]) < 1e-5


@torch.no_grad()
def test_variance_of_several_branches():
    """Between that of uncorrelated and that of equal branches. Extreme values leave the function as it was."""
    original, x = build('byobnet, RepVGG'), images(2, 64)
    block = original.stages[0][1]
    norms = [block.conv_kxk.bn, block.conv_1x1.bn, block.identity]
    for norm in norms:
        norm.weight[0] = 0
        norm.running_var[1] = 0
    norms[0].weight[2] *= 1e30
    expected = original(x)
    stds = torch.stack([
        norm.weight.double().abs() * (norm.running_var.double() / (norm.running_var.double() + norm.eps)).sqrt()
        for norm in norms])
    timm_rep.convert_to_repopt(original)
    variance = original.stages[0][1].reparam_conv[1].running_var
    assert relative(variance[3:], ((stds ** 2).sum(0).sqrt() * stds.sum(0))[3:].float()) < 1e-6
    assert variance.isfinite().all()
    assert variance[:2].tolist() == [0, 0]
    assert relative(original(x), expected) < 1e-5


def copies(family, scales_seed=1):
    """The CSLA structure of a family with random, also negative, scales, and the target structure with its kernels."""
    csla, target = build(family).double(), build(family).double()
    torch.manual_seed(2)
    use_repopt_convs(csla, 'csla')
    use_repopt_convs(target)
    scales = normal_scales(csla, seed=scales_seed)
    timm_rep.attach_grad_mults(target, scales)
    with torch.no_grad():
        for (name, layer), block in zip(csla_layers(target).items(), csla_layers(csla).values()):
            block.set_scales(scales[name])
            layer.weight.copy_(block.equivalent_kernel())
        norms = ([m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] for model in (
            target, csla))
        for a, b in zip(*norms):
            b.load_state_dict(a.state_dict())
    return csla, target


@pytest.mark.parametrize('family', [
    family if family == 'byobnet, MobileOne' else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES])
@pytest.mark.parametrize('rep,plain,args,tolerance', [
    (RepSGD, torch.optim.SGD, dict(lr=.01, momentum=.9, weight_decay=1e-3, nesterov=True), 1e-10),
    pytest.param(RepAdamW, torch.optim.AdamW, dict(lr=1e-3, weight_decay=.01, eps=1e-12), 1e-6, marks=pytest.mark.slow),
])
def test_csla_equals_gradient_reparameterization(family, rep, plain, args, tolerance):
    """20 steps of the plain network with GradMults are 20 steps of the branches."""
    csla, target = (model.train() for model in copies(family))
    # a BatchNorm over few values amplifies rounding
    size, batch = (64, 8) if family in ('lcnetv2', 'iformer') else (32, 4)
    parameters = {p: None for layer in csla_layers(csla).values() for p in layer.scales.parameters()}
    optimizers = (
        plain([p for p in csla.parameters() if p not in parameters], **args), rep(target.parameters(), **args))
    for step in range(20):
        x, y = images(batch, size, seed=step).double(), torch.arange(batch) % 5
        for model, optimizer in zip((csla, target), optimizers):
            optimizer.zero_grad()
            torch.manual_seed(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for layer, block in zip(csla_layers(target).values(), csla_layers(csla).values()):
        assert relative(layer.weight.detach(), block.equivalent_kernel()) < tolerance
    x = images(2, 32).double()
    assert relative(target.eval()(x), csla.eval()(x)) < tolerance


def test_the_branches_are_read_off_the_block():
    model = build('byobnet, MobileOne')
    sums, others = find_linear_sums(model)
    assert not others
    branches = {s.name: [b.name for b in s.branches] for s in sums}
    assert branches['stem'] == ['conv3x3', 'conv1x1']
    depthwise = ['conv3x3_0', 'conv3x3_1', 'conv1x1']
    assert branches['stages.0.0'] == depthwise
    assert branches['stages.0.1'] == [*depthwise, 'identity']
    assert branches['stages.0.2'] == ['conv1x1_0', 'conv1x1_1', 'conv1x1_2', 'identity']
    for linear_sum in sums:
        csla = linear_sum.csla(1.)
        block = linear_sum.module
        assert (csla.in_channels, csla.groups) == (block.conv_kxk[0].conv.in_channels, block.groups)
        assert csla.stride == block.conv_kxk[0].conv.stride
        assert csla.kernel_size == block.conv_kxk[0].conv.kernel_size
    # sqrt(2 / l) in layer l of a stage
    timm_rep.convert_to_repopt(model)
    initial = {name: scales['conv3x3_0'][0].item() for name, scales in Scales.initial(model).items() if (
        'conv3x3_0' in scales)}
    assert initial['stages.1.1.reparam_conv.0'] == pytest.approx(1.)
    assert initial['stages.1.0.reparam_conv.0'] == pytest.approx(2 ** .5)


@torch.no_grad()
def test_a_kernel_is_the_sum_of_its_branches():
    """Against the branches one by one, in float64, with a stride, groups, gains and biases."""
    for family in FAMILIES:
        model = build(family).double()
        for linear_sum in find_linear_sums(model)[0]:
            csla = linear_sum.csla(1.)
            x = torch.randn(2, csla.in_channels, 9, 8, dtype=torch.float64)
            expected = 0
            for conv, norm, gain in linear_sum.terms:
                y = x if conv is None else conv(x)
                y = y if norm is None else norm(y)
                expected = expected + (y if gain is None else y * gain.view(-1, 1, 1))
            kernel, bias = linear_sum.kernel(csla)
            y = F.conv2d(
                x, kernel.view(csla.kernel_shape), bias, csla.stride, csla.padding(csla.kernel_size), 1, csla.groups)
            assert relative(y, expected) < 1e-12


def test_other_blocks_are_kept():
    model = build('byobnet, MobileOne')
    block = MobileOneBlock(16, 24, kernel_size=1, stride=1)
    model.stages[1][2] = block
    report = timm_rep.convert_to_repopt(model)
    assert report.kept == {'stages.1.2.reparam_conv': 'has a single branch'}
    assert model.stages[1][2] is block
    assert 'stages.1.2.reparam_conv' in str(report)
    assert 'conv3x3_0 + conv3x3_1 + conv1x1 + identity' in str(report)
    assert set(report.as_dict()) == {'layers', 'kept'}
    model.reparameterize()
    assert block.reparam_conv is not None  # folded by timm


def converted():
    model = build('byobnet, RepVGG')
    timm_rep.convert_to_repopt(model)
    return model


@pytest.mark.parametrize('model,error,message', [
    (lambda: timm.create_model('resnet18', device='meta'), ValueError, 'ResNet'),
    (lambda: reparameterize_model(build('byobnet, RepVGG')), ValueError, 'unfolded'),
    (lambda: nn.DataParallel(build('byobnet, RepVGG')), ValueError, 'wraps another model'),
    (converted, ValueError, 'foldable'),
    (lambda: 'mobileone_s0', TypeError, 'create_model'),
])
def test_refusals(model, error, message):
    with pytest.raises(error, match=message):
        timm_rep.convert_to_repopt(model())


class _Adapted(nn.Conv2d):
    """A convolution with a forward() of its own, as adapters are."""


def _replace_conv(block):
    conv = block.conv_kxk.conv
    block.conv_kxk.conv = _Adapted(conv.in_channels, conv.out_channels, 3, conv.stride, 1, bias=False)


def _replace_norm(block):
    block.conv_kxk.bn = nn.GroupNorm(1, 16)


@pytest.mark.parametrize('change,reason', [
    (_replace_conv, 'has a branch with a _Adapted instead of a plain convolution'),
    (_replace_norm, 'has a branch with a GroupNorm instead of a BatchNorm'),
    (lambda block: setattr(block.conv_kxk.bn, 'act', nn.ReLU()), 'has a branch with a ReLU in it'),
    (lambda block: block.conv_kxk.register_forward_hook(lambda module, args, y: 2 * y), 'has hooks'),
    (lambda block: setattr(block.conv_1x1, 'forward', lambda x: 0), 'a forward.. that was replaced'),
])
def test_modified_blocks_stay(change, reason):
    model = build('byobnet, RepVGG')
    block = model.stages[0][1]
    change(block)
    report = timm_rep.convert_to_repopt(model)
    (name, found), = report.kept.items()
    assert name == 'stages.0.1.reparam_conv'
    assert re.search(reason, found)
    assert model.stages[0][1] is block
    assert block.conv_kxk is not None


def test_frozen_blocks_stay_frozen():
    model = build('byobnet, RepVGG')
    model.stages[0].requires_grad_(False)
    timm_rep.convert_to_repopt(model)
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name for name, grad in grads.items() if not grad} == {n for n in grads if n.startswith('stages.0.')}


def test_the_own_norm_of_a_block_stays_trainable():
    model = build('repvit')
    blocks = [m for m in model.modules() if type(m).__name__ == 'RepVggDw']
    for block in blocks:
        block.conv.requires_grad_(False)
        block.conv1.requires_grad_(False)
    norms = [block.bn for block in blocks]
    timm_rep.convert_to_repopt(model)
    assert all(p.requires_grad for norm in norms for p in norm.parameters())
    assert not any(layer.weight.requires_grad for layer in csla_layers(model).values())


@pytest.mark.parametrize('family', ['byobnet, RepVGG', 'byobnet, MobileOne'])
def test_stochastic_depth_over_the_branches(family):
    model = build(family)
    block = model.stages[1][1]
    block.drop_path = timm.layers.DropPath(.25)
    before = repr(model)
    with pytest.raises(ValueError, match=r'stages\.1\.1 .*0\.25.*drop_path_rate=0'):
        timm_rep.convert_to_repopt(model)
    assert repr(model) == before
    block.drop_path.drop_prob = 0.
    timm_rep.convert_to_repopt(model)


@pytest.mark.parametrize('family', ['byobnet, RepVGG', 'byobnet, MobileOne', 'fastvit', 'repvit'])
@torch.no_grad()
def test_synchronized_norms_stay_synchronized(family):
    model, plain, x = build(family), build(family), images(2, 64)
    group = object()
    model = timm.layers.convert_sync_batchnorm(model, process_group=group)
    timm_rep.convert_to_repopt(plain)
    timm_rep.convert_to_repopt(model)
    assert relative(model(x), plain(x)) < 1e-6
    layers = [model.get_submodule(name.removesuffix('.0')) for name in csla_layers(model)]
    assert all(isinstance(norm, nn.SyncBatchNorm) and norm.process_group is group for _, norm in layers)
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in plain.modules())
    assert relative(reparameterize_model(model)(x), plain(x)) < 1e-5


@pytest.mark.parametrize('family,change', [
    ('byobnet, RepVGG', lambda model: model.stages[1][1].conv_1x1.conv.weight.data[0].fill_(torch.nan)),
    ('byobnet, RepVGG', lambda model: model.stages[1][1].conv_kxk.bn.running_var[0].fill_(-1)),
    ('repvit, legacy', lambda model: [
        m for m in model.modules() if type(m).__name__ == 'RepVggDw'][-1].conv.bn.running_mean[0].fill_(torch.inf)),
])
def test_weights_that_are_not_finite(family, change):
    model = build(family)
    change(model)
    before, state = repr(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r'stages\.\d\..*finite') as error:
        timm_rep.convert_to_repopt(model)
    assert '\n' not in str(error.value)
    assert repr(model) == before
    assert all(torch.equal(v.nan_to_num(), state[k].nan_to_num()) for k, v in model.state_dict().items())


def test_compiled_models_are_refused():
    model = build('byobnet, RepVGG')
    model.stages[0][1].compile(backend='eager')
    with pytest.raises(ValueError, match='compiled'):
        timm_rep.convert_to_repopt(model)


@pytest.mark.parametrize('family', ['fastvit', 'repvit'])  # the latter keeps the block's own BatchNorms
@pytest.mark.parametrize('scales', [{'stem': {'conv3x3': torch.ones(16)}}, 'nowhere.safetensors', 3])
def test_scales_that_do_not_fit_leave_the_model_as_it_was(family, scales):
    model, x = build(family), images(2, 64)
    before, keys, modules = model(x), list(model.state_dict()), list(model.modules())
    with pytest.raises((ValueError, FileNotFoundError)):
        timm_rep.convert_to_repopt(model, scales)
    assert list(model.state_dict()) == keys
    assert list(model.modules()) == modules
    assert torch.equal(model(x), before)
    assert relative(reparameterize_model(model)(x), before) < 1e-4


@pytest.mark.parametrize('structure', [
    'target', pytest.param('search', marks=pytest.mark.slow), pytest.param('csla', marks=pytest.mark.slow)])
def test_registered(structure, tmp_path):
    torch.manual_seed(0)
    args = dict(FASTVIT, base='fastvit_t8')
    model = timm.create_model('repopt_any', structure=structure, **args)
    assert type(model).__name__ == 'FastVit'
    assert model.pretrained_cfg['architecture'] == 'repopt_any'
    kinds = {m.structure for m in csla_layers(model).values()}
    assert kinds == {structure}
    x = images(2, 64)
    model.train()
    model(x).sum().backward()
    model.eval()
    before = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert relative(other.reparameterize()(x), before) < 1e-5
    save_model(model, tmp_path / 'a')
    save_model(copy.deepcopy(model).reparameterize(), tmp_path / 'b')
    loaded = timm.create_model(f'local-dir:{tmp_path / "a"}', pretrained=True).eval()
    assert torch.equal(loaded(x), before)
    assert {m.structure for m in csla_layers(loaded).values()} == {structure}
    folded = timm.create_model(f'local-dir:{tmp_path / "b"}', pretrained=True).eval()
    assert relative(folded(x), before) < 1e-5
    plain = reparameterize_model(timm.create_model(args.pop('base'), **args)).eval()
    plain.load_state_dict(folded.state_dict())
    assert relative(plain(x), before) < 1e-5
    features = timm.create_model('repopt_any', base='fastvit_t8', features_only=True, structure=structure, **args)
    assert {m.structure for m in csla_layers(features).values()} == {structure}
    assert [f.shape[1] for f in features(x)] == features.feature_info.channels()
    with pytest.raises(RuntimeError, match='structure'):
        timm.create_model('repopt_any', base='fastvit_t8', reparameterized=True, **args).load_state_dict(
            model.state_dict())


@pytest.mark.parametrize('form', ['target', 'search', 'method', 'utility'])
def test_input_layers_and_folded_folders(form, tmp_path):
    """Weights of three input channels fit a model of one, also folded, by either function."""
    args = dict(FASTVIT, base='fastvit_t8')
    model = timm.create_model('repopt_any', structure='search' if form == 'search' else 'target', **args).eval()
    model = {'method': model.reparameterize, 'utility': lambda: reparameterize_model(model)}.get(form, lambda: model)()
    first = {'target': 'stem.0.reparam_conv.0', 'search': None}.get(form, 'stem.0.reparam_conv')
    save_model(model, tmp_path)
    assert model.pretrained_cfg['first_conv'] == first
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['model_args'].get('reparameterized', False) == (form in ('method', 'utility'))
    if first is None:
        return
    gray = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, in_chans=1).eval()
    assert gray.pretrained_cfg['first_conv'] == first
    x = images(2, 64)[:, :1]
    assert relative(gray(x), model(x.expand(-1, 3, -1, -1))) < 1e-5


def test_scales_of_the_registered_architecture(tmp_path):
    args = dict(FASTVIT, base='fastvit_t8')
    search = timm.create_model('repopt_any', structure='search', **args)
    scales = normal_scales(search, seed=0)
    scales.save(tmp_path / 's.safetensors')

    def recorded(model):
        save_model(model, tmp_path / 'saved')
        return json.loads((tmp_path / 'saved' / 'config.json').read_text())['model_args']['scales']

    for given, expected in (
            ('ones', 'ones'), ('init', 'init'), ('default', 'init'), (scales, False),
            (str(tmp_path / 's.safetensors'), False), (False, False)):
        model = timm.create_model('repopt_any', scales=given, **args)
        assert recorded(model) == expected
        attached = [layer.grad_mult for layer in csla_layers(model).values()]
        assert all((m is None) == (given is False) for m in attached)
    timm_rep.attach_grad_mults(model, 'ones')
    assert recorded(model) == 'ones'
    timm_rep.attach_grad_mults(model, scales)
    assert recorded(model) is False
    with pytest.raises(ValueError, match=r'scales .*structure='):
        timm.create_model('repopt_any', structure='csla', scales=False, **args)
    with pytest.raises(ValueError, match='structure must be'):
        timm.create_model('repopt_any', structure='plain', **args)
    with pytest.raises(ValueError, match='base must be'):
        timm.create_model('repopt_any', base='repopt_vgg_a0')


@pytest.mark.parametrize('fold, num_classes', [
    (False, 5), (True, 7), pytest.param(False, 7, marks=pytest.mark.slow),
    pytest.param(True, 5, marks=pytest.mark.slow),
])
def test_a_file_of_its_own(tmp_path, fold, num_classes):
    """Not taken for one of the base, whose weights would then be random: timm loads other classes without a check."""
    args = dict(FASTVIT, base='fastvit_t8', reparameterized=fold)
    model = randomize_(timm.create_model('repopt_any', **args)).eval()
    torch.save(model.state_dict(), tmp_path / 'own.pth')
    args.update(pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / 'own.pth'), num_classes=5))
    loaded = timm.create_model('repopt_any', **{**args, 'num_classes': num_classes}).eval()
    x = images(2, 64)
    assert torch.equal(loaded.forward_features(x), model.forward_features(x))
    if not fold:
        with pytest.raises(ValueError, match=r'reparameterized .*own\.pth'):
            timm.create_model('repopt_any', **{**args, 'num_classes': num_classes, 'reparameterized': True})


def test_pretrained_weights_of_the_base(tmp_path, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    torch.manual_seed(0)
    args = dict(FASTVIT, num_classes=1000)
    base = timm.create_model('fastvit_t8', **args)
    base.train()(images(4, 64))
    torch.save(base.state_dict(), tmp_path / 'base.pth')
    model = timm.create_model(
        'repopt_any', base='fastvit_t8', pretrained=True,
        pretrained_cfg_overlay=dict(file=str(tmp_path / 'base.pth')), **args).eval()
    x = images(2, 64)
    assert relative(model(x), base.eval()(x)) < 1e-5
    args.update(base='fastvit_t8', pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / 'base.pth')))
    folded = timm.create_model('repopt_any', reparameterized=True, **args).eval()
    assert not csla_layers(folded)
    assert folded.state_dict().keys() == reparameterize_model(base).state_dict().keys()
    assert folded._model_args['reparameterized']
    assert relative(folded(x), base(x)) < 1e-5
    del args['pretrained_cfg_overlay']
    advice = r"weights of repopt_any(.|\n)*structure='target'"
    with pytest.raises(RuntimeError, match=advice):  # for new branches
        timm.create_model('repopt_any', structure='search', **args)
    args = dict(FASTVIT, num_classes=1000)
    licence = base.pretrained_cfg['license']  # of these weights; a model with others has none
    assert licence
    assert model.pretrained_cfg['license'] == licence
    assert 'license' not in timm.create_model('repopt_any', base='fastvit_t8', **args).pretrained_cfg
    assert csla_layers(model)
    assert not any(isinstance(m, CslaBlock) for m in model.modules())
    other = build('repghost')
    assert not same_weights(model, other)


@pytest.mark.slow
def test_hyper_search_and_training(tmp_path):
    """Searched scales of a converted network train its target structure."""
    args = dict(FASTVIT, base='fastvit_t8')
    loader = [(images(8, 32, seed=i), torch.arange(8) % 5) for i in range(2)]
    scales = timm_rep.hyper_search('repopt_any', loader, epochs=2, warmup_epochs=0, **args)
    scales.save(tmp_path / 's.safetensors')
    model = timm.create_model('repopt_any', scales=str(tmp_path / 's.safetensors'), **args)
    optimizer = timm.optim.create_optimizer_v2(model, opt='repsgd', lr=.05, momentum=.9)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(loader[0][0]), loader[0][1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < .7 * losses[0]


def test_a_network_converted_in_inference_mode_trains():
    model, x = build('byobnet, MobileOne'), images(2, 64)
    with torch.inference_mode():
        timm_rep.convert_to_repopt(model)
    model.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('family', ['repvit', 'byobnet, RepVGG'])
@torch.no_grad()
def test_a_block_with_two_names(family):
    """The plain convolution replaces it under both."""
    model, x = build(family), images(2, 64)
    blocks = model.stages[0].blocks if family == 'repvit' else model.stages[1]
    blocks.append(copy.deepcopy(blocks[-1]))
    if family == 'repvit':
        blocks[1].token_mixer = blocks[0].token_mixer
    else:
        blocks.append(blocks[-1])
    before = model(x)
    timm_rep.convert_to_repopt(model)
    assert relative(model(x), before) < 1e-5
    assert not find_linear_sums(model)[0]
    assert relative(model.reparameterize()(x), before) < 1e-5


@pytest.mark.parametrize('form', ['reparameterize', 'folded_copy'])
def test_a_model_folded_in_inference_mode_trains(form):
    model, x = timm.create_model('repopt_any', base='fastvit_t8', **FASTVIT).eval(), images(2, 64)
    with torch.inference_mode():
        model = model.reparameterize() if form == 'reparameterize' else folded_copy(model)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('name', ['levit_128s', 'repvit_m0_9', 'repopt_vgg_a0'])
@torch.no_grad()
def test_folding_is_exact_with_another_default_dtype(name):
    model, x = timm.create_model(name, num_classes=5).eval(), images(1, 224)
    expected = model(x)
    with default_dtype(torch.bfloat16):
        folded = folded_copy(model)
        assert torch.get_default_dtype() == torch.bfloat16
    assert relative(folded(x), expected) < 1e-5


@pytest.mark.parametrize('family', [
    family if family in KINDS else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES])
@pytest.mark.parametrize('folded', [False, True])
def test_a_checkpoint_with_branches(family, folded):
    original = build(family)
    model = copy.deepcopy(original)
    timm_rep.convert_to_repopt(model)
    if folded:
        model.reparameterize()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r'branches of the multi-branch network .*convert_to_repopt\(model\)'):
        model.load_state_dict(original.state_dict(), strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    pickle.loads(pickle.dumps(model)).load_state_dict(before)


def test_weights_of_the_base_are_not_discarded():
    with pytest.raises(ValueError, match='reinit'):
        timm.create_model('repopt_any', base='mobileone_s0', pretrained=True, reinit=True)


@pytest.mark.parametrize('structure', ['target', 'search'])
def test_momentum_and_eps_of_the_branches(structure):
    """The BatchNorm of the sum has the momentum and eps of the branches' BatchNorms."""
    model = timm.create_model('repvgg_a0', num_classes=5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum, module.eps = .03, 1e-3
    use_repopt_convs(model, structure)
    norms = [layer[1] for layer in model.modules() if isinstance(layer, RepOptConv)]
    assert norms
    assert {(norm.momentum, norm.eps) for norm in norms} == {(.03, 1e-3)}


def test_frozen_norms_keep_their_mode():
    model = timm.create_model('mobileone_s0', num_classes=5).train()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
    timm_rep.convert_to_repopt(model)
    assert not any(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert all(layer.training for layer in csla_layers(model).values())


def test_kernels_that_the_dtype_cannot_hold():
    """Branches whose BatchNorms have large scales, in float16."""
    model = FAMILIES['byobnet, MobileOne']().half()
    block = model.stages[0][1]
    with torch.no_grad():
        block.conv_kxk[0].bn.weight.fill_(6e4)
        block.conv_kxk[0].bn.running_var.fill_(1e-2)
    before = copy.deepcopy(model)
    with pytest.raises(OverflowError, match=r'stages\.0\.1 must be in the range of torch\.float16'):
        timm_rep.convert_to_repopt(model)
    assert same_weights(model, before)
    timm_rep.convert_to_repopt(model.bfloat16())
