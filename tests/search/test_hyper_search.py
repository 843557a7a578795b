import ast
import copy
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

import timm_rep
from tests import distributed_worker
from tests.helpers import in_processes, same_weights, torchrun
from timm_rep.layers import csla_layers
from timm_rep.scales import Scales
from timm_rep.search import parameter_groups

TINY = dict(depths=(1, 2, 1, 1), widths=(8, 8, 16, 16), stem_width=8, num_classes=4, strides=(1, 2, 2, 2, 1))


def dataset(n=48):
    g = torch.Generator().manual_seed(0)
    targets = torch.arange(n) % 4
    return TensorDataset(torch.randn(n, 3, 16, 16, generator=g) + targets[:, None, None, None], targets)


def loader(shuffle=True):
    return DataLoader(dataset(), batch_size=16, shuffle=shuffle)


def search(**kwargs):
    return timm_rep.hyper_search(
        'repopt_vgg_a0', loader(), **{**TINY, **dict(epochs=4, warmup_epochs=1, progress=False), **kwargs})


class Killed(Exception):
    pass


class KilledLoader:
    """A loader that is interrupted in its nth batch."""

    def __init__(self, batches):
        self.left = batches
        self.loader = loader()

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            if self.left == 0:
                raise Killed
            self.left -= 1
            yield batch


def test_finds_scales_that_a_model_takes():
    scales = search(metadata={'dataset': 'noise'}, val_loader=loader(shuffle=False))
    model = timm.create_model('repopt_vgg_a0', **TINY)
    initial = Scales.initial(model)
    assert scales.keys() == initial.keys()
    for name, branches in initial.items():
        for branch, scale in branches.items():
            found = scales[name][branch]
            assert not torch.equal(found, scale)
            assert found.std() > 0
    assert 'identity' in scales['stages.1.1.conv.0']
    assert (scales.metadata['model'], scales.metadata['epochs'], scales.metadata['dataset']) == (
        'repopt_vgg_a0', '4', 'noise')
    assert float(scales.metadata['accuracy']) > 25
    timm_rep.attach_grad_mults(model, scales)


@pytest.fixture(scope='module')
def straight():
    return search()


@pytest.mark.parametrize('batches,every', [(0, 1), (2, 1), (3, 1), (7, 1), (11, 1), (5, 2), (8, 2), (11, 3)])
def test_resumed_after_a_kill_is_the_uninterrupted_search(straight, tmp_path, batches, every):
    path = tmp_path / 'new folder' / 'search.pth'
    args = dict(
        TINY, epochs=4, warmup_epochs=1, progress=False, checkpoint=path, checkpoint_epochs=every, resume=True)
    with pytest.raises(Killed):
        timm_rep.hyper_search('repopt_vgg_a0', KilledLoader(batches), **args)
    resumed = timm_rep.hyper_search('repopt_vgg_a0', loader(), **args)
    assert resumed == straight
    assert resumed.history == straight.history
    assert [p.name for p in path.parent.iterdir()] == ['search.pth']
    # and once more, from the end
    assert timm_rep.hyper_search('repopt_vgg_a0', KilledLoader(0), **args) == straight


@pytest.mark.parametrize(
    'change', ['model', 'optimizer', 'history', {'epoch': None}, {'epoch': 5}, {'history': 1}], ids=str)
def test_damaged_checkpoints(tmp_path, change):
    path = tmp_path / 'search.pth'
    search(checkpoint=path)
    content = torch.load(path, weights_only=True)
    torch.save({**content, **change} if isinstance(change, dict) else {
        name: value for name, value in content.items() if name != change}, path)
    with pytest.raises(ValueError, match=r'search\.pth.* is damaged .* delete it to start again'):
        search(checkpoint=path, resume=True)


