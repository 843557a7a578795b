"""The examples of dense prediction and their benchmark, at the smallest sizes."""
import argparse
import copy
import importlib
import json
from functools import partial
from statistics import mean
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn as nn
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.optim import param_groups_weight_decay
from timm.utils import reparameterize_model
from torchvision import tv_tensors

from tests.helpers import randomize_, relative, same_weights
from timm_rep.deploy import load_quantized, onnx_runner
from timm_rep.layers import RePaMlp, RePaMlpDeploy
from timm_rep.optim import RepSGD

TINY = dict(embed_dim=16, depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 8), drop_path_rate=0.)
TINY_OPTIONS = [f'{k}={v}' for k, v in TINY.items()]
# with feature maps at strides of 2 to 32 and of 4 to 32 pixels
OTHER_BACKBONES = {
    'repopt_vgg_b1': dict(depths=(1, 2, 1, 1), widths=(8, 16, 24, 32), stem_width=8),
    'repa_poolformer_s12': dict(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
}
DETECTORS = ['retinanet', 'mask_rcnn']


@pytest.fixture
def segmentation(load_script):
    pytest.importorskip('segmentation_models_pytorch', reason='its UPerNet is the head')
    return load_script('examples/segmentation')


@pytest.fixture
def detection(load_script):
    return load_script('examples/detection')


def folded_ffns(model):
    return not any(isinstance(m, RePaMlp) for m in model.modules()) and sum(
        isinstance(m, RePaMlpDeploy) for m in model.modules())


@torch.no_grad()
def test_segmentation_folds(segmentation, tmp_path):
    """Folding keeps the logits, on images that are neither square nor a multiple of the windows."""
    torch.manual_seed(0)
    model = randomize_(segmentation.build_model('repa_swin_tiny', 5, decoder_channels=16, **TINY))
    x = torch.randn(2, 3, 96, 160)
    features = model.encoder(x)
    assert [tuple(f.shape[1:]) for f in features] == [
        (3, 96, 160), (0, 48, 80), (16, 24, 40), (32, 12, 20), (64, 6, 10), (128, 3, 5)]
    logits = model(x)
    assert logits.shape == (2, 5, 96, 160)
    assert logits.std() > 0
    folded = reparameterize_model(model)
    assert folded_ffns(folded) == 5
    assert relative(folded(x), logits) < 1e-5
    for a, b in zip(folded.encoder(x)[2:], features[2:]):
        assert relative(a, b) < 1e-5
    built = segmentation.build_model('repa_swin_tiny', 5, decoder_channels=16, reparameterized=True, **TINY).eval()
    built.load_state_dict(folded.state_dict())
    assert torch.equal(built(x), folded(x))


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow if name == 'mask_rcnn' else ()) for name in DETECTORS])
@torch.no_grad()
def test_detector_folds(detection, name):
    """Folding keeps the detections, on images of two sizes; in float64, where rounding changes no detection."""
    torch.manual_seed(0)
    kwargs = dict(fpn_channels=16, min_size=64, max_size=128)
    if name == 'retinanet':
        kwargs.update(score_thresh=.01)
    else:
        kwargs.update(rpn_post_nms_top_n_test=30, box_detections_per_img=4)
    model = randomize_(detection.build_model(name, 'repa_swin_tiny', 4, TINY, **kwargs))
    images = [torch.rand(3, 64, 100), torch.rand(3, 80, 60)]
    folded = reparameterize_model(model)
    assert folded_ffns(folded) == 5
    x = model.transform(images)[0].tensors
    assert x.shape == (2, 3, 96, 128)
    pyramid = model.backbone(x)
    sizes = [(24, 32), (12, 16), (6, 8), (3, 4), (2, 2)] if name == 'mask_rcnn' else [
        (12, 16), (6, 8), (3, 4), (2, 2), (1, 1)]
    assert [tuple(y.shape) for y in pyramid.values()] == [(2, 16, *size) for size in sizes]
    for a, b in zip(folded.backbone(x).values(), pyramid.values()):
        assert relative(a, b) < 1e-5

    images = [image.double() for image in images]
    for before, after in zip(model.double()(images), reparameterize_model(model)(images)):
        assert len(before['boxes']) > 0
        assert torch.equal(before['labels'], after['labels'])
        for key in before.keys() - {'labels'}:
            assert relative(after[key], before[key]) < 1e-9
    built = detection.build_model(name, 'repa_swin_tiny', 4, dict(TINY, reparameterized=True), **kwargs)
    built.load_state_dict(folded.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize('name', ['segmentation', 'detection'])
@pytest.mark.parametrize('backbone', ['repa_swin_tiny', 'repopt_vgg_b1'])
def test_onnx(script, request, tmp_path, name, backbone):
    """The folded network inside another one is a graph for any number of images, with the folded network's outputs."""
    for package in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(package, reason='the extra deploy')
    module = request.getfixturevalue(name)
    args = {'repa_swin_tiny': TINY, **OTHER_BACKBONES}[backbone]
    decoder = '--decoder-channels' if name == 'segmentation' else '--fpn-channels'
    path = tmp_path / 'network.onnx'
    result = script(
        f'examples/{name}', '--backbone', backbone, '--backbone-kwargs', *(f'{k}={v}' for k, v in args.items()),
        '--img-size', 64, decoder, 16, '--steps', 2, '--batch-size', 2, '--val-shapes', 1, '--onnx', path)
    folded = result['folded'].eval()
    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        expected = [folded(x)] if name == 'segmentation' else list(module.DenseRetinaNet(folded)(x).values())
    outputs = onnx_runner(path)(x)
    for y, z in zip(outputs if isinstance(outputs, list) else [outputs], expected):
        assert relative(y, z) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize('name, backbone', [('segmentation', 'repa_swin_tiny'), ('detection', 'repopt_vgg_b1')])
def test_int8(script, request, tmp_path, name, backbone):
    """The folded network inside another one runs in int8, all convolutions and linear layers."""
    pytest.importorskip('torchao', reason='the extra deploy')
    module = request.getfixturevalue(name)
    args = {'repa_swin_tiny': TINY, **OTHER_BACKBONES}[backbone]
    decoder = '--decoder-channels' if name == 'segmentation' else '--fpn-channels'
    result = script(
        f'examples/{name}', '--backbone', backbone, '--backbone-kwargs', *(f'{k}={v}' for k, v in args.items()),
        '--img-size', 64, decoder, 16, '--steps', 2, '--batch-size', 2, '--val-shapes', 2, '--int8', tmp_path)
    folded = result['folded'].eval()
    if name == 'detection':
        folded = module.DenseRetinaNet(folded)
    quantized = load_quantized(tmp_path)
    layers = {n for n, m in folded.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert set(quantized.report.int8_layers) == layers
    assert not layers & set(quantized.report.float_layers)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        outputs, expected = quantized.program.graph(x), folded(x)
    if name == 'segmentation':
        outputs, expected = {'logits': outputs}, {'logits': expected}
    for key, y in expected.items():
        assert relative(outputs[key], y) < 0.15


@pytest.mark.parametrize('backbone', OTHER_BACKBONES)
@torch.no_grad()
def test_other_backbones(segmentation, detection, tmp_path, backbone):
    """RepOpt-VGG and PoolFormer start from a classifier, give the FPN maps of the same strides, and fold."""
    args = OTHER_BACKBONES[backbone]
    classifier = randomize_(timm.create_model(backbone, num_classes=7, **args))
    path = tmp_path / 'classifier.safetensors'
    save_file(classifier.state_dict(), path)
    x = torch.randn(2, 3, 96, 160)
    expected = classifier.forward_intermediates(x, intermediates_only=True)[-4:]
    nets = {
        'segmentation': segmentation.build_model(backbone, 5, checkpoint=path, decoder_channels=16, **args).eval(),
        **{name: detection.build_model(name, backbone, 4, dict(args, checkpoint=path), 16).backbone.eval()
           for name in DETECTORS},
    }
    for name, net in nets.items():
        maps = net.encoder(x) if name == 'segmentation' else net.body(x)
        count = 3 if name == 'retinanet' else 4
        for a, b in zip(maps[-count:], expected[-count:], strict=True):
            assert relative(a, b) < 1e-6
        y, folded = net(x), reparameterize_model(net)(x)
        if name == 'segmentation':
            y, folded = {'logits': y}, {'logits': folded}
        else:
            sizes = {'retinanet': [(12, 20), (6, 10), (3, 5), (2, 3), (1, 2)]}.get(
                name, [(24, 40), (12, 20), (6, 10), (3, 5), (2, 3)])
            assert [tuple(m.shape) for m in y.values()] == [(2, 16, *size) for size in sizes]
        for key in y:
            assert relative(folded[key], y[key]) < 1e-5


@pytest.mark.parametrize('backbone,options,optimizer', [
    ('repopt_vgg_b1', [], partial(RepSGD, lr=.01, momentum=.9, nesterov=True)),
    ('repopt_vgg_b1', ['--opt', 'adamw'], partial(torch.optim.AdamW, lr=3e-4)),
    ('repa_poolformer_s12', ['--lr', '0.001'], partial(torch.optim.AdamW, lr=1e-3)),
])
def test_optimizer(load_script, backbone, options, optimizer):
    """RepSGD with gradients as they are for a model with multipliers, AdamW with clipped gradients otherwise."""
    shared = load_script('examples/_dense')
    parser = argparse.ArgumentParser()
    shared.add_arguments(parser, pixels='')
    torch.manual_seed(0)
    trained = timm.create_model(backbone, num_classes=7, **OTHER_BACKBONES[backbone])
    expected = copy.deepcopy(trained).train()
    batches = [(torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 3])) for _ in range(3)]

    def loss_fn(model, x, target):
        return 10 * nn.functional.cross_entropy(model(x), target)

    shared.train(trained, batches, loss_fn, parser.parse_args(options))
    is_adamw = optimizer.func is torch.optim.AdamW
    optimizer = optimizer(param_groups_weight_decay(expected, .05 if is_adamw else 1e-4))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=optimizer.defaults['lr'], total_steps=3)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(expected, *batch).backward()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 1. if is_adamw else float('inf'))
        assert norm > 2  # clipping at 1 makes a difference
        optimizer.step()
        scheduler.step()
    assert same_weights(trained, expected)


