"""Folding, and the sums of branches, on Apple's MPS, which has no float64; a TorchFunctionMode imitates it."""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.convert.multi_branch import FAMILIES, build
from tests.helpers import randomize_, relative, same_weights
from timm_rep.convert.linear_sums import find_linear_sums
from timm_rep.convert.repopt import _take_function
from timm_rep.layers import RepOptConv


class OnMps(torch.Tensor):
    """A tensor of the CPU that says that it is on 'mps'."""
    device = property(lambda self: torch.device('mps', 0))
    __torch_function__ = torch._C._disabled_torch_function_impl


class Mps(TorchFunctionMode):
    """Keeps the tensors of 'mps' there, and refuses float64 and operands on both devices, as torch does there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, everything = func.__name__, (args, kwargs or {})
        values = tree_flatten(everything)[0]
        devices = {x.type for x in values if isinstance(x, torch.device)}
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        ours = any(isinstance(x, OnMps) for x in tensors)
        if name not in ('copy_', 'to') and ours and any(x.ndim and not isinstance(x, OnMps) for x in tensors):
            raise RuntimeError(f'{name}: expected all tensors to be on the same device, mps or cpu')
        args, kwargs = tree_map(lambda x: torch.device('cpu') if isinstance(x, torch.device) else x, everything)
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        if name in ('copy_', '__set__') or not isinstance(result, torch.Tensor):
            return result
        is_mps = 'mps' in devices or (ours and not devices and name != 'cpu')
        if is_mps and result.dtype == torch.float64:
            raise TypeError(f"{name}: cannot convert a MPS Tensor to float64, which the MPS framework doesn't support")
        return result.as_subclass(OnMps if is_mps else torch.Tensor)


def set_class(model, cls):
    """Moves a model to 'mps' or back."""
    for module in model.modules():
        for tensors in module._parameters, module._buffers:
            for name, x in tensors.items():
                if x is not None:
                    moved = x.detach().as_subclass(cls)
                    tensors[name] = nn.Parameter(moved, x.requires_grad) if isinstance(x, nn.Parameter) else moved


def on_mps(model, call):
    """Call a function while a model is on 'mps', where all of it stays."""
    with Mps():
        set_class(model, OnMps)
        call()
        assert all(isinstance(x, OnMps) for x in (*model.parameters(), *model.buffers()))
        set_class(model, torch.Tensor)


@pytest.mark.parametrize('name,kwargs', [
    ('repa_deit_tiny', dict(depth=1, img_size=32)),
    ('repopt_vgg_a0', dict(scales='init')),
    ('repopt_vgg_a0', dict(scales='init', structure='csla')),
    ('repopt_vgg_a0', dict(scales='init', structure='search')),
], ids=str)
def test_fold(name, kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).eval()
    randomize_(model)
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    on_mps(model, model.reparameterize)
    assert relative(model(x), expected) < 1e-4


@pytest.mark.parametrize('family', FAMILIES)
def test_sums_of_branches(family):
    """Their kernels and statistics, written to a layer by ``convert_to_repopt``."""
    model = build(family)
    sums = find_linear_sums(model)[0]
    declared = [linear_sum.csla(1.) for linear_sum in sums]
    layers = nn.ModuleList(
        RepOptConv(csla, norm=copy.deepcopy(linear_sum.norm)) for csla, linear_sum in zip(declared, sums))
    expected = copy.deepcopy(layers)

    def write(layers):
        for layer, csla, linear_sum in zip(layers, declared, sums):
            _take_function(layer, linear_sum, linear_sum.kernel(csla))

    write(expected)
    on_mps(nn.ModuleList([model, layers]), lambda: write(layers))
    assert same_weights(layers, expected)
