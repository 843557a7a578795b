"""timm-rep card: from a checkpoint and a recipe to a folder that can be published."""
import argparse
import json
import re
import shutil

import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

import timm_rep
from tests.helpers import needs_recorded_args, normal_scales, read_predictions, relative, same_weights, save_model
from tests.hub.published import REPA, REPOPT, trained, write_folder
from timm_rep.cli import main
from timm_rep.deploy import BACKENDS, load_quantized, read_report
from timm_rep.deploy.report import REPORT_NAME, QuantizationReport, quantized_files
from timm_rep.hub import sha256
from timm_rep.hub._folder import load_folder, verify_folder
from timm_rep.publish import AccelerationReport, prepare_folder, write_folded
from timm_rep.publish._card import card_text, figures_table
from timm_rep.publish._recipe import create_trained
from timm_rep.scales import Scales
from timm_rep.utils.profiling import count_params

NAME = 'repa_deit_tiny.mine'
RECIPE = dict(
    model='repa_deit_tiny', model_kwargs=REPA[1], num_classes=4, input_size=[3, 32, 32], mean=[.1, .2, .3],
    std=[.5, .6, .7], crop_pct=1., interpolation='bilinear', opt='adamw')


@pytest.fixture
def folder(tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / 'train.yaml').write_text(yaml.safe_dump(RECIPE))
    return tmp_path / NAME


@pytest.fixture
def checkpoint(tmp_path):
    model = trained(*REPA, classes=4)
    average = trained(*REPA, seed=1, classes=4)
    torch.save({'state_dict': model.state_dict(), 'state_dict_ema': average.state_dict()}, tmp_path / 'last.pth.tar')
    return model, average, tmp_path / 'last.pth.tar'


def test_images_that_are_not_the_split_are_refused(folder, checkpoint, images, capsys, tmp_path):
    """A missing split, an image that cannot be decoded, a checkpoint without an average: nothing is written."""
    images = shutil.copytree(images, tmp_path / 'images')
    command = ['card', str(folder), '--checkpoint', str(checkpoint[2]), '--data-dir', str(images), '--val-split']
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main([*command, 'test']) == 1
    error = capsys.readouterr().err
    assert "'test'" in error
    assert f"'{images}'" in error
    broken = next((images / 'validation').rglob('*.png'))
    broken.write_bytes(broken.read_bytes()[:20])
    assert main([*command, 'validation']) == 1
    error = capsys.readouterr().err
    assert f"decoding '{broken}' failed" in error
    assert error.count('\n') == 1
    plain = tmp_path / 'plain.pth.tar'
    torch.save({'state_dict': checkpoint[0].state_dict(), 'args': argparse.Namespace(lr=.1)}, plain)
    assert main(['card', str(folder), '--checkpoint', str(plain), '--use-ema']) == 1
    assert 'moving average of the weights, but' in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_card(folder, checkpoint, images, capsys):
    model, _, path = checkpoint
    assert main([
        'card', str(folder), '--checkpoint', str(path), '--data-dir', str(images), '--val-split', 'validation',
        '--dataset', 'Stripes']) == 0
    found = load_folder(folder)
    assert all(torch.equal(v, found.state_dict()[k]) for k, v in model.state_dict().items())
    cfg = found.pretrained_cfg
    assert (tuple(cfg['mean']), cfg['interpolation'], cfg['crop_pct']) == ((.1, .2, .3), 'bilinear', 1.)
    config = json.loads((folder / 'config.json').read_text())
    assert config['label_names'] == ['0', '1', '2', '3']
    assert config['sha256'] == {
        path.name: sha256(path) for path in folder.iterdir() if path.name != 'config.json'}
    verify_folder(folder)

    # the figures are what they say
    metrics = json.loads((folder / 'metrics.json').read_text())
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=found))
    dataset = timm.data.create_dataset('', root=str(images), split='validation')
    with torch.inference_mode():
        predicted = [found(transform(image)[None]).argmax().item() for image, _ in dataset]
    right = [p == target for p, (_, target) in zip(predicted, dataset)]
    assert metrics['accuracy']['images'] == len(dataset) == 8
    assert metrics['accuracy']['top1'] == pytest.approx(100 * sum(right) / 8)
    assert metrics['accuracy']['top5'] == 100
    assert read_predictions(folder / 'predictions.csv') == [(dataset.filename(0), dataset[0][1], predicted[0])]
    forms = metrics['cost']['forms']
    assert forms['unfolded']['params'] == count_params(model)
    assert forms['folded']['params'] == count_params(trained(*REPA, classes=4).reparameterize())
    assert forms['folded']['gmacs'] < forms['unfolded']['gmacs']

    text = (folder / 'README.md').read_text()
    assert capsys.readouterr().out == (
        f'{path} also has a moving average of the weights: --use-ema loads it.\nWritten: {folder / "README.md"}\n')
    card = ModelCard(text).data
    assert (card.library_name, card.license, card.datasets) == ('timm', None, ['stripes'])
    assert card.eval_results[0].metric_value == metrics['accuracy']['top1']
    for part in (f'| {metrics["accuracy"]["top1"]:.2f}% | 100.00% |', 'on the 8 images', 'xu2025repavit',
                 metrics['cost']['machine'], f"create_model('{NAME}', pretrained=True)", 'opt: adamw',
                 f'{forms["folded"]["images_per_second"]:g}'):
        assert part in text


