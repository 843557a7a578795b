import pytest
import timm

from timm_rep.cli import main

plt = pytest.importorskip('matplotlib.pyplot', reason='matplotlib draws the picture')


def test_profile(tmp_path, capsys, monkeypatch):
    """A RePaFormer next to its vanilla backbone, and a timm model next to its conversion."""
    built = {}
    create_model = timm.create_model

    def tiny(name, **kwargs):
        built[name] = kwargs
        return create_model(name, depth=1, embed_dim=24, num_heads=3, **kwargs)

    monkeypatch.setattr(timm, 'create_model', tiny)
    monkeypatch.chdir(tmp_path)
    output = tmp_path / 'profile.png'
    assert main([
        'profile', 'repa_deit_tiny', 'deit3_small_patch16_224', '--rounds', '1', '--batch-size', '2', '--img-size',
        '32', '--dtype', 'bfloat16', '--channels-last', '--model-kwargs', 'idle_ratio=0.5', '-o', output.name]) == 0
    assert output.read_bytes().startswith(b'\x89PNG')
    assert built == {
        'deit_tiny_patch16_224': {'img_size': 32}, 'repa_deit_tiny': {'img_size': 32, 'idle_ratio': .5},
        'deit3_small_patch16_224': {'img_size': 32}}
    out = capsys.readouterr().out
    assert f'Picture: {output}' in out
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line] == [
        *('repa_deit_tiny', 'patch', 'token', 'FFNs', 'head', 'all'),
        *('deit3_small_patch16_224', 'patch', 'token', 'FFNs', 'head', 'all'), 'Picture:']
    assert all('100%)' in ' '.join(line) for line in lines if line[:1] == ['all'])


@pytest.fixture
def profiled(monkeypatch):
    """Models and shape of the images of every profile, which takes no time."""
    found = []
    monkeypatch.setattr('timm_rep.cli.profile.profile_latency', lambda models, images, **kwargs: found.append(
        (models, images.shape)) or {key: dict.fromkeys(('FFNs', 'head'), 1.) for key in models})
    monkeypatch.setattr('timm_rep.cli.profile.plot_latency', lambda profiles: plt.figure())
    return found


@pytest.mark.parametrize('name', ['repa_lvvit_s', 'vit_tiny_patch16_224'])
def test_arguments_of_both_models(name, tmp_path, profiled):
    """The compared models have the same size."""
    assert main([
        'profile', name, '--model-kwargs', 'depth=2', 'embed_dim=48', 'num_heads=4', 'img_size=32', 'patch_size=8',
        'idle_ratio=0.5', 'in_chans=1', '-o', str(tmp_path / 'p.png')]) == 0
    (models, shape), = profiled
    assert shape == (1, 1, 32, 32)
    for model in models.values():
        assert (len(model.blocks), model.embed_dim) == (2, 48)
    act = models['RePa'].blocks[0].mlp.act
    assert 2 * act.active_channels == act.channels


def test_a_converted_model(tmp_path, profiled):
    assert main([
        'profile', 'repa_any', '--img-size', '28', '-o', str(tmp_path / 'p.png'), '--model-kwargs',
        'base=eva02_tiny_patch14_224', 'depth=1', 'idle_ratio=0.5']) == 0
    (models, _), = profiled
    assert {key: len(model.blocks) for key, model in models.items()} == dict.fromkeys(('vanilla', 'RePa', 'folded'), 1)
    assert not hasattr(models['vanilla'].blocks[0].mlp, 'fc_idle')
    assert models['folded'].blocks[0].mlp.fc_idle is not None
    assert models['folded'].patch_embed.img_size == (28, 28)


@pytest.mark.parametrize('args,message', [
    (['repa_deit_tinny'], "'repa_deit_tinny'"),
    (['resnet18'], 'Each FFN of ResNet must be'),
    (['repa_any.cifar10'], "but got 'repa_any.cifar10': times do not depend on weights"),
    (['local-dir:fast'], "but got 'local-dir:fast'"),
    (['repa_any'], "got base=None for 'repa_any'"),
    (['repa_any', '--model-kwargs', 'base=nope'], "'nope'"),
    (['deit_tiny_patch16_224', '--model-kwargs', 'base=vit'], "got base='vit' for 'deit_tiny_patch16_224'"),
    (['repa_deit_tiny', '--model-kwargs', 'dept=2'], "unexpected keyword argument 'dept'"),
    (['repa_any', '--model-kwargs', 'base=5'], "got base=5 for 'repa_any'"),
    (['deit_tiny_patch16_224', '--model-kwargs', 'base=5'], "got base=5 for 'deit_tiny_patch16_224'"),
    (['nest_tiny', '--img-size', '100'], "{'img_size': 100}"),
    (['maxvit_pico_rw_256', '--img-size', '100', '--model-kwargs', 'depths=(1,1,1,1)'], 'images of size (3, 100, 100)'),
    (['repa_deit_tiny', '-o', 'x.txt'], "--output must be a .png or .svg or .pdf file, got 'x.txt'"),
])
def test_refusals(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(['profile', *args]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
