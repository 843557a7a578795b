"""Models some of whose layers have lost their GradMults are refused, with the names of the layers."""
import copy
import pickle

import pytest
import torch
import torch.nn as nn
from timm.utils import ModelEmaV3
from torch.nn.utils import parametrizations, parametrize, prune

import timm_rep
from tests.helpers import normal_scales, tiny
from timm_rep.layers import csla_layers
from timm_rep.optim import RepAdamW, RepSGD, set_grad_mult

OPTIMIZERS = [RepSGD, RepAdamW]
NAME = 'stages.1.1'


@pytest.fixture
def model():
    model = tiny('repopt_vgg_a0')
    return timm_rep.attach_grad_mults(model, normal_scales(model, seed=1))


def layer(model):
    """A layer and its name."""
    return next((name, layer) for name, layer in csla_layers(model).items() if name.startswith(NAME))


def assigned(model):
    """The model with the tensors of its own state dict in place of its parameters."""
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


@pytest.mark.parametrize('copied', [
    lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: copy.deepcopy(m).bfloat16(),
    torch.compile, nn.DataParallel, lambda m: ModelEmaV3(m).module, assigned,
], ids=['itself', 'deepcopy', 'pickle', 'dtype', 'compile', 'DataParallel', 'EMA', 'state dict'])
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_one_of_the_parameters_was_replaced(model, copied, optimizer):
    model = copied(model)
    optimizer(model.parameters())
    mults = [conv.grad_mult for conv in csla_layers(model).values()]
    assert None not in mults
    name, conv = layer(model)
    conv._parameters['weight'] = nn.Parameter(conv.weight.detach().clone())
    with pytest.raises(ValueError, match=name) as e:
        optimizer(model.parameters())
    assert not any(other in str(e.value) for other in csla_layers(model) if other != name)
    optimizer(model.parameters(), strict=False)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_some_parameters_are_copies(model, optimizer):
    """A trainer keeps float32 copies of the parameters that are in half precision, and optimizes them."""
    name, conv = layer(model)
    conv.bfloat16()
    params = [p.detach().float().requires_grad_() if p.dtype == torch.bfloat16 else p for p in model.parameters()]
    with pytest.raises(ValueError, match=name):
        optimizer(params)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_other_parameters_of_equal_values(model, optimizer):
    """Of a second model with the same weights, or before a checkpoint is loaded: nothing is lost."""
    twin = timm_rep.attach_grad_mults(copy.deepcopy(model), None)
    optimizer([*model.parameters(), *twin.parameters()])
    nets = [model, tiny('repopt_ghostnet_050')]
    timm_rep.attach_grad_mults(nets[1], 'init')
    for net in nets:
        for param in net.parameters():
            nn.init.zeros_(param)
        optimizer(net.parameters())


@pytest.mark.parametrize('change', [
    lambda conv: parametrize.register_parametrization(conv, 'weight', nn.Identity()),
    lambda conv: prune.identity(conv, 'weight'),
    parametrizations.weight_norm,
], ids=['parametrization', 'pruning', 'weight_norm'])
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_a_parametrization_after_attaching(model, change, optimizer):
    """The GradMult is on a tensor then from which the weight is computed, or on none."""
    existing = optimizer(model.parameters())
    name, conv = layer(model)
    change(conv)
    with pytest.raises(ValueError, match=name):
        optimizer(model.parameters())
    if change is parametrizations.weight_norm:
        return  # the optimizer does not have its parameters
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=name):
        existing.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_all_parameters_were_replaced_later(model, optimizer):
    """A wrapper gives an existing optimizer its own parameters, as accelerate does with FSDP2."""
    existing, relaxed = optimizer(model.parameters()), optimizer(model.parameters(), strict=False)
    copies = {id(p): nn.Parameter(p.detach().clone()) for p in model.parameters()}
    for module in model.modules():
        for name, param in module._parameters.items():
            module._parameters[name] = param if param is None else copies[id(param)]
    for group in (*existing.param_groups, *relaxed.param_groups):
        group['params'] = [copies[id(p)] for p in group['params']]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match='attach_grad_mults'):
        existing.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    relaxed.step()
    timm_rep.attach_grad_mults(model, 'ones')
    existing.step()
    timm_rep.attach_grad_mults(model, None)  # on purpose
    existing.step()


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_the_optimizer_got_copies_later(model, optimizer):
    """A trainer keeps copies of the parameters in the optimizer, and the model has its own."""
    existing = optimizer(model.parameters())
    for group in existing.param_groups:
        group['params'] = [nn.Parameter(p.detach().clone()) for p in group['params']]
        for param in group['params']:
            param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match='the model were replaced'):
        existing.step()


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_one_parameter_was_replaced_later(model, optimizer):
    """In its layer and in the optimizer."""
    name, conv = layer(model)
    existing, relaxed = optimizer(model.parameters()), optimizer(model.parameters(), strict=False)
    old, new = conv.weight, nn.Parameter(conv.weight.detach().clone())
    conv._parameters['weight'] = new
    for group in (*existing.param_groups, *relaxed.param_groups):
        group['params'] = [new if p is old else p for p in group['params']]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=name) as e:
        existing.step()
    assert not any(other in str(e.value) for other in csla_layers(model) if other != name)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    relaxed.step()
    timm_rep.attach_grad_mults(model, 'ones')
    existing.step()
    conv.set_scales(None)  # on purpose
    existing.step()


def test_a_compiled_layer_is_copied(model):
    """Without its compiled call, which has the weights of the original."""
    _, conv = layer(model)
    conv.compile(backend='eager')
    x = torch.randn(1, conv.in_channels, 4, 4)
    assert conv(x).abs().max() > 0
    for copied in copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)):
        with torch.no_grad():
            copied.weight.zero_()
        assert not copied(x).any()
        assert torch.equal(copied.grad_mult.dense('squared'), conv.grad_mult.dense('squared'))


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_layers_may_be_left_out(model, optimizer):
    """Frozen layers, an optimizer for each part, layers whose scales were removed, and a copy of the model."""
    other = copy.deepcopy(model)
    optimizer([p for name, p in model.named_parameters() if not name.startswith(NAME)])
    optimizer(model.stages[1].parameters())
    optimizer([*model.parameters(), *other.parameters()])
    layer(model)[1].set_scales(None)
    optimizer(model.parameters())
    del model
    optimizer(other.parameters())
    name, conv = layer(other)
    set_grad_mult(conv.weight, None)
    with pytest.raises(ValueError, match=name):
        optimizer(other.parameters())


def test_a_part_of_a_copied_model(model):
    """A copied layer brings no other layers of its model with it."""
    _, conv = layer(model)
    alone = copy.deepcopy(conv)
    assert list(alone.grad_mult.layers.values()) == [alone]
    RepSGD(alone.parameters())
