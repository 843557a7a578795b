"""Measured accuracy: the images that the model's pretrained_cfg asks for, and all of them."""
import pytest
import torch
import torch.nn as nn
from PIL import Image
from timm.data import create_transform

from tests.helpers import read_predictions
from timm_rep.publish._metrics import measure_accuracy, write_predictions

CLASSES = 7
CFG = dict(
    input_size=(3, 32, 32), mean=(.1, .2, .3), std=(.5, .6, .7), interpolation='bilinear', crop_pct=.8,
    crop_mode='center')


class Recorder(nn.Module):
    """Keeps the images that it is given, and returns random logits."""

    def __init__(self, cfg):
        super().__init__()
        self.num_classes = CLASSES
        self.pretrained_cfg = cfg
        self.images, self.logits = [], []
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        self.images.append(x)
        self.logits.append(torch.randn(len(x), CLASSES, generator=self.generator))
        return self.logits[-1]


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
    """Three images of 50 x 70 of each class."""
    root = tmp_path_factory.mktemp('images')
    g = torch.Generator().manual_seed(0)
    for label in range(CLASSES):
        (root / 'val' / str(label)).mkdir(parents=True)
        for i in range(3):
            pixels = torch.randint(0, 256, (50, 70, 3), generator=g, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(root / 'val' / str(label) / f'{i}.png')
    return root


@pytest.mark.parametrize('change', [
    {}, {'crop_pct': 1.}, {'crop_mode': 'squash'}, {'interpolation': 'nearest'}, {'mean': (0., 0., 0.)},
    {'std': (1., 1., 1.)}, {'input_size': (3, 24, 24)},
], ids=str)
def test_accuracy(data_dir, change):
    model = Recorder({**CFG, **change})
    metrics, predictions = measure_accuracy(model, str(data_dir), 'val', torch.device('cpu'), batch_size=8, every=4)
    paths = sorted((data_dir / 'val').glob('*/*.png'))
    transform = create_transform(**{**CFG, **change})
    assert torch.equal(torch.cat(model.images), torch.stack([transform(Image.open(path)) for path in paths]))
    targets = torch.tensor([int(path.parent.name) for path in paths])
    ranks = (torch.cat(model.logits).argsort(1, descending=True) == targets[:, None]).int().argmax(1)
    assert metrics.top1 == round((ranks < 1).double().mean().item() * 100, 2)
    assert metrics.top5 == round((ranks < 5).double().mean().item() * 100, 2)
    assert len({(ranks < k).sum().item() for k in (1, 4, 5, 6)}) == 4  # so that another k is noticed
    assert (metrics.images, metrics.split) == (len(paths), 'val')
    predicted = torch.cat(model.logits).argmax(1)
    assert predictions == [
        (str(path.relative_to(data_dir / 'val')), target.item(), prediction.item())
        for path, target, prediction in list(zip(paths, targets, predicted))[::4]]


def test_one_channel(data_dir):
    model = Recorder({**CFG, 'input_size': (1, 32, 32)})
    measure_accuracy(model, str(data_dir), 'val', torch.device('cpu'))
    transform = create_transform(**{**CFG, 'mean': (.2,), 'std': (.6,)})
    expected = [transform(Image.open(path).convert('L')) for path in sorted((data_dir / 'val').glob('*/*.png'))]
    torch.testing.assert_close(torch.cat(model.images), torch.stack(expected))


def test_another_size_is_refused(data_dir):
    model = Recorder(CFG)
    model.patch_embed = nn.Identity()
    model.patch_embed.img_size = (24, 24)
    with pytest.raises(ValueError, match=r'input_size .* \(3, 24, 24\), got \(3, 32, 32\)'):
        measure_accuracy(model, str(data_dir), 'val', torch.device('cpu'))


def test_names_with_commas_and_quotes(tmp_path):
    predictions = [('a,b/1.png', 0, 1), ('"c"/2, 3.png', 2, 2), ('d/4.png', 1, 0)]
    write_predictions(tmp_path / 'p.csv', predictions)
    assert (tmp_path / 'p.csv').read_bytes().splitlines()[-1] == b'd/4.png,1,0'
    assert read_predictions(tmp_path / 'p.csv') == predictions
