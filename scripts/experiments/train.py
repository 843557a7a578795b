"""Procedure ``train`` and the named trainings and searches of all procedures."""
import copy
import statistics
import time
from functools import partial
from typing import Any, Dict, List, Mapping, NamedTuple

import timm
import torch
import torch.nn as nn
from experiments import models  # noqa: F401, registers them
from experiments.workspace import Images, Workspace, num_classes
from timm.layers import set_fused_attn
from timm.optim import create_optimizer_v2, muon
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed

from timm_rep import Scales, calibrate_batchnorm, hyper_search, mimetic_init_, weight_select_init
from timm_rep.convert import folded_copy
from timm_rep.utils.checkpoints import read_training_state, write_training_state
from timm_rep.utils.profiling import count_macs, count_params
from timm_rep.utils.training import evaluate, fit

__all__ = ['COMPARISON', 'DEFAULTS', 'PRETRAINED', 'SEARCH', 'build', 'compare', 'searched', 'train', 'trained']

_DATA = dict(
    data='folders',         # or 'digits'
    img_size=32,
    num_classes=10,
    classes=None,           # only these, numbered from 0
    train_images=None,      # as many of the training split, evenly spaced
    holdout=0,              # as many of them to measure the accuracy 'held-out' on, instead of training
)
# settings of a search and their defaults
SEARCH = dict(
    _DATA, model=None, model_args={}, epochs=8, warmup_epochs=1, batch_size=128, lr=0.1, weight_decay=4e-5,
    smoothing=0.1, amp=False, channels_last=False, seed=0)
# settings of a comparison of two searches and their defaults
COMPARISON = dict(scales=None, other=None, seed=0)
# settings of weights from elsewhere and their defaults; ``file`` is in the folder of pretrained weights
PRETRAINED = dict(model=None, model_args={}, file=None)
# settings of a training and their defaults
DEFAULTS = dict(
    SEARCH,
    opt='sgd',
    opt_args={},            # arguments of timm's create_optimizer_v2
    warmup_lr=0.,
    clip_grad=None,
    scales=None,            # argument of create_model, or a search
    average_scales=False,   # over the channels
    start=None,             # 'mimetic', or {teacher: a training, arguments of weight_select_init, calibrate: images}
    teacher=None,           # a training to distil from, instead of the labels
)


class Trained(NamedTuple):
    """A finished training.

    Attributes:
        model: The model in eval mode.
        curve: Top-1 accuracy after each epoch, in percent.
        minutes: CPU time of the training, on a GPU wall-clock time.
        columns: Further columns of the row.
    """
    model: nn.Module
    curve: List[float]
    minutes: float
    columns: Dict[str, Any]


def _clock(device: torch.device) -> float:
    return time.process_time() if device.type == 'cpu' else time.monotonic()


def _amp_dtype(settings: Mapping[str, Any]):
    return torch.bfloat16 if settings['amp'] else None


def searched(settings: Mapping[str, Any], workspace: Workspace) -> Scales:
    """Scales of a Hyper-Search, resumed after its last epoch; loaded if it is finished."""
    with workspace.training_folder(settings) as folder:
        path = folder / 'scales.safetensors'
        if not path.is_file():
            images = Images(workspace, settings, workspace.device)
            begun, resumed = _clock(workspace.device), (folder / 'search.pth').exists()
            scales = hyper_search(
                settings['model'], images.training(), images.validation(),
                **{k: settings[k] for k in ('epochs', 'lr', 'weight_decay', 'smoothing', 'channels_last', 'seed')},
                warmup_epochs=min(settings['warmup_epochs'], settings['epochs'] - 1),
                device=workspace.device, amp_dtype=_amp_dtype(settings), checkpoint=folder / 'search.pth', resume=True,
                progress=False, num_classes=num_classes(settings), **settings['model_args'])
            minutes = {} if resumed else {'minutes': f'{(_clock(workspace.device) - begun) / 60:.1f}'}
            Scales(scales, {**scales.metadata, **minutes}, scales.history).save(path)
            (folder / 'search.pth').unlink()
        return Scales.load(path)