@torch.no_grad()
@pytest.mark.parametrize('name', ['segmentation', *DETECTORS])
def test_starts_from_a_classifier(request, name, tmp_path):
    """The backbone starts from a classifier with any number of classes, of the same structure only."""
    torch.manual_seed(0)
    # always_partition as in the models: the same windows are shifted
    classifier = randomize_(
        timm.create_model('repa_swin_tiny', num_classes=7, img_size=64, always_partition=True, **TINY))
    path = tmp_path / 'classifier.safetensors'
    save_file(classifier.state_dict(), path)
    module = request.getfixturevalue('segmentation' if name == 'segmentation' else 'detection')
    args = dict(TINY, checkpoint=path, img_size=64)

    def body(**kwargs):
        if name == 'segmentation':
            return module.build_model('repa_swin_tiny', 5, decoder_channels=16, **args, **kwargs).encoder
        return module.build_model(name, 'repa_swin_tiny', 4, dict(args, **kwargs), fpn_channels=16).backbone.body

    x = torch.randn(2, 3, 64, 64)
    found = body().eval()(x)
    expected = classifier.forward_intermediates(x, intermediates_only=True)
    for a, b in zip(reversed(found), reversed(expected)):
        assert relative(a, b) < 1e-6
    with pytest.raises(RuntimeError, match='created with its training structure'):
        body(reparameterized=True)


