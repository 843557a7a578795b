"""Released checkpoints: the layouts of the papers' code, and the RePaFormer authors' repository on the Hub."""
import argparse
import copy
import os
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import timm_rep
from tests.helpers import relative
from tests.hub.published import REPA, publish, same, trained
from timm_rep.hub.released import RELEASED_REPO_ID, fetch_released, match_released

NAMES = ['repa_vit_theta50', 'repa_vit_theta75', 'repa_vit_theta100', 'repa_vit_linear_schedule']
TINY = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


def released(model):
    """A model's state dict under the released names."""
    return {
        key.replace('.norm1.', '.attn.norm.') if key.split('.')[2:3] == ['norm1'] else key: value.clone()
        for key, value in model.state_dict().items()
    }


def tiny(**kwargs):
    return timm.create_model('repa_deit_tiny', **{**TINY, **kwargs}).eval()


@pytest.mark.parametrize('name', NAMES)
@torch.no_grad()
def test_recorded_outputs(recorded, name):
    tensors, config = recorded(name)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    args = {k: v for k, v in config.items() if not k.startswith('parameters')}
    model = timm.create_model('repa_deit_tiny', **args)
    assert timm_rep.load_released(model, weights) is model
    model.eval()
    assert relative(model(tensors['input']), tensors['output']) < 1e-5
    if 'parameters' in config:
        assert sum(p.numel() for p in model.parameters()) == config['parameters']
    model.reparameterize()
    assert relative(model(tensors['input']), tensors['output_reparameterized']) < 1e-5
    parameters = sum(p.numel() for p in model.parameters())
    if config.get('idle_schedule') == 'linear':
        # where all channels are active the released code keeps the identity as a matrix
        parameters += config['embed_dim'] ** 2
    assert parameters == config['parameters_reparameterized']


@pytest.mark.parametrize('form', ['safetensors', 'pth', 'training run', 'path object', 'wrapped dict', 'ddp'])
def test_sources(tmp_path, form):
    source = tiny()
    weights = released(source)
    path = tmp_path / ('model.safetensors' if form == 'safetensors' else 'model.pth')
    given = str(path)
    if form == 'safetensors':
        save_file(weights, path)
    elif form == 'training run':  # as the released main.py saves it; the average is not what its authors evaluate
        average = {k: torch.zeros_like(v) for k, v in weights.items()}
        torch.save({'model': weights, 'model_ema': average, 'epoch': 3, 'args': argparse.Namespace(lr=.1)}, path)
    elif form == 'wrapped dict':
        given = {'model': weights, 'epoch': 3}
    elif form == 'ddp':
        given = {f'module.{k}': v for k, v in weights.items()}
    else:
        torch.save(weights, path)
        given = path
    model = timm_rep.load_released(tiny(), given)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), source(x))


def test_misfits_are_all_named_and_nothing_is_loaded():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    weights = released(tiny(num_classes=7))
    del weights['blocks.1.attn.norm.weight'], weights['cls_token']
    weights['blocks.9.mlp.fc1.weight'] = torch.zeros(2, 3)
    with pytest.raises(RuntimeError) as e:
        timm_rep.load_released(model, weights)
    message = str(e.value)
    for line in (
            'missing: blocks.1.attn.norm.weight (24,)',
            'missing: cls_token (1, 1, 24)',
            'unexpected: blocks.9.mlp.fc1.weight (2, 3)',
            'misshapen: head.weight is (7, 24), the model has (5, 24)',
            'misshapen: head.bias is (7,), the model has (5,)',
            'nothing was loaded',
    ):
        assert line in message
    assert message.count('\n') == 5
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_layouts_of_this_package_are_not_the_released_one():
    with pytest.raises(RuntimeError, match=r"own: use the model's load_state_dict"):
        timm_rep.load_released(tiny(), tiny().state_dict())
    for ratio in (0., .5, 1.):
        with pytest.raises(RuntimeError, match=r'deploy structure.*reparameterized=True'):
            timm_rep.load_released(tiny(), tiny(idle_ratio=ratio, reparameterized=True).state_dict())


def test_damaged_files(tmp_path):
    for name in ('model.pth', 'model.safetensors'):
        path = tmp_path / name
        path.write_bytes(b'neither')
        with pytest.raises(RuntimeError, match=rf'Expected a checkpoint .*{name}'):
            timm_rep.load_released(tiny(), path)


def test_model_on_meta():
    source = tiny()
    model = timm_rep.load_released(tiny(device='meta'), released(source)).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), source(x))


