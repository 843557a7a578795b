"""Shared by the tests: paths, tiny models, random weights and inputs, comparisons, subprocesses."""
import csv
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.multiprocessing import start_processes
from torch.torch_version import TorchVersion

from timm_rep.layers import CslaBlock, RePaMlp
from timm_rep.scales import Scales

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / 'scripts'

# smallest arguments with at least two blocks in a stage, by prefix of the model's name
TINY = {
    'repa_deit': dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5),
    'repa_vit': dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5),
    # the second block of each stage is shifted if its map is larger than the window
    'repa_swin': dict(
        img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4), num_classes=5, drop_path_rate=0.),
    'repa_mixer': dict(img_size=64, num_blocks=3, embed_dim=24, num_classes=5),
    'repa_poolformer': dict(depths=(1, 2, 1), dims=(16, 24, 32), num_classes=5),
    'repa_lvvit': dict(img_size=64, embed_dim=48, depth=3, num_heads=3, num_classes=5),
    'lvvit': dict(img_size=64, embed_dim=48, depth=3, num_heads=3, num_classes=5),
    # six blocks, two of them with an identity
    'repopt_vgg': dict(depths=(1, 2, 2, 1), widths=(8, 16, 24, 32), stem_width=8, num_classes=5),
    # four blocks: without and with stride and squeeze-and-excite, two with a convolutional shortcut
    'repopt_ghostnet': dict(
        cfgs=(((3, 8, 16, 0, 1),), ((5, 24, 24, .25, 2),), ((3, 20, 24, .25, 1), (3, 28, 24, 0, 1))),
        width=1., num_classes=5, drop_rate=0.),
}


def tiny(name, seed=0, **kwargs):
    """A model of this package with the arguments in TINY, initialized from a seed. Other arguments take precedence."""
    torch.manual_seed(seed)
    args = next(args for prefix, args in TINY.items() if name.startswith(prefix))
    return timm.create_model(name, **{**args, **kwargs})


def images(n=2, size=64, seed=1, **kwargs):
    """Normally distributed images (n, 3, size, size)."""
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed), **kwargs)


needs_recorded_args = pytest.mark.skipif(
    not hasattr(timm.models, 'get_model_args'), reason='timm records the arguments of a model since 1.0.31')
needs_torch_2_6 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 6), reason='torch 2.5 fixes the batch size of exported programs, or crashes')


def save_model(model, folder):
    """timm's save_for_hf(), which records the arguments of the model itself since 1.0.31."""
    model.state_dict()  # converted models bring their arguments up to date
    args = {} if hasattr(timm.models, 'get_model_args') else {'model_args': model._model_args}
    timm.models.save_for_hf(model, str(folder), safe_serialization=True, **args)


def relative(x, reference):
    """Largest absolute difference over the largest absolute value of the reference."""
    return ((x - reference).abs().max() / reference.abs().max()).item()


def same_weights(a, b):
    """Whether two modules or state dicts have equal keys and values."""
    a, b = (x.state_dict() if isinstance(x, nn.Module) else x for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def wild_(mlp, seed=0, log_var=(-8, 8)):
    """Fill a RePaMlp with random weights, negative gammas, and running variances of 10 ** log_var."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in mlp.named_parameters():
            scale = 1. if 'norm' in name or 'ls' in name else p[0].numel() ** -0.5 if p.dim() > 1 else len(p) ** -0.5
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * scale)
        for norm in (mlp.norm1, mlp.norm2):
            shape = norm.running_mean.shape
            norm.running_mean.copy_(torch.randn(shape, generator=g) * 3)
            norm.running_var.copy_(10 ** torch.empty(shape).uniform_(*log_var, generator=g))
    return mlp


@torch.no_grad()
def randomize_(model):
    """Fill RePaMlps, 2-D BatchNorms and scales of CSLA blocks with random values; returns the model in eval mode."""
    g = torch.Generator().manual_seed(1)
    mlps = [module for module in model.modules() if isinstance(module, RePaMlp)]
    inside = {module for mlp in mlps for module in mlp.modules()}
    for i, mlp in enumerate(mlps):
        wild_(mlp, i, log_var=(-1, 1))
    for module in model.modules():
        if module in inside:
            continue
        if isinstance(module, nn.BatchNorm2d):
            n = module.num_features
            module.weight.copy_(torch.randn(n, generator=g))
            module.bias.copy_(torch.randn(n, generator=g))
            module.running_mean.copy_(torch.randn(n, generator=g))
            module.running_var.copy_(torch.randn(n, generator=g).exp())
        elif isinstance(module, CslaBlock):
            for scale in module.scales.values():
                scale.copy_(torch.randn(len(scale), generator=g))
    return model.eval()


def normal_scales(model, seed=0):
    """Normally distributed scales for a RepOpt model, about half of them negative."""
    g = torch.Generator().manual_seed(seed)
    return Scales({name: {branch: torch.randn(len(scale), generator=g) for branch, scale in branches.items()}
                   for name, branches in Scales.ones(model).items()})


def run(command, **kwargs):
    """Run a command and return its output, stderr included. The test fails with the output if the command does."""
    command = [str(part) for part in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)
    assert done.returncode == 0, f'{" ".join(command)}\n{done.stdout[-20000:]}'
    return done.stdout


def torchrun(processes, *command, **env):
    """Run a script, or with '--no-python' a command, in several processes of one thread each; returns the output."""
    return run(
        [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', processes, *command],
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), **env})


# processes are forked from a server that has imported this package, so that each starts within milliseconds
multiprocessing.set_forkserver_preload(['timm_rep', 'tests.helpers'])


def in_processes(count, fn, *args):
    """Call fn(*args) in a gloo process group of as many processes, on loopback.

    Args:
        count: Number of processes.
        fn: Function at the top level of a module.
        args: Its arguments, picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_in_group, (count, f'file://{folder}/group', fn, args), count, start_method='forkserver')


def _in_group(rank, count, group, fn, args):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=group, rank=rank, world_size=count)
    try:
        fn(*args)
    finally:
        dist.destroy_process_group()


def read_predictions(path):
    """(file, class, predicted class) of every line of predictions.csv, of a published model."""
    with path.open(encoding='utf-8', newline='') as file:
        return [(name, int(target), int(predicted)) for name, target, predicted in list(csv.reader(file))[1:]]