@pytest.mark.parametrize('kwargs', [dict(reparameterized=True), dict(norm='batch'), dict(norm='batch', anneal_steps=2)])
def test_converted_model_of_timm(kwargs, images, tmp_path):
    """The folder that save_for_hf or ``timm-rep accelerate`` wrote becomes one that can be published."""
    folder, args = tmp_path / 'repa_any.mine', {**kwargs, **REPA[1], 'num_classes': 4}
    model = timm.create_model('repa_any', base='deit_tiny_patch16_224', idle_ratio=.5, **args)
    for _ in range(2):
        model(torch.randn(4, 3, 32, 32))
    model.pretrained_cfg['input_size'] = (3, 32, 32)
    save_model(model.eval(), folder)
    prepare_folder(folder, data_dir=str(images), split='validation')
    verify_folder(folder)
    folded = 'reparameterized' in kwargs
    metrics = json.loads((folder / 'metrics.json').read_text())
    assert list(metrics['cost']['forms']) == (['folded'] if folded else ['unfolded', 'folded'])
    config = json.loads((folder / 'config.json').read_text())['model_args']
    assert config.get('reparameterized', False) == folded
    assert config['base'] == 'deit_tiny_patch16_224'
    card = (folder / 'README.md').read_text()
    assert 'xu2025repavit' in card
    assert ('This is the folded form' in card) == folded
    loaded, x = timm.create_model(f'local-dir:{folder}', pretrained=True).eval(), torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), model(x))
    if not folded:
        written = load_folder(write_folded(folder, tmp_path / 'folded'))
        assert relative(written(x), model(x)) < 1e-5


@pytest.mark.parametrize('folded', [False, True])
def test_base_that_timm_folds(tmp_path, folded):
    """The FFNs of a converted model are folded already, the branches of its base are not."""
    folder = tmp_path / 'repa_any.mine'
    model = timm.create_model(
        'repa_any', base='fastvit_t8', layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64), num_classes=4)
    model.pretrained_cfg['input_size'] = (3, 32, 32)
    save_model((model.reparameterize() if folded else model).eval(), folder)
    prepare_folder(folder)
    verify_folder(folder)
    metrics = json.loads((folder / 'metrics.json').read_text())
    assert list(metrics['cost']['forms']) == (['folded'] if folded else ['unfolded', 'folded'])
    loaded, x = timm.create_model(f'local-dir:{folder}', pretrained=True).eval(), torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), model(x))


def test_multi_branch_network_of_timm(tmp_path):
    folder = tmp_path / 'repopt_any.mine'
    model = timm.create_model(
        'repopt_any', base='fastvit_t8', layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64), num_classes=4)
    model.pretrained_cfg['input_size'] = (3, 32, 32)
    save_model(model.eval(), folder)
    prepare_folder(folder)
    verify_folder(folder)
    card = (folder / 'README.md').read_text()
    assert "create_model('repopt_any'" in card
    assert 'ding2022re' in card
    loaded, x = timm.create_model(f'local-dir:{folder}', pretrained=True).eval(), torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), model(x))


