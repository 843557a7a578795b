"""``timm-rep accelerate``: a pretrained model in, a folder with a faster one out."""
import copy
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
from PIL import Image
from timm.models import save_for_hf
from torch.multiprocessing import ProcessExitedException, start_processes

import timm_rep
from tests.helpers import ROOT, in_processes, needs_recorded_args, relative, same_weights, torchrun
from timm_rep.accelerate import STATE, _check_folded, accelerate, check_output, measure, write_model
from timm_rep.cli import main
from timm_rep.deploy import quantized_files
from timm_rep.hub import save_folder
from timm_rep.utils.atomic import locking_folder
from timm_rep.utils.data import Images
from timm_rep.utils.training import distil

VIT = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=3)
KWARGS = [f'{k}={v}' for k, v in VIT.items()]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp('data')
    g = torch.Generator().manual_seed(0)
    for split, n in (('train', 24), ('val', 6)):
        for c in range(3):
            (root / split / str(c)).mkdir(parents=True)
            for i in range(n):
                pixels = torch.randint(0, 256, (32, 32, 3), generator=g, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(root / split / str(c) / f'{i}.png')
    torch.manual_seed(0)
    torch.save(timm.create_model('vit_tiny_patch16_224', **VIT).state_dict(), root / 'model.pth')
    return root


def command(data, output, *more):
    return [
        'accelerate', 'vit_tiny_patch16_224', '--model-kwargs', *KWARGS, '--checkpoint', str(data / 'model.pth'),
        '--data-dir', str(data), '-o', str(output), '--device', 'cpu', *more]


def original(data):
    model = timm.create_model('vit_tiny_patch16_224', **VIT).eval()
    model._model_args = dict(VIT)  # timm records them since 1.0.31
    model.load_state_dict(torch.load(data / 'model.pth', weights_only=True))
    return model


@torch.no_grad()
def test_a_folder_to_load(data, tmp_path, capsys):
    output = tmp_path / 'fast'
    assert main(command(data, output, '--idle-ratio', '0.6', '--sweep', '--mean', '.4', '.5', '.6')) == 0
    out = capsys.readouterr().out
    assert f'Written: {output}' in out
    assert {p.name for p in output.iterdir()} == {
        'model.safetensors', 'config.json', 'report.json', 'README.md', 'accuracy.png'}
    model = timm.create_model(f'local-dir:{output}', pretrained=True).eval()
    assert model.pretrained_cfg['architecture'] == 'repa_any'
    assert model.pretrained_cfg['mean'] == (.4, .5, .6)
    assert model.pretrained_cfg['input_size'] == (3, 32, 32)
    assert json.loads((output / 'config.json').read_text())['label_names'] == ['0', '1', '2']
    # the same model as by converting it by hand
    expected, images = original(data), Images(original(data), str(data), mean=(.4, .5, .6))
    report = timm_rep.convert_to_repa(expected, idle_ratio=.6, calibration=images.calibration(512))
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert relative(model(x), expected(x)) < 1e-6
    figures = json.loads((output / 'report.json').read_text())
    assert figures['conversion'] == json.loads(json.dumps(report.as_dict()))
    figures = figures['figures']
    assert list(figures) == ['original', 'converted', *(f'idle ratio {r}' for r in (.25, .5, .75, .9, 1))]
    # accuracy and agreement, counted here
    logits = {
        name: torch.cat([m(x) for x, _ in images.validation()]) for name, m in (
            ('original', original(data)), ('converted', expected))}
    targets = torch.cat([y for _, y in images.validation()])
    for name, z in logits.items():
        top1 = (z.argmax(1) == targets).double().mean().item() * 100
        agreement = (z.argmax(1) == logits['original'].argmax(1)).double().mean().item() * 100
        assert figures[name]['top1'] == pytest.approx(top1, abs=.01)
        assert figures[name]['agreement'] == pytest.approx(agreement, abs=.01)
        assert all(rate > 0 for rate in figures[name]['images_per_second'].values())
    sizes = [figures[f'idle ratio {r}']['params'] for r in (.25, .5, .75, .9, 1)]
    assert sizes == sorted(sizes, reverse=True)
    card = (output / 'README.md').read_text()
    assert '| converted |' in card
    assert str(report) in card
    recorded = shlex.join([
        'timm-rep', *command(data, output, '--idle-ratio', '0.6', '--sweep', '--mean', '.4', '.5', '.6')])
    assert recorded in card
    assert json.loads((output / 'report.json').read_text())['command'] == recorded


def test_the_original_stays_as_it_is(data):
    model = original(data).train()
    accelerate(model, Images(model, str(data)), calibration_images=16)
    with pytest.raises(ValueError, match='idle_ratio or macs'):
        accelerate(model, Images(model, str(data)), idle_ratio=.5, macs=.7)
    assert all(m.training for m in model.modules())
    assert same_weights(model, original(data))


@pytest.mark.parametrize('kwargs, conversions', [({}, 2), (dict(idle_ratio=.5), 2), (dict(macs=.8), 3)])
def test_a_sweep_converts_each_idle_ratio_once(data, monkeypatch, kwargs, conversions):
    seen = []

    def convert(*args, **kw):
        seen.append(kw)
        return timm_rep.convert_to_repa(*args, **kw)

    monkeypatch.setattr('timm_rep.accelerate.convert_to_repa', convert)
    model = original(data)
    figures = accelerate(
        model, Images(model, str(data)), calibration_images=24, sweep=[.5, .75], **kwargs).figures
    assert len(seen) == conversions
    own = f'idle ratio {kwargs.get("idle_ratio", .75)}'
    same = all(figures[own][key] == figures['converted'][key] for key in ('top1', 'agreement', 'params', 'gmacs'))
    assert same == ('macs' not in kwargs)
    assert (figures[own] == figures['converted']) == same  # measured once
    assert list(figures) == ['original', 'converted', 'idle ratio 0.5', 'idle ratio 0.75']


def test_distillation_comes_closer_and_resumes(data, tmp_path):
    """Interrupted after an epoch and resumed, it ends with the same weights as in one go."""
    teacher = original(data)
    images = Images(teacher, str(data), batch_size=24)
    converted = original(data)
    timm_rep.convert_to_repa(converted, idle_ratio=1., calibration=images.calibration(64))
    with torch.no_grad():  # an untrained model is hardly changed by the conversion
        converted.head.weight += torch.randn(3, 24, generator=torch.Generator().manual_seed(0))

    def start():
        return copy.deepcopy(converted)

    def divergence(model):
        with torch.no_grad():
            x = torch.cat([x for x, _ in images.calibration(64)])
            target = teacher(x).log_softmax(1)
            return torch.nn.functional.kl_div(model(x).log_softmax(1), target, log_target=True, reduction='batchmean')

    whole = start()
    before = divergence(whole)
    distil(whole, teacher, images, epochs=3, lr=1e-3)
    assert divergence(whole) < .5 * before

    class Killed(Exception):
        pass

    state, interrupted = tmp_path / STATE, start()
    loader = images.training
    epochs = []

    def killed():
        def batches():
            if epochs:
                raise Killed
            epochs.append(0)
            yield from found
        found = loader()

        class Loader(list):
            def __iter__(self):
                return batches()
        return Loader([None] * len(found))

    images.training = killed
    with pytest.raises(Killed):
        distil(interrupted, teacher, images, epochs=3, lr=1e-3, checkpoint=state)
    images.training = loader
    resumed = start()
    distil(resumed, teacher, images, epochs=3, lr=1e-3, checkpoint=state, resume=True)
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name

    def resume(student=None, teacher=teacher, images=images, lr=1e-3):
        distil(student or start(), teacher, images, epochs=3, lr=lr, checkpoint=state, resume=True)

    other_weights = original(data)
    torch.nn.init.constant_(other_weights.head.bias, 1.)
    wider = original(data)
    timm_rep.convert_to_repa(wider, idle_ratio=.5, calibration=images.calibration(64))
    other = tmp_path / 'other'
    shutil.copytree(data, other)
    renamed = next(path for path in sorted((other / 'train').rglob('*')) if path.is_file())
    renamed.rename(renamed.with_stem('renamed'))
    for kwargs, message in (
            (dict(images=Images(teacher, str(other), batch_size=24)), r"images is 'sha256:\w{12}' there and 'sha256"),
            (dict(lr=.1), r'lr is 0\.001 there and 0\.1 here\. Resume with the settings there, or delete'),
            (dict(teacher=other_weights), r"teacher is 'sha256:\w{12}' there and 'sha256:\w{12}' here\."),
            (dict(student=wider), r"student is 'sha256:\w{12}' there and 'sha256:\w{12}' here\."),
            (dict(images=Images(teacher, str(data), batch_size=24, mean=(.4, .5, .6))),
             r'mean is \(0\.5, 0\.5, 0\.5\) there and \(0\.4, 0\.5, 0\.6\) here\.'),
            (dict(images=Images(teacher, str(data), batch_size=23)), 'batch_size is 24 there and 23 here')):
        with pytest.raises(ValueError, match=f'of another one: {message}'):
            resume(**kwargs)
    # images without a config, as in the experiments
    resume(images=SimpleNamespace(device=images.device, seed=images.seed, training=images.training))


def test_an_interrupted_distillation_survives_a_plain_run(data, tmp_path):
    (tmp_path / STATE).write_text('')
    assert main(command(data, tmp_path, '--images', '64')) == 0
    assert (tmp_path / 'model.safetensors').exists()
    assert (tmp_path / STATE).exists()


def test_calibration_images_are_drawn_by_the_seed(data):
    model = original(data)

    def drawn(seed):
        return [torch.cat(x) for x in zip(*Images(model, str(data), seed=seed, batch_size=8).calibration(12))]

    images, targets = drawn(0)
    assert len(images.flatten(1).unique(dim=0)) == 12
    assert len(targets.unique()) == 3  # of all classes, though the folders are in order
    assert torch.equal(drawn(0)[0], images)
    assert not torch.equal(drawn(1)[0], images)


@torch.no_grad()
def test_agreement_is_counted(data):
    models = {'first': original(data), 'other': original(data)}
    images = Images(models['first'], str(data))
    for seed, model in enumerate(models.values()):
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(seed))
        model.head.bias -= torch.cat([model(x) for x, _ in images.validation()]).mean(0)  # so that no class prevails
    first, other = (torch.cat([m(x).argmax(1) for x, _ in images.validation()]) for m in models.values())
    expected = (first == other).double().mean().item() * 100
    figures = measure(models, images, batch_sizes=())
    assert 0 < expected < 100
    assert figures['first']['agreement'] == 100
    assert figures['other']['agreement'] == pytest.approx(expected, abs=.01)


