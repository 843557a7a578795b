"""timm-rep convert: what the authors released, as folders that load."""
import json
import re

import pytest
import timm
import torch

import timm_rep
from tests.hub.published import REPA, REPOPT, publish, same, trained
from timm_rep.cli import main
from timm_rep.hub import SCALES_NAME, WEIGHTS_NAME, sha256
from timm_rep.hub._folder import verify_folder
from timm_rep.publish import _released, convert_released
from timm_rep.publish._metrics import PREDICTIONS_NAME, Accuracy, Metrics
from timm_rep.scales import Scales


def arguments(args):
    return ['--model-kwargs', *(f'{key}={value!r}' for key, value in args.items())]


@pytest.fixture
def released_vgg(tmp_path):
    name, args = REPOPT
    model = trained(name, args, classes=1000, scales=False)
    state_dict = {}
    for key, value in model.state_dict().items():
        key = re.sub(r'^stages\.(\d)', lambda m: f'stage{int(m[1]) + 1}', key)
        key = key.replace('.conv.0.', '.conv.').replace('.conv.1.', '.bn.')
        state_dict[key.replace('stem.', 'stage0.').replace('head.fc.', 'linear.')] = value
    torch.save(state_dict, tmp_path / 'RepOpt-VGG.pth')
    return model, tmp_path / 'RepOpt-VGG.pth'


@pytest.fixture
def vgg_scales(tmp_path):
    model = timm.create_model('repopt_vgg_a0', **REPOPT[1], device='meta')
    scales = Scales({name: {b: torch.rand(len(s)) for b, s in branches.items()}
                     for name, branches in Scales.initial(model).items()})
    names = {'conv3x3': 'scale_conv', 'conv1x1': 'scale_1x1', 'identity': 'scale_identity'}
    torch.save({
        f"{re.sub(r'^stages[.]([0-9])', lambda m: f'stage{int(m[1]) + 1}', name).replace('stem', 'stage0')}"
        .removesuffix('.conv.0') + f'.{names[branch]}.weight': scale
        for name, branches in scales.items() for branch, scale in branches.items()
    }, tmp_path / 'scales.pth')
    return scales, tmp_path / 'scales.pth'


def test_weights(released_vgg, tmp_path, capsys, monkeypatch):
    model, path = released_vgg
    monkeypatch.setenv('TIMM_REP_HUB', str(tmp_path))
    folder = tmp_path / 'repopt_vgg_a0.in1k'
    assert main(['convert', str(path), '--model', 'repopt_vgg_a0', '-o', str(folder), *arguments(REPOPT[1])]) == 0
    assert 'checked by loading it' in capsys.readouterr().out
    verify_folder(folder)
    overlay = dict(file=str(folder / 'model.safetensors'))
    for found in (
            timm.create_model('repopt_vgg_a0.in1k', pretrained=True),
            timm.create_model(f'local-dir:{folder}', pretrained=True),
            timm.create_model('repopt_vgg_a0', pretrained=True, pretrained_cfg_overlay=overlay, **REPOPT[1])):
        assert same(found, model)


def test_weights_of_a_repaformer(tmp_path):
    model = trained(*REPA, classes=1000, idle_ratio=.5)
    state_dict = {re.sub(r'^(blocks\.\d+)\.norm1\.', r'\1.attn.norm.', k): v for k, v in model.state_dict().items()}
    torch.save({'model': state_dict}, tmp_path / 'r.pth')
    folder = tmp_path / 'repa_deit_tiny.half'
    args = arguments({**REPA[1], 'idle_ratio': .5})
    assert main(['convert', str(tmp_path / 'r.pth'), '--model', 'repa_deit_tiny', '-o', str(folder), *args]) == 0
    found = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(found(x), model(x))


def test_scales(released_scales, tmp_path):
    path = released_scales('RepOpt-VGG-B1-scales.pth')
    folder = tmp_path / 'repopt_vgg_b1.c100'
    assert main(['convert', str(path), '--model', 'repopt_vgg_b1', '-o', str(folder)]) == 0
    written = folder / 'scales.safetensors'
    assert Scales.load(written) == Scales.load(path)
    assert Scales.load(written).metadata['model'] == 'repopt_vgg_b1'
    timm_rep.attach_grad_mults(timm.create_model('repopt_vgg_b1', device='meta', scales=False), written)


