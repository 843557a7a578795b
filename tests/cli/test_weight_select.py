import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import timm_rep
from timm_rep.cli import main

STUDENT = ['--student', 'vit_tiny_patch16_224', '--num-classes', '7', '--model-kwargs', 'img_size=32', 'depth=2']
KWARGS = dict(num_classes=7, img_size=32, depth=2)


@pytest.fixture
def teacher(tmp_path):
    torch.manual_seed(1)
    model = timm.create_model('vit_small_patch16_224', **{**KWARGS, 'num_classes': 3})
    save_file(model.state_dict(), tmp_path / 'teacher.safetensors')
    return model


def test_weight_select(teacher, tmp_path, capsys):
    output = tmp_path / 'new' / 'init.safetensors'
    assert main([
        'weight-select', *STUDENT, '--teacher', str(tmp_path / 'teacher.safetensors'), '-o', str(output), '--seed', '3',
        '--element-selection', 'random', '--layer-selection', 'last', '--exclude', 'norm', 'cls_token']) == 0
    torch.manual_seed(3)
    expected = timm.create_model('vit_tiny_patch16_224', **KWARGS)
    report = timm_rep.weight_select_init(
        expected, teacher, element_selection='random', layer_selection='last', exclude=['norm', 'cls_token'], seed=3)
    written = load_file(output)
    assert written.keys() == expected.state_dict().keys()
    assert all(torch.equal(v, written[k]) for k, v in expected.state_dict().items())
    out = capsys.readouterr().out
    assert f"{report.coverage:.1f}% of the student's values were selected from the teacher." in out
    assert 'head.bias (7,): not selected (classifier)' in out
    assert 'blocks.0.attn.qkv.weight' not in out
    # as timm's train.py reads it with --initial-checkpoint
    started = timm.create_model('vit_tiny_patch16_224', checkpoint_path=str(output), **KWARGS)
    assert all(torch.equal(v, written[k]) for k, v in started.state_dict().items())


def test_verbose(teacher, tmp_path, capsys):
    path = str(tmp_path / 'teacher.safetensors')
    assert main(['weight-select', *STUDENT, '--teacher', path, '-o', str(tmp_path / 'x.safetensors'), '--verbose']) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, value in timm.create_model('vit_tiny_patch16_224', **KWARGS).state_dict().items():
        assert any(line.startswith(f'{name} {tuple(value.shape)}') for line in lines)
    assert 'norm.weight (192,) <- norm.weight (384,): [0, 2, 4, ..., 382]' in lines


def test_chain(teacher, tmp_path, monkeypatch):
    """A file, then a model that it starts."""
    monkeypatch.setitem(
        timm.models._registry._model_entrypoints, 'vit_xsmall',
        lambda **kwargs: timm.models.VisionTransformer(embed_dim=288, depth=2, num_heads=6, img_size=32))
    path, output = str(tmp_path / 'teacher.safetensors'), tmp_path / 'x.safetensors'
    args = ['--include', 'blocks.0.mlp.*', '--element-selection', 'random', '-o', str(output)]
    assert main(['weight-select', *STUDENT, '--teacher', path, 'vit_xsmall', *args]) == 0
    middle = timm.create_model('vit_xsmall')
    timm_rep.weight_select_init(middle, teacher, include='blocks.0.mlp.*', element_selection='random')
    assert middle.blocks[0].mlp.fc2.weight.shape == (288, 1152)
    expected = timm.create_model('vit_tiny_patch16_224', **KWARGS)
    timm_rep.weight_select_init(expected, middle, include='blocks.0.mlp.*', element_selection='random')
    assert torch.equal(load_file(output)['blocks.0.mlp.fc2.weight'], expected.blocks[0].mlp.fc2.weight)


@pytest.mark.parametrize('args,message', [
    (['-o', 'x.pth'], "--output must be a .safetensors file, got 'x.pth'"),
    (['-o', 'x.safetensors', '--student', 'vit_tinny'], "'vit_tinny'"),
    (['-o', 'x.safetensors', '--teacher', 'nothing'], "teacher must be a file or a timm model, got 'nothing'"),
    (['-o', 'x.safetensors', '--student', 'vit_base_patch16_224'], 'smaller'),
    (['-o', 'x.safetensors', '--heads', 'within'], "'uniform_heads', got 'uniform'"),
    (['-o', 'x.safetensors', '--num-classes', '7', '--model-kwargs', 'num_classes=7'], '--model-kwargs num_classes'),
    (['-o', 'x.safetensors', '--model-kwargs', 'bogus=1'], "with --model-kwargs {'bogus': 1} cannot be used"),
])
def test_refusals(teacher, args, message, tmp_path, monkeypatch, capsys):
    """Before anything is written; a file that is there stays."""
    (tmp_path / 'there').mkdir()
    monkeypatch.chdir(tmp_path / 'there')
    (tmp_path / 'there' / 'x.safetensors').write_text('old')
    assert main(['weight-select', *STUDENT, '--teacher', str(tmp_path / 'teacher.safetensors'), *args]) == 1
    assert message in capsys.readouterr().err
    assert [p.name for p in (tmp_path / 'there').iterdir()] == ['x.safetensors']
    assert (tmp_path / 'there' / 'x.safetensors').read_text() == 'old'