@pytest.mark.parametrize('backbone,lr', [
    ('repa_swin_tiny', 2e-3), pytest.param('repopt_vgg_b1', .03, marks=pytest.mark.slow)])
def test_segmentation(script, segmentation, tmp_path, capsys, backbone, lr):
    args = {'repa_swin_tiny': TINY, **OTHER_BACKBONES}[backbone]
    checkpoint = tmp_path / 'classifier.safetensors'
    save_file(timm.create_model(backbone, **args).state_dict(), checkpoint)
    result = script(
        'examples/segmentation', '--backbone', backbone, '--backbone-kwargs', *(f'{k}={v}' for k, v in args.items()),
        '--img-size', 64, '--decoder-channels', 16, '--steps', 20, '--lr', lr, '--val-shapes', 5,
        '--checkpoint', checkpoint, '--output', tmp_path / 'folded')
    assert mean(result['losses'][-5:]) < .9 * mean(result['losses'][:5])
    assert result['difference'] < 1e-5
    assert 0 < result['ious']['folded'] < 100
    assert result['ious']['folded'] == pytest.approx(result['ious']['as trained'], abs=.1)
    assert 'folded: mIoU' in capsys.readouterr().out
    checkpoint.unlink()
    smp = importlib.import_module('segmentation_models_pytorch')
    loaded = smp.from_pretrained(tmp_path / 'folded').eval()
    x = torch.randn(1, 3, 96, 64)
    assert torch.equal(loaded(x), result['folded'].eval()(x))