def test_refusals(released_vgg, released_scales, tmp_path, capsys):
    _, path = released_vgg
    folder = tmp_path / 'repopt_vgg_a0.in1k'
    (tmp_path / 'bad.pth').write_bytes(b'neither')
    for args, message in [
        ([path, '--model', 'repopt_vgg_z', '-o', folder], "'repopt_vgg_z'"),
        (['nowhere', '--model', 'repopt_vgg_a0', '-o', folder], "'nowhere' does not exist"),
        ([tmp_path / 'bad.pth', '--model', 'repopt_vgg_a0', '-o', folder], 'Expected a checkpoint'),
        ([path, '--model', 'repopt_vgg_a0', '-o', folder], 'fits RepOptVgg'),
        ([path, '--model', 'repopt_vgg_a0', '-o', tmp_path / 'somewhere', *arguments(REPOPT[1])], 'MODEL.TAG'),
        ([released_scales('RepOpt-VGG-B1-scales.pth'), '--model', 'repopt_vgg_a0', '-o', folder], 'of RepOptVgg, but'),
    ]:
        assert main(['convert', *map(str, args)]) == 1
        assert message in capsys.readouterr().err
    assert not folder.exists()
    assert not (tmp_path / 'somewhere').exists()
    other = tmp_path / 'repopt_vgg_a1.in1k'
    assert main(['convert', str(path), '--model', 'repopt_vgg_a0', '-o', str(other), *arguments(REPOPT[1])]) == 1
    assert 'repopt_vgg_a0.TAG' in capsys.readouterr().err
    assert not other.exists()


def test_what_was_there_stays_if_the_check_fails(released_vgg, tmp_path, monkeypatch):
    _, path = released_vgg
    folder = tmp_path / 'repopt_vgg_a0.in1k'
    convert_released(path, 'repopt_vgg_a0', folder, REPOPT[1])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr(_released, 'load_folder', lambda folder: trained(*REPOPT, seed=5, classes=1000))
    with pytest.raises(RuntimeError, match='must give the logits'):
        convert_released(path, 'repopt_vgg_a0', folder, REPOPT[1])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_nothing_is_written_if_the_check_of_scales_fails(vgg_scales, tmp_path, monkeypatch):
    scales, path = vgg_scales
    folder = tmp_path / 'repopt_vgg_a0.in1k'
    with monkeypatch.context() as patch:
        save = Scales.save
        patch.setattr(Scales, 'save', lambda self, path: save(self.ones_like(), path))
        with pytest.raises(RuntimeError, match='differ'):
            convert_released(path, 'repopt_vgg_a0', folder, REPOPT[1])
    assert not folder.exists()
    assert Scales.load(convert_released(path, 'repopt_vgg_a0', folder, REPOPT[1])) == scales


def test_what_is_of_the_previous_weights_goes(released_vgg, vgg_scales, tmp_path):
    """Scales, int8 form, card and predictions; new scales alone leave the weights, and what is of them, as they are."""
    model, path = released_vgg
    scales, scales_path = vgg_scales
    folder = tmp_path / 'repopt_vgg_a0.mine'
    publish(folder, REPOPT)
    of_weights = {'model.onnx', 'model.onnx.data', 'quantization.json', 'README.md', PREDICTIONS_NAME}
    for name in of_weights:
        (folder / name).write_text('')
    (folder / 'quantization.json').write_text(json.dumps(dict(
        backend='onnxruntime', per_channel=True, calibrator='minmax', percentile=100., images=8, qat_epochs=0,
        input_size=[3, 32, 32], int8_layers=[], float_layers={}, relative_rms=.1)))
    accuracy = Accuracy(
        top1=50., top5=90., images=8, split='val', machine='', date='2025-01-01', versions={},
        weights=sha256(folder / WEIGHTS_NAME))
    Metrics(accuracy=accuracy).to_json(folder / 'metrics.json')
    before = {name: (folder / name).read_bytes() for name in {*of_weights, WEIGHTS_NAME}}

    args = ['--model', 'repopt_vgg_a0', '-o', str(folder), *arguments(REPOPT[1])]
    assert main(['convert', str(scales_path), *args]) == 0
    assert Scales.load(folder / SCALES_NAME) == scales
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert main(['convert', str(path), *args]) == 0
    assert {file.name for file in folder.iterdir()} == {WEIGHTS_NAME, 'config.json', 'metrics.json'}
    verify_folder(folder)
    assert same(timm.create_model(f'local-dir:{folder}', pretrained=True, scales=False), model)
    assert main(['convert', str(scales_path), *args]) == 0
    verify_folder(folder)
    assert (folder / SCALES_NAME).is_file()


def test_scales_may_come_before_the_weights(released_vgg, vgg_scales, tmp_path):
    folder = tmp_path / 'repopt_vgg_a0.in1k'
    vgg_scales[0].save(tmp_path / 'searched.safetensors')
    for path in (vgg_scales[1], released_vgg[1], tmp_path / 'searched.safetensors'):
        convert_released(path, 'repopt_vgg_a0', folder, REPOPT[1])
        assert Scales.load(folder / SCALES_NAME) == vgg_scales[0]