def test_refusals(tmp_path):
    with pytest.raises(RuntimeError, match=r'deploy structure.*reparameterize'):
        timm_rep.load_released(tiny(reparameterized=True), released(tiny()))
    with pytest.raises(TypeError, match=r'^model must .*RePaVisionTransformer.*ResNet'):
        timm_rep.load_released(timm.create_model('resnet18'), {})
    with pytest.raises(FileNotFoundError, match='nowhere'):
        timm_rep.load_released(tiny(), tmp_path / 'nowhere.pth')
    for name, content in ('nested.pth', {'inner': {'x': torch.zeros(1)}}), ('other.pth', {'x': torch.zeros(1)}):
        torch.save(content, tmp_path / name)
        with pytest.raises((TypeError, RuntimeError), match=name):
            timm_rep.load_released(tiny(), tmp_path / name)
    with pytest.raises(TypeError, match='empty'):
        timm_rep.load_released(tiny(), {})
    with pytest.raises(TypeError, match="'epoch'"):
        timm_rep.load_released(tiny(), {**released(tiny()), 'epoch': 3})


class _Payload:
    def __reduce__(self):
        return os.mkdir, ('executed',)


def test_pickled_code_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'model': released(tiny()), 'args': _Payload()}, 'evil.pth')
    with pytest.raises(Exception, match='weights_only'):
        timm_rep.load_released(tiny(), 'evil.pth')
    assert not (tmp_path / 'executed').exists()


FILE_NAMES = {
    'repa_deit_tiny': ['RePaViT_Tiny.pth', 'RePaViT-Tiny_0.75.pth', 'repadeit_t_0_75.pth', 'RePaDeiT-Ti-r75.pt',
                       'checkpoints/RePaViT_Tiny_idle_ratio_0.75_epoch300_224.pth', 'repa-deit-tiny-patch16-224.bin'],
    'repa_deit_base': ['RePaViT-Base.pth', 'RePa-DeiT-B-0.75/best_checkpoint.pth', 'repavit_base_300e.safetensors'],
    'repa_vit_large': ['RePaViT_Large/checkpoint.pth', 'RePaViT-L-0.75.pth'],
    'repa_vit_huge': ['RePaViT-Huge-75.pth'],
    'repa_swin_small': ['RePaSwin_Small.pth', 'repaswin-s-0p75.pth', 'RePa-Swin-Small-0.75.pth.tar'],
}


@pytest.mark.parametrize('variant', FILE_NAMES)
def test_ways_to_name_a_file(variant):
    others = [names[0] for other, names in FILE_NAMES.items() if other != variant]
    noise = ['README.md', 'config.json', 'img/RePaViT-Tiny.png', 'RePaMlpMixer_b16.pth', 'RePaPoolFormer-s12.pth',
             'RePaLVViT-S.pth', 'upernet_repaswin_small.pth']
    for name in FILE_NAMES[variant]:
        assert match_released([*noise, *others, name], variant, .75) == name


def test_ratios():
    files = ['RePaViT-Base-0.5.pth', 'RePaViT-Base-0.75.pth', 'RePaViT-Base-0.25.pth', 'RePaViT-Small_0.5_0300.pth']
    for ratio in (.25, .5, .75):
        assert match_released(files, 'repa_deit_base', ratio) == f'RePaViT-Base-{ratio}.pth'
    assert match_released(files, 'repa_deit_small', .5) == files[-1]
    with pytest.raises(FileNotFoundError, match=r'of repa_deit_small with idle_ratio=0\.75 .*it has RePaViT-'):
        match_released(files, 'repa_deit_small', .75)
    with pytest.raises(FileNotFoundError, match='no weights at all'):
        match_released(['README.md'], 'repa_deit_small', .75)


def test_ambiguous():
    files = ['a/RePaViT-Base.pth', 'b/RePaViT-Base-0.75.pth', 'RePaViT-Large.pth']
    with pytest.raises(ValueError, match=r'a/RePaViT-Base\.pth, b/RePaViT-Base-0\.75\.pth.*hf_hub_filename='):
        match_released(files, 'repa_deit_base', .75)


def create(name='repa_deit_tiny', **kwargs):
    return timm.create_model(name, pretrained=True, **{**REPA[1], **kwargs})


def released_file(path, seed, extra=None):
    model = trained(*REPA, seed, classes=1000)
    names = {key: re.sub(r'^(blocks\.\d+)\.norm1\.', r'\1.attn.norm.', key) for key in model.state_dict()}
    state_dict = {names[key]: value for key, value in model.state_dict().items()}
    torch.save({'model': state_dict, 'epoch': 300, 'args': argparse.Namespace(lr=1), **(extra or {})}, path)
    return model, path.read_bytes()