def test_the_machine_is_recorded(data, tmp_path, monkeypatch):
    monkeypatch.setattr('timm_rep.accelerate.device_name', lambda device: 'a machine')
    assert main(command(data, tmp_path / 'fast')) == 0
    assert json.loads((tmp_path / 'fast' / 'report.json').read_text())['machine'] == 'a machine'


def test_kept_ffns_and_budgets(data, tmp_path):
    output = tmp_path / 'fast'
    output.mkdir()
    stale = 'accuracy.png', 'model.onnx', 'model.pt2'  # of an earlier sweep, and its int8 form
    for name in (*stale, 'report.json', 'mine'):
        (output / name).write_bytes(b'')
    shutil.copy(ROOT / 'hub' / 'repopt_vgg_a0.cifar10' / 'quantization.json', output)
    assert main(command(data, output, '--macs', '0.8', '--distil-epochs', '1')) == 0
    names = {path.name for path in output.iterdir()}
    assert names >= {'mine', 'model.safetensors'}
    assert not names & {*stale, 'quantization.json'}
    report = json.loads((output / 'report.json').read_text())
    before, after = report['conversion']['macs']
    assert after <= .8 * before
    assert list(report['figures']) == ['original', 'converted', 'distilled']
    assert not (output / STATE).exists()
    args = json.loads((output / 'config.json').read_text())['model_args']
    assert args['base'] == 'vit_tiny_patch16_224'
    assert timm.create_model(f'local-dir:{output}', pretrained=True).num_classes == 3


