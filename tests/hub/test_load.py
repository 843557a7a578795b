"""create_model(pretrained=True): from a folder, from the Hub, and what is refused."""
import itertools
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from timm.data import resolve_data_config

import timm_rep
from tests.helpers import needs_recorded_args, relative
from tests.hub.published import REPA, REPOPT, publish, same, trained, write_folder
from timm_rep.cli import main
from timm_rep.hub import check_saveable, read_repository, save_folder, sha256
from timm_rep.hub._folder import write_hashes
from timm_rep.layers import csla_layers
from timm_rep.models import RePaVisionTransformer
from timm_rep.publish import write_folded
from timm_rep.scales import Scales, attached_scales
from timm_rep.utils.network import is_reachable

NAME = 'repa_deit_tiny.mine'
ORG = f'timm-rep/{NAME}'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv('TIMM_REP_HUB', str(tmp_path / 'local'))
    return tmp_path / 'local'


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def published(tmp_path, hub):
    """On the Hub, of this package's organization."""
    model, files = publish(tmp_path / NAME)
    hub.add(ORG, files)
    return model


# --- a folder ---------------------------------------------------------------------------------------------------------

def test_folder_of_a_model_in_channels_last(folder):
    model = trained(*REPOPT, scales=False).to(memory_format=torch.channels_last)
    assert not model.stem.conv[0].weight.is_contiguous()
    write_folder(folder / 'repopt_vgg_a0.mine', model, REPOPT[1])
    assert not model.stem.conv[0].weight.is_contiguous()
    assert same(timm.create_model('repopt_vgg_a0.mine', pretrained=True, scales=False), model)


def test_folder(folder, images):
    model, _ = publish(folder / NAME)
    found = timm.create_model(NAME, pretrained=True).eval()
    assert same(found, model)
    assert torch.equal(found(images), model(images))
    assert (found.pretrained_cfg['tag'], found.pretrained_cfg['architecture']) == ('mine', 'repa_deit_tiny')
    assert tuple(resolve_data_config(model=found)['input_size']) == (3, 32, 32)
    assert same(timm.create_model(f'local-dir:{folder / NAME}', pretrained=True), model)
    # without weights the arguments are the same, the weights are not
    untrained = timm.create_model(NAME)
    assert untrained.state_dict().keys() == model.state_dict().keys()
    assert not torch.equal(untrained.blocks[0].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)
    # the model as such stays what it is
    assert timm.create_model('repa_deit_tiny', device='meta').num_classes == 1000