@pytest.fixture
def folders(tmp_path):
    """Six images of different sizes with two objects each; one mask has a pixel other than 0, 1 and 2."""
    for folder in ('images', 'masks'):
        (tmp_path / folder).mkdir()
    for i in range(6):
        mask = torch.zeros(64 + i, 72, dtype=torch.uint8)
        mask[:30, :30] = 1
        mask[30:, 30:] = 2
        mask[30, 30] = 2 if i else 255
        Image.fromarray((mask * 80).numpy()).save(tmp_path / 'images' / f'{i}.jpg')
        Image.fromarray(mask.numpy()).save(tmp_path / 'masks' / f'{i}_mask.png')
    return tmp_path


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow if name == 'mask_rcnn' else ()) for name in DETECTORS])
def test_detection(script, detection, folders, capsys, name):
    if name == 'retinanet':
        kwargs = ['score_thresh=0.01']
    else:
        kwargs = [
            'box_batch_size_per_image=16', 'rpn_post_nms_top_n_train=30', 'rpn_post_nms_top_n_test=20',
            'box_detections_per_img=4']
    result = script(
        'examples/detection', '--model', name, '--backbone-kwargs', *TINY_OPTIONS, '--fpn-channels', 16, '--img-size',
        64, '--images', folders / 'images', '--masks', folders / 'masks', '--steps', 14, '--lr', 1.5e-3,
        '--batch-size', 2, '--output', folders / 'folded.safetensors', '--model-kwargs', *kwargs)
    assert mean(result['losses'][-3:]) < .9 * mean(result['losses'][:3])
    assert result['found']['folded'] == pytest.approx(result['found']['as trained'], abs=30)
    assert result['shared'] > 90
    assert 'detections that both share' in capsys.readouterr().out
    built = detection.build_model(name, 'repa_swin_tiny', 2, dict(TINY, reparameterized=True), 16)
    built.load_state_dict(load_file(folders / 'folded.safetensors'))


def test_other_data(script, segmentation, folders):
    """Segmentation on folders and detection on shapes, the reverse of the other tests."""
    args = ['--img-size', 64, '--steps', 2, '--backbone-kwargs', *TINY_OPTIONS]
    result = script(
        'examples/segmentation', *args, '--images', folders / 'images', '--masks', folders / 'masks',
        '--num-classes', 3, '--decoder-channels', 16)
    assert result['folded'](torch.randn(1, 3, 64, 64)).shape == (1, 3, 64, 64)
    result = script('examples/detection', *args, '--fpn-channels', 16, '--batch-size', 1, '--val-shapes', 2)
    assert result['folded'].head.classification_head.num_classes == 4
    with pytest.raises(SystemExit, match='--images and --masks belong together'):
        script('examples/detection', *args, '--images', folders / 'images')


def test_folders(load_script, folders):
    shared = load_script('examples/_dense')
    data = shared.Folder(folders / 'images', folders / 'masks')
    image, mask, labels = data[1]
    assert (image.shape, mask.shape, labels) == ((3, 65, 72), (1, 65, 72), None)
    _, (target,) = load_script('examples/detection').collate([data[1]])
    assert target['boxes'].tolist() == [[0, 0, 30, 30], [30, 30, 72, 65]]
    assert target['labels'].tolist() == [1, 1]
    Image.new('RGB', (72, 65)).save(folders / 'masks' / '1_mask.png')
    with pytest.raises(ValueError, match=r'1_mask\.png is of shape \(3, 65, 72\), expected .* \(1, 65, 72\)'):
        data[1]
    (folders / 'masks' / '3_mask.png').unlink()
    with pytest.raises(ValueError, match=r'1 images have no mask in .*, the first is 3\.jpg'):
        shared.Folder(folders / 'images', folders / 'masks')
    (folders / 'none').mkdir()
    with pytest.raises(ValueError, match=r'images in .*none, but found none'):
        shared.Folder(folders / 'none', folders / 'masks')


