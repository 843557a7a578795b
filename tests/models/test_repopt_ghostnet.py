import math
from functools import partial
from types import MappingProxyType

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.repghost import RepGhostNet
from timm.optim import create_optimizer_v2

import timm_rep
from tests import helpers
from tests.helpers import TINY, images, normal_scales, randomize_, relative
from tests.models import contract
from tests.models.contract import RepOptContract
from tests.reference import grad_mult
from timm_rep.layers import CslaConv2d, csla_layers
from timm_rep.optim import RepAdamW, RepSGD
from timm_rep.scales import Scales

WIDTHS = ['050', '058', '080', '100', '111', '130', '150', '200']
STRUCTURES = ['target', 'search', 'csla']
tiny = partial(helpers.tiny, 'repopt_ghostnet_050')


def trained(**kwargs):
    return randomize_(tiny(**kwargs))


def test_registered():
    assert timm.list_models(module='repopt_ghostnet') == [f'repopt_ghostnet_{w}' for w in WIDTHS]


@pytest.mark.parametrize('width', [
    width if width in ('050', '200') else pytest.param(width, marks=pytest.mark.slow) for width in WIDTHS])
def test_architecture_is_timms_repghostnet(width):
    """Parameters are as in RepGhostNet without fusion layers; folded, as in the folded RepGhostNet."""
    model = timm.create_model(f'repopt_ghostnet_{width}', device='meta')
    without = timm.create_model(f'repghostnet_{width}', reparam=False, device='meta')
    assert [(k, v.shape) for k, v in model.state_dict().items()] == [
        (k, v.shape) for k, v in without.state_dict().items()]
    assert [f['reduction'] for f in model.feature_info] == [f['reduction'] for f in without.feature_info]
    folded = timm.create_model(f'repghostnet_{width}', device='meta')
    folded.convert_to_deploy()
    model.convert_to_deploy()
    assert model.reparameterized
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in folded.state_dict().items()}


def test_scales_before_the_search():
    """Appendix B, counted over modules: two a block, from 1 again where the shortcut is not an identity."""
    model = timm.create_model('repopt_ghostnet_050', structure='search', device='meta')
    layers = csla_layers(model)
    assert len(layers) == 32
    assert all(layer.structure == 'search' for layer in layers.values())

    def initial(stage, block, ghost):
        return layers[f'blocks.{stage}.{block}.ghost{ghost}.cheap_operation.0'].csla.initial_scale

    for stage, block, ghost, index in [
        (0, 0, 1, 1), (1, 0, 2, 2), (2, 0, 1, 3), (6, 0, 1, 3), (6, 2, 2, 8), (6, 3, 1, 1), (6, 4, 2, 4), (8, 3, 2, 10),
    ]:
        assert initial(stage, block, ghost) == math.sqrt(2 / (index + 1))
    assert all([b.name for b in layer.csla.branches] == ['conv3x3', 'identity'] for layer in layers.values())
    assert all(layer.csla.groups == layer.csla.out_channels for layer in layers.values())


def test_target_has_the_multipliers_and_kernels_of_its_scales():
    scales = normal_scales(tiny(), seed=0)
    model = tiny(scales=scales)
    for name, layer in csla_layers(model).items():
        assert type(layer) is CslaConv2d
        expected = grad_mult(layer.weight.shape, [('conv3x3', (3, 3)), ('identity', None)], scales[name], 2)
        torch.testing.assert_close(layer.grad_mult.dense('squared', torch.float64), expected)
        # one plus, and around it, a kernel of nine entries as torch draws it, scaled
        kernel = layer.weight.detach().squeeze(1).clone()
        kernel[:, 1, 1] -= 1
        limit = scales[name]['conv3x3'].abs()[:, None, None] / 3
        assert (kernel.abs() <= limit * 1.0001 + 1e-6).all()
        assert kernel.abs().max() > 0
    plain = tiny(scales=scales, reinit=False)
    assert all(layer.weight.abs().max() <= 1 / 3 for layer in csla_layers(plain).values())


@pytest.mark.parametrize('kwargs', [
    dict(), dict(structure='search'), dict(structure='csla'), dict(in_chans=1), dict(width=.3, structure='search'),
], ids=str)
def test_reparameterize_is_exact(kwargs):
    x = images()[:, :kwargs.get('in_chans', 3)]
    contract.check_reparameterize(trained(**kwargs), partial(tiny, **kwargs), x)


@torch.no_grad()
def test_folded_weights_are_timms():
    """A folded model's checkpoint is one of timm's folded RepGhostNet."""
    model = trained().reparameterize()
    timms = RepGhostNet(**TINY['repopt_ghostnet']).eval()
    timms.convert_to_deploy()
    timms.load_state_dict(model.state_dict())
    assert relative(timms(images()), model(images())) < 1e-6