@torch.no_grad()
def test_layers_that_timm_folds(data, tmp_path):
    """The written model is folded as a whole."""
    args = dict(embed_dim=(16, 24), depth=(1, 1), num_classes=3)
    torch.manual_seed(0)
    torch.save(timm.create_model('repvit_m0_9', **args).state_dict(), tmp_path / 'r.pth')
    assert main([
        'accelerate', 'repvit_m0_9', '--model-kwargs', *(f'{k}={v}' for k, v in args.items()), '--img-size', '32',
        '--checkpoint', str(tmp_path / 'r.pth'), '--data-dir', str(data), '-o', str(tmp_path / 'out')]) == 0
    model = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True).eval()
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in model.stem.modules())
    expected = timm.create_model('repvit_m0_9', **args).eval()
    expected.load_state_dict(torch.load(tmp_path / 'r.pth', weights_only=True))
    images = Images(expected, str(data), img_size=32)
    timm_rep.convert_to_repa(expected, calibration=images.calibration(512))
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert relative(model(x), expected(x)) < 1e-5


def test_channels_last(data, tmp_path):
    torch.manual_seed(0)
    args = dict(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=3)
    model = timm.create_model('convnext_atto', **args).eval().to(memory_format=torch.channels_last)
    model._model_args = args  # timm records them since 1.0.31
    model.pretrained_cfg['label_names'] = ['a', 'b', 'c']
    result = accelerate(model, Images(model, str(data), img_size=32), calibration_images=24)
    assert result.model.pretrained_cfg['label_names'] == ['a', 'b', 'c']  # not the names of the folders
    model.pretrained_cfg['label_names'] = ['a'] * 1000  # of weights with other classes
    named = accelerate(model, Images(model, str(data), img_size=32), calibration_images=24).model
    assert named.pretrained_cfg['label_names'] == ['0', '1', '2']
    strides = [x.stride() for x in result.model.state_dict().values()]
    assert any(not x.is_contiguous() for x in result.model.state_dict().values())
    write_model(tmp_path / 'out', result)
    assert [x.stride() for x in result.model.state_dict().values()] == strides
    assert same_weights(timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True), result.model)


def test_a_model_of_one_channel(data, tmp_path):
    args = dict(VIT, in_chans=1)
    torch.save(timm.create_model('vit_tiny_patch16_224', **args).state_dict(), tmp_path / 'grey.pth')
    assert main(command(
        data, tmp_path / 'out', '--checkpoint', str(tmp_path / 'grey.pth'), '--img-size', '32', '--mean', '.3',
        '--model-kwargs', *(f'{k}={v}' for k, v in args.items()))) == 0
    model = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True)
    cfg = model.pretrained_cfg
    assert (tuple(cfg['input_size']), tuple(cfg['mean']), len(cfg['std'])) == ((1, 32, 32), (.3,), 1)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 3)