def test_shapes(load_script):
    """Shapes are reproducible; their boxes are tight, their colors tell the classes."""
    shapes = load_script('examples/_dense').Shapes(20, 64, seed=3)
    again = load_script('examples/_dense').Shapes(20, 64, seed=3)
    other = load_script('examples/_dense').Shapes(20, 64, seed=4)
    seen = set()
    for i in range(20):
        image, numbers, labels = shapes[i]
        assert all(torch.equal(a, b) for a, b in zip(shapes[i], again[i]))
        assert other[i][0].shape != image.shape or not torch.equal(other[i][0], image)
        assert all(64 <= side <= 96 for side in image.shape[1:])
        assert image.shape[1:] == numbers.shape[1:]
        assert 1 <= len(labels) <= 5
        _, (target,) = load_script('examples/detection').collate([shapes[i]])
        assert len(target['labels']) == len(target['boxes']) == len(target['masks']) == len(numbers.unique()) - 1
        for label, box, mask in zip(target['labels'], target['boxes'].int().tolist(), target['masks']):
            left, top, right, bottom = box
            assert mask[top:bottom, left:right].sum() == mask.sum() > 0
            for edge in (mask[top], mask[bottom - 1], mask[:, left], mask[:, right - 1]):
                assert edge.any()
            assert max(right - left, bottom - top) <= .6 * 64 + 1
            assert image[:, mask.bool()].float().mean(1).argmax() == label - 1
            seen.add(label.item())
    assert seen == {1, 2, 3}


def test_classes_of_pixels(segmentation):
    image, numbers, labels = torch.zeros(3, 1, 3, dtype=torch.uint8), torch.tensor([[[0, 1, 2]]]), torch.tensor([3, 1])
    images, targets = segmentation.create_collate()([(image, tv_tensors.Mask(numbers), labels)] * 2)
    assert images.shape == (2, 3, 1, 3)
    assert targets.tolist() == [[[0, 3, 1]]] * 2


