"""``timm-rep quantize``: a model and images in, a folder with an int8 model out."""
import json

import pytest
import torch

from timm_rep.cli import main
from timm_rep.deploy import load_quantized

pytest.importorskip('torchao')

KWARGS = ['num_classes=4', 'depths=(1,1,1,1)', 'widths=(8,8,8,8)', 'stem_width=8']


def command(images, out, *args):
    return main([
        'quantize', 'repopt_vgg_a0', '--data-dir', str(images), '--val-split', 'validation', '-o', str(out),
        '--batch-size', '8', '--model-kwargs', *KWARGS, *args])


@pytest.mark.parametrize('args, backend', [
    pytest.param(['--images', '8'], 'inductor', marks=pytest.mark.slow),
    pytest.param(
        ['--backend', 'onnxruntime', '--per-tensor', '--calibrator', 'percentile', '--percentile', '99'],
        'onnxruntime', marks=pytest.mark.slow),
    pytest.param(['--qat-epochs', '1'], 'inductor', marks=pytest.mark.slow),
])
def test_writes_a_folder_and_reports_the_accuracy(images, tmp_path, capsys, args, backend):
    torch.manual_seed(0)
    assert command(images, tmp_path / 'out', *args) == 0
    printed = capsys.readouterr().out
    quantized = load_quantized(tmp_path / 'out')
    report = quantized.report
    assert str(report) in printed
    assert report.backend == backend
    assert len(report.int8_layers) == 6
    assert report.accuracy.images == 8
    assert report.images == (8 if '--images' in args else 20)
    assert report.qat_epochs == ('--qat-epochs' in args)
    assert report.per_channel == ('--per-tensor' not in args)
    assert report.calibrator == ('percentile' if '--calibrator' in args else 'minmax')
    content = json.loads((tmp_path / 'out' / 'quantization.json').read_text())
    assert {'torch', 'timm_rep', 'torchao'} <= content['versions'].keys()
    assert len(list((tmp_path / 'out').iterdir())) == 2


def test_wrong_use(images, tmp_path, capsys, monkeypatch):
    # importing the backend takes seconds and prints warnings
    monkeypatch.setattr('timm_rep.deploy.quantize._program', lambda name: pytest.fail('imported before the checks'))

    def refused(*args, output=tmp_path / 'out'):
        assert command(images, output, *args) == 1
        out, error = capsys.readouterr()
        assert out == ''
        assert error.count('\n') == 1
        return error

    assert 'without --backend' in refused('--qat-epochs', '2', '--backend', 'onnxruntime')
    assert '--max-error' in refused('--qat-epochs', '2', '--max-error', '.1')
    assert '--max-accuracy-loss' in refused('--qat-epochs', '2', '--max-accuracy-loss', '0')
    assert 'percentile must be' in refused('--percentile', '3')
    assert '--calibrator percentile, got minmax' in refused('--percentile', '99')
    assert '--qat-epochs must be given with --lr' in refused('--lr', '.01')
    assert 'lr must be' in refused('--qat-epochs', '2', '--lr', 'nan')
    assert "the split 'test'" in refused('--val-split', 'test')
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'file').write_text('')
    assert 'cannot write to the output folder' in refused(output=tmp_path / 'file')
    (tmp_path / 'state').mkdir()
    (tmp_path / 'state' / 'training.pth').write_text('')
    assert '--resume to continue it' in refused('--qat-epochs', '1', output=tmp_path / 'state')
    with pytest.raises(SystemExit):
        command(images, tmp_path, '--backend', 'tensorrt')


@pytest.mark.parametrize('function, args, resumable', [
    ('quantize_ptq', [], False), ('quantize_qat', ['--qat-epochs', '1'], True)])
def test_an_interruption_names_resume_where_it_helps(
        images, tmp_path, capsys, monkeypatch, function, args, resumable):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(f'timm_rep.cli.quantize.{function}', interrupt)
    assert command(images, tmp_path / 'out', *args) == 130
    assert ('--resume' in capsys.readouterr().err) == resumable


@pytest.mark.parametrize('args, expected', [
    ([], dict(keep_float=(), max_error=None, max_accuracy_loss=None, diagnose=False, equalize=False)),
    (['--keep-float', 'stem.conv', 'head.fc', '--diagnose'],
     dict(keep_float=['stem.conv', 'head.fc'], max_error=None, max_accuracy_loss=None, diagnose=True)),
    (['--keep-float', 'auto', '--max-error', '.1', '--max-accuracy-loss', '1'],
     dict(keep_float='auto', max_error=.1, max_accuracy_loss=1., diagnose=False)),
    (['--equalize'], dict(equalize=True)),
], ids=str)
def test_options_of_quantize_ptq(images, tmp_path, capsys, monkeypatch, args, expected):
    found = {}

    def quantize(*args, **kwargs):
        found.update(kwargs)
        raise RuntimeError('enough')

    monkeypatch.setattr('timm_rep.cli.quantize.quantize_ptq', quantize)
    assert command(images, tmp_path / 'out', *args) == 1
    assert capsys.readouterr().err == 'timm-rep: enough\n'
    assert {name: found[name] for name in expected} == expected
    if args:
        assert command(images, tmp_path / 'out', '--qat-epochs', '1', *args) == 1
        assert 'must be given without' in capsys.readouterr().err