def test_adaptation(folder, images):
    """Other classes, channels, image sizes and features, as for timm's own models."""
    model, _ = publish(folder / NAME)
    other = timm.create_model(NAME, pretrained=True, num_classes=7, in_chans=1)
    assert other(images[:, :1]).shape == (3, 7)
    assert torch.equal(other.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
    assert relative(other.patch_embed.proj.weight, model.patch_embed.proj.weight.sum(1, keepdim=True)) < 1e-6
    larger = timm.create_model(NAME, pretrained=True, img_size=64)
    assert larger(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    features = timm.create_model(NAME, pretrained=True, features_only=True, out_indices=(0, 1)).eval()
    expected = model.forward_intermediates(images, indices=(0, 1), intermediates_only=True)
    for ours, theirs in zip(features(images), expected):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize('kwargs', [{}, dict(num_classes=7, in_chans=1, img_size=64)], ids=str)
@pytest.mark.parametrize('kind,name', [(REPA, NAME), (REPOPT, 'repopt_vgg_a0.mine')])
def test_folded_when_loaded(folder, kind, name, kwargs):
    """reparameterized=True with weights of the training structure."""
    if kind is REPOPT:
        kwargs = {k: v for k, v in kwargs.items() if k != 'img_size'}
    torch.manual_seed(0)
    publish(folder / name, kind)
    unfolded = timm.create_model(name, pretrained=True, **kwargs).eval()
    folded = timm.create_model(name, pretrained=True, reparameterized=True, **kwargs).eval()
    assert folded.reparameterized
    assert not unfolded.reparameterized
    classifier = folded.get_classifier()
    classifier.load_state_dict(unfolded.get_classifier().state_dict())  # of other classes they are random
    x = torch.randn(2, kwargs.get('in_chans', 3), *[kwargs.get('img_size', 32)] * 2)
    assert relative(folded(x), unfolded(x)) < 1e-5
    if kind is REPA:
        features = dict(pretrained=True, features_only=True, out_indices=(1,), **kwargs)
        ours, theirs = (timm.create_model(name, reparameterized=r, **features).eval()(x)[0] for r in (True, False))
        assert relative(ours, theirs) < 1e-5


def test_one_model_is_built(folder, monkeypatch):
    """Loaded in the training structure and folded in place."""
    publish(folder / NAME)
    built = []
    init = RePaVisionTransformer.__init__

    def counted(self, *args, **kwargs):
        built.append(kwargs.get('reparameterized', False))
        init(self, *args, **kwargs)

    monkeypatch.setattr(RePaVisionTransformer, '__init__', counted)
    model = timm.create_model(NAME, pretrained=True, reparameterized=True)
    assert model.reparameterized
    assert built == [False]
    assert model._model_args['reparameterized'] is True
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_folded_when_published(folder, images):
    model, _ = publish(folder / NAME)
    write_folded(folder / NAME, folder)
    folded = timm.create_model(f'{NAME}_folded', pretrained=True).eval()
    assert folded.reparameterized
    assert relative(folded(images), model(images)) < 1e-5
    with pytest.raises(ValueError, match='is folded already'):
        write_folded(folder / f'{NAME}_folded', folder)


@pytest.mark.parametrize('structure', ['csla', 'search'])
def test_weights_of_another_structure(folder, structure):
    publish(folder / 'repopt_vgg_a0.mine', REPOPT)
    with pytest.raises(RuntimeError, match=rf"{structure} structure.*target structure.*structure='target'"):
        timm.create_model('repopt_vgg_a0.mine', pretrained=True, structure=structure)


def test_scales_come_along(folder):
    publish(folder / 'repopt_vgg_a0.mine', REPOPT)
    scales = Scales.load(folder / 'repopt_vgg_a0.mine' / 'scales.safetensors')
    for source in ('repopt_vgg_a0.mine', f'local-dir:{folder / "repopt_vgg_a0.mine"}'):
        for pretrained in (True, False):
            model = timm.create_model(source, pretrained=pretrained)
            expected = timm.create_model('repopt_vgg_a0', **REPOPT[1], scales=scales)
            for name, layer in csla_layers(expected).items():
                found = csla_layers(model)[name].grad_mult
                assert torch.equal(found.dense('squared'), layer.grad_mult.dense('squared'))
    assert csla_layers(timm.create_model('repopt_vgg_a0.mine', pretrained=True, scales='ones'))['stem.conv.0'].grad_mult


def test_scales_go_with_their_model(folder):
    """Scales that config.json does not list, such as those of a search, stay."""
    path = folder / 'repopt_vgg_a0.mine'
    publish(path, REPOPT)
    save_folder(trained(*REPOPT, scales='init'), path, model_args=REPOPT[1])
    assert not (path / 'scales.safetensors').exists()
    assert attached_scales(timm.create_model(f'local-dir:{path}', pretrained=True)).source == 'init'
    (path / 'scales.safetensors').write_bytes(b'searched')
    save_folder(trained(*REPOPT, scales='init'), path, model_args=REPOPT[1])
    assert (path / 'scales.safetensors').read_bytes() == b'searched'


def test_saved_by_transformers(folder):
    """Their save_pretrained() keeps unknown fields of config.json, such as sha256, and writes no scales."""
    for kind, name in (REPA, NAME), (REPOPT, 'repopt_vgg_a0.mine'):
        publish(folder / name, kind)
        config = json.loads((folder / name / 'config.json').read_text())
        model, _ = publish(folder / name, kind, seed=1)  # trained further
        (folder / name / 'config.json').write_text(json.dumps({**config, 'transformers_version': '5.0.0'}))
        (folder / name / 'scales.safetensors').unlink(missing_ok=True)
        for source in name, f'local-dir:{folder / name}':
            found = timm.create_model(source, pretrained=True)
            assert same(found, model)
            assert all(layer.grad_mult is None for layer in csla_layers(found).values())


def test_another_idle_ratio_is_refused(folder):
    """Another ratio makes another function with tensors of the same shapes."""
    publish(folder / NAME)
    for kwargs in (dict(idle_ratio=.5), dict(idle_schedule='linear')):
        with pytest.raises(ValueError, match=r'idle_\w+ must be .* trained'):
            timm.create_model(NAME, pretrained=True, **kwargs)
        timm.create_model(NAME, **kwargs)
    timm.create_model(NAME, pretrained=True, idle_ratio=.75)
    kwargs = dict(REPA[1], base='vit_tiny_patch16_224', idle_ratio=(.5, .75))
    save_folder(timm.create_model('repa_any', **kwargs), folder / 'several', model_args=kwargs)
    for ratios in (.5, .75), [.5, .75]:
        timm.create_model(f'local-dir:{folder / "several"}', pretrained=True, idle_ratio=ratios)
    with pytest.raises(ValueError, match='idle_ratio'):
        timm.create_model(f'local-dir:{folder / "several"}', pretrained=True, idle_ratio=(.75, .5))
    publish(folder / 'repa_lvvit_s.mine', ('repa_lvvit_s', dict(REPA[1], idle_ratio=.5)))
    timm.create_model('repa_lvvit_s.mine', pretrained=True, idle_ratio=.5)
    for kwargs in (dict(idle_ratio=2 / 3), dict(idle_schedule='linear')):
        with pytest.raises(ValueError, match=r'idle_\w+ must be .* trained'):
            timm.create_model('repa_lvvit_s.mine', pretrained=True, **kwargs)


def test_saved_again(folder, tmp_path):
    """save_for_hf() records the arguments of the published model."""
    for kind, name in ((REPA, NAME), (REPOPT, 'repopt_vgg_a0.mine')):
        publish(folder / name, kind)
        for kwargs in ({}, dict(reparameterized=True)):
            model = timm.create_model(name, pretrained=True, **kwargs)
            args = {**model._model_args}
            timm.models.save_for_hf(model, tmp_path / 'again', model_args=args, safe_serialization=True)
            assert same(timm.create_model(f'local-dir:{tmp_path / "again"}', pretrained=True), model)


@pytest.mark.parametrize('change,message', [
    (dict(model_args=dict(weight_select='OTHER')), 'not allowed: weight_select='),
    (dict(model_args=dict(scales='someone/scales')), 'not allowed: scales='),
    (dict(model_args=dict(checkpoint_path='OTHER', device='cpu')), 'not allowed: checkpoint_path=.*, device='),
    (dict(sha256={'/etc/hostname': '0'}), "must name files in this folder"),
    (dict(sha256={'../x': '0'}), 'must name files in this folder'),
    (dict(pretrained_cfg=dict(source='hf-hub', hf_hub_id='someone/other')), ''),
    (dict(pretrained_cfg=dict(file='OTHER', url='https://nowhere.invalid/x.pth', custom_load=True)), ''),
], ids=str)
def test_a_config_names_no_other_files(hub, folder, tmp_path, change, message):
    """Other files are loaded neither instead of the verified weights nor in addition."""
    kind, name = (REPOPT, 'repopt_vgg_a0.mine') if 'scales' in change.get('model_args', {}) else (REPA, NAME)
    model, _ = publish(folder / name, kind)
    publish(tmp_path / NAME, seed=1)
    path = folder / name / 'config.json'
    config = json.loads(path.read_text())
    for key, value in change.items():
        value = {k: str(tmp_path / NAME / 'model.safetensors') if v == 'OTHER' else v for k, v in value.items()}
        config[key] = {**config[key], **value}
    path.write_text(json.dumps(config))
    for source in (name, f'local-dir:{path.parent}'):
        if 'model_args' in change:
            with pytest.raises((RuntimeError, ValueError), match=f'{message}|weight_select, got'):
                timm.create_model(source, pretrained=True)
            with pytest.raises(RuntimeError, match=message):
                timm.create_model(source)
        elif message:
            with pytest.raises(RuntimeError, match=message):
                timm.create_model(source, pretrained=True)
        else:
            assert same(timm.create_model(source, pretrained=True), model)
    assert not hub.requests


def test_the_vanilla_model(folder):
    """LV-ViT without RePa FFNs, which is not in timm."""
    model, _ = publish(folder / 'lvvit_s.mine', ('lvvit_s', REPA[1]))
    assert same(timm.create_model('lvvit_s.mine', pretrained=True), model)


@pytest.mark.parametrize('damage', ['truncated', 'corrupted', 'swapped'])
def test_damaged_files_are_refused(folder, damage):
    publish(folder / NAME)
    path = folder / NAME / 'model.safetensors'
    expected, data = sha256(path), bytearray(path.read_bytes())
    if damage == 'truncated':
        data = data[:-10]
    elif damage == 'corrupted':
        data[-1000] ^= 1
    else:
        _, files = publish(folder / 'other' / 'repa_deit_tiny.other', seed=1)
        data = files['model.safetensors']
    path.write_bytes(data)
    for name in (NAME, f'local-dir:{folder / NAME}'):
        with pytest.raises(RuntimeError) as e:
            timm.create_model(name, pretrained=True)
        for part in (str(path), expected, sha256(path), f'{len(data)} bytes', 'Nothing was loaded'):
            assert part in str(e.value)


@pytest.mark.parametrize('data', [b'', b'neither', b'\xff' * 100])
def test_damaged_files_without_hashes(folder, data):
    publish(folder / NAME)
    config = json.loads((folder / NAME / 'config.json').read_text())
    del config['sha256']
    (folder / NAME / 'config.json').write_text(json.dumps(config))
    (folder / NAME / 'model.safetensors').write_bytes(data)
    for name in (NAME, f'local-dir:{folder / NAME}'):
        with pytest.raises(RuntimeError, match=r"checkpoint .*'.*/local/repa_deit_tiny\.mine/model\.safetensors'"):
            timm.create_model(name, pretrained=True)


def test_arguments_that_no_model_has(folder):
    """A number of blocks that the file of weights cannot have is refused before anything is built."""
    publish(folder / NAME)
    path = folder / NAME / 'config.json'
    config = json.loads(path.read_text())
    for depth in 900, 1e9, [3, 10 ** 9], float('nan'):
        path.write_text(json.dumps({**config, 'model_args': {**config['model_args'], 'depth': depth}}))
        for name, pretrained in itertools.product((NAME, f'local-dir:{folder / NAME}'), (False, True)):
            with pytest.raises(RuntimeError, match=r'repa_deit_tiny\.mine: depth '):
                timm.create_model(name, pretrained=pretrained)
    path.write_text(json.dumps({**config, 'model_args': {**config['model_args'], 'num_heads': 0}}))
    for name, pretrained in itertools.product((NAME, f'local-dir:{folder / NAME}'), (False, True)):
        with pytest.raises(ValueError, match=r'model_args of .*/local/repa_deit_tiny\.mine .*ZeroDivisionError'):
            timm.create_model(name, pretrained=pretrained)


def test_unknown_arguments(folder):
    """A given one is a TypeError, as for any timm model; the error for one in config.json names that file."""
    publish(folder / NAME)
    for name, pretrained in itertools.product((NAME, f'local-dir:{folder / NAME}'), (False, True)):
        with pytest.raises(TypeError, match=r"^\S+ got an unexpected keyword argument 'nothing'$"):
            timm.create_model(name, pretrained=pretrained, nothing=1)
    path = folder / NAME / 'config.json'
    config = json.loads(path.read_text())
    for unknown in 'nothing', 'variant', 'cls', 'weights':  # the last three are parameters of functions of ours
        path.write_text(json.dumps({**config, 'model_args': {**config['model_args'], unknown: 1}}))
        for name, pretrained in itertools.product((NAME, f'local-dir:{folder / NAME}'), (False, True)):
            with pytest.raises((ValueError, RuntimeError), match=rf'repa_deit_tiny\.mine.*{unknown}'):
                timm.create_model(name, pretrained=pretrained)


def test_damaged_configs(folder, tmp_path):
    publish(folder / NAME)
    path = folder / NAME / 'config.json'
    config = json.loads(path.read_text())
    for text, message in [
        ('{', 'config.json. must be valid JSON'),
        ('[]', r'config\.json. must be .*\[\]'),
        (json.dumps({**config, 'pretrained_cfg': None}), 'pretrained_cfg must be'),
        (json.dumps({**config, 'sha256': []}), r'sha256 must be .*\[\]'),
        (json.dumps({'pretrained_cfg': {}}), "must have 'architecture'"),
        (json.dumps({**config, 'architecture': 'repa_deit_small'}), 'a repa_deit_tiny .* a repa_deit_small'),
    ]:
        path.write_text(text)
        with pytest.raises(RuntimeError, match=message):
            timm.create_model(NAME, pretrained=True)


def test_names_of_folders(folder, monkeypatch):
    """No folder changes the model without a tag; a folder that cannot exist is named in the error."""
    publish(folder / NAME)
    for name in ('repa_deit_tiny.', 'repa_deit_tiny.x*'):
        (folder / NAME).rename(folder / name)
        assert timm.create_model('repa_deit_tiny', device='meta').num_classes == 1000
        (folder / name).rename(folder / NAME)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.setenv('TIMM_REP_HUB', '~nouser/x')
    with pytest.raises(RuntimeError, match=rf"1\. the folder '~nouser/x/{NAME}': .*config\.json"):
        timm.create_model(NAME, pretrained=True)


def test_a_write_that_was_killed_is_finished(folder, images):
    """Files of two states are not loaded together."""
    publish(folder / NAME)
    model, files = publish(folder / 'new' / NAME, seed=1)
    (folder / NAME / '.written').mkdir()
    (folder / NAME / '.written' / 'config.json').write_bytes(files.pop('config.json'))
    for name, data in files.items():  # moved already
        (folder / NAME / name).write_bytes(data)
    with pytest.raises(RuntimeError, match='load it again'):
        timm.create_model(f'local-dir:{folder / NAME}', pretrained=True)
    assert same(timm.create_model(f'local-dir:{folder / NAME}', pretrained=True), model)


@pytest.mark.parametrize('dtype', [torch.int64, torch.bool])
def test_integer_weights_are_refused(folder, dtype):
    publish(folder / NAME)
    tensors = load_file(folder / NAME / 'model.safetensors')
    save_file({**tensors, 'norm.weight': torch.ones(24, dtype=dtype)}, folder / NAME / 'model.safetensors')
    write_hashes(folder / NAME)
    with pytest.raises(RuntimeError, match=rf'norm\.weight is {dtype}'):
        timm.create_model(NAME, pretrained=True)


@pytest.mark.parametrize('has_hashes', [True, False])
@pytest.mark.parametrize('make', [
    lambda path: path.mkdir(), lambda path: path.symlink_to(path), lambda path: os.mkfifo(path)])
def test_weights_that_are_not_a_regular_file(folder, monkeypatch, make, has_hashes):
    """Reading a FIFO would never end."""
    publish(folder / NAME)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    (folder / NAME / 'model.safetensors').unlink()
    make(folder / NAME / 'model.safetensors')
    if not has_hashes:
        config = json.loads((folder / NAME / 'config.json').read_text())
        del config['sha256']
        (folder / NAME / 'config.json').write_text(json.dumps(config))
    for name in NAME, f'local-dir:{folder / NAME}':
        with pytest.raises((FileNotFoundError, RuntimeError), match=r'model\.safetensors.* is not a regular file'):
            timm.create_model(name, pretrained=True)


def test_a_tag_is_the_same_network_in_a_checkout(monkeypatch):
    """Only TIMM_REP_HUB names a folder."""
    monkeypatch.delenv('TIMM_REP_HUB', raising=False)
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    with pytest.raises(RuntimeError, match='TIMM_REP_HUB: not set'):
        timm.create_model('repa_any.cifar10', pretrained=True)


def test_an_unreachable_hub_is_asked_once(monkeypatch):
    """The client would retry for half a minute; behind a proxy, only the client can tell whether the Hub answers."""
    with socket.socket() as closed:
        closed.bind(('127.0.0.1', 0))
        monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', f'http://127.0.0.1:{closed.getsockname()[1]}')
        asked = []
        monkeypatch.setattr('timm_rep.utils.network.hf_hub_download', lambda *args, local_files_only, **kwargs: (
            asked.append(local_files_only), hf_hub_download(*args, local_files_only=True, **kwargs))[1])
        with pytest.raises(RuntimeError, match='cannot be reached'):
            timm.create_model('repa_deit_tiny', pretrained=True)
        with pytest.raises(FileNotFoundError, match='cannot be reached'):
            Scales.load('owner/name')
        assert asked == [True, True]
        for name in 'http_proxy', 'HTTP_PROXY':
            monkeypatch.setenv(name, 'http://127.0.0.1:1')
        assert is_reachable(constants.ENDPOINT)


def test_errors_of_the_connection(monkeypatch, capsys):
    """The errors of the client's HTTP library, as of a proxy that refuses, may be no OSErrors."""
    def refused(*args, **kwargs):
        raise HfHubHTTPError.__bases__[0]('403 Forbidden')

    monkeypatch.setattr('timm_rep.utils.network.is_reachable', lambda address: True)
    monkeypatch.setattr('timm_rep.utils.network.hf_hub_download', refused)
    with pytest.raises(FileNotFoundError, match='403 Forbidden'):
        Scales.load('owner/name')
    monkeypatch.setattr('timm.create_model', refused)
    assert main(['verify', 'test_vit.r160_in1k']) == 1
    error = capsys.readouterr().err
    assert '403 Forbidden' in error
    assert error.count('\n') == 1


# --- the Hub ----------------------------------------------------------------------------------------------------------

def test_from_the_hub(hub, published, images, monkeypatch):
    found = timm.create_model(NAME, pretrained=True).eval()
    assert same(found, published)
    assert found.pretrained_cfg['hf_hub_id'] == ORG
    assert same(timm.create_model(f'hf-hub:{ORG}', pretrained=True), published)
    features = timm.create_model(NAME, pretrained=True, features_only=True, out_indices=(1,)).eval()
    assert torch.equal(features(images)[0], published.forward_intermediates(
        images, indices=(1,), intermediates_only=True)[0])
    # from the cache
    assert hub.bytes_served(ORG, 'model.safetensors') == Path(
        read_repository(ORG).file('model.safetensors')).stat().st_size
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert same(timm.create_model(NAME, pretrained=True), published)


def test_another_organization(hub, tmp_path, monkeypatch):
    model, files = publish(tmp_path / NAME)
    hub.add(f'we/{NAME}', files)
    with pytest.raises(RuntimeError, match=r'repa_deit_tiny\.mine'):
        timm.create_model(NAME, pretrained=True)
    monkeypatch.setenv('TIMM_REP_ORG', 'we')
    assert same(timm.create_model(NAME, pretrained=True), model)


def test_revisions(hub, tmp_path):
    first, files = publish(tmp_path / NAME)
    commit = hub.add(ORG, files)
    second, files = publish(tmp_path / NAME, seed=1)
    hub.add(ORG, files)
    assert same(timm.create_model(NAME, pretrained=True), second)
    for pinned in (f'{ORG}@{commit}',):
        assert same(timm.create_model(f'hf-hub:{pinned}', pretrained=True), first)
        assert same(timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=dict(hf_hub_id=pinned)), first)


def test_a_repository_that_the_caller_names(hub, tmp_path, folder):
    publish(folder / NAME)
    model, files = publish(tmp_path / NAME, seed=1)
    hub.add(f'me/{NAME}', files)
    for where in (
            dict(pretrained_cfg_overlay=dict(hf_hub_id=f'me/{NAME}')),
            dict(pretrained_cfg=dict(hf_hub_id=f'me/{NAME}', tag='mine', architecture='repa_deit_tiny'))):
        assert same(timm.create_model('repa_deit_tiny', pretrained=True, **where), model)


def test_no_connection(hub, folder):
    folder.mkdir()
    hub.stop()
    with pytest.raises(RuntimeError, match=r'2\. the Hub repository timm-rep/repa_deit_tiny\.in1k: .*\n.*not tried'):
        timm.create_model('repa_deit_tiny', pretrained=True)


def test_cache_dir(hub, published, tmp_path):
    timm.create_model(NAME, pretrained=True, cache_dir=tmp_path / 'cache')
    assert list((tmp_path / 'cache').rglob('model.safetensors'))
    assert not list((tmp_path / 'home').rglob('model.safetensors'))


def test_private(hub, tmp_path, monkeypatch):
    model, files = publish(tmp_path / NAME)
    hub.add(ORG, files, private=True)
    hub.tokens.add('hf_secret')
    with pytest.raises(RuntimeError, match=NAME):
        timm.create_model(NAME, pretrained=True)
    monkeypatch.setenv('HF_TOKEN', 'hf_secret')
    assert same(timm.create_model(NAME, pretrained=True), model)


def test_every_place_is_in_the_error(hub, folder, monkeypatch):
    """Also for a model that the authors released."""
    folder.mkdir()
    with pytest.raises(RuntimeError) as e:
        timm.create_model('repa_deit_tiny', pretrained=True)
    lines = str(e.value).splitlines()
    assert 'repa_deit_tiny.in1k' in lines[0]
    assert str(folder / 'repa_deit_tiny.in1k') in lines[1]
    assert 'timm-rep/repa_deit_tiny.in1k' in lines[2]
    assert '401' in lines[2]
    assert 'Ackesnal/RePaViT' in lines[3]
    assert '401' in lines[3]
    assert len(lines) == 4
    with pytest.raises(RuntimeError) as e:
        timm.create_model('repa_mixer_b16', pretrained=True)  # not released
    assert 'repa_mixer_b16.in1k' in str(e.value)
    assert len(str(e.value).splitlines()) == 3
    with pytest.raises(RuntimeError, match=r'\n  Other weights of repopt_vgg_a0: repopt_vgg_a0\.cifar10\.$'):
        timm.create_model('repopt_vgg_a0', pretrained=True)
    hub.add(ORG, {'README.md': b'nothing else'})
    with pytest.raises(RuntimeError, match=r'config\.json'):
        timm.create_model(NAME, pretrained=True)


def test_server_errors(hub, published):
    """A short failure of the Hub, or a gated repository, does not lead to other weights than usual."""
    hub.add('timm-rep/repa_deit_tiny.in1k', {'config.json': b'{}'})
    hub.fail(r'timm-rep/repa_deit_tiny\.in1k', status=500, times=20)
    with pytest.raises(RuntimeError, match=r"3\. the authors' release, Ackesnal/RePaViT: not tried"):
        timm.create_model('repa_deit_tiny', pretrained=True)
    hub.clear_faults()
    hub.fail(r'timm-rep/repa_deit_tiny\.in1k', status=403, times=20, headers={'X-Error-Code': 'GatedRepo'})
    with pytest.raises(RuntimeError, match=r"3\. the authors' release, Ackesnal/RePaViT: not tried"):
        timm.create_model('repa_deit_tiny', pretrained=True)
    hub.clear_faults()
    hub.fail(r'/resolve/.*model', status=503, times=1)
    assert same(timm.create_model(NAME, pretrained=True), published)  # the client tries again


def test_interrupted_downloads_resume(hub, published):
    hub.cut(r'^/lfs/.*model', after=1200)
    assert same(timm.create_model(NAME, pretrained=True), published)
    assert [r.range for r in hub.requests if r.path.startswith('/lfs/')] == [None, 'bytes=1000-']


def test_an_interruption_for_good_leaves_nothing(hub, published, tmp_path):
    hub.cut(r'^/lfs/.*model', after=0, times=50)
    with pytest.raises(Exception, match='complete'):
        timm.create_model(NAME, pretrained=True)
    assert not list((tmp_path / 'home').rglob('model.safetensors'))
    hub.clear_faults()
    assert same(timm.create_model(NAME, pretrained=True), published)


def test_wrong_bytes_are_refused_and_named(hub, published):
    """The client does not compare hashes."""
    hub.corrupt(ORG, 'model.safetensors', lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    for source in (NAME, f'hf-hub:{ORG}'):
        with pytest.raises(RuntimeError, match='expected sha256') as e:
            timm.create_model(source, pretrained=True)
    blob = str(e.value).split("Delete '")[1].split("'")[0]
    assert os.path.isfile(blob)
    hub.corrupt(ORG, 'model.safetensors', lambda data: data)
    os.remove(blob)
    assert same(timm.create_model(NAME, pretrained=True), published)


def test_files_of_one_commit(hub, published, tmp_path, monkeypatch):
    """A push between the two downloads."""
    found = read_repository(ORG)
    _, files = publish(tmp_path / NAME, seed=1)
    hub.add(ORG, files)
    assert sha256(found.file('model.safetensors')) == found.hashes['model.safetensors']


def test_repositories_without_hashes(hub, published, tmp_path):
    """Repositories of timm's push_to_hf_hub(), with a pickled state dict or safetensors."""
    timm.models.save_for_hf(published, tmp_path / 'theirs', model_args=REPA[1], safe_serialization='both')
    both = {path.name: path.read_bytes() for path in (tmp_path / 'theirs').iterdir()}
    hub.add('someone/both', both)
    hub.add('someone/pickled', {k: v for k, v in both.items() if k != 'model.safetensors'})
    for name in ('someone/both', 'someone/pickled'):
        assert same(timm.create_model(f'hf-hub:{name}', pretrained=True), published)


def test_pickled_code_is_not_run(hub, published, tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'executed'),)

    torch.save({'state_dict': Code()}, tmp_path / 'pytorch_model.bin')
    config = json.dumps({'architecture': 'repa_deit_tiny', 'num_classes': 5, 'pretrained_cfg': {}}).encode()
    hub.add('someone/bad', {'config.json': config, 'pytorch_model.bin': (tmp_path / 'pytorch_model.bin').read_bytes()})
    with pytest.raises(Exception, match='weights_only'):
        timm.create_model('hf-hub:someone/bad', pretrained=True)
    assert not (tmp_path / 'executed').exists()


def test_two_at_a_time_download_once(hub, published):
    before = hub.bytes_served(ORG, 'model.safetensors')
    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(lambda name: timm.create_model(name, pretrained=True), [NAME] * 2))
    assert same(models[0], published)
    assert same(models[1], published)
    assert hub.bytes_served(ORG, 'model.safetensors') - before == len(hub.files(ORG)['model.safetensors'])