@needs_recorded_args
def test_model_of_timm(tmp_path, monkeypatch):
    """One that was not converted: its card has no line that does not run, and no folded form."""
    folder = tmp_path / 'vit_tiny_patch16_224.mine'
    model = timm.create_model('vit_tiny_patch16_224', **{**REPA[1], 'num_classes': 4}).eval()
    model.pretrained_cfg['input_size'] = (3, 32, 32)
    timm_rep.export(model, folder)
    prepare_folder(folder)
    verify_folder(folder)
    card = (folder / 'README.md').read_text()
    assert 'Speedup by folding' not in card
    assert not re.search(r'^\| (un)?folded \|', card, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    found, x = {}, torch.randn(2, 3, 32, 32)
    code = card.split('```python')[1].split('config =')[0]
    exec(code, found)
    assert torch.equal(found['model'](x), model(x))


@pytest.mark.parametrize('args, img_size', [
    (dict(base='fasternet_t0', embed_dim=16, depths=[1, 1, 1, 1]), None),
    (dict(base='deit_tiny_patch16_224', patch_size=8, embed_dim=24, depth=1, num_heads=3), 64),
    (dict(patch_size=8, embed_dim=24, depth=1, num_heads=3), 64),
])
def test_img_size_of_a_recipe(args, img_size, tmp_path):
    """img_size is an argument of the model where its base takes it, else only the size of the images."""
    model = timm.create_model('repa_any', num_classes=4, **args, **(dict(img_size=img_size) if img_size else {}))
    torch.save(model.state_dict(), tmp_path / 'c.pth')
    recipe = dict(model='repa_any', model_kwargs=args, num_classes=4, img_size=64)
    (tmp_path / 'train.yaml').write_text(yaml.safe_dump(recipe))
    prepare_folder(tmp_path / 'repa_any.mine', tmp_path / 'c.pth', tmp_path / 'train.yaml')
    config = json.loads((tmp_path / 'repa_any.mine' / 'config.json').read_text())
    assert config['pretrained_cfg']['input_size'] == [3, 64, 64]
    assert config['model_args'].get('img_size') == img_size


def test_arguments_of_the_model_and_of_its_validation(tmp_path):
    """gp and bn_eps build the model, as in train.py; a size or crop of the recipe replaces the source's for validation.

    The recipe is as train.py writes args.yaml: with all its arguments, also those that were not given.
    """
    torch.manual_seed(0)
    args = dict(bn_eps=.1, global_pool='max')
    trained = timm.create_model('mobilenetv3_small_050', num_classes=4, **args).eval()
    torch.save(trained.state_dict(), tmp_path / 'c.pth')
    recipe = dict(
        model='mobilenetv3_small_050', num_classes=4, bn_eps=.1, gp='max', img_size=48, crop_pct=.9, start_epoch=None,
        class_map='', interpolation='', mean=None, input_size=None, model_kwargs={}, train_img_sizes=None)
    (tmp_path / 'args.yaml').write_text(yaml.safe_dump(recipe))
    folder = tmp_path / 'mobilenetv3_small_050.mine'
    prepare_folder(folder, tmp_path / 'c.pth', tmp_path / 'args.yaml')
    x = torch.randn(2, 3, 48, 48)
    assert torch.equal(timm.create_model(f'local-dir:{folder}', pretrained=True).eval()(x), trained(x))

    source = timm.get_pretrained_cfg('convnext_atto').to_dict()
    assert source['test_input_size'] == (3, 288, 288)
    small = dict(depths=[1, 1, 1, 1], dims=[8, 8, 8, 8])
    torch.save(timm.create_model('convnext_atto', num_classes=4, **small).state_dict(), tmp_path / 'c.pth')
    for given, gone in (dict(img_size=64), ['test_input_size']), (dict(crop_pct=.5), ['test_crop_pct']), ({}, []):
        recipe = dict(model='convnext_atto', num_classes=4, model_kwargs=small, **given)
        (tmp_path / 'args.yaml').write_text(yaml.safe_dump(recipe))
        folder = tmp_path / 'convnext_atto.mine'
        prepare_folder(folder, tmp_path / 'c.pth', tmp_path / 'args.yaml')
        cfg = json.loads((folder / 'config.json').read_text())['pretrained_cfg']
        assert {'test_input_size', 'test_crop_pct'} - cfg.keys() == {*gone}


@pytest.mark.parametrize('named', [f'vit_base_patch16_224{tag}' for tag in ('', '.augreg_in1k', '.dino')])
def test_a_recipe_that_started_from_a_tag(tmp_path, named):
    """The preprocessing is that of the tag, the licence not."""
    small = dict(embed_dim=24, depth=1, num_heads=2)
    model = timm.create_model(named, num_classes=4, **small).eval()
    torch.save(model.state_dict(), tmp_path / 'c.pth')
    (tmp_path / 'args.yaml').write_text(yaml.safe_dump(dict(model=named, num_classes=4, model_kwargs=small, mean=None)))
    folder = tmp_path / 'vit_base_patch16_224.mine'
    prepare_folder(folder, tmp_path / 'c.pth', tmp_path / 'args.yaml')
    loaded = timm.create_model(f'local-dir:{folder}', pretrained=True)
    for name in 'mean', 'std', 'crop_pct', 'interpolation':
        expected = model.pretrained_cfg[name]
        assert loaded.pretrained_cfg[name] == (list(expected) if isinstance(expected, tuple) else expected)
    assert not loaded.pretrained_cfg.get('license')
    assert same_weights(loaded, model)


def test_private_arguments_of_a_recipe(folder, checkpoint, images, tmp_path):
    """Names of folders and accounts of args.yaml are not published. The classes of the same recipe stay known."""
    path = checkpoint[2].parent / 'args.yaml'
    private = dict(
        data_dir='/home/me/images', output='/home/me/out', experiment='e', wandb_project='p', wandb_tags=['t'],
        resume='/home/me/last.pth.tar', initial_checkpoint='/home/me/first.pth', pretrained_path='/home/me/p.pth')
    path.write_text(yaml.safe_dump({**RECIPE, **private}))
    prepare_folder(folder, checkpoint[2], path, data_dir=str(images), split='validation')
    assert yaml.safe_load((folder / 'train.yaml').read_text()) == RECIPE
    for file in folder.iterdir():
        assert b'/home/me' not in file.read_bytes(), file
    names = json.loads((folder / 'config.json').read_text())['label_names']
    prepare_folder(folder, checkpoint[2], path)
    assert json.loads((folder / 'config.json').read_text())['label_names'] == names
    path.write_text('# a comment\n' + yaml.safe_dump(RECIPE))
    prepare_folder(folder, checkpoint[2], path)
    assert (folder / 'train.yaml').read_text() == path.read_text()


def test_labels_in_the_order_of_the_model(folder, checkpoint, images):
    """The accuracy is of the names that the model was trained with, whatever the order of the folders."""
    prepare_folder(folder, checkpoint[2], data_dir=str(images), split='validation')
    config = json.loads((folder / 'config.json').read_text())
    names = config['label_names']
    expected = read_predictions(folder / 'predictions.csv')
    config['label_names'] = config['pretrained_cfg']['label_names'] = names[::-1]
    (folder / 'config.json').write_text(json.dumps(config))
    prepare_folder(folder, data_dir=str(images), split='validation')
    assert read_predictions(folder / 'predictions.csv') == [
        (file, 3 - target, predicted) for file, target, predicted in expected]


def test_batch_size_of_the_speed(folder, checkpoint):
    """Measured again with another batch size, not with the same or without one."""
    speeds = []
    for batch_size in (2, None, 2, 3):
        prepare_folder(folder, checkpoint[2] if not speeds else None, batch_size=batch_size)
        speeds.append(json.loads((folder / 'metrics.json').read_text())['cost'])
    assert [cost['batch_size'] for cost in speeds] == [2, 2, 2, 3]
    assert speeds[0] == speeds[1] == speeds[2] != speeds[3]


@pytest.mark.slow
def test_license_of_a_tag(tmp_path):
    """The license of the weights registered under the tag; others have none, as they are not the base's either."""
    args = dict(base='fasternet_t0', embed_dim=8, depths=(1, 1, 1, 1), feature_dim=16)
    torch.save(timm.create_model('repa_any', num_classes=4, **args).state_dict(), tmp_path / 'c.pth')
    recipe = dict(RECIPE, model='repa_any', model_kwargs=args)
    (tmp_path / 'train.yaml').write_text(yaml.safe_dump(recipe))
    assert timm.get_pretrained_cfg('fasternet_t0').license
    for tag, expected in ('cifar10', 'apache-2.0'), ('mine', None):
        folder = tmp_path / f'repa_any.{tag}'
        prepare_folder(folder, tmp_path / 'c.pth', tmp_path / 'train.yaml')
        assert json.loads((folder / 'config.json').read_text())['pretrained_cfg'].get('license') == expected


CONVERTED = dict(model_kwargs=dict(base='fasternet_t0', embed_dim=8), num_classes=4)


@pytest.mark.parametrize('name, settings, expected', [
    ('repa_any.cifar10', CONVERTED, 'apache-2.0'), ('repa_any.mine', CONVERTED, None),
    ('repa_deit_tiny.in1k', {}, 'apache-2.0'), ('repa_deit_tiny.mine', {}, None)])
def test_license_of_a_trained_model(tmp_path, name, settings, expected):
    """The license of the weights registered under the tag, otherwise none, although other weights have one."""
    settings = dict(settings, model=name.partition('.')[0])
    model = create_trained(settings, tmp_path / 'train.yaml', name)
    assert model.pretrained_cfg.get('license') == expected
    assert timm.get_pretrained_cfg('repa_deit_tiny').license
    assert timm.get_pretrained_cfg('fasternet_t0').license


def test_an_int8_form_is_measured(folder, checkpoint, monkeypatch):
    """When it comes, and when another one does; without it, the figures are without it."""
    prepare_folder(folder, checkpoint[2])
    loaded = []

    def load(path):
        loaded.append(path)
        return load_folder(path)

    def forms(**kwargs):
        prepare_folder(folder, **kwargs)
        return list(json.loads((folder / 'metrics.json').read_text())['cost']['forms'])

    write_int8(folder, 'onnxruntime')
    monkeypatch.setattr('timm_rep.publish.prepare.load_quantized', load)
    assert [forms(), forms()] == [['unfolded', 'folded', 'int8']] * 2
    assert len(loaded) == 1
    (folder / 'model.onnx').write_bytes(b'1')
    assert forms(device='cuda') == ['unfolded', 'folded']  # it runs on the CPU
    assert ', int8 by' not in (folder / 'README.md').read_text()
    assert [forms(), forms()] == [['unfolded', 'folded', 'int8']] * 2
    assert len(loaded) == 2
    write_int8(folder, 'openvino')
    assert [forms(), forms()] == [['unfolded', 'folded', 'int8']] * 2
    assert len(loaded) == 3
    for path in quantized_files(folder):
        path.unlink()
    assert forms() == ['unfolded', 'folded']


def test_what_is_measured_again(folder, checkpoint, images):
    """Figures stay with the weights that they are of."""
    _, _, path = checkpoint
    data = dict(data_dir=str(images), split='validation', dataset='Stripes')
    prepare_folder(folder, path, **data)
    before = json.loads((folder / 'metrics.json').read_text())
    prepare_folder(folder)
    assert json.loads((folder / 'metrics.json').read_text()) == before
    prepare_folder(folder, path)  # the same weights
    assert json.loads((folder / 'metrics.json').read_text())['accuracy'] == before['accuracy']
    prepare_folder(folder, path, use_ema=True)
    after = json.loads((folder / 'metrics.json').read_text())
    assert 'accuracy' not in after
    assert after['cost']['weights'] == sha256(folder / 'model.safetensors') != before['cost']['weights']
    assert after['dataset'] == 'Stripes'
    assert '## Accuracy' not in (folder / 'README.md').read_text()
    assert not (folder / 'predictions.csv').exists()
    verify_folder(folder)


def write_int8(folder, backend):
    """Files with the names of an int8 form, and its report."""
    QuantizationReport(
        backend, True, 'minmax', 100., 8, 0, (3, 32, 32), ['head'], {}, .01).to_json(folder / REPORT_NAME)
    for name in BACKENDS[backend].files:
        (folder / name).write_bytes(b'0')


@pytest.mark.parametrize('backend, runtime, extra', [
    ('openvino', 'OpenVINO', 'openvino'), ('executorch', 'ExecuTorch', 'executorch'),
    ('inductor', 'torch on x86', 'deploy')])
def test_what_an_int8_form_requires(folder, checkpoint, backend, runtime, extra):
    prepare_folder(folder, checkpoint[2])
    write_int8(folder, backend)
    card = card_text(folder, 'timm-rep')
    assert f' for {runtime} on a CPU' in card
    assert f"pip install 'timm-rep[{extra}]'" in card


@pytest.mark.slow
def test_int8(folder, checkpoint, images, monkeypatch, capsys):
    """``quantize`` adds the int8 form to a folder, ``card`` measures it; it goes with the weights that it is of."""
    for package in ('onnxruntime', 'torchao'):
        pytest.importorskip(package)
    _, _, path = checkpoint
    prepare_folder(folder, path)
    assert main([
        'quantize', f'local-dir:{folder}', '--data-dir', str(images), '--train-split', 'validation', '--val-split',
        'validation', '--images', '8', '--backend', 'onnxruntime', '-o', str(folder)]) == 0
    assert main(['card', str(folder), '--device', 'cpu']) == 0
    verify_folder(folder)
    forms = json.loads((folder / 'metrics.json').read_text())['cost']['forms']
    assert list(forms) == ['unfolded', 'folded', 'int8']
    assert forms['int8']['params'] == forms['folded']['params']
    assert forms['int8']['images_per_second'] > 0
    report, card = read_report(folder), (folder / 'README.md').read_text()
    assert '## Int8' in card
    assert f'Top-1 accuracy on {report.accuracy.images} images: {report.accuracy.int8:.2f}%, in float32 ' in card
    assert f"snapshot_download('timm-rep/{NAME}')" in card
    assert '- `model.onnx`: ' in card
    assert '| int8 | ' in card
    assert ', int8 by ONNX Runtime (' in card
    x = torch.randn(2, 3, 32, 32)
    int8, model = load_quantized(folder), load_folder(folder)
    assert relative(int8(x), model(x).detach()) < .1

    def measured(*args, **kwargs):
        raise AssertionError('measured again')

    with monkeypatch.context() as patch:
        patch.setattr('timm_rep.publish.prepare.measure_cost', measured)
        prepare_folder(folder)
    prepare_folder(folder, path, use_ema=True)
    assert not {'quantization.json', 'model.onnx'} & {file.name for file in folder.iterdir()}
    assert '## Int8' not in (folder / 'README.md').read_text()
    assert list(json.loads((folder / 'metrics.json').read_text())['cost']['forms']) == ['unfolded', 'folded']
    verify_folder(folder)


def test_weights_that_are_not_finite(folder, checkpoint, tmp_path, capsys):
    model, _, path = checkpoint
    prepare_folder(folder, path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    state = {**model.state_dict(), 'head.weight': model.head.weight.detach() * float('nan')}
    torch.save({'state_dict': state}, tmp_path / 'nan.pth.tar')
    assert main(['card', str(folder), '--checkpoint', str(tmp_path / 'nan.pth.tar'), '--half']) == 1
    assert 'head.weight' in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize('option', ['--checkpoint', '--recipe'])
def test_empty_names(folder, checkpoint, option, capsys):
    """Of a variable of the shell that is not set."""
    prepare_folder(folder, checkpoint[2])
    with pytest.raises(SystemExit):
        main(['card', str(folder), option, ''])
    assert option in capsys.readouterr().err


def test_a_comparison_of_earlier_weights(folder, checkpoint):
    prepare_folder(folder, checkpoint[2])
    for kwargs in (dict(half=True), dict(checkpoint=checkpoint[2])):
        (folder / 'verify.json').write_text('{}')
        prepare_folder(folder, **kwargs)
        assert not (folder / 'verify.json').exists()
    (folder / 'verify.json').write_text('{}')
    prepare_folder(folder)
    assert 'verify.json' in verify_folder(folder).hashes


def test_released_scales_that_cannot_be_had(tmp_path, monkeypatch, capsys):
    """The initial ones are not recorded in their place."""
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    folder, recipe = tmp_path / 'repopt_vgg_b1.mine', tmp_path / 'r.yaml'
    args = dict(model_kwargs=dict(depths=[1, 1, 1, 1], widths=[8] * 4, stem_width=8), num_classes=5)
    recipe.write_text(yaml.safe_dump({'model': 'repopt_vgg_b1', **args}))
    model = timm.create_model('repopt_vgg_b1', num_classes=5, scales='init', **args['model_kwargs'])
    torch.save(model.state_dict(), tmp_path / 'b1.pth')
    command = ['card', str(folder), '--checkpoint', str(tmp_path / 'b1.pth'), '--recipe', str(recipe)]
    assert main(command) == 1
    assert 'scales=init' in capsys.readouterr().err
    assert not folder.exists()
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'released.pth')
    assert main(['convert', str(tmp_path / 'b1.pth'), '--model', 'repopt_vgg_b1', '-o', str(folder),
                 '--model-kwargs', 'depths=[1,1,1,1]', 'widths=[8,8,8,8]', 'stem_width=8', 'num_classes=5']) == 1
    assert 'scales=init' in capsys.readouterr().err
    args['model_kwargs']['scales'] = 'init'
    recipe.write_text(yaml.safe_dump({'model': 'repopt_vgg_b1', **args}))
    assert main(command) == 0
    assert Scales.load(folder / 'scales.safetensors') == Scales.initial(model)


def test_figures_of_the_file(folder, checkpoint):
    """Cited ones say so, and the speedup is a quotient of measured ones."""
    prepare_folder(folder, checkpoint[2])
    metrics = json.loads((folder / 'metrics.json').read_text())
    metrics['cited'] = [dict(what='top-1', value='64.2%', source='table 1')]
    for form, rate in ('unfolded', 10.), ('folded', 25.):
        metrics['cost']['forms'][form]['images_per_second'] = rate
    (folder / 'metrics.json').write_text(json.dumps(metrics))
    prepare_folder(folder)
    text = (folder / 'README.md').read_text()
    assert '- top-1: 64.2% (table 1)' in text.split('## Cited')[1]
    assert ': 2.50.' in text.split('## Size and speed')[1]


def test_moving_average_and_half(folder, checkpoint):
    _, average, path = checkpoint
    prepare_folder(folder, path, use_ema=True, half=True)
    found = load_folder(folder)
    for key, value in average.state_dict().items():
        of_norm = key.endswith(('running_mean', 'running_var', 'num_batches_tracked'))
        assert torch.equal(found.state_dict()[key], value if of_norm else value.half().float())
    x = torch.randn(4, 3, 32, 32)
    assert relative(found(x), average(x)) < 1e-2
    average.norm.weight.data[0] = 1e5
    before = (folder / 'model.safetensors').read_bytes()
    with pytest.raises(OverflowError, match=r'norm\.weight must be .*got 100000'):
        write_folder(folder, average, REPA[1], half=True)
    assert (folder / 'model.safetensors').read_bytes() == before


def test_half_of_weights_that_are_there(tmp_path, capsys):
    """Without a checkpoint; arguments, scales and names of the classes stay, accuracies of other weights go."""
    for name, args in (REPA, REPOPT):
        model = trained(name, args)
        model.pretrained_cfg['input_size'] = (3, 32, 32)
        folder = tmp_path / f'{name}.mine'
        scales = Scales.ones(model) if name.startswith('repopt') else None
        write_folder(folder, model, args, scales=scales, label_names='abcde')
        before = json.loads((folder / 'config.json').read_text())
        write_int8(folder, 'onnxruntime')
        int8 = {file.name for file in quantized_files(folder)}
        assert main(['card', str(folder), '--half']) == 0
        assert not quantized_files(folder)  # of the float32 weights
        assert int8 == {*re.search(r'Removed, .*: (.*)', capsys.readouterr().out)[1].split(', ')}
        verify_folder(folder)
        found = load_file(folder / 'model.safetensors')
        assert all(torch.equal(found[key], value.half()) for key, value in model.named_parameters())
        after = json.loads((folder / 'config.json').read_text())
        assert [after[key] for key in ('model_args', 'label_names')] == [
            before[key] for key in ('model_args', 'label_names')]
        assert after['pretrained_cfg']['pool_size'] == ([1, 1] if scales else None)  # of timm: for 224 pixels
        assert (folder / 'scales.safetensors').is_file() == bool(scales)
        x = torch.randn(2, 3, 32, 32)
        assert relative(load_folder(folder)(x), model(x)) < 1e-2


def test_scales(tmp_path):
    folder = tmp_path / 'repopt_vgg_a0.mine'
    folder.mkdir()
    name, args = REPOPT
    scales = normal_scales(timm.create_model(name, **args), seed=3)
    scales.save(tmp_path / 's.safetensors')
    recipe = dict(model=name, model_kwargs={**args, 'scales': str(tmp_path / 's.safetensors')}, num_classes=5)
    recipe['model_kwargs'] = {k: list(v) if isinstance(v, tuple) else v for k, v in recipe['model_kwargs'].items()}
    (tmp_path / 'r.yaml').write_text(yaml.safe_dump(recipe))
    torch.save({'state_dict': trained(name, args, scales=False).state_dict()}, tmp_path / 'c.pth')
    prepare_folder(folder, tmp_path / 'c.pth', tmp_path / 'r.yaml')
    assert (folder / 'train.yaml').read_text() == (tmp_path / 'r.yaml').read_text()
    args = json.loads((folder / 'config.json').read_text())['model_args']
    assert 'num_classes' not in args  # transformers gives it
    assert args.pop('scales') == 'folder'
    (tmp_path / 's.safetensors').unlink()
    model = load_folder(folder)
    expected = timm.create_model(name, **args, scales=scales)
    assert torch.equal(model.stem.conv[0].grad_mult.dense('squared'), expected.stem.conv[0].grad_mult.dense('squared'))
    assert 'ding2022re' in (folder / 'README.md').read_text()


def test_refusals(folder, checkpoint, images, tmp_path, capsys):
    path = str(checkpoint[2])
    (tmp_path / 'bad.yaml').write_text('model: [')
    (tmp_path / 'other.yaml').write_text('model: resnet18')
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for args, message in [
        ([str(tmp_path / 'vit')], 'MODEL.TAG'),
        ([str(folder), '--checkpoint', 'nowhere.pth'], "checkpoint, but 'nowhere.pth'"),
        ([str(folder), '--checkpoint', path, '--recipe', 'nowhere.yaml'], "recipe, but 'nowhere.yaml'"),
        ([str(folder), '--checkpoint', path, '--recipe', str(tmp_path / 'bad.yaml')], 'must be valid YAML'),
        ([str(folder), '--checkpoint', path, '--recipe', str(tmp_path / 'other.yaml')], 'a recipe of repa_deit'),
        ([str(folder), '--data-dir', str(images), '--val-split', 'validation'], 'config.json'),
        ([str(folder)], 'pass a checkpoint'),
    ]:
        assert main(['card', *args]) == 1
        assert message in capsys.readouterr().err
    recipe = {**RECIPE, 'num_classes': 7}
    (tmp_path / 'seven.yaml').write_text(yaml.safe_dump(recipe))
    torch.save({'state_dict': trained(*REPA, classes=7).state_dict()}, tmp_path / 'seven.pth')
    assert main(['card', str(folder), '--checkpoint', str(tmp_path / 'seven.pth'), '--recipe',
                 str(tmp_path / 'seven.yaml'), '--data-dir', str(images), '--val-split', 'validation']) == 1
    assert 'Expected images of 7 classes' in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith('.')] == []


