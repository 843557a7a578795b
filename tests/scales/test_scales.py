import argparse
import json
import math
import os
import pickle
import re
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.utils.prune
from safetensors.torch import load_file, save_file
from timm.task import ClassificationTask
from timm.utils import ParseKwargs

import timm_rep
from timm_rep.layers import ConvBranch, Csla, CslaConv2d, IdentityBranch, csla_layers
from timm_rep.optim import RepSGD, get_grad_mult
from timm_rep.scales import Scales, attached_scales
from timm_rep.utils.modes import default_dtype

TINY = dict(depths=(1, 2, 2, 1), widths=(8, 16, 24, 32), stem_width=8, num_classes=5)


def tiny(**kwargs):
    return timm.create_model('repopt_vgg_a0', **{**TINY, **kwargs})


def some_scales(seed=0):
    torch.manual_seed(seed)
    model = tiny(structure='search')
    with torch.no_grad():
        for layer in csla_layers(model).values():
            for scale in layer.scales.values():
                scale.normal_()
            if 'identity' in layer.weights:
                layer.weights['identity'].normal_()
    return Scales.from_model(model)


def test_round_trip(tmp_path):
    scales = some_scales()
    scales.metadata.update(model='repopt_vgg_a0', epochs='3')
    for path in (tmp_path / 's.safetensors', str(tmp_path / 'new' / 's.safetensors')):
        scales.save(path)
        read = Scales.load(path)
        assert read == scales
        assert read.metadata == {'model': 'repopt_vgg_a0', 'epochs': '3'}
    assert repr(read) == "Scales(7 layers, epochs='3', model='repopt_vgg_a0')"
    assert load_file(path).keys() >= {'stem.conv.0.conv3x3', 'stages.1.1.conv.0.identity'}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / 's.safetensors'
    some_scales(1).save(path)
    before = path.read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b'half of it')
        raise OSError('No space left on device')

    monkeypatch.setattr('timm_rep.scales.files.write_safetensors', full)
    with pytest.raises(OSError, match='No space left'):
        some_scales(2).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ['s.safetensors']