def _figures(scales: Scales, settings: Mapping[str, Any]) -> Dict[str, float]:
    """Columns of a search: accuracy of the searched network, minutes of a search that was not interrupted, and the mean
    relative change of the scales of the convolutions, in percent.
    """
    names = {'top-1': 'accuracy', 'minutes': 'minutes'}
    columns = {name: float(scales.metadata[key]) for name, key in names.items() if key in scales.metadata}
    start = Scales.initial(build(settings, 'init'))
    moved = scales.compare(start)
    columns['moved %'] = round(100 * statistics.mean(moved[branch].relative_change for branch in start.branches()), 2)
    return columns


def build(settings: Mapping[str, Any], scales=None, **kwargs) -> nn.Module:
    """Create the model of a training, before weights are selected or loaded.

    Args:
        settings: Settings of the training.
        scales: Argument of create_model, if not None.
        kwargs: Further arguments of create_model.
    """
    if scales is not None:
        kwargs['scales'] = scales
    return timm.create_model(
        settings['model'], num_classes=num_classes(settings), **settings['model_args'], **kwargs)


def _start(model: nn.Module, settings: Mapping[str, Any], workspace: Workspace, images: Images) -> None:
    """Initialize a model by the setting ``start``."""
    if settings['start'] == 'mimetic':
        mimetic_init_(model)
    elif settings['start'] is not None:
        args = dict(settings['start'])
        count = args.pop('calibrate', 0)
        weight_select_init(model, trained(args.pop('teacher'), workspace).model, seed=settings['seed'], **args)
        if count:
            calibrate_batchnorm(model, images.calibration(count), identity_norms=['*.mlp.norm2'])


def trained(settings: Mapping[str, Any], workspace: Workspace) -> Trained:
    """Run a training, resumed after its last epoch, or load a finished one or pretrained weights.

    Raises:
        BlockingIOError: Another process runs it and the workspace does not wait.
        OutOfTime: The deadline has passed.
    """
    if 'file' in settings:
        cfg = {'file': str(workspace.weights_dir / settings['file'])}
        if 'num_classes' in settings['model_args']:  # timm would take another number for a new classifier
            cfg['num_classes'] = settings['model_args']['num_classes']
        model = timm.create_model(
            settings['model'], pretrained=True, **settings['model_args'], pretrained_cfg_overlay=cfg)
        return Trained(model.eval().to(workspace.device), [], 0., {})
    with workspace.training_folder(settings) as folder:
        path, device, columns = folder / 'last.pth', workspace.device, {}
        scales = settings['scales']
        if isinstance(scales, Mapping):
            scales = searched(scales, workspace)
            columns = {f'search ({name})': figure for name, figure in _figures(scales, settings).items()}
        if settings['average_scales']:
            scales = scales.mean_over_channels()
        if device.type == 'cpu':
            set_fused_attn(not settings['amp'])  # torch's fused attention is slow in bfloat16 on a CPU
            if not torch.cpu._is_avx512_bf16_supported():  # float32 is fifty times as fast; Muon has no option for it
                muon.zeropower_via_newtonschulz = partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
        random_seed(settings['seed'])
        model = build(settings, scales)
        state = dict(epoch=0, curve=[], seconds=0.)
        if path.is_file():
            state = read_training_state(path, dict(settings=settings), 'training')
            model.load_state_dict(state['model'])
        model.to(device, memory_format=torch.channels_last if settings['channels_last'] else torch.contiguous_format)
        if 'optimizer' in state or not path.is_file():
            _train(model, state, path, settings, workspace)
        if 'held-out' in state:
            columns['held-out'] = state['held-out']
        return Trained(model.eval(), state['curve'], round(state['seconds'] / 60, 2), columns)