def test_a_failure_leaves_all_as_it_was(folder, checkpoint, images, tmp_path):
    """The figures of one checkpoint are not left with the weights of another."""
    data = dict(split='validation', dataset='Stripes')
    prepare_folder(folder, checkpoint[2], data_dir=str(images), **data)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    (tmp_path / 'other' / 'validation' / '0').mkdir(parents=True)
    Image.new('RGB', (8, 8)).save(tmp_path / 'other' / 'validation' / '0' / 'x.png')
    with pytest.raises(ValueError, match=r'4 classes.*1'):
        prepare_folder(folder, checkpoint[2], use_ema=True, data_dir=str(tmp_path / 'other'), **data)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    # weights that changed otherwise have no figures
    write_folder(folder, checkpoint[1], REPA[1])
    prepare_folder(folder)
    assert '## Accuracy' not in (folder / 'README.md').read_text()
    verify_folder(folder)


def test_names_of_classes_in_their_order(folder, tmp_path):
    for name in ('1', '2', '10', '20'):
        (tmp_path / 'data' / 'val' / name).mkdir(parents=True)
        Image.new('RGB', (8, 8)).save(tmp_path / 'data' / 'val' / name / 'x.png')
    (tmp_path / 'data' / 'val' / 'empty').mkdir()
    torch.save({'state_dict': trained(*REPA, classes=4).state_dict()}, tmp_path / 'c.pth')
    prepare_folder(folder, tmp_path / 'c.pth', data_dir=str(tmp_path / 'data'))
    assert json.loads((folder / 'config.json').read_text())['label_names'] == ['1', '2', '10', '20']
    prepare_folder(folder, tmp_path / 'c.pth')  # without the images they stay
    assert json.loads((folder / 'config.json').read_text())['label_names'] == ['1', '2', '10', '20']
    config = json.loads((folder / 'config.json').read_text())
    config['label_names'] = dict(enumerate(config['label_names']))
    (folder / 'config.json').write_text(json.dumps(config))
    prepare_folder(folder, tmp_path / 'c.pth')
    assert json.loads((folder / 'config.json').read_text())['label_names'] == ['1', '2', '10', '20']
    shutil.copytree(folder, tmp_path / 'again' / NAME)
    (tmp_path / 'other.yaml').write_text((folder / 'train.yaml').read_text() + '# of other images\n')
    prepare_folder(tmp_path / 'again' / NAME, tmp_path / 'c.pth', recipe=tmp_path / 'other.yaml')
    assert 'label_names' not in json.loads((tmp_path / 'again' / NAME / 'config.json').read_text())
    (tmp_path / 'again' / NAME / 'config.json').write_text('{')
    prepare_folder(tmp_path / 'again' / NAME, tmp_path / 'c.pth')
    verify_folder(tmp_path / 'again' / NAME)
    write_folded(folder, tmp_path)
    folded = json.loads((tmp_path / f'{NAME}_folded' / 'config.json').read_text())
    assert folded['label_names'] == ['1', '2', '10', '20']
    metrics = json.loads((tmp_path / f'{NAME}_folded' / 'metrics.json').read_text())
    assert list(metrics['cost']['forms']) == ['folded']
    assert f'with the weights of {NAME}, which computes the same' in (
        tmp_path / f'{NAME}_folded' / 'README.md').read_text()


