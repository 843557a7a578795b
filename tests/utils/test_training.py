"""The training loop; its schedule, loss and clipping are tested against the recipe of Hyper-Search."""
import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from tests.helpers import same_weights
from timm_rep.utils import training
from timm_rep.utils.training import evaluate, fit


def train(model, batches, epochs=1, **kwargs):
    optimizer = create_optimizer_v2(model, opt='sgd', lr=.1)
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=epochs, warmup_epochs=0, step_on_epochs=False, updates_per_epoch=len(batches))
    return fit(
        model, optimizer, scheduler, batches, epochs, device=torch.device('cpu'), progress=False, **kwargs)


@pytest.fixture
def batches():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 3, 4, 4, generator=g), torch.arange(6) % 3) for _ in range(2)]


@pytest.mark.parametrize('amp_dtype', [None, torch.bfloat16])
@pytest.mark.parametrize('channels_last', [False, True])
def test_dtype_and_memory_format(batches, amp_dtype, channels_last):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 3))
    seen = []
    model[0].register_forward_hook(lambda _, args, output: seen.append((
        output.dtype, args[0].is_contiguous(memory_format=torch.channels_last))))
    losses = train(model, batches, amp_dtype=amp_dtype, channels_last=channels_last)
    assert seen == [(amp_dtype or torch.float32, channels_last)] * 2
    assert len(losses) == 2


def test_processes_are_seeded_one_by_one(batches, monkeypatch):
    """Each epoch of each process draws other random numbers, and the same ones again."""
    class Loader(list):
        def __iter__(self):
            drawn.append(torch.rand(()).item())
            return super().__iter__()

    monkeypatch.setattr(training, 'DistributedDataParallel', lambda model, device_ids: model)
    found = []
    for _ in range(2):
        drawn = []
        for rank in range(2):
            monkeypatch.setattr(training, 'world_size_and_rank', lambda rank=rank: (2, rank))
            train(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), Loader(batches), epochs=2, seed=1)
        found.append(drawn)
    assert len(set(found[0])) == 4
    assert found[0] == found[1]


def test_epochs_are_seeded_one_by_one(batches):
    """Each depends on the seed and its number only; without a seed the generators are left alone."""
    class Loader:
        def __len__(self):
            return 1

        def __iter__(self):
            draws.append(torch.rand(1).item())
            return iter(batches[:1])

    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    draws = []
    train(model, Loader(), epochs=3, seed=5)
    assert len(set(draws)) == 3
    resumed, draws = draws, []
    train(model, Loader(), epochs=3, seed=5, start=1)
    assert draws == resumed[1:]
    draws = []
    torch.manual_seed(8)
    expected = torch.rand(2).tolist()
    torch.manual_seed(8)
    train(model, Loader(), epochs=2)
    assert draws == expected


def test_a_distributed_sampler_shuffles_by_seed_and_epoch(batches):
    class Sampler:
        def set_epoch(self, epoch):
            orders.append(epoch)

    class Loader(list):
        sampler = Sampler()

    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    orders = []
    for seed in (5, 8):
        train(model, Loader(batches), epochs=2, seed=seed)
    assert len(set(orders)) == 4
    train(model, Loader(batches), epochs=2, seed=5, start=1)
    assert orders[4:] == orders[1:2]
    train(model, Loader(batches))
    assert len(orders) == 5


def test_distillation_minimizes_the_divergence_for_each_image(batches):
    """The loss of a step is the sum over the classes, averaged over the images."""
    student, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(48, 3)) for _ in range(2))
    images = batches[0][0]
    with torch.no_grad():
        p, q = (model(images).softmax(1) for model in (teacher, student))
        expected = (p * (p.log() - q.log())).sum(1).mean().item()
    assert train(student, batches, teacher=teacher)[0] == pytest.approx(expected, rel=1e-5)


def test_evaluate(batches):
    model = nn.Sequential(nn.Dropout(.5), nn.Flatten(), nn.Linear(48, 3))
    model.train()
    logits, accuracy = evaluate(model, batches, torch.device('cpu'))
    images, targets = (torch.cat(x) for x in zip(*batches))
    torch.testing.assert_close(logits, model[1:](images))
    assert accuracy == pytest.approx(100 * (model[1:](images).argmax(1) == targets).float().mean().item())
    assert not model.training


def test_a_distillation_of_one_output():
    """It comes close to the teacher; the softmax of one output is constant."""
    x = torch.randn(32, 3, 4, 4)
    batches = [(x[i:i + 8], torch.zeros(8, dtype=torch.long)) for i in range(0, 32, 8)]
    images = SimpleNamespace(device=torch.device('cpu'), seed=0, training=lambda: batches)
    model, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(48, 1)) for _ in range(2))
    before = F.mse_loss(model(x), teacher(x)).item()
    training.distil(model, teacher, images, 40, .05)
    assert F.mse_loss(model(x), teacher(x)).item() < .05 * before


def test_a_distillation_that_diverges(batches, tmp_path):
    """Its state is that of the last epoch with finite weights, from which another attempt goes on."""
    class Loader(list):
        def __iter__(self):
            epochs.append(0)
            scale = float('inf') if len(epochs) == bad else 1.
            return iter([(scale * images, targets) for images, targets in batches])

    images = SimpleNamespace(device=torch.device('cpu'), seed=0, training=lambda: Loader(batches))
    model, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(48, 3)) for _ in range(2))
    path = tmp_path / 'state.pth'
    whole = copy.deepcopy(model)
    epochs, bad = [], 0
    training.distil(whole, teacher, images, 3, 1e-3)
    for bad in (1, 3):
        epochs.clear()
        with pytest.raises(RuntimeError, match=rf'diverged in epoch {bad}: 1\.weight .*lr'):
            training.distil(copy.deepcopy(model), teacher, images, 3, 1e-3, checkpoint=path)
        assert path.exists() == (bad > 1)
    bad = 0
    training.distil(model, teacher, images, 3, 1e-3, checkpoint=path, resume=True)
    assert same_weights(model, whole)
