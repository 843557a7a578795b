"""The example of self-supervision, at the smallest sizes."""
import re
import sys

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from timm_rep.demo.training import load_split

pytest.importorskip('lightly', reason='the example needs lightly')

SHORT = ['--batch-size', 16, '--epochs', 2, '--warmup-epochs', 0, '-j', 0]
TINY_HEAD = ['--head-kwargs', 'hidden_dim=32', 'bottleneck_dim=16', 'output_dim=32']
TINY_MODEL = ['--model-kwargs', 'embed_dim=32', 'num_heads=2']  # last, others may follow
TINY = [*SHORT, *TINY_HEAD, *TINY_MODEL]


@pytest.fixture
def dino(load_script, monkeypatch):
    """The module with fewer digits; ``run`` is its command."""
    module = load_script('examples/dino')

    def few(seed):
        train_set, val_set = load_split(seed)
        parts = (train_set, 64), (val_set, 40)
        for dataset, n in parts:
            dataset.images, dataset.targets = dataset.images[:n], dataset.targets[:n]
        return tuple(dataset for dataset, _ in parts)

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['dino.py', *map(str, args)])
        module.main()

    monkeypatch.setattr(module, 'load_split', few)
    monkeypatch.setattr(module, 'run', run, raising=False)
    return module


@pytest.fixture
def spied(dino, monkeypatch):
    """Records arguments and result of every call of a function of the module, by name."""

    def spy(name):
        calls, function = [], getattr(dino, name)

        def wrapped(*args, **kwargs):
            calls.append((*args, function(*args, **kwargs)))
            return calls[-1][-1]

        monkeypatch.setattr(dino, name, wrapped)
        return calls

    return spy


def test_digits(dino, spied, tmp_path, capsys):
    """The backbone is trained, evaluated, folded and saved; the folded one predicts the same."""
    networks, trained, predictions = spied('create_networks'), spied('train'), spied('predict_knn')
    evaluated = spied('evaluate')
    path = tmp_path / 'new folder' / 'backbone.safetensors'
    dino.run(*TINY, '--output', path)
    out = capsys.readouterr().out
    found = re.findall(r'^(\w+), \S+ M parameters: k-NN (\S+)%(, linear \S+%)?$', out, re.M)
    assert [(label, bool(linear)) for label, _, linear in found] == [
        ('untrained', True), ('trained', True), ('folded', False)]
    assert found[1][1] == found[2][1]
    assert torch.equal(predictions[1][-1], predictions[2][-1])
    assert float(re.search(r'features differ by (\S+) of the largest', out)[1]) < 1e-5
    assert out.count(': loss ') == 2
    losses = torch.tensor(trained[0][-1])
    assert losses.isfinite().all()
    _, teacher = networks[0][-1]
    assert (evaluated[0][0], evaluated[1][1], evaluated[2][1].reparameterized) == ('untrained', teacher.backbone, True)
    assert not torch.equal(evaluated[0][-1], evaluated[1][-1])

    # the line printed last loads the file, and the model folds
    backbone = eval(out.splitlines()[-1], {'timm': timm}).eval()
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = teacher.backbone(images)
        torch.testing.assert_close(backbone(images), expected, rtol=0, atol=0)
        torch.testing.assert_close(backbone.reparameterize()(images), expected, rtol=1e-4, atol=1e-5)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
def test_seed(dino, spied):
    trained, evaluated = spied('train'), spied('evaluate')
    for seed in (0, 0, 1):
        dino.run(*TINY, '--seed', seed)
    assert trained[0][-1] == trained[1][-1] != trained[2][-1]
    assert torch.equal(evaluated[2][-1], evaluated[5][-1])


@pytest.mark.slow
def test_data_dir(dino, spied, images, capsys):
    """Folders of images, at the size of the arguments; a model other than a ViT."""
    networks, trained = spied('create_networks'), spied('train')
    args = ['--data-dir', images, *SHORT, *TINY_HEAD, '--knn-k', 3, '--transform-kwargs', 'n_local_views=1']
    dino.run(*args, *TINY_MODEL, 'img_size=16', 'patch_size=8', 'depth=1')
    assert 'repa_vit_small, 16 x 16 pixels: 20 images to train on, 8 to validate on' in capsys.readouterr().out
    assert networks[0][-1][0].backbone.patch_embed.grid_size == (2, 2)
    dino.run(*args, '--epochs', 1, '--model', 'test_resnet', '--model-kwargs', 'dynamic_img_size=None')
    assert 'test_resnet, 160 x 160 pixels' in capsys.readouterr().out
    assert all(torch.tensor(call[-1]).isfinite().all() for call in trained)