def test_the_caller_says_where(hub, folder, published, tmp_path):
    """A file, as in timm; no other place is looked at."""
    publish(folder / NAME, seed=1)
    publish(tmp_path / 'elsewhere' / NAME)
    path = str(tmp_path / 'elsewhere' / NAME / 'model.safetensors')
    hub.clear_requests()
    model = timm.create_model(
        'repa_deit_tiny', pretrained=True, num_classes=5, pretrained_cfg_overlay=dict(file=path, num_classes=5),
        **REPA[1])
    assert same(model, published)
    assert not hub.requests


@needs_recorded_args
@pytest.mark.parametrize('name,kwargs,reset', [
    ('vit_tiny_patch16_224', dict(num_classes=7), (3,)),
    ('repa_deit_tiny', dict(num_classes=0, global_pool='avg'), (3, 'token')),
    ('repa_deit_tiny', dict(num_classes=7), (0,)),
])
def test_a_classifier_that_was_reset(tmp_path, name, kwargs, reset):
    """The folder has the classes and the pooling of the model, not those of its creation."""
    args = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, class_token=True)
    model = timm.create_model(name, **args, **kwargs).eval()
    model.reset_classifier(*reset)
    check_saveable(model)
    save_folder(model, tmp_path / 'a')
    timm_rep.export(model, tmp_path / 'b')
    x = torch.randn(2, 3, 16, 16)
    for folder in 'ab':
        loaded = timm.create_model(f'local-dir:{tmp_path / folder}', pretrained=True).eval()
        assert (loaded.num_classes, loaded.global_pool) == (model.num_classes, model.global_pool)
        assert relative(loaded(x), model(x)) < 1e-5


