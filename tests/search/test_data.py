import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, IterableImageDataset

from timm_rep.search import DeviceLoader, create_search_dataset, create_search_loader
from timm_rep.utils.labels import class_names

MEAN, STD = (torch.tensor(x)[:, None, None] for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """Folders of 12 x 10 images, every one its own, three classes of seven."""
    root = tmp_path_factory.mktemp('images')
    g = torch.Generator().manual_seed(0)
    for label in range(3):
        folder = root / 'train' / str(label)
        folder.mkdir(parents=True)
        for i in range(7):
            pixels = torch.randint(0, 256, (12, 10, 3), generator=g, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f'{i}.png')
    return str(root)


def both(root, is_training, batch_size=5):
    """The loader that decodes in every epoch, and the one that holds the images."""
    datasets = [create_search_dataset('', root, 'train', 8, is_training, raw=raw) for raw in (False, True)]
    return create_search_loader(datasets[0], batch_size, is_training), DeviceLoader(
        datasets[1], batch_size, is_training)


def test_evaluation_equals_the_plain_loader(root):
    plain, preloaded = both(root, is_training=False)
    assert len(plain) == len(preloaded) == 5
    for (a, x), (b, y) in zip(plain, preloaded, strict=True):
        torch.testing.assert_close(b, a)
        assert torch.equal(x, y)
        assert b.is_contiguous(memory_format=torch.channels_last)


def crops(image):
    """All that random crops and flips make of an image (3, H, W), by the definition: a black border of 4 pixels."""
    height, width = image.shape[1:]
    padded = torch.zeros(3, height + 8, width + 8)
    padded[:, 4:-4, 4:-4] = image
    found = []
    for top in range(9):
        for left in range(9):
            crop = padded[:, top:top + height, left:left + width]
            found += [(crop - MEAN) / STD, (crop.flip(2) - MEAN) / STD]
    return torch.stack(found)


def test_training_crops_and_flips(root):
    plain, preloaded = both(root, is_training=True)
    assert len(plain) == len(preloaded) == 4  # the last image is left out
    dataset = create_search_dataset('', root, 'train', 8, False, raw=True)
    possible = {i: (crops(image / 255), target) for i, (image, target) in enumerate(dataset)}
    torch.manual_seed(0)
    which = torch.zeros(162)
    for loader in (plain, preloaded):  # the test's own reference holds for torchvision's transforms too
        for _ in range(3 if loader is preloaded else 1):
            seen = []
            for images, targets in loader:
                for image, target in zip(images, targets, strict=True):
                    matches = [
                        (i, (x - image).abs().flatten(1).amax(1).argmin().item()) for i, (x, y) in possible.items()
                        if y == target and (x - image).abs().flatten(1).amax(1).min() < 1e-4]
                    assert len(matches) == 1
                    seen.append(matches[0][0])
                    which[matches[0][1]] += loader is preloaded
            assert len(set(seen)) == len(seen) == 20
    assert (which > 0).sum() > 40  # of 60 draws out of 162
    assert which[::2].sum() > 15  # flipped or not
    assert which[1::2].sum() > 15
    assert which.view(9, 9, 2).sum((1, 2)).min() > 0  # every row and column
    assert which.view(9, 9, 2).sum((0, 2)).min() > 0


def test_randomness_depends_on_the_seed_only(root):
    _, loader = both(root, is_training=True)

    def epoch(seed):
        torch.manual_seed(seed)
        return [torch.cat(x) for x in zip(*loader)]

    for a, b in zip(epoch(0), epoch(0)):
        assert torch.equal(a, b)
    assert not torch.equal(epoch(0)[0], epoch(1)[0])


def test_processes_share_the_images(root, monkeypatch):
    """In training, images are shuffled and divided again in each epoch; in validation each process sees all of them."""
    orders = []
    for rank in range(2):
        for name, value in (('is_initialized', True), ('get_world_size', 2), ('get_rank', rank)):
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
        for loader in both(root, is_training=True):
            for epoch in range(2):
                loader.sampler.set_epoch(epoch)
                orders.append(list(loader.sampler))
        assert all(list(loader.sampler) == list(range(21)) for loader in both(root, is_training=False))
    first, second = orders[:4], orders[4:]
    assert first[:2] == first[2:]  # both loaders alike
    for ours, theirs in zip(first, second):
        assert len({*ours, *theirs}) == len(ours) + len(theirs) == 20
        assert ours != sorted(ours)
    assert first[0] != first[1]


def test_a_data_set_of_the_hub(root, tmp_path, monkeypatch):
    """timm's 'hfds/', here on a folder instead of a repository; the root is where it keeps its cache."""
    pytest.importorskip('datasets', reason='timm opens hfds/ with the datasets package')
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    name = f'hfds/{root}'
    dataset = create_search_dataset(name, str(tmp_path / 'cache'), 'train', 8, False)
    folder = create_search_dataset('', root, 'train', 8, False)
    assert len(dataset) == len(folder) == 21
    for (image, target), (other_image, other_target) in zip(dataset, folder):
        assert torch.equal(image, other_image)
        assert target == other_target
    assert class_names(dataset) == ['0', '1', '2']


def test_a_stream_of_images(monkeypatch):
    """timm's 'wds/', 'tfds/' and 'hfids/' have no index."""
    stream = IterableImageDataset('.', reader=SimpleNamespace(), split='train')
    monkeypatch.setattr('timm_rep.search.data.open_dataset', lambda *args, **kwargs: stream)
    with pytest.raises(ValueError, match=r'wds/x.* as a stream'):
        create_search_dataset('wds/x', 'root', 'train', 8, False)


def test_class_names(root):
    assert class_names(create_search_dataset('', root, 'train', 8, True)) == ['0', '1', '2']
    assert class_names(torch.utils.data.TensorDataset(torch.zeros(1))) is None


@pytest.mark.parametrize('preload', [False, True])
def test_an_image_that_cannot_be_decoded(root, tmp_path, preload):
    """An error, where timm would take the next image and its class."""
    shutil.copytree(root, tmp_path / 'images')
    (tmp_path / 'images' / 'train' / '1' / '3.png').write_bytes(b'no image')
    dataset = create_search_dataset('', str(tmp_path / 'images'), 'train', 8, True, raw=preload)
    with pytest.raises(ValueError, match=r'1/3\.png'):
        list(DeviceLoader(dataset, 5, True) if preload else create_search_loader(dataset, 21, True))


def test_training_without_crops(root):
    dataset = create_search_dataset('', root, 'train', 8, True, raw=True)
    whole = torch.cat([images for images, _ in DeviceLoader(dataset, 7, is_training=False)])
    loader = DeviceLoader(dataset, 7, is_training=True, crop=False)
    torch.manual_seed(0)
    found = [
        [(whole == x).flatten(1).all(1).nonzero().flatten().tolist() for x in (image, image.flip(2))]
        for images, _ in loader for image in images]
    assert sorted(same + mirrored for same, mirrored in found) == [[i] for i in range(21)]
    assert 3 < sum(len(mirrored) for _, mirrored in found) < 18
