import pickle
import shutil

import numpy as np
import pytest
import timm
import torch

from timm_rep.cli import main
from timm_rep.layers import csla_layers
from timm_rep.optim import GradMult
from timm_rep.scales import Scales


def command(images, output, *more):
    return [
        'hyper-search', 'repopt_vgg_a0', '--dataset', '', '--data-dir', str(images), '-o', str(output),
        '--epochs', '2', '--warmup-epochs', '0', '--batch-size', '10', '-j', '1', *more,
    ]


def test_command(images, tmp_path, capsys):
    """Finds scales; a search that is resumed from its end gives the same ones, another seed others."""
    outputs = {name: tmp_path / name / 's.safetensors' for name in ('a', 'other')}
    assert main(command(images, outputs['a'])) == 0
    out = capsys.readouterr().out
    assert 'stages.3.0.conv.0' in out
    assert out.splitlines()[-1] == f'Written: {outputs["a"]}'
    scales = Scales.load(outputs['a'])
    assert (scales.metadata['dataset'], scales.metadata['epochs']) == (images.name, '2')
    assert 0 <= float(scales.metadata['accuracy']) <= 100
    assert main(command(images, outputs['a'])) == 1
    assert '--overwrite' in capsys.readouterr().err
    outputs['a'].unlink()
    assert main(command(images, outputs['a'], '--resume')) == 0
    assert Scales.load(outputs['a']) == scales
    faster = ['--preload', '--channels-last']
    assert main(command(images, outputs['other'], '--seed', '1', '--val-split', '', *faster)) == 0
    other = Scales.load(outputs['other'])
    assert other != scales
    assert 'accuracy' not in other.metadata


def test_multi_branch_network_of_timm(images, tmp_path):
    output = tmp_path / 's.safetensors'
    args = command(images, output, '--epochs', '1', '--val-split', '')
    args[1:2] = ['repopt_any', '--model-kwargs', 'base=fastvit_t8', 'layers=(1,1,1,1)', 'embed_dims=(8,16,32,64)']
    assert main(args) == 0
    scales = Scales.load(output)
    assert (scales.metadata['model'], scales.metadata['base']) == ('repopt_any', 'fastvit_t8')
    model = timm.create_model(
        'repopt_any', base='fastvit_t8', layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64), num_classes=4,
        scales=str(output))
    layers = csla_layers(model)
    assert layers.keys() == scales.keys()
    for name, layer in layers.items():
        assert torch.equal(layer.grad_mult.dense('squared'), GradMult(layer.csla, scales[name]).dense('squared'))