def _train(
        model: nn.Module,
        state: Dict[str, Any],
        path,
        settings: Mapping[str, Any],
        workspace: Workspace,
) -> None:
    """Train from ``state``, saved after the last epoch, to the end and write the result without the optimizer."""
    device, epochs = workspace.device, settings['epochs']
    workspace.check_time()
    images = Images(workspace, settings, device)
    if not state['epoch']:
        _start(model, settings, workspace, images)
    teacher = None if settings['teacher'] is None else trained(settings['teacher'], workspace).model
    loader = images.training()
    optimizer = create_optimizer_v2(
        model, opt=settings['opt'], lr=settings['lr'], weight_decay=settings['weight_decay'], **settings['opt_args'])
    if 'optimizer' in state:
        optimizer.load_state_dict(state['optimizer'])
    scheduler, _ = create_scheduler_v2(
        optimizer, sched='cosine', num_epochs=epochs, warmup_epochs=min(settings['warmup_epochs'], epochs - 1),
        warmup_lr=settings['warmup_lr'], step_on_epochs=False, updates_per_epoch=len(loader))
    if device.type != 'cpu':  # load libraries and kernels outside the measured time
        copy.deepcopy(model)(next(iter(images.validation()))[0]).sum().backward()
    begun = _clock(device)

    def after_epoch(epoch: int) -> None:
        nonlocal begun
        state['seconds'] += _clock(device) - begun
        state['curve'].append(round(evaluate(model, images.validation(), device)[1], 2))
        if settings['holdout'] and epoch == epochs:
            state['held-out'] = round(evaluate(model, images.held_out(), device)[1], 2)
        model.train()
        state.update(settings=dict(settings=settings), epoch=epoch, model=model.state_dict())
        write_training_state(path, {**state, 'optimizer': optimizer.state_dict()})
        if epoch < epochs:
            workspace.check_time()
        begun = _clock(device)

    fit(
        model, optimizer, scheduler, loader, epochs, start=state['epoch'], device=device, teacher=teacher,
        smoothing=settings['smoothing'], clip_grad=settings['clip_grad'], channels_last=settings['channels_last'],
        amp_dtype=_amp_dtype(settings), seed=settings['seed'], after_epoch=after_epoch, description=path.parent.name,
        progress=False)
    state.pop('optimizer', None)
    write_training_state(path, state)


def train(settings: Mapping[str, Any], workspace: Workspace) -> Dict[str, Any]:
    """Row of a training: accuracy, time, and size of the model and of its folded form."""
    result = trained(settings, workspace)
    row = {'top-1': result.curve[-1], 'minutes': result.minutes, **result.columns}
    forms = {'': result.model, ' folded': folded_copy(result.model)}
    for form, model in forms.items():
        sizes = {
            f'params{form} (M)': round(count_params(model) / 1e6, 3),
            f'MACs{form} (M)': round(count_macs(model, (3, *[settings['img_size']] * 2)).total / 1e6, 2)}
        if not form or list(sizes.values()) != [row['params (M)'], row['MACs (M)']]:
            row.update(sizes)
    return {**row, 'curve': result.curve}


def compare(settings: Mapping[str, Any], workspace: Workspace) -> Dict[str, Any]:
    """Row of two searches of a network: mean relative change of the scales of the first in percent, and its correlation
    with that of the second over all channels.
    """
    start = Scales.initial(build(settings['scales'], 'init'))
    changes = torch.stack([
        torch.cat([(scales[layer][branch] / start[layer][branch] - 1).flatten()
                   for layer in start for branch in start[layer]])
        for scales in (searched(settings[key], workspace) for key in ('scales', 'other'))])
    return {
        'moved %': round(100 * changes[0].abs().mean().item(), 2),
        'correlation': round(torch.corrcoef(changes)[0, 1].item(), 3)}