def test_teacher_is_ema(dino, spied, monkeypatch):
    """The teacher changes by the EMA only, with lightly's momentum; it has no gradients and no dropout."""
    networks = spied('create_networks')
    update = dino.update_momentum
    momenta, seen = [], {}

    def parameters(network):
        return [p.detach().clone() for p in network.parameters()]

    def checked(student, teacher, m):
        before, now = parameters(teacher), parameters(student)
        assert all(torch.equal(*pair) for pair in zip(before, seen.get('teacher', before)))
        assert not all(torch.equal(*pair) for pair in zip(now, seen.get('student', before)))
        update(student, teacher, m)
        seen.update(teacher=parameters(teacher), student=now)
        for p, old, new in zip(seen['teacher'], before, now):
            torch.testing.assert_close(p, m * old + (1 - m) * new)
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        assert all(p.grad is not None for name, p in student.named_parameters() if '.last_layer.' not in name)
        momenta.append(m)

    monkeypatch.setattr(dino, 'update_momentum', checked)
    dino.run(*TINY, 'drop_path_rate=0.5', 'proj_drop_rate=0.2', '--momentum', 0.9)
    (student, teacher), = (call[-1] for call in networks)
    # 2 epochs of 4 steps
    expected = 1 - 0.1 * (1 + torch.cos(torch.arange(8) / 7 * torch.pi)) / 2
    torch.testing.assert_close(torch.tensor(momenta), expected)
    drops = [{getattr(m, 'drop_prob', getattr(m, 'p', 0.)) for m in net.modules()} for net in (student, teacher)]
    assert drops == [{0., 0.2, 0.5}, {0.}]


def test_teacher_statistics(dino, monkeypatch):
    """Running statistics of the teacher's BatchNorms come from the global views only."""
    seen, watched, create, forward = [], [], dino.create_networks, torch.nn.BatchNorm1d.forward

    def create_and_watch(*args):
        student, teacher = create(*args)
        watched.append(teacher.backbone.blocks[0].mlp.norm1)
        return student, teacher

    def spy(norm, x):  # no hook: layers with hooks do not fold
        if any(norm is other for other in watched):
            seen.append((norm.training, x.detach()))
        return forward(norm, x)

    monkeypatch.setattr(torch.nn.BatchNorm1d, 'forward', spy)
    monkeypatch.setattr(dino, 'create_networks', create_and_watch)
    statistics = []
    monkeypatch.setattr(dino, 'update_bn', lambda *args: None)
    monkeypatch.setattr(dino, 'evaluate', lambda label, backbone, *args, **kwargs: statistics.append(
        [b.clone() for b in (backbone.blocks[0].mlp.norm1.running_mean, backbone.blocks[0].mlp.norm1.running_var)]
        if label != 'folded' else None) or torch.ones(1))
    dino.run(*TINY)
    assert [(training, len(x)) for training, x in seen] == [(True, 2 * 16 * 17)] * 8  # 16 tokens and a class token
    mean, var = statistics[0]
    assert mean.eq(0).all()
    assert var.eq(1).all()
    for _, x in seen:
        mean, var = 0.9 * mean + 0.1 * x.mean(0), 0.9 * var + 0.1 * x.var(0)
    torch.testing.assert_close(statistics[1], [mean, var])


@pytest.mark.slow
def test_student_learns(dino, spied):
    """The student learns the outputs of a constant teacher."""
    trained = spied('train')
    # one batch of whole images
    views = ['--transform-kwargs', 'n_local_views=0', 'global_crop_scale=(1.,1.)']
    dino.run(*TINY, *views, '--momentum', 1, '--batch-size', 64, '--epochs', 30)
    losses = trained[0][-1]
    assert losses[-1] < 0.5 * max(losses)  # the student starts as the teacher, then the center of the outputs moves


def test_knn(dino):
    """Votes of the k nearest neighbors are weighted by exp(cosine / 0.07)."""
    g = torch.Generator().manual_seed(0)
    features, bank = torch.randn(300, 8, generator=g), torch.randn(60, 8, generator=g)
    targets = torch.randint(0, 4, (60,), generator=g)
    found = dino.predict_knn(features, bank, targets, 5)
    for x, prediction in zip(features, found):
        cosines = F.cosine_similarity(x[None], bank)
        votes = torch.zeros(4)
        for i in cosines.argsort(descending=True)[:5]:
            votes[targets[i]] += torch.exp(cosines[i] / 0.07)
        assert votes.argmax() == prediction


@pytest.mark.parametrize('args, message', [
    (['--data-dir', '{tmp}/nothing'], "Cannot open the split 'train' of the dataset '' in '{tmp}/nothing'"),
    (['--data-dir', '{tmp}/half'], "Cannot open the split 'val' of the dataset '' in '{tmp}/half'"),
    (['--model', 'repa_vit_smal'], "--model: timm and timm_rep have no 'repa_vit_smal'"),
    (['--output', '{tmp}/x.pth'], "--output is a .safetensors file to write, got '{tmp}/x.pth'"),
    (['--output', '{tmp}/half/train/0/0.png/x.safetensors'], 'cannot write to the output folder'),
    (['--batch-size', 65], '--batch-size is from 1 to the number of training images, 64, got 65'),
    (['--knn-k', 0], '--knn-k is from 1 to the number of training images, 64, got 0'),
    (['--epochs', 0], '--epochs is at least 1, got 0'),
])
def test_errors(dino, tmp_path, capsys, args, message):
    folder = tmp_path / 'half' / 'train' / '0'
    folder.mkdir(parents=True)
    Image.new('RGB', (8, 8)).save(folder / '0.png')
    with pytest.raises(SystemExit):
        dino.run(*(str(arg).format(tmp=tmp_path) for arg in args))
    assert message.format(tmp=tmp_path) in capsys.readouterr().err
