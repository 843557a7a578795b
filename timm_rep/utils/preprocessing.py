"""Preprocessing of images: its settings, their checks, and those of a model."""
from typing import Any, Dict, Literal, Mapping, Optional, Sequence, Tuple

import torch.nn as nn
from timm.data import resolve_data_config

from .files import parse
from .profiling import model_img_size, model_input_size

# fields of a pretrained_cfg, and of a recipe for train.py, that describe how images are preprocessed
PREPROCESSING = {
    'input_size': Tuple[int, int, int],
    'interpolation': Literal['nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos'],
    'mean': Sequence[float],
    'std': Sequence[float],
    'crop_pct': float,
    'crop_mode': Literal['center', 'squash', 'border'],
}
# other values of these for validation, which timm's validate.py prefers
TEST_PREPROCESSING = ('test_input_size', 'test_pool_size', 'test_crop_pct')
_POSITIVE = ('input_size', 'std', 'crop_pct')
# Pillow's mode of an image, timm's input_img_mode, by number of channels
IMAGE_MODES = {1: 'L', 3: 'RGB'}


def check_preprocessing(values: Mapping[str, Any], source: str = '') -> None:
    """Raise RuntimeError if a setting of :data:`PREPROCESSING` in a mapping is invalid; ``source`` is its file."""
    for name, kind in PREPROCESSING.items():
        value = values.get(name)
        if value is None:
            continue
        where = f'{source}: {name}' if source else name
        parse(kind, value, where)
        if value in ([], ()):
            raise RuntimeError(f'{where} must have one value, or one for each channel, got {value!r}.')
        if name in _POSITIVE and min(value if isinstance(value, (list, tuple)) else [value]) <= 0:
            raise RuntimeError(f'{where} must be positive, got {value!r}.')


def image_config(
        model: nn.Module,
        img_size: Optional[int] = None,
        mean: Optional[Sequence[float]] = None,
        std: Optional[Sequence[float]] = None,
        interpolation: Optional[str] = None,
        crop_pct: Optional[float] = None,
) -> Dict[str, Any]:
    """timm's ``resolve_data_config`` for the size and the number of channels that a model takes.

    If mean or standard deviation in the pretrained_cfg have a different number of channels, each channel gets their
    average, as in timm's scripts.

    Args:
        model: timm model.
        img_size: Height and width, of a model that takes any. Default: the model's, as for the following.
        mean: Mean of each channel, or of all.
        std: Standard deviation of each channel, or of all.
        interpolation: Interpolation of resized images.
        crop_pct: Fraction of the image that is kept.
    """
    input_size = model_input_size(model)
    channels = input_size[0]
    if channels not in IMAGE_MODES:
        raise ValueError(
            f'Expected a model of images with 3 channels (RGB) or 1 (grayscale), as files are read, but '
            f'{type(model).__name__} takes {channels}: use the Python API with your own tensors.')
    given: Dict[str, Any] = {'mean': mean, 'std': std, 'interpolation': interpolation, 'crop_pct': crop_pct}
    given = {name: value for name, value in given.items() if value is not None}
    given['input_size'] = input_size if img_size is None else (channels, img_size, img_size)
    try:
        own = getattr(model, 'pretrained_cfg', None) or {}
        check_preprocessing(own, f'The pretrained_cfg of {type(model).__name__}')
        check_preprocessing(given)
    except RuntimeError as e:
        raise ValueError(str(e)) from None
    built = model_img_size(model)
    if img_size is not None and built not in (None, (img_size, img_size)):
        raise ValueError(
            f'img_size must be that of the model, {built[0]} x {built[1]}, got {img_size}: create it with '
            f'img_size={img_size}.')
    for name in ('mean', 'std'):
        if name in given and len(given[name]) not in (1, channels):
            raise ValueError(
                f'{name} must have 1 or {channels} values for images of {channels} channels, got {given[name]!r}.')
    config = resolve_data_config({'in_chans': channels, **given}, model=model)
    for name in ('mean', 'std'):
        if len(config[name]) != channels:
            config[name] = (sum(config[name]) / len(config[name]),) * channels
    return config
