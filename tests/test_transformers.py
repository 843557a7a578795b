"""Published folders in Hugging Face transformers: ``pytest -m clients``."""
import json

import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

import timm_rep
from tests.helpers import ROOT
from tests.test_readme import blocks
from timm_rep.layers import csla_layers

pytestmark = pytest.mark.clients

NAMES = ['repa_any.cifar10', 'repopt_vgg_a0.cifar10']
CONVERTED = 'repa_any.cifar10_converted'  # folded as it is


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    return pytest.importorskip('transformers')


@pytest.fixture
def image():
    pixels = torch.randint(0, 256, (40, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def test_documentation(transformers, image, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, = (code for code in blocks('hub/README.md', 'python') if 'from transformers import' in code)
    names = {}
    exec(compile(code, 'hub/README.md', 'exec'), names)
    assert names['classify'](image)
    assert csla_layers(names['model'].timm_model)['stem.conv.0'].grad_mult is not None


@pytest.mark.parametrize('name', [*NAMES, CONVERTED])
def test_round_trip(transformers, image, tmp_path, name):
    """Equal inputs and logits in transformers and timm, from the published folder and from what transformers saves."""
    folder = str(ROOT / 'hub' / name)
    reference = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    pixels = create_transform(**resolve_data_config(model=reference))(image)[None]
    with torch.inference_mode():
        logits = reference(pixels)
    labels = json.loads((ROOT / 'hub' / name / 'config.json').read_text())['label_names']
    saved = str(tmp_path / name)
    for source in folder, saved:
        model = transformers.AutoModelForImageClassification.from_pretrained(source, dtype=torch.float32).eval()
        processor = transformers.AutoImageProcessor.from_pretrained(source)
        inputs = processor(image, return_tensors='pt')
        assert torch.equal(inputs['pixel_values'], pixels)
        with torch.inference_mode():
            torch.testing.assert_close(model(**inputs).logits, logits)
        classify = transformers.pipeline('image-classification', model=source, dtype=torch.float32)
        best, *_ = classify(image)
        assert best['label'] == labels[logits.argmax()]
        assert best['score'] == pytest.approx(logits.softmax(-1).max().item(), rel=1e-4)
        model.save_pretrained(saved)
    again = timm.create_model(f'local-dir:{saved}', pretrained=True).eval()
    with torch.inference_mode():
        torch.testing.assert_close(again(pixels), logits)


def test_scales(transformers, tmp_path):
    """The scales of the folder are attached; the folder that transformers saves has none, and RepSGD refuses it."""
    folder = ROOT / 'hub' / 'repopt_vgg_a0.cifar10'
    model = transformers.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32)
    published = timm.create_model(f'local-dir:{folder}', pretrained=True)
    for name, layer in csla_layers(published).items():
        found = csla_layers(model.timm_model)[name].grad_mult
        assert torch.equal(found.dense('squared'), layer.grad_mult.dense('squared'))
    timm.optim.create_optimizer_v2(model, opt='repsgd', lr=.1)
    model.save_pretrained(tmp_path / folder.name)
    saved = timm.create_model(f'local-dir:{tmp_path / folder.name}', pretrained=True)
    with pytest.raises(ValueError, match='GradMult'):
        timm.optim.create_optimizer_v2(saved, opt='repsgd', lr=.1)


@pytest.mark.parametrize('name', NAMES)
def test_folded_inside(transformers, tmp_path, name):
    """save_pretrained() writes that the model is folded."""
    load = transformers.AutoModelForImageClassification.from_pretrained
    model = load(ROOT / 'hub' / name, dtype=torch.float32).eval()
    model.timm_model.reparameterize()
    model.save_pretrained(tmp_path / name)
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        logits = model(x).logits
        torch.testing.assert_close(load(tmp_path / name, dtype=torch.float32).eval()(x).logits, logits)
        found = timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True).eval()
        torch.testing.assert_close(found(x), logits)


@pytest.mark.parametrize('folded', [True, False])
@pytest.mark.parametrize('name', NAMES)
def test_a_config_of_another_structure(transformers, tmp_path, name, folded):
    """Folded weights whose config.json does not say so, and the reverse, are refused; other labels are not."""
    load = transformers.AutoModelForImageClassification.from_pretrained
    model = load(ROOT / 'hub' / name, dtype=torch.float32)
    if folded:
        model.timm_model.reparameterize()
    model.save_pretrained(tmp_path / name)
    assert load(tmp_path / name, num_labels=3, ignore_mismatched_sizes=True).num_labels == 3
    path = tmp_path / name / 'config.json'
    config = json.loads(path.read_text())
    config['model_args']['reparameterized'] = not folded
    path.write_text(json.dumps(config))
    for cls in 'AutoModel', 'AutoModelForImageClassification':
        with pytest.raises(RuntimeError, match='reparameterized=True'):
            getattr(transformers, cls).from_pretrained(tmp_path / name, dtype=torch.float32)


def test_converted_inside(transformers, tmp_path):
    args = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    timm_rep.export(timm.create_model('vit_tiny_patch16_224', **args), tmp_path / 'vit')
    load = transformers.AutoModelForImageClassification.from_pretrained
    model = load(tmp_path / 'vit', dtype=torch.float32).eval()
    timm_rep.convert_to_repa(model.timm_model, calibration=[torch.randn(8, 3, 32, 32)])
    model.save_pretrained(tmp_path / 'saved')
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        found = load(tmp_path / 'saved', dtype=torch.float32).eval()
        torch.testing.assert_close(found(x).logits, model(x).logits)


def test_exported(transformers, tmp_path):
    args = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    model = timm.create_model('repa_deit_tiny', **args).eval()
    timm_rep.export(model, tmp_path / 'm')
    x = torch.randn(2, 3, 32, 32)
    for kind in 'AutoModel', 'AutoModelForImageClassification':
        found = getattr(transformers, kind).from_pretrained(tmp_path / 'm', dtype=torch.float32).eval()
    with torch.inference_mode():
        assert found(x).logits.allclose(model(x), atol=1e-5)
