"""Images of a folder for a model."""
import pytest
import timm
import torch
from PIL import Image

from timm_rep.utils.data import read_images


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