def test_save_refuses_what_load_cannot_read(tmp_path):
    """Before anything is written."""
    scales = some_scales()
    for name in ('x.pth', 'x.pt', 'x', 'repopt_vgg_a0', 'new/x.bin'):
        with pytest.raises(ValueError, match=rf'\.safetensors, got .*{name}'):
            scales.save(tmp_path / name)
    for key, value, message in [
        ('layers', 'x', "metadata .*'layers'"), ('history', 'x', "metadata .*'history'"),
        ('epochs', 3, "strings by name, got 'epochs': 3"), (3, 'x', "strings by name, got 3: 'x'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Scales(scales, {key: value})
        other = some_scales()
        other.metadata[key] = value
        with pytest.raises(ValueError, match=message):
            other.save(tmp_path / 'x.safetensors')
    assert not list(tmp_path.iterdir())
    # in a file it would be the branch '3x3' of the layer 'a.conv'
    with pytest.raises(ValueError, match=r"branch 'conv\.3x3' of 'a': branch names"):
        Scales({'a': {'conv.3x3': torch.ones(3)}})


def test_false_means_without_scales_on_the_command_line():
    """timm's --model-kwargs scales=False."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--model-kwargs', nargs='*', action=ParseKwargs)
    model = tiny(**parser.parse_args(['--model-kwargs', 'scales=False']).model_kwargs)
    assert all(get_grad_mult(p) is None for p in model.parameters())
    assert timm_rep.scales.resolve_scales(model, False) is timm_rep.scales.resolve_scales(model, None) is None
    with pytest.raises(FileNotFoundError, match=r"^scales .*False.*'none'"):
        tiny(scales='none')


def test_order_and_history_survive_a_file(tmp_path):
    """The tenth layer of a stage comes after the second, though its name does not."""
    scales = Scales.ones(timm.create_model('repopt_vgg_a0', scales=False, device='meta'))
    history = {'stem.conv.0': {'conv3x3': [1., .5], 'conv1x1': [1., 2.]}}
    scales = Scales(scales, {'epochs': '2'}, history)
    scales.save(tmp_path / 's.safetensors')
    read = Scales.load(tmp_path / 's.safetensors')
    assert read == scales
    assert list(read) == list(scales)
    assert [list(branches) for branches in read.values()] == [list(branches) for branches in scales.values()]
    assert read.history == history
    assert read.metadata == {'epochs': '2'}
    assert [len(layers) for layers in read.stages().values()] == [1, 2, 4, 14, 1]
    # of another writer, who knows nothing of our metadata
    save_file({'a.10.conv3x3': torch.ones(3), 'a.2.conv3x3': torch.ones(3)}, tmp_path / 's.safetensors')
    assert Scales.load(tmp_path / 's.safetensors').keys() == {'a.10', 'a.2'}
    for order in ({'a.9': ['conv3x3']}, {'a.10': ['conv3x3']}, {'a.10': ['conv3x3'], 'a.2': ['conv3x3', 'conv1x1']}):
        save_file(
            {'a.10.conv3x3': torch.ones(3), 'a.2.conv3x3': torch.ones(3)}, tmp_path / 's.safetensors',
            metadata={'layers': json.dumps(order)})
        assert {layer: list(branches) for layer, branches in Scales.load(tmp_path / 's.safetensors').items()} == {
            'a.10': ['conv3x3'], 'a.2': ['conv3x3']}
    for metadata in (
            {'layers': '[3]'}, {'layers': '{'}, {'layers': '{"a": 5}'}, {'layers': '[' * 100_000},
            {'history': '3'}, {'history': '{'}, {'history': '{"a": {"b": 5}}'}, {'history': '[' * 100_000},
    ):
        save_file({'a.conv3x3': torch.ones(3)}, tmp_path / 's.safetensors', metadata=metadata)
        with pytest.raises(ValueError, match=r"s\.safetensors' must (be a safetensors file of|hold) scales"):
            Scales.load(tmp_path / 's.safetensors')


def test_scales_are_copies():
    given = torch.ones(3)
    scales = Scales({'a': {'conv3x3': given}})
    given.zero_()
    assert scales == Scales({'a': {'conv3x3': torch.ones(3)}})


def test_scales_are_constants():
    """Scales are float32 copies on the CPU, independent of the model they were read from."""
    model = tiny(structure='search', dtype=torch.float64)
    scales = Scales.from_model(model)
    layer = csla_layers(model)['stem.conv.0']
    before = scales['stem.conv.0']['conv3x3'].clone()
    with torch.no_grad():
        layer.scales['conv3x3'].add_(1)
    assert torch.equal(scales['stem.conv.0']['conv3x3'], before)
    assert before.dtype == torch.float32
    assert not before.requires_grad


def test_initial_scales_do_not_depend_on_the_default_dtype():
    model = timm.create_model('repopt_vgg_a0')
    with default_dtype(torch.bfloat16):
        scales = Scales.initial(model)
    assert scales == Scales.initial(model)


def test_summary():
    scales = Scales({
        'stem.conv.0': {'conv3x3': torch.tensor([1., -3.]), 'conv1x1': torch.tensor([2., 2.])},
        'stages.0.1.conv.0': {'conv3x3': torch.tensor([.5, .5]), 'identity': torch.tensor([0., 1.])},
    })
    assert scales.summary().splitlines() == [
        'layer              conv3x3         conv1x1         identity',
        'stem.conv.0        -1.000 (2.000)  +2.000 (0.000)',
        'stages.0.1.conv.0  +0.500 (0.000)                  +0.500 (0.500)',
    ]


def test_compare():
    scales = some_scales()
    own = scales.compare(scales)
    assert own.keys() == {'conv3x3', 'conv1x1', 'identity'}
    assert abs(own['conv3x3'].correlation - 1) < 1e-6
    turned = Scales({n: {b: -2 * s for b, s in branches.items()} for n, branches in scales.items()})
    comparison = scales.compare(turned)['conv1x1']
    assert abs(comparison.correlation + 1) < 1e-6
    assert list(comparison.stage_means) == ['stem', 'stages.0', 'stages.1', 'stages.2', 'stages.3']
    mean = torch.stack([scales[f'stages.1.{i}.conv.0']['conv1x1'].mean() for i in (0, 1)]).mean().item()
    assert comparison.stage_means['stages.1'] == pytest.approx((mean, -2 * mean))
    assert comparison.relative_change == pytest.approx(1.5)
    apart = Scales({n: {b: s * torch.linspace(.8, 1.4, len(s)) for b, s in branches.items()}
                    for n, branches in scales.items()})
    assert apart.compare(scales)['conv1x1'].relative_change == pytest.approx(
        sum((torch.linspace(.8, 1.4, len(layer['conv1x1'])) - 1).abs().mean().item() for layer in scales.values()
            if 'conv1x1' in layer) / sum('conv1x1' in layer for layer in scales.values()), rel=1e-5)
    missing = Scales({'stem.conv.0': {'conv3x3': torch.ones(len(scales['stem.conv.0']['conv3x3']))}})
    assert math.isnan(scales.compare(missing)['conv1x1'].relative_change)
    with pytest.raises(ValueError, match='no layers in common'):
        scales.compare(Scales({'other': {'conv3x3': torch.ones(2)}}))


def test_equality():
    a, b = some_scales(), some_scales()
    b.metadata['epochs'] = '3'
    assert a == b
    other = {n: dict(s) for n, s in a.items()}
    other['stem.conv.0']['conv1x1'] = other['stem.conv.0']['conv1x1'] + 1
    assert a != Scales(other)
    del other['stem.conv.0']
    assert a != Scales(other)
    more = {n: dict(s) for n, s in a.items()}
    more['stem.conv.0']['conv5x5'] = torch.ones(8)
    assert a != Scales(more)
    assert Scales(more) != a
    assert a != 'ones'
    with pytest.raises(TypeError):
        a['stem.conv.0']['conv1x1'] = torch.ones(8)
    assert pickle.loads(pickle.dumps(a)) == a


def test_mean_over_channels():
    scales = some_scales()
    mean = scales.mean_over_channels()
    for layer, branches in scales.items():
        for branch, scale in branches.items():
            torch.testing.assert_close(mean[layer][branch], torch.full_like(scale, scale.mean().item()))


def test_derived_scales_do_not_pass_for_searched_ones():
    scales = Scales(some_scales(), {'model': 'm', 'epochs': '3'})
    assert scales.mean_over_channels().metadata == {'model': 'm', 'epochs': '3', 'averaged': 'over channels'}
    ones = scales.ones_like()
    assert ones.metadata == {}
    assert {n: list(b) for n, b in ones.items()} == {n: list(b) for n, b in scales.items()}
    assert all(torch.equal(s, torch.ones_like(s)) for branches in ones.values() for s in branches.values())


def test_refusals(tmp_path, monkeypatch):
    for value in (torch.ones(3, 3), torch.tensor([1., float('nan')]), torch.tensor([float('inf')])):
        with pytest.raises(ValueError, match=r"branch 'conv3x3' of 'stem.conv.0'"):
            Scales({'stem.conv.0': {'conv3x3': value}})
    for value in (
            [1., 2.], torch.ones(3, dtype=torch.complex64), torch.tensor([1e300], dtype=torch.float64),
            torch.ones(3, device='meta'), torch.ones(3).to_sparse(),
    ):
        with pytest.raises(ValueError, match=r"branch 'conv3x3' of 'stem.conv.0'"):
            Scales({'stem.conv.0': {'conv3x3': value}})
    with pytest.raises(ValueError, match=r"'stem.conv.0'"):
        Scales({'stem.conv.0': torch.ones(8)})
    for value in (3, True, [1, 2]):
        with pytest.raises(ValueError, match=r"'init' or False, got"):
            tiny(scales=value)
    path = tmp_path / 's.safetensors'
    path.write_bytes(b'neither')
    with pytest.raises(ValueError, match=r's\.safetensors.*must be a safetensors file of scales'):
        Scales.load(path)
    save_file({'a.weight': torch.ones(3, 3)}, path)
    with pytest.raises(ValueError, match=r"s\.safetensors' must hold scales.*one real number"):
        Scales.load(path)
    (tmp_path / 'runs' / 'folder').mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ('nowhere.safetensors', 'owner/name.safetensors', 'plain-word', tmp_path / 'nowhere'):
        with pytest.raises(FileNotFoundError, match=rf"^scales must be .*'{name}' does not exist"):
            Scales.load(name)
    with pytest.raises(FileNotFoundError, match=r"^scales must be .*'runs/folder' is a folder"):
        Scales.load('runs/folder')
    with pytest.raises(ValueError, match="structure='search' or 'csla'"):
        Scales.from_model(tiny())
    with pytest.raises(ValueError, match=r'target operator .*ResNet'):
        timm_rep.attach_grad_mults(timm.create_model('test_resnet'), 'ones')
    for model in (tiny(structure='csla'), tiny().reparameterize()):
        with pytest.raises(ValueError, match=r"target operator .*structure='target'"):
            timm_rep.attach_grad_mults(model, 'ones')


def test_attach_checks_everything_before_it_changes_anything():
    model = tiny(scales='ones')
    before = {n: layer.grad_mult for n, layer in csla_layers(model).items()}
    scales = {n: dict(b) for n, b in some_scales().items()}
    scales['stages.3.0.conv.0']['conv1x1'] = torch.ones(31)
    del scales['stages.0.0.conv.0']
    with pytest.raises(ValueError, match=r'fit .* layers') as e:
        timm_rep.attach_grad_mults(model, scales)
    assert re.search(r"stages\.3\.0\.conv\.0: .*'conv1x1'.*\(31,\)", str(e.value))
    assert re.search(r"stages\.0\.0\.conv\.0: .*'conv3x3'", str(e.value))
    assert all(layer.grad_mult is before[n] for n, layer in csla_layers(model).items())


def test_scales_of_a_layer_that_the_model_lacks():
    scales = {**some_scales(), 'stages.4.0.conv.0': {'conv3x3': torch.ones(32), 'conv1x1': torch.ones(32)}}
    with pytest.raises(ValueError, match=r'fit .* layers') as e:
        timm_rep.attach_grad_mults(tiny(), scales)
    assert str(e.value).count('stages.4.0.conv.0') == 1


@pytest.mark.parametrize('wrap', [
    lambda m: m, nn.DataParallel, torch.compile, lambda m: nn.DataParallel(torch.compile(m))], ids=range(4))
def test_attach_through_wrappers(wrap):
    model = tiny(scales=False)
    scales = some_scales()
    wrapped = wrap(model)
    assert timm_rep.attach_grad_mults(wrapped, scales) is wrapped
    expected = csla_layers(tiny(scales=scales))
    for name, layer in csla_layers(model).items():
        found = get_grad_mult(layer.weight).dense('squared')
        assert torch.equal(found, expected[name].grad_mult.dense('squared'))
    timm_rep.attach_grad_mults(wrapped, None)
    assert all(get_grad_mult(p) is None for p in model.parameters())


@pytest.mark.parametrize('wrap', [
    nn.DataParallel, nn.Sequential, lambda m: nn.ModuleDict(dict(backbone=m)),
    lambda m: ClassificationTask(m, nn.CrossEntropyLoss(), verbose=False)],
    ids=['DataParallel', 'Sequential', 'ModuleDict', 'task'])
def test_attaching_around_the_model_is_recorded(wrap):
    """The name of the attached scales, of earlier ones before, is what the model is saved with."""
    model = tiny(scales='init')
    for scales, recorded in ('ones', 'ones'), (None, None), ('init', 'init'):
        timm_rep.attach_grad_mults(wrap(model), scales)
        attached = attached_scales(model)
        assert (attached and attached.source) == recorded


def test_attach_to_identity_branches_alone(tmp_path):
    """A saved file has no tensors of them."""
    csla = Csla(8, 8, branches=(IdentityBranch(), IdentityBranch('second')))
    model = nn.ModuleDict({'own': CslaConv2d(csla), 'other': CslaConv2d(Csla(8, 8, branches=(ConvBranch(3),)))})
    Scales.initial(model).save(tmp_path / 'scales.safetensors')
    timm_rep.attach_grad_mults(model, tmp_path / 'scales.safetensors')
    assert torch.equal(model['own'].grad_mult.dense('squared')[:, :, 0, 0], 2 * torch.eye(8))


def test_attach_where_the_weight_is_not_a_parameter():
    """An optimizer then trains other tensors, which would silently be trained without a multiplier."""
    for change in (
            torch.nn.utils.parametrizations.weight_norm,
            lambda conv: torch.nn.utils.prune.identity(conv, 'weight'),
            lambda conv: torch.nn.utils.parametrize.register_parametrization(conv, 'weight', nn.Identity()),
    ):
        model = tiny(scales=False)
        change(model.stages[1][1].conv[0])
        with pytest.raises(ValueError, match=r'stages.1.1.conv.0: The weight must be a parameter.*weight_norm'):
            timm_rep.attach_grad_mults(model, 'ones')
        assert all(get_grad_mult(p) is None for p in model.parameters())


def test_a_part_named_as_a_wrapper_would():
    csla = Csla(4, 4, branches=(ConvBranch(3),))
    inner = nn.ModuleDict({'conv': CslaConv2d(csla)})
    model = nn.ModuleDict({'y': nn.ModuleDict({'conv': CslaConv2d(csla), 'module': inner})})
    assert csla_layers(model).keys() == {'y.conv', 'y.module.conv'}
    timm_rep.attach_grad_mults(model, 'ones')
    assert all(get_grad_mult(p) is not None for p in model.parameters())


def test_a_model_of_your_own():
    """Any model with target operators has names for its scales, and multipliers that survive what torch does to it."""
    csla = Csla(4, 4, branches=(ConvBranch((1, 3)), ConvBranch(3)))
    model = nn.Sequential(CslaConv2d(csla), nn.ReLU(), nn.ModuleDict({'inner': CslaConv2d(csla)})['inner'])
    timm_rep.attach_grad_mults(model, {n: {b: torch.rand(4) for b in csla.scaled_branches} for n in ('0', '2')})
    assert RepSGD(model.parameters(), lr=.1)
    for refused in (partial(timm_rep.scales.resolve_scales, scales='ones'), Scales.ones, Scales.initial):
        with pytest.raises(ValueError, match=r'CSLA layers.*Linear'):
            refused(nn.Linear(2, 2))


def released_layout(model):
    """A search model's state dict as the authors' code would name it, kernels and all."""
    names = {'conv3x3': 'scale_conv', 'conv1x1': 'scale_1x1', 'identity': 'scale_identity'}
    state = {'linear.weight': torch.ones(5, 32)}
    for layer, branches in Scales.from_model(model).items():
        block = 'stage0' if layer == 'stem.conv.0' else 'stage{}.{}'.format(
            int(layer.split('.')[1]) + 1, layer.split('.')[2])
        state[f'{block}.conv.weight'] = torch.ones(2, 2, 3, 3)
        state.update({f'{block}.{names[branch]}.weight': scale for branch, scale in branches.items()})
    return state


def test_released_layout(tmp_path):
    model = tiny(structure='search', scales=some_scales())
    expected = Scales.from_model(model)
    average = {key: value + 1 for key, value in released_layout(model).items()}
    for content in (
            released_layout(model),
            {'model': released_layout(model), 'epoch': 3},
            {'model': released_layout(model), 'model_ema': average},
            {'state_dict': released_layout(model), 'state_dict_ema': average},
    ):
        torch.save(content, tmp_path / 'scales.pth')
        read = Scales.load(tmp_path / 'scales.pth')
        assert read == expected
        assert read.metadata == {'source': 'scales.pth'}
    assert csla_layers(tiny(scales=str(tmp_path / 'scales.pth')))['stem.conv.0'].grad_mult is not None
    torch.save({'conv.weight': torch.ones(3)}, tmp_path / 'scales.pth')
    with pytest.raises(ValueError, match='must hold scales in a released layout'):
        Scales.load(tmp_path / 'scales.pth')


def test_released_ghost_layout(tmp_path):
    """Scales as the released code of RepOpt-GhostNet writes them, in a whole search checkpoint."""
    model = timm.create_model('repopt_ghostnet_050', structure='search', scales='ones', width=.3)
    state = {'conv_stem.weight': torch.ones(3)}
    for layer, branches in Scales.from_model(model).items():
        ghost = layer.removesuffix('.cheap_operation.0')
        branches['conv3x3'].uniform_(-1, 1)
        branches['identity'].uniform_(-1, 1)
        state[f'{ghost}.cheap_operation.0.weight'] = torch.ones(2, 1, 3, 3)
        state[f'{ghost}.cheap_operation.1.weight'] = branches['conv3x3']
        state[f'{ghost}.fusion_scale.weight'] = branches['identity']
    torch.save({'model': state}, tmp_path / 'scales.pth')
    scales = Scales.load(tmp_path / 'scales.pth')
    assert scales.keys() == csla_layers(model).keys()
    assert torch.equal(
        scales['blocks.6.1.ghost2.cheap_operation.0']['identity'], state['blocks.6.1.ghost2.fusion_scale.weight'])
    assert timm.create_model('repopt_ghostnet_050', scales=scales, width=.3)


def test_norms_are_not_taken_for_scales(tmp_path):
    """A RepGhostNet's BatchNorms have the names of RepOpt-GhostNet's released scales, and so do our own target's."""
    for name in ('repghostnet_050', 'repopt_ghostnet_050'):
        torch.save(timm.create_model(name).state_dict(), tmp_path / 'x.pth')
        with pytest.raises(ValueError, match='must hold scales in a released layout'):
            Scales.load(tmp_path / 'x.pth')


def test_released_ghost_scales_fit_the_model(released_scales):
    path = released_scales('RepOptGhostNet_0_5x_scales.pth')
    model = timm.create_model('repopt_ghostnet_050', scales=path, device='meta')
    assert all(layer.grad_mult is not None for layer in csla_layers(model).values())
    with pytest.raises(ValueError, match=r'blocks\.0\.0\.ghost1'):
        timm.create_model('repopt_ghostnet_100', scales=path, device='meta')


class _Payload:
    def __reduce__(self):
        return os.mkdir, ('executed',)


def test_pickled_code_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'stage0.scale_conv.weight': torch.ones(3), 'args': _Payload()}, 'evil.pth')
    with pytest.raises(ValueError, match='weights_only'):
        Scales.load('evil.pth')
    assert not (tmp_path / 'executed').exists()