def test_folded_again(tmp_path, folder, checkpoint, images):
    """Nothing that was made from other weights is left in the folder of the folded form."""
    prepare_folder(folder, checkpoint[2], data_dir=str(images), split='validation')
    (tmp_path / 'out').mkdir()
    target = write_folded(folder, tmp_path / 'out')
    assert (target / 'train.yaml').is_file()
    old = {path.name for path in target.iterdir()}
    write_int8(target, 'onnxruntime')
    for name in 'predictions.csv', 'report.json', 'accuracy.png':
        (target / name).write_text('of other weights')
    write_folded(folder, tmp_path / 'out')
    assert {path.name for path in target.iterdir()} == old
    verify_folder(target)


def test_the_report_of_earlier_weights(folder, checkpoint):
    """Of a conversion, whose accuracies are not those of the model that is trained further."""
    def figures(top1, rate):
        return {'top1': top1, 'agreement': 97.5, 'params': 4e6, 'gmacs': .25, 'images_per_second': {8: rate}}

    report = AccelerationReport(
        {'original': figures(78.25, 64.), 'converted': figures(77.5, 96.)}, {}, 'timm-rep accelerate m --macs 0.9',
        'a CPU', {'torch': '2.5.0'})
    report.to_json(folder / 'report.json')
    (folder / 'accuracy.png').write_text('of a conversion')
    prepare_folder(folder, checkpoint[2])
    assert not {'report.json', 'accuracy.png'} & {path.name for path in folder.iterdir()}
    assert 'report.json' not in (folder / 'README.md').read_text()
    report.to_json(folder / 'report.json')
    (folder / 'accuracy.png').write_text('of these weights')
    prepare_folder(folder)
    assert {'report.json', 'accuracy.png'} <= verify_folder(folder).hashes.keys()
    section = (folder / 'README.md').read_text().split('## Conversion')[1].split('##')[0]
    assert figures_table(report.figures) in section
    assert 'a CPU' in section
    assert 'torch 2.5.0' in section
    assert '\ntimm-rep accelerate m --macs 0.9\n' in section
    (folder / 'report.json').write_text('damaged')
    with pytest.raises(RuntimeError, match=r'report\.json'):
        prepare_folder(folder)