@needs_recorded_args
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_kept(tmp_path, dtype):
    args = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    model = timm.create_model('repa_deit_tiny', **args).to(dtype)
    save_folder(model, tmp_path)
    found = load_file(tmp_path / 'model.safetensors')
    assert found['blocks.0.mlp.fc1.weight'].dtype == dtype
    assert all(torch.equal(found[k], v) for k, v in model.state_dict().items())


@needs_recorded_args
@pytest.mark.parametrize('num_classes,expected', [(None, ['a', 'b', 'c']), (2, None)])
def test_label_names_stay(tmp_path, num_classes, expected):
    """Label names go from folder to folder with the model, unless it has another number of classes."""
    args = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    model = timm.create_model('vit_tiny_patch16_224', num_classes=3, **args)
    save_folder(model, tmp_path / 'a', model_args=args, label_names=['a', 'b', 'c'])
    model = timm.create_model(
        f'local-dir:{tmp_path / "a"}', pretrained=True, **({} if num_classes is None else {'num_classes': num_classes}))
    timm_rep.export(model, tmp_path / 'b')
    assert json.loads((tmp_path / 'b' / 'config.json').read_text()).get('label_names') == expected


def _one_changed(module, args, y):
    y = y.clone()
    y[0, 0] += .01 * y.abs().max()
    return y


