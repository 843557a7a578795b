"""Scales that the authors of RepOptimizers released: downloaded, checked, and the default where none are packaged."""
import http.server
import shutil
import threading

import pytest
import timm
import torch

import timm_rep
from timm_rep.layers import csla_layers
from timm_rep.scales import RELEASED, Scales, locate_released, released

_SMALL = dict(depths=(1, 1, 1, 1), widths=(8, 8, 8, 8), stem_width=8)


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A folder that is served in place of the authors' repository; the cache is empty."""
    folder = tmp_path / 'served'
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args):
            requests.append(self.path)

    requests = []
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        monkeypatch.setattr(released, 'RELEASE_URL', f'http://127.0.0.1:{http_server.server_port}/')
        monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
        yield folder, requests
        http_server.shutdown()


@pytest.mark.parametrize('name', RELEASED)
def test_released_files(name, server, released_scales):
    """The very files: downloaded once, their checksums are those of the table, and they fit their models."""
    folder, requests = server
    shutil.copy(released_scales(RELEASED[name].name), folder)
    scales = Scales.load(f'released:{name}')
    assert scales == Scales.load(released_scales(RELEASED[name].name))
    locate_released(name)
    assert requests == [f'/{RELEASED[name].name}']
    model = timm.create_model(name, scales=False, device='meta')
    timm_rep.attach_grad_mults(model, scales)
    timm.optim.create_optimizer_v2(model, opt='repsgd')


def test_create_model(server, released_scales, monkeypatch):
    folder, _ = server
    checked = []
    check = released.check_cached_file
    monkeypatch.setattr(released, 'check_cached_file', lambda *args: checked.append(args) or check(*args))
    file = released_scales(RELEASED['repopt_vgg_b1'].name)
    shutil.copy(file, folder)
    expected = Scales.load(file)
    for kwargs in (dict(scales='released'), dict()):
        checked.clear()
        model = timm.create_model('repopt_vgg_b1', device='meta', **kwargs)
        assert len(checked) == 1  # its hash is computed once
        assert model.scales_source == 'released:repopt_vgg_b1'
        first = next(iter(expected))
        layer = model.get_submodule(first)
        torch.testing.assert_close(
            layer.grad_mult.dense('squared')[:, 0, 0, 0], expected[first]['conv3x3'].square(), rtol=1e-6, atol=0)
        assert model._model_args['scales'] == 'released:repopt_vgg_b1'  # recorded when the model is saved
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)  # it is cached
    model = timm.create_model('repopt_vgg_b1', scales='released', device='meta')
    assert model.scales_source == 'released:repopt_vgg_b1'


def test_without_download(server, monkeypatch, caplog):
    """'released' is an error that names the address; the default says that it uses the initial values."""
    for offline in (False, True):
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', offline)
        with pytest.raises(FileNotFoundError, match=r'repopt_vgg_l1.*/RepOpt-VGG-L1-scales\.pth'):
            timm.create_model('repopt_vgg_l1', scales='released', **_SMALL)
        caplog.clear()
        model = timm.create_model('repopt_vgg_l1', device='meta')
        assert model.scales_source == 'init'
        assert len([r for r in caplog.records if r.levelname == 'WARNING' and 'repopt_vgg_l1' in r.message]) == 1


def test_other_content(server):
    """A file with another checksum is an error and is not kept."""
    folder, _ = server
    (folder / RELEASED['repopt_vgg_b2'].name).write_bytes(b'other')
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match='repopt_vgg_b2'):
            locate_released('repopt_vgg_b2')


def test_damaged_cache(server, released_scales):
    """A damaged file in the cache is downloaded again."""
    folder, requests = server
    shutil.copy(released_scales(RELEASED['repopt_ghostnet_050'].name), folder)
    path = locate_released('repopt_ghostnet_050')
    with open(path, 'ab') as file:
        file.write(b'0')
    assert locate_released('repopt_ghostnet_050') == path
    Scales.load(path)
    assert len(requests) == 2


def test_other_models_download_nothing(server):
    _, requests = server
    assert timm.create_model('repopt_vgg_b1', **_SMALL).scales_source == 'init'  # another architecture
    assert timm.create_model('repopt_vgg_b1', scales='init', device='meta').scales_source == 'init'
    timm.create_model('repopt_vgg_b1', reparameterized=True, device='meta')
    assert timm.create_model('repopt_ghostnet_050', device='meta').scales_source == 'repopt_ghostnet_050'  # packaged
    assert not requests
    with pytest.raises(ValueError, match='repopt_vgg_a1'):
        timm.create_model('repopt_vgg_a1', scales='released')


def test_other_depths_are_refused(released_scales):
    """The error names the layers that fit, and those that do not."""
    scales = Scales.load(released_scales(RELEASED['repopt_vgg_b1'].name))
    with pytest.raises(ValueError, match='28 of its 30 layers') as error:
        timm.create_model('repopt_vgg_b1', depths=(6, 6, 16, 1), scales=scales, device='meta')
    fitting, *others = str(error.value).splitlines()
    names = set(csla_layers(timm.create_model('repopt_vgg_b1', scales=False, device='meta')))
    assert {name for name in names if f' {name},' in fitting or f' {name}.' in fitting} == names
    assert [line.partition(':')[0].strip() for line in others] == ['stages.0.4.conv.0', 'stages.0.5.conv.0']