@pytest.mark.gpu
def test_device_of_the_model():
    model = timm.create_model('repopt_vgg_a0', structure='search', scales='ones', **TINY).cuda()
    timm_rep.hyper_search(model, loader(), epochs=1, warmup_epochs=0, progress=False)
    assert all(p.is_cuda for p in model.parameters())


def test_seed_matters():
    assert search(seed=1) != search(seed=2)


def test_a_model_of_your_own_is_trained_in_place():
    model = timm.create_model('repopt_vgg_a0', structure='search', scales='ones', **TINY)
    scales = timm_rep.hyper_search(model, loader(), epochs=1, warmup_epochs=0, progress=False)
    assert scales == Scales.from_model(model)
    last = [layers[-1] for layers in scales.stages().values()]
    assert 'stages.1.1.conv.0' in last
    assert scales.history == {
        name: {branch: [round(scale.mean().item(), 5)] for branch, scale in scales[name].items()} for name in last}


def test_weight_decay_is_for_kernels_and_identity_scales():
    model = timm.create_model('repopt_vgg_a0', structure='search', **TINY)
    decayed, others = parameter_groups(model, .1)
    assert (decayed['weight_decay'], others['weight_decay']) == (.1, 0.)
    names = {id(p): n for n, p in model.named_parameters()}
    expected = {n for n in names.values() if '.weights.' in n} | {'head.fc.weight'}
    assert {names[id(p)] for p in decayed['params']} == expected
    assert {names[id(p)] for p in others['params']} == set(names.values()) - expected
    assert any('.weights.identity' in n for n in expected)
    assert not any('.scales.' in n for n in expected)


def reference_search(model, batches, epochs, warmup_epochs, lr, weight_decay, smoothing, clip_grad):
    """Section 4.1 by hand: Nesterov momentum, linear warm-up and cosine, label smoothing, clipping of the norm."""
    decayed = {id(p) for group in parameter_groups(model, weight_decay)[:1] for p in group['params']}
    params = list(model.parameters())
    momentum = [torch.zeros_like(p) for p in params]
    model.train()
    total, warmup = epochs * len(batches), warmup_epochs * len(batches)
    for step in range(total):
        rate = lr * step / warmup if step < warmup else lr * (1 + math.cos(math.pi * step / total)) / 2
        images, targets = batches[step % len(batches)]
        logs = model(images).log_softmax(1)
        target = torch.nn.functional.one_hot(targets, logs.shape[1]) * (1 - smoothing) + smoothing / logs.shape[1]
        grads = torch.autograd.grad(-(target * logs).sum(1).mean(), params)
        norm = sum(g.square().sum() for g in grads).sqrt()
        assert norm > clip_grad
        with torch.no_grad():
            for p, g, m in zip(params, grads, momentum):
                g = g * (clip_grad / (norm + 1e-6)) + (weight_decay * p if id(p) in decayed else 0)
                m.mul_(.9).add_(g)
                p.sub_(rate * (g + .9 * m))
    return Scales.from_model(model)


def test_the_recipe_is_the_papers():
    args = dict(epochs=3, warmup_epochs=1, lr=2., weight_decay=.01, smoothing=.3, clip_grad=.05)
    torch.manual_seed(0)
    model = timm.create_model('repopt_vgg_a0', structure='search', dtype=torch.float64, **TINY)
    images, targets = dataset(32).tensors
    batches = [(x.double(), y) for x, y in zip(images.split(16), targets.split(16))]
    expected = reference_search(copy.deepcopy(model), batches, **args)
    start = Scales.from_model(model)
    found = timm_rep.hyper_search(model, batches, progress=False, **args)
    for layer, branches in expected.items():
        for branch, scale in branches.items():
            torch.testing.assert_close(found[layer][branch], scale, rtol=1e-5, atol=1e-6)
            assert (scale - start[layer][branch]).abs().max() > 1e-3


