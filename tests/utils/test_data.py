"""Images of a folder for a model."""
import re
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from timm.data import add_img_extensions, dataset_factory, del_img_extensions
from torchvision.transforms.functional import pil_to_tensor

from timm_rep.utils.data import ImageFolder, Images, open_dataset, read_images
from timm_rep.utils.preprocessing import image_config


@pytest.mark.parametrize('count', [1, 7, 11, 19, 20, 30])
def test_evenly_spaced_images(count, tmp_path):
    """As many as asked for, or all, and none far from where it should be: 20 images whose brightness says which."""
    for i in range(20):
        folder = tmp_path / 'val' / str(i // 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (8, 8), (12 * i,) * 3).save(folder / f'{i}.png')
    model = timm.create_model('vit_tiny_patch16_224', img_size=16, embed_dim=24, depth=1, num_heads=2)
    model.pretrained_cfg = {**model.pretrained_cfg, 'mean': (0.,) * 3, 'std': (1.,) * 3}
    images = read_images(model, str(tmp_path), 'val', count)
    found = (images.mean((1, 2, 3)) * 255 / 12).round()
    n = min(count, 20)
    assert found.tolist() == [20 * i // n for i in range(n)]
    assert images.shape == torch.Size((n, 3, 16, 16))


@pytest.mark.parametrize('name', ['b.webp', 'b.BMP', 'b.tif', 'b.gif'])
def test_types_that_timm_skips(tmp_path, name):
    """They are an error; other files are not, and a type is read once timm knows it."""
    for folder in 'cats', 'dogs':
        (tmp_path / 'val' / folder).mkdir(parents=True)
        Image.new('RGB', (8, 8)).save(tmp_path / 'val' / folder / 'a.png')
        (tmp_path / 'val' / folder / 'notes.txt').write_text('x')
        (tmp_path / 'val' / folder / 'boxes.json').write_text('{}')
    assert len(ImageFolder(str(tmp_path), 'val')) == 2
    Image.new('RGB', (8, 8)).save(tmp_path / 'val' / 'dogs' / name)
    with pytest.raises(ValueError, match=re.escape(name)):
        ImageFolder(str(tmp_path), 'val')
    extension = name[1:].lower()
    add_img_extensions(extension)
    try:
        assert len(ImageFolder(str(tmp_path), 'val')) == 3
    finally:
        del_img_extensions(extension)


@pytest.mark.parametrize('mode,name', [('I;16', 'a.png'), ('I', 'a.tif'), ('F', 'a.tif')])
def test_images_of_more_than_8_bits(tmp_path, mode, name):
    """Pillow makes nearly all of their values white."""
    (tmp_path / 'val' / '0').mkdir(parents=True)
    Image.new(mode, (8, 8), 1000).save(tmp_path / 'val' / '0' / name)
    add_img_extensions('.tif')
    try:
        with pytest.raises(ValueError, match=f'{name}.*8 bits'):
            ImageFolder(str(tmp_path), 'val')[0]
    finally:
        del_img_extensions('.tif')


def test_no_images(tmp_path):
    (tmp_path / 'val' / '0').mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match='Found 0 images'):
        ImageFolder(str(tmp_path), 'val')


@pytest.fixture(scope='module')
def colours(tmp_path_factory):
    """Folders of images of one colour each: train/CLASS/IMAGE and val/CLASS/IMAGE, three classes."""
    root = tmp_path_factory.mktemp('colours')
    for split in 'train', 'val':
        for i, colour in enumerate(((200, 0, 0), (0, 200, 0), (10, 20, 200))):
            (root / split / str(i)).mkdir(parents=True)
            Image.new('RGB', (16, 16), colour).save(root / split / str(i) / '0.png')
    return root


def vit(in_chans, **kwargs):
    model = timm.create_model(
        'vit_tiny_patch16_224', in_chans=in_chans, img_size=16, embed_dim=24, depth=1, num_heads=2, num_classes=3)
    model.pretrained_cfg = {**model.pretrained_cfg, 'mean': (.1, .2, .6), 'std': (.2, .3, .7), **kwargs}
    return model


@pytest.mark.parametrize('kwargs, given, mean, std', [
    ({}, {}, .3, .4),
    ({}, dict(mean=(.5,), img_size=16), .5, .4),
    (dict(mean=(.25,), std=(.5,)), {}, .25, .5),
])
def test_models_of_one_channel(colours, kwargs, given, mean, std):
    """Grey images, normalized as timm's scripts do it: by the average over the channels of the pretrained_cfg."""
    model = vit(1, **kwargs)
    files = sorted((colours / 'val').glob('*/*.png'))
    grey = torch.stack([pil_to_tensor(Image.open(path).convert('L')) for path in files]) / 255
    images = Images(model, str(colours), **given)
    assert images.config['input_size'] == (1, 16, 16)
    expected = (grey - mean) / std
    (found, _), = images.validation()
    torch.testing.assert_close(found, expected)
    if not given:
        torch.testing.assert_close(read_images(model, str(colours), 'val', 3), expected)
    for loader in (images.calibration(3), images.training()):
        (found, targets), = loader
        torch.testing.assert_close(found, expected[targets])
    with torch.no_grad():
        assert model(found).shape == (3, 3)


def test_classes_in_the_order_of_the_model(colours):
    """The names that a model was trained with say which class a folder is; other names, of other words, do not."""
    order = ['2', '0', '1']
    for names, expected in (order, order), (('cat', 'dog', 'owl'), ['0', '1', '2']), (['0', '1'], ['0', '1', '2']):
        images = Images(vit(3, label_names=names), str(colours))
        assert images.classes == expected
        for loader in images.validation(), images.calibration(3):
            (found, targets), = loader
            # the colour that prevails in the class of each name
            colours_found = found.mean((2, 3)).argmax(1).tolist()
            assert [expected[target] for target in targets.tolist()] == [str(colour) for colour in colours_found]


@pytest.mark.parametrize('kwargs', [{}, dict(dynamic_img_size=True)])
def test_a_size_that_the_model_was_not_built_for(kwargs):
    """It would be lost in config.json, where timm writes the size of the model."""
    model = timm.create_model('vit_tiny_patch16_224', img_size=32, embed_dim=24, depth=1, num_heads=2, **kwargs)
    with pytest.raises(ValueError, match=r'img_size must be .* 32 x 32, got 48: create it with img_size=48'):
        image_config(model, img_size=48)
    assert image_config(model, img_size=32)['input_size'] == (3, 32, 32)
    assert image_config(timm.create_model('resnet10t'), img_size=48)['input_size'] == (3, 48, 48)


def test_other_channels_are_refused(colours):
    with pytest.raises(ValueError, match='VisionTransformer takes 2:'):
        Images(vit(2), 'nowhere')
    with pytest.raises(ValueError, match='VisionTransformer takes 4:'):
        read_images(vit(4), 'nowhere', 'val', 1)
    with pytest.raises(ValueError, match=r'mean must have 1 .* for images of 1 channels'):
        Images(vit(1), str(colours), mean=(.1, .2, .3))


@pytest.mark.parametrize('given', [
    dict(interpolation='zz'), dict(crop_pct=-1), dict(crop_pct='x'), dict(std=(-1., 1., 1.)), dict(mean='x'),
    dict(mean=()), dict(std=()), dict(img_size=0), dict(img_size=16.)], ids=str)
def test_wrong_preprocessing(colours, given):
    with pytest.raises(ValueError, match='input_size' if 'img_size' in given else next(iter(given))):
        Images(vit(3), str(colours), **given)
    with pytest.raises(TypeError, match='foo'):
        Images(vit(3), str(colours), foo=1)


def test_classes_of_both_splits(colours, tmp_path):
    """Labels are the positions of the classes' names: other names give other labels."""
    (tmp_path / 'val').symlink_to(colours / 'val')
    for i, name in enumerate('12x'):
        (tmp_path / 'train' / name).mkdir(parents=True)
        Image.new('RGB', (16, 16)).save(tmp_path / 'train' / name / f'{i}.png')
    with pytest.raises(ValueError, match=r"'train'.*'val'.*0, x"):
        Images(vit(3), str(tmp_path))


@pytest.mark.parametrize('name', ['foo', 'torhc/cifar10', '/cifar10'])
def test_a_dataset_without_a_known_prefix(colours, name):
    """timm would open the folder of images."""
    with pytest.raises(ValueError, match=f"torch, .*got '{name}'"):
        open_dataset(name, str(colours), 'val')


@pytest.mark.parametrize('split, train', [
    ('train', True), ('training', True), ('validation', False), ('test', False),
    ('Train', None), ('trian', None), ('train[:4]', None), ('validation[:50%]', None), ('', None),
], ids=str)
def test_splits_of_torchvision(monkeypatch, split, train):
    """timm takes every name that it does not know as the validation images."""
    monkeypatch.setitem(dataset_factory._TORCH_BASIC_DS, 'mine', SimpleNamespace)
    if train is None:
        with pytest.raises(ValueError, match=re.escape(repr(split))):
            open_dataset('torch/mine', '.', split)
    else:
        assert open_dataset('torch/mine', '.', split).train == train


@pytest.mark.parametrize('name', ['', 'torch/image_folder', 'Torch/folder'])
def test_splits_of_folders(colours, name):
    """timm takes every folder as a class if there is none for the split, and all images of the folder of a slice."""
    assert len(open_dataset(name, str(colours), 'val')) == len(list((colours / 'val').rglob('*.png')))
    with pytest.raises(FileNotFoundError, match='trian'):
        open_dataset(name, str(colours), 'trian')
    with pytest.raises(ValueError, match='slice'):
        open_dataset(name, str(colours), 'val[:2]')


@pytest.mark.parametrize('kwargs', [dict(features_only=True), dict(num_classes=0)], ids=str)
def test_models_without_classes(colours, kwargs):
    with pytest.raises(ValueError, match=r'classifier.* num_classes'):
        Images(timm.create_model('resnet18', **kwargs), str(colours))


def test_a_model_that_timm_did_not_create(colours):
    model = torch.nn.Linear(3, 3)
    model.num_classes = 3
    with pytest.raises(ValueError, match='Linear has none'):
        Images(model, str(colours))