def test_saved_by_transformers(folder, checkpoint):
    """Their save_pretrained() keeps the hashes of the files that it read; those that card writes are of its own."""
    prepare_folder(folder, checkpoint[2])
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**config, 'transformers_version': '5.0.0'}))
    (folder / 'README.md').write_text('theirs')
    prepare_folder(folder)
    assert verify_folder(folder).hashes['README.md'] == sha256(folder / 'README.md')


def test_classes_in_another_order(folder, checkpoint):
    """train.py numbers the classes by class_map, the accuracy and the names are by folder."""
    before = (folder / 'train.yaml').read_text()
    (folder / 'train.yaml').write_text(before + 'class_map: classes.txt\n')
    with pytest.raises(ValueError, match=r'train\.yaml.*class_map'):
        prepare_folder(folder, checkpoint[2])
    assert [path.name for path in folder.iterdir()] == ['train.yaml']


@pytest.mark.parametrize('word', ['init', False, None])
def test_words_for_scales(tmp_path, word):
    folder = tmp_path / 'repopt_vgg_a0.mine'
    folder.mkdir()
    name, args = REPOPT
    args = {k: list(v) if isinstance(v, tuple) else v for k, v in args.items()}
    given = {} if word is None else {'scales': word}
    recipe = dict(model=name, model_kwargs={**args, **given}, img_size=64, num_classes=5)
    (folder / 'train.yaml').write_text(yaml.safe_dump(recipe))
    torch.save({'state_dict': trained(name, args, scales=False).state_dict()}, tmp_path / 'c.pth')
    (folder / 'scales.safetensors').write_bytes(b'of before')
    prepare_folder(folder, tmp_path / 'c.pth')
    assert tuple(load_folder(folder).pretrained_cfg['input_size']) == (3, 64, 64)
    if word is False:
        assert not (folder / 'scales.safetensors').exists()
        assert load_folder(folder).stem.conv[0].grad_mult is None
    else:
        expected = Scales.initial(timm.create_model(name, **args))
        assert Scales.load(folder / 'scales.safetensors') == expected