@pytest.mark.parametrize('name,structure', [('repopt_ghostnet_hs', 'search'), ('repopt_ghostnet_target', 'target')])
@torch.no_grad()
def test_recorded_outputs(recorded, name, structure):
    tensors, config = recorded(name)
    assert config == {'width': .1, 'mode': 'hs' if structure == 'search' else 'target', 'num_classes': 10}
    model = timm.create_model('repopt_ghostnet_050', width=.1, num_classes=10, structure=structure)
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    assert timm_rep.load_released(model, weights) is model
    model.eval()
    assert relative(model(tensors['input']), tensors['output']) < 1e-5
    assert relative(model.reparameterize()(tensors['input']), tensors['output']) < 1e-5
    other = timm.create_model(
        'repopt_ghostnet_050', width=.1, num_classes=10, structure='target' if structure == 'search' else 'search')
    with pytest.raises(RuntimeError, match=r'(?s)fits RepOptGhostNet.*blocks\.0\.0\.ghost1'):
        timm_rep.load_released(other, weights)


@pytest.mark.parametrize('rep,plain,args,tolerance', [
    (RepSGD, torch.optim.SGD, dict(lr=.02, momentum=.9, weight_decay=1e-3, nesterov=True), 1e-10),
    pytest.param(
        RepAdamW, torch.optim.AdamW, dict(lr=1e-3, weight_decay=.05, eps=1e-16), 1e-6, marks=pytest.mark.slow),
], ids=['sgd', 'adamw'])
def test_csla_is_gr_end_to_end(rep, plain, args, tolerance):
    scales = normal_scales(tiny(), seed=0)
    csla = tiny(structure='csla', scales=scales, dtype=torch.float64)
    target = tiny(scales=scales, dtype=torch.float64)
    with torch.no_grad():
        ours = csla_layers(target)
        for name, block in csla_layers(csla).items():
            ours[name].weight.copy_(block.equivalent_kernel())
        rest = {k: v for k, v in csla.state_dict().items() if '.cheap_operation.0.' not in k}
        assert not target.load_state_dict(rest, strict=False).unexpected_keys
    optimizers = [plain([p for p in csla.parameters() if p.requires_grad], **args), rep(target.parameters(), **args)]
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, y = torch.randn(8, 3, 32, 32, generator=g, dtype=torch.float64), torch.randint(0, 5, (8,), generator=g)
        outputs = [csla(x), target(x)]
        for optimizer, output in zip(optimizers, outputs):
            optimizer.zero_grad()
            F.cross_entropy(output, y).backward()
            optimizer.step()
    assert relative(outputs[1], outputs[0]) < tolerance
    for name, block in csla_layers(csla).items():
        assert relative(ours[name].weight, block.equivalent_kernel()) < tolerance


def test_search_finds_scales_that_a_model_takes():
    data = torch.utils.data.TensorDataset(images(32, 32), torch.arange(32) % 5)
    scales = timm_rep.hyper_search(
        'repopt_ghostnet_050', torch.utils.data.DataLoader(data, batch_size=16, shuffle=True), epochs=2,
        warmup_epochs=0, progress=False, **TINY['repopt_ghostnet'])
    assert scales['blocks.1.0.ghost1.cheap_operation.0']['identity'].std() > 0
    model = tiny(scales=scales)
    assert timm_rep.attach_grad_mults(model, scales) is model
    assert Scales.initial(model).keys() == scales.keys()


def test_refusals():
    for kwargs, error, match in [
        (dict(structure='train'), ValueError, r"'target', 'search' or 'csla', got 'train'"),
        (dict(width=0), ValueError, 'width must be positive'),
        (dict(reparam=True), TypeError, 'reparam'),
        (dict(structure='search', scales=False), ValueError, "scales .*structure='search'"),
        (dict(scales=normal_scales(tiny(width=2.), 0)), ValueError, r'(?s)scales of RepOptGhostNet.*ghost1.*24'),
        (dict(not_an_argument=1), TypeError, 'not_an_argument'),
    ]:
        with pytest.raises(error, match=match):
            tiny(**kwargs)
    with pytest.raises(RuntimeError, match=r'deploy structure.*reparameterized=True'):
        tiny().load_state_dict(tiny(reparameterized=True).state_dict())
    with pytest.raises(RuntimeError, match=r"search or csla structure.*structure='search'"):
        tiny().load_state_dict(tiny(structure='search').state_dict())


@pytest.mark.slow
@pytest.mark.parametrize('opt', ['repsgd', 'repadamw'])
def test_training_lowers_the_loss(opt):
    model = tiny().train()
    optimizer = create_optimizer_v2(model, opt=opt, lr=.05 if opt == 'repsgd' else 3e-3, weight_decay=1e-5)
    x, target = images(20), torch.arange(20) % 5
    losses = contract.train(model, optimizer, x, target, steps=25)
    assert losses[-1] < .5 * losses[0]


class TestContract(RepOptContract):
    tiny, trained_form = map(staticmethod, (tiny, trained))
    block = 'blocks.2.1'
    layers = 1 + 4 + 1 + 1  # stem, blocks, last convolutions, classifier
    taps = ((2, 16, 32, 32), (2, 24, 16, 16))
    feature_args = MappingProxyType(dict(out_indices=(0, 1)))
    features = ((16, 2, (2, 16, 32, 32)), (24, 4, (2, 24, 16, 16)))
    arguments = (
        (dict(num_classes=0), (2, 1280)),
        (dict(in_chans=1), (2, 5)),
        (dict(drop_rate=.1, width=.5), (2, 5)),
    )


def test_names_of_the_config():
    contract.check_cfg_names(timm.list_models(module='repopt_ghostnet'))
