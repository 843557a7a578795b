"""timm's scripts create models with ``resolve_model_input_args``: the same models as by ``create_model`` alone."""
import pytest
import timm
import torch

from tests.helpers import ROOT, images, same_weights, save_model
from tests.models.test_repa_any import CONVNEXT, VIT, plain

resolve = getattr(timm.models, 'resolve_model_input_args', None)
pytestmark = pytest.mark.skipif(resolve is None, reason='timm before 1.0.31')

SWIN = dict(
    base='swin_tiny_patch4_window7_224', img_size=64, embed_dim=12, depths=(1, 1), num_heads=(1, 2), window_size=4)
FASTVIT = dict(base='fastvit_t8', embed_dims=(8, 8, 16, 16), layers=(1, 1, 1, 1))


@pytest.mark.parametrize('name, args', [
    ('repa_any', VIT),
    ('repa_any', dict(CONVNEXT, anneal_steps=5)),
    ('repa_any', dict(SWIN, norm='batch')),
    ('repopt_any', FASTVIT),
    ('repa_any.cifar10', {}),
    ('repa_deit_tiny', {k: v for k, v in VIT.items() if k != 'base'}),
    ('repa_deit_tiny.in1k', {k: v for k, v in VIT.items() if k != 'base'}),
])
def test_the_same_model(name, args):
    torch.manual_seed(0)
    expected = timm.create_model(name, **args)
    torch.manual_seed(0)
    model = timm.create_model(**resolve(name, {}, **args))
    assert {**model.pretrained_cfg, 'url': None} == {**expected.pretrained_cfg, 'url': None}
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), expected.state_dict().values()))


def test_a_changed_cfg():
    """What the caller changes stays changed, and is all that the base does not decide."""
    overlay = dict(mean=(.1, .2, .3), num_classes=7)
    model, expected = (timm.create_model(**args) for args in (
        resolve('repa_any', {}, pretrained_cfg_overlay=overlay, **SWIN),
        dict(model_name='repa_any', pretrained_cfg_overlay=overlay, **SWIN)))
    assert model.pretrained_cfg == expected.pretrained_cfg
    assert model.pretrained_cfg['mean'] == (.1, .2, .3)
    assert model.pretrained_cfg['classifier'] == 'head.fc'
    cfg = dict(timm.get_pretrained_cfg('repa_any').to_dict(), tag='mine', interpolation='bilinear')
    assert timm.create_model('repa_any', pretrained_cfg=cfg, **SWIN).pretrained_cfg['interpolation'] == 'bilinear'


@torch.no_grad()
def test_weights_of_the_base(tmp_path):
    base = plain(CONVNEXT)
    torch.save(base.state_dict(), tmp_path / 'base.pth')
    overlay, x = dict(file=str(tmp_path / 'base.pth'), num_classes=5), images(2, 64)
    args = dict(CONVNEXT, anneal_steps=5, pretrained=True, pretrained_cfg_overlay=overlay)
    model = timm.create_model(**resolve('repa_any', {}, **args)).eval()
    assert torch.equal(model(x), timm.create_model('repa_any', **args).eval()(x))
    assert torch.allclose(model(x), base(x), atol=1e-5)
    torch.save(model.state_dict(), tmp_path / 'own.pth')
    overlay['file'] = str(tmp_path / 'own.pth')
    assert torch.equal(timm.create_model(**resolve('repa_any', {}, **args)).eval()(x), model(x))


@pytest.mark.parametrize('name, args', [
    ('repa_any', dict(base='convnext_atto', anneal_steps=5)),
    ('repopt_any', dict(base='repvgg_a0')),
])
def test_the_default_weights_of_the_base(name, args, monkeypatch):
    """They are looked for where those of the base are."""
    sources = []
    monkeypatch.setattr('timm.models._builder.load_pretrained', lambda model, pretrained_cfg, **kwargs: sources.append(
        pretrained_cfg['hf_hub_id']))
    timm.create_model(**resolve(name, {}, pretrained=True, **args))
    assert sources == [timm.get_pretrained_cfg(args['base']).hf_hub_id]


@torch.no_grad()
def test_image_size(tmp_path):
    """``--img-size`` is for the base, whose size is fixed or not, whatever the default base has."""
    size = dict(img_size=48)
    assert timm.create_model(**resolve('repa_any', size, **dict(VIT, img_size=None))).patch_embed.img_size == (48, 48)
    model = timm.create_model(**resolve('repa_any', size, **CONVNEXT)).eval()
    x = images(2, 48)
    assert model(x).shape == (2, 5)
    save_model(model, tmp_path)
    loaded = timm.create_model(**resolve(f'local-dir:{tmp_path}', dict(img_size=64), pretrained=True)).eval()
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(TypeError, match='patch_dim'):
        timm.create_model('repa_any', patch_dim=3, **CONVNEXT)



@pytest.mark.parametrize('name', ['repa_any.cifar10', 'repa_any.cifar10_converted', 'repopt_vgg_a0.cifar10'])
def test_published_weights(name, monkeypatch):
    """By their tag, and by their folder."""
    monkeypatch.setenv('TIMM_REP_HUB', str(ROOT / 'hub'))
    expected = timm.create_model(name, pretrained=True)
    for source in (name, f'local-dir:{ROOT / "hub" / name}'):
        model = timm.create_model(**resolve(source, {}, pretrained=True))
        assert same_weights(model, expected)
        assert model.pretrained_cfg['mean'] == expected.pretrained_cfg['mean']
    other = timm.create_model(**resolve(name, {}, pretrained=True, num_classes=3))
    assert other.num_classes == 3
    monkeypatch.delenv('TIMM_REP_HUB')
    with pytest.raises(RuntimeError, match='Cannot find weights'):
        timm.create_model(**resolve(name, {}, pretrained=True))