def test_what_cannot_be_published(folder, checkpoint, tmp_path):
    """Subfolders, and links out of the folder, are refused when the folder is written, not when it is pushed."""
    prepare_folder(folder, checkpoint[2])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    (tmp_path / 'secret').write_text('x')
    for create in (
            lambda path: path.mkdir(), lambda path: path.symlink_to(tmp_path / 'secret'),
            lambda path: path.symlink_to(folder / 'nowhere')):
        create(folder / 'stray')
        with pytest.raises(ValueError, match=r"published folder .*stray'"):
            prepare_folder(folder)
        with pytest.raises(ValueError, match=r"published folder .*stray'"):
            verify_folder(folder)
        if (folder / 'stray').is_symlink():
            (folder / 'stray').unlink()
        else:
            (folder / 'stray').rmdir()
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    (folder / 'alias.md').symlink_to('README.md')
    prepare_folder(folder)
    assert 'alias.md' in verify_folder(folder).hashes


def test_files_of_other_programs_are_ignored(folder, checkpoint):
    (folder / '.DS_Store').write_bytes(b'x')
    (folder / '.cache').mkdir()
    (folder / '.cache' / 'h').write_bytes(b'x')
    prepare_folder(folder, checkpoint[2])
    assert not any('.DS' in name or 'cache' in name for name in verify_folder(folder).hashes)


