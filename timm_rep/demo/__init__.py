"""Demo: a RePaFormer, a RepOpt-VGG and a converted ViT, trained on small real images within minutes."""
from pathlib import Path
from typing import NamedTuple, Union

import torch

from timm_rep.utils.atomic import check_writable, replacing_files
from timm_rep.utils.files import StrPath

from .picture import draw
from .repa import RePaResult, check_replaceable, run_repa, save_folded
from .repopt import RepOptResult, run_repopt
from .training import load_split

__all__ = ['DemoResult', 'run_demo']

_USAGE = """\
import timm, timm_rep; from PIL import Image; from timm.data import create_transform, resolve_model_data_config
model = timm.create_model({model!r}, pretrained=True).eval()
print(model(create_transform(**resolve_model_data_config(model))(Image.open({digit!r})).unsqueeze(0)).argmax().item())"""


class DemoResult(NamedTuple):
    """Results of :func:`run_demo`.

    Attributes:
        repa: Results of the first and the third part.
        repopt: Results of the second part.
        model_folder: Folder with model.safetensors and config.json of the folded model.
        picture: Path of the picture of the results.
        usage: Three lines of Python that load and run the folded model.
    """
    repa: RePaResult
    repopt: RepOptResult
    model_folder: Path
    picture: Path
    usage: str


def _usable(device: Union[str, torch.device]) -> torch.device:
    try:
        device = torch.device(device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:  # torch without CUDA raises AssertionError
        raise RuntimeError(
            f'device must be one that torch can use, got {str(device)!r}: {str(e).splitlines()[0]}') from e
    return device


def _usable_output(output: StrPath) -> Path:
    output = Path(output).resolve()
    for folder in (output, output / 'model'):
        check_writable(folder)
    for file in ('demo.png', 'digit.png', 'model/model.safetensors', 'model/config.json'):
        if (output / file).is_dir():
            raise OSError(f'{str(output / file)!r} must not be a folder: remove it, or name another output folder.')
    check_replaceable(output / 'model')
    return output


def run_demo(
        output: StrPath = 'timm-rep-demo',
        device: Union[str, torch.device] = 'cpu',
        seed: int = 0,
        epochs: int = 10,
) -> DemoResult:
    """Train, fold and compare small models on handwritten digits.

    The first part trains a RePa-DeiT and a plain ViT of its size, folds the RePa-DeiT and compares the three. The
    second part trains a deep stack of plain convolutions at four learning rates with SGD, with SGD from the kernels
    that RepSGD starts from, and with RepSGD, and compares both optimizers with the multi-branch network step by step.
    The third part converts the plain ViT by :func:`timm_rep.convert_to_repa`, from its weights and training images,
    without labels or training.

    Writes demo.png, digit.png (a validation image) and the folded model. Seeds the random number generators of Python,
    NumPy and torch; the same seed, machine and number of threads give the same weights.

    Args:
        output: Folder to write to, created if it does not exist.
        device: Device for training and measurements.
        seed: Seed for the split, the initialization and the order of the images, 0 to 2 ** 32 - 1.
        epochs: Training epochs of the first part, at least 1; the second part trains half as many.

    Returns:
        The results and the paths of the files.

    Raises:
        OSError: The output folder is not writable.
        ModuleNotFoundError: scikit-learn or matplotlib is not installed.
        RuntimeError: The device is not usable.
        ValueError: ``epochs`` or ``seed`` is out of range.
    """
    if epochs < 1:
        raise ValueError(f'epochs must be an integer >= 1, got {epochs}.')
    if not 0 <= seed < 2 ** 32:
        raise ValueError(f'seed must be from 0 to 2 ** 32 - 1, got {seed}.')
    device = _usable(device)
    try:
        import matplotlib  # noqa: F401

        train_set, val_set = load_split(seed)
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f'The demo requires {e.name}: pip install matplotlib scikit-learn.') from e
    output = _usable_output(output)

    repa = run_repa(train_set, val_set, device, seed, epochs)
    repopt = run_repopt(train_set, val_set, device, seed, (epochs + 1) // 2)
    model_folder = output / 'model'
    result = DemoResult(
        repa=repa,
        repopt=repopt,
        model_folder=model_folder,
        picture=output / 'demo.png',
        usage=_USAGE.format(model=f'local-dir:{model_folder}', digit=str(output / 'digit.png')),
    )
    save_folded(repa.folded, model_folder)
    with replacing_files(output) as draft:
        val_set.images[0].save(draft / 'digit.png')
    draw(result, result.picture)
    return result