@pytest.fixture
def release(hub, tmp_path):
    model, data = released_file(tmp_path / 'theirs.pth', 0)
    hub.add(RELEASED_REPO_ID, {'RePaViT-Tiny.pth': data, 'RePaViT-Large.pth': b'another'})
    return model


def test_found_offline(hub, release, monkeypatch):
    """Downloaded once; other classes, features and the deploy structure from the same file."""
    assert same(create(), release)
    size = len(hub.files(RELEASED_REPO_ID)['RePaViT-Tiny.pth'])
    assert hub.bytes_served(RELEASED_REPO_ID, 'RePaViT-Tiny.pth') == size
    hub.clear_requests()
    assert same(create('repa_deit_tiny.in1k'), release)
    assert hub.bytes_served(RELEASED_REPO_ID, 'RePaViT-Tiny.pth') == 0 < size
    assert hub.requests  # the Hub was asked
    features = create(features_only=True, out_indices=(1,))
    assert torch.equal(features.model.blocks[0].mlp.fc1.weight, release.blocks[0].mlp.fc1.weight)
    folded = create(reparameterized=True, num_classes=3)
    assert folded.reparameterized
    assert folded.num_classes == 3
    assert torch.equal(folded.blocks[1].attn.qkv.weight, release.blocks[1].attn.qkv.weight)
    without_head = create(num_classes=0)
    assert torch.equal(without_head.norm.weight, release.norm.weight)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    assert same(create(), release)
    with pytest.raises(RuntimeError, match="is not in the Hub's cache"):
        create('repa_deit_small')


def test_other_tags_are_other_weights(hub, release):
    with pytest.raises(RuntimeError, match=r'Cannot find weights of repa_deit_tiny\.mine'):
        create('repa_deit_tiny.mine')
    assert not hub.bytes_served(RELEASED_REPO_ID, 'RePaViT-Tiny.pth')


def test_a_new_release_and_a_pinned_one(hub, release, tmp_path):
    first, = hub.commits(RELEASED_REPO_ID)
    model, data = released_file(tmp_path / 'new.pth', 1)
    hub.add(RELEASED_REPO_ID, {'RePaViT-Tiny.pth': data})
    assert same(create(), model)
    pinned = dict(hf_hub_id=f'{RELEASED_REPO_ID}@{first}')
    assert same(create(pretrained_cfg_overlay=pinned), release)


def test_the_argument_that_settles_it(hub, release, tmp_path):
    model, data = released_file(tmp_path / 'new.pth', 1)
    hub.add(RELEASED_REPO_ID, {'new/repavit_tiny.pth': data})
    with pytest.raises(ValueError, match='hf_hub_filename'):
        create()
    overlay = dict(hf_hub_filename='new/repavit_tiny.pth')
    assert same(create(pretrained_cfg_overlay=overlay), model)
    assert same(create(idle_ratio=.5, pretrained_cfg_overlay=overlay), model)  # the name tells no ratio
    with pytest.raises(FileNotFoundError, match=r"'nothing\.pth' .*but it has .*RePaViT-Tiny\.pth"):
        create(pretrained_cfg_overlay=dict(hf_hub_filename='nothing.pth'))


def test_other_ratios(hub, tmp_path):
    """Nothing of the file tells but its name; and where it is folded the ratio counts."""
    _, data = released_file(tmp_path / 'half.pth', 0)
    hub.add(RELEASED_REPO_ID, {'RePaViT-Tiny-0.5.pth': data})
    model = create(idle_ratio=.5).eval()
    folded = create(idle_ratio=.5, reparameterized=True).eval()
    assert folded.blocks[0].mlp.fc_in.weight.shape == (48, 24)
    x = torch.randn(1, 3, 32, 32)
    assert relative(folded(x), model(x)) < 1e-5
    with pytest.raises(RuntimeError, match=r'weights of repa_deit_tiny with idle_ratio=0\.75'):
        create()
    named = dict(pretrained_cfg_overlay=dict(hf_hub_filename='RePaViT-Tiny-0.5.pth'))
    with pytest.raises(ValueError, match=r'idle_ratio=0\.5, .*RePaViT-Tiny-0\.5\.pth.* 0\.75'):
        create(**named)
    with pytest.raises(ValueError, match=r'idle_schedule must be .* trained'):
        create(idle_ratio=.5, idle_schedule='linear')
    create(idle_ratio=.5, **named)