def test_a_recipe_belongs_to_the_checkpoint(folder, checkpoint, tmp_path):
    """The recipe is checked and in the folder of the checkpoint; without a checkpoint it is refused, as is use_ema."""
    prepare_folder(folder, checkpoint[2])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    (tmp_path / 'elsewhere').mkdir()
    shutil.copyfile(folder / 'train.yaml', tmp_path / 'elsewhere' / 'r.yaml')
    (tmp_path / 'link.yaml').symlink_to(tmp_path / 'elsewhere' / 'r.yaml')
    for kwargs, name in [
            (dict(recipe=tmp_path / 'missing.yaml'), 'recipe'), (dict(use_ema=True), 'use_ema'),
            (dict(checkpoint=checkpoint[2], recipe=tmp_path / 'elsewhere' / 'r.yaml'), 'folder of the checkpoint'),
            (dict(checkpoint=checkpoint[2], recipe=tmp_path / 'link.yaml'), 'folder of the checkpoint')]:
        with pytest.raises(ValueError, match=name):
            prepare_folder(folder, **kwargs)
    with pytest.raises(FileNotFoundError, match=r'missing\.yaml'):
        prepare_folder(folder, checkpoint[2], tmp_path / 'missing.yaml')
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_speedups_of_slow_models():
    """Of the throughputs, not of their rounded form."""
    figures = {
        name: dict(top1=50., agreement=100., params=10, gmacs=.1, images_per_second={'1': rate, '8': 12350.})
        for name, rate in (('original', .4491), ('converted', .5512))}
    last = figures_table(figures).splitlines()[-1]
    assert '| 0.5512 (1.23x) | 12350 (1.00x) |' in last