@pytest.mark.parametrize('change,message', [
    (['--data-dir', '/nowhere'], "Cannot open the split 'train' of the dataset ''"),
    (['--val-split', 'nothing'], "Cannot open the split 'nothing'"),
    (['--dataset', 'torch/nothing'], "Cannot open the split 'train' of the dataset 'torch/nothing'"),
    (['-o', '{tmp}/scales.pth'], '--output must be a .safetensors file'),
    (['-o', '{tmp}/file/s.safetensors'], "cannot write to the output folder '{tmp}/file'"),
    (['--num-classes', '3'], '--num-classes must be >= 4'),
    (['--batch-size', '21'], "--batch-size must be <= 20, the number of images in 'train'"),
    (['--model-kwargs', 'in_chans=1'], 'in_chans must be 3'),
    (['--device', 'nothing'], 'nothing'),
    pytest.param(
        ['--device', 'cuda'], "--device must be one that torch can use, got 'cuda'",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU here')),
    (['--epochs', '1', '--warmup-epochs', '1'], 'warmup_epochs must be less'),
    (['--lr', 'nan'], 'lr must be'),
    (['--model-kwargs', 'structure=target'], '--model-kwargs must not have structure'),
    (['--model-kwargs', 'num_classes=4'], 'num_classes'),
    (['--model-kwargs', 'features_only=True'], '--model-kwargs must not have features_only'),
], ids=str)
def test_refused_before_anything_is_trained(images, tmp_path, capsys, change, message):
    (tmp_path / 'file').write_text('old')
    change = [c.format(tmp=tmp_path) for c in change]
    assert main([*command(images, tmp_path / 's.safetensors'), *change]) == 1
    captured = capsys.readouterr()
    assert message.format(tmp=tmp_path) in captured.err
    assert captured.out == ''
    assert [p.name for p in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('change', ['missing', 'renamed'])
def test_other_classes_to_measure_the_accuracy_on(images, tmp_path, capsys, change):
    """Labels are the positions of the classes' names."""
    shutil.copytree(images, tmp_path / 'images')
    folder = tmp_path / 'images' / 'validation'
    if change == 'missing':
        shutil.rmtree(folder / '1')
    else:
        (folder / '1').rename(folder / '5')
    assert main(command(tmp_path / 'images', tmp_path / 's.safetensors', '--num-classes', '9')) == 1
    found = "'train' and 'validation', but they differ in " + dict(missing='1.', renamed='1, 5.')[change]
    assert found in capsys.readouterr().err
    assert not list(tmp_path.glob('s.safetensors*'))


def test_a_search_that_diverges(images, tmp_path, capsys):
    assert main(command(images, tmp_path / 's.safetensors', '--lr', '1e38', '--weight-decay', '1')) == 1
    assert 'diverged in epoch 1' in capsys.readouterr().err
    assert not list(tmp_path.glob('s.safetensors*'))


@pytest.mark.parametrize('gpu', [False, True])
def test_default_device(tmp_path, capsys, monkeypatch, gpu):
    """The GPU if there is one, otherwise the CPU."""
    def init(args):
        raise AssertionError(f'asked for {args.device}')

    monkeypatch.setattr('torch.cuda.is_available', lambda: gpu)
    monkeypatch.setattr('timm_rep.cli.hyper_search.init_distributed_device', init)
    args = ['-o', str(tmp_path / 's.safetensors'), '--data-dir', str(tmp_path)]
    for more, device in (([], 'cuda' if gpu else 'cpu'), (['--device', 'cpu'], 'cpu')):
        assert main(['hyper-search', 'repopt_vgg_a0', *args, *more]) == 1
        assert f'asked for {device}' in capsys.readouterr().err


def test_models_that_cannot_be_searched(images, tmp_path, capsys):
    args = command(images, tmp_path / 's.safetensors')
    for model, message in (('resnet18', 'resnet18'), ('repopt_x', "'repopt_x'")):
        args[1] = model
        assert main(args) == 1
        assert message in capsys.readouterr().err


def test_cifar100(tmp_path, monkeypatch, capsys):
    """The default dataset, as torchvision keeps it; of noise, which its checksums are told to accept."""
    folder = tmp_path / 'cifar-100-python'
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, n in (('train', 10), ('test', 4)):
        content = {'data': generator.integers(0, 256, (n, 3072), dtype=np.uint8), 'fine_labels': list(range(n))}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / 'meta').write_bytes(pickle.dumps({'fine_label_names': [str(i) for i in range(100)]}))
    command = [
        'hyper-search', 'repopt_ghostnet_050', '--data-dir', str(tmp_path), '-o', str(tmp_path / 's.safetensors'),
        '--epochs', '1', '--warmup-epochs', '0', '--batch-size', '5', '-j', '0']
    assert main(command) == 1
    message = capsys.readouterr().err
    assert "Cannot open the split 'train' of the dataset 'torch/cifar100'" in message
    assert "--dataset-download downloads it, if timm can; --dataset '' reads folders of images" in message
    monkeypatch.setattr('torchvision.datasets.cifar.check_integrity', lambda *args: True)
    assert main(command) == 0
    scales = Scales.load(tmp_path / 's.safetensors')
    assert scales.metadata['dataset'] == 'torch/cifar100'
    state = torch.load(tmp_path / 's.safetensors.checkpoint', weights_only=True)
    assert state['model']['classifier.weight'].shape == (100, 1280)