def test_training_images_need_no_labels(data, tmp_path):
    """The same images without folders of classes give the same model, also distilled."""
    (tmp_path / 'data' / 'train').mkdir(parents=True)
    (tmp_path / 'data' / 'val').symlink_to(data / 'val')
    for c in '012':
        for path in (data / 'train' / c).iterdir():
            (tmp_path / 'data' / 'train' / f'{c}-{path.name}').write_bytes(path.read_bytes())
    models = []
    for root, name in ((data, 'a'), (tmp_path / 'data', 'b')):
        assert main(command(data, tmp_path / name, '--data-dir', str(root), '--distil-epochs', '1')) == 0
        models.append(timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True).eval())
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative(*(model(x) for model in models)) < .1


@pytest.mark.parametrize('change,message', [
    (['--data-dir', '{tmp}'], 'Found 0 images in subfolders of'),
    (['--train-split', 'test'], "no folder for the split 'test'"),
    (['--val-split', 'test'], "no folder for the split 'test'"),
    (['--val-split', 'two'], "has 2 classes in 'two'"),
    (['--val-split', 'flat'], "has no folders of classes in 'flat'"),
    (['--train-split', 'empty'], 'Found 0 images in subfolders of'),
    (['--checkpoint', '{tmp}/none.pth'], 'none.pth'),
    (['--images', '3'], 'images for blocks.'),
    (['--img-size', '48'], 'img_size must be that of the model, 32 x 32, got 48: create it with img_size=48.'),
    (['--resume'], '--distil-epochs'),
    (['--lr', '.01'], '--distil-epochs must be given with --lr'),
    (['--mean', '.1', '.2'], 'mean must have 1 or 3 values'),
])
def test_refused_before_anything_is_written(data, tmp_path, capsys, change, message):
    for c in '01':
        (data / 'two' / c).mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (32, 32)).save(data / 'two' / c / 'a.png')
    (data / 'flat').mkdir(exist_ok=True)
    Image.new('RGB', (32, 32)).save(data / 'flat' / 'a.png')
    (data / 'empty').mkdir(exist_ok=True)
    assert main([*command(data, tmp_path / 'out'), *(c.format(tmp=tmp_path) for c in change)]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count('\n') == 1
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('kind', ['model', 'README.md'])
def test_files_of_others_stay(data, tmp_path, capsys, kind):
    """Above all the model itself, where the result is to be written to its folder."""
    folder, more = tmp_path / 'out', []
    folder.mkdir()
    if kind == 'model':
        save_for_hf(original(data), str(folder), model_args=VIT, safe_serialization=True)
        more = ['--checkpoint', str(folder / 'model.safetensors')]
    else:
        (folder / kind).write_text('mine')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(command(data, folder, *more)) == 1
    captured = capsys.readouterr()
    assert 'of another model: choose a new folder.' in captured.err
    assert captured.err.count('\n') == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_sweep_needs_matplotlib_before_the_model(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    monkeypatch.setattr('timm_rep.cli.accelerate.create_model', lambda *args, **kwargs: pytest.fail('too late'))
    assert main(command(data, tmp_path / 'out', '--sweep')) == 1
    assert capsys.readouterr().err == (
        "timm-rep: accelerate --sweep requires matplotlib: pip install matplotlib.\n")


@needs_recorded_args
def test_moving_average(data, tmp_path, capsys):
    """--use-ema takes it, also of `export`; without the option, one line says that it is there."""
    models = [original(data) for _ in range(2)]
    with torch.no_grad():
        models[1].head.bias += torch.tensor([0., 0., 100.])
    states = dict(zip(('state_dict', 'state_dict_ema'), (model.state_dict() for model in models)))
    torch.save(states, tmp_path / 'both.pth')
    export = ['export', 'vit_tiny_patch16_224', '--model-kwargs', *KWARGS, '-o']
    for i, option in enumerate(([], ['--use-ema'])):
        given = ['--checkpoint', str(tmp_path / 'both.pth'), *option]
        out = tmp_path / f'out{i}'
        assert main([*command(data, out, '--images', '16'), *given]) == 0
        assert ('--use-ema' in capsys.readouterr().out) == (not option)
        assert main([*export, str(tmp_path / f'e{i}'), *given]) == 0
        assert ('--use-ema' in capsys.readouterr().out) == (not option)
        for folder in out, tmp_path / f'e{i}':
            found = timm.create_model(f'local-dir:{folder}', pretrained=True).head.bias
            assert (found.max() > 50) == bool(option)
    assert main([*export, str(tmp_path / 'e'), '--use-ema']) == 1
    assert '--checkpoint must be given' in capsys.readouterr().err
    assert main([*export, str(tmp_path / 'e'), '--use-ema', '--checkpoint', str(data / 'model.pth')]) == 1
    assert 'model.pth' in capsys.readouterr().err


@needs_recorded_args
def test_names_of_the_classes_are_those_of_the_checkpoint(data, tmp_path):
    """Not those of the folder that the architecture comes from, which has as many."""
    model = original(data)
    model.pretrained_cfg['label_names'] = ['cat', 'dog', 'emu']
    folder = tmp_path / 'vit'
    timm_rep.export(model, folder)
    given = ['--checkpoint', str(data / 'model.pth')]
    argv = command(data, tmp_path / 'out', '--images', '16')
    argv = [x for x in argv if x != '--model-kwargs' and x not in KWARGS]
    argv[argv.index('vit_tiny_patch16_224')] = f'local-dir:{folder}'
    assert main([*argv, *given]) == 0
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert config['label_names'] == sorted(path.name for path in (data / 'val').iterdir())
    assert main(['export', f'local-dir:{folder}', '-o', str(tmp_path / 'e'), *given]) == 0
    assert 'label_names' not in json.loads((tmp_path / 'e' / 'config.json').read_text())


def test_settings_for_validation(data, tmp_path):
    """The folder has those that everything was measured with, not other ones of the source for its validation."""
    model = original(data)
    model.pretrained_cfg = {**model.pretrained_cfg, 'test_input_size': (3, 64, 64), 'test_crop_pct': 1., 'crop_pct': .9}
    result = accelerate(model, Images(model, str(data), interpolation='bilinear'), calibration_images=16)
    write_model(tmp_path / 'out', result)
    cfg = json.loads((tmp_path / 'out' / 'config.json').read_text())['pretrained_cfg']
    assert {'test_input_size', 'test_crop_pct'}.isdisjoint(cfg)
    assert (cfg['input_size'], cfg['crop_pct'], cfg['interpolation']) == ([3, 32, 32], .9, 'bilinear')


def test_a_damaged_report_of_int8_is_found_before_any_work(data, tmp_path, capsys, monkeypatch):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'quantization.json').write_text('{"backend": "new"}')
    monkeypatch.setattr('timm_rep.cli.accelerate.create_model', lambda *args, **kwargs: pytest.fail('too late'))
    assert main(command(data, tmp_path / 'out')) == 1
    assert 'quantization.json' in capsys.readouterr().err


@needs_recorded_args
def test_a_random_classifier_is_noted(data, tmp_path, capsys):
    save_folder(original(data), tmp_path / 'model')
    assert main([
        'accelerate', f'local-dir:{tmp_path / "model"}', '--data-dir', str(data), '-o', str(tmp_path / 'out'),
        '--images', '16']) == 0
    assert 'The classifier is random' not in capsys.readouterr().out
    for split in 'train', 'val':
        for c in '01':
            shutil.copytree(data / split / c, tmp_path / 'two' / split / c)
    assert main([
        'accelerate', f'local-dir:{tmp_path / "model"}', '--data-dir', str(tmp_path / 'two'), '-o',
        str(tmp_path / 'out'), '--images', '16', '--model-kwargs', 'num_classes=2']) == 0
    assert 'The classifier is random' in capsys.readouterr().out


@pytest.mark.slow  # torch waits five seconds for the worker when it collects the loader
def test_a_damaged_image_in_a_worker_is_one_line(data, tmp_path, capsys):
    path = tmp_path / 'damaged' / 'a.png'
    path.parent.mkdir()
    path.write_text('no image')
    assert main(command(data, tmp_path / 'out', '--train-split', str(path.parent), '--workers', '1')) == 1
    error = capsys.readouterr().err
    assert error.startswith('timm-rep: ValueError: ')
    assert f"'{path}' failed: UnidentifiedImageError: " in error
    assert error.count('\n') == 1


def test_other_wrong_calls(data, tmp_path, capsys):
    out = tmp_path / 'out'
    out.mkdir()
    (out / STATE).write_text('')
    assert main(command(data, out, '--distil-epochs', '1')) == 1
    assert '--resume continues it' in capsys.readouterr().err
    for more in (
            ['--idle-ratio', '1.5'], ['--macs', 'x'], ['--idle-ratio', '.5', '--macs', '.5'], ['--seed', '-1'],
            ['--distil-epochs', '-1'], ['--interpolation', 'foo'], ['--crop-pct', '0']):
        with pytest.raises(SystemExit):
            main(command(data, out, *more))


@pytest.mark.parametrize('begun', [False, True])
def test_an_interruption_names_resume_if_there_is_a_state(data, tmp_path, capsys, monkeypatch, begun):
    def interrupt(*args, checkpoint, **kwargs):
        if begun:
            checkpoint.write_text('')
        raise KeyboardInterrupt

    monkeypatch.setattr('timm_rep.cli.accelerate.accelerate', interrupt)
    assert main(command(data, tmp_path / 'out', '--distil-epochs', '1')) == 130
    assert ('--resume' in capsys.readouterr().err) == begun


def test_a_model_without_ffns(data, tmp_path, capsys):
    torch.save(timm.create_model('resnet18', num_classes=3).state_dict(), tmp_path / 'r.pth')
    assert main([
        'accelerate', 'resnet18', '--model-kwargs', 'num_classes=3', '--checkpoint', str(tmp_path / 'r.pth'),
        '--data-dir', str(data), '-o', str(tmp_path / 'out')]) == 1
    assert 'Expected a pointwise FFN, but ResNet has none' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_models_whose_architecture_is_unknown(data):
    model = original(data)
    images = Images(model, str(data))
    del model._model_args  # before timm 1.0.31
    with pytest.raises(ValueError, match='VisionTransformer must be built by'):
        accelerate(model, images, calibration_images=16)
    assert not hasattr(model, '_model_args')
    model.pretrained_cfg['architecture'] = 'my_vit'
    with pytest.raises(ValueError, match='VisionTransformer'):
        accelerate(model, images, calibration_images=16)


def test_converted_models_are_refused(data):
    model = original(data)
    images = Images(model, str(data))
    timm_rep.convert_to_repa(model)
    with pytest.raises(ValueError, match='has foldable layers already'):
        accelerate(model, images, calibration_images=16)


def test_models_frozen_for_inference_are_distilled(data):
    model = original(data).requires_grad_(False)
    images = Images(model, str(data), batch_size=24)
    result = accelerate(model, images, calibration_images=64, distil_epochs=1)
    assert list(result.figures) == ['original', 'converted', 'distilled']
    assert not any(p.requires_grad for p in model.parameters())


def _non_json(model):
    model._model_args['act_layer'] = torch.nn.ReLU


def _replaced_head(model):
    model.head = torch.nn.Sequential(model.head)


def _shared_ffn(model):
    model.blocks[1].mlp = model.blocks[0].mlp


def _tied_ffns(model):
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight


def _activated_head(model):
    model.head.register_forward_hook(lambda module, args, output: output.relu())


@pytest.mark.parametrize('change, message', [
    (_non_json, 'act_layer'), (_replaced_head, r'head\.0\.weight'), (_activated_head, 'VisionTransformer'),
    (_shared_ffn, r'blocks\.1\.mlp'), (_tied_ffns, r'blocks\.1\.mlp\.fc1\.weight'),
])
def test_models_that_cannot_be_saved_are_refused_before_the_work(data, monkeypatch, change, message):
    model = original(data)
    images = Images(model, str(data))
    change(model)
    monkeypatch.setattr(images, 'calibration', lambda *args: pytest.fail('too late'))
    with pytest.raises(ValueError, match=message):
        accelerate(model, images)


@pytest.mark.parametrize('count', [0, -3, 2.5, True])
def test_wrong_numbers_of_calibration_images_are_refused_before_the_work(data, monkeypatch, count):
    model = original(data)
    images = Images(model, str(data))
    monkeypatch.setattr(images, 'calibration', lambda *args: pytest.fail('too late'))
    with pytest.raises(ValueError, match=f'calibration_images must be an integer >= 1, got {count}'):
        accelerate(model, images, calibration_images=count)


@torch.no_grad()
def test_tied_parameters(data, tmp_path):
    """Tied parameters are written twice."""
    model = original(data)
    model.blocks[1].attn.proj.weight = model.blocks[0].attn.proj.weight
    result = accelerate(model, Images(model, str(data)), calibration_images=24)
    write_model(tmp_path / 'out', result)
    x, found = torch.randn(2, 3, 32, 32), timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True).eval()
    assert relative(found(x), result.model(x)) < 1e-5


