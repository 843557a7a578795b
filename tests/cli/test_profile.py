import pytest
import timm

from timm_rep.cli import main

pytest.importorskip('matplotlib', reason='matplotlib draws the picture')


def test_profile(tmp_path, capsys, monkeypatch):
    """A RePaFormer beside its vanilla backbone, and a model of timm's beside its conversion."""
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


@pytest.mark.parametrize('args,message', [
    (['repa_deit_tinny'], "There is no model 'repa_deit_tinny'"),
    (['resnet18'], 'Cannot convert ResNet'),
    (['repa_deit_tiny', '-o', 'x.txt'], "a .png, .svg or .pdf file to write, got 'x.txt'"),
])
def test_refusals(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(['profile', *args]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
