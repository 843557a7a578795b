"""Second part of the demo: a deep stack of plain convolutions, trained by SGD and RepSGD at four learning rates."""
from typing import Any, Dict, List, NamedTuple

import torch
import torch.nn.functional as F
from torch.optim import SGD

from timm_rep import attach_grad_mults
from timm_rep.layers import csla_layers
from timm_rep.optim import RepSGD
from timm_rep.scales import Scales
from timm_rep.utils.training import evaluate

from . import training

# as many convolutions as in RepOpt-VGG-B1, 28, but narrow and at low resolution for two CPU cores
_MODEL_ARGS = dict(depths=(4, 6, 16, 1), widths=(16, 24, 32, 64), stem_width=16, strides=(2, 1, 2, 1, 2))
_LEARNING_RATES = (0.02, 0.06, 0.2, 0.6)  # around the best of each: SGD is worse below, RepSGD above
# optimizer and scales by label; with scales, the kernels start as the sums of the branches of the CSLA net
_TRAININGS = {'SGD': ('sgd', False), 'SGD, kernels of RepSGD': ('sgd', 'init'), 'RepSGD': ('repsgd', 'init')}
_OPTIMIZER_ARGS = dict(momentum=0.9, weight_decay=4e-5)  # as in the paper
# a stem and six blocks, for training in float64
_SMALL_ARGS = dict(_MODEL_ARGS, depths=(1, 2, 2, 1))
_STEPS = 50


class RepOptResult(NamedTuple):
    """Results of the second part, by optimizer: 'SGD' and 'RepSGD'.

    Attributes:
        accuracy: Accuracy in percent of the validation images, by learning rate; also of 'SGD, kernels of RepSGD',
            which starts from the same weights as RepSGD.
        csla_difference: Largest difference between the logits of the plain and the CSLA net, relative to the largest
            logit, for each of 50 steps; torch's SGD trains the CSLA net on the same batches.
    """
    accuracy: Dict[str, Dict[float, float]]
    csla_difference: Dict[str, List[float]]


def run_repopt(
        train_set: training.Images,
        val_set: training.Images,
        device: torch.device,
        seed: int,
        epochs: int,
) -> RepOptResult:
    """Train one net with SGD and with RepSGD, and compare both with the CSLA net at each step."""
    accuracy: Dict[str, Dict[float, float]] = {label: {} for label in _TRAININGS}
    for lr in _LEARNING_RATES:
        for label, (opt, scales) in _TRAININGS.items():
            model = training.create_model('repopt_vgg_b1', seed, device, scales=scales, **_MODEL_ARGS)
            loader = training.create_loader_for(train_set, model, is_training=True)
            training.train(
                f'plain VGG, {label}, lr {lr:g}', model, loader, epochs, device, opt=opt, lr=lr, **_OPTIMIZER_ARGS)
            val_loader = training.create_loader_for(val_set, model, is_training=False)
            accuracy[label][lr] = evaluate(model, val_loader, device)[1]
    return RepOptResult(accuracy, _csla_difference(train_set, seed))


def _csla_difference(train_set: training.Images, seed: int) -> Dict[str, List[float]]:
    cpu = torch.device('cpu')
    args: Dict[str, Any] = dict(lr=0.1, **_OPTIMIZER_ARGS)
    csla = training.create_model('repopt_vgg_b1', seed, cpu, scales='init', structure='csla', **_SMALL_ARGS).double()
    nets, optimizers = {}, {'csla': SGD([p for p in csla.parameters() if p.requires_grad], **args)}
    for label, cls in (('RepSGD', RepSGD), ('SGD', SGD)):
        net = training.create_model('repopt_vgg_b1', seed, cpu, scales='init', **_SMALL_ARGS).double()
        net.load_state_dict({k: v for k, v in csla.state_dict().items() if '.conv.' not in k}, strict=False)
        for name, layer in csla_layers(net).items():
            layer.weight.data = csla_layers(csla)[name].equivalent_kernel()
        attach_grad_mults(net, Scales.from_model(csla) if cls is RepSGD else None)
        nets[label], optimizers[label] = net, cls(net.parameters(), **args)
    loader = training.create_loader_for(train_set, csla, is_training=True)
    differences: Dict[str, List[float]] = {label: [] for label in nets}
    while len(differences['SGD']) < _STEPS:
        for images, targets in loader:
            logits = {label: net(images.double()) for label, net in {'csla': csla, **nets}.items()}
            for label, optimizer in optimizers.items():
                optimizer.zero_grad()
                F.cross_entropy(logits[label], targets).backward()
                optimizer.step()
            for label, difference in differences.items():
                expected = logits['csla'].detach()
                difference.append(((logits[label].detach() - expected).abs().max() / expected.abs().max()).item())
    return {label: difference[:_STEPS] for label, difference in differences.items()}
