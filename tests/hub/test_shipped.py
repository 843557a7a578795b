"""The models in hub/ of this repository: they load from a clone, offline, and do what their cards say."""
import io
import os
import re
import tarfile
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from tests.helpers import needs_recorded_args, read_predictions, relative, save_model
from timm_rep.deploy import load_quantized
from timm_rep.hub import CARD_NAME, WEIGHTS_NAME, read_folder
from timm_rep.hub._folder import verify_folder
from timm_rep.publish._card import card_text
from timm_rep.publish._metrics import METRICS_NAME, PREDICTIONS_NAME, read_metrics
from timm_rep.utils.profiling import count_macs, count_params

HUB = Path(__file__).parents[2] / 'hub'
FOLDERS = sorted(path.parent.name for path in HUB.glob(f'*/{WEIGHTS_NAME}'))
MEGABYTES = 3

# CIFAR-10 as folders of images in a tar file, if it is here
_IMAGES = Path(os.environ.get(
    'TIMM_REP_CIFAR10', Path(__file__).parents[3] / 'shared' / 'data' / 'cifar10.tar.gz'))


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv('TIMM_REP_HUB', str(HUB))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)


@pytest.fixture(scope='module')
def images():
    """The validation images that the samples of predictions are of, by path."""
    if not _IMAGES.is_file():
        pytest.skip(f'CIFAR-10 is not in {_IMAGES}, see tests/README.md')
    wanted = {f'val/{file}' for name in FOLDERS for file, _, _ in read_predictions(HUB / name / PREDICTIONS_NAME)}
    found = {}
    with tarfile.open(_IMAGES) as archive:
        for member in archive:
            name = member.name.removeprefix('./')
            if name in wanted:
                found[name.removeprefix('val/')] = Image.open(io.BytesIO(archive.extractfile(member).read())).copy()
                if len(found) == len(wanted):
                    break
    return found


def test_there_is_one_of_each():
    assert FOLDERS == ['repa_any.cifar10', 'repa_any.cifar10_converted', 'repopt_vgg_a0.cifar10']


@pytest.mark.parametrize('name', FOLDERS)
def test_folder(name):
    """The folder is whole and small enough for git, and its card has its figures."""
    verify_folder(HUB / name)
    assert (HUB / name / WEIGHTS_NAME).stat().st_size < MEGABYTES * 1e6
    assert (HUB / name / CARD_NAME).read_text() == card_text(HUB / name, 'timm-rep')
    metrics = read_metrics(HUB / name)
    assert None not in (metrics.dataset, metrics.accuracy, metrics.cost)
    model = timm.create_model(name, pretrained=True)
    folded = timm.create_model(name, pretrained=True, reparameterized=True)
    forms = {'unfolded': model, 'folded': folded, 'int8': folded}
    forms = {form: forms[form] for form in metrics.cost.forms}  # a converted model is folded as it is
    assert {'folded', 'int8'} <= forms.keys()
    assert {form: count_params(model) for form, model in forms.items()} == {
        form: figures.params for form, figures in metrics.cost.forms.items()}
    assert {form: round(count_macs(model).total / 1e9, 4) for form, model in forms.items()} == {
        form: figures.gmacs for form, figures in metrics.cost.forms.items()}
    x = torch.randn(2, *model.pretrained_cfg['input_size'])
    features = timm.create_model(name, pretrained=True, features_only=True)
    assert len(features(x)) == len(features.feature_info.channels()) > 2
    with torch.no_grad():
        assert relative(folded.eval()(x), model.eval()(x)) < 1e-4
        features = model.forward_features(x)
    if model.pretrained_cfg['pool_size']:
        assert features.shape[2:] == tuple(model.pretrained_cfg['pool_size'])
    if name.startswith('repopt_'):
        assert (HUB / name / 'scales.safetensors').is_file()


@pytest.mark.parametrize('name', FOLDERS)
def test_no_paths_of_one_machine(name):
    """Commands name no folder of the machine that they ran on."""
    texts = [path.read_text() for suffix in ('md', 'json', 'yaml') for path in (HUB / name).glob(f'*.{suffix}')]
    assert len(texts) >= 4
    assert not re.findall(r'(?<=[\s"=])/\w[^\s"]*', '\n'.join(texts))  # absolute paths


