"""The searched scales that come with the package, and those that the authors of RepOptimizers released."""
import http.server
import json
import logging
import re
import shutil
import threading
from pathlib import Path

import pytest
import timm
import torch

import timm_rep
import timm_rep.scales.packaged as packaged
from timm_rep.layers import csla_layers
from timm_rep.scales import RELEASED, Scales, attached_scales, locate_released, packaged_scales, released

CARD = Path(packaged.__file__).with_name('README.md')


def multipliers(model):
    """Branches and scales of the GradMults, by layer."""
    return {
        name: (layer.csla.branches, {branch: scale.tolist() for branch, scale in layer.grad_mult.scales.items()})
        for name, layer in csla_layers(model).items()
    }


def create(name, **kwargs):
    """GradMults are on the CPU even where the weights have no data."""
    return timm.create_model(name, **{'reinit': False, 'device': 'meta', **kwargs})


@pytest.mark.parametrize('name', packaged_scales())
class TestEach:
    def test_was_searched(self, name):
        """The channels, which start alike, have come apart, and the file says where it is from.

        They need not in the last stage of RepOpt-GhostNet: on images of 32 x 32 its maps are 1 x 1, a depthwise
        convolution is a number for each channel there, and the BatchNorm after it undoes any.
        """
        scales = Scales.load(name)
        start = Scales.from_model(timm.create_model(name, structure='search', scales='init'))
        assert list(scales) == list(start)
        for layer, branches in scales.items():
            assert list(branches) == list(start[layer])
            one_number = 'ghost' in name and (layer.startswith('blocks.8.') or 'blocks.7.0.ghost2' in layer)
            assert one_number or all(scale.std() > 1e-3 for scale in branches.values())
        assert scales.metadata.keys() >= {'model', 'dataset', 'epochs', 'batch_size', 'date', 'timm_rep', 'accuracy'}
        assert scales.metadata['model'] == name
        assert float(scales.metadata['accuracy']) > 50

    def test_is_the_default(self, name):
        default = create(name)
        assert multipliers(default) == multipliers(create(name, scales=Scales.load(name)))
        assert multipliers(default) == multipliers(create(name, scales=name, num_classes=7))
        assert multipliers(default) != multipliers(create(name, scales='init'))
        csla = Scales.from_model(create(name, structure='csla', device='cpu'))
        assert all(torch.equal(csla[n][b], Scales.load(name)[n][b]) for n in csla for b in csla[n] if b != 'identity')

    def test_is_not_where_a_search_starts(self, name):
        model = timm.create_model(name, structure='search')
        assert Scales.from_model(model) == Scales.from_model(timm.create_model(name, structure='search', scales='init'))

    def test_survives_the_config(self, name, tmp_path):
        pytest.importorskip('timm.models._input', reason='timm records the arguments of a model since 1.0.31')
        from timm.models import save_for_hf

        save_for_hf(create(name, num_classes=3, device='cpu'), tmp_path)
        again = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
        assert multipliers(again) == multipliers(create(name))

    def test_is_on_the_card(self, name):
        metadata = Scales.load(name).metadata
        row = next(line for line in CARD.read_text().splitlines() if line.startswith(f'| `{name}` |'))
        for key in ('dataset', 'epochs', 'batch_size', 'accuracy', 'date'):
            assert f' {metadata[key]}' in row


def test_the_card_names_all_of_them_and_no_other():
    names = re.findall(r'^\| `(\w+)` \|', CARD.read_text(), re.MULTILINE)
    assert names == packaged_scales() != []


@pytest.mark.parametrize('kwargs', [
    dict(depths=(1, 2, 1, 1)), dict(widths=(8, 8, 8, 8)), dict(stem_width=8), dict(strides=(2, 2, 1, 2, 1)),
    dict(act_layer='silu'), dict(attn_layer='se'),
], ids=str)
def test_scales_are_specific_to_the_architecture(kwargs):
    """A changed architecture has no searched scales (table 6), even where they would fit."""
    args = dict(depths=(1, 2, 1, 1)) if 'widths' in kwargs else {}
    changed = create('repopt_vgg_a0', **args, **kwargs)
    assert multipliers(changed) == multipliers(create('repopt_vgg_a0', scales='init', **args, **kwargs))


def test_the_architecture_said_again_is_the_same():
    default = create('repopt_vgg_a0', strides=[2, 2, 2, 2, 2], depths=[2, 4, 14, 1])
    assert multipliers(default) == multipliers(create('repopt_vgg_a0', scales='repopt_vgg_a0'))
    dense = create('repopt_vgg_a0', output_stride=16)  # the same weights, dilated
    assert multipliers(dense) == multipliers(default)


def test_models_without_searched_scales_say_so(caplog):
    name = next(m for m in timm.list_models('repopt_[vg]*') if m not in packaged_scales())
    with caplog.at_level(logging.INFO, 'timm_rep'):
        model = create(name)
    assert [message for message in caplog.messages if name in message and 'init' in message]
    assert multipliers(model) == multipliers(create(name, scales='init'))
    message = f"{', '.join(packaged_scales())}.*'{name}'"
    for load in (Scales.load, lambda scales: create(name, scales=scales)):
        with pytest.raises(FileNotFoundError, match=message):
            load(name)