def test_an_existing_checkpoint_is_not_overwritten_unasked(tmp_path):
    path = tmp_path / 'search.pth'
    args = dict(checkpoint=path, epochs=1, warmup_epochs=0)
    search(seed=1, **args)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"search\.pth' of an earlier.*\(--resume\).*\(--overwrite\)"):
        search(seed=2, **args)
    assert path.read_bytes() == before
    assert search(seed=2, overwrite=True, **args) == search(seed=2, epochs=1, warmup_epochs=0)
    assert torch.load(path, weights_only=True)['settings']['seed'] == 2
    with pytest.raises(IsADirectoryError, match='checkpoint must be a file'):
        search(checkpoint=tmp_path)


def test_refused_before_anything_is_trained(tmp_path):
    target = timm.create_model('repopt_vgg_a0', **TINY)
    for model in (target, timm.create_model('repopt_vgg_a0', structure='csla', **TINY)):
        with pytest.raises(ValueError, match="structure='search'"):
            timm_rep.hyper_search(model, KilledLoader(0), epochs=2, warmup_epochs=0)
    for kwargs in (dict(epochs=0, warmup_epochs=0), dict(epochs=3, warmup_epochs=3)):
        with pytest.raises(ValueError, match='epochs must be'):
            search(**kwargs)
    for kwargs, message in [
        *((kwargs, next(iter(kwargs))) for kwargs in (
            dict(checkpoint_epochs=0), dict(smoothing=2.), dict(smoothing=1.), dict(lr=float('nan')), dict(lr=0.),
            dict(lr=float('inf')), dict(weight_decay=-1.), dict(clip_grad=0.), dict(epochs='1'), dict(epochs=2.),
            dict(epochs=True), dict(warmup_epochs=-1), dict(resume=True), dict(amp_dtype=torch.float16),
            dict(amp_dtype=torch.int8), dict(amp_dtype='bfloat16'))),
        (dict(metadata={'classes': 3}), "metadata.*'classes': 3"),
        (dict(metadata={'history': 'x'}), "metadata .*'history'"),
    ]:
        with pytest.raises(ValueError, match=message):
            timm_rep.hyper_search('repopt_vgg_a0', KilledLoader(0), **{**TINY, **kwargs})
    for name, kwargs in [
        ('repopt_vgg_a0', dict(TINY, attn_layer='foo')), ('repopt_vgg_a0', dict(TINY, unknown=1)),
        ('repopt_any', dict(base='mobileone_s0', act_layer='foo')), ('repopt_ghostnet_050', dict(global_pool='foo')),
    ]:
        with pytest.raises(ValueError, match=f"got '{name}'"):
            timm_rep.hyper_search(name, KilledLoader(0), **kwargs)
    for kwargs in dict(TINY, features_only=True), dict(TINY, num_classes=0):
        with pytest.raises(ValueError, match='no classes'):
            timm_rep.hyper_search('repopt_vgg_a0', KilledLoader(0), **kwargs)
    searched = timm.create_model('repopt_vgg_a0', structure='search', **TINY)
    with pytest.raises(TypeError, match='learning_rate'):
        timm_rep.hyper_search(searched, KilledLoader(0), learning_rate=.1)
    with pytest.raises(TypeError, match='train_loader'):
        timm_rep.hyper_search('repopt_vgg_a0', (batch for batch in loader()), **TINY)
    with pytest.raises(TypeError, match=r'a batch of images .* and labels .* got .*, str'):
        timm_rep.hyper_search(
            'repopt_vgg_a0', KilledLoader(0), [(torch.randn(2, 3, 32, 32), torch.arange(2), 'path')], **TINY)
    for change, message in [
        (lambda model: model.requires_grad_(False), 'require gradients'), (lambda model: model.half(), 'float16'),
        (lambda model: model.bfloat16(), 'bfloat16'), (lambda model: model.to('meta'), 'meta'),
        (lambda model: model.stages[1][1].conv[0].scales.requires_grad_(False), 'require gradients'),
    ]:
        changed = timm.create_model('repopt_vgg_a0', structure='search', **TINY)
        change(changed)
        with pytest.raises(ValueError, match=message):
            timm_rep.hyper_search(changed, KilledLoader(0))
    (tmp_path / 'file').write_text('old')
    with pytest.raises(OSError, match='cannot write to the output folder'):
        search(checkpoint=tmp_path / 'file' / 'search.pth')
    search(checkpoint=tmp_path / 'search.pth', epochs=1, warmup_epochs=0)
    with pytest.raises(ValueError, match='of another one: epochs is 1 there and 4 here'):
        search(checkpoint=tmp_path / 'search.pth', resume=True)
    same = dict(checkpoint=tmp_path / 'search.pth', epochs=1, warmup_epochs=0, resume=True)
    search(**same)
    for change, what in [
        (dict(amp_dtype=torch.bfloat16), 'amp_dtype is None there'), (dict(channels_last=True), 'channels_last'),
        (dict(act_layer='silu'), 'model_args'), (dict(metadata={'dataset': 'other'}), 'metadata'),
    ]:
        with pytest.raises(ValueError, match=f'of another one: {what}'):
            search(**same, **change)
    shorter = DataLoader(dataset(), batch_size=24)
    with pytest.raises(ValueError, match='of another one: steps is 3 there and 2 here'):
        timm_rep.hyper_search('repopt_vgg_a0', shorter, **TINY, **same)
    (tmp_path / 'search.pth').write_bytes(b'PK damaged')
    with pytest.raises(ValueError, match=r"checkpoint of a search, .*search\.pth'"):
        search(**same)
    for loaders, what in ((([],), 'train_loader'), ((loader(), []), 'val_loader')):
        with pytest.raises(ValueError, match=what):
            timm_rep.hyper_search('repopt_vgg_a0', *loaders, **TINY)
    with pytest.raises(ValueError, match=r"structure='search'.*'repopt_ghostnet_050'"):
        timm_rep.hyper_search('repopt_ghostnet_050', loader(), strides=(1, 1))


