"""The main job at the size of a coffee break: train a RePaFormer on real images, fold it, compare.

The images are scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, which come with that package.
"""
import os
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple, Union

import timm
import torch
import torch.nn as nn
from PIL import Image
from timm.data import create_loader, resolve_model_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, accuracy, random_seed, reparameterize_model
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from timm_rep.atomic import check_writable, replacing_files
from timm_rep.profiling import count_macs, count_params, measure_throughput

__all__ = ['DemoResult', 'run_demo']

# a ViT that two CPU cores train in a minute; the mean over all tokens learns faster on so few images than a class token
_MODEL_ARGS = dict(patch_size=4, embed_dim=128, depth=4, num_heads=4, global_pool='avg', img_size=16, in_chans=1)
_DATA = dict(tag='digits', input_size=(1, 16, 16), num_classes=10, mean=(0.5,), std=(0.5,), crop_pct=1.0)
_BATCH_SIZE = 32
_TIMED_BATCH_SIZE = 256

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
        model_folder: The folded model, model.safetensors and config.json.
        picture: The picture of all this.
        usage: Three lines of Python that load and use the folded model.
    """
    rows: Dict[str, Dict[str, float]]
    logits_difference: float
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


class _Images(Dataset):
    def __init__(self, images, targets):
        self.images = [Image.fromarray(image) for image in images]
        self.targets = targets
        self.transform = None  # timm's loader sets it

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), int(self.targets[index])


def _digits(seed: int) -> Tuple[_Images, _Images]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype('uint8')
    parts = train_test_split(images, digits.target, test_size=0.2, stratify=digits.target, random_state=seed)
    return _Images(parts[0], parts[2]), _Images(parts[1], parts[3])


def _loader(dataset: _Images, model: nn.Module, is_training: bool) -> DataLoader:
    augmentation = dict(hflip=0., color_jitter=0., scale=(0.85, 1.), ratio=(0.9, 1.1)) if is_training else {}
    data_config = resolve_model_data_config(model)
    return create_loader(
        dataset,
        input_size=data_config['input_size'],
        interpolation=data_config['interpolation'],
        mean=data_config['mean'],
        std=data_config['std'],
        crop_pct=data_config['crop_pct'],
        batch_size=_BATCH_SIZE if is_training else _TIMED_BATCH_SIZE,
        is_training=is_training,
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
        **augmentation,
    )


def _create(name: str, seed: int, device: torch.device, **kwargs) -> nn.Module:
    random_seed(seed)
    return timm.create_model(name, pretrained_cfg_overlay=_DATA, **_MODEL_ARGS, **kwargs).to(device)


def _train(name: str, model: nn.Module, loader: DataLoader, epochs: int, device: torch.device) -> None:
    optimizer = create_optimizer_v2(model, opt='adamw', lr=2e-3, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched='cosine',
        num_epochs=epochs,
        warmup_epochs=1,
        warmup_lr=1e-5,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    loss_fn = LabelSmoothingCrossEntropy(0.1)
    losses = AverageMeter()
    updates = 0
    model.train()
    with tqdm(total=epochs * len(loader), desc=f'training {name}', unit='step') as progress:
        for _ in range(epochs):
            losses.reset()
            for images, targets in loader:
                scheduler.step_update(updates)
                loss = loss_fn(model(images.to(device)), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                losses.update(loss.item(), len(images))
                progress.update()
                progress.set_postfix(loss=f'{losses.avg:.3f}', refresh=False)


@torch.inference_mode()
def _predict(model: nn.Module, loader: DataLoader, device: torch.device) -> Tuple[torch.Tensor, float]:
    model.eval()
    logits, targets = zip(*((model(images.to(device)).cpu(), targets) for images, targets in loader))
    logits, targets = torch.cat(logits), torch.cat(targets)
    return logits, accuracy(logits, targets)[0].item()


def _save_model(model: nn.Module, folder: Path) -> None:
    # named here, though newer timm finds them by itself
    model_args = dict(_MODEL_ARGS, reparameterized=True)
    with replacing_files(folder) as temporary:
        save_for_hf(model.cpu(), str(temporary), model_args=model_args, safe_serialization=True)


def _plot(result: DemoResult, samples: _Images, predictions: List[int], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout='constrained')
    top, bottom = figure.subfigures(2, height_ratios=(2, 1))
    colors = ('#9aa5b1', '#7c9ed9', '#2f6fde')
    panels = (
        ('accuracy', 'validation accuracy (%)', 1., '{:.1f}'),
        ('params', 'parameters (thousands)', 1e-3, '{:.0f}'),
        ('macs', 'MACs per image (millions)', 1e-6, '{:.2f}'),
        ('throughput', 'images per second', 1., '{:,.0f}'),
    )
    for axes, (key, title, unit, form) in zip(top.subplots(1, len(panels)), panels):
        bars = axes.bar(list(result.rows), [row[key] * unit for row in result.rows.values()], color=colors)
        axes.bar_label(bars, fmt=form.format)
        axes.set_title(title, fontsize=10)
        axes.tick_params('x', labelsize=8)
        axes.margins(y=0.12)
        axes.spines[['top', 'right']].set_visible(False)
    bottom.suptitle(
        'Validation images and what the folded model reads '
        f'(logits differ by {result.logits_difference:.1e} of the largest, before against after folding)', fontsize=10)
    for axes, image, target, prediction in zip(
            bottom.subplots(1, len(predictions)), samples.images, samples.targets, predictions):
        axes.imshow(image, cmap='gray_r')
        axes.set_title(str(prediction), fontsize=10, color='black' if prediction == target else 'red')
        axes.axis('off')
    with replacing_files(path.parent) as temporary:
        figure.savefig(temporary / path.name, dpi=120)


def run_demo(
        output: Union[str, os.PathLike] = 'timm-rep-demo',
        device: Union[str, torch.device] = 'cpu',
        seed: int = 0,
        epochs: int = 12,
) -> DemoResult:
    """Train a small RePa-DeiT and the plain ViT of its size on handwritten digits, fold the former, compare.

    Writes demo.png, digit.png (a validation image) and the folded model into the output folder. Seeds the random
    number generators of Python, NumPy and torch; the same seed, machine and thread count give the same weights.

    Args:
        output: Folder to write to, created if need be.
        device: Device to train and measure on.
        seed: Seed of the split, the initialization and the augmentation.
        epochs: Epochs of training.

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

        train_set, val_set = _digits(seed)
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{e.name} is missing, the demo needs it: pip install 'timm-rep[demo]'.") from e
    output = _usable_output(output)

    models = {}
    for label, name in (('plain ViT', 'deit_tiny_patch16_224'), ('RePa-DeiT', 'repa_deit_tiny')):
        models[label] = _create(name, seed, device)
        _train(label, models[label], _loader(train_set, models[label], is_training=True), epochs, device)
    models['RePa-DeiT, folded'] = reparameterize_model(models['RePa-DeiT'])

    rows: Dict[str, Dict[str, float]] = {}
    logits = {}
    for label, model in models.items():
        val_loader = _loader(val_set, model, is_training=False)
        logits[label], top1 = _predict(model, val_loader, device)
        rows[label] = dict(accuracy=top1, params=count_params(model), macs=count_macs(model).total)
    before, after = logits['RePa-DeiT'], logits['RePa-DeiT, folded']
    batch = next(iter(val_loader))[0].to(device)
    for label, throughput in measure_throughput(models, batch).items():
        rows[label]['throughput'] = throughput

    model_folder = output / 'model'
    result = DemoResult(
        rows=rows,
        logits_difference=((after - before).abs().max() / before.abs().max()).item(),
        model_folder=model_folder,
        picture=output / 'demo.png',
        usage=_USAGE.format(model=f'local-dir:{model_folder}', digit=str(output / 'digit.png')),
    )
    _save_model(models['RePa-DeiT, folded'], model_folder)
    with replacing_files(output) as temporary:
        val_set.images[0].save(temporary / 'digit.png')
    _plot(result, val_set, after[:16].argmax(-1).tolist(), result.picture)
    return result