@pytest.mark.parametrize('kwargs, name', [
    (dict(distil_epochs=-1), 'epochs'), (dict(distil_epochs='1'), 'epochs'), (dict(lr=float('inf')), 'lr'),
    (dict(lr=0), 'lr'), (dict(resume=True), 'checkpoint'), (dict(idle_ratio=.5, macs=.7), 'macs'),
    (dict(sweep=[.1234567, .1234568]), 'sweep'), (dict(sweep=[2]), 'sweep'),
    (dict(macs=1.), 'macs'), (dict(macs=0.), 'macs'), (dict(idle_ratio=2.), 'idle_ratio'),
], ids=str)
def test_wrong_settings_are_refused_before_the_work(data, monkeypatch, kwargs, name):
    model = original(data)
    images = Images(model, str(data))
    monkeypatch.setattr(images, 'calibration', lambda *args: pytest.fail('too late'))
    with pytest.raises(ValueError, match=name):
        accelerate(model, images, **kwargs)


@pytest.mark.parametrize('change', ['no model', 'no optimizer', 'no epoch', 'optimizer', 'epoch', 'not a dict'])
def test_damaged_states(data, tmp_path, change):
    teacher = original(data)
    images, state = Images(teacher, str(data), batch_size=24), tmp_path / STATE
    student = original(data)
    distil(student, teacher, images, epochs=1, lr=1e-4, checkpoint=state)
    content = torch.load(state, weights_only=True)
    if change.startswith('no '):
        content.pop(change[3:])
    elif change == 'optimizer':
        content['optimizer'] = {}
    elif change == 'epoch':
        content['epoch'] = 99
    else:
        content = 3
    torch.save(content, state)
    with pytest.raises(ValueError, match=STATE):
        distil(original(data), teacher, images, epochs=1, lr=1e-4, checkpoint=state, resume=True)