def test_the_file_goes_before_ours(hub, release, tmp_path):
    """A file that the caller names is used instead of a file of this package."""
    _, files = publish(tmp_path / 'repa_deit_tiny.in1k')
    hub.add('timm-rep/repa_deit_tiny.in1k', files)
    named = dict(pretrained_cfg_overlay=dict(hf_hub_filename='RePaViT-Tiny.pth'))
    assert same(create(**named), release)


def test_outage(hub, release, tmp_path):
    """The cached file of the revision is used, as the Hub's client does; else the error is one of the connection."""
    first, = hub.commits(RELEASED_REPO_ID)
    new, data = released_file(tmp_path / 'new.pth', 1)
    hub.add(RELEASED_REPO_ID, {'RePaViT-Tiny.pth': data})
    overlay = dict(hf_hub_id=RELEASED_REPO_ID)
    pinned = dict(hf_hub_id=f'{RELEASED_REPO_ID}@{first}')
    create(pretrained_cfg_overlay=overlay)
    create(pretrained_cfg_overlay=pinned)
    hub.stop()
    # the one that the branch was, not the one that was asked for last
    assert same(create(pretrained_cfg_overlay=overlay), new)
    assert same(create(pretrained_cfg_overlay=pinned), release)
    with pytest.raises(OSError, match="is not in the Hub's cache"):
        create('repa_deit_small', pretrained_cfg_overlay=overlay)
    path = Path(fetch_released('repa_deit_tiny')).resolve()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match='expected sha256') as e:
        create(pretrained_cfg_overlay=overlay)
    assert f'Delete {str(path)!r}' in str(e.value)


def test_models_that_are_not_in_it(hub, release):
    with pytest.raises(FileNotFoundError, match='got repa_mixer_b16'):
        timm.create_model('repa_mixer_b16', pretrained=True, pretrained_cfg_overlay=dict(hf_hub_id=RELEASED_REPO_ID))
    for name in ('RePaLV-ViT-S.pth', 'RePa-LV-ViT-S.pth', 'checkpoint_90.pth'):
        with pytest.raises(FileNotFoundError):
            match_released([name], 'repa_deit_small', .75)
    with pytest.raises(FileNotFoundError, match='got repa_lvvit_s'):
        match_released(['a.pth'], 'repa_lvvit_s', .75)


def test_ours_goes_before_theirs(hub, release, tmp_path):
    model, files = publish(tmp_path / 'repa_deit_tiny.in1k')
    hub.add('timm-rep/repa_deit_tiny.in1k', files)
    assert same(create(), model)


def test_damaged(hub, release, tmp_path):
    hub.corrupt(RELEASED_REPO_ID, 'RePaViT-Tiny.pth', lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RuntimeError, match='expected sha256'):
        create()


def test_of_another_shape(hub, tmp_path):
    torch.save({'model': {'cls_token': torch.zeros(1)}}, tmp_path / 'x.pth')
    hub.add(RELEASED_REPO_ID, {'RePaViT-Tiny.pth': (tmp_path / 'x.pth').read_bytes()})
    with pytest.raises(RuntimeError, match='fits RePaVisionTransformer'):
        create()


def test_code_in_it_is_not_run(hub, tmp_path):
    class Code:
        def __reduce__(self):
            import os
            return os.mkdir, (str(tmp_path / 'executed'),)

    _, data = released_file(tmp_path / 'bad.pth', 0, extra={'code': Code()})
    hub.add(RELEASED_REPO_ID, {'RePaViT-Tiny.pth': data})
    with pytest.raises(RuntimeError, match='weights_only'):
        create()
    assert not (tmp_path / 'executed').exists()


def test_swin(hub, tmp_path):
    """Other names than the release's, also of the classifier."""
    args = dict(img_size=64, window_size=2, embed_dim=12, depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 3))
    model = trained('repa_swin_tiny', args, classes=1000)
    state_dict = {}
    for key, value in model.state_dict().items():
        key = re.sub(r'^layers\.(\d+)\.downsample', lambda m: f'layers.{int(m[1]) - 1}.downsample', key)
        state_dict[key.replace('head.fc.', 'head.')] = value
    torch.save({'model': state_dict}, tmp_path / 'x.pth')
    hub.add(RELEASED_REPO_ID, {'RePaSwin_Tiny.pth': (tmp_path / 'x.pth').read_bytes()})
    assert same(timm.create_model('repa_swin_tiny', pretrained=True, **args), model)
    for classes in (0, 3):
        other = timm.create_model('repa_swin_tiny', pretrained=True, num_classes=classes, **args)
        assert torch.equal(other.layers[3].blocks[0].mlp.fc1.weight, model.layers[3].blocks[0].mlp.fc1.weight)