@pytest.mark.parametrize('name', FOLDERS)
def test_names_of_the_classes(name):
    """The class names are the folders of images that the accuracy was measured on."""
    names = {target: file.partition('/')[0] for file, target, _ in read_predictions(HUB / name / PREDICTIONS_NAME)}
    assert read_folder(HUB / name).config['label_names'] == [names[i] for i in range(10)]


@needs_recorded_args
@pytest.mark.parametrize('name', FOLDERS)
def test_same_network_without_the_folder(name, monkeypatch, tmp_path):
    """A tag names the same network where its weights are not, in config.json too."""
    published = timm.create_model(name, pretrained=True).eval()
    monkeypatch.delenv('TIMM_REP_HUB')
    model = timm.create_model(name).eval()
    save_model(model, tmp_path)
    for other in model, timm.create_model(f'local-dir:{tmp_path}').eval():
        other.load_state_dict(published.state_dict())
        x = torch.randn(2, *model.pretrained_cfg['input_size'])
        assert torch.equal(other(x), published(x))
        for key in ('input_size', 'mean', 'std', 'crop_pct', 'interpolation', 'num_classes', 'license'):
            first, second = (m.pretrained_cfg[key] for m in (other, published))  # config.json has lists
            assert first == second or tuple(first) == tuple(second)
    if '_any' in name:
        with pytest.raises(ValueError, match=r"base must .*'convnext_atto'"):
            timm.create_model(name, base='convnext_atto')


def predictions(model, images, name):
    """Logits of the images of the recorded predictions, and the accuracy on them in percent."""
    transform = create_transform(**resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict()))
    recorded = read_predictions(HUB / name / PREDICTIONS_NAME)
    batches = torch.stack([transform(images[file]) for file, _, _ in recorded]).split(100)
    with torch.inference_mode():
        logits = torch.cat([model(batch) for batch in batches])
    right = sum(p == target for p, (_, target, _) in zip(logits.argmax(1).tolist(), recorded))
    return batches[0], logits, 100 * right / len(recorded)


def within_three_deviations(accuracy, expected, count):
    return abs(accuracy - expected) < 3 * (expected * (100 - expected) / count) ** .5


@pytest.mark.slow
@pytest.mark.parametrize('name', FOLDERS)
def test_int8_form(images, name):
    for package in ('onnxruntime', 'torchao'):
        pytest.importorskip(package)
    int8 = load_quantized(HUB / name)
    _, logits, accuracy = predictions(int8, images, name)
    measured, top1 = int8.report.accuracy, read_metrics(HUB / name).accuracy.top1
    assert measured.fp32 == top1
    assert abs(measured.int8 - top1) < 1
    assert within_three_deviations(accuracy, measured.int8, len(logits))


@pytest.mark.slow
@pytest.mark.parametrize('name', FOLDERS)
def test_predictions(images, name):
    """The recorded predictions, folded or not, and as many of them right as the card says of all images."""
    model = timm.create_model(name, pretrained=True).eval()
    recorded = read_predictions(HUB / name / PREDICTIONS_NAME)
    first, logits, accuracy = predictions(model, images, name)
    folded = timm.create_model(name, pretrained=True, reparameterized=True).eval()
    with torch.inference_mode():
        assert relative(folded(first), logits[:100]) < 1e-4
    predicted = logits.argmax(1).tolist()
    # two logits may be almost equal, and other processors round differently
    same = sum(p == r for p, (_, _, r) in zip(predicted, recorded))
    assert same >= len(recorded) - max(1, len(recorded) // 200)
    top1 = read_metrics(HUB / name).accuracy.top1
    assert top1 >= 90, 'hub/ publishes no model with less'
    assert within_three_deviations(accuracy, top1, len(recorded))
    assert f'| {top1:.2f}% |' in (HUB / name / CARD_NAME).read_text()
    assert (HUB / name / METRICS_NAME).is_file()