def test_no_epochs(data, tmp_path):
    teacher, student = original(data), original(data).train()
    distil(student, teacher, Images(teacher, str(data)), epochs=0, lr=1e-4, checkpoint=tmp_path / STATE)
    assert same_weights(student, teacher)
    assert not student.training
    assert not (tmp_path / STATE).exists()


def test_resuming_with_other_calibration_images(data, tmp_path, monkeypatch):
    model = original(data)
    images, state = Images(model, str(data), batch_size=24), str(tmp_path / STATE)
    run = dict(distil_epochs=1, lr=1e-4, checkpoint=state, resume=True)
    accelerate(model, images, calibration_images=24, **run)
    with pytest.raises(ValueError, match='calibration_images is 24 there and 32 here'):
        accelerate(model, images, calibration_images=32, **run)
    result = accelerate(model, images, calibration_images=24, **run)  # nothing is left to train
    assert 'distilled' in result.figures


def test_a_diverged_distillation_is_named(data, monkeypatch):
    def diverge(model, *args, **kwargs):
        with torch.no_grad():
            model.head.weight.fill_(float('nan'))

    monkeypatch.setattr('timm_rep.accelerate.distil', diverge)
    model = original(data)
    with pytest.raises(RuntimeError, match='lr'):
        accelerate(model, Images(model, str(data)), calibration_images=24, distil_epochs=1)


