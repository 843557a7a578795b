"""The package's two main jobs at the size of a coffee break, on real images."""
import os
from pathlib import Path
from typing import Dict, NamedTuple, Union

import torch

from timm_rep.utils.atomic import check_writable, replacing_files

from .picture import draw
from .repa import run_repa, save_folded
from .repopt import RepOptResult, run_repopt
from .training import load_split

__all__ = ['DemoResult', 'run_demo']

_USAGE = """\
import timm, timm_rep; from PIL import Image; from timm.data import create_transform, resolve_model_data_config
model = timm.create_model({model!r}, pretrained=True).eval()
print(model(create_transform(**resolve_model_data_config(model))(Image.open({digit!r})).unsqueeze(0)).argmax().item())"""


class DemoResult(NamedTuple):
    """What the demo measured.

    Attributes:
        rows: For each of the plain ViT, the RePa model and the folded RePa model: accuracy (percent of the validation
            images), params, macs (of one image), throughput (images per second).
        logits_difference: Largest difference between the logits before and after folding, relative to the largest.
        repopt: What the second part measured, RepSGD against SGD.
        model_folder: The folded model, model.safetensors and config.json.
        picture: The picture of all this.
        usage: Three lines of Python that load and use the folded model.
    """
    rows: Dict[str, Dict[str, float]]
    logits_difference: float
    repopt: RepOptResult
    model_folder: Path
    picture: Path
    usage: str


def _usable(device: Union[str, torch.device]) -> torch.device:
    try:
        device = torch.device(device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:  # torch builds without CUDA assert
        raise RuntimeError(f'cannot use the device {str(device)!r}: {str(e).splitlines()[0]}') from e
    return device


def _usable_output(output: Union[str, os.PathLike]) -> Path:
    output = Path(output).resolve()
    for folder in (output, output / 'model'):
        check_writable(folder)
    for file in ('demo.png', 'digit.png', 'model/model.safetensors', 'model/config.json'):
        if (output / file).is_dir():
            raise OSError(f'cannot write to the output folder {str(output)!r}: {file} in it is a folder.')
    return output


def run_demo(
        output: Union[str, os.PathLike] = 'timm-rep-demo',
        device: Union[str, torch.device] = 'cpu',
        seed: int = 0,
        epochs: int = 12,
) -> DemoResult:
    """Train a small RePa-DeiT and the plain ViT of its size on handwritten digits, fold the former, compare.

    Then train a deep stack of plain convolutions with RepSGD and with SGD.

    Writes demo.png, digit.png (a validation image) and the folded model into the output folder. Seeds the random
    number generators of Python, NumPy and torch; the same seed, machine and thread count give the same weights.

    Args:
        output: Folder to write to, created if need be.
        device: Device to train and measure on.
        seed: Seed of the split, the initialization and the augmentation.
        epochs: Epochs of training of the first part; the second takes half as many.

    Raises:
        OSError: The output folder cannot be written.
        ModuleNotFoundError: scikit-learn or matplotlib is missing.
        RuntimeError: The device cannot be used.
        ValueError: The number of epochs or the seed is out of range.
    """
    if epochs < 1:
        raise ValueError(f'epochs is the number of passes over the training images, at least 1, got {epochs}.')
    if not 0 <= seed < 2 ** 32:
        raise ValueError(f'seed is a number from 0 to 2 ** 32 - 1, got {seed}.')
    device = _usable(device)
    try:
        import matplotlib  # noqa: F401

        train_set, val_set = load_split(seed)
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{e.name} is missing, the demo needs it: pip install 'timm-rep[demo]'.") from e
    output = _usable_output(output)

    repa = run_repa(train_set, val_set, device, seed, epochs)
    repopt = run_repopt(train_set, val_set, device, seed, (epochs + 1) // 2)
    model_folder = output / 'model'
    result = DemoResult(
        rows=repa.rows,
        logits_difference=repa.logits_difference,
        repopt=repopt,
        model_folder=model_folder,
        picture=output / 'demo.png',
        usage=_USAGE.format(model=f'local-dir:{model_folder}', digit=str(output / 'digit.png')),
    )
    save_folded(repa.folded, model_folder)
    with replacing_files(output) as temporary:
        val_set.images[0].save(temporary / 'digit.png')
    draw(result, val_set, repa.predictions[:16].tolist(), result.picture)
    return result