def test_a_label_of_a_later_batch():
    images, targets = dataset(32).tensors
    batches = list(zip(images.split(16), [targets[:16], targets[16:] + 9]))
    with pytest.raises(ValueError, match='Labels'):
        timm_rep.hyper_search('repopt_vgg_a0', batches, epochs=1, warmup_epochs=0, progress=False, **TINY)


X, Y = dataset(4).tensors


@pytest.mark.parametrize('batches,error,message', [
    ([{'image': X, 'label': Y}], TypeError, r'images \(N, C, H, W\) and labels \(N,\), .* got dict'),
    ([X], TypeError, r'labels \(N,\), .* got \(4, 3, 16, 16\)\.'),
    ([(X, Y[:, None])], TypeError, r'got \(4, 3, 16, 16\), \(4, 1\)'),
    ([(X, Y.float())], TypeError, 'the indices of classes, got torch.float32'),
    ([(X.byte(), Y)], TypeError, r'images of a batch must be floating-point numbers, got torch\.uint8'),
    ('images', TypeError, r"Expected an iterable of batches .* got 'images'"),
    ([(X, Y + 1)], ValueError, r'Labels must be from 0 to 3, .* got 1 to 4: set num_classes'),
    ([(X, Y - 1)], ValueError, r'Labels must be from 0 to 3, .* got -1 to 2'),
])
def test_other_batches(batches, error, message):
    """Unsuitable batches are refused before the first step, and leave a given model as it was."""
    model = timm.create_model('repopt_vgg_a0', structure='search', **TINY)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        timm_rep.hyper_search(model, batches, epochs=1, warmup_epochs=0, progress=False)
    assert same_weights(model, before)