class Recorded(nn.Module):
    """Returns recorded outputs one after the other."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = iter(outputs)

    def forward(self, x):
        return next(self.outputs)


def test_miou(segmentation):
    """mIoU is over all pixels except the ignored index, and over the classes that occur."""
    targets = [torch.tensor([[[0, 0, 1, 255]]]), torch.tensor([[[1, 1, 1, 0]]])]
    answers = [torch.tensor([[[0, 1, 1, 2]]]), torch.tensor([[[1, 1, 0, 0]]])]

    def logits(classes):
        return [torch.nn.functional.one_hot(x, 4).permute(0, 3, 1, 2).float() for x in classes]

    images = [torch.zeros(1, 3, 1, 4)] * 2
    right = [t.where(t < 255, 0) for t in targets]
    models = {'a': Recorded(*logits(answers)), 'b': Recorded(*logits(right))}
    args = SimpleNamespace(device=torch.device('cpu'), num_classes=4, ignore_index=255)
    ious, difference = segmentation.evaluate(models, zip(images, targets), args)
    # class 0: 2 of 4 pixels, class 1: 3 of 5
    assert ious == {'a': pytest.approx(55), 'b': pytest.approx(100)}
    assert difference == 1


def test_found_objects(detection):
    """Objects are found among as many first detections as there are objects, by masks if there are any."""
    masks = torch.zeros(2, 8, 8, dtype=torch.uint8)
    masks[0, :4, :4] = 1
    masks[1, 4:, 4:] = 1
    boxes = torch.tensor([[0., 0, 4, 4], [4, 4, 8, 8]])
    target = dict(boxes=boxes, labels=torch.tensor([1, 2]), masks=masks)

    def detections(order, labels, shift=0., **more):
        return [[dict(boxes=boxes[order] + shift, labels=torch.tensor(labels), **more)]]

    def evaluate(**outputs):
        models = {name: Recorded(*y) for name, y in outputs.items()}
        return detection.evaluate(
            models, [([torch.zeros(3, 8, 8)], [target])], SimpleNamespace(device=torch.device('cpu')))

    assert evaluate(a=detections([1, 0], [2, 1]), b=detections([0, 1], [1, 2])) == ({'a': 100, 'b': 100}, 100)
    assert evaluate(a=detections([1, 0], [2, 2]), b=detections([1], [2], 3.)) == ({'a': 50, 'b': 0}, 0)
    # the third detection does not count; a wrong label; one of three is shared
    assert evaluate(a=detections([1, 1, 0], [2, 1, 1]), b=detections([1], [2])) == ({'a': 50, 'b': 50}, 100 / 3)
    soft = masks[:, None].float() * .9
    found, _ = evaluate(a=detections([0, 1], [1, 2], masks=soft.flip(0)), b=detections([0, 1], [1, 2], masks=soft))
    assert found == {'a': 0, 'b': 100}
    empty = dict(boxes=boxes[:0], labels=torch.empty(0, dtype=torch.long))
    assert evaluate(a=[[empty]], b=[[empty]]) == ({'a': 0, 'b': 0}, 100)


@pytest.fixture
def bench(script, load_script, tmp_path, monkeypatch):
    """Runs the benchmark on tiny networks; returns its module and the results."""
    module = load_script('benchmarks/dense')
    monkeypatch.setattr(module, 'BACKBONE_ARGS', dict(module.BACKBONE_ARGS, **TINY))
    monkeypatch.setattr(module, 'PROPOSALS', 12)
    monkeypatch.setattr(module, 'DETECTIONS', 3)

    def run(*networks):
        script('bench', 'dense', '--models', 'swin_small', '--img-size', 64, 96, '--rounds', 1, '--networks', *networks)
        path, = (tmp_path / 'results').glob('*/dense.json')
        return json.loads(path.read_text())

    run.module = module
    return run


@pytest.mark.slow
def test_bench_dense(bench, script, capsys):
    bench('backbone')
    result = bench('retinanet')  # several commands, one file
    assert [row['network'] for row in result['rows']] == ['backbone', 'retinanet']
    assert [row['paper'] for row in result['rows']] == [None, 1.15]
    assert all(row['ratio'] > 0 and row['ms']['folded'] > 0 for row in result['rows'])
    assert (result['img_size'], result['batch_size']) == ([64, 96], 1)
    with pytest.raises(SystemExit):
        script('bench', 'dense', '--img-size', 800, 1333)
    assert 'multiples of 32, got [800, 1333]' in capsys.readouterr().err


@pytest.mark.parametrize('network,paper', [
    ('retinanet', 1.15), *(
        pytest.param(*row, marks=pytest.mark.slow) for row in (('mask_rcnn', 1.16), ('upernet', 1.13)))])
@torch.no_grad()
def test_bench_dense_compares_backbones(bench, request, monkeypatch, network, paper):
    """The networks differ in the backbone only, and the detectors in nothing that takes time."""
    if network == 'upernet':
        request.getfixturevalue('segmentation')
    module, built, timed = bench.module, [], []
    build = module.build

    def time_passes(runs, images, **kwargs):
        timed.append({side: run(images) for side, run in runs.items()})
        return dict(vanilla=[1., 1., 1.2], unfolded=[.5, .5, .5], folded=[.25, .2, .25])

    monkeypatch.setattr(module, 'build', lambda *args: built.append(build(*args)) or built[-1])
    monkeypatch.setattr(module, 'time_passes', time_passes)
    row, = bench(network)['rows']
    assert row == {
        'backbone': 'swin_small', 'network': network, 'ratio': 4.8, 'paper': paper,
        'ms': dict(vanilla=1000., unfolded=500., folded=250.), 'spread (%)': dict(vanilla=5., unfolded=0., folded=5.)}
    vanilla, repa = ({
        k: v for k, v in model.state_dict().items() if not k.startswith(module.NETWORKS[network])} for model in built)
    assert len(vanilla) > 20
    assert same_weights(vanilla, repa)
    outputs, = timed
    if network != 'upernet':
        assert {len(y['boxes']) for (y,) in outputs.values()} == {3}
        outputs = {side: y[0]['scores'] for side, y in outputs.items()}
    assert relative(outputs['folded'], outputs['unfolded']) < 1e-4
    assert not torch.equal(outputs['folded'], outputs['vanilla'])