def test_a_folded_model_with_outputs_that_are_not_finite(data):
    model, broken = original(data), original(data)
    broken.head.bias.data.fill_(float('nan'))
    with pytest.raises(RuntimeError, match='Folding'):
        _check_folded(model, broken, [torch.zeros(2, 3, 32, 32)])


class Rounding(torch.nn.Module):
    """Rounds its outputs, as a GPU does by TF32, unless it is moved to the CPU."""

    def cpu(self):
        self.on_cpu = True
        return super().cpu()

    def forward(self, x):
        y = x.mean((2, 3))
        return y if hasattr(self, 'on_cpu') else (256 * y).round() / 256


def test_models_are_compared_without_tf32():
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert relative(Rounding()(x), Rounding().cpu()(x)) > 1e-3
    unfolded, folded = Rounding(), torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    _check_folded(unfolded, folded, [x])
    assert not hasattr(unfolded, 'on_cpu')  # copies are


class FixedImages:
    """The images of this process: one of each pair, in two batches an epoch."""

    device, seed = torch.device('cpu'), 0

    def training(self):
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        x = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
        return [(batch, torch.zeros(len(batch))) for batch in x[rank::size].chunk(2)]


def distil_student(path):
    """Save what a process has after a distillation, and leave its state."""
    torch.manual_seed(0)
    teacher = timm.create_model('vit_tiny_patch16_224', **VIT).double()
    student = timm.create_model('repa_any', base='vit_tiny_patch16_224', anneal_steps=2, norm='keep', **VIT).double()
    state = path / STATE if dist.get_rank() == 0 else path / 'none' / STATE
    distil(student, teacher, FixedImages(), epochs=2, lr=1e-3, checkpoint=state)
    torch.save(student.state_dict(), path / f'{dist.get_rank()}.pth')


@pytest.mark.slow
def test_processes_distil_like_one(tmp_path):
    found = []
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        in_processes(count, distil_student, tmp_path / str(count))
        assert (tmp_path / str(count) / STATE).exists()
        found += [torch.load(tmp_path / str(count) / f'{rank}.pth') for rank in range(count)]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in other.items():
            torch.testing.assert_close(value, found[0][name], rtol=1e-6, atol=1e-9)


def resume_student(path):
    torch.manual_seed(0)
    teacher, student = (timm.create_model('vit_tiny_patch16_224', **VIT).double() for _ in range(2))
    state = path / str(dist.get_rank()) / STATE
    with pytest.raises(ValueError, match=r'same epoch, got \[1, 0\]'):
        distil(student, teacher, FixedImages(), epochs=2, lr=1e-3, checkpoint=state, resume=True)


@pytest.mark.slow
def test_processes_resume_from_the_same_epoch(tmp_path):
    """A checkpoint that only the first process sees is refused by all."""
    torch.manual_seed(0)
    teacher, student = (timm.create_model('vit_tiny_patch16_224', **VIT).double() for _ in range(2))
    state = tmp_path / '0' / STATE
    distil(student, teacher, FixedImages(), epochs=2, lr=1e-3, checkpoint=state)
    saved = torch.load(state, weights_only=True)
    saved['settings']['steps'] = 2  # of a process of two
    torch.save({**saved, 'epoch': 1}, state)
    in_processes(2, resume_student, tmp_path)