def test_in_the_public_api():
    assert isinstance(timm_rep.Scales.load(packaged_scales()[0]), Scales)


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
        threading.Thread(target=http_server.serve_forever, args=[0.05], daemon=True).start()
        monkeypatch.setattr(released, 'RELEASE_URL', f'http://127.0.0.1:{http_server.server_port}/')
        monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
        yield folder, requests
        http_server.shutdown()


@pytest.mark.parametrize('name', RELEASED)
def test_released_files(name, server, released_scales):
    """The released files are downloaded once, have the checksums of the table, and fit their models."""
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
        assert attached_scales(model).source == 'released:repopt_vgg_b1'
        first = next(iter(expected))
        layer = model.get_submodule(first)
        torch.testing.assert_close(
            layer.grad_mult.dense('squared')[:, 0, 0, 0], expected[first]['conv3x3'].square(), rtol=1e-6, atol=0)
        assert model._model_args['scales'] == 'released:repopt_vgg_b1'  # recorded when the model is saved
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)  # it is cached
    model = timm.create_model('repopt_vgg_b1', scales='released', device='meta')
    assert attached_scales(model).source == 'released:repopt_vgg_b1'


def test_without_download(server, monkeypatch, caplog):
    """'released' is an error that names the address; the default says that it uses the initial values."""
    for offline in (False, True):
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', offline)
        with pytest.raises(FileNotFoundError, match=r'repopt_vgg_l1.*/RepOpt-VGG-L1-scales\.pth'):
            timm.create_model('repopt_vgg_l1', scales='released', **_SMALL)
        caplog.clear()
        model = timm.create_model('repopt_vgg_l1', device='meta')
        assert attached_scales(model).source == 'init'
        assert len([r for r in caplog.records if r.levelname == 'WARNING' and 'repopt_vgg_l1' in r.message]) == 1


def test_without_download_in_several_processes(server, monkeypatch):
    """Another process may have got them, and multipliers are not synchronized."""
    monkeypatch.setattr('timm_rep.models._repopt.world_size_and_rank', lambda: (2, 1))
    with pytest.raises(FileNotFoundError, match=r"repopt_vgg_l1.*scales='init'"):
        timm.create_model('repopt_vgg_l1', device='meta')
    timm.create_model('repopt_vgg_l1', scales='init', device='meta')
    timm.create_model('repopt_vgg_a0', device='meta')  # packaged


def test_a_saved_model_loads_without_its_scales(server, tmp_path, caplog):
    """Released scales are not in the folder. Only RepSGD needs them, and refuses the model."""
    pytest.importorskip('timm.models._input', reason='timm records the arguments of a model since 1.0.31')
    from timm.models import save_for_hf

    model = timm.create_model('repopt_vgg_b1', scales='init', num_classes=3, **_SMALL).eval()
    attached_scales(model).source = 'released:repopt_vgg_b1'
    save_for_hf(model, tmp_path / 'saved')
    config = json.loads((tmp_path / 'saved' / 'config.json').read_text())
    assert config['model_args']['scales'] == 'released:repopt_vgg_b1'
    caplog.clear()
    again = timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=True)
    assert ['repopt_vgg_b1' in r.message for r in caplog.records if r.levelname == 'WARNING'] == [True]
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again.eval()(x), model(x))
    assert attached_scales(again) is None
    with pytest.raises(ValueError, match='GradMult'):
        timm.optim.create_optimizer_v2(again, opt='repsgd')
    folded = timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=False, reparameterized=True)
    assert folded.reparameterized
    with pytest.raises(FileNotFoundError, match='repopt_vgg_b1'):
        timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=True, scales='released')


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


def test_a_server_that_does_not_answer(server, monkeypatch):
    """The server is not left to torch's download, which has no time limit."""
    monkeypatch.setattr(released, 'is_reachable', lambda address: address != RELEASED['repopt_vgg_b1'].url)
    with pytest.raises(FileNotFoundError, match='repopt_vgg_b1: the server does not answer'):
        locate_released('repopt_vgg_b1')
    assert not server[1]


def test_other_models_download_nothing(server, caplog):
    _, requests = server
    assert attached_scales(timm.create_model('repopt_vgg_b1', **_SMALL)).source == 'init'  # another architecture
    assert [record.levelname for record in caplog.records] == ['WARNING']  # searched scales exist
    assert attached_scales(timm.create_model('repopt_vgg_b1', scales='init', device='meta')).source == 'init'
    timm.create_model('repopt_vgg_b1', reparameterized=True, device='meta')
    packaged = timm.create_model('repopt_ghostnet_050', device='meta')
    assert attached_scales(packaged).source == 'repopt_ghostnet_050'
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