def test_labels_of_other_integers():
    """Labels of any integer type train alike."""
    scales = [
        timm_rep.hyper_search('repopt_vgg_a0', [(X, Y.to(dtype))], epochs=1, warmup_epochs=0, progress=False, **TINY)
        for dtype in (torch.int64, torch.int32, torch.uint8)]
    assert all(
        torch.equal(scale, scales[0][layer][branch])
        for each in scales[1:] for layer, branches in each.items() for branch, scale in branches.items())


def test_the_result_has_the_layers_of_the_target():
    assert search(epochs=1, warmup_epochs=0).keys() == csla_layers(timm.create_model('repopt_vgg_a0', **TINY)).keys()


@pytest.mark.slow
@pytest.mark.parametrize('killed', [False, True])
def test_two_processes_are_one_with_the_doubled_batch(tmp_path, killed):
    """BatchNorm is frozen. Killed after an epoch and resumed, they come to the same scales."""
    in_processes(1, distributed_worker.search, tmp_path / 'one', 16, 0)
    expected = Scales.load(tmp_path / 'one.0.safetensors')
    if killed:
        in_processes(2, distributed_worker.search, tmp_path / 'two', 16, 1)
        assert not (tmp_path / 'two.0.safetensors').exists()
    in_processes(2, distributed_worker.search, tmp_path / 'two', 16, 0)
    found = [Scales.load(tmp_path / f'two.{rank}.safetensors') for rank in range(2)]
    assert found[0] == found[1]
    seeds = [ast.literal_eval(scales.metadata['seeds']) for scales in found]
    assert len({*seeds[0], *seeds[1]}) == (4 if killed else 6)  # each epoch of each process draws other crops
    assert found[0].keys() == expected.keys()
    for layer, branches in expected.items():
        for branch, scale in branches.items():
            torch.testing.assert_close(found[0][layer][branch], scale, rtol=1e-6, atol=1e-6)
            assert scale.std() > 1e-4  # they have moved
    if killed:
        with pytest.raises(ProcessRaisedException, match='processes is 1 there and 2 here'):
            in_processes(2, distributed_worker.search, tmp_path / 'one', 16, 0)


@pytest.mark.slow
def test_command(images, tmp_path):
    """The command under torchrun, as the README has it; one process writes and prints."""
    output = tmp_path / 's.safetensors'
    timm_rep = Path(sys.executable).with_name('timm-rep')
    printed = torchrun(
        2, '--no-python', timm_rep, 'hyper-search', 'repopt_vgg_a0', '--dataset', '', '--data-dir', images, '-o',
        output, '--epochs', '2', '--warmup-epochs', '0', '--batch-size', '5', '-j', '0', '--preload',
        CUDA_VISIBLE_DEVICES='', PATH=os.environ['PATH'])
    assert printed.count('Written:') == 1
    scales = Scales.load(output)
    assert scales.metadata['batch_size'] == '10'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['s.safetensors', 's.safetensors.checkpoint']


@pytest.mark.parametrize('dtype', [np.float64, np.float32])
def test_recipe_of_numpy_numbers(tmp_path, dtype):
    """It can be resumed, and equals that of Python's numbers."""
    recipe = {name: float(dtype(value)) for name, value in dict(
        lr=.05, weight_decay=1e-4, smoothing=.2, clip_grad=2.).items()}
    numbers = {name: dtype(value) for name, value in recipe.items()}
    with pytest.raises(Killed):
        timm_rep.hyper_search(
            'repopt_vgg_a0', KilledLoader(5), epochs=2, warmup_epochs=0, checkpoint=tmp_path / 'a.pth', progress=False,
            **numbers, **TINY)
    resumed = search(checkpoint=tmp_path / 'a.pth', epochs=2, warmup_epochs=0, resume=True, **numbers)
    assert resumed == search(epochs=2, warmup_epochs=0, **recipe)
    for seed in (np.int64(3), -1, .5):
        with pytest.raises(ValueError, match='seed must be an integer >= 0'):
            search(epochs=1, warmup_epochs=0, seed=seed)