def accelerate_model(data, path, name):
    torch.manual_seed(0)
    model = original(data) if name is None else timm.create_model(
        name, embed_dim=(16, 24), depth=(1, 1), num_classes=VIT['num_classes'])
    images = Images(model, str(data), batch_size=8, img_size=32)
    result = accelerate(model, images, calibration_images=48, distil_epochs=1, checkpoint=path / STATE)
    assert len(images.training()) == 4  # of 36 images of this process, 8 in a step
    torch.save((result.model.state_dict(), result.figures), path / f'{dist.get_rank()}.pth')


@pytest.mark.slow
@pytest.mark.parametrize('name', [None, 'repvit_m0_9'])
def test_processes_get_the_same_model_and_one_measures(data, tmp_path, name):
    in_processes(2, accelerate_model, data, tmp_path, name)
    (first, figures), (second, others) = (torch.load(tmp_path / f'{rank}.pth') for rank in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert list(figures) == ['original', 'converted', 'distilled']
    assert not others


@pytest.mark.slow
def test_command_with_two_processes(data, tmp_path):
    printed = torchrun(
        2, '--no-python', Path(sys.executable).with_name('timm-rep'),
        *command(data, tmp_path / 'out', '--distil-epochs', '1', '--batch-size', '8'), CUDA_VISIBLE_DEVICES='',
        PATH=os.environ['PATH'])
    assert printed.count('Written:') == 1
    assert timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True).num_classes == 3
    assert not (tmp_path / 'out' / STATE).exists()


@torch.no_grad()
def test_agreement_is_with_the_original(data):
    """The agreement is not with the previous model: the second and the third agree."""
    models = {name: original(data) for name in 'abc'}
    for name, label in zip('abc', (0, 1, 1)):
        models[name].head.weight.zero_()
        models[name].head.bias.copy_(torch.eye(3)[label])
    figures = measure(models, Images(models['a'], str(data)), batch_sizes=())
    assert [figures[name]['agreement'] for name in 'abc'] == [100, 0, 0]


def test_one_run_at_a_time(data, tmp_path, capsys):
    with locking_folder(tmp_path / 'out'):
        assert main(command(data, tmp_path / 'out')) == 1
    assert str(tmp_path / 'out') in capsys.readouterr().err
    assert not list((tmp_path / 'out').iterdir())


def test_a_quantized_model_of_another_command_is_not_removed(tmp_path):
    shutil.copy(ROOT / 'hub' / 'repopt_vgg_a0.cifar10' / 'quantization.json', tmp_path)
    assert len(quantized_files(tmp_path)) == 2
    with pytest.raises(FileExistsError, match=r'quantization\.json of another model'):
        check_output(tmp_path)
    (tmp_path / 'report.json').write_text('{}')  # written by accelerate, and then quantized
    assert check_output(tmp_path) == tmp_path


def test_an_interrupted_write_is_finished_first(tmp_path):
    """A report.json, moved or not, shows that the other files come from an interrupted write."""
    (tmp_path / 'README.md').write_text('moved')
    with pytest.raises(FileExistsError, match=r'README\.md'):
        check_output(tmp_path)
    (tmp_path / '.written').mkdir()
    (tmp_path / '.written' / 'report.json').write_text('not moved yet')
    assert check_output(tmp_path) == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {'README.md', 'report.json'}
    (tmp_path / 'report.json').rename(tmp_path / STATE)  # of a distillation that is to replace a README.md
    with pytest.raises(FileExistsError, match=r'README\.md'):
        check_output(tmp_path)


def run_until_files_moved(rank, arguments, output, moves):
    """Kills its process before the file that follows so many others is moved."""
    replace, done = os.replace, []

    def replace_or_die(source, target):
        if '.written' in str(source) and (output / '.written' / 'config.json').exists():
            if len(done) == moves:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(target)
        return replace(source, target)

    os.replace = replace_or_die
    main(arguments)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs a process that can be killed')
@pytest.mark.parametrize('moves', [0, 2])
def test_resumed_after_a_kill_while_files_move(data, tmp_path, moves):
    """The result is complete, and --resume ends with it."""
    output = tmp_path / 'out'
    arguments = command(data, output, '--images', '24', '--distil-epochs', '1', '--resume')
    with pytest.raises(ProcessExitedException, match='SIGKILL'):  # not forked from here, where autograd has threads
        start_processes(run_until_files_moved, (arguments, output, moves), start_method='forkserver')
    assert (output / STATE).exists()
    assert not (output / 'config.json').exists()
    with pytest.raises((RuntimeError, FileNotFoundError)):  # timm reads config.json before this package can finish it
        timm.create_model(f'local-dir:{output}', pretrained=True)
    assert main(arguments) == 0
    assert not (output / STATE).exists()
    assert {p.name for p in output.iterdir()} == {'model.safetensors', 'config.json', 'report.json', 'README.md'}
    assert timm.create_model(f'local-dir:{output}', pretrained=True).num_classes == 3