@pytest.mark.parametrize('name,negative', [('b1', 156), ('b2', None), ('l1', 1538), ('l2', None)])
def test_released_scales_fit_the_models(released_scales, name, negative):
    """All files fit, and hold negative entries, where the sum of the scales is not a multiplier for AdamW."""
    path = released_scales(f'RepOpt-VGG-{name.upper()}-scales.pth')
    model = timm.create_model(f'repopt_vgg_{name}', scales=False, reinit=False, device='meta')
    timm_rep.attach_grad_mults(model, path)
    assert all(layer.grad_mult is not None for layer in csla_layers(model).values())
    scales = Scales.load(path)
    found = sum((scale < 0).sum().item() for branches in scales.values() for scale in branches.values())
    assert found == negative or (negative is None and found > 0)
    for other in {'b1', 'b2', 'l1', 'l2'} - {name}:
        with pytest.raises(ValueError, match='stages'):
            timm_rep.attach_grad_mults(
                timm.create_model(f'repopt_vgg_{other}', scales=False, reinit=False, device='meta'), path)


def test_from_the_hub(hub, tmp_path, monkeypatch):
    some_scales().save(tmp_path / 's.safetensors')
    commit = hub.add('owner/name', {'scales.safetensors': (tmp_path / 's.safetensors').read_bytes()})
    hub.tag('owner/name', 'v1.0')
    for source in ('owner/name', 'hf-hub:owner/name@v1.0', f'owner/name@{commit}'):
        assert Scales.load(source) == some_scales()
        model = timm.create_model(
            'repopt_vgg_a0', depths=(1, 2, 2, 1), widths=(8, 16, 24, 32), stem_width=8, scales=source)
        assert model.stem.conv[0].grad_mult is not None
    # another file on the main branch, after which the revisions are what they were
    some_scales(1).save(tmp_path / 'new.safetensors')
    hub.add('owner/other', {'scales.safetensors': (tmp_path / 's.safetensors').read_bytes()})
    hub.tag('owner/other', 'v1.0')
    hub.add('owner/other', {'scales.safetensors': (tmp_path / 'new.safetensors').read_bytes()})
    assert Scales.load('owner/other') == some_scales(1)
    assert Scales.load('owner/other@v1.0') == some_scales()
    # the same file once, from the cache after
    assert hub.bytes_served('owner/name', 'scales.safetensors') == (tmp_path / 's.safetensors').stat().st_size
    with pytest.raises(FileNotFoundError, match="'owner/nothing'"):
        Scales.load('owner/nothing')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert Scales.load('owner/name') == some_scales()
