"""Named weights of repa_any and repopt_any: of the converted model, of its base, of another structure."""
import pytest
import timm
import torch

from tests.helpers import images, randomize_, relative, same_weights
from timm_rep.hub._folder import save_folder, write_hashes

VIT = dict(base='vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
FASTVIT = dict(base='fastvit_t8', layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64))


def create(variant, args, **kwargs):
    torch.manual_seed(0)
    return randomize_(timm.create_model(variant, num_classes=5, **args, **kwargs)).eval()


def overlay(state_dict, tmp_path, **kwargs):
    torch.save(state_dict, tmp_path / 'weights.pth')
    return dict(file=str(tmp_path / 'weights.pth'), **kwargs)


@pytest.mark.parametrize('num_classes', [
    -1, pytest.param(7, marks=pytest.mark.slow)])  # timm's train.py passes -1 for --pretrained-path
@pytest.mark.parametrize('variant,args,found,asked', [
    ('repopt_any', FASTVIT, 'folded', {}),
    ('repopt_any', FASTVIT, dict(structure='csla'), {}),
    ('repopt_any', FASTVIT, dict(structure='search'), dict(reparameterized=True)),
    ('repa_any', VIT, {}, dict(anneal_steps=9)),
    ('repa_any', VIT, dict(norm='batch'), dict(anneal_steps=9, norm='batch')),
    ('repa_any', VIT, dict(anneal_steps=9), dict(anneal_steps=9, norm='batch')),
], ids=str)
def test_other_structures_are_refused(tmp_path, variant, args, found, asked, num_classes):
    """Loaded as the base's, each converted layer would stay random."""
    model = create(variant, args, **({} if found == 'folded' else found))
    if found == 'folded':
        model.reparameterize()
    with pytest.raises(RuntimeError, match='Expected'):
        create(variant, args, **asked, pretrained=True, pretrained_cfg_overlay=overlay(
            model.state_dict(), tmp_path, num_classes=num_classes))


def test_neither(tmp_path):
    other = timm.create_model('test_resnet')
    for variant, args in (('repopt_any', FASTVIT), ('repa_any', dict(VIT, anneal_steps=9))):
        with pytest.raises(RuntimeError, match=r'weights\.pth.* neither'):
            create(variant, args, pretrained=True, pretrained_cfg_overlay=overlay(
                other.state_dict(), tmp_path, num_classes=-1))


@pytest.mark.parametrize('fold', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_base_with_all_names_of_the_converted_model(tmp_path, fold):
    """A RepGhostNet has them besides its branches."""
    base = randomize_(timm.create_model('repghostnet_050', num_classes=5)).eval()
    loaded = timm.create_model(
        'repopt_any', base='repghostnet_050', reparameterized=fold, num_classes=7, pretrained=True,
        pretrained_cfg_overlay=overlay(base.state_dict(), tmp_path, num_classes=-1)).eval()
    x = images(2, 64)
    assert relative(loaded.forward_features(x), base.forward_features(x)) < 1e-4


def test_a_base_as_its_filter_takes_it(tmp_path):
    args = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=5)
    base = randomize_(timm.create_model('eva02_tiny_patch14_224', **args)).eval()
    loaded = timm.create_model(
        'repa_any', base='eva02_tiny_patch14_224', anneal_steps=9, **args, pretrained=True,
        pretrained_cfg_overlay=overlay({'module': base.state_dict()}, tmp_path, num_classes=5)).eval()
    x = images(2, 32)
    assert torch.equal(loaded(x), base(x))


def test_without_a_norm_that_timm_initializes(tmp_path):
    """With another pooling, the weights of a base lack its last norm, and timm loads them for other classes."""
    name = 'deit_tiny_patch16_224'  # timm 1.0.26 reads files of the other as NumPy's for other classes
    args = {k: v for k, v in VIT.items() if k != 'base'}
    base = create(name, args)
    loaded = timm.create_model(
        'repa_any', base=name, **args, anneal_steps=9, global_pool='avg', num_classes=7, pretrained=True,
        pretrained_cfg_overlay=overlay(base.state_dict(), tmp_path, num_classes=5))
    x = images(2, 32)
    blocks, expected = (m.forward_intermediates(x, intermediates_only=True) for m in (loaded.eval(), base))
    assert all(torch.equal(*pair) for pair in zip(blocks, expected))


@pytest.mark.parametrize('variant,args', [('repopt_any', FASTVIT), ('repa_any', dict(VIT, anneal_steps=9))])
def test_own_state_dict(variant, args):
    model = create(variant, args)
    loaded = timm.create_model(
        variant, num_classes=5, **args, pretrained=True,
        pretrained_cfg_overlay=dict(state_dict=model.state_dict(), num_classes=5))
    assert same_weights(loaded, model)


def test_own_repository(hub, tmp_path):
    """As hub/README.md pins a revision of published weights."""
    folder = tmp_path / 'repopt_any.mine'
    model = create('repopt_any', FASTVIT)
    save_folder(model, folder, model_args=FASTVIT, tag='mine')
    write_hashes(folder)
    commit = hub.add('me/repopt_any.mine', {path.name: path.read_bytes() for path in folder.iterdir()})
    hub.add('me/base', {'model.safetensors': b''})  # no config.json: taken for the base's, as timm does
    pinned = dict(pretrained=True, pretrained_cfg_overlay=dict(hf_hub_id=f'me/repopt_any.mine@{commit}'))
    assert same_weights(timm.create_model('repopt_any', num_classes=5, **FASTVIT, **pinned), model)
    with pytest.raises(Exception, match=r'(?i)header'):
        timm.create_model(
            'repopt_any', **FASTVIT, pretrained=True, pretrained_cfg_overlay=dict(hf_hub_id='me/base'))


def test_a_folded_base_that_timm_folds_in_part(tmp_path):
    """timm's blocks without a branch to convert create their convolutions on the CPU."""
    model = create('repopt_any', dict(base='mobileone_s1')).reparameterize()
    assert not any(p.device.type != 'meta' for p in timm.create_model(
        'repopt_any', base='mobileone_s1', reparameterized=True, device='meta').parameters())
    loaded = timm.create_model(
        'repopt_any', base='mobileone_s1', reparameterized=True, num_classes=5, pretrained=True,
        pretrained_cfg_overlay=overlay(model.state_dict(), tmp_path, num_classes=5))
    assert same_weights(loaded, model)