@needs_recorded_args
@pytest.mark.parametrize('hook', [
    lambda module, args, y: (y, args[0]), lambda module, args, y: y.T, _one_changed
], ids=['more', 'shape', 'one value'])
def test_a_model_with_other_outputs_than_its_arguments_say(tmp_path, hook):
    model = timm.create_model('vit_tiny_patch16_224', img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    torch.nn.init.normal_(model.head.weight)
    model.register_forward_hook(hook)
    with pytest.raises(ValueError, match='different outputs'):
        save_folder(model, tmp_path / 'a')
    assert not (tmp_path / 'a').exists()


@pytest.mark.parametrize('names, expected', [
    ({'1': 'b', '0': 'a'}, ['a', 'b']), ({1: 'b', 0: 'a'}, ['a', 'b']), ({'0': 'a', '2': 'b'}, None),
    ({'0': 'a'}, None), ({}, None),
], ids=str)
def test_names_by_number(tmp_path, names, expected):
    """timm's label_names may be a dict, whose keys are not names."""
    args = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    model = timm.create_model('vit_tiny_patch16_224', num_classes=2, **args)
    model.pretrained_cfg['label_names'] = names
    save_folder(model, tmp_path / 'a', model_args=args)
    assert json.loads((tmp_path / 'a' / 'config.json').read_text()).get('label_names') == expected
